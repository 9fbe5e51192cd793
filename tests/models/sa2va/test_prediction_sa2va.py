import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rl_reward_network.atomic_io import weights_fingerprint
from rl_reward_network.env.mask_bank import NO_MASK_LOGIT
from rl_reward_network.inputs.segmenter import Sa2VASegmenter, load_segmenter
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.pixels_sa2va import upsample_mask_logits
from rl_reward_network.models.sa2va.prediction_sa2va import image_features
from rl_reward_network.models.sa2va.video_sa2va import answer_sequence, masks_without_memory
from tests.conftest import smooth_image, write_tiny_checkpoint

PROMPTS = ["Please segment the vessel.", "Bright vessels, please.", "X", "The main vessel only."]


@pytest.mark.parametrize("batch_size", [16, 3])
def test_batched_segmentation_equals_single_predictions(tiny_model, tiling_processor, batch_size):
    images = [smooth_image(150, 150), smooth_image(640, 700, seed=2)]  # one tile, five tiles
    batched = tiny_model.segment(images, PROMPTS, tiling_processor, batch_size=batch_size)
    masks = []
    for image, row in zip(images, batched, strict=True):
        for prompt, found in zip(PROMPTS, row, strict=True):
            single = tiny_model.predict_forward(image=image, text="<image>" + prompt, processor=tiling_processor)
            assert found.answer == single["prediction"]
            assert (found.masks()[:, None] != np.stack(single["prediction_masks"])).mean() <= 0.0005
            masks.append(found.masks().mean())
    assert len(set(masks)) > 4, "prompts and images must matter, or this test could not fail"


def test_encoders_run_once_per_image(tiny_model, tiny_processor):
    calls: list[str] = []
    hooks = [
        tiny_model.model.vision_tower.register_forward_hook(lambda *_: calls.append("vision")),
        tiny_model.grounding_encoder.vision_encoder.register_forward_hook(lambda *_: calls.append("sam")),
    ]
    try:
        tiny_model.segment([smooth_image(50, 60)] * 2, PROMPTS, tiny_processor, batch_size=2)
    finally:
        for hook in hooks:
            hook.remove()
    assert sorted(calls) == ["sam", "sam", "vision", "vision"]


def test_predict_forward_gives_masks_and_probabilities_at_image_size(tiny_model, tiny_processor):
    picture = Image.fromarray(smooth_image(70, 110)).convert("L")  # grey is converted
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


def test_text_only_questions_have_no_mask(tiny_model, tiny_processor):
    past = tiny_processor.prompt_text("Hi") + "Hello<|im_end|>\n"
    result = tiny_model.predict_forward(text="And?", past_text=past, processor=tiny_processor, max_new_tokens=12)
    assert result["prediction"]
    assert result["prediction_masks"] == result["mask_probabilities"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": None}, r"text is None"),
        ({"text": ["a"]}, r"text is \['a'\], expected a string"),
        ({"video": [smooth_image(20, 20)]}, r"video is given together with image"),
        ({"processor": None}, r"processor and tokenizer are None"),
        ({"past_text": "earlier"}, r"past_text"),
        ({"image": "scan.png"}, r"image is .*scan\.png.*PIL\.Image\.open\('scan\.png'\)"),
        ({"image": Path("scan.png")}, r"image is .*scan\.png.*PIL\.Image\.open\('scan\.png'\)"),
        *(
            ({"mask_prompts": [region]}, r"mask_prompts: regions must be bool \(N, H, W\).* \(64, 64\), got ")
            for region in (
                *(np.ones(shape, bool) for shape in ((1, 32, 64), (1, 64, 32), (64, 64), (1, 0, 0))),
                *(np.full((1, 64, 64), 0.4), np.full((1, 64, 64), 255, np.uint8), np.full((1, 64, 64), 1.0)),
            )
        ),
    ],
)
def test_predict_forward_refuses_bad_arguments(tiny_model, tiny_processor, arguments, message):
    usual = {"image": smooth_image(64, 64), "text": "<image>Describe region1.", "processor": tiny_processor}
    with pytest.raises(ValueError, match=message):
        tiny_model.predict_forward(**(usual | arguments))


def test_segment_refuses_bad_arguments(tiny_model, tiny_processor):
    image, lists = smooth_image(50, 60), "images and prompts must be lists; put a single one into a list"
    for images, prompts, message in (
        ([image], [], r"0 prompts.* 16"),
        ([image], ["a<image>", "b<image>"], r"prompts.*<image>"),
        ([7], ["The vessel."], r"image is 7, .*\(H, W, 3\)$"),
        *(([image], "the vessel", lists), (image, PROMPTS, lists), (Image.fromarray(image), PROMPTS, lists)),
    ):
        with pytest.raises(ValueError, match=message):
            tiny_model.segment(images, prompts, tiny_processor)


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


def _masks_of_sequence(model, image, processor):
    embeddings = answer_sequence(model, [image], "Segment.", processor, 20).seg_embeddings
    return list(masks_without_memory(model, [image], embeddings, processor))


@pytest.mark.parametrize("where", ["model.language_model.norm.weight", "text_hidden_fcs.2.bias"])
def test_an_answer_of_overflowing_weights_is_an_error(tiny_model, tiny_processor, where):
    """Finite weights, whose products are not: neither an answer without `[SEG]` nor an empty mask."""
    model = copy.deepcopy(tiny_model)
    with torch.no_grad():
        model.get_parameter(where).fill_(3e38)
    image = smooth_image(64, 80)
    with pytest.raises(ValueError, match="computes NaN or infinity"):
        model.segment([image], ["Segment."], tiny_processor, max_new_tokens=20)
    with pytest.raises(ValueError, match="computes NaN or infinity"):
        model.predict_forward(image=image, text="<image>Segment.", processor=tiny_processor, max_new_tokens=20)
    with pytest.raises(ValueError, match="computes NaN or infinity"):
        _masks_of_sequence(model, image, tiny_processor)


def test_fingerprints_change_with_weights_and_limits(tiny_checkpoint, tiny_model):
    changed = copy.deepcopy(tiny_model)
    changed.lm_head.weight.data[3, 5] += 1e-3
    assert (
        weights_fingerprint(changed)
        != weights_fingerprint(tiny_model)
        == weights_fingerprint(copy.deepcopy(tiny_model))
    )
    assert load_segmenter(tiny_checkpoint).fingerprint != load_segmenter(tiny_checkpoint, max_tiles=2).fingerprint


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


def test_features_that_are_known_already_give_the_same_masks_and_no_second_encoding(
    tiny_model, tiny_processor, monkeypatch
):
    image = smooth_image(64, 80)
    ((expected,),) = tiny_model.segment([image], PROMPTS[:1], tiny_processor)
    features = image_features(tiny_model, tiny_processor, [image])
    monkeypatch.setattr(type(tiny_model), "get_sam_features", lambda *_: pytest.fail("encoded again"))
    ((found,),) = tiny_model.segment([image], PROMPTS[:1], tiny_processor, sam_features=[features])
    torch.testing.assert_close(found.mask_logits, expected.mask_logits, rtol=0, atol=0)
    torch.testing.assert_close(found.vision_features, features.pooled()[0], rtol=0, atol=0)
