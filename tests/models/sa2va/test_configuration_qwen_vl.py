"""Real sizes of Qwen-VL on the meta device, and which fields of an original config.json count."""

import copy
import math
import re
from collections.abc import Iterable
from typing import Any

import pytest

from rl_reward_network.models.sa2va.checkpoint_sa2va import tensor_shapes
from rl_reward_network.models.sa2va.configuration_sa2va import HIERA_L, Sa2VAConfig, config_from_original
from rl_reward_network.models.sa2va.modeling_sa2va import expected_shapes
from tests.conftest import TINY_SAM
from tests.golden_qwen import FOLDERS, needs_golden_qwen
from tests.qwen_vl import QWEN3, QWEN25, tiny_qwen_config, tiny_qwen_tokenizer

MORE_KEYS = 4 - 1 - 1  # four point embeddings, one table in transformers, which keeps the Gaussian matrix twice
LANGUAGE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
VISION = ("depth", "hidden_size", "num_heads", "intermediate_size", "deepstack_visual_indexes")
LARGE, LARGEST = (24, 1024, 16, 4096, [5, 11, 17]), (27, 1152, 16, 4304, [8, 16, 24])  # of Qwen3-VL
WINDOWS = {"depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420}  # of Qwen2.5-VL
# (language model, vision tower, keys in transformers' names, numbers in the file): SAM 2's Gaussian matrix included.
RELEASED: dict[str, tuple[tuple[int, ...], Any, int, int]] = {
    "Qwen2.5-VL-3B": ((2048, 36, 16, 2, 11008), None, 1727, 4_293_849_650),
    "Qwen2.5-VL-7B": ((3584, 28, 28, 4, 18944), None, 1631, 8_527_539_250),
    "Qwen3-VL-2B": ((2048, 28, 16, 8, 6144), LARGE, 1528, 2_666_775_090),
    "Qwen3-VL-4B": ((2560, 36, 32, 8, 9728), LARGE, 1616, 5_057_072_690),
    "Qwen3-VL-8B": ((4096, 36, 32, 8, 12288), LARGEST, 1652, 9_007_237_922),
}


@pytest.fixture(scope="module")
def originals() -> dict[str, dict[str, Any]]:
    """An official config.json of each family at toy size."""
    tokenizer = tiny_qwen_tokenizer()
    return {kind: tiny_qwen_config(kind, tokenizer) for kind in (QWEN3, QWEN25)}


def released(original: dict[str, Any], language: tuple[int, ...], vision: Any) -> Sa2VAConfig:
    """The configuration of a released model."""
    config = copy.deepcopy(original)
    text, tower = config["text_config"], config["vision_config"]
    text |= dict(zip(LANGUAGE, language, strict=True))
    if vision:
        text |= {"vocab_size": 151674, "head_dim": 128}
        text["rope_scaling"]["mrope_section"] = [24, 20, 20]
        tower |= dict(zip(VISION, vision, strict=True)) | {"num_position_embeddings": 2304}
    else:
        text["vocab_size"] = 151670
        text["rope_scaling"]["mrope_section"] = [16, 24, 24]
        tower |= WINDOWS | {"fullatt_block_indexes": [7, 15, 23, 31]}
    tower["out_hidden_size"] = text["hidden_size"]
    return config_from_original(config, HIERA_L, "config.json")


@pytest.mark.parametrize("name", RELEASED)
def test_real_sizes_have_the_expected_keys_and_numbers(name: str, originals: dict[str, dict[str, Any]]) -> None:
    language, vision, keys, numbers = RELEASED[name]
    shapes = expected_shapes(released(originals[QWEN3 if vision else QWEN25], language, vision), original=True)
    assert len(shapes) == keys + MORE_KEYS
    assert sum(math.prod(shape) for shape in shapes.values()) == numbers
    assert sum(key.startswith("grounding_encoder.") for key in shapes) == 898 + MORE_KEYS
    width, last = language[0], language[1] - 1
    vocabulary = 151674 if vision else 151670
    assert shapes["model.lm_head.weight"] == (vocabulary, width)
    assert shapes["model.model.language_model.norm.weight"] == (width,)
    head = 128
    assert shapes[f"model.model.language_model.layers.{last}.self_attn.k_proj.weight"] == (language[3] * head, width)
    assert shapes["text_hidden_fcs.2.weight"] == (256, width)
    assert (f"model.model.language_model.layers.{last}.self_attn.q_norm.weight" in shapes) == bool(vision)


@needs_golden_qwen
@pytest.mark.parametrize(("case", "name"), [("case_q3", "Qwen3-VL-4B"), ("case_q25", "Qwen2.5-VL-3B")])
def test_key_names_at_real_size_are_those_of_the_exporter(
    case: str, name: str, originals: dict[str, dict[str, Any]]
) -> None:
    language, vision, *_ = RELEASED[name]
    real = expected_shapes(released(originals[QWEN3 if vision else QWEN25], language, vision), original=True)

    def kinds(keys: Iterable[str]) -> set[str]:
        return {re.sub(r"(layers|blocks|list)\.\d+\.(?!bias|weight)", r"\1.#.", key) for key in keys}

    assert kinds(real) == kinds(tensor_shapes(FOLDERS[case] / "checkpoint"))


@pytest.mark.parametrize("kind", [QWEN3, QWEN25])
def test_the_original_is_kept_as_it_was(kind: str, originals: dict[str, dict[str, Any]]) -> None:
    """Transformers writes into the dictionaries that it is given."""
    before = copy.deepcopy(originals[kind])
    assert config_from_original(originals[kind], TINY_SAM, "c").original_config == before


@pytest.mark.parametrize("kind", [QWEN3, QWEN25])
def test_stale_copies_at_the_top_do_not_count(kind: str, originals: dict[str, dict[str, Any]]) -> None:
    """The official exporter leaves those of the base model, tied and with its whole vocabulary."""
    stale = {"vocab_size": 999999, "hidden_size": 8, "tie_word_embeddings": True, "rope_theta": 1.0}
    right, config = (config_from_original(originals[kind] | more, TINY_SAM, "c") for more in ({}, stale))
    assert config.text_config.to_dict() == right.text_config.to_dict()
    assert not config.text_config.tie_word_embeddings
    assert not config.tie_word_embeddings


def test_rope_is_read_from_the_old_pair_of_fields(originals: dict[str, dict[str, Any]]) -> None:
    for kind, theta, section in ((QWEN3, 5e6, [6, 5, 5]), (QWEN25, 1e6, [2, 3, 3])):
        rope = config_from_original(originals[kind], TINY_SAM, "c").text_config.rope_parameters
        assert (rope["rope_theta"], rope["mrope_section"]) == (theta, section)
