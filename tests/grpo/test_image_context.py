"""Image features, prefixes of images, batches of prompts: computed once, and equal to plain prediction."""

from typing import Any

import numpy as np
import pytest
import torch

from rl_reward_network.data.items import make_region
from rl_reward_network.data.masks import to_rle
from rl_reward_network.grpo import image_context as features_file
from rl_reward_network.grpo.image_context import (
    GIBIBYTE,
    FeatureCache,
    ImageContext,
    ImageFeatures,
    PromptBatch,
    Question,
    encode_image,
    make_question,
    open_batch,
    seeded_generator,
)
from rl_reward_network.grpo.measure import measure, unpacked
from rl_reward_network.grpo.prompts import DESCRIBE, TrainingItem, region_prompt, segment_question
from rl_reward_network.models.sa2va import side_network as side_file
from rl_reward_network.models.sa2va.generation_sa2va import Answer, Decoding
from rl_reward_network.models.sa2va.side_network import SideNetworkConfig
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
    images = [batch.image_indices[row] for row, _ in asked]
    logits = context.mask_logits(images, [embedding for _, embedding in answers])
    drawn = []
    for (row, text), (ids, _), own in zip(asked, answers, logits, strict=True):
        plain = predict(model, processor, batch.images[row], text)
        drawn.append(own is not None)
        if own is not None:
            assert ids.index(processor.seg_token_id) == len(ids) - 1
            assert plain["prediction"].startswith(processor.text(ids).strip())
            soft = batch.mask_probabilities(row, own[None])
            np.testing.assert_allclose(soft, plain["mask_probabilities"][0], atol=1e-3)
        else:
            assert ids == plain["mask_probabilities"] == []
    assert [drawn[n] for n in (0, 1, 3, 4)] == [True, True, True, False]


