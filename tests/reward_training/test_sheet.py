import numpy as np
import pytest
from PIL import Image

from rl_reward_network.reward_training.sheet import SCALE, SheetRow, predicted_title, write_sheet


def row(side=30):
    rng = np.random.default_rng(0)
    image, mask = rng.integers(0, 256, (side, side, 3), dtype=np.uint8), rng.random((side, side)) > 0.5
    return SheetRow(image, mask, rng.random((side, side)), ~mask, "Sa2VA", 0.7, (0.6, 0.8), 0.65)


def test_a_sheet_is_a_picture_with_a_line_for_each_mask(tmp_path):
    for count in (1, 3):
        write_sheet(tmp_path / f"{count}.png", [row(), row(50), row()][:count])
    one, three = (Image.open(tmp_path / f"{count}.png") for count in (1, 3))
    assert one.width == three.width
    scale = SCALE * 90  # pixels of the colour bar
    assert three.height - scale == pytest.approx(3 * (one.height - scale), abs=3)
    assert len(np.unique(np.asarray(three.convert("L")))) > 50
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.png", "3.png"]


def test_nothing_to_show_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"sheet.png:"):
        write_sheet(tmp_path / "sheet.png", [])


def test_the_title_has_the_limits_or_says_that_there_are_none():
    assert predicted_title(row()) == "predicted Dice 0.70, [0.60, 0.80]"
    assert predicted_title(row()._replace(interval=None)) == "predicted Dice 0.70, no interval"
