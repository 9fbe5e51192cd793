from pathlib import Path

import pytest
import torch

from rl_reward_network.models.sa2va.checkpoint_sa2va import open_checkpoint
from rl_reward_network.models.sa2va.key_map_sa2va import first_few, to_original, to_ours
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def test_original_to_ours_and_back_is_bit_identical(tiny_checkpoint: Path) -> None:
    tensors = open_checkpoint(tiny_checkpoint).tensors()
    tensors["vision_model.embeddings.class_embedding"] = tensors["vision_model.embeddings.class_embedding"].bfloat16()
    assert any("memory_attention" in key for key in tensors), "the video part must be there to be kept"
    assert same(to_original(to_ours(tensors)), tensors)


def test_ours_holds_exactly_the_models_keys(tiny_checkpoint: Path, tiny_model: Sa2VAForConditionalGeneration) -> None:
    assert set(to_ours(open_checkpoint(tiny_checkpoint).tensors())) == set(tiny_model.state_dict())


def test_unknown_keys_are_named_in_either_direction() -> None:
    with pytest.raises(ValueError, match=r"1 keys that are not Sa2VA's: elsewhere\.weight"):
        to_ours({"elsewhere.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"no original name for elsewhere\.weight"):
        to_original({"elsewhere.weight": torch.zeros(1)})


def test_long_lists_are_cut() -> None:
    assert first_few(["a", "b"]) == "a, b"
    assert first_few(list("abcdefg")) == "a, b, c, d, e and 2 more"
