"""Decoding, the official prediction and many prompts at once: states, guesses, masks, refusals."""

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rl_reward_network.atomic_io import weights_fingerprint
from rl_reward_network.env.mask_bank import NO_MASK_LOGIT
from rl_reward_network.inputs.segmenter import Sa2VASegmenter, load_segmenter
from rl_reward_network.models.sa2va import generation_sa2va
from rl_reward_network.models.sa2va.generation_sa2va import (
    Answer,
    Decoding,
    answer_batch,
    answer_text,
    decode,
    image_features,
)
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.pixels_sa2va import upsample_mask_logits
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.video_sa2va import answer_sequence, masks_without_memory
from tests.conftest import smooth_image, write_tiny_checkpoint

TEXTS = ["<image>Please segment the vessel.", "<image>Where are bright vessels, please?"]


def ask(model: Any, processor: Sa2VAProcessor, how: Decoding, texts: list[str] = TEXTS) -> list[Answer]:
    return answer_batch(model, processor, processor(texts, [smooth_image(120, 90)] * len(texts)), how)


@contextmanager
def counted(*modules: torch.nn.Module) -> Iterator[list[torch.nn.Module]]:
    calls: list[torch.nn.Module] = []
    hooks = [module.register_forward_hook(lambda module, *_: calls.append(module)) for module in modules]
    yield calls
    for hook in hooks:
        hook.remove()


def test_a_guess_never_changes_the_answer_and_a_right_one_saves_passes(tiny_model, tiny_processor):
    plain = ask(tiny_model, tiny_processor, Decoding(20))
    for guess in ("Sure [SEG].<|im_end|>", "Sure it is", "nonsense", "S", "Sure [SEG].<|im_end|>more"):
        guessed = ask(tiny_model, tiny_processor, Decoding(20, guess_ids=tiny_processor.token_ids(guess)))
        for a, b in zip(plain, guessed, strict=True):
            assert a.token_ids == b.token_ids
            states, same = (torch.stack(answer.states_at(tiny_processor.seg_token_id)) for answer in (a, b))
            assert torch.allclose(states, same, atol=1e-4)
    for guess_ids, passes in (((), len(plain[0].token_ids)), (plain[0].token_ids, 1)):
        with counted(tiny_model.model.language_model) as calls:
            ask(tiny_model, tiny_processor, Decoding(20, guess_ids=guess_ids), TEXTS[:1])
        assert len(calls) == passes, "the stop token's own state is not needed"


@pytest.mark.parametrize("every", [2, 8])
def test_tokens_that_are_looked_at_later_are_the_same(tiny_model, tiny_processor, monkeypatch, every):
    """Rows that end at different places, the limit inside a block, a guess, sampling: as if the host looked at each."""

    def answers() -> list[Answer]:
        seeded = [torch.Generator().manual_seed(seed) for seed in range(3)]
        sampled = [Decoding(12, 60.0, generator=generator) for generator in seeded]
        guesses = [Decoding(20, guess_ids=tiny_processor.token_ids(guess)) for guess in ("Sure it", "S")]
        ways = [Decoding(20), Decoding(3), Decoding(7), *guesses, *sampled]
        return [answer for how in ways for answer in ask(tiny_model, tiny_processor, how)]

    one_by_one = answers()
    assert len({len(answer.token_ids) for answer in one_by_one}) > 3
    monkeypatch.setitem(generation_sa2va.CHECKED_EVERY, "cpu", every)
    for one, other in zip(one_by_one, answers(), strict=True):
        assert other.token_ids == one.token_ids
        assert (other.stopped, other.finished) == (one.stopped, one.finished)
        seg = tiny_processor.seg_token_id
        for state, same in zip(one.states_at(seg), other.states_at(seg), strict=True):
            assert torch.allclose(state, same, atol=1e-5)


