import numpy as np
import pytest
from monai.metrics.hausdorff_distance import compute_hausdorff_distance
from monai.metrics.utils import get_mask_edges
from torch import from_numpy

from rl_reward_network.report.distance import boundary, hd95


def random_pairs():
    """40 pairs of masks: specks, blobs of all densities, and masks that touch every border."""
    rng = np.random.default_rng(0)
    noise = rng.random((2, 40, 37, 41)) < rng.uniform(0.005, 0.95, (2, 40, 1, 1))
    noise[0, :5], noise[:, :, 0, 0] = True, True  # none is empty
    return noise[0], noise[1]


def test_random_masks_agree_with_monai():
    pred, target = random_pairs()
    arrays = (from_numpy(masks[:, None].astype(np.float32)) for masks in (pred, target))
    expected = compute_hausdorff_distance(*arrays, include_background=True, percentile=95)[:, 0].numpy()
    assert (expected > 0).all()
    np.testing.assert_allclose(hd95(pred, target), expected, rtol=1e-5)


def test_the_boundary_is_that_of_monai():
    pred, target = random_pairs()
    for first, second in zip(pred, target, strict=True):
        for ours, theirs in zip(
            (boundary(first), boundary(second)), get_mask_edges(first, second, crop=False), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)


def test_closed_forms():
    line, lower, dot = np.zeros((3, 1, 50, 60), dtype=bool)
    line[0, 10, 5:25], lower[0, 17, 5:25] = True, True
    dot[0, 13, 9] = True
    assert hd95(line, line) == 0
    assert hd95(line, lower) == 7
    assert hd95(dot, lower) == pytest.approx(hd95(lower, dot))
    ends = np.percentile(np.hypot(4, np.arange(5, 25) - 9), 95)  # from each pixel of the line below to the dot
    assert hd95(dot, lower) == pytest.approx(ends, rel=1e-6)


def test_empty_masks():
    empty, dot = np.zeros((2, 1, 30, 40), dtype=bool)
    dot[0, 3, 3] = True
    assert hd95(empty, empty) == 0
    assert hd95(empty, dot) == hd95(dot, empty) == 50
    assert hd95(empty[:0], empty[:0]).shape == (0,)


def test_other_shapes_and_types_are_refused():
    masks = np.zeros((2, 4, 4), dtype=bool)
    for bad in (masks[:1], masks[0], masks.astype(float)):
        with pytest.raises(ValueError, match="masks must"):
            hd95(masks, bad)
