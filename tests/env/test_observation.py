"""Observations of images and masks: known values on drawn ones, finite and within bounds on any."""

import numpy as np
import pytest
from scipy import stats

from rl_reward_network.env.observation import (
    IMAGE_FEATURES,
    VISION_LIMIT,
    EdgeFeatures,
    bounds,
    observation_table,
    observe_image,
    observe_mask,
)

NAMES = [entry.name for entry in observation_table()]
LOW, HIGH = bounds()
MASK = [entry for entry in observation_table(mask=True) if entry.name.startswith("mask_")]


def rgb(grey):
    return np.repeat(np.asarray(grey, dtype=np.uint8)[..., None], 3, axis=2)


def named(image):
    return dict(zip(NAMES, observe_image(image).tolist(), strict=False))


def line(width, side=64):
    grey = np.full((side, side), 200)
    grey[:, side // 2 - width // 2 : side // 2 - width // 2 + width] = 80
    return rgb(grey)


def test_the_table_describes_the_vector():
    assert [entry.index for entry in observation_table(7)] == list(range(len(NAMES) + 7))
    assert len(set(NAMES)) == len(NAMES)
    assert NAMES.index("edge_mean") == 16, "16 image statistics come first"
    assert NAMES[-2:] == ["progress", "best_score"]
    assert observe_image(line(3)).shape == (IMAGE_FEATURES,) == (len(NAMES) - 2,)
    assert (LOW < HIGH).all()


def test_features_of_sa2va_follow_those_of_the_image():
    image, vision = line(3), np.array([0.5, -2.0, 1e6])
    names = [entry.name for entry in observation_table(3)]
    assert names == [*NAMES[:-2], "vision_000", "vision_001", "vision_002", *NAMES[-2:]]
    features = observe_image(image, vision)
    np.testing.assert_array_equal(features[:-3], observe_image(image))
    np.testing.assert_array_equal(features[-3:], [0.5, -2.0, VISION_LIMIT])
    low, high = bounds(3)
    assert len(low) == len(high) == len(names)
    with_mask = [entry.name for entry in observation_table(3, mask=True)]
    assert with_mask == [*names[:-2], *(entry.name for entry in MASK), *names[-2:]]


@pytest.mark.parametrize("shape", [(8, 8), (9, 4000), (64, 48), (1500, 2000)])
@pytest.mark.parametrize("kind", ["black", "white", "noise", "colours"])
def test_any_image_is_finite_and_within_bounds(shape, kind):
    rng = np.random.default_rng(0)
    image = {
        "black": np.zeros((*shape, 3), np.uint8),
        "white": np.full((*shape, 3), 255, np.uint8),
        "noise": rgb(rng.choice([0, 255], shape)),
        "colours": rng.integers(0, 256, (*shape, 3), dtype=np.uint8),
    }[kind]
    features = observe_image(image)
    assert features.dtype == np.float32
    assert (features >= LOW[:IMAGE_FEATURES]).all()
    assert (features <= HIGH[:IMAGE_FEATURES]).all()


def test_a_constant_image_has_a_level_and_nothing_else():
    values = named(rgb(np.full((40, 60), 51)))
    levels = {name: value for name, value in values.items() if name == "grey_mean" or name.startswith("grey_p")}
    assert all(value == pytest.approx(0.2) for value in levels.values())
    assert len(levels) == 8
    assert all(value == pytest.approx(0, abs=1e-6) for name, value in values.items() if name not in levels)


def test_a_ramp_has_one_slope_and_one_direction():
    ramp = np.tile(np.arange(100), (80, 1))
    along_x, along_y = named(rgb(ramp)), named(rgb(ramp.T))
    assert along_x["edge_mean"] == along_x["edge_p99"] == pytest.approx(1 / 255)
    assert along_x["edge_coherence"] == pytest.approx(1)
    assert (along_x["edge_horizontal"], along_y["edge_horizontal"]) == (pytest.approx(1), pytest.approx(-1))
    assert along_x["laplacian_std"] == pytest.approx(0, abs=1e-6)


def test_moments_equal_scipy_and_two_levels_are_one_bit():
    grey = np.random.default_rng(1).gamma(2, 20, (50, 70)).clip(0, 255).astype(np.uint8)
    values = named(rgb(grey))
    assert values["grey_skewness"] == pytest.approx(stats.skew(grey.ravel()), rel=1e-5)
    assert values["grey_kurtosis"] == pytest.approx(stats.kurtosis(grey.ravel()), rel=1e-5)
    assert named(rgb(np.arange(64 * 64).reshape(64, 64) % 2 * 255))["grey_entropy"] == pytest.approx(1)


def test_a_negative_image_swaps_dark_and_bright_ridges():
    values, negative = named(line(3)), named(255 - line(3))
    assert values["ridge_polarity"] > 0.2
    assert negative["ridge_polarity"] == pytest.approx(-values["ridge_polarity"], abs=1e-5)
    assert negative["bright_ridge_2px"] == pytest.approx(values["dark_ridge_2px"], abs=1e-6)


def test_ridges_tell_thin_from_wide():
    thin, wide = named(line(4)), named(line(12))
    ratio = [values["dark_ridge_4px"] / max(values["dark_ridge_1px"], 1e-9) for values in (thin, wide)]
    assert ratio[1] > ratio[0]


def test_only_the_averaged_image_counts():
    small = np.random.default_rng(2).integers(0, 256, (200, 256, 3), dtype=np.uint8)
    np.testing.assert_array_equal(observe_image(small.repeat(4, 0).repeat(4, 1)), observe_image(small))


@pytest.mark.parametrize("image", [np.zeros((64, 64, 3)), np.zeros((64, 64), np.uint8), np.zeros((7, 64, 3), np.uint8)])
def test_other_input_is_refused(image):
    with pytest.raises(ValueError, match=r"image .*uint8 \(H, W, 3\)"):
        observe_image(image)


def observed(mask, image=None):
    guide = EdgeFeatures(np.zeros((*mask.shape, 3), np.uint8) if image is None else image)
    values = observe_mask(guide, mask.astype(np.float32))
    return {entry.name: float(value) for entry, value in zip(MASK, values, strict=True)}


def test_statistics_of_two_squares_one_with_a_hole():
    mask = np.zeros((100, 100), bool)
    mask[10:30, 10:30] = mask[60:70, 60:70] = True
    mask[15:20, 15:20] = False
    expected = {
        "mask_area": mask.mean(),
        "mask_components": np.log1p(2),
        "mask_holes": np.log1p(1),
        "mask_largest": 375 / 475,
        "mask_second": 100 / 375,
        "mask_clarity": 1,
    }
    values = observed(mask)
    assert {name: values[name] for name in expected} == pytest.approx(expected)


def test_a_line_has_its_length_and_width_and_contrast_is_inside_less_outside():
    mask = np.zeros((100, 100), bool)
    mask[50:53, 10:90] = True
    image = np.where(mask[..., None], 51, 204).astype(np.uint8).repeat(3, axis=2)
    values = observed(mask, image)
    assert values["mask_skeleton"] == pytest.approx(0.79, abs=0.03)
    assert values["mask_width"] == pytest.approx(0.03, abs=0.002)
    assert values["mask_contrast"] == pytest.approx(-0.6, abs=0.01)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("size", [(8, 8), (40, 300), (600, 520)])
def test_constant_masks_of_any_size_are_finite_and_within_bounds(value, size):
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    values = observed(np.full(size, value), image)
    assert all(entry.low <= values[entry.name] <= entry.high for entry in MASK)
