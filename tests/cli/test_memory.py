"""`sa2va-rl doctor --memory`, as its user reads it."""

import re

import pytest

from rl_reward_network.cli import doctor, grpo, memory
from rl_reward_network.cli.compare_parts import parsed
from rl_reward_network.memory import advice

SMALL = ["--memory", "--device", "cpu"]


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str]:
    """Exit status and text, the latter in one line."""
    with pytest.raises(SystemExit) as stop:
        doctor.main(parsed(doctor.Args, [*SMALL, *words]))
    return stop.value.code, " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_each_stage_has_its_memory_and_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(capsys, "--memory_gib", "20")
    assert code == 0
    assert "sa2va-nano on cpu, 20.0 GiB" in text
    assert "needed: 1.25 x the sum of all parts in main memory; 1.1 x and 0.6 GiB on a GPU" in text
    for word in ("load 0.", "segment (steps 1, 2)", "GRPO step", "merge (main memory)", "process 0.6"):
        assert word in text
    assert "GRPO step: sa2va-rl grpo full --model_path sa2va-nano" in text
    assert "does not fit" not in text


def test_a_small_device_gets_lowered_settings_or_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(capsys, "--memory_gib", "1.15", "--lora_r", "8")
    assert code == 0
    assert "--lora_r 8" in text
    assert "--gradient_checkpointing" in text
    assert (found := re.search(r"GRPO step (\S+), lowered (\S+)", text))
    assert float(found[2]) <= 1.15 < float(found[1])
    assert "slower" in text
    code, text = shown(capsys, "--memory_gib", "0.5")
    assert code == 1
    assert "does not fit" in text
    assert "take a smaller model" in text


def test_the_flags_that_are_printed_exist() -> None:
    words = [word for name in memory.TRAINING_FLAGS for word in example(name)]
    args = parsed(grpo.Args, ["full", *words])
    assert (args.lora.lora_r, args.grpo.activation_checkpointing, args.regions.max_dynamic_patch) == (4, True, 2)


def example(name: str) -> list[str]:
    """A flag with a value that differs from the default."""
    values = {"dtype": "bfloat16", "objective": "supervised", "activation_checkpointing": "", "max_dynamic_patch": "2"}
    return [f"--{advice.FLAGS.get(name, name)}", *filter(None, [values.get(name, "4")])]


def test_a_folder_that_is_no_model_is_refused() -> None:
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        doctor.main(parsed(doctor.Args, [*SMALL, "--model_path", "nowhere"]))
