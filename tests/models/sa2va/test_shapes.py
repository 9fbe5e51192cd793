"""Shapes and dtypes of the model in bfloat16 on the meta device, which computes no value and takes no CPU tensor.

Fake tensors of a made-up GPU would say the device as well, but a CPU build of torch cannot index them.
"""

import copy
from typing import Any

import pytest
import torch

from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration

META = torch.device("meta")
HALF = torch.bfloat16


@pytest.fixture(scope="module")
def meta_model(tiny_model: Sa2VAForConditionalGeneration) -> Any:
    with META:
        return Sa2VAForConditionalGeneration(copy.deepcopy(tiny_model.config)).to(HALF).eval()


def zeros(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.zeros(*shape, device=META, dtype=dtype)


def test_two_devices_in_one_operation_are_refused(meta_model: Any) -> None:
    with pytest.raises(Exception, match="device"):
        meta_model.text_hidden_fcs(torch.zeros(1, meta_model.config.text_config.hidden_size, dtype=HALF))


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
