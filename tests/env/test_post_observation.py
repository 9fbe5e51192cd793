"""Statistics of masks: known values on drawn masks, finite on any."""

import numpy as np
import pytest

from rl_reward_network.env.operations import GuideImage
from rl_reward_network.env.post_observation import MASK_FEATURES, mask_observation_table, observe_mask

SIZE = 100
NAMES = [entry.name for entry in mask_observation_table()]


def observed(mask: np.ndarray, image: np.ndarray | None = None) -> dict[str, float]:
    image = np.zeros((*mask.shape, 3), np.uint8) if image is None else image
    return dict(zip(NAMES, observe_mask(GuideImage(image), mask.astype(np.float32)).tolist(), strict=True))


def test_two_squares_one_with_a_hole() -> None:
    mask = np.zeros((SIZE, SIZE), bool)
    mask[10:30, 10:30] = True
    mask[15:20, 15:20] = False
    mask[60:70, 60:70] = True
    values = observed(mask)
    assert values["mask_area"] == pytest.approx(mask.mean())
    assert values["mask_components"] == pytest.approx(np.log1p(2))
    assert values["mask_holes"] == pytest.approx(np.log1p(1))
    assert values["mask_largest"] == pytest.approx(375 / 475)
    assert values["mask_second"] == pytest.approx(100 / 375)
    assert values["mask_clarity"] == 1


def test_a_line_has_its_length_and_width() -> None:
    mask = np.zeros((SIZE, SIZE), bool)
    mask[50:53, 10:90] = True
    values = observed(mask)
    assert values["mask_skeleton"] == pytest.approx(0.79, abs=0.03)
    assert values["mask_width"] == pytest.approx(0.03, abs=0.002)


def test_contrast_is_inside_less_outside() -> None:
    mask = np.zeros((SIZE, SIZE), bool)
    mask[20:60, 20:60] = True
    image = np.where(mask[..., None], 51, 204).astype(np.uint8).repeat(3, axis=2)
    assert observed(mask, image)["mask_contrast"] == pytest.approx(-0.6, abs=0.01)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("size", [(8, 8), (40, 300), (600, 520)])
def test_constant_masks_of_any_size_are_finite_and_within_bounds(value: float, size: tuple[int, int]) -> None:
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    values = observe_mask(GuideImage(image), np.full(size, value, np.float32))
    assert values.shape == (MASK_FEATURES,)
    assert np.isfinite(values).all()
    for entry, number in zip(mask_observation_table(), values, strict=True):
        assert entry.low <= number <= entry.high, entry.name


def test_the_table_counts_from_the_given_index() -> None:
    assert [entry.index for entry in mask_observation_table(7)][:2] == [7, 8]
    assert len(set(NAMES)) == MASK_FEATURES
