"""Regions drawn into an image: what is changed, and what is kept."""

import numpy as np
import pytest

from rl_reward_network.models.sa2va.pixels_sa2va import RED, draw_region

IMAGE = np.random.default_rng(0).integers(0, 255, (400, 600, 3)).astype(np.uint8)


def line(thickness: int = 1) -> np.ndarray:
    region = np.zeros((400, 600), dtype=bool)
    region[100 : 100 + thickness, 50:300] = True
    return region


@pytest.mark.parametrize("thickness", [1, 30])
def test_an_outline_is_red_around_the_region_and_leaves_it_as_it_is(thickness: int) -> None:
    region, before = line(thickness), IMAGE.copy()
    drawn = draw_region(IMAGE, region, "outline")
    changed = (drawn != IMAGE).any(axis=2)
    assert not changed[region].any(), "a line of one pixel stays visible"
    assert (drawn[changed] == (255, 0, 0)).all()
    rows, columns = np.nonzero(changed)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (98, 100 + thickness - 1 + 2, 48, 301)
    np.testing.assert_array_equal(IMAGE, before)


def test_a_crop_is_the_bounding_box_with_a_margin_within_the_image() -> None:
    region = line(20)
    margin = round(250 * 0.25)
    cut = IMAGE[100 - margin : 120 + margin, 0 : 300 + margin]  # 50 - margin would be outside
    np.testing.assert_array_equal(draw_region(IMAGE, region, "crop"), cut)
    tiny = np.zeros((400, 600), dtype=bool)
    tiny[399, 599] = True
    assert draw_region(IMAGE, tiny, "crop").shape == (9, 9, 3)


def test_empty_regions_and_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="the region has 0 pixels"):
        draw_region(IMAGE, np.zeros((400, 600), dtype=bool), "outline")
    with pytest.raises(ValueError, match=r"shape \(3, 3\), expected 1 or more, .* shape \(400, 600\)"):
        draw_region(IMAGE, np.ones((3, 3), dtype=bool), "crop")


def test_a_region_that_is_the_whole_image_is_framed() -> None:
    image = np.zeros((40, 60, 3), dtype=np.uint8)
    shown = draw_region(image, np.ones((40, 60), dtype=bool), "outline")
    red = (shown == RED).all(axis=2)
    assert red[[0, -1]].all()
    assert red[:, [0, -1]].all()
    assert not red[1:-1, 1:-1].any()
