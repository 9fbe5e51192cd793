"""Positions of images and text, states on either side of the final norm, and that calls leave nothing behind."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_reward_network.models.sa2va.body_qwen_vl import NormedHead, QwenVisionFeatures, QwenVLBody, three_positions
from rl_reward_network.models.sa2va.generation_sa2va import Decoding
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.prediction_sa2va import answer_batch
from tests.conftest import smooth_image
from tests.qwen_vl import QWEN3, QWEN25, write_tiny_qwen

SMALL, WIDE = smooth_image(120, 90), smooth_image(60, 200, seed=1)
ASK = "<image>Please segment the vessel."


@pytest.fixture(scope="module", params=[QWEN3, QWEN25])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Model and processor; tests must not change them."""
    return load_sa2va_model(write_tiny_qwen(tmp_path_factory.mktemp("body") / "model", request.param))


@pytest.fixture(scope="module")
def body(loaded: tuple[Any, Any]) -> QwenVLBody:
    return loaded[0].model


def text_with_images(body: QwenVLBody, parts: Sequence[int | tuple[int, int]]) -> tuple[list[int], list[list[int]]]:
    """Ids, and (time, row, column) of each token, written out: a number is that many words, a pair a grid of patches.

    All tokens of an image have one time; the text goes on behind its longer side.
    """
    ids: list[int] = []
    positions: list[list[int]] = []
    following = 0
    for part in parts:
        if isinstance(part, int):
            ids += [5] * part
            positions += [[following + k] * 3 for k in range(part)]
            following += part
        else:
            rows, columns = part[0] // 2, part[1] // 2
            ids += [body.config.image_token_id] * rows * columns
            positions += [[following, following + r, following + c] for r in range(rows) for c in range(columns)]
            following += max(rows, columns)
    return ids, positions


TEXTS: dict[str, list[int | tuple[int, int]]] = {
    "text only": [7],
    "one image": [3, (4, 10), 6],
    "tall image": [1, (12, 2), 5],
    "two images": [2, (4, 6), 3, (8, 2), 4],
    "image last": [4, (2, 4)],
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("padding", [0, 5])
def test_positions_are_counted_by_hand(body, name, padding):
    ids, expected = text_with_images(body, TEXTS[name])
    grids = [part for part in TEXTS[name] if isinstance(part, tuple)]
    mask = torch.tensor([[0] * padding + [1] * len(ids)])
    table = body.position_table(torch.tensor([[0] * padding + ids]), grids, mask)
    assert table.shape == (3, 1, padding + len(ids))
    assert table[:, 0, : len(ids)].T.tolist() == expected, "indices count from the first word, not from the padding"
    following = max(max(position) for position in expected) + 1
    assert table[:, 0, len(ids) :].T.tolist() == [[following + k] * 3 for k in range(padding)], "goes on by one"


def test_rows_of_a_batch_have_their_own_images(body):
    names = ["two images", "text only", "tall image"]
    made = [text_with_images(body, TEXTS[name]) for name in names]
    length = max(len(ids) for ids, _ in made)
    padded = torch.tensor([[0] * (length - len(ids)) + ids for ids, _ in made])
    mask = torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids, _ in made])
    grids = [part for name in names for part in TEXTS[name] if isinstance(part, tuple)]
    table = body.position_table(padded, grids, mask)
    for row, (ids, expected) in enumerate(made):
        assert table[:, row, : len(ids)].T.tolist() == expected, names[row]


def test_beyond_the_table_positions_go_on_by_one():
    table = torch.tensor([[[0, 1, 1, 4]], [[0, 1, 2, 4]], [[0, 1, 3, 4]]])
    found = three_positions(table, torch.tensor([[1, 2, 3, 4, 6]]))
    assert found[:, 0].tolist() == [[1, 1, 4, 5, 7], [1, 2, 4, 5, 7], [1, 3, 4, 5, 7]]


