"""Every family of the table at toy size: loaded, converted, answering in batches; positions and norms of a Qwen-VL."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from rl_reward_network.atomic_io import read_json
from rl_reward_network.cli.convert import Args, main
from rl_reward_network.models.lora import setup_lora
from rl_reward_network.models.sa2va import Sa2VAForConditionalGeneration, Sa2VAProcessor, load_sa2va_model
from rl_reward_network.models.sa2va.body_sa2va import NormedHead, QwenVLBody, three_positions
from rl_reward_network.models.sa2va.configuration_sa2va import config_from_original
from rl_reward_network.models.sa2va.families import FAMILIES, Family, family_of, original_family
from rl_reward_network.models.sa2va.generation_sa2va import Decoding, answer_batch
from rl_reward_network.models.sa2va.loading_sa2va import convert_checkpoint
from tests.conftest import TINY_SAM, randomise, smooth_image, tiny_config, tiny_tokenizer, write_official
from tests.internlm2 import write_tiny_internlm2
from tests.qwen_vl import QWEN3, QWEN25, write_tiny_qwen

SMALL, WIDE = smooth_image(120, 90), smooth_image(60, 200, seed=1)
ASK = "<image>Please segment the vessel."
PROMPTS = [ASK, "<image>A?", "<image>Where are the bright vessels, please, and where do they end?"]


@pytest.fixture(scope="module", params=["internvl", "internlm2", QWEN3, QWEN25])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Model and processor that answer "Sure [SEG]."; tests must not change them."""
    if request.param == "internvl":
        return request.getfixturevalue("tiny_model"), request.getfixturevalue("tiny_processor")
    folder = tmp_path_factory.mktemp("family") / "model"
    internlm2 = request.param == "internlm2"
    model, processor = load_sa2va_model(
        write_tiny_internlm2(folder) if internlm2 else write_tiny_qwen(folder, request.param)
    )
    processor.max_tiles = 3 if internlm2 else 1  # WIDE is three tiles and a thumbnail, SMALL one
    return model, processor


of_qwen = pytest.mark.parametrize("loaded", [QWEN3, QWEN25], indirect=True)


@pytest.fixture
def body(loaded: tuple[Any, Any]) -> QwenVLBody:
    return loaded[0].model


def answers(model: Any, processor: Any, images: Sequence[Any], texts: Sequence[str], count: int = 20) -> list[Any]:
    return answer_batch(model, processor, processor(list(texts), list(images)), Decoding(count))


def states(answer: Any) -> Tensor:
    return torch.stack(answer.states)


# ---- the table ----


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architecture)
def test_a_model_of_each_family_loads_answers_converts_and_takes_lora(family: Family, tmp_path: Path) -> None:
    folder = tmp_path / "original"
    if family.body == "qwen_vl":
        write_tiny_qwen(folder, family.architecture)
    else:
        tokenizer = tiny_tokenizer()
        original = tiny_config(len(tokenizer))
        original["llm_config"] |= {"architectures": [family.architecture], **dict(family.demanded)}
        made: Any = Sa2VAForConditionalGeneration(config_from_original(original, TINY_SAM, "config.json"))
        randomise(made)
        tokenizer.save_pretrained(folder)
        write_official(folder, made, original)
    model, processor = load_sa2va_model(folder)
    assert model.model.language_model.config.model_type == family.config_class.model_type
    assert type(processor.tokenizer) is family.tokenizer_class
    asked = {"text": "<image>Where?", "image": smooth_image(50, 60), "processor": processor, "max_new_tokens": 4}
    answer = model.predict_forward(**asked)["prediction"]
    assert answer
    main(Args(str(folder), tmp_path / "ours"))
    main(Args(str(tmp_path / "ours"), tmp_path / "back"))
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    ours, _ = load_sa2va_model(tmp_path / "ours")
    assert ours.predict_forward(**asked)["prediction"] == answer
    setup_lora(ours, r=2)
    assert sum("lora_A" in name for name, _ in ours.named_parameters()) == ours.config.text_config.num_hidden_layers * 7


