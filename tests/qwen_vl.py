"""Toy checkpoints of the Qwen-VL families in the official layout, and where the reference outputs are."""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2VLImageProcessorPil

from rl_reward_network.models.sa2va.configuration_sa2va import config_from_original
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from tests.conftest import TINY_SAM, TINY_SAM3, randomise, teach_answer, tiny_tokenizer, write_official

QWEN3, QWEN25, QWEN3_SAM3 = "qwen3_vl_text", "qwen2_5_vl_text", "qwen3_vl_text with SAM 3"
IMAGE_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"
CHAT = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{%- endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_qwen_tokenizer(chat_template: str = CHAT) -> Any:
    """Bytes and special tokens, those of an image included."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": IMAGE_TOKENS}, replace_extra_special_tokens=False)
    tokenizer.chat_template = chat_template
    return tokenizer


def tiny_qwen_config(kind: str, tokenizer: Any) -> dict[str, Any]:
    """An official `config.json` at toy size; Qwen2.5-VL's exporter leaves another name in `architectures`."""
    ids = tokenizer.get_vocab()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    text = sizes | {
        **{"model_type": kind, "vocab_size": len(tokenizer), "num_key_value_heads": 2, "rms_norm_eps": 1e-6},
        **{"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"], "max_position_embeddings": 32768},
    }
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64}
    if kind == QWEN3:
        text |= {
            "head_dim": 32,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"},
            "rope_theta": 5_000_000,
        }
        vision |= {"model_type": "qwen3_vl", "patch_size": 16, "deepstack_visual_indexes": [0, 1]}
        vision |= {"num_position_embeddings": 64, "temporal_patch_size": 2, "spatial_merge_size": 2}
    else:
        text |= {"rope_scaling": {"mrope_section": [2, 3, 3], "type": "default"}, "rope_theta": 1_000_000.0}
        vision |= {"model_type": "qwen2_5_vl", "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1]}
    return {
        "architectures": ["Sa2VAChatModelQwen" if kind == QWEN3 else "Qwen2_5_VLForConditionalGeneration"],
        "auto_map": {"AutoModel": "modeling_sa2va_qwen.Sa2VAChatModelQwen"},  # as in releases; never followed
        "model_type": "sa2va_chat",
        "template": "qwen_chat",
        "tie_word_embeddings": False,
        "image_token_id": ids["<|image_pad|>"],
        "text_config": text,
        "vision_config": vision,
    }


@torch.no_grad()
def quieten(model: Any) -> None:
    """Weaken attention, whose random biases would drown the words that `teach_answer` has taught."""
    for layer in model.model.language_model.layers:
        layer.self_attn.o_proj.weight.mul_(0.3)


def write_tiny_qwen(folder: Path, kind: str = QWEN3, chat_template: str = CHAT) -> Path:
    """A folder in the official layout whose model answers "Sure [SEG]." to whatever it is asked."""
    folder.mkdir(parents=True)
    tokenizer, sam_sizes = tiny_qwen_tokenizer(chat_template), TINY_SAM3 if kind == QWEN3_SAM3 else TINY_SAM
    original = tiny_qwen_config(QWEN3 if kind == QWEN3_SAM3 else kind, tokenizer)
    model: Any = Sa2VAForConditionalGeneration(config_from_original(original, sam_sizes, "config.json"))
    randomise(model)
    teach_answer(model, tokenizer)
    if kind in (QWEN25, QWEN3_SAM3):
        quieten(model)
    tokenizer.save_pretrained(folder)
    patch = original["vision_config"]["patch_size"]
    Qwen2VLImageProcessorPil(patch_size=patch, image_mean=[0.5] * 3, image_std=[0.5] * 3).save_pretrained(folder)
    return write_official(folder, model, original, sam_sizes)
