"""A Sa2VA of real size with random weights, in the official layout: what can be measured where no weights are at hand.

    python -m benchmarks.random_checkpoint --size tiny-qwen3-vl --folder outputs/tiny-qwen3-vl

The sizes are those of the released checkpoints. The tokenizer is the small one of the embedded model; the embedding has
the rows of the released vocabulary nevertheless. Greedy decoding answers `[SEG]` and ends; sampled answers are longer,
so that the captions of a group differ.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard, get_args

import torch
from huggingface_hub import save_torch_state_dict

from benchmarks.random_qwen_vl import QwenVLSize, add_qwen_vl_tokens, image_processor, is_tiny, qwen_vl_config
from rl_reward_network.atomic_io import whole_folder, write_json
from rl_reward_network.cli.app import run
from rl_reward_network.models.sa2va.checkpoint_sa2va import to_original
from rl_reward_network.models.sa2va.configuration_sa2va import HIERA_L, config_from_original
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor

Size = Literal["tiny", "1b", "4b", "8b", "14b", "tiny-internlm2", "8b-internlm2", QwenVLSize]
VOCABULARY = {"Qwen2ForCausalLM": 151_679, "InternLM2ForCausalLM": 92_558}  # of the released checkpoints
SHARD = "2GB"
DEPTH_SCALE = 0.05  # of what a layer adds to the residual stream, so that the directions below are kept
START, SEG_LOGIT, SURE_LOGIT = 30.0, 4.5, 30.0

# (hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, intermediate_size) of the language model
LANGUAGE: dict[Size, tuple[int, int, int, int, int]] = {
    "tiny": (64, 2, 4, 2, 96),
    "1b": (896, 24, 14, 2, 4864),
    "4b": (2048, 36, 16, 2, 11008),
    "8b": (3584, 28, 28, 4, 18944),
    "14b": (5120, 48, 40, 8, 13824),
    "tiny-internlm2": (64, 2, 4, 2, 96),
    "8b-internlm2": (4096, 32, 32, 8, 14336),
}
VISION = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
TINY_VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TINY_SAM2 = HIERA_L | {
    **{"embed_dim": 8, "num_heads": 1, "stages": [1, 1, 2, 1], "global_att_blocks": [3], "d_model": 32},
    **{"mem_ff": 48, "mem_layers": 1, "image_size": 256},
}


@dataclass(frozen=True)
class Args:
    """Write a checkpoint."""

    size: Size
    """Of the released checkpoint that the random one resembles; a tiny one is for trying commands."""
    folder: Path
    """To write; must not exist."""


def main(args: Args) -> None:
    """Write it, and print its size."""
    if args.folder.exists():
        raise ValueError(f"folder {args.folder} exists; give a new one")
    print(f"{write_random_checkpoint(args.folder, args.size):,} parameters in {args.folder}")


def official_config(size: Size) -> dict[str, Any]:
    """The `config.json` of a released Sa2VA of this size, with the fields that are read."""
    if _is_qwen_vl(size):
        return qwen_vl_config(size)
    width, layers, heads, kv_heads, inner = LANGUAGE[size]
    small, internlm2 = size.startswith("tiny"), size.endswith("internlm2")
    architecture = "InternLM2ForCausalLM" if internlm2 else "Qwen2ForCausalLM"
    language = {
        "architectures": [architecture],
        **({"bias": False} if internlm2 else {}),
        "vocab_size": 512 if small else VOCABULARY[architecture],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 32768,
    }
    vision = {
        "architectures": ["InternVisionModel"],
        **(TINY_VISION if small else VISION),
        "image_size": 448,
        "patch_size": 14,
        "qkv_bias": True,
        "qk_normalization": False,
        "norm_type": "layer_norm",
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu",
    }
    return {
        "architectures": ["Sa2VAChatModel"],
        "model_type": "sa2va_chat",
        "template": "internlm2_chat" if internlm2 else "qwen_chat",
        "ps_version": "v2",
        "select_layer": -1,
        "downsample_ratio": 0.5,
        "force_image_size": 448,
        "vision_config": vision,
        "llm_config": language,
    }


def write_random_checkpoint(folder: Path, size: Size) -> int:
    """Write the checkpoint, bfloat16 in shards; returns the number of its parameters.

    Args:
        folder: to write; must not exist.
        size: of the released model that it resembles.
    """
    model, tokenizer, original = random_model(size)
    count = sum(parameter.numel() for parameter in model.parameters())
    with whole_folder(folder) as temporary:
        tokenizer.save_pretrained(temporary)
        if _is_qwen_vl(size):
            image_processor(size).save_pretrained(temporary)
        write_json(temporary / "config.json", original)
        write_json(temporary / "sam2_sizes.json", sam2_sizes_of(size))
        save_torch_state_dict(to_original(model.state_dict(), model.config), temporary, max_shard_size=SHARD)
    return count


def sam2_sizes_of(size: Size) -> dict[str, Any]:
    """Those of the released checkpoints, or tiny ones."""
    return TINY_SAM2 if is_tiny(size) else HIERA_L


def random_model(size: Size, device: str = "cpu") -> tuple[Any, Any, dict[str, Any]]:
    """The model in bfloat16, made on a device, its tokenizer, and the official `config.json`."""
    original = official_config(size)
    torch.manual_seed(0)
    with torch.device(device):
        model = _on_bfloat16(
            lambda: Sa2VAForConditionalGeneration(config_from_original(original, sam2_sizes_of(size), "config.json"))
        )
    tokenizer = Sa2VAProcessor.from_pretrained("sa2va-nano").tokenizer
    if _is_qwen_vl(size):
        add_qwen_vl_tokens(tokenizer, size)
    _answer_with_a_mask(model, len(tokenizer), tokenizer.get_vocab()["[SEG]"], tokenizer.eos_token_id)
    return model, tokenizer, original


def _is_qwen_vl(size: Size) -> TypeGuard[QwenVLSize]:
    return size in get_args(QwenVLSize)


def _on_bfloat16(make: Any) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def _answer_with_a_mask(model: Any, words: int, seg: int, end: int) -> None:
    """Make `[SEG]` likely after every token but itself, and the end certain after it.

    All embeddings share one direction, which the residual stream keeps; that of `[SEG]` has another one. The head reads
    the two.
    """
    for layer in model.model.language_model.layers:
        layer.self_attn.o_proj.weight.mul_(DEPTH_SCALE)
        layer.mlp.down_proj.weight.mul_(DEPTH_SCALE)
    embeddings, head = model.get_input_embeddings().weight, model.lm_head.weight
    length = embeddings.shape[1] ** 0.5  # of a state after the final norm
    embeddings[:, 0] += START
    embeddings[seg, 0] -= START
    embeddings[seg, 1] += START
    head[:, :2] = 0
    head[seg, 0] = SEG_LOGIT / length
    head[words:, 0] = -SURE_LOGIT / length  # rows of the vocabulary that the small tokenizer has no words for
    head[end, 0], head[end, 1] = -SURE_LOGIT / length, SURE_LOGIT / length


if __name__ == "__main__":
    run(main, Args)
