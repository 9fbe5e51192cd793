"""Where masks go, and what they never replace."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.segment.files import Target, check_free, image_files, targets, write_mask
from tests.conftest import tube_image


def test_nothing_is_written_over_that_is_not_of_this_prompt(tmp_path: Path) -> None:
    target = Target(tmp_path / "x.png", tmp_path / "x_mask.png", tmp_path / "x_overlay.png")
    image, mask = tube_image(32, 0)
    check_free(target, "this")
    write_mask(target, image, mask, "this: Gef\u00e4\u00df")
    np.testing.assert_array_equal(np.asarray(Image.open(target.mask)), 255 * mask)
    check_free(target, "this: Gef\u00e4\u00df")
    with pytest.raises(ValueError, match=r"x_mask\.png: .*another prompt, 'this: Gef.+'; .*--output"):
        check_free(target, "that")
    Image.fromarray(image).save(target.mask)
    with pytest.raises(ValueError, match=r"x_mask\.png: .*already(?!.*another prompt).*--output"):
        check_free(target, "this: Gef\u00e4\u00df")
    target.mask.write_text("not an image")
    with pytest.raises(ValueError, match=r"x_mask\.png: .*already(?!.*another prompt).*--output"):
        check_free(target, "this: Gef\u00e4\u00df")


def test_names_that_two_masks_would_share_are_refused(tmp_path: Path) -> None:
    twins = [tmp_path / "1" / "x.png", tmp_path / "2" / "x.png"]
    assert [target.mask.parent.name for target in targets(twins, None, None)] == ["1", "2"]
    with pytest.raises(ValueError, match=r"1/x\.png, .*2/x\.png: .*out/x_mask\.png"):
        targets(twins, tmp_path / "out", None)
    for output, files in ((tmp_path / "one.png", twins), (tmp_path / "one.jpg", twins[:1])):
        with pytest.raises(ValueError, match=r"--output .*one\.(png|jpg): .*\.png"):
            targets(files, output, None)
    assert targets(twins[:1], None, "?!")[0].mask.name == "x_prompt_mask.png"
    assert len(targets(twins[:1], None, "word " * 100)[0].mask.name) < 80


def test_a_link_to_nowhere_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "x.png").symlink_to(".git/annex/objects/x.png")
    for path in (tmp_path, tmp_path / "x.png"):
        with pytest.raises(ValueError, match=r"x\.png: a link whose target is missing; .*git annex get"):
            image_files([path])
