"""Answers from shared keys and values: those of one prediction at a time, whatever the batch, and the same chance."""

from typing import Any

import numpy as np
import pytest
import torch

from rl_reward_network.grpo.image_context import (
    FeatureCache,
    ImageContext,
    PromptBatch,
    Question,
    make_question,
    open_batch,
    seeded_generator,
)
from rl_reward_network.grpo.prompts import DESCRIBE, segment_question
from rl_reward_network.models.sa2va.generation_sa2va import Answer, Decoding
from tests.conftest import smooth_image
from tests.grpo.nano import nano, regions, shake

LONGEST = 16
ITEMS = [regions()[row] for row in (0, 1, 4, 8)]  # two regions of one image, and two other images
NO_MASK = "Describe the image."
LONG = "Please segment the large blue triangle, which lies somewhere in this picture, as well as you can."


def predict(model: Any, processor: Any, image: np.ndarray, text: str, mask: np.ndarray | None = None) -> dict[str, Any]:
    """The plain prediction, one question at a time; the answer without its stop word."""
    regions = None if mask is None else [mask[None]]
    result = model.predict_forward(
        image=image, text=f"<image>{text}", mask_prompts=regions, processor=processor, max_new_tokens=LONGEST
    )
    return result | {"prediction": result["prediction"].removesuffix("<|im_end|>").strip()}


@pytest.fixture(scope="module")
def opened() -> tuple[Any, Any, PromptBatch]:
    """A model that is not at its start, and what it is asked about."""
    model, processor = nano()
    shake(model, 0.005)
    return model, processor, open_batch(ITEMS, FeatureCache(model, processor))


@pytest.fixture(scope="module")
def mixed(opened: tuple[Any, Any, PromptBatch]) -> list[Question]:
    """Captions of regions and masks of phrases, of very different lengths, about three images in no order."""
    _, _, batch = opened
    describe = [batch.caption_question(row, mask) for row, mask in enumerate(batch.truths) if mask is not None]
    draw = [batch.question(2, LONG), batch.question(0, ITEMS[0].question), batch.question(3, "Hello")]
    return [*describe[::-1], *draw]


def texts(batch: PromptBatch, answers: list[list[Answer]]) -> list[list[str]]:
    return [[batch.text(answer) for answer in own] for own in answers]


def test_greedy_answers_are_those_of_one_prediction_at_a_time(
    opened: tuple[Any, Any, PromptBatch], mixed: list[Question]
) -> None:
    model, processor, batch = opened
    assert len({len(question.suffix_ids) for question in mixed}) > 3, "so that shorter questions are padded"
    result = texts(batch, batch.context(model).answer(mixed, Decoding(LONGEST)))
    words = [(row, DESCRIBE, batch.truths[row]) for row in (3, 2, 1, 0)]
    words += [(2, LONG, None), (0, ITEMS[0].question, None), (3, "Hello", None)]
    alone = [predict(model, processor, batch.images[row], text, mask)["prediction"] for row, text, mask in words]
    assert [said for (said,) in result] == alone
    assert len(set(alone)) >= 5, "answers must differ, or mixed-up rows would not be seen"


def test_rows_at_once_changes_nothing(opened: tuple[Any, Any, PromptBatch], mixed: list[Question]) -> None:
    model, _, batch = opened
    whole, one_by_one, pairs = (batch.context(model, rows) for rows in (128, 1, 5))
    expected = [answer.token_ids for (answer,) in whole.answer(mixed, Decoding(LONGEST))]
    assert [answer.token_ids for (answer,) in one_by_one.answer(mixed, Decoding(LONGEST))] == expected
    several = pairs.answer(mixed, Decoding(LONGEST), num_answers=2)
    assert [[answer.token_ids for answer in own] for own in several] == [[ids, ids] for ids in expected]


def test_several_greedy_answers_to_a_question_are_equal(
    opened: tuple[Any, Any, PromptBatch], mixed: list[Question]
) -> None:
    """Their question is read once, all but its last token: nothing else may come out."""
    model, _, batch = opened
    context = batch.context(model)
    single, triple = (context.answer(mixed, Decoding(LONGEST), times) for times in (1, 3))
    for (one,), three in zip(single, triple, strict=True):
        assert [answer.token_ids for answer in three] == [one.token_ids] * 3
        for answer in three:
            assert answer.stopped == one.stopped


def test_a_context_can_be_asked_again(opened: tuple[Any, Any, PromptBatch], mixed: list[Question]) -> None:
    """Answers are decoded on copies of the keys and values."""
    model, _, batch = opened
    context = batch.context(model)
    first = texts(batch, context.answer(mixed, Decoding(LONGEST), 2))
    assert texts(batch, context.answer(mixed, Decoding(LONGEST), 2)) == first
    assert texts(batch, context.answer(mixed[1:3], Decoding(LONGEST), 2)) == first[1:3]


def test_chance_comes_from_the_generator_alone(opened: tuple[Any, Any, PromptBatch], mixed: list[Question]) -> None:
    model, _, batch = opened

    def sampled(seed: int, unrelated: int) -> list[list[str]]:
        torch.manual_seed(unrelated)
        how = Decoding(LONGEST, 1.5, generator=seeded_generator((seed,)))
        return texts(batch, batch.context(model).answer(mixed[:4], how, 4))

    first = sampled(0, 0)
    assert sampled(0, 1) == first
    assert sampled(1, 0) != first
    assert any(len(set(own)) > 1 for own in first)


