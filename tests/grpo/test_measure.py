"""Metrics of held-out prompts, computed by hand from plain predictions."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rl_reward_network.grpo import measure as measure_file
from rl_reward_network.grpo.image_context import FeatureCache, open_batch, seeded_generator
from rl_reward_network.grpo.measure import SAMPLED, Measured, batch_size, iou_of_captions, measure, unpacked
from rl_reward_network.grpo.prompts import DESCRIBE, TrainingItem, segment_question
from rl_reward_network.models.sa2va.generation_sa2va import Decoding
from rl_reward_network.rewards.metrics import meteor
from tests.grpo.nano import nano, regions, shake
from tests.grpo.test_image_context import LONGEST, predict

ITEMS = [regions()[row] for row in (5, 2)]
CAPTIONED = {"cycle_iou", "expected_cycle_iou", "meteor", "expected_meteor", "cycle_meteor"}
MASKED = {"dice", "failure", "iou", "precision", "recall"}


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    model, processor = nano()
    shake(model, 0.005)
    return model, processor


@pytest.fixture(scope="module")
def measured(parts: tuple[Any, Any]) -> Measured:
    return measure(parts[0], ITEMS, FeatureCache(*parts), LONGEST, seed=3)


def test_what_validation_does_not_read_can_be_left_out(parts: tuple[Any, Any], measured: Measured) -> None:
    few = measure(parts[0], ITEMS, FeatureCache(*parts), LONGEST, seed=3, expected=False)
    assert measured.values.keys() - few.values.keys() == {"expected_cycle_iou", "expected_meteor"}
    for name, values in few.values.items():
        np.testing.assert_array_equal(values, measured.values[name])
    assert (few.captions, few.masks, few.drawn) == (measured.captions, measured.masks, measured.drawn)


def drawn(parts: tuple[Any, Any], image: np.ndarray, text: str) -> np.ndarray:
    (mask,) = predict(*parts, image, text)["prediction_masks"]
    return mask[0]


def overlap(first: np.ndarray, second: np.ndarray) -> float:
    return float((first & second).sum() / (first | second).sum())


def test_masks_of_phrases_are_compared_with_the_truth(parts: tuple[Any, Any], measured: Measured) -> None:
    assert set(measured.values) == CAPTIONED | MASKED
    for row, item in enumerate(ITEMS):
        image, truth = item.load()
        mask = drawn(parts, image, item.question)
        own = unpacked(measured.masks[row])
        assert own is not None
        assert truth is not None
        assert (own != mask).mean() < 1e-4
        both, either = (own & truth).sum(), (own | truth).sum()
        assert measured.overlap[row].tolist() == [both, either]
        result = [measured.values[name][row] for name in ("iou", "dice", "precision", "recall")]
        expected = [both / either, 2 * both / (own.sum() + truth.sum()), both / own.sum(), both / truth.sum()]
        assert result == pytest.approx(expected)


def test_captions_and_both_closed_loops(parts: tuple[Any, Any], measured: Measured) -> None:
    for row, item in enumerate(ITEMS):
        image, truth = item.load()
        mask = unpacked(measured.masks[row])
        said = predict(*parts, image, DESCRIBE, truth)["prediction"]
        again = predict(*parts, image, DESCRIBE, mask)["prediction"]
        assert truth is not None
        assert measured.captions[row] == said
        again_drawn, own = drawn(parts, image, segment_question(said)), unpacked(measured.drawn[row])
        assert own is not None
        assert (own != again_drawn).mean() < 1e-4
        assert measured.values["cycle_iou"][row] == pytest.approx(overlap(own, truth))
        for name, text in (("meteor", said), ("cycle_meteor", again)):
            assert measured.values[name][row] == pytest.approx(meteor([text], [item.caption], normalise=True)[0]), name
    assert len(set(measured.captions)) == 2


def test_expected_rewards_are_means_over_sampled_captions(parts: tuple[Any, Any], measured: Measured) -> None:
    batch = open_batch(ITEMS, FeatureCache(*parts))
    questions = [batch.caption_question(row, mask) for row, mask in enumerate(batch.truths) if mask is not None]
    how = Decoding(LONGEST, 1.0, generator=seeded_generator((3, 0)))
    for row, own in enumerate(batch.context(parts[0]).answer(questions, how, SAMPLED)):
        image, truth = ITEMS[row].load()
        assert truth is not None
        said = [batch.text(answer) for answer in own]
        ious = [overlap(drawn(parts, image, segment_question(text)), truth) for text in said]
        assert measured.values["expected_cycle_iou"][row] == pytest.approx(np.mean(ious), abs=2e-3)
        scores = meteor(said, [ITEMS[row].caption] * SAMPLED, normalise=True)
        assert measured.values["expected_meteor"][row] == pytest.approx(scores.mean())


def test_items_at_once_change_no_greedy_number(
    parts: tuple[Any, Any], measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_file, "BATCH_SIZE", {"small": 1})
    single = measure(parts[0], ITEMS, FeatureCache(*parts), LONGEST, seed=3)
    assert single.captions == measured.captions
    for name in (CAPTIONED | MASKED) - {"expected_cycle_iou", "expected_meteor"}:
        np.testing.assert_allclose(single.values[name], measured.values[name], atol=2e-3, err_msg=name)
    assert single.overlap.shape == (2, 2)
    assert len(single.masks) == 2


@pytest.mark.parametrize(("hidden_size", "tiles", "items"), [(128, 1, 32), (128, 12, 2), (128, 40, 1), (896, 1, 8)])
def test_tiles_and_large_models_make_batches_smaller(hidden_size: int, tiles: int, items: int) -> None:
    family = SimpleNamespace(body="internvl")
    config = SimpleNamespace(text_config=SimpleNamespace(hidden_size=hidden_size), family=family)
    assert batch_size(config, tiles) == items
    family.body = "qwen_vl"  # without tiles; an image has the tokens of two
    assert batch_size(config, tiles) == (16 if hidden_size == 128 else 4)


def test_masks_of_given_captions(parts: tuple[Any, Any]) -> None:
    said = ["a small green triangle.", "a large orange cross."]
    result = iou_of_captions(parts[0], ITEMS, FeatureCache(*parts), said)
    assert result.dtype == np.float64
    for row, item in enumerate(ITEMS):
        image, truth = item.load()
        assert truth is not None
        expected = overlap(drawn(parts, image, segment_question(said[row])), truth)
        assert result[row] == pytest.approx(expected, abs=2e-3)
    assert result[0] != pytest.approx(result[1])
    assert iou_of_captions(parts[0], ITEMS, FeatureCache(*parts), ["", said[1]])[0] == 0.0, "nothing was said"


def test_images_without_captions_or_truth_lack_those_numbers(parts: tuple[Any, Any]) -> None:
    image, truth = ITEMS[0].load()
    labelled, bare = (
        TrainingItem(name, name, name, "", ITEMS[0].question, mask is not None, lambda mask=mask: (image, mask))
        for name, mask in (("labelled", truth), ("bare", None))
    )
    result = measure(parts[0], [labelled, bare], FeatureCache(*parts), LONGEST)
    assert set(result.values) == MASKED
    for name, values in result.values.items():
        assert 0 <= values[0] <= 1, name
        assert np.isnan(values[1]), name
    assert result.captions == ["", ""]
    assert result.overlap[1].tolist() == [0, 0]
    assert result.phrase_ciou == pytest.approx(result.values["iou"][0])
    assert all(mask is not None for mask in result.masks)
    assert result.drawn == result.masks, "no caption to draw from"


def test_caption_2_is_of_the_mask_that_was_drawn(parts: tuple[Any, Any]) -> None:
    """Here the question is about another object than the region; and where nothing is drawn, nothing can be said."""
    other, silent = (replace(ITEMS[0], question=text) for text in (regions()[7].question, "Describe the image."))
    result = measure(parts[0], [other, silent], FeatureCache(*parts), LONGEST)
    image, _ = other.load()
    again = predict(*parts, image, DESCRIBE, drawn(parts, image, other.question))["prediction"]
    assert again != result.captions[0]
    expected = meteor([again], [other.caption], normalise=True)[0]
    assert result.values["cycle_meteor"].tolist() == pytest.approx([expected, 0.0])
    assert result.captions[1] == result.captions[0]
    assert result.masks[1] is None
    assert {name: result.values[name][1] for name in MASKED} == dict.fromkeys(MASKED, 0.0) | {"failure": 1.0}
    assert result.overlap[1, 0] == 0 < result.overlap[1, 1]
    assert result.values["meteor"][1] > expected


def test_ciou_sums_pixels_before_it_divides() -> None:
    overlap = np.array([[30, 40], [1, 60]])
    assert Measured({}, [], [], [], overlap).phrase_ciou == pytest.approx(31 / 100)
    assert Measured({}, [], [], [], np.zeros((2, 2), dtype=int)).phrase_ciou == 0.0
