"""An opened batch: masks and captions equal to the model's predictions, each computed once."""

from typing import Any

import numpy as np
import pytest
import torch

from rl_reward_network.data.items import make_region
from rl_reward_network.data.masks import to_rle
from rl_reward_network.grpo.image_context import (
    FeatureCache,
    ImageContext,
    PromptBatch,
    Question,
    open_batch,
    seeded_generator,
)
from rl_reward_network.grpo.prompts import DESCRIBE, GRPOPrompt, region_prompt, segment_question
from rl_reward_network.models.sa2va.generation_sa2va import Answer
from tests.grpo.nano import nano, regions, shake
from tests.grpo.rollouts.test_image_context import LONGEST, predict

ITEMS = [regions()[row] for row in (4, 0, 1)]  # the last two are of one image


@pytest.fixture(scope="module")
def opened() -> tuple[Any, Any, PromptBatch]:
    model, processor = nano()
    shake(model, 0.005)
    return model, processor, open_batch(ITEMS, FeatureCache(model, processor))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[Question]]:
    """The questions of each call of `ImageContext.answer`, by which everything is answered."""
    calls: list[list[Question]] = []
    real = ImageContext.answer

    def noted(self: ImageContext, questions: Any, *args: Any) -> list[list[Answer]]:
        calls.append(list(questions))
        return real(self, questions, *args)

    monkeypatch.setattr(ImageContext, "answer", noted)
    return calls


def test_images_are_opened_once_and_items_know_theirs(opened: tuple[Any, Any, PromptBatch]) -> None:
    model, processor, batch = opened
    assert batch.image_indices == [0, 1, 1]
    assert len(batch.features) == 2
    for item, image, truth in zip(ITEMS, batch.images, batch.truths, strict=True):
        np.testing.assert_array_equal(image, item.load()[0])
        np.testing.assert_array_equal(truth, item.load()[1])
    cache = FeatureCache(model, processor)
    open_batch(ITEMS, cache)
    assert (cache.hits, cache.misses) == (0, 2)


def test_images_are_told_apart_by_their_pixels_and_not_by_their_files(opened: tuple[Any, Any, PromptBatch]) -> None:
    """Two files with equal ends, as uncompressed images with a black margin have, and one picture in two files."""
    model, processor, _ = opened
    pictures = [np.zeros((64, 64, 3), dtype=np.uint8) for _ in range(3)]
    pictures[0][20:40, 20:40] = pictures[2][20:40, 20:40] = 200
    rle = to_rle(pictures[0][..., 0] > 0)
    items = [
        region_prompt(make_region("a square", rle, name, "here", lambda own=own: own))
        for name, own in zip(("a", "a", "b"), pictures, strict=True)
    ]
    batch = open_batch(items, FeatureCache(model, processor))
    assert batch.image_indices == [0, 1, 0]
    assert batch.image_ids[0] == batch.image_ids[2] != batch.image_ids[1]
    for row, own in enumerate(batch.image_indices):
        alone = open_batch(items[row : row + 1], FeatureCache(model, processor))
        assert torch.equal(batch.features[own].vision, alone.features[0].vision)


def test_what_is_drawn_is_what_the_model_predicts(opened: tuple[Any, Any, PromptBatch]) -> None:
    model, processor, batch = opened
    rows, texts = [2, 0, 1], [ITEMS[2].question, "Hello", ITEMS[1].question]
    drawn = batch.masks(batch.context(model), rows, texts)
    assert drawn[1] is None, "no [SEG] is said"
    for row, text, mask in zip(rows, texts, drawn, strict=True):
        if mask is not None:
            alone = predict(model, processor, batch.images[row], text)["mask_probabilities"][0][0]
            assert mask.dtype == np.float32
            assert mask.shape == batch.images[row].shape[:2]
            np.testing.assert_allclose(mask, alone, atol=1e-3)
    assert batch.masks(batch.context(model), [], []) == []


def test_captions_are_what_the_model_predicts(opened: tuple[Any, Any, PromptBatch]) -> None:
    model, processor, batch = opened
    rows = [2, 0, 1, 0]
    masks = [mask for row in rows if (mask := batch.truths[row]) is not None]
    said = batch.captions(batch.context(model), rows, masks, LONGEST)
    alone = [
        predict(model, processor, batch.images[row], DESCRIBE, mask)["prediction"]
        for row, mask in zip(rows, masks, strict=True)
    ]
    assert said == alone
    assert len(set(said)) == 3
    assert batch.captions(batch.context(model), [], [], LONGEST) == []


def test_regions_of_equal_cells_are_described_once(
    opened: tuple[Any, Any, PromptBatch], asked: list[list[Question]]
) -> None:
    model, _, batch = opened
    mask = batch.truths[1]
    assert mask is not None
    nearly = mask.copy()
    nearly[1, 1] = True  # between the sample points
    said = batch.captions(batch.context(model), [1, 2, 0, 1], [mask, nearly, mask, mask], LONGEST)
    assert [len(questions) for questions in asked] == [2], "rows 1 and 2 are of one image, row 0 is not"
    assert said[0] == said[1] == said[3]
    assert [question.image_index for question in asked[0]] == [1, 0]


def test_equal_captions_of_a_row_are_drawn_once_and_empty_ones_never(
    opened: tuple[Any, Any, PromptBatch], asked: list[list[Question]]
) -> None:
    model, _, batch = opened
    context = batch.context(model)
    rows, captions = [1, 1, 2, 1, 0], ["a red square.", "a blue triangle.", "a red square.", "a red square.", ""]
    drawn = batch.masks_from_captions(context, rows, captions)
    assert list(drawn) == [(1, "a red square."), (1, "a blue triangle."), (2, "a red square.")]
    assert [len(questions) for questions in asked] == [3]
    (expected,) = batch.masks(context, [1], [segment_question("a blue triangle.")])
    result = drawn[1, "a blue triangle."]
    assert result is not None
    assert expected is not None
    np.testing.assert_allclose(result, expected, atol=1e-4)
    assert batch.masks_from_captions(context, [0], [""]) == {}


def test_stop_words_are_not_part_of_what_was_said(opened: tuple[Any, Any, PromptBatch]) -> None:
    _, processor, batch = opened
    for text in ("a red circle<|im_end|>", " a red circle <|endoftext|>", "a red circle"):
        assert batch.text(Answer(processor.token_ids(text))) == "a red circle"
    assert batch.text(Answer(processor.token_ids("<|im_end|>"))) == ""


def test_masks_have_the_size_of_their_own_image(opened: tuple[Any, Any, PromptBatch]) -> None:
    """Images of a batch may differ in size."""
    model, processor, _ = opened
    image, mask = (part[20:220, :] for part in ITEMS[0].load())
    cut = GRPOPrompt("g", "s", "n", "", ITEMS[0].question, True, lambda: (image, mask))
    batch = open_batch([cut, ITEMS[1]], FeatureCache(model, processor))
    drawn = batch.masks(batch.context(model), [0, 1], [cut.question, ITEMS[1].question])
    assert [one.shape for one in drawn if one is not None] == [(200, 256), (256, 256)]
    alone = predict(model, processor, image, cut.question)["mask_probabilities"][0][0]
    np.testing.assert_allclose(drawn[0], alone, atol=1e-3)


def test_chance_depends_on_the_numbers_alone() -> None:
    first = [seeded_generator(seed).initial_seed() for seed in ((0, 1, 2), (0, 1, 2), (0, 2, 1), (0, 1), (0, 1, 3))]
    assert first[0] == first[1]
    assert len(set(first)) == 4