def test_state_at_seg_is_the_teacher_forced_one_even_where_the_limit_cuts(tiny_model, tiny_processor):
    seg = tiny_processor.seg_token_id
    answer = ask(tiny_model, tiny_processor, Decoding(20), TEXTS[:1])[0]
    inputs = tiny_processor(TEXTS[0], smooth_image(120, 90))
    inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([answer.token_ids])], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.no_grad():
        expected = tiny_model(**inputs).last_hidden_state[0][inputs["input_ids"][0] == seg]
    assert torch.allclose(torch.stack(answer.states_at(seg)), expected, atol=1e-4)
    cut = ask(tiny_model, tiny_processor, Decoding(answer.token_ids.index(seg) + 1), TEXTS[:1])[0]
    assert cut.token_ids[-1] == seg
    assert torch.allclose(torch.stack(cut.states_at(seg)), expected, atol=1e-4)


def test_sampling_repeats_with_its_seed_and_never_says_a_placeholder(tiny_model, tiny_processor):
    def sample(seed: int) -> list[list[int]]:
        how = Decoding(40, temperature=50.0, generator=torch.Generator().manual_seed(seed))
        return [answer.token_ids for answer in ask(tiny_model, tiny_processor, how, TEXTS * 4)]

    first = sample(0)
    assert first == sample(0)
    assert first != sample(1)
    assert not set(tiny_processor.never_sampled_ids) & {index for row in first for index in row}


@pytest.mark.parametrize("how", [{"top_p": 0.5}, {"top_k": 3}, {"repetition_penalty": 1.5}], ids=str)
def test_generate_takes_the_usual_ways_to_sample(tiny_model, tiny_processor, how):
    inputs = tiny_processor("<image>What is this?", smooth_image(60, 60))
    plain = {"max_new_tokens": 8, "do_sample": True, "temperature": 9.0}
    texts = []
    for settings in (plain, plain | how):
        torch.manual_seed(0)
        texts.append([tiny_processor.batch_decode(tiny_model.generate(**inputs, **settings))[0] for _ in range(4)])
    assert texts[0] != texts[1]


def test_a_stop_word_that_is_no_token_stops(tiny_model, tiny_processor):
    """As phi3_chat's `<|end|>` on a Qwen tokenizer: ordinary text of several tokens. The model spells it here."""
    model, processor = copy.deepcopy(tiny_model), copy.copy(tiny_processor)
    processor.template = dataclasses.replace(processor.template, stop_words=("<stop>",))
    spelled = processor.token_ids("[SEG]<stop>")
    assert len(spelled) == 1 + len("<stop>")
    embeds = model.get_input_embeddings().weight.data
    model.lm_head.weight.data.zero_()
    for current, following in zip([processor.token_ids("\n")[0], *spelled], [*spelled, spelled[0]], strict=True):
        model.lm_head.weight.data[following] += 8 * embeds[current] / embeds[current].norm()
    for layer in model.model.language_model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    answer = ask(model, processor, Decoding(40), TEXTS[:1])[0]
    assert answer_text(processor, answer) == "[SEG]<stop>"


def test_rows_that_differ_accept_different_parts_of_a_guess(tiny_model, tiny_processor):
    """Random heads: each row says something else, the guess is right for one row only."""
    model = copy.deepcopy(tiny_model)
    torch.manual_seed(1)
    model.lm_head.weight.data.normal_()
    for layer in model.model.language_model.layers:
        layer.self_attn.o_proj.weight.data.mul_(5)
    texts = [*TEXTS, "<image>Z?", "<image>12345678"]
    plain = ask(model, tiny_processor, Decoding(12), texts)
    assert len({tuple(answer.token_ids) for answer in plain}) > 1, "the rows must differ"
    for guess in (plain[0].token_ids, plain[-1].token_ids[:3], [*plain[1].token_ids, 5]):
        for a, b in zip(plain, ask(model, tiny_processor, Decoding(12, guess_ids=guess), texts), strict=True):
            assert a.token_ids == b.token_ids


