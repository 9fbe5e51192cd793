"""The official model's outputs for Qwen3-VL and Qwen2.5-VL, and our intermediates under the same names."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from rl_reward_network.models.sa2va import pixels_sa2va
from rl_reward_network.models.sa2va.body_sa2va import NormedHead, three_positions
from rl_reward_network.models.sa2va.grounding_sa2va import mask_losses, sparse_prompts
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.pixels_sa2va import IMAGENET_MEAN, IMAGENET_STD, upsample_mask_logits
from tests.conftest import SHARED

CASES = ("case_q3", "case_q25")
FOLDERS = {name: SHARED / "golden" / name for name in CASES}
needs_golden_qwen = pytest.mark.skipif(
    not all(folder.exists() for folder in FOLDERS.values()),
    reason="the official model's reference outputs for Qwen-VL are not here",
)
MEAN, STD = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
MEAN_16, STD_16 = (constant.bfloat16().float() for constant in (MEAN, STD))
Case = dict[str, Any]


def read_case(name: str) -> Case:
    folder = FOLDERS[name]
    model, processor = load_sa2va_model(folder / "checkpoint")
    turns = json.loads((folder / "train_conversation.json").read_text())["conversation"]
    return {
        "name": name,
        "model": model,
        "processor": processor,
        "meta": json.loads((folder / "meta.json").read_text()),
        "image": Image.open(folder / "image.png"),
        "turns": [(ask["value"], answer["value"]) for ask, answer in zip(turns[::2], turns[1::2], strict=True)],
        "expected": load_file(folder / "expected.safetensors"),
    }


@contextmanager
def entering(modules: list[torch.nn.Module]) -> Iterator[list[Tensor]]:
    """The hidden states that enter each module in the block, in order."""
    seen: list[Tensor] = []

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"]).detach())

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def after_norm(model: Any, states: Tensor) -> Tensor:
    """What the head multiplies, from what the body gives."""
    return model.lm_head.norm(states) if isinstance(model.lm_head, NormedHead) else states


def run(case: Case, ids: Tensor, labels: Tensor, inputs: dict[str, Tensor]) -> Any:
    """The model's output for ids (T,), with `layers`: the states that enter layers 1, 2, ... and the final norm."""
    model = case["model"]
    text = model.model.language_model
    with entering([*text.layers[1:], text.norm]) as layers:
        pixels = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
        output = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], labels=labels[None], **pixels)
    return output, torch.cat(layers)


def table_parts(case: Case, ids: Tensor, grid: Tensor, prefix: str = "") -> dict[str, Tensor]:
    """Positions of ids (T,), and the distance of the next position from the next index."""
    table = case["model"].model.position_table(ids[None], [(int(grid[0, 1]), int(grid[0, 2]))])
    following = three_positions(table, torch.tensor([[len(ids)]]))
    assert following.unique().numel() == 1
    return {prefix + "position_ids": table[:, 0], prefix + "rope_deltas": following[0, 0] - len(ids)}


def pixel_parts(case: Case) -> dict[str, Tensor]:
    processor, image = case["processor"], case["image"]
    cell = processor.patches.patch_size * processor.patches.merge_size
    with patch.object(pixels_sa2va.F, "interpolate", wraps=F.interpolate) as second_resize:
        resized = pixels_sa2va.resized_image(image, cell, "prediction")
    inputs = processor(case["meta"]["text"], image)
    sam_u8 = (inputs["sam_pixel_values"][0] * STD_16 + MEAN_16).mul(255).round().byte()
    return {
        "image_first_resize_u8": second_resize.call_args.args[0][0],
        "image_resized_u8": resized,
        "pixel_values_every29th": inputs["pixel_values"][::29],
        "image_grid_thw": inputs["image_grid_thw"],
        "sam_pixel_values_u8_every4th": sam_u8[:, ::4, ::4],
        "sam_pixel_values_fp32_stride16": inputs["sam_pixel_values"][0, :, ::16, ::16],
        "train_image_resized_u8_every2nd": pixels_sa2va.resized_image(image, cell, "training")[:, ::2, ::2],
    }