def test_what_cannot_be_built_is_named_with_what_is_supported() -> None:
    """The official configuration class of InternLM2 reads a missing `bias` as True."""
    for bias in (True, None):
        with pytest.raises(ValueError, match=rf"llm_config.bias is {bias}, expected False for InternVL with InternLM2"):
            original_family({"llm_config": {"architectures": ["InternLM2ForCausalLM"], "bias": bias}})
    with pytest.raises(ValueError, match=r"text_config.model_type is 'gemma', .*qwen2"):
        family_of(SimpleNamespace(model_type="gemma"))


def test_qwen3_under_internvl_is_the_model_of_transformers() -> None:
    original = tiny_config(300)
    original["llm_config"] |= {"architectures": ["Qwen3ForCausalLM"], "head_dim": 24, "attention_bias": False}
    model: Any = Sa2VAForConditionalGeneration(config_from_original(original, TINY_SAM, "config.json")).eval()
    randomise(model)
    language: Any = Qwen3ForCausalLM(model.config.text_config).eval()
    language.model.load_state_dict(model.model.language_model.state_dict())
    language.lm_head.load_state_dict(model.lm_head.state_dict())
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, language(input_ids=ids).logits)
    assert model.config.text_config.head_dim == 24


def test_a_resized_vocabulary_is_converted_and_leaves_the_logits_of_other_words(loaded, tmp_path):
    model, processor = (copy.deepcopy(part) for part in loaded)
    inputs, words = processor(ASK, SMALL), model.config.text_config.vocab_size
    processor.tokenizer.add_tokens(["<stenosis>"])
    with torch.no_grad():
        before = model(**inputs).logits
        model.resize_token_embeddings(words + 1, mean_resizing=False)
        after = model(**inputs).logits
    assert (type(model.lm_head), after.shape[-1]) == (type(loaded[0].lm_head), words + 1)
    torch.testing.assert_close(after[..., :words], before)
    model.save_pretrained(tmp_path / "ours")
    processor.save_pretrained(tmp_path / "ours")
    convert_checkpoint(str(tmp_path / "ours"), tmp_path / "official")
    again, other = load_sa2va_model(tmp_path / "official")
    assert other.token_ids("<stenosis>") == processor.token_ids("<stenosis>") == [words]
    state = again.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_a_qwen_vl_folder_with_the_processors_file_alone_loads(tmp_path: Path) -> None:
    """As transformers 5 writes it: the image processor is a part of processor_config.json."""
    folder = write_tiny_qwen(tmp_path / "model", QWEN3)
    expected, file = Sa2VAProcessor.from_pretrained(folder), folder / "preprocessor_config.json"
    fields = {"image_processor": read_json(file), "processor_class": "Qwen3VLProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(fields))
    file.unlink()
    processor = Sa2VAProcessor.from_pretrained(folder)
    for name, tensor in expected("<image>x", SMALL).items():
        assert torch.equal(processor("<image>x", SMALL)[name], tensor)


# ---- answers of all families ----


def test_padding_and_neighbours_change_no_answer(loaded: tuple[Any, Any]) -> None:
    images = [SMALL, WIDE, SMALL]
    for answer, image, text in zip(answers(*loaded, images, PROMPTS), images, PROMPTS, strict=True):
        (alone,) = answers(*loaded, [image], [text])
        assert answer.token_ids == alone.token_ids
        count = min(len(answer.states), len(alone.states))
        assert (states(answer)[:count] - states(alone)[:count]).abs().max() < 1e-4


def test_generate_gives_the_ids_and_states_of_the_decoding_loop(loaded: tuple[Any, Any]) -> None:
    model, processor = loaded
    inputs = processor(PROMPTS[:2], [SMALL, WIDE])
    output = model.generate(**inputs, max_new_tokens=12, output_hidden_states=True, return_dict_in_generate=True)
    generated = output.sequences[:, inputs["input_ids"].shape[1] :]
    steps = [step[-1][:, -1] for step in output.hidden_states]  # the state that predicts each token
    for row, answer in enumerate(answer_batch(model, processor, inputs, Decoding(12))):
        assert answer.finished
        assert generated[row, : len(answer.token_ids)].tolist() == answer.token_ids
        expected = torch.stack([step[row] for step in steps])[1 : len(answer.token_ids)]
        torch.testing.assert_close(states(answer)[: len(expected)], expected, atol=1e-4, rtol=0)


def test_features_that_were_computed_before_give_the_same_logits(loaded: tuple[Any, Any]) -> None:
    """The steps behind the prompt of a Qwen-VL need its positions, whichever way the image is given."""
    model, processor = loaded
    inputs = processor(ASK, WIDE)
    pixels = {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}
    asked = {"max_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
    text = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    by_features = model.generate(**text, vision_features=model.model.get_vision_features(**pixels), **asked).logits
    torch.testing.assert_close(by_features, model.generate(**inputs, **asked).logits, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match=r"placeholders.* 0 "):
        model(input_ids=inputs["input_ids"])


def test_segment_equals_one_prediction_for_each_pair(loaded: tuple[Any, Any]) -> None:
    """Prompts of different length on images of different size share the image's part of the cache."""
    model, processor = loaded
    for image, segmented in zip((SMALL, WIDE), model.segment([SMALL, WIDE], PROMPTS, processor, 2, 12), strict=True):
        for prompt, segmentation in zip(PROMPTS, segmented, strict=True):
            alone = model.predict_forward(image=image, text=prompt, processor=processor, max_new_tokens=12)
            assert segmentation.answer == alone["prediction"] == "Sure [SEG].<|im_end|>"
            expected = torch.tensor(alone["mask_probabilities"][0])
            torch.testing.assert_close(torch.tensor(segmentation.probabilities()), expected, atol=1e-3, rtol=0)
        masks = [segmentation.mask_logits for segmentation in segmented]
        assert (masks[0] - masks[1]).abs().max() > 1e-3, "the words must change the mask"


def test_a_seg_typed_by_the_user_makes_no_mask(loaded: tuple[Any, Any]) -> None:
    """A documented difference: the official prediction decodes a mask for it, too."""
    model, processor = loaded
    result = model.predict_forward(image=SMALL, text=ASK + " Answer [SEG].", processor=processor, max_new_tokens=12)
    assert result["prediction"].count("[SEG]") == len(result["prediction_masks"]) == 1


# ---- positions and norms of a Qwen-VL ----


def text_with_images(body: QwenVLBody, parts: Sequence[int | tuple[int, int]]) -> tuple[list[int], list[list[int]]]:
    """Ids, and (time, row, column) of each token, written out: a number is that many words, a pair a grid of patches.

    All tokens of an image have one time; the text goes on behind its longer side.
    """
    ids, positions, following = list[int](), list[list[int]](), 0
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


TEXTS: list[list[Any]] = [[7], [3, (4, 10), 6], [1, (12, 2), 5], [2, (4, 6), 3, (8, 2), 4], [4, (2, 4)]]


@of_qwen
def test_positions_are_counted_by_hand(body: QwenVLBody) -> None:
    """Of a batch, padded on the left: indices count from the first word, and behind the last they go on by one."""
    made = [text_with_images(body, parts) for parts in TEXTS]
    length = max(len(ids) for ids, _ in made) + 5
    padded = torch.tensor([[0] * (length - len(ids)) + ids for ids, _ in made])
    mask = torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids, _ in made])
    grids = [part for parts in TEXTS for part in parts if isinstance(part, tuple)]
    table = body.position_table(padded, grids, mask)
    assert table.shape == (3, len(TEXTS), length)
    for row, (ids, expected) in enumerate(made):
        following = max(max(position) for position in expected) + 1
        rest = [[following + k] * 3 for k in range(length - len(ids))]
        assert table[:, row].T.tolist() == expected + rest