def test_a_model_in_training_mode_answers_as_in_evaluation(tiny_model, tiny_processor):
    model = copy.deepcopy(tiny_model)
    expected = model.predict_forward(image=smooth_image(50, 50), text=TEXTS[0], processor=tiny_processor)
    model.activation_checkpointing_enable()
    model.train()
    found = model.predict_forward(image=smooth_image(50, 50), text=TEXTS[0], processor=tiny_processor)
    assert found["prediction"] == expected["prediction"]
    assert (found["prediction_masks"][0] == expected["prediction_masks"][0]).all()
    assert model.training
    with pytest.raises(ValueError, match="training"):
        decode(model, tiny_processor, torch.zeros(1, 2, 64), torch.ones(1, 2, dtype=torch.long), Decoding(5))


PROMPTS = ["Please segment the vessel.", "Bright vessels, please.", "X", "The main vessel only."]


def test_predict_forward_gives_masks_and_probabilities_at_image_size(tiny_model, tiny_processor):
    picture = Image.fromarray(smooth_image(70, 110)).convert("L")  # grey is converted
    past = tiny_processor.prompt_text("Hi") + "Hello<|im_end|>\n"
    plain = tiny_model.predict_forward(text="And?", past_text=past, processor=tiny_processor, max_new_tokens=12)
    assert plain["prediction"]
    assert plain["prediction_masks"] == plain["mask_probabilities"] == []
    result = tiny_model.predict_forward(image=picture, text="<image>Segment.", tokenizer=tiny_processor.tokenizer)
    (mask,), (probability,) = result["prediction_masks"], result["mask_probabilities"]
    assert mask.shape == probability.shape == (1, 70, 110)
    assert (mask.dtype, probability.dtype) == (bool, np.float32)
    assert np.array_equal(mask, probability > 0.5)
    assert 0 <= probability.min() < probability.max() <= 1


@pytest.mark.parametrize("video", [False, True])
def test_two_segs_give_two_masks_or_sequences_of_masks(tiny_video_model, tiny_processor, video):
    """The tiny model is made to loop from "." back to "[SEG]" until the limit."""
    model, image = copy.deepcopy(tiny_video_model), smooth_image(70, 90)
    seg, dot = tiny_processor.seg_token_id, tiny_processor.token_ids(".")[0]
    embeds = model.get_input_embeddings().weight.data
    model.lm_head.weight.data[seg] += 30 * embeds[dot] / embeds[dot].norm()
    shown = {"video": [image, image]} if video else {"image": image}
    result = model.predict_forward(**shown, text="<image>All.", processor=tiny_processor, max_new_tokens=10)
    count = result["prediction"].count("[SEG]")
    assert count >= 2
    for masks in (result["prediction_masks"], result["mask_probabilities"]):
        assert [mask.shape for mask in masks] == [(2 if video else 1, 70, 90)] * count


def test_regions_tiles_two_segs_and_a_spelled_stop_word_together(tmp_path):
    """The whole path at once; each mask is checked against the state of its [SEG] in a teacher-forced pass."""
    model, processor = load_sa2va_model(write_tiny_checkpoint(tmp_path, template="phi3_chat"))
    say = processor.token_ids("[SEG]<[SEG]end|>")  # as many different tokens as possible; "|" would come twice
    say = [index for index in say if index != processor.token_ids("|")[0]]
    processor.template = dataclasses.replace(processor.template, stop_words=("end>",))
    image = smooth_image(640, 700)
    text = "<image>What are region1 and region2?"
    head = model.lm_head
    model.lm_head = Scripted(list(say), head.weight.shape[0])
    result = model.predict_forward(image=image, text=text, mask_prompts=[regions()], processor=processor)
    model.lm_head = head
    assert result["prediction"] == "[SEG]<[SEG]end>"
    assert len(result["prediction_masks"]) == 2
    inputs = processor(text, image, [regions()])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([say])], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.no_grad():
        (embeddings,) = model.seg_embeddings(model(**inputs).last_hidden_state, inputs["input_ids"])
        decoded = model.decode_masks(model.get_sam_features(inputs["sam_pixel_values"]), embeddings)
        expected = upsample_mask_logits(decoded.mask_logits, (640, 700), processor.sam_image_size) > 0
    for found, mask in zip(result["prediction_masks"], expected, strict=True):
        assert (found[0] != mask.numpy()).mean() <= 0.0005
    assert (expected[0] != expected[1]).any(), "the two masks must differ, or their order could not be checked"