def language_parts(case: Case) -> dict[str, Tensor]:
    model, processor, expected = case["model"], case["processor"], case["expected"]
    inputs = processor(case["meta"]["text"], case["image"])
    ids, answer = inputs["input_ids"][0], torch.tensor(processor.token_ids(case["meta"]["prediction"]))
    full_ids, prompt = torch.cat([ids, answer]), len(ids)
    labels = torch.cat([torch.full_like(ids, -100), answer])
    output, layers = run(case, full_ids, labels, inputs)
    states, logits = output.last_hidden_state[0], output.logits[0]
    at_seg = full_ids == processor.seg_token_id
    with patch.object(model.model, "get_rope_index", wraps=model.model.get_rope_index) as positions:
        prompt_table = table_parts(case, ids, inputs["image_grid_thw"])
    vision = model.model.get_vision_features(inputs["pixel_values"], inputs["image_grid_thw"])
    windowed = "vision_last_hidden_state_windowed" in expected
    before_merger = model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"]).last_hidden_state
    normed = after_norm(model, states)
    return prompt_table | {
        "input_ids": ids,
        "response_ids": answer,
        "full_ids": full_ids,
        "labels": labels,
        "mm_token_type_ids": positions.call_args.kwargs["mm_token_type_ids"][0],
        "full_position_ids": table_parts(case, full_ids, inputs["image_grid_thw"])["position_ids"],
        "vision_pooler_output": vision.tokens,
        "vision_deepstack_features": vision.deepstack,
        "vision_last_hidden_state" + "_windowed" * windowed: before_merger,
        "inputs_embeds": model.model.splice(ids[None], vision)["inputs_embeds"][0],
        "llm_layer_outputs": layers[:, :prompt],
        "last_hidden_state_prompt": normed[:prompt],
        "last_hidden_state_from_prompt_end": normed[prompt - 1 :],
        "last_layer_output_from_prompt_end": layers[-1, prompt - 1 :],
        "prompt_logits_every8th": logits[:prompt:8],
        "response_logits": logits[prompt - 1 : -1],
        "response_logprobs": logits[prompt - 1 : -1].log_softmax(-1).gather(1, answer[:, None])[:, 0],
        "loss_llm": output.loss[None],
        "seg_positions": at_seg.nonzero()[:, 0],
        "seg_hidden_states": states[at_seg],
        "seg_hidden_states_after_final_norm": normed[at_seg],
        "seg_embeddings": model.seg_embeddings(states[None], full_ids[None])[0],
    }


def sam_maps(case: Case, pixels: Tensor) -> dict[str, Any]:
    outputs: list[Any] = []
    hook = case["model"].grounding_encoder.vision_encoder.register_forward_hook(lambda *call: outputs.append(call[2]))
    features = case["model"].get_sam_features(pixels)
    hook.remove()
    return {"features": features, "encoder": outputs[0]}


