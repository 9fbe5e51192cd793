"""Sequences: parity with the official masks, frames with and without memory, and what the memory holds."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from rl_reward_network.embedded.angiograms import TREE, render_series
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.sa2va.generation_sa2va import image_features
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.pixels_sa2va import upsample_mask_logits
from rl_reward_network.models.sa2va.video_sa2va import (
    SequenceMemory,
    _encode,
    answer_sequence,
    check_memory,
    masks_with_memory,
    masks_without_memory,
)
from tests.conftest import GOLDEN, needs_golden, smooth_image
from tests.qwen_vl import QWEN3, QWEN25, write_tiny_qwen

TEXT = "<image>Please segment the vessel."


@pytest.fixture(scope="module")
def frames() -> list[np.ndarray]:
    picture = smooth_image(70, 90)
    return [np.roll(picture, 9 * number, axis=1) for number in range(8)]


@pytest.fixture(scope="module")
def seg(tiny_video_model: Any) -> torch.Tensor:
    return torch.randn(2, 64, generator=torch.Generator().manual_seed(0))


def listed(masks: Any) -> torch.Tensor:
    """(n, K, h, w)."""
    return torch.stack(list(masks))


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    """The official masks and memories of seven frames, and ours."""
    model, processor = load_sa2va_model(GOLDEN / "checkpoint")
    expected = load_file(GOLDEN / "expected.safetensors")
    picture = np.array(Image.open(GOLDEN / "image.png").convert("RGB"))
    rolled = [np.roll(picture, 11 * number, axis=1) for number in range(7)]
    memories: list[torch.Tensor] = []
    hook = model.grounding_encoder.memory_encoder.register_forward_hook(lambda *call: memories.append(call[2][0][0]))
    masks = listed(masks_with_memory(model, rolled, expected["seg_embeddings"], processor))
    last = image_features(model, processor, [rolled[6]])
    with torch.no_grad():
        _encode(model.grounding_encoder, last.maps[2], expected["video_low_res_mask_logits"][6])
    hook.remove()
    return {
        **{"model": model, "processor": processor, "frames": rolled, "masks": masks, "memories": memories},
        "expected_masks": expected["video_low_res_mask_logits"],
        "expected_memories": expected["video_memory_features_frames_0_and_6"],
    }


@needs_golden
def test_masks_and_memories_equal_the_official_models(golden):
    """The memory of frame 6 from the official mask: bfloat16 rounds otherwise after 1e-6, and 2e-2 is left then."""
    difference = (golden["masks"] - golden["expected_masks"]).abs().amax(dim=(1, 2, 3))
    print(f"largest differences of frames 0 to 6: {difference.tolist()}")  # shown by -rP
    assert (difference[:5] <= 5e-3).all()
    assert (difference[5:] <= 2e-2).all()
    first, last = golden["expected_memories"]
    assert (golden["memories"][0] - first).abs().max() <= 1e-2
    assert (golden["memories"][7] - last).abs().max() <= 1e-2
    assert ((golden["memories"][6] - last).abs() <= 1e-2).float().mean() >= 0.999


@needs_golden
def test_the_prompt_shows_five_frames_one_per_line(golden):
    processor = golden["processor"]
    inputs = processor.sequence_inputs(TEXT, golden["frames"][:5])
    block = "<img>" + "<IMG_CONTEXT>" * 256 + "</img>"
    prompt = processor.text(inputs["input_ids"][0].tolist())
    assert prompt == f"<|im_start|>user\n{chr(10).join([block] * 5)}Please segment the vessel.<|im_end|>\n" + (
        "<|im_start|>assistant\n"
    )
    assert inputs["pixel_values"].shape == (5, 3, 448, 448)
    meta = json.loads((GOLDEN / "meta.json").read_text())
    image = Image.open(GOLDEN / "image.png")
    one = processor.sequence_inputs(meta["text"], [image])
    assert torch.equal(one["input_ids"], processor(meta["text"], image)["input_ids"])


def test_predict_forward_of_a_sequence(tiny_video_model, tiny_processor, frames):
    result = tiny_video_model.predict_forward(video=frames, text=TEXT, processor=tiny_processor, max_new_tokens=20)
    (mask,), (probability,) = result["prediction_masks"], result["mask_probabilities"]
    assert result["prediction"] == "Sure [SEG].<|im_end|>"
    assert mask.shape == probability.shape == (8, 70, 90)
    assert (mask.dtype, probability.dtype) == (bool, np.float32)
    assert np.array_equal(mask, probability > 0.5)
    found = answer_sequence(tiny_video_model, frames[:5], "Please segment the vessel.", tiny_processor)
    assert found.answer == result["prediction"]
    logits = listed(masks_with_memory(tiny_video_model, frames, found.seg_embeddings, tiny_processor))
    expected = upsample_mask_logits(logits[:, 0], (70, 90), 256).sigmoid().numpy()
    np.testing.assert_allclose(probability, expected, atol=1e-4)
    assert 0.01 < mask.mean() < 0.99


@pytest.mark.parametrize("count", [1, 3])
def test_short_sequences_are_all_prompt(tiny_video_model, tiny_processor, frames, count):
    """Fewer than five frames: each by itself, and the one frame equals an image."""
    video, text = frames[:count], TEXT
    result = tiny_video_model.predict_forward(video=video, text=text, processor=tiny_processor)
    assert result["prediction_masks"][0].shape == (count, 70, 90)
    found = answer_sequence(tiny_video_model, video, text, tiny_processor)
    independent = listed(masks_without_memory(tiny_video_model, video, found.seg_embeddings, tiny_processor))
    expected = upsample_mask_logits(independent[:, 0], (70, 90), 256).sigmoid().numpy()
    np.testing.assert_allclose(result["mask_probabilities"][0], expected, atol=1e-4)
    if count == 1:
        image = tiny_video_model.predict_forward(image=video[0], text=text, processor=tiny_processor)
        assert image["prediction"] == result["prediction"]
        np.testing.assert_allclose(image["mask_probabilities"][0], result["mask_probabilities"][0], atol=1e-4)


def test_memory_matters_from_the_first_frame_that_is_not_prompted(tiny_video_model, tiny_processor, frames, seg):
    def run(order: list[int], prompted: int) -> torch.Tensor:
        chosen = [frames[number] for number in order]
        return listed(masks_with_memory(tiny_video_model, chosen, seg, tiny_processor, prompted))

    independent = listed(masks_without_memory(tiny_video_model, frames[:4], seg, tiny_processor))
    tracked, other_past = run([0, 1, 2, 3], 2), run([0, 7, 2, 3], 2)
    torch.testing.assert_close(tracked[:2], independent[:2], atol=1e-3, rtol=0)
    assert (tracked[2:] - independent[2:]).abs().amax() > 0.1
    assert (tracked[2:] - other_past[2:]).abs().amax() > 0.1


def test_two_segs_equal_two_runs(tiny_video_model, tiny_processor, frames, seg, monkeypatch):
    both = listed(masks_with_memory(tiny_video_model, frames, seg, tiny_processor, prompted=2))
    for index in range(2):
        one = listed(masks_with_memory(tiny_video_model, frames, seg[index : index + 1], tiny_processor, prompted=2))
        torch.testing.assert_close(both[:, index : index + 1], one, atol=2e-2, rtol=0)  # bfloat16 memory
    assert (both[:, 0] - both[:, 1]).abs().max() > 1
    monkeypatch.setattr("rl_reward_network.models.sa2va.video_sa2va.SEGS_AT_ONCE", 1)
    grouped = listed(masks_with_memory(tiny_video_model, frames, seg, tiny_processor, prompted=2))
    torch.testing.assert_close(both, grouped, atol=2e-2, rtol=0)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_frames_without_memory_equal_images(tiny_video_model, tiny_processor, frames, seg, batch_size):
    found = listed(masks_without_memory(tiny_video_model, frames, seg, tiny_processor, batch_size))
    with torch.no_grad():
        features = [image_features(tiny_video_model, tiny_processor, [frame]) for frame in frames]
        expected = torch.stack([tiny_video_model.decode_masks(maps, seg).mask_logits for maps in features])
    assert found.shape == (8, 2, 64, 64)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_frames_are_read_one_at_a_time(tiny_video_model, tiny_processor, frames, seg):
    read: list[int] = []
    stream = (read.append(number) or frame for number, frame in enumerate(frames))  # type: ignore[func-returns-value]
    tiny_video_model.train()
    try:
        masks = masks_with_memory(tiny_video_model, stream, seg, tiny_processor)
        assert read == []
        next(masks)
        assert read == [0]
        assert tiny_video_model.training, "between two frames the mode is the user's"
    finally:
        tiny_video_model.eval()
    stream = (read.append(number) or frame for number, frame in enumerate(frames))  # type: ignore[func-returns-value]
    read.clear()
    next(masks_without_memory(tiny_video_model, stream, seg, tiny_processor, batch_size=2))
    assert read == [0, 1]


def test_an_answer_without_seg_has_no_masks_and_runs_no_sam(tiny_video_model, tiny_processor, frames, monkeypatch):
    silent = copy.deepcopy(tiny_video_model)
    silent.lm_head.weight.data[tiny_processor.seg_token_id] = 0
    monkeypatch.setattr(type(silent), "get_sam_features", lambda *_: pytest.fail("SAM 2 was run"))
    result = silent.predict_forward(video=frames, text=TEXT, processor=tiny_processor, max_new_tokens=5)
    assert result["prediction"]
    assert result["prediction_masks"] == result["mask_probabilities"] == []
    found = answer_sequence(silent, frames[:2], TEXT, tiny_processor, max_new_tokens=5)
    assert found.seg_embeddings.shape == (0, 64)
    for masks in (masks_with_memory, masks_without_memory):
        assert listed(masks(silent, frames, found.seg_embeddings, tiny_processor)).shape == (8, 0, 64, 64)


BROKEN: list[tuple[Any, str]] = [
    ([], r"sequence has no frame, .* at least one"),
    ("scan.avi", r"video is 'scan\.avi', expected a list of frames"),
    (Image.new("RGB", (9, 9)), r"expected a list of frames"),
    ([smooth_image(20, 20), smooth_image(20, 24)], r"frame 1 is 24x20 pixels, frame 0 is 20x20; .*crop"),
    ([smooth_image(20, 20), None], r"frame 1 of the sequence: image is None"),
    ([smooth_image(20, 20), Path("a.png")], r"frame 1 of the sequence: .*PIL\.Image\.open"),
    ([np.zeros((20, 20, 3))], r"frame 0 of the sequence: .*uint8 .* got float64"),
]


@pytest.mark.parametrize(("video", "message"), BROKEN)
def test_broken_sequences_are_refused(tiny_video_model, tiny_processor, seg, video, message):
    with pytest.raises(ValueError, match=message):
        tiny_video_model.predict_forward(video=video, text=TEXT, processor=tiny_processor)
    with pytest.raises(ValueError, match=message):
        answer_sequence(tiny_video_model, video, TEXT, tiny_processor)
    for masks, embeddings in ((masks_with_memory, seg), (masks_without_memory, seg[:0])):
        with pytest.raises(ValueError, match=message):
            list(masks(tiny_video_model, video, embeddings, tiny_processor))


def test_bad_settings_are_refused_before_the_first_frame(tiny_model, tiny_video_model, tiny_processor, frames, seg):
    with pytest.raises(ValueError, match=r"6 frames .* at most 5; .*key_frames"):
        answer_sequence(tiny_video_model, frames[:6], TEXT, tiny_processor)
    with pytest.raises(ValueError, match=r"prompted is 0"):
        masks_with_memory(tiny_video_model, frames, seg, tiny_processor, prompted=0)
    with pytest.raises(ValueError, match=r"d_model\) is 32, .* multiple .* 64; .*masks_without_memory"):
        check_memory(tiny_model)
    with pytest.raises(ValueError, match=r"batch_size is 0"):
        masks_without_memory(tiny_video_model, frames, seg, tiny_processor, batch_size=0)
    with pytest.raises(ValueError, match=r"holds 0 '<image>'"):
        tiny_video_model.predict_forward(video=frames, text="The vessel.", processor=tiny_processor)


def test_the_embedded_model_carries_its_answer_on_the_first_frame_to_the_others():
    model, processor = load_sa2va_model(DEFAULT_MODEL)
    series = list(render_series(np.random.default_rng(1), "plain", 4))
    frames = [np.repeat(frame.image[..., None], 3, axis=2) for frame in series]
    found = answer_sequence(model, frames[:1], "Please segment the blood vessel.", processor)
    assert found.answer == "Sure, [SEG].<|im_end|>"
    masks = listed(masks_without_memory(model, frames, found.seg_embeddings, processor))[:, 0]
    for logits, frame in zip(masks, series, strict=True):
        truth = torch.from_numpy(frame.parts & TREE > 0)
        mask = upsample_mask_logits(logits[None], truth.shape, processor.sam_image_size)[0] > 0
        assert 2 * (mask & truth).sum() / (mask.sum() + truth.sum()) > 0.9
    with pytest.raises(ValueError, match=r"no memory: .* 'sam2', .*masks_without_memory"):
        masks_with_memory(model, frames, found.seg_embeddings, processor)
    with pytest.raises(ValueError, match=r"no memory"):
        model.predict_forward(video=frames, text=TEXT, processor=processor)


@pytest.mark.parametrize("kind", [QWEN3, QWEN25])
def test_a_qwen_vl_sees_five_images_side_by_side(kind, tmp_path):
    model, processor = load_sa2va_model(write_tiny_qwen(tmp_path / kind, kind))
    frames = [smooth_image(64, 96, seed) for seed in range(5)]
    inputs = processor.sequence_inputs("<image>Where?", frames)
    count = int(inputs["image_grid_thw"][0].prod()) // 4
    assert inputs["image_grid_thw"].tolist() == inputs["image_grid_thw"][:1].tolist() * 5
    picture = f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>"
    expected = f"<|im_start|>user\n{picture * 5}Where?<|im_end|>\n<|im_start|>assistant\n"
    assert processor.text(inputs["input_ids"][0].tolist()) == expected
    found = answer_sequence(model, frames, "Where?", processor)
    assert found.answer == "Sure [SEG].<|im_end|>"
    assert [len(logits) for logits in masks_without_memory(model, frames, found.seg_embeddings, processor)] == [1] * 5
    one = answer_sequence(model, frames[:1], "Where?", processor)
    (image,) = model.segment(frames[:1], ["Where?"], processor)[0]
    (logits,) = masks_without_memory(model, frames[:1], one.seg_embeddings, processor)
    torch.testing.assert_close(logits, image.mask_logits, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(one.seg_embeddings, found.seg_embeddings, atol=1e-3), "the other frames count"


# ---- SAM 2's memory -------------------------------------------------------------------------------------------------

MEMORY, WIDTH, CELLS = 64, 64, 256  # of the tiny model: 16 x 16 cells


@pytest.fixture(scope="module")
def remembered(tiny_video_model: Any) -> list[Any]:
    torch.manual_seed(0)
    pixels = torch.randn(8, 3, 256, 256)
    with torch.no_grad():
        maps = tiny_video_model.get_sam_features(pixels)
    return [maps[index] for index in range(8)]


def held(memory: SequenceMemory) -> int:
    frames = [tensor for frame in memory.prompted for tensor in frame]
    return sum(tensor.untyped_storage().nbytes() for tensor in [*frames, *memory.recent, *memory.pointers])


@torch.no_grad()
def test_the_memory_is_bounded_by_a_window(tiny_video_model, remembered):
    memory = SequenceMemory(tiny_video_model.grounding_encoder, torch.randn(2, WIDTH), prompted=5)
    sizes = []
    for number in range(40):
        memory.next_masks(remembered[number % 8])
        sizes.append((len(memory.prompted), len(memory.recent), len(memory.pointers), held(memory)))
    assert sizes[4][:3] == (5, 0, 0)
    assert sizes[10][:3] == (5, 6, 6)
    assert sizes[19][:3] == sizes[39][:3] == (5, 6, 15)
    # 11 frames of bfloat16 features, 20 pointers of float32, two [SEG].
    assert sizes[39][3] == 2 * (11 * CELLS * MEMORY * 2 + 20 * WIDTH * 4)
    assert {size for *_, size in sizes[19:]} == {sizes[39][3]}


@torch.no_grad()
def test_the_attended_tokens_equal_transformers_selection(tiny_video_model, remembered):
    """The frames, time steps and pointers that transformers' own loop picks from a full history, in its order."""
    sam = tiny_video_model.grounding_encoder
    memory, history = SequenceMemory(sam, torch.randn(1, WIDTH), prompted=3), Session()
    for number in range(23):
        memory.next_masks(remembered[number % 8])
        kept = memory.prompted[-1] if number < 3 else (memory.recent[-1], memory.pointers[-1])
        encoding = sam.memory_encoder.position_encoding((1, 64, 16, 16), "cpu", torch.float32)
        history.store(number, number < 3, *kept, encoding.flatten(2).permute(2, 0, 1))
    tokens, positions, pointer_tokens = memory._tokens()
    frames = sam._gather_memory_frame_outputs(history, 0, 23)
    expected, expected_positions = sam._build_memory_attention_inputs(frames, torch.device("cpu"))
    offsets, pointers, most = sam._get_object_pointers(history, 0, 23, 24, torch.device("cpu"))
    split, zeros = sam._process_object_pointers(offsets, pointers, most, 1, WIDTH, torch.device("cpu"))
    assert len(frames) == 3 + 6
    assert len(pointers) == pointer_tokens == 3 + 15
    assert torch.equal(tokens, torch.cat([*expected, split]).float())
    torch.testing.assert_close(positions, torch.cat([*expected_positions, zeros]), atol=1e-6, rtol=0)


