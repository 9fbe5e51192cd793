"""Sizes, tokenizer and image processor of the Qwen-VL checkpoints that `random_checkpoint` writes."""

from typing import Any, Literal

from transformers import PreTrainedTokenizerBase, Qwen2VLImageProcessorPil

QwenVLSize = Literal["tiny-qwen3-vl", "qwen3-vl-2b", "qwen3-vl-4b", "tiny-qwen2.5-vl", "qwen2.5-vl-3b", "qwen2.5-vl-7b"]
QWEN3_VOCABULARY, QWEN25_VOCABULARY, TINY_VOCABULARY = 151_674, 151_670, 512
TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

# (hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, intermediate_size) of the language model
LANGUAGE: dict[QwenVLSize, tuple[int, int, int, int, int]] = {
    "tiny-qwen3-vl": (64, 3, 4, 2, 96),
    "qwen3-vl-2b": (2048, 28, 16, 8, 6144),
    "qwen3-vl-4b": (2560, 36, 32, 8, 9728),
    "tiny-qwen2.5-vl": (64, 3, 4, 2, 96),
    "qwen2.5-vl-3b": (2048, 36, 16, 2, 11008),
    "qwen2.5-vl-7b": (3584, 28, 28, 4, 18944),
}
QWEN3_VISION = {"depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096} | {
    "deepstack_visual_indexes": [5, 11, 17],
    "num_position_embeddings": 2304,
}
QWEN25_VISION = {"depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420} | {
    "fullatt_block_indexes": [7, 15, 23, 31]
}
TINY_VISION = {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
TINY_QWEN3_VISION = TINY_VISION | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
TINY_QWEN25_VISION = TINY_VISION | {"fullatt_block_indexes": [1]}

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


def qwen_vl_config(size: QwenVLSize) -> dict[str, Any]:
    """The `config.json` of a released Sa2VA of this size, with the fields that are read."""
    width, layers, heads, kv_heads, inner = LANGUAGE[size]
    text = {
        "vocab_size": TINY_VOCABULARY if is_tiny(size) else QWEN3_VOCABULARY if is_qwen3(size) else QWEN25_VOCABULARY,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262_144 if is_qwen3(size) else 128_000,
        **(dict.fromkeys(("bos_token_id", "eos_token_id")) if is_tiny(size) else {}),  # not in a tiny vocabulary
    }
    vision, sections = _vision(size), _sections(size)
    return {
        "architectures": ["Sa2VAChatModelQwen" if is_qwen3(size) else "Qwen2_5_VLForConditionalGeneration"],
        "auto_map": {"AutoModel": "modeling_sa2va_qwen.Sa2VAChatModelQwen"},  # as in releases; never followed
        "model_type": "sa2va_chat",
        "template": "qwen_chat",
        "tie_word_embeddings": False,
        "text_config": text | sections,
        "vision_config": vision | {"out_hidden_size": width},
    }


def is_tiny(size: str) -> bool:
    """Whether this is a toy size."""
    return size.startswith("tiny")


def is_qwen3(size: QwenVLSize) -> bool:
    """Whether this is a Qwen3-VL, else a Qwen2.5-VL."""
    return "qwen3" in size


def _sections(size: QwenVLSize) -> dict[str, Any]:
    """What the two language models do not share: position sections, and the width of a head."""
    if is_qwen3(size):
        sections, head_dim = ([6, 5, 5], 32) if is_tiny(size) else ([24, 20, 20], 128)
        scaling = {"mrope_interleaved": True, "mrope_section": sections, "rope_type": "default"}
        return {"model_type": "qwen3_vl_text", "head_dim": head_dim, "rope_scaling": scaling, "rope_theta": 5_000_000}
    scaling = {"mrope_section": [2, 3, 3] if is_tiny(size) else [16, 24, 24], "type": "default"}
    return {"model_type": "qwen2_5_vl_text", "rope_scaling": scaling, "rope_theta": 1_000_000.0}


def _vision(size: QwenVLSize) -> dict[str, Any]:
    if is_qwen3(size):
        sizes: dict[str, Any] = TINY_QWEN3_VISION if is_tiny(size) else QWEN3_VISION
        return {**sizes, "model_type": "qwen3_vl", "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}
    sizes = TINY_QWEN25_VISION if is_tiny(size) else QWEN25_VISION
    return {**sizes, "model_type": "qwen2_5_vl", "patch_size": 14, "window_size": 112}


def add_qwen_vl_tokens(tokenizer: PreTrainedTokenizerBase, size: QwenVLSize) -> None:
    """Add the tokens of an image and a chat template, in place."""
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)}, replace_extra_special_tokens=False)
    tokenizer.chat_template = CHAT if is_qwen3(size) else SYSTEM_TURN + CHAT


def image_processor(size: QwenVLSize) -> Qwen2VLImageProcessorPil:
    """The image processor of the released models."""
    if is_qwen3(size):
        return Qwen2VLImageProcessorPil(patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    return Qwen2VLImageProcessorPil(patch_size=14, image_mean=list(CLIP_MEAN), image_std=list(CLIP_STD))