class Scripted(torch.nn.Module):
    """A head whose logits follow a script, one token per call."""

    def __init__(self, script: list[int], vocabulary: int) -> None:
        super().__init__()
        self.script, self.vocabulary = script, vocabulary

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*states.shape[:-1], self.vocabulary)
        logits[..., self.script.pop(0)] = 5.0
        return logits


def test_the_segmenter_joins_segs_and_keeps_no_seg_empty(tiny_model, tiny_processor):
    silent = copy.deepcopy(tiny_model)
    silent.lm_head.weight.data[tiny_processor.seg_token_id] = 0
    image = smooth_image(64, 80)
    for model, empty in ((tiny_model, False), (silent, True)):
        segmenter = Sa2VASegmenter(model, tiny_processor, 16, 20, "x")
        logits = segmenter.segment(image, PROMPTS[:2]).mask_logits
        assert (logits.shape, logits.dtype) == ((2, 64, 64), np.float32)
        assert (logits == NO_MASK_LOGIT).all() == empty
        probabilities = segmenter.upsample(logits, (64, 80))
        assert probabilities.shape == (2, 64, 80)
        assert (probabilities > 0.5).any() != empty


@pytest.mark.parametrize("where", ["model.language_model.norm.weight", "text_hidden_fcs.2.bias"])
def test_an_answer_of_overflowing_weights_is_an_error(tiny_model, tiny_processor, where):
    """Finite weights, whose products are not: neither an answer without `[SEG]` nor an empty mask."""
    model = copy.deepcopy(tiny_model)
    with torch.no_grad():
        model.get_parameter(where).fill_(3e38)
    image = smooth_image(64, 80)
    asked = (model, [image], "Segment.", tiny_processor, 20)
    for call in (
        lambda: model.segment([image], ["Segment."], tiny_processor, max_new_tokens=20),
        lambda: model.predict_forward(image=image, text="<image>Segment.", processor=tiny_processor),
        lambda: list(masks_without_memory(model, [image], answer_sequence(*asked).seg_embeddings, tiny_processor)),
    ):
        with pytest.raises(ValueError, match="computes NaN or infinity"):
            call()


def test_numbers_are_those_of_the_version_that_agreed_with_the_reference(tiny_model, tiling_processor):
    """Numbers of this model at the time when every tensor of the golden reference agreed, both encoders included."""
    image = smooth_image(640, 700)
    inputs = tiling_processor("<image>Please segment the vessel.", image, [regions()])
    with torch.no_grad():
        output = tiny_model(**inputs)
        features = tiny_model.get_sam_features(inputs["sam_pixel_values"])
    result = tiny_model.segment([image], PROMPTS[:1], tiling_processor)[0][0]
    numbers = {
        "prompt_length": float(inputs["input_ids"].shape[1]),
        "pixel": float(inputs["pixel_values"][3, 1, 100, 200]),
        "sam_pixel": float(inputs["sam_pixel_values"][0, 2, 30, 77]),
        "logits_mean": float(output.logits[0, -1].mean()),
        "logits_max": float(output.logits[0, -1].max()),
        "sam_coarse_std": float(features.maps[2].std()),
        "mask_logit": float(result.mask_logits[0, 20, 40]),
        "mask_share": float(result.masks().mean()),
        "iou_score": float(result.iou_scores[0]),
    }
    assert numbers == pytest.approx(EXPECTED, abs=2e-3)
    assert result.answer == "Sure [SEG].<|im_end|>"


def regions() -> np.ndarray:
    masks = np.zeros((2, 640, 700), dtype=bool)
    masks[0, 100:300, 50:200] = True
    masks[1, 400:600, 300:660] = True
    return masks


EXPECTED = {
    **{"prompt_length": 1451.0, "pixel": 0.32773, "sam_pixel": -1.33729, "logits_mean": 0.55545},
    **{"logits_max": 89.70077, "sam_coarse_std": 2.31615, "mask_logit": -3.19479, "mask_share": 0.20788},
    "iou_score": 0.80601,
}