def test_placeholders_and_rows_must_agree(loaded, body):
    features = body.get_vision_features(**loaded[1].vision_inputs([SMALL])[0])
    ids = torch.tensor([[5, *[body.config.image_token_id] * (len(features) - 1), 5]])
    with pytest.raises(ValueError, match=rf"{len(features) - 1} image placeholders, the image has {len(features)}"):
        body.splice(ids, features)
    with pytest.raises(ValueError, match=rf"{len(features) - 1} image placeholders, the image has 0"):
        body.splice(ids)
    with pytest.raises(ValueError, match="cannot be shown a region"):
        body.image_rows(features, [torch.ones(1, 4, 4, dtype=torch.bool)])
    inputs = loaded[1](ASK, SMALL)
    with pytest.raises(ValueError, match="image_grid_thw is missing"):
        loaded[0](input_ids=inputs["input_ids"], pixel_values=inputs["pixel_values"])


def test_features_of_several_images_are_those_of_each(loaded, body):
    processor = loaded[1]
    with torch.no_grad():
        together = body.get_vision_features(**processor.vision_inputs([SMALL, WIDE])[0])
        alone = [body.get_vision_features(**processor.vision_inputs([image])[0]) for image in (SMALL, WIDE)]
    joined = body.join(alone)
    assert joined.grids == together.grids
    torch.testing.assert_close(joined.tokens, together.tokens, atol=1e-4, rtol=0)
    torch.testing.assert_close(joined.deepstack, together.deepstack, atol=1e-4, rtol=0)
    assert len(joined.deepstack) == (2 if body.config.text_config.model_type == QWEN3 else 0)
    assert joined.nbytes == joined.tokens.nbytes + joined.deepstack.nbytes
    moved = joined.to("cpu")
    assert isinstance(moved, QwenVisionFeatures)
    assert len(moved) == sum(len(image) for image in alone)


def test_the_head_reads_the_norm_and_seg_the_state_before_it(loaded, body):
    norm, given = nn.LayerNorm(6), torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    nn.init.normal_(norm.weight)
    head = NormedHead(6, 4, norm)
    torch.testing.assert_close(head(given), norm(given) @ head.weight.T)
    assert {name for name, _ in head.named_parameters()} == {"weight", "norm.weight", "norm.bias"}
    assert (head.in_features, head.out_features) == (6, 4)
    before = body.config.text_config.model_type == QWEN3
    assert isinstance(loaded[0].lm_head, NormedHead) == isinstance(body.language_model.norm, nn.Identity) == before


def answers(model: Any, processor: Any, images: Sequence[Any], texts: Sequence[str]) -> list[Any]:
    return answer_batch(model, processor, processor(list(texts), list(images)), Decoding(20))


def states(answer: Any) -> Tensor:
    return torch.stack(answer.states)


def test_padding_and_neighbours_change_no_answer(loaded):
    texts = [ASK, "<image>A?", "<image>Where are the bright vessels, please, and where do they end?"]
    images = [SMALL, WIDE, SMALL]
    for answer, image, text in zip(answers(*loaded, images, texts), images, texts, strict=True):
        (alone,) = answers(*loaded, [image], [text])
        assert answer.token_ids == alone.token_ids
        count = min(len(answer.states), len(alone.states))
        assert (states(answer)[:count] - states(alone)[:count]).abs().max() < 1e-4


def test_text_goes_on_behind_a_cached_image(loaded, body):
    """Without an attention mask, indices are counted from what the cache holds."""
    inputs = loaded[1](ASK, WIDE)
    features = body.get_vision_features(inputs["pixel_values"], inputs["image_grid_thw"])
    ids, more = inputs["input_ids"], torch.tensor([loaded[1].token_ids("Sure [SEG].")])
    with torch.no_grad():
        whole = body(**body.splice(torch.cat([ids, more], dim=1), features)).last_hidden_state
        first = body.splice(ids, features)
        cache = body(**first, use_cache=True).past_key_values
        behind = {"past_key_values": cache, "position_table": first["position_table"]}
        rest = body(inputs_embeds=body.get_input_embeddings()(more), **behind).last_hidden_state
    torch.testing.assert_close(rest, whole[:, -more.shape[1] :], atol=1e-4, rtol=0)