def test_beyond_the_table_positions_go_on_by_one() -> None:
    table = torch.tensor([[[0, 1, 1, 4]], [[0, 1, 2, 4]], [[0, 1, 3, 4]]])
    found = three_positions(table, torch.tensor([[1, 2, 3, 4, 6]]))
    assert found[:, 0].tolist() == [[1, 1, 4, 5, 7], [1, 2, 4, 5, 7], [1, 3, 4, 5, 7]]


@of_qwen
def test_placeholders_and_rows_must_agree(loaded: tuple[Any, Any], body: QwenVLBody) -> None:
    features = body.get_vision_features(**loaded[1].vision_inputs([SMALL])[0])
    ids = torch.tensor([[5, *[body.config.image_token_id] * (len(features) - 1), 5]])
    with pytest.raises(ValueError, match=rf"{len(features) - 1} image placeholders, the image has {len(features)}"):
        body.splice(ids, features)
    with pytest.raises(ValueError, match="cannot be shown a region"):
        body.image_rows(features, [torch.ones(1, 4, 4, dtype=torch.bool)])
    inputs = loaded[1](ASK, SMALL)
    with pytest.raises(ValueError, match="image_grid_thw is missing"):
        loaded[0](input_ids=inputs["input_ids"], pixel_values=inputs["pixel_values"])


