"""The model's parts: rows of regions, layers, masks, what trains; shapes and dtypes in bfloat16 on the meta device.

The meta device computes no value. Fake tensors of a made-up GPU would say the device as well, but a CPU build of torch
cannot index them.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from rl_reward_network.models.lora import freeze_parameters, setup_lora, unreached_parameters
from rl_reward_network.models.sa2va.grounding_sa2va import mask_losses
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from tests.conftest import smooth_image

TEXT = "<image>Please segment the vessel."


def teacher_forced(processor: Sa2VAProcessor, image: np.ndarray, answer: str = "Sure [SEG].") -> dict[str, Any]:
    inputs = processor(TEXT, image)
    tokens = processor.tokenize_conversation([(TEXT, answer)], processor.num_image_tokens(inputs["pixel_values"]))
    ids = tokens["input_ids"][None]
    return inputs | {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": tokens["labels"][None]}


def mask_loss(model: Sa2VAForConditionalGeneration, inputs: dict[str, Any], truth: torch.Tensor) -> torch.Tensor:
    output = model(**inputs)
    (embeddings,) = model.seg_embeddings(output.last_hidden_state, inputs["input_ids"])
    decoded = model.decode_masks(model.get_sam_features(inputs["sam_pixel_values"]), embeddings)
    return sum(mask_losses(decoded.mask_logits, truth).values())


@pytest.fixture
def model_copy(tiny_model: Sa2VAForConditionalGeneration) -> Sa2VAForConditionalGeneration:
    return copy.deepcopy(tiny_model)


def test_region_rows_follow_the_thumbnail_in_row_major_order(tiny_model):
    features = torch.randn(3, 1024, 32)  # tiles of image 1 (two), image 2 (one)
    cells = torch.zeros(2, 16, 16, dtype=torch.bool)
    cells[0, 3, 4] = cells[0, 3, 9] = cells[1, 0, 0] = True
    with torch.no_grad():
        rows = tiny_model.model.image_rows(features, [cells], torch.tensor([False, True, False]))
        tokens = tiny_model.model.project(features)
    expected = torch.cat([tokens[0], tokens[1], tokens[1][[3 * 16 + 4, 3 * 16 + 9, 0]], tokens[2]])
    assert torch.equal(rows, expected)


def test_another_vision_layer_is_another_hidden_state(model_copy):
    pixels = torch.randn(1, 3, 448, 448)
    states = model_copy.model.vision_tower(pixels, output_hidden_states=True).hidden_states
    model_copy.config.vision_feature_layer = 0
    assert torch.equal(model_copy.model.get_vision_features(pixels), states[0][:, 1:])
    model_copy.config.vision_feature_layer = -2
    assert torch.equal(model_copy.model.get_vision_features(pixels), states[-2][:, 1:])
    assert not torch.equal(states[-2], states[-1])


def test_prompts_decode_as_one_by_one_to_the_candidate_with_the_highest_predicted_iou(tiny_model):
    features, prompts = tiny_model.get_sam_features(torch.randn(1, 3, 256, 256)), torch.randn(4, 32)
    with torch.no_grad():
        decoded = tiny_model.decode_masks(features, prompts)
        single = torch.cat([tiny_model.decode_masks(features, prompt[None]).mask_logits for prompt in prompts])
    assert torch.allclose(decoded.mask_logits, single, atol=1e-4)
    best = decoded.candidate_scores[:, 1:].argmax(dim=1) + 1
    assert torch.equal(decoded.selected, best)
    assert torch.equal(decoded.iou_scores, decoded.candidate_scores[torch.arange(4), best])
    assert torch.equal(decoded.mask_logits, decoded.candidates[torch.arange(4), best])


def test_a_mask_loss_reaches_the_parts_that_train(model_copy, tiny_processor):
    """Not reached: heads without a loss, candidates that were not selected, and unused kinds of prompts."""
    setup_lora(model_copy, r=2, lora_alpha=4, lora_dropout=0.0)
    freeze_parameters(model_copy)
    inputs = teacher_forced(tiny_processor, smooth_image(100, 120))
    truth = torch.zeros(1, 100, 120, dtype=torch.bool)
    truth[:, 20:60, 30:80] = True
    missed = unreached_parameters(model_copy, [mask_loss(model_copy, inputs, truth)])
    reached = {n for n, p in model_copy.named_parameters() if p.requires_grad} - set(missed)
    expected = {
        *(f"model.multi_modal_projector.{name}" for name in ("linear_1.weight", "layer_norm.bias")),
        *("text_hidden_fcs.0.weight", "text_hidden_fcs.2.bias"),
        *(f"grounding_encoder.mask_decoder.conv_s{level}.weight" for level in (0, 1)),
        *(f"grounding_encoder.prompt_encoder.{kind}_embed.weight" for kind in ("not_a_point", "no_mask")),
    }
    assert expected <= reached
    assert sum("lora_B" in name for name in reached) == 14  # seven layers in each of two blocks
    hypernetworks = {name.split(".")[3] for name in missed if "output_hypernetworks_mlps" in name}
    assert len(hypernetworks) == 3  # all but the chosen candidate's
    parts = {".".join(name.split(".")[1:3]) for name in missed if "mask_decoder." in name or "prompt_encoder." in name}
    assert parts == {
        *("mask_decoder.output_hypernetworks_mlps", "mask_decoder.iou_prediction_head"),
        *("mask_decoder.pred_obj_score_head", "prompt_encoder.mask_embed", "prompt_encoder.point_embed"),
    }


def test_gradient_checkpointing_gives_the_same_gradients(model_copy, tiny_processor):
    inputs = teacher_forced(tiny_processor, smooth_image(100, 120))
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            model_copy.activation_checkpointing_enable()
            assert model_copy.is_activation_checkpointing
        model_copy.train().zero_grad()
        model_copy(**inputs).loss.backward()
        grads.append(model_copy.model.multi_modal_projector.linear_1.weight.grad.clone())
    assert grads[0].abs().sum() > 0
    assert torch.allclose(*grads, atol=1e-6)


def test_training_steps_move_the_trainable_and_nothing_else(model_copy, tiny_processor):
    setup_lora(model_copy, r=2, lora_alpha=4, lora_dropout=0.0)
    freeze_parameters(model_copy)
    before = {name: p.detach().clone() for name, p in model_copy.named_parameters()}
    inputs = teacher_forced(tiny_processor, smooth_image(100, 120))
    truth = torch.zeros(1, 100, 120, dtype=torch.bool)
    truth[:, :50] = True
    optimizer = torch.optim.SGD([p for p in model_copy.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):  # lora_A moves in the second step: in the first, lora_B is 0
        optimizer.zero_grad()
        (model_copy(**inputs).loss + mask_loss(model_copy, inputs, truth)).backward()
        optimizer.step()
    moved = {name for name, p in model_copy.named_parameters() if not torch.equal(p, before[name])}
    frozen = {name for name, p in model_copy.named_parameters() if not p.requires_grad}
    assert not moved & frozen
    assert {name for name in before if "lora_" in name} <= moved


META = torch.device("meta")
HALF = torch.bfloat16


@pytest.fixture(scope="module")
def meta_model(tiny_model: Sa2VAForConditionalGeneration) -> Any:
    with META:
        return Sa2VAForConditionalGeneration(copy.deepcopy(tiny_model.config)).to(HALF).eval()


def zeros(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.zeros(*shape, device=META, dtype=dtype)


def test_the_vision_tower_gives_one_row_of_the_language_models_width_for_each_token(meta_model: Any) -> None:
    config = meta_model.config
    side = config.vision_config.image_size[0]
    features = meta_model.model.get_vision_features(zeros(2, 3, side, side, dtype=torch.float32))
    rows = meta_model.model.project(features)
    assert (rows.shape, rows.dtype) == ((2, config.tokens_per_tile, config.text_config.hidden_size), HALF)


@pytest.mark.parametrize("length", [1, 7])
def test_the_language_model_keeps_its_dtype(meta_model: Any, length: int) -> None:
    ids = zeros(2, length, dtype=torch.long)
    causal = torch.ones(2, 1, length, length, device=META, dtype=torch.bool).tril()  # a mask (B, T) needs a value
    embeds = meta_model.get_input_embeddings()(ids)
    outputs = meta_model(inputs_embeds=embeds, attention_mask=causal, position_ids=ids)
    for tensor, width in (
        (outputs.last_hidden_state, meta_model.config.text_config.hidden_size),
        (outputs.logits, meta_model.config.text_config.vocab_size),
    ):
        assert (tensor.shape, tensor.dtype, tensor.device) == ((2, length, width), HALF, META)


def test_masks_are_float32_on_the_decoders_grid(meta_model: Any) -> None:
    config = meta_model.config
    side = config.sam2_image_size
    features = meta_model.get_sam_features(zeros(1, 3, side, side, dtype=torch.float32))
    assert {(level.dtype, level.device) for level in features.maps} == {(HALF, META)}
    embeddings = meta_model.text_hidden_fcs(zeros(3, config.text_config.hidden_size))
    masks = meta_model.decode_masks(features, embeddings)
    assert masks.mask_logits.shape == (3, side // 4, side // 4)
    assert masks.mask_logits.dtype == masks.iou_scores.dtype == torch.float32
    assert masks.mask_logits.device == masks.iou_scores.device == META