class Session:
    """The part of transformers' inference session that its selection reads."""

    def __init__(self) -> None:
        self.output_dict_per_obj: dict[int, Any] = {0: {"cond_frame_outputs": {}, "non_cond_frame_outputs": {}}}

    def store(self, number: int, prompted: bool, features: Any, pointer: Any, positions: Any) -> None:
        outputs = {"maskmem_features": features, "object_pointer": pointer, "maskmem_pos_enc": positions}
        kind = "cond_frame_outputs" if prompted else "non_cond_frame_outputs"
        self.output_dict_per_obj[0][kind][number] = outputs


@torch.no_grad()
def test_a_low_object_score_changes_the_pointer_and_not_the_mask(tiny_video_model, remembered):
    sam, seg = tiny_video_model.grounding_encoder, torch.randn(1, WIDTH)
    expected = tiny_video_model.decode_masks(remembered[0], seg)
    bias = sam.mask_decoder.pred_obj_score_head.proj_out.bias
    before = bias.clone()
    pointers = []
    for shift in (-100.0, 100.0):
        memory = SequenceMemory(sam, seg, prompted=1)
        bias.copy_(before + shift)
        masks = memory.next_masks(remembered[0])
        bias.copy_(before)
        torch.testing.assert_close(masks, expected.mask_logits, atol=1e-4, rtol=0)
        pointers.append(memory.prompted[0][1])
    assert torch.equal(pointers[0], sam.no_object_pointer)
    assert not torch.equal(pointers[1], sam.no_object_pointer)
