"""Original config.json files: real sizes on the meta device, fields that count, and what is refused."""

import copy
import math
import re
from collections.abc import Iterable
from typing import Any

import pytest

from rl_reward_network.models.sa2va.checkpoint_sa2va import tensor_shapes
from rl_reward_network.models.sa2va.configuration_sa2va import (
    HIERA_L,
    Sa2VAConfig,
    config_from_original,
    sam2_config,
    sam2_sizes,
)
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration, expected_shapes
from tests.conftest import GOLDEN, TINY_SAM, needs_golden, tiny_config
from tests.golden_qwen import FOLDERS, needs_golden_qwen
from tests.internlm2 import VIT_6B, tiny_internlm2_config
from tests.qwen_vl import QWEN3, QWEN25, tiny_qwen_config, tiny_qwen_tokenizer

LANGUAGE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
VIT_300M = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
REAL_6B = {"hidden_size": 3200, "num_hidden_layers": 45, "num_attention_heads": 25, "intermediate_size": 12800}
WINDOWS = {"depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420}
VISION3 = ("depth", "hidden_size", "num_heads", "intermediate_size", "deepstack_visual_indexes")
LARGE, LARGEST = (24, 1024, 16, 4096, [5, 11, 17]), (27, 1152, 16, 4304, [8, 16, 24])  # of Qwen3-VL
GAUSSIAN = 256  # numbers of SAM 2's matrix, the one entry of a checkpoint that is not a parameter

# (family, language model, vision tower, keys and numbers of the file). Sources: shapes of the released checkpoints of
# Sa2VA (1,589 keys is also a user's index file), of InternVL2.5-8B and 26B and what Sa2VA adds to them, and of Qwen-VL
# in transformers' names, where four point embeddings are one table and the Gaussian matrix is kept twice.
RELEASED: dict[str, tuple[str, tuple[int, ...], Any, int, int]] = {
    "1B": ("qwen2", (896, 24, 14, 2, 4864), VIT_300M, 1541, 1_163_665_458 + GAUSSIAN),
    "4B": ("qwen2", (2048, 36, 16, 2, 11008), VIT_300M, 1685, 3_941_809_458 + GAUSSIAN),
    "InternVL3-2B": ("qwen2", (1536, 28, 12, 2, 8960), VIT_300M, 1589, 2_316_157_234 + GAUSSIAN),
    "InternVL3-8B": ("qwen2", (3584, 28, 28, 4, 18944), VIT_300M, 1589, 8_182_606_130 + GAUSSIAN),
    "8B": ("internlm2", (4096, 32, 32, 8, 14336), VIT_300M, 1477, 8_075_365_376),
    "26B": ("internlm2", (6144, 48, 48, 8, 16384), REAL_6B | VIT_6B, 1838, 25_514_186_112),
    "Qwen2.5-VL-3B": (QWEN25, (2048, 36, 16, 2, 11008), None, 1727 + 2, 4_293_849_650),
    "Qwen2.5-VL-7B": (QWEN25, (3584, 28, 28, 4, 18944), None, 1631 + 2, 8_527_539_250),
    "Qwen3-VL-2B": (QWEN3, (2048, 28, 16, 8, 6144), LARGE, 1528 + 2, 2_666_775_090),
    "Qwen3-VL-4B": (QWEN3, (2560, 36, 32, 8, 9728), LARGE, 1616 + 2, 5_057_072_690),
    "Qwen3-VL-8B": (QWEN3, (4096, 36, 32, 8, 12288), LARGEST, 1652 + 2, 9_007_237_922),
}


def qwen_config(kind: str) -> dict[str, Any]:
    return tiny_qwen_config(kind, tiny_qwen_tokenizer())


def released(name: str) -> Sa2VAConfig:
    family, language, vision, *_ = RELEASED[name]
    sizes = dict(zip(LANGUAGE, language, strict=True))
    if family in ("qwen2", "internlm2"):
        original = tiny_config(151679) if family == "qwen2" else tiny_internlm2_config(92558)
        original["vision_config"] |= vision
        original["llm_config"] |= sizes | ({} if family == "qwen2" else {"max_position_embeddings": 32768})
        return config_from_original(original, HIERA_L, "config.json")
    original = qwen_config(family)
    text, tower = original["text_config"], original["vision_config"]
    text |= sizes | {"vocab_size": 151674 if family == QWEN3 else 151670}
    if family == QWEN3:
        text["head_dim"] = 128
        tower |= dict(zip(VISION3, vision, strict=True)) | {"num_position_embeddings": 2304}
    else:
        tower |= WINDOWS | {"fullatt_block_indexes": [7, 15, 23, 31]}
    text["rope_scaling"]["mrope_section"] = [24, 20, 20] if family == QWEN3 else [16, 24, 24]
    tower["out_hidden_size"] = text["hidden_size"]
    return config_from_original(original, HIERA_L, "config.json")


@pytest.mark.parametrize("name", RELEASED)
def test_real_sizes_have_the_released_keys_and_numbers(name):
    family, (width, layers, heads, kv, inner), _, keys, numbers = RELEASED[name]
    shapes = expected_shapes(released(name), original=True)
    assert len(shapes) == keys
    if family == "internlm2":
        added = ("grounding_encoder.", "text_hidden_fcs.")  # and five words, in two tables
        total = sum(math.prod(shape) for key, shape in shapes.items() if not key.startswith(added)) - 5 * 2 * width
    else:
        total = sum(math.prod(shape) for shape in shapes.values())
    assert total == numbers
    assert sum(key.startswith("grounding_encoder.") for key in shapes) == 900, "898 in transformers' names"
    last, head = layers - 1, width // heads
    expected: dict[str, tuple[int, ...]] = {"text_hidden_fcs.2.weight": (256, width)}
    if family == "qwen2":
        expected |= {
            "mlp1.1.weight": (width, 4096),
            "language_model.model.layers.0.self_attn.k_proj.weight": (kv * head, width),
            "language_model.model.layers.0.mlp.gate_proj.weight": (inner, width),
            "vision_model.encoder.layers.23.attn.qkv.weight": (3072, 1024),
            "grounding_encoder.sam2_model.image_encoder.trunk.blocks.47.attn.qkv.weight": (3456, 1152),
        }
    elif family == "internlm2":
        expected |= {
            "language_model.model.layers.31.attention.wqkv.weight": ((heads + 2 * kv) * head, width),
            "language_model.output.weight": shapes["language_model.model.tok_embeddings.weight"],
        }
        assert ("vision_model.encoder.layers.0.attn.q_norm.weight" in shapes) == (name == "26B")
        assert ("vision_model.encoder.layers.0.attn.qkv.bias" in shapes) == (name == "8B")
    else:
        expected |= {
            "model.lm_head.weight": (151674 if family == QWEN3 else 151670, width),
            "model.model.language_model.norm.weight": (width,),
            f"model.model.language_model.layers.{last}.self_attn.k_proj.weight": (kv * 128, width),
        }
        assert (f"model.model.language_model.layers.{last}.self_attn.q_norm.weight" in shapes) == (family == QWEN3)
    assert {key: shapes[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        pytest.param("1B", GOLDEN, marks=needs_golden),
        pytest.param("Qwen3-VL-4B", FOLDERS["case_q3"], marks=needs_golden_qwen),
        pytest.param("Qwen2.5-VL-3B", FOLDERS["case_q25"], marks=needs_golden_qwen),
    ],
)
def test_key_names_at_real_size_are_those_of_an_official_checkpoint(name, folder):
    """Layer numbers apart: every kind of key that the official code wrote, and no other."""

    def kinds(keys: Iterable[str]) -> set[str]:
        return {re.sub(r"(layers|blocks|list)\.\d+\.(?!bias|weight)", r"\1.#.", key) for key in keys}

    assert kinds(expected_shapes(released(name), original=True)) == kinds(tensor_shapes(folder / "checkpoint"))


def test_fields_are_read_and_sam2s_memory_may_be_left_out():
    original = tiny_config(300) | {"template": "phi3-chat"}
    original["llm_config"]["rope_theta"] = 123.0
    config = config_from_original(original, TINY_SAM, "c")
    assert (config.template, config.text_config.rope_parameters["rope_theta"]) == ("phi3_chat", 123.0)
    assert sam2_sizes(sam2_config(HIERA_L)) == HIERA_L
    assert sam2_sizes(sam2_config(TINY_SAM)) == TINY_SAM
    config.sam2_config = sam2_config(TINY_SAM, video=False)  # as in the embedded model
    names = [name for name, _ in Sa2VAForConditionalGeneration(config).named_parameters()]
    assert not [name for name in names if "memory_attention" in name]
    assert [name for name in names if "mask_decoder" in name]


@pytest.mark.parametrize("kind", [QWEN3, QWEN25])
def test_an_original_qwen_is_kept_and_stale_copies_at_its_top_do_not_count(kind):
    """Transformers writes into the dictionaries it is given; the exporter leaves fields of the tied base model."""
    original = qwen_config(kind)
    before = copy.deepcopy(original)
    right = config_from_original(original, TINY_SAM, "c")
    assert right.original_config == original == before
    rope, section = right.text_config.rope_parameters, [6, 5, 5] if kind == QWEN3 else [2, 3, 3]
    assert (rope["rope_theta"], rope["mrope_section"]) == (5e6 if kind == QWEN3 else 1e6, section)
    stale = {"vocab_size": 999999, "hidden_size": 8, "tie_word_embeddings": True, "rope_theta": 1.0}
    config = config_from_original(original | stale, TINY_SAM, "c")
    assert config.text_config.to_dict() == right.text_config.to_dict()
    assert not config.text_config.tie_word_embeddings
    assert not config.tie_word_embeddings


UNKNOWN = {"architectures": ["Phi3ForCausalLM"]}


@pytest.mark.parametrize(
    ("original", "message"),
    [
        (tiny_config(300) | {"architectures": ["Sa2VAChatModelQwen"]}, "architectures.*ModelQwen.*Qwen2ForCausalLM"),
        (tiny_config(300) | {"llm_config": UNKNOWN}, "llm_config.architectures.*Phi3For.*Qwen2For.*InternLM2For"),
        (tiny_config(300) | {"vision_config": {}}, r"vision_config\.architectures.*None"),
        (tiny_config(300) | {"ps_version": "v1"}, "ps_version.*v1"),
        (tiny_config(300) | {"use_llm_lora": 128}, "use_llm_lora.*128"),
        (tiny_config(300) | {"template": "gemma"}, "template.*gemma.*qwen_chat"),
        (tiny_config(300) | {"template": None}, "template.*None"),
        (tiny_internlm2_config(300, VIT_6B | {"layer_norm_eps": 1e-5}), r"layer_norm_eps is 1e-05, expected 1e-06"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_field(original, message):
    with pytest.raises(ValueError, match=message) as refused:
        config_from_original(original, TINY_SAM, "folder/config.json")
    assert str(refused.value).startswith("folder/config.json: ")
