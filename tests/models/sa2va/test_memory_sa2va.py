from typing import Any

import pytest
import torch

from rl_reward_network.models.sa2va.video_sa2va import SequenceMemory, check_memory

MEMORY, WIDTH, CELLS = 64, 64, 256  # of the tiny model: 16 x 16 cells


@pytest.fixture(scope="module")
def features(tiny_video_model: Any) -> list[Any]:
    torch.manual_seed(0)
    pixels = torch.randn(8, 3, 256, 256)
    with torch.no_grad():
        maps = tiny_video_model.get_sam_features(pixels)
    return [maps[index] for index in range(8)]


def held(memory: SequenceMemory) -> int:
    """Bytes of all tensors that a memory holds on to, storage included."""
    frames = [tensor for frame in memory.prompted for tensor in (frame.features, frame.pointer)]
    return sum(tensor.untyped_storage().nbytes() for tensor in [*frames, *memory.recent, *memory.pointers])


@torch.no_grad()
def test_the_memory_is_bounded_by_a_window(tiny_video_model: Any, features: list[Any]) -> None:
    memory = SequenceMemory(tiny_video_model.grounding_encoder, torch.randn(2, WIDTH), prompted=5)
    sizes = []
    for number in range(40):
        memory.next_masks(features[number % 8])
        sizes.append((len(memory.prompted), len(memory.recent), len(memory.pointers), held(memory)))
    assert sizes[4][:3] == (5, 0, 0)
    assert sizes[10][:3] == (5, 6, 6)
    assert sizes[19][:3] == sizes[39][:3] == (5, 6, 15)
    # 11 frames of bfloat16 features, 20 pointers of float32, two [SEG].
    assert sizes[39][3] == 2 * (11 * CELLS * MEMORY * 2 + 20 * WIDTH * 4)
    assert {size for *_, size in sizes[19:]} == {sizes[39][3]}


@torch.no_grad()
def test_the_attended_tokens_equal_transformers_selection(tiny_video_model: Any, features: list[Any]) -> None:
    """The frames, time steps and pointers that transformers' own loop picks from a full history, in its order."""
    sam = tiny_video_model.grounding_encoder
    memory, history = SequenceMemory(sam, torch.randn(1, WIDTH), prompted=3), Session()
    for number in range(23):
        memory.next_masks(features[number % 8])
        prompted = number < 3
        frame = memory.prompted[-1] if prompted else None
        history.store(
            number,
            prompted,
            frame.features if frame else memory.recent[-1],
            frame.pointer if frame else memory.pointers[-1],
            sam.memory_encoder.position_encoding((1, 64, 16, 16), "cpu", torch.float32).flatten(2).permute(2, 0, 1),
        )
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
def test_a_low_object_score_changes_the_pointer_and_not_the_mask(tiny_video_model: Any, features: list[Any]) -> None:
    sam, seg = tiny_video_model.grounding_encoder, torch.randn(1, WIDTH)
    expected = tiny_video_model.decode_masks(features[0], seg)
    bias = sam.mask_decoder.pred_obj_score_head.proj_out.bias
    before = bias.clone()
    pointers = []
    for shift in (-100.0, 100.0):
        memory = SequenceMemory(sam, seg, prompted=1)
        bias.copy_(before + shift)
        masks = memory.next_masks(features[0])
        bias.copy_(before)
        torch.testing.assert_close(masks, expected.mask_logits, atol=1e-4, rtol=0)
        pointers.append(memory.prompted[0].pointer)
    assert torch.equal(pointers[0], sam.no_object_pointer)
    assert not torch.equal(pointers[1], sam.no_object_pointer)


def test_models_without_a_working_memory_are_refused(tiny_model: Any) -> None:
    with pytest.raises(ValueError, match=r"d_model\) is 32, .* multiple .* 64; .*masks_without_memory"):
        check_memory(tiny_model.grounding_encoder)
