import numpy as np
import pytest
from monai.metrics import DiceMetric, MeanIoU, compute_confusion_matrix_metric, get_confusion_matrix
from torch import from_numpy

from rl_reward_network.evaluation.metrics import METRICS, SampleTable, cldice, measure_sample

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
        assert list(metrics) == list(METRICS) == ["dice", "iou", "recall", "precision", "cldice"]
        for name, values in metrics.items():
            np.testing.assert_array_equal(values, expected, err_msg=name)


def test_centreline_dice_ignores_width_and_punishes_breaks():
    line = box((10, 11), (0, 20))  # one pixel wide: its own centreline
    thick, half = box((8, 13), (0, 20)), box((10, 11), (0, 10))
    far = box((2, 3), (0, 20))
    values = cldice(np.stack([line, thick, half, far]), np.stack([line] * 4))
    # half a line: its centreline is all inside (1), half of the target's centreline is found (1/2)
    np.testing.assert_allclose(values[[0, 2, 3]], [1, 2 * 0.5 / 1.5, 0])
    assert values[1] > 0.9, "thinning forks a little at the ends"
    assert METRICS["dice"](thick[None], line[None])[0] < 0.4


def test_every_small_blob_has_a_centreline():
    for height in (1, 2, 3):
        for width in (1, 2, 3):
            blob = box((5, 5 + height), (5, 5 + width))[None]
            np.testing.assert_allclose(cldice(blob, blob), 1)


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


def test_masks_of_many_targets_are_compared_pair_by_pair():
    rng = np.random.default_rng(1)
    pred, target = rng.random((2, 5, 12, 12)) < 0.5
    together = cldice(pred, target)
    np.testing.assert_array_equal(together, [cldice(pred[i : i + 1], target[i : i + 1])[0] for i in range(5)])
    np.testing.assert_allclose(together, cldice(target, pred), err_msg="clDice is symmetric")


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
    with pytest.raises(ValueError, match="expected two bool"):
        cldice(masks, masks[:1])
