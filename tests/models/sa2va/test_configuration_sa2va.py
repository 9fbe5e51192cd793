import math
import re
from collections.abc import Iterable

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

GAUSSIAN_BUFFER = 256  # numbers; the one entry of a checkpoint that is not a parameter


def released(hidden: int, layers: int, heads: int, kv: int, ffn: int) -> Sa2VAConfig:
    """The configuration of a released model, from the table of the paper's code."""
    original = tiny_config(vocab_size=151679)
    original["vision_config"] |= {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    }
    original["llm_config"] |= {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
    }
    return config_from_original(original, HIERA_L, "config.json")


@pytest.mark.parametrize(
    ("sizes", "keys", "parameters"),
    [
        ((896, 24, 14, 2, 4864), 1541, 1_163_665_458),
        ((2048, 36, 16, 2, 11008), 1685, 3_941_809_458),
        ((1536, 28, 12, 2, 8960), 1589, 2_316_157_234),
        ((3584, 28, 28, 4, 18944), 1589, 8_182_606_130),
    ],
    ids=["1B", "4B", "InternVL3-2B", "InternVL3-8B"],
)
def test_real_sizes_have_the_released_keys_and_parameters(sizes: tuple, keys: int, parameters: int) -> None:
    """Sources: the shapes of the released checkpoints; 1,589 keys is also a user's real index file."""
    shapes = expected_shapes(released(*sizes), original=True)
    assert len(shapes) == keys
    assert sum(math.prod(shape) for shape in shapes.values()) - GAUSSIAN_BUFFER == parameters
    hidden, _, heads, kv, ffn = sizes
    assert shapes["mlp1.1.weight"] == (hidden, 4096)
    assert shapes["text_hidden_fcs.2.weight"] == (256, hidden)
    assert shapes["language_model.model.layers.0.self_attn.k_proj.weight"] == (kv * hidden // heads, hidden)
    assert shapes["language_model.model.layers.0.mlp.gate_proj.weight"] == (ffn, hidden)
    assert shapes["vision_model.encoder.layers.23.attn.qkv.weight"] == (3072, 1024)
    assert shapes["grounding_encoder.sam2_model.image_encoder.trunk.blocks.47.attn.qkv.weight"] == (3456, 1152)


@needs_golden
def test_key_names_at_real_size_are_those_of_an_official_checkpoint() -> None:
    """Layer numbers apart: every kind of key that the official code wrote, and no other."""
    real = expected_shapes(released(896, 24, 14, 2, 4864), original=True)
    golden = tensor_shapes(GOLDEN / "checkpoint")

    def kinds(keys: Iterable[str]) -> set[str]:
        return {re.sub(r"(layers|blocks)\.\d+\.(?!bias|weight)", r"\1.#.", key) for key in keys}

    assert kinds(real) == kinds(golden)


def test_sam2_is_hiera_l_with_its_898_keys() -> None:
    state = expected_shapes(released(896, 24, 14, 2, 4864), original=False)
    assert sum(key.startswith("grounding_encoder.") for key in state) == 898


def test_sizes_of_sam2_are_read_back() -> None:
    assert sam2_sizes(sam2_config(HIERA_L)) == HIERA_L
    assert sam2_sizes(sam2_config(TINY_SAM)) == TINY_SAM


def test_rope_theta_is_carried_over() -> None:
    original = tiny_config(300)
    original["llm_config"]["rope_theta"] = 123.0
    assert config_from_original(original, TINY_SAM, "c").text_config.rope_parameters["rope_theta"] == 123.0


def test_an_image_only_sam2_has_no_memory_parts() -> None:
    """What the small embedded model uses: the same mask path with fewer weights."""
    config = config_from_original(tiny_config(300), TINY_SAM, "c")
    config.sam2_config = sam2_config(TINY_SAM, video=False)
    names = [name for name, _ in Sa2VAForConditionalGeneration(config).named_parameters()]
    assert not [name for name in names if "memory_attention" in name]
    assert [name for name in names if "mask_decoder" in name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["Sa2VAChatModelQwen"]},
            "architectures.*Sa2VAChatModelQwen.*Sa2VAChatModel.*Qwen2ForCausalLM",
        ),
        (
            {"llm_config": {"architectures": ["Phi3ForCausalLM"]}},
            "llm_config.architectures.*Phi3ForCausalLM.*Qwen2ForCausalLM.*InternLM2ForCausalLM",
        ),
        ({"vision_config": {}}, r"vision_config\.architectures.*None"),
        ({"ps_version": "v1"}, "ps_version.*v1"),
        ({"use_llm_lora": 128}, "use_llm_lora.*128"),
        ({"template": "gemma"}, "template.*gemma.*qwen_chat"),
        ({"template": None}, "template.*None"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_field(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_original(tiny_config(300) | change, TINY_SAM, "folder/config.json")


def test_dashes_in_template_names_are_underscores() -> None:
    assert config_from_original(tiny_config(300) | {"template": "phi3-chat"}, TINY_SAM, "c").template == "phi3_chat"
