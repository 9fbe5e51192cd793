"""`sa2va-rl doctor --memory`, as its user reads it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.random_checkpoint import TINY_SAM2, official_config
from rl_reward_network.cli import doctor, grpo, memory
from rl_reward_network.cli.main import main as command
from rl_reward_network.embedded.regions import write_regions
from rl_reward_network.flags import parse
from rl_reward_network.memory import advice
from rl_reward_network.memory.advice import GIB, Fit, MemorySettings, Stage
from rl_reward_network.models.sa2va.checkpoint_sa2va import EMBEDDED, open_checkpoint
from rl_reward_network.models.sa2va.configuration_sa2va import Sa2VAConfig, config_from_original

SMALL_STAGE = Stage("GRPO step", {"weights": 1.0})
SMALL = ["--memory", "--device", "cpu"]


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str]:
    """Exit status and text, the latter in one line."""
    status: object = 0
    try:
        doctor.main(parse(doctor.Args, [*SMALL, *words]))
    except SystemExit as stop:
        status = stop.code
    return status, " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_each_stage_has_its_memory_and_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(capsys, "--memory_gib", "20")
    assert code == 0
    assert "sa2va-nano on cpu, 20.0 GiB" in text
    assert "needed: weights and process, 1.5 x the other parts, and 0.6 GiB more on a GPU" in text
    for word in ("load 0.", "segment (steps 1, 2)", "GRPO step", "merge 0.", "process 0.6"):
        assert word in text
    assert "GRPO step: sa2va-rl grpo full --model_path sa2va-nano" in text
    assert "does not fit" not in text


def test_a_small_device_gets_lowered_settings_or_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(capsys, "--memory_gib", "1.2", "--lora_r", "8", "--images", "4")
    assert code == 0
    assert "--lora_r 8" in text
    assert "--gradient_checkpointing" in text
    assert (found := re.search(r"GRPO step (\S+), lowered (\S+)", text))
    assert float(found[2]) <= 1.2 < float(found[1])
    assert "slower" in text
    lowest = "--batch_size 4 --gradient_checkpointing --dtype bfloat16 --lora_r 8 --segment_batch 1 --images 1"
    code, text = shown(capsys, "--memory_gib", "0.5", *lowest.split())
    assert code == 1
    assert "does not fit" in text
    assert "take a smaller model" in text


def test_flags_that_are_unknown_or_without_effect_are_not_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command(["doctor", *SMALL, "--memory_gb", "1"])
    assert "--memory_gb" in capsys.readouterr().err
    _, text = shown(capsys, "--objective", "supervised", "--ema_decay", "0")
    assert "--objective supervised" in text
    assert "--ema_decay" not in text, "training refuses it"


def test_the_device_may_be_named_as_in_training(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main(parse(doctor.Args, ["--memory", "--gpu", "0", "--memory_gib", "10"]))
    assert "sa2va-nano on cuda, 10.0 GiB" in capsys.readouterr().out


def test_annotated_images_need_a_reward_network(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "fit", lambda predict, settings, *_: Fit(SMALL_STAGE, SMALL_STAGE, settings, [], True))
    images, regions = tmp_path / "images", tmp_path / "regions"
    images.mkdir()
    (images / "annotations.json").write_text("[]")
    write_regions(regions, 1, 1)
    assert (
        f"sa2va-rl grpo full --model_path sa2va-nano --data_root {images} --reward_net NET"
        in (shown(capsys, "--data_root", str(images))[1])
    )
    assert "--reward_net mine" in shown(capsys, "--data_root", str(images), "--reward_net", "mine")[1]
    assert "--reward_net" not in shown(capsys, "--data_root", str(regions))[1]
    assert "--reward_net" not in shown(capsys, "--data_root", str(images), "--objective", "supervised")[1]


def test_merging_may_need_a_smaller_number_format(monkeypatch: pytest.MonkeyPatch) -> None:
    def merging(config: Sa2VAConfig, settings: MemorySettings) -> Stage:
        return Stage("merge", {"weights": GIB * (2.0 if settings.dtype == "bfloat16" else 4.0)})

    monkeypatch.setattr(memory, "merge_stage", merging)
    config = open_checkpoint("sa2va-nano").model_config()
    settings = MemorySettings(device="cpu").of_model(small=True)
    result = memory._merging(config, settings, 3.0)
    assert (result.fits, result.settings.dtype, result.harm) == (True, "bfloat16", ["weights are rounded"])
    assert not memory._merging(config, settings, 1.0).fits
    on_gpu = replace(settings, device="cuda", memory_gib=1.0)
    assert memory._merging(config, on_gpu, 1.0).fits, "the main memory of another machine is not known"


def test_the_flags_that_are_printed_exist() -> None:
    words = [word for name in memory.TRAINING_FLAGS for word in example(name)]
    args = parse(grpo.Args, ["full", *words])
    assert (args.lora.lora_r, args.grpo.activation_checkpointing, args.regions.max_dynamic_patch) == (4, True, 2)
    assert (args.adapters.side_pixels, args.adapters.encoder) == (256, "lora")


def example(name: str) -> list[str]:
    """A flag with a value that differs from the default."""
    values = {"dtype": "bfloat16", "objective": "supervised", "activation_checkpointing": "", "max_dynamic_patch": "2"}
    values |= {
        "quantization": "4bit",
        "freeze_embeddings": "",
        "side_network": "",
        "side_pixels": "256",
        "encoder": "lora",
    }
    return [f"--{advice.FLAGS.get(name, name)}", *filter(None, [values.get(name, "4")])]


def test_a_folder_that_is_no_model_is_refused() -> None:
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        doctor.main(parse(doctor.Args, [*SMALL, "--model_path", "nowhere"]))


@pytest.mark.parametrize("damage", ["missing", "wrong type"])
def test_a_damaged_configuration_is_refused(tmp_path: Path, damage: str) -> None:
    config = json.loads((EMBEDDED["sa2va-nano"] / "config.json").read_text())
    if damage == "missing":
        del config["text_config"]
    else:
        config["text_config"]["hidden_size"] = "128"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: (text_config is missing|damaged)"):
        doctor.main(parse(doctor.Args, [*SMALL, "--model_path", str(tmp_path)]))


def test_tiles_are_no_flag_of_a_model_without_them() -> None:
    settings = MemorySettings(objective="supervised")
    for size, expected in (("tiny", True), ("tiny-qwen3-vl", False), ("tiny-qwen2.5-vl", False)):
        config = config_from_original(official_config(size), TINY_SAM2, "config.json")  # type: ignore[arg-type]
        for row in (memory.SEGMENT, memory.TRAIN):
            assert ("max_dynamic_patch" in row.flags_of(settings, config, False)) == expected
    assert "ema_decay" not in memory.TRAIN.flags_of(settings, config, True)
    assert "max_completion_length" not in memory.TRAIN.flags_of(settings, config, False)
