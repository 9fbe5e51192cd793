"""A Sa2VA of real size with random weights, in the official layout: what can be measured where no weights are at hand.

    python -m benchmarks.random_checkpoint --size tiny-qwen3-vl --folder outputs/tiny-qwen3-vl

The sizes are those of the released checkpoints. The tokenizer is the small one of the embedded model; the embedding has
the rows of the released vocabulary nevertheless. Greedy decoding answers `[SEG]` and ends; sampled answers are longer,
so that the captions of a group differ.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from huggingface_hub import save_torch_state_dict
from transformers import Qwen2VLImageProcessorPil

from rl_reward_network.atomic_io import whole_folder, write_json
from rl_reward_network.cli.app import run
from rl_reward_network.models.sa2va.checkpoint_sa2va import to_original
from rl_reward_network.models.sa2va.configuration_sa2va import HIERA_L, SAM3_L, config_from_original
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor

SAM3Size = Literal["tiny-qwen3-vl-sam3", "qwen3-vl-4b-sam3"]
# fmt: off
QwenVLSize = Literal[
    "tiny-qwen3-vl", "qwen3-vl-2b", "qwen3-vl-4b", "tiny-qwen2.5-vl", "qwen2.5-vl-3b", "qwen2.5-vl-7b", SAM3Size
]
# fmt: on
Size = Literal["tiny", "1b", "4b", "8b", "14b", "tiny-internlm2", "8b-internlm2", QwenVLSize]
QWEN2, INTERNLM2, QWEN3_VL, QWEN25_VL, TINY = 151_679, 92_558, 151_674, 151_670, 512  # rows of the vocabularies
DEPTH_SCALE = 0.05  # of what a layer adds to the residual stream, so that the directions below are kept
START, SEG_LOGIT, SURE_LOGIT = 30.0, 4.5, 30.0

# (hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, intermediate_size) of the language model
LANGUAGE: dict[str, tuple[int, int, int, int, int]] = {
    "tiny": (64, 2, 4, 2, 96),
    "1b": (896, 24, 14, 2, 4864),
    "4b": (2048, 36, 16, 2, 11008),
    "8b": (3584, 28, 28, 4, 18944),
    "14b": (5120, 48, 40, 8, 13824),
    "tiny-internlm2": (64, 2, 4, 2, 96),
    "8b-internlm2": (4096, 32, 32, 8, 14336),
    "tiny-qwen3-vl": (64, 3, 4, 2, 96),
    "qwen3-vl-2b": (2048, 28, 16, 8, 6144),
    "qwen3-vl-4b": (2560, 36, 32, 8, 9728),
    "tiny-qwen2.5-vl": (64, 3, 4, 2, 96),
    "qwen2.5-vl-3b": (2048, 36, 16, 2, 11008),
    "qwen2.5-vl-7b": (3584, 28, 28, 4, 18944),
}
VISION = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
TINY_VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TINY_SAM2 = HIERA_L | {
    **{"embed_dim": 8, "num_heads": 1, "stages": [1, 1, 2, 1], "global_att_blocks": [3], "d_model": 32},
    **{"mem_ff": 48, "mem_layers": 1, "image_size": 256},
}
TINY_SAM3 = SAM3_L | {
    **{"embed_dim": 16, "num_heads": 2, "depth": 2, "mlp_dim": 24, "global_att_blocks": [1], "window_size": 4},
    **{"pretrain_image_size": 56, "d_model": 32, "mem_ff": 48, "mem_layers": 1, "image_size": 112},
}
QWEN_VISION = {"depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096}
QWEN25_VISION = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "fullatt_block_indexes": [7, 15, 23, 31]}
TINY_QWEN_VISION = {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]

# One image in front of the text. Released Qwen2.5-VL checkpoints have a default system turn, Qwen3-VL ones have none.
CHAT = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
SYSTEM_TURN = "{{- '<|im_start|>system\\nAnswer briefly.<|im_end|>\\n' -}}\n"


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
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    sizes: Any = LANGUAGE[size.removesuffix("-sam3")]
    language: dict[str, Any] = dict(zip(names, sizes, strict=True)) | {"rms_norm_eps": 1e-6}
    tiny = size.startswith("tiny")
    if size in get_args(QwenVLSize):
        return _qwen_vl_config(size, language)
    internlm2 = size.endswith("internlm2")
    language |= {
        "architectures": ["InternLM2ForCausalLM" if internlm2 else "Qwen2ForCausalLM"],
        **({"bias": False} if internlm2 else {}),
        "vocab_size": TINY if tiny else INTERNLM2 if internlm2 else QWEN2,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 32768,
    }
    vision = {
        "architectures": ["InternVisionModel"],
        **(TINY_VISION if tiny else VISION),
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


def _qwen_vl_config(size: str, language: dict[str, Any]) -> dict[str, Any]:
    """The same of a Qwen3-VL or a Qwen2.5-VL: their position sections and vision towers differ."""
    tiny, qwen3 = size.startswith("tiny"), "qwen3" in size
    vision: dict[str, Any] = (TINY_QWEN_VISION if tiny else QWEN_VISION) | {"out_hidden_size": language["hidden_size"]}
    if qwen3:
        sections = [6, 5, 5] if tiny else [24, 20, 20]
        scaling: dict[str, Any] = {"mrope_interleaved": True, "mrope_section": sections, "rope_type": "default"}
        text: dict[str, Any] = {"model_type": "qwen3_vl_text", "head_dim": 32 if tiny else 128, "rope_theta": 5_000_000}
        vision |= {"model_type": "qwen3_vl", "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}
        vision |= {"deepstack_visual_indexes": [0, 1] if tiny else [5, 11, 17]}
        vision |= {"num_position_embeddings": 64 if tiny else 2304}
    else:
        scaling = {"mrope_section": [2, 3, 3] if tiny else [16, 24, 24], "type": "default"}
        text = {"model_type": "qwen2_5_vl_text", "rope_theta": 1_000_000.0}
        vision |= {"model_type": "qwen2_5_vl", "patch_size": 14, "window_size": 112}
        vision |= {"fullatt_block_indexes": [1]} if tiny else QWEN25_VISION
    vocabulary = TINY if tiny else QWEN3_VL if qwen3 else QWEN25_VL
    text |= {"vocab_size": vocabulary, "max_position_embeddings": 262_144 if qwen3 else 128_000}
    text |= dict.fromkeys(("bos_token_id", "eos_token_id")) if tiny else {}  # not in a tiny vocabulary
    return {
        "architectures": ["Sa2VAChatModelQwen" if qwen3 else "Qwen2_5_VLForConditionalGeneration"],
        "auto_map": {"AutoModel": "modeling_sa2va_qwen.Sa2VAChatModelQwen"},  # as in releases; never followed
        "model_type": "sa2va_chat",
        "template": "qwen_chat",
        "tie_word_embeddings": False,
        "text_config": language | text | {"rope_scaling": scaling},
        "vision_config": vision,
    }


def write_random_checkpoint(folder: Path, size: Size) -> int:
    """Write the checkpoint, bfloat16 in shards; returns the number of its parameters.

    Args:
        folder: to write; must not exist.
        size: of the released model that it resembles.
    """
    model, tokenizer, original = random_model(size)
    with whole_folder(folder) as temporary:
        tokenizer.save_pretrained(temporary)
        if "qwen3-vl" in size:
            half = [0.5] * 3
            Qwen2VLImageProcessorPil(patch_size=16, image_mean=half, image_std=half).save_pretrained(temporary)
        elif "qwen2.5-vl" in size:
            Qwen2VLImageProcessorPil(patch_size=14, image_mean=CLIP_MEAN, image_std=CLIP_STD).save_pretrained(temporary)
        write_json(temporary / "config.json", original)
        write_json(temporary / f"sam{3 if size.endswith('sam3') else 2}_sizes.json", sam_sizes(size))
        save_torch_state_dict(to_original(model.state_dict(), model.config), temporary, max_shard_size="2GB")
    return sum(parameter.numel() for parameter in model.parameters())


def sam_sizes(size: Size) -> dict[str, Any]:
    """Sizes of its SAM 2, or SAM 3."""
    tiny, released = (TINY_SAM3, SAM3_L) if size.endswith("sam3") else (TINY_SAM2, HIERA_L)
    return tiny if size.startswith("tiny") else released


def random_model(size: Size, device: str = "cpu") -> tuple[Any, Any, dict[str, Any]]:
    """The model in bfloat16, made on a device, its tokenizer, and the official `config.json`."""
    original = official_config(size)
    torch.manual_seed(0)
    with torch.device(device):
        config = config_from_original(original, sam_sizes(size), "config.json")
        model = _on_bfloat16(lambda: Sa2VAForConditionalGeneration(config))
    tokenizer = Sa2VAProcessor.from_pretrained("sa2va-nano").tokenizer
    if size in get_args(QwenVLSize):
        tokens = [f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")]
        tokenizer.add_special_tokens({"additional_special_tokens": tokens}, replace_extra_special_tokens=False)
        tokenizer.chat_template = CHAT if "qwen3" in size else SYSTEM_TURN + CHAT
    _answer_with_a_mask(model, len(tokenizer), tokenizer.get_vocab()["[SEG]"], tokenizer.eos_token_id)
    return model, tokenizer, original


def _on_bfloat16(make: Callable[[], Any]) -> Any:
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
