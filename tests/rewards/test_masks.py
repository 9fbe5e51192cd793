import numpy as np
import pytest
import torch
from monai.metrics.confusion_matrix import compute_confusion_matrix_metric, get_confusion_matrix
from monai.metrics.meandice import compute_dice
from monai.metrics.meaniou import compute_iou

from rl_reward_network.rewards.masks import dice, iou, precision, recall


def test_closed_form():
    pred, target = np.zeros((2, 1, 4, 4), dtype=bool)
    pred[0, 0, :3] = True  # 3 pixels
    target[0, :2, 1:] = True  # 6 pixels, 2 of them shared
    numbers = [metric(pred, target).tolist() for metric in (dice, iou, precision, recall)]
    assert numbers == [[4 / 9], [2 / 7], [2 / 3], [1 / 3]]


@pytest.mark.parametrize("metric", [dice, iou, precision, recall])
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
def test_bad_input(pred, target, message):
    with pytest.raises(ValueError, match=message):
        dice(pred, target)