@of_qwen
def test_features_of_several_images_are_those_of_each(loaded: tuple[Any, Any], body: QwenVLBody) -> None:
    with torch.no_grad():
        together = body.get_vision_features(**loaded[1].vision_inputs([SMALL, WIDE])[0])
        alone = [body.get_vision_features(**loaded[1].vision_inputs([image])[0]) for image in (SMALL, WIDE)]
    joined = body.join(alone).to("cpu")
    assert joined.grids == together.grids
    torch.testing.assert_close(joined.tokens, together.tokens, atol=1e-4, rtol=0)
    torch.testing.assert_close(joined.deepstack, together.deepstack, atol=1e-4, rtol=0)
    assert len(joined.deepstack) == (2 if body.config.text_config.model_type == QWEN3 else 0)
    assert joined.nbytes == joined.tokens.nbytes + joined.deepstack.nbytes
    assert len(joined) == sum(len(image) for image in alone)


@of_qwen
def test_the_head_reads_the_norm_and_seg_the_state_before_it(loaded: tuple[Any, Any], body: QwenVLBody) -> None:
    norm, given = nn.LayerNorm(6), torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    nn.init.normal_(norm.weight)
    head = NormedHead(6, 4, norm)
    torch.testing.assert_close(head(given), norm(given) @ head.weight.T)
    assert {name for name, _ in head.named_parameters()} == {"weight", "norm.weight", "norm.bias"}
    before = body.config.text_config.model_type == QWEN3
    assert isinstance(loaded[0].lm_head, NormedHead) == isinstance(body.language_model.norm, nn.Identity) == before


@of_qwen
def test_text_goes_on_behind_a_cached_image_and_positions_matter(loaded: tuple[Any, Any], body: QwenVLBody) -> None:
    """Without an attention mask, indices are counted from what the cache holds."""
    inputs = loaded[1](ASK, WIDE)
    features = body.get_vision_features(inputs["pixel_values"], inputs["image_grid_thw"])
    ids, more = inputs["input_ids"], torch.tensor([loaded[1].token_ids("Sure [SEG].")])
    with torch.no_grad():
        whole = body(**body.splice(torch.cat([ids, more], dim=1), features)).last_hidden_state
        first = body.splice(ids, features)
        prompt = body(**first, use_cache=True)
        behind = {"past_key_values": prompt.past_key_values, "position_table": first.pop("position_table")}
        rest = body(inputs_embeds=body.get_input_embeddings()(more), **behind).last_hidden_state
        wrong = body(**first).last_hidden_state
    torch.testing.assert_close(rest, whole[:, -more.shape[1] :], atol=1e-4, rtol=0)
    assert (wrong - prompt.last_hidden_state)[0, -1].abs().max() > 1e-2, "positions counted one by one"


@of_qwen
def test_calls_leave_nothing_behind(loaded: tuple[Any, Any]) -> None:
    """Transformers keeps the distance of positions of the last image in `rope_deltas`; nothing here reads it."""
    model, processor = loaded
    first = {name: states(*answers(model, processor, [image], [ASK])) for name, image in (("s", SMALL), ("w", WIDE))}
    text = processor("Hello?")
    plain = answer_batch(model, processor, text, Decoding(5))[0].token_ids
    model.generate(**processor(ASK, WIDE), max_new_tokens=4)
    for name, image in (("s", SMALL), ("w", WIDE), ("s", SMALL)):
        model.model.rope_deltas = torch.tensor([[1000]])
        assert torch.equal(states(*answers(model, processor, [image], [ASK])), first[name])
    assert answer_batch(model, processor, text, Decoding(5))[0].token_ids == plain
    model.model.rope_deltas = None
