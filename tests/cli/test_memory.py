"""`sa2va-rl doctor --memory`: what it counts is exact, and what was published comes out again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.random_checkpoint import TINY_SAM2, official_config
from rl_reward_network.cli import doctor, memory
from rl_reward_network.cli.memory import CONTEXT, GIB, count, needed_gib, train_gib
from rl_reward_network.flags import parse
from rl_reward_network.grpo.policy import prepare_model
from rl_reward_network.grpo.settings import GRPOSettings, with_preset
from rl_reward_network.models.ema import trainable_tensors
from rl_reward_network.models.sa2va.checkpoint_sa2va import EMBEDDED, open_checkpoint
from rl_reward_network.models.sa2va.configuration_sa2va import HIERA_L, config_from_original
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration

AS_MEASURED = replace(with_preset(GRPOSettings(), "full", small=False), max_completion_length=24)
# Peak less weights in GiB: docs/results.md, "On a GPU".
CHANGES: list[dict[str, Any]] = [
    {},
    {"activation_checkpointing": True},
    {"optim": "adamw_8bit"},
    {"objective": "supervised"},
]
PUBLISHED = {"1b": (2.7, 2.0, 2.4, 2.5), "4b": (8.4, 6.1, 6.9, 7.5)}


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str]:
    """Exit status and text, the latter in one line."""
    status: object = 0
    try:
        doctor.main(parse(doctor.Args, ["--memory", *words]))
    except SystemExit as stop:
        status = stop.code
    return status, " ".join(capsys.readouterr().out.replace("\u2502", " ").split())


def test_weights_are_those_of_the_file_and_what_trains_is_counted_exactly() -> None:
    checkpoint = open_checkpoint("sa2va-nano")
    config = checkpoint.model_config()
    counted = count(config, "cpu", small=True)
    assert counted.weights == sum(tensor.nbytes for tensor in checkpoint.tensors().values())
    model: Any = Sa2VAForConditionalGeneration(config)
    prepare_model(model, 16, 32)
    trained = {name: tensor.nbytes for name, tensor in trainable_tensors(model).items()}
    assert counted.trained == sum(trained.values()) == counted.added, "LoRA, and a reference of the others"


@pytest.mark.parametrize("size", PUBLISHED)
def test_what_was_published_comes_out_again(size: Any) -> None:
    counted = count(config_from_original(official_config(size), HIERA_L, size), "cuda", small=False)
    base = counted.weights / GIB + CONTEXT
    for changes, expected in zip(CHANGES, PUBLISHED[size], strict=True):
        assert train_gib(counted, "cuda", replace(AS_MEASURED, **changes)) - base == pytest.approx(expected, abs=0.1)
    four = train_gib(counted, "cuda", AS_MEASURED, "4bit") - CONTEXT
    assert four == pytest.approx({"1b": 5.0 - 0.7, "4b": 12.5}[size], abs=0.15), "0.7 were left by rows before"


def test_training_needs_more_than_loading_and_each_flag_lowers_it() -> None:
    needed = needed_gib(config_from_original(official_config("tiny-qwen3-vl"), TINY_SAM2, "config.json"), "cuda", True)
    assert needed["load"] < needed["segment"] < needed["train"]
    lowered = [name for name in needed if name.startswith("train --")]
    assert any(name.endswith("--freeze_embeddings") for name in lowered)
    for name in lowered:
        assert needed[name] < needed["train"] or name.endswith(("supervised", "adamw_8bit")), name


def test_the_table_tells_what_fits_and_what_lowers_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(capsys, "--gpu", "0", "--memory_gib", "10")
    assert code == 0
    assert "sa2va-nano on cuda, 10.0 GiB" in text
    assert "does not fit" not in text
    for flag in ("--gradient_checkpointing", "--quantization 4bit", "--batch_size 32 --gradient_accumulation_steps 2"):
        assert f"train {flag}" in text
    code, text = shown(capsys, "--gpu", "-1", "--memory_gib", "0.1")
    assert code == 1
    assert "does not fit" in text
    assert "--quantization" not in text, "it needs a GPU"


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
