"""`sa2va-rl doctor --memory`: what it counts is exact, and what was published comes out again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.random_checkpoint import TINY_SAM2, official_config
from rl_reward_network.cli import doctor, memory
from rl_reward_network.cli.doctor import MemorySettings
from rl_reward_network.cli.memory import CONTEXT, GIB, complete, count, needed_gib
from rl_reward_network.flags import parse
from rl_reward_network.grpo.policy import prepare_model
from rl_reward_network.models.ema import trainable_tensors
from rl_reward_network.models.sa2va.checkpoint_sa2va import EMBEDDED, open_checkpoint
from rl_reward_network.models.sa2va.configuration_sa2va import HIERA_L, config_from_original
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration

CPU = complete(MemorySettings(device="cpu"), small=True)
AS_MEASURED = replace(complete(MemorySettings(device="cuda"), small=False), max_completion_length=24)
THREE_PAIRS = ("--batch_size", "6", "--num_generations", "2")
SUPERVISED = {"objective": "supervised"}
# Peak less weights in GiB: docs/results.md, "On a GPU".
PUBLISHED: dict[str, list[tuple[dict[str, Any], float]]] = {
    size: list(zip(({}, {"activation_checkpointing": True}, {"optim": "adamw_8bit"}, SUPERVISED), gib, strict=True))
    for size, gib in (("1b", (2.7, 2.0, 2.4, 2.5)), ("4b", (8.4, 6.1, 6.9, 7.5)))
}


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str]:
    """Exit status and text, the latter in one line."""
    status: object = 0
    try:
        doctor.main(parse(doctor.Args, ["--memory", *words]))
    except SystemExit as stop:
        status = stop.code
    return status, " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_weights_are_those_of_the_file_and_what_trains_is_counted_exactly() -> None:
    checkpoint = open_checkpoint("sa2va-nano")
    config = checkpoint.model_config()
    counted = count(config, CPU)
    assert counted.weights == sum(tensor.nbytes for tensor in checkpoint.tensors().values())
    model: Any = Sa2VAForConditionalGeneration(config)
    prepare_model(model, 16, 32)
    trained = {name: tensor.nbytes for name, tensor in trainable_tensors(model).items()}
    assert counted.trained == sum(trained.values()) == counted.added, "LoRA, and a reference of the others"


@pytest.mark.parametrize("size", PUBLISHED)
def test_what_was_published_comes_out_again(size: Any) -> None:
    counted = count(config_from_original(official_config(size), HIERA_L, size), AS_MEASURED)
    base = counted.weights / GIB + CONTEXT
    for changes, expected in PUBLISHED[size]:
        assert needed_gib(counted, replace(AS_MEASURED, **changes))["train"] - base == pytest.approx(expected, abs=0.1)
    four = needed_gib(counted, replace(AS_MEASURED, quantization="4bit"))["train"] - CONTEXT
    assert four == pytest.approx({"1b": 5.0 - 0.7, "4b": 12.5}[size], abs=0.15), "0.7 were left by rows before"


def test_training_needs_more_than_loading_and_more_the_more_it_does() -> None:
    qwen = config_from_original(official_config("tiny-qwen3-vl"), TINY_SAM2, "config.json")
    base = complete(MemorySettings(device="cuda"), small=True)
    usual = needed_gib(count(qwen, base), base)
    assert usual["load"] < usual["segment"] < usual["train"]
    more: list[dict[str, Any]] = [{"encoder": "full"}, {"lora_r": 32}, {"max_completion_length": 48}]
    less: list[dict[str, Any]] = [{"freeze_embeddings": True}, {"per_device_train_batch_size": 8}, {"ema_decay": 0.0}]
    for changes, sign in [(change, 1) for change in more] + [(change, -1) for change in less]:
        changed = replace(base, **changes)
        assert sign * (needed_gib(count(qwen, changed), changed)["train"] - usual["train"]) > 0, changes


def test_the_table_tells_what_fits_and_what_lowers_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(capsys, "--gpu", "0", "--memory_gib", "10")
    assert code == 0
    assert "sa2va-nano on cuda, 10.0 GiB" in text
    assert "does not fit" not in text
    for flag in ("--gradient_checkpointing", "--quantization 4bit", "--batch_size 32 --gradient_accumulation_steps 2"):
        assert flag in text
    code, text = shown(capsys, "--gpu", "-1", "--memory_gib", "0.1", "--gradient_checkpointing", *THREE_PAIRS)
    assert code == 1
    assert "does not fit" in text
    assert "--gradient_checkpointing" not in text
    assert "--batch_size" not in text, "3 pairs are not halved"


def test_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1073741824\n")
    monkeypatch.setattr(memory, "LIMITS", (tmp_path / "memory.max", Path("/nowhere")))
    assert memory.available_gib("cpu") == 1
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="no GPU; give its memory: --memory_gib 24"):
        memory.available_gib("cuda")


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    config = json.loads((EMBEDDED["sa2va-nano"] / "config.json").read_text())
    del config["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path, message in (("nowhere", "no such folder"), (str(tmp_path), "text_config is missing")):
        with pytest.raises(ValueError, match=message):
            doctor.main(parse(doctor.Args, ["--memory", "--gpu", "-1", "--model_path", path]))
