"""The command that converts checkpoints, in both directions."""

from pathlib import Path

import pytest

from rl_reward_network.cli import convert


def test_the_layout_and_the_number_of_tensors_are_printed(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, back = tmp_path / "ours", tmp_path / "back"
    convert.main(convert.Args(str(tiny_checkpoint), ours))
    convert.main(convert.Args(str(ours), back))
    first, second = capsys.readouterr().out.strip().splitlines()
    assert first.startswith("ours: ")
    assert first.endswith(f" tensors in {ours}")
    assert second.startswith("official layout: ")
    assert second.endswith(f" tensors in {back}")