def test_masks_belong_to_their_image_and_their_number_at_once_changes_nothing(
    opened: tuple[Any, Any, PromptBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, batch = opened
    context = batch.context(model)
    answers = context.segment([batch.question(row, item.question) for row, item in enumerate(ITEMS)])
    images = [batch.image_indices[row] for row in (3, 0, 2, 1, 0)]
    wanted = [None if row is None else answers[row][1] for row in (3, 0, None, 1, 1)]
    whole = context.mask_logits(images, wanted)
    monkeypatch.setattr("rl_reward_network.grpo.image_context.MASKS_AT_ONCE", 1)
    parts = context.mask_logits(images, wanted)
    for own, other, image, embedding in zip(whole, parts, images, wanted, strict=True):
        if embedding is None:
            assert own is other is None
        else:
            with torch.no_grad():
                direct = model.decode_masks(batch.features[image].sam, embedding[None]).mask_logits[0]
            torch.testing.assert_close(own, direct, atol=1e-3, rtol=1e-4)
            torch.testing.assert_close(other, direct, atol=1e-3, rtol=1e-4)


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
        region, long = (
            make_question(processor, 1, tiles[1], DESCRIBE, cells),
            make_question(processor, 0, tiles[0], LONG),
        )
        prefixes = [long.prefix_ids, region.prefix_ids]
        answers = ImageContext(model, processor, features, prefixes).answer([region, long], Decoding(LONGEST))
        asked = ((images[1], DESCRIBE, mask), (images[0], LONG))
        alone = [predict(model, processor, *words)["prediction"] for words in asked]
    finally:
        processor.max_tiles = 1
    assert tiles[0] == processor.tokens_per_tile
    assert tiles[1] > 2 * processor.tokens_per_tile
    assert [processor.text(own.token_ids).removesuffix("<|im_end|>").strip() for (own,) in answers] == alone


IMAGES = [smooth_image(96, 80, seed) for seed in range(4)]


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    return nano()


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Which images were encoded, in order."""
    calls: list[np.ndarray] = []
    real = features_file.encode_image
    monkeypatch.setattr(features_file, "encode_image", lambda m, p, image, *_: calls.append(image) or real(m, p, image))
    return calls


def features(cache: FeatureCache, images: list[np.ndarray]) -> list[ImageFeatures]:
    digests, by_digest = cache.get(images)
    return [by_digest[digest] for digest in digests]


def assert_same(first: ImageFeatures, second: ImageFeatures) -> None:
    for own, other in zip((first.vision, *first.sam.maps), (second.vision, *second.sam.maps), strict=True):
        assert torch.equal(own, other)


def test_features_are_those_of_both_encoders(parts: tuple[Any, Any]) -> None:
    model, processor = parts
    (result,) = features(FeatureCache(model, processor), IMAGES[:1])
    inputs = processor("<image>Where?", IMAGES[0])
    with torch.no_grad():
        assert torch.equal(result.vision, model.model.get_vision_features(inputs["pixel_values"]))
        for own, direct in zip(result.sam.maps, model.get_sam_features(inputs["sam_pixel_values"]).maps, strict=True):
            assert torch.equal(own, direct)
    assert not any(tensor.requires_grad for tensor in (result.vision, *result.sam.maps))
    assert result.nbytes == sum(4 * tensor.numel() for tensor in (result.vision, *result.sam.maps))


def test_each_image_is_encoded_once(parts: tuple[Any, Any], encoded: list[np.ndarray]) -> None:
    cache = FeatureCache(*parts)
    first = features(cache, IMAGES[:2])
    again = features(cache, [IMAGES[1], IMAGES[2], IMAGES[0]])
    assert [image is own for image, own in zip(encoded, IMAGES[:3], strict=True)] == [True] * 3
    assert_same(again[0], first[1])
    assert_same(again[2], first[0])
    assert not torch.equal(first[0].vision, first[1].vision)


def test_the_images_seen_longest_ago_go_when_the_memory_is_full(
    parts: tuple[Any, Any], encoded: list[np.ndarray]
) -> None:
    size = encode_image(*parts, IMAGES[0]).nbytes
    encoded.clear()
    tiny = FeatureCache(*parts, limit_gib=0.0)
    for number in (0, 1, 1):
        assert tiny.get(IMAGES[number : number + 1])[0] == list(tiny.entries), "one always fits"
    encoded.clear()
    cache = FeatureCache(*parts, limit_gib=2.5 * size / GIBIBYTE)
    digests = [cache.get([IMAGES[number]])[0][0] for number in (0, 1, 0, 2)]
    assert list(cache.entries) == [digests[0], digests[3]], "the second was seen longest ago"
    assert cache.nbytes == 2 * size
    cache.get(IMAGES[1:2])
    assert list(cache.entries) == [digests[3], digests[1]]
    assert len(encoded) == 4


PICKED = [regions()[row] for row in (4, 0, 1)]  # the last two are of one image


@pytest.fixture(scope="module")
def picked(opened: tuple[Any, Any, PromptBatch]) -> tuple[Any, Any, PromptBatch]:
    return *opened[:2], open_batch(PICKED, opened[2].cache)


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


def test_images_are_told_apart_by_their_pixels_and_not_by_their_files(picked: tuple[Any, Any, PromptBatch]) -> None:
    """Two files with equal ends, as uncompressed images with a black margin have, and one picture in two files."""
    model, processor, _ = picked
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


def test_regions_of_equal_cells_are_described_once(
    picked: tuple[Any, Any, PromptBatch], asked: list[list[Question]]
) -> None:
    model, _, batch = picked
    mask: Any = batch.truths[1]
    nearly = mask.copy()
    nearly[1, 1] = True  # between the sample points
    said = batch.captions(batch.context(model), [1, 2, 0, 1], [mask, nearly, mask, mask], LONGEST)
    assert [len(questions) for questions in asked] == [2], "rows 1 and 2 are of one image, row 0 is not"
    assert said[0] == said[1] == said[3]
    assert [question.image_index for question in asked[0]] == [1, 0]


def test_equal_captions_of_a_row_are_drawn_once_and_empty_ones_never(
    picked: tuple[Any, Any, PromptBatch], asked: list[list[Question]]
) -> None:
    model, _, batch = picked
    context = batch.context(model)
    rows, captions = [1, 1, 2, 1, 0], ["a red square.", "a blue triangle.", "a red square.", "a red square.", ""]
    drawn = batch.masks_from_captions(context, rows, captions)
    assert list(drawn) == [(1, "a red square."), (1, "a blue triangle."), (2, "a red square.")]
    assert [len(questions) for questions in asked] == [3]
    (expected,) = batch.masks(context, [1], [segment_question("a blue triangle.")])
    np.testing.assert_allclose(np.asarray(drawn[1, "a blue triangle."]), np.asarray(expected), atol=1e-4)
    assert batch.masks_from_captions(context, [0], [""]) == {}


def test_masks_have_the_size_of_their_own_image(picked: tuple[Any, Any, PromptBatch]) -> None:
    """Images of a batch may differ in size."""
    model, processor, _ = picked
    image, mask = (part[20:220, :] for part in PICKED[0].load())
    cut = TrainingItem("g", "s", "n", "", PICKED[0].question, True, lambda: (image, mask))
    batch = open_batch([cut, PICKED[1]], FeatureCache(model, processor))
    drawn = batch.masks(batch.context(model), [0, 1], [cut.question, PICKED[1].question])
    assert [one.shape for one in drawn if one is not None] == [(200, 256), (256, 256)]
    alone = predict(model, processor, image, cut.question)["mask_probabilities"][0][0]
    np.testing.assert_allclose(drawn[0], alone, atol=1e-3)


def test_masks_of_validation_are_those_of_the_deployed_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A side network that trains computes in bfloat16 where the hardware has it; a deployed one does not."""
    monkeypatch.setattr(side_file, "mixed_precision", lambda device: torch.autocast("cpu", torch.bfloat16))
    model, processor = nano()
    model.add_side_network(SideNetworkConfig(pixels=128))
    torch.nn.init.normal_(model.side_network.head.weight, std=0.5)
    model.train()
    measured = measure(model, ITEMS, FeatureCache(model, processor), LONGEST, expected=False)
    batch = open_batch(ITEMS, FeatureCache(model, processor))
    (soft,) = batch.masks(batch.context(model), [0], [ITEMS[0].question])
    assert model.training
    for row, item in enumerate(ITEMS):
        ((deployed,),) = model.segment([item.load()[0]], [item.question], processor)
        assert (unpacked(measured.masks[row]) != deployed.masks()[0]).mean() < 1e-4
        if not row:
            np.testing.assert_allclose(np.asarray(soft), deployed.probabilities()[0], atol=1e-3)
