"""The command that compares GRPO with the official recipe: its table, its last line and its exit status."""

import re
from pathlib import Path

import pytest

from rl_reward_network.cli import consistency


def test_the_command_prints_the_table_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    consistency.main(consistency.Args(device="cpu"))
    printed = capsys.readouterr().out
    last = re.match(r"consistent: (\d+) of (\d+) items \D+(\d+) differ", printed.splitlines()[-1])
    assert last
    assert int(last[1]) + int(last[3]) == int(last[2]) == 24
    assert "LoRA rank" in printed
    assert "{input}" in printed


def test_the_command_names_what_differs_and_ends_with_1(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        consistency.main(consistency.Args(str(tiny_checkpoint), lora_r=128, lora_alpha=128, device="cpu"))
    assert stopped.value.code == 1
    assert capsys.readouterr().out.strip().splitlines()[-1] == "DIFFERS: LoRA alpha"


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="max_dynamic_patch is 0"):
        consistency.main(consistency.Args(max_dynamic_patch=0))