def test_sampled_answers_are_as_likely_as_the_model_says(opened: tuple[Any, Any, PromptBatch]) -> None:
    """Probabilities are those behind the whole question, image and region included."""
    model, processor, batch = opened
    question, many = batch.caption_question(0, batch.truths[0]), 400
    how = Decoding(1, 3.0, generator=seeded_generator((0,)))
    (answers,) = batch.context(model, many).answer([question], how, many)
    ids = torch.tensor([question.prefix_ids + question.suffix_ids])
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            vision_features=batch.features[0].vision,
            prompt_masks=[question.region_cells],
            vp_overall_mask=torch.tensor([True]),
        ).logits[0, -1]
    said = torch.tensor([answer.token_ids[0] for answer in answers])
    logits[processor.never_sampled_ids] = float("-inf")
    share, best = (logits / 3.0).softmax(-1).max(0)
    assert 0.2 < share < 0.8, "a certain token would say nothing"
    assert (said == best).float().mean().item() == pytest.approx(share.item(), abs=0.07)


def test_segment_gives_the_embedding_whose_mask_is_predicted(opened: tuple[Any, Any, PromptBatch]) -> None:
    """Whether the expected answer is given, [SEG] comes later in another one, or never."""
    model, processor, batch = opened
    asked = [(2, LONG), (0, ITEMS[0].question), (3, "Hello"), (1, segment_question("a cross")), (3, NO_MASK)]
    context = batch.context(model)
    answers = context.segment([batch.question(row, text) for row, text in asked], LONGEST)
    logits = context.mask_logits(
        [batch.image_indices[row] for row, _ in asked], [embedding for _, embedding in answers]
    )
    drawn = []
    for (row, text), (ids, _), own in zip(asked, answers, logits, strict=True):
        plain = predict(model, processor, batch.images[row], text)
        drawn.append(own is not None)
        if own is not None:
            assert ids.index(processor.seg_token_id) == len(ids) - 1
            assert plain["prediction"].startswith(processor.text(ids).strip())
            np.testing.assert_allclose(
                batch.mask_probabilities(row, own[None]), plain["mask_probabilities"][0], atol=1e-3
            )
        else:
            assert ids == plain["mask_probabilities"] == []
    assert [drawn[n] for n in (0, 1, 3, 4)] == [True, True, True, False]


def test_masks_belong_to_their_image_and_their_number_at_once_changes_nothing(
    opened: tuple[Any, Any, PromptBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, batch = opened
    context = batch.context(model)
    answers = context.segment([batch.question(row, item.question) for row, item in enumerate(ITEMS)])
    embeddings = [embedding for _, embedding in answers]
    images = [batch.image_indices[row] for row in (3, 0, 2, 1, 0)]
    wanted = [embeddings[3], embeddings[0], None, embeddings[1], embeddings[1]]
    whole = context.mask_logits(images, wanted)
    monkeypatch.setattr("rl_reward_network.grpo.image_context.MASKS_AT_ONCE", 1)
    parts = context.mask_logits(images, wanted)
    for own, other, image, embedding in zip(whole, parts, images, wanted, strict=True):
        if embedding is None:
            assert own is None
            assert other is None
        else:
            with torch.no_grad():
                direct = model.decode_masks(batch.features[image].sam, embedding[None]).mask_logits[0]
            torch.testing.assert_close(own, direct, atol=1e-3, rtol=1e-4)
            torch.testing.assert_close(other, direct, atol=1e-3, rtol=1e-4)


def test_a_question_is_cut_where_the_image_ends(opened: tuple[Any, Any, PromptBatch]) -> None:
    _, processor, batch = opened
    question, other = (
        make_question(processor, n, processor.tokens_per_tile, t) for n, t in enumerate(("Where is it?", "Who?"))
    )
    assert question.prefix_ids == other.prefix_ids
    assert processor.text(question.prefix_ids).endswith("</img>")
    whole = processor("<image>Where is it?", batch.images[0])["input_ids"][0].tolist()
    assert question.prefix_ids + question.suffix_ids == whole
    assert (question.image_index, question.region_cells, other.image_index) == (0, None, 1)


def test_images_of_several_tiles_keep_apart(opened: tuple[Any, Any, PromptBatch]) -> None:
    """Prefixes of different lengths are padded; a region's rows are those of the thumbnail, the last tile."""
    model, processor, _ = opened
    images = [smooth_image(256, 256, 1), smooth_image(256, 520, 2)]
    mask = np.zeros((256, 520), dtype=bool)
    mask[60:200, 100:300] = True
    processor.max_tiles = 4
    try:
        features = list(FeatureCache(model, processor).get(images)[1].values())
        tiles = [processor.num_image_tokens(own.vision) for own in features]
        cells = processor.region_cells(mask[None])
        questions = [
            make_question(processor, 1, tiles[1], DESCRIBE, cells),
            make_question(processor, 0, tiles[0], LONG),
        ]
        prefixes = [make_question(processor, place, count, DESCRIBE).prefix_ids for place, count in enumerate(tiles)]
        answers = ImageContext(model, processor, features, prefixes).answer(questions, Decoding(LONGEST))
        alone = [
            predict(model, processor, images[1], DESCRIBE, mask)["prediction"],
            predict(model, processor, images[0], LONG)["prediction"],
        ]
    finally:
        processor.max_tiles = 1
    assert tiles[0] == processor.tokens_per_tile
    assert tiles[1] > 2 * processor.tokens_per_tile
    assert [processor.text(own.token_ids).removesuffix("<|im_end|>").strip() for (own,) in answers] == alone