def test_fingerprints_change_with_weights_and_limits(tiny_checkpoint, tiny_model):
    changed = copy.deepcopy(tiny_model)
    assert weights_fingerprint(changed) == weights_fingerprint(tiny_model)
    changed.lm_head.weight.data[3, 5] += 1e-3
    assert weights_fingerprint(changed) != weights_fingerprint(tiny_model)
    assert load_segmenter(tiny_checkpoint).fingerprint != load_segmenter(tiny_checkpoint, max_tiles=2).fingerprint


def test_encoders_run_once_per_image_and_not_for_known_features(tiny_model, tiny_processor):
    vision, sam = tiny_model.model.vision_tower, tiny_model.grounding_encoder.vision_encoder
    image = smooth_image(50, 60)
    with counted(vision, sam) as calls:
        expected, _ = tiny_model.segment([image] * 2, PROMPTS, tiny_processor, batch_size=2)
    assert (calls.count(vision), calls.count(sam)) == (2, 2)
    features = image_features(tiny_model, tiny_processor, [image])
    with counted(sam) as calls:
        (found,) = tiny_model.segment([image], PROMPTS, tiny_processor, batch_size=2, sam_features=[features])
    assert calls == []
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.mask_logits, other.mask_logits)
        assert torch.equal(one.vision_features, features.pooled()[0])


IMAGE, LISTS = smooth_image(64, 64), "images and prompts must be lists; put a single one into a list"
NO_REGIONS = [
    *(np.ones(shape, bool) for shape in ((1, 32, 64), (1, 64, 32), (64, 64), (1, 0, 0))),
    *(np.full((1, 64, 64), 0.4), np.full((1, 64, 64), 255, np.uint8), np.full((1, 64, 64), 1.0)),
]


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("predict_forward", {"text": None}, r"text is None"),
        ("predict_forward", {"text": ["a"]}, r"text is \['a'\], expected a string"),
        ("predict_forward", {"video": [IMAGE]}, r"video is given together with image"),
        ("predict_forward", {"processor": None}, r"processor and tokenizer are None"),
        ("predict_forward", {"past_text": "earlier"}, r"past_text"),
        *(
            ("predict_forward", {"image": kind("scan.png")}, r"image is .*scan\.png.*PIL\.Image\.open\('scan\.png'\)")
            for kind in (str, Path)
        ),
        *(("predict_forward", {"mask_prompts": [one]}, r"must be bool .* \(64, 64\), got ") for one in NO_REGIONS),
        ("segment", {"prompts": []}, r"0 prompts.* 16"),
        ("segment", {"prompts": ["a<image>", "b<image>"]}, r"prompts.*<image>"),
        ("segment", {"images": [7]}, r"image is 7, .*\(H, W, 3\)$"),
        *(("segment", {"prompts": "the vessel"}, LISTS), ("segment", {"images": IMAGE}, LISTS)),
        ("segment", {"images": Image.fromarray(IMAGE)}, LISTS),
        ("decode", {"how": Decoding(0)}, r"max_new_tokens.*0"),
        ("decode", {"how": Decoding(5, temperature=1.0, guess_ids=[1])}, r"guess.*temperature 0"),
        ("generate", {"num_return_sequences": 2, "do_sample": True}, "num_return_sequences"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_arguments_are_refused(tiny_model, tiny_processor, method, arguments, message):
    usual = {
        "predict_forward": {"image": IMAGE, "text": "<image>Describe region1.", "processor": tiny_processor},
        "segment": {"images": [IMAGE], "prompts": PROMPTS, "processor": tiny_processor},
        "generate": tiny_processor(TEXTS[0], IMAGE) if method == "generate" else {},
        "decode": {"processor": tiny_processor, "inputs": None, "attention_mask": None},
    }
    call = partial(decode, tiny_model) if method == "decode" else getattr(tiny_model, method)
    with pytest.raises(ValueError, match=message):
        call(**{**usual[method], **arguments})
