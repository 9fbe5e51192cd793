import numpy as np
import pytest
import torch
from monai.metrics.confusion_matrix import compute_confusion_matrix_metric, get_confusion_matrix
from monai.metrics.meandice import compute_dice
from monai.metrics.meaniou import compute_iou

from rl_reward_network.rewards.masks import cldice, dice, iou, precision, recall


def box(rows, columns):
    mask = np.zeros((20, 20), dtype=bool)
    mask[slice(*rows), slice(*columns)] = True
    return mask


def test_closed_form():
    pred, target = np.zeros((2, 1, 4, 4), dtype=bool)
    pred[0, 0, :3] = True  # 3 pixels
    target[0, :2, 1:] = True  # 6 pixels, 2 of them shared
    numbers = [metric(pred, target).tolist() for metric in (dice, iou, precision, recall)]
    assert numbers == [[4 / 9], [2 / 7], [2 / 3], [1 / 3]]


@pytest.mark.parametrize("metric", [dice, iou, precision, recall, cldice])
def test_empty_mask_rule(metric):
    empty, full = np.zeros((1, 3, 3), dtype=bool), np.ones((1, 3, 3), dtype=bool)
    pred, target = np.concatenate([empty, empty, full, full]), np.concatenate([empty, full, empty, full])
    result = metric(pred, target)
    assert result.dtype == np.float64
    assert result.tolist() == [1, 0, 0, 1]


def test_parity_with_monai():
    rng = np.random.default_rng(0)
    pred, target = rng.random((2, 20, 17, 23)) < rng.random((2, 20, 1, 1))
    tensors = [torch.from_numpy(x)[:, None].float() for x in (pred, target)]
    confusion = get_confusion_matrix(*tensors)
    for metric, expected in (
        (dice, compute_dice(*tensors)),
        (iou, compute_iou(*tensors)),
        (precision, compute_confusion_matrix_metric("precision", confusion)),
        (recall, compute_confusion_matrix_metric("recall", confusion)),
    ):
        np.testing.assert_allclose(metric(pred, target), expected[:, 0].numpy(), atol=1e-6)


def test_swapping_the_masks_swaps_precision_and_recall():
    pred, target = np.random.default_rng(1).random((2, 5, 8, 8)) < 0.4
    assert np.array_equal(precision(pred, target), recall(target, pred))
    assert np.array_equal(dice(pred, target), dice(target, pred))


def test_large_masks_do_not_overflow():
    full = np.ones((1, 2000, 2000), dtype=bool)
    assert iou(full, full).tolist() == [1]


def test_centreline_dice_ignores_width_and_punishes_breaks():
    line = box((10, 11), (0, 20))  # one pixel wide: its own centreline
    thick, half = box((8, 13), (0, 20)), box((10, 11), (0, 10))
    far = box((2, 3), (0, 20))
    values = cldice(np.stack([line, thick, half, far]), np.stack([line] * 4))
    # half a line: its centreline is all inside (1), half of the target's centreline is found (1/2)
    np.testing.assert_allclose(values[[0, 2, 3]], [1, 2 * 0.5 / 1.5, 0])
    assert values[1] > 0.9, "the skeleton forks a little at the ends"
    assert dice(thick[None], line[None])[0] < 0.4


def test_every_small_blob_has_a_centreline():
    for height in (1, 2, 3):
        for width in (1, 2, 3):
            blob = box((5, 5 + height), (5, 5 + width))[None]
            np.testing.assert_allclose(cldice(blob, blob), 1)


def test_masks_of_many_targets_are_compared_pair_by_pair():
    rng = np.random.default_rng(1)
    pred, target = rng.random((2, 5, 12, 12)) < 0.5
    together = cldice(pred, target)
    np.testing.assert_array_equal(together, [cldice(pred[i : i + 1], target[i : i + 1])[0] for i in range(5)])
    np.testing.assert_allclose(together, cldice(target, pred), err_msg="clDice is symmetric")


@pytest.mark.parametrize("metric", [dice, cldice])
@pytest.mark.parametrize(
    ("pred", "target", "message"),
    [
        (
            np.zeros((1, 2, 2), bool),
            np.zeros((1, 2, 3), bool),
            r"one \(N, H, W\) shape, got \(1, 2, 2\) and \(1, 2, 3\)",
        ),
        (np.zeros((2, 2), bool), np.zeros((2, 2), bool), r"one \(N, H, W\) shape"),
        (np.zeros((1, 2, 2)), np.zeros((1, 2, 2), bool), "must be bool, got float64 and bool; threshold"),
    ],
)
def test_bad_input(metric, pred, target, message):
    with pytest.raises(ValueError, match=message):
        metric(pred, target)
