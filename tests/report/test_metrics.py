import numpy as np
import pytest
from monai.metrics import DiceMetric, MeanIoU, compute_confusion_matrix_metric, get_confusion_matrix
from torch import from_numpy

from rl_reward_network.report.distance import hd95
from rl_reward_network.report.metrics import TABLE_METRICS, SampleTable, mask_metrics, measure_sample
from rl_reward_network.report.topology import betti_errors, betti_numbers
from rl_reward_network.rewards.table import MASK_REWARDS

EMPTY = np.zeros((20, 20), dtype=bool)


def box(rows, columns):
    mask = EMPTY.copy()
    mask[slice(*rows), slice(*columns)] = True
    return mask


def table(masks, target):
    return measure_sample("a", "g", np.zeros(len(masks)), np.stack(masks), target)


def test_closed_forms():
    target = box((0, 4), (0, 10))  # 40 pixels
    half = box((0, 2), (0, 10))  # 20 pixels, all inside
    shifted = box((2, 6), (0, 10))  # 40 pixels, 20 inside
    metrics = table([half, shifted, target], target).metrics
    np.testing.assert_allclose(metrics["dice"], [2 * 20 / 60, 2 * 20 / 80, 1])
    np.testing.assert_allclose(metrics["iou"], [20 / 40, 20 / 60, 1])
    np.testing.assert_allclose(metrics["recall"], [0.5, 0.5, 1])
    np.testing.assert_allclose(metrics["precision"], [1, 0.5, 1])


def test_the_empty_mask_rule_holds_for_every_metric():
    something = box((3, 6), (3, 9))
    for masks, target, expected in (([EMPTY, something], EMPTY, [1, 0]), ([EMPTY, something], something, [0, 1])):
        metrics = table(masks, target).metrics
        assert list(metrics) == list(MASK_REWARDS)
        for name, values in metrics.items():
            np.testing.assert_array_equal(values, expected, err_msg=name)


def test_random_masks_agree_with_monai():
    rng = np.random.default_rng(0)
    target, masks = rng.random((16, 16)) < 0.3, rng.random((12, 16, 16)) < rng.uniform(0.1, 0.9, (12, 1, 1))
    metrics = table(list(masks), target).metrics
    pred, truth = (from_numpy(array.astype(np.float32))[:, None] for array in (masks, np.stack([target] * 12)))
    np.testing.assert_allclose(metrics["dice"], DiceMetric()(pred, truth)[:, 0], rtol=1e-6)
    np.testing.assert_allclose(metrics["iou"], MeanIoU()(pred, truth)[:, 0], rtol=1e-6)
    confusion = get_confusion_matrix(pred, truth)
    for name in ("recall", "precision"):
        expected = compute_confusion_matrix_metric(name, confusion)[:, 0]
        np.testing.assert_allclose(metrics[name], expected, rtol=1e-6)


def test_unlabelled_images_have_scores_only():
    row = measure_sample("a", "g", np.array([0.25, 0.5]), np.stack([EMPTY, EMPTY]), None)
    assert row.metrics is None
    np.testing.assert_array_equal(row.column("score"), [0.25, 0.5])
    with pytest.raises(KeyError):
        row.column("dice")
    np.testing.assert_array_equal(SampleTable("a", "g", np.zeros(2), {"dice": np.ones(2)}).column("dice"), [1, 1])


def test_other_shapes_and_types_are_refused():
    masks = np.stack([EMPTY, EMPTY])
    for scores, bad, target in (
        (np.zeros(3), masks, EMPTY),
        (np.zeros(2), masks.astype(float), EMPTY),
        (np.zeros(2), masks, EMPTY[:-1]),
        (np.zeros(2), masks, EMPTY.astype(np.uint8)),
    ):
        with pytest.raises(ValueError, match=r"sample7: (masks|target): got"):
            measure_sample("sample7", "g", scores, bad, target)


def test_the_columns_of_one_mask():
    target = box((2, 9), (2, 9))
    target[4:6, 4:6] = False  # 45 pixels around a hole of 4
    pred = box((2, 9), (2, 9))
    pred[15:17, 15:17] = True  # 53 pixels in two components without a hole
    columns = mask_metrics(pred, target)
    assert tuple(columns) == TABLE_METRICS
    assert columns["dice"] == pytest.approx(2 * 45 / 98)
    assert columns["iou"] == pytest.approx(45 / 53)
    assert (columns["recall"], columns["precision"]) == pytest.approx((1, 45 / 53))
    assert (columns["betti0"], columns["betti1"]) == (1, 1)
    assert columns["cldice"] == pytest.approx(table([pred], target).metrics["cldice"][0])


def test_the_columns_of_empty_masks():
    something = box((3, 6), (3, 9))
    ones = dict.fromkeys(MASK_REWARDS, 1.0)
    assert mask_metrics(EMPTY, EMPTY) == ones | {"hd95": 0, "betti0": 0, "betti1": 0}
    missed = dict.fromkeys(MASK_REWARDS, 0.0) | {"hd95": np.hypot(20, 20), "betti0": 1, "betti1": 0}
    assert mask_metrics(EMPTY, something) == mask_metrics(something, EMPTY) == missed


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
def test_masks_without_a_pixel_are_refused_by_every_metric(shape):
    empty = np.zeros(shape, dtype=bool)
    stacked = (*MASK_REWARDS.values(), hd95, betti_errors)
    measures = [mask_metrics, *(lambda a, b, m=m: m(a[None], b[None]) for m in stacked)]
    for measure in (*measures, lambda a, b: betti_numbers(a)):
        with pytest.raises(ValueError, match=r"masks must have pixels, got \(N, H, W\) = \(1, "):
            measure(empty, empty)
    for measure in (*MASK_REWARDS.values(), hd95):
        assert measure(np.zeros((0, 4, 4), bool), np.zeros((0, 4, 4), bool)).shape == (0,)