def test_calls_leave_nothing_behind(loaded):
    """Transformers keeps the distance of positions of the last image in `rope_deltas`; nothing here reads it."""
    model, processor = loaded
    first = {name: states(*answers(model, processor, [image], [ASK])) for name, image in (("s", SMALL), ("w", WIDE))}
    model.generate(**processor(ASK, WIDE), max_new_tokens=4)
    for name, image in (("s", SMALL), ("w", WIDE), ("s", SMALL)):
        model.model.rope_deltas = torch.tensor([[1000]])
        assert torch.equal(states(*answers(model, processor, [image], [ASK])), first[name])
    text = processor("Hello?")
    plain = answer_batch(model, processor, text, Decoding(5))[0].token_ids
    model.model.rope_deltas = None
    assert answer_batch(model, processor, text, Decoding(5))[0].token_ids == plain


def test_generate_gives_the_ids_and_states_of_the_decoding_loop(loaded):
    model, processor = loaded
    inputs = processor([ASK, "<image>A?"], [SMALL, WIDE])
    output = model.generate(**inputs, max_new_tokens=12, output_hidden_states=True, return_dict_in_generate=True)
    generated = output.sequences[:, inputs["input_ids"].shape[1] :]
    steps = [step[-1][:, -1] for step in output.hidden_states]  # the state that predicts each token
    for row, answer in enumerate(answer_batch(model, processor, inputs, Decoding(12))):
        assert generated[row, : len(answer.token_ids)].tolist() == answer.token_ids
        expected = torch.stack([step[row] for step in steps])[1 : len(answer.token_ids)]
        torch.testing.assert_close(states(answer)[: len(expected)], expected, atol=1e-4, rtol=0)


def test_generate_takes_features_that_were_computed_before(loaded):
    """The steps behind the prompt need its positions, whichever way the image is given."""
    model, processor = loaded
    inputs = processor(ASK, WIDE)
    features = model.model.get_vision_features(inputs["pixel_values"], inputs["image_grid_thw"])
    asked = {"max_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
    text = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    by_features = model.generate(**text, vision_features=features, **asked).logits
    torch.testing.assert_close(by_features, model.generate(**inputs, **asked).logits, atol=1e-4, rtol=0)


def test_segment_equals_one_prediction_for_each_pair(loaded):
    """Prompts of different length on images of different size share the image's part of the cache."""
    model, processor = loaded
    prompts = [ASK, "<image>A?", "<image>Where are the bright vessels, please, and where do they end?"]
    for image, segmented in zip((SMALL, WIDE), model.segment([SMALL, WIDE], prompts, processor, 2, 12), strict=True):
        for prompt, segmentation in zip(prompts, segmented, strict=True):
            alone = model.predict_forward(image=image, text=prompt, processor=processor, max_new_tokens=12)
            assert segmentation.answer == alone["prediction"]
            assert len(segmentation.mask_logits) == len(alone["prediction_masks"]) >= 1
            expected = torch.tensor(alone["mask_probabilities"][0])
            torch.testing.assert_close(torch.tensor(segmentation.probabilities()), expected, atol=1e-3, rtol=0)


def test_a_seg_typed_by_the_user_makes_no_mask(loaded):
    """A documented difference: the official prediction decodes a mask for it, too."""
    model, processor = loaded
    result = model.predict_forward(image=SMALL, text=ASK + " Answer [SEG].", processor=processor, max_new_tokens=12)
    assert result["prediction"].count("[SEG]") == len(result["prediction_masks"]) == 1


def test_positions_matter(loaded):
    """So that the tests above can fail: positions counted one by one give other states."""
    model, processor = loaded
    inputs = processor(ASK, WIDE)
    features = model.model.get_vision_features(inputs["pixel_values"], inputs["image_grid_thw"])
    spliced = model.model.splice(inputs["input_ids"], features)
    with torch.no_grad():
        right = model.model(**spliced).last_hidden_state
        wrong = copy.copy(spliced)
        del wrong["position_table"]
        assert (model.model(**wrong).last_hidden_state - right)[0, -1].abs().max() > 1e-2


def test_new_words_leave_the_logits_of_the_others_as_they_are(loaded):
    model, processor = copy.deepcopy(loaded[0]), loaded[1]
    inputs, words = processor(ASK, SMALL), len(processor.tokenizer)
    with torch.no_grad():
        before = model(**inputs).logits
        model.resize_token_embeddings(words + 3, mean_resizing=False)
        after = model(**inputs).logits
    assert after.shape[-1] == words + 3
    torch.testing.assert_close(after[..., :words], before)
    assert type(model.lm_head) is type(loaded[0].lm_head)