def sam_parts(case: Case, maps: dict[str, Any], seg_embeddings: Tensor) -> dict[str, Tensor]:
    model, (fine, middle, coarse) = case["model"], maps["features"].maps
    decoded, sam = model.decode_masks(maps["features"], seg_embeddings), model.grounding_encoder
    logits = upsample_mask_logits(decoded.mask_logits, case["image"].size[::-1])
    without_memory = coarse + sam.no_memory_embedding.reshape(1, -1, 1, 1)
    return {
        "sam_trunk_last": maps["encoder"].last_hidden_state.permute(0, 3, 1, 2),
        "sam_fpn_0_every8th": fine[:, :, ::8, ::8],
        "sam_fpn_1_every4th": middle[:, :, ::4, ::4],
        "sam_fpn_2_every2nd": coarse[:, :, ::2, ::2],
        "sam_pos_enc_level2_every4th": maps["encoder"].fpn_position_encoding[-1][:, :, ::4, ::4],
        "sam_dense_pe_every4th": sam.get_image_wide_positional_embeddings()[:, :, ::4, ::4],
        "sam_image_embedding_with_no_mem_every2nd": without_memory[:, :, ::2, ::2],
        "sam_sparse_prompt": sparse_prompts(sam, seg_embeddings),
        "sam_dense_prompt_vector": sam.prompt_encoder.no_mask_embed.weight[0],
        "sam_mask_logits_all4": decoded.candidates,
        "sam_iou_all4": decoded.candidate_scores,
        "sam_object_score_logits": decoded.object_score_logits[:, None],
        "sam_selected_index": decoded.selected,
        "sam_low_res_mask_logits": decoded.mask_logits[:, None],
        "mask_logits_image_size_every4th": logits[:, ::4, ::4],
    }


def training_parts(case: Case, features: Any) -> dict[str, Tensor]:
    """The training side: one resize, two turns without a system turn, the losses of text and masks."""
    model, processor = case["model"], copy.copy(case["processor"])
    processor.image_resize = "training"
    inputs, (count,) = processor.vision_inputs([case["image"]])
    tokens = processor.tokenize_conversation(case["turns"], count)
    ids, labels = tokens["input_ids"], tokens["labels"]
    output, _ = run(case, ids, labels, inputs)
    embeddings = model.seg_embeddings(output.last_hidden_state, ids[None])[0]
    logits = model.decode_masks(features, embeddings).mask_logits
    return {
        **table_parts(case, ids, inputs["image_grid_thw"], "train_"),
        **training_losses(logits, case["expected"]["train_gt_masks"]),
        "train_image_grid_thw": inputs["image_grid_thw"],
        "train_pixel_values_every29th": inputs["pixel_values"][::29],
        "train_input_ids": ids,
        "train_labels": labels,
        "train_response_logits": output.logits[0, :-1][labels[1:] != -100],
        "train_loss_llm": output.loss[None],
        "train_seg_hidden_states": output.last_hidden_state[0, ids == processor.seg_token_id],
        "train_seg_embeddings": embeddings,
        "train_low_res_mask_logits_every2nd": logits[:, ::2, ::2],
    }


def training_losses(logits: Tensor, truth: Tensor) -> dict[str, Tensor]:
    five = [0, 1, 0, 1, 0]
    truth = official_targets(truth, logits.shape[-2:])
    losses = {"full": mask_losses(logits, truth), "five": mask_losses(logits[five], truth[five])}
    return {f"train_loss_{kind}_{which}": loss[None] for which, pair in losses.items() for kind, loss in pair.items()}


@torch.no_grad()
def all_parts(case: Case) -> Case:
    """The case with `parts`, every intermediate by its expected tensor's name, and SAM 2's maps of both kinds."""
    pixels = case["processor"].sam_pixel_values(case["image"])
    maps, unrounded = sam_maps(case, pixels), sam_maps(case, (pixels * STD_16 + MEAN_16 - MEAN) / STD)
    language = language_parts(case)
    image = pixel_parts(case) | sam_parts(case, maps, language["seg_embeddings"])
    training = training_parts(case, unrounded["features"])
    sam = {"sam": maps["features"], "sam_unrounded": unrounded["features"]}  # the training's constants are not rounded
    return case | sam | {"parts": language | image | training}


def official_targets(masks: Tensor, size: tuple[int, int]) -> Tensor:
    """float32 (K, h, w): masks (K, H, W) sampled by `nearest`, as in Sa2VA's recipe."""
    return F.interpolate(masks[:, None].float(), size=size, mode="nearest")[:, 0]


@cache
def read(name: str) -> Case:
    """`all_parts` of a case, computed once for all tests; they must not change it."""
    return all_parts(read_case(name))
