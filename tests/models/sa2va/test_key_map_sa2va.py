from pathlib import Path

import pytest
import torch

from rl_reward_network.models.sa2va.checkpoint_sa2va import open_checkpoint
from rl_reward_network.models.sa2va.key_map_sa2va import first_few, to_original, to_ours
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def test_original_to_ours_and_back_is_bit_identical(tiny_checkpoint: Path) -> None:
    folder = open_checkpoint(tiny_checkpoint)
    config, tensors = folder.model_config(), folder.tensors()
    tensors["vision_model.embeddings.class_embedding"] = tensors["vision_model.embeddings.class_embedding"].bfloat16()
    assert any("memory_attention" in key for key in tensors), "the video part must be there to be kept"
    assert same(to_original(to_ours(tensors, config), config), tensors)


def test_ours_holds_exactly_the_models_keys(tiny_checkpoint: Path, tiny_model: Sa2VAForConditionalGeneration) -> None:
    assert set(to_ours(open_checkpoint(tiny_checkpoint).tensors(), tiny_model.config)) == set(tiny_model.state_dict())


def test_unknown_keys_are_named_in_either_direction(tiny_model: Sa2VAForConditionalGeneration) -> None:
    with pytest.raises(ValueError, match=r"1 keys .*elsewhere\.weight"):
        to_ours({"elsewhere.weight": torch.zeros(1)}, tiny_model.config)
    with pytest.raises(ValueError, match=r"no original name for elsewhere\.weight"):
        to_original({"elsewhere.weight": torch.zeros(1)}, tiny_model.config)


def test_long_lists_are_cut() -> None:
    assert first_few(["a", "b"]) == "a, b"
    assert first_few(list("abcdefg")) == "a, b, c, d, e and 2 more"
