"""What `sa2va-rl segment` takes for white in an image above 8 bit."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.cli import segment


def args(**flags: object) -> segment.Args:
    return segment.Args((Path("x.png"),), **flags)  # type: ignore[arg-type]


def test_the_policys_level_goes_before_bits_and_nothing_before_its_own() -> None:
    assert segment.white_level(args(), None) is None
    assert segment.white_level(args(bit_depth=12), None) == 4095
    assert segment.white_level(args(), {"data set": 987, "0123456789ab": 4000}) == 987
    with pytest.raises(ValueError, match="--bit_depth 12: the policy was trained with white at 987; leave it out"):
        segment.white_level(args(bit_depth=12), {"data set": 987})


def test_what_was_taken_for_white_is_said(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grey = np.linspace(0, 1000, 64 * 64).astype(np.uint16).reshape(64, 64)
    grey[5, 5] = 65535
    Image.fromarray(grey).save(tmp_path / "x.png")
    segment.main(segment.Args((tmp_path / "x.png",), str(tiny_checkpoint), device="cpu", max_tiles=1))
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "8 bit" in line] == [
        "x.png: grey of more than 8 bit, white is 999, the 99.9 % point of its pixels; --bit_depth sets it"
    ]
    overlay = np.asarray(Image.open(tmp_path / "x_overlay.png").convert("L"))
    assert overlay.mean() > 100, "not black"
    segment.main(segment.Args((tmp_path / "x.png",), str(tiny_checkpoint), device="cpu", max_tiles=1, bit_depth=16))
    assert "white is 65535\n" in capsys.readouterr().out
