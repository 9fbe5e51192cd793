"""InternLM2, the language model of Sa2VA-8B and 26B: Llama under other key names, with q, k and v in one tensor.

Axes: G key-value heads, R query heads for each of them, h width of a head, D language width.

Source: bytedance/Sa2VA@06912e2. The rotary embedding is Llama's "dynamic" one, which equals the official code up to
`max_position_embeddings` (32,768 in the releases). Beyond, both choose a base from the length so far and leave the keys
in the cache as they were rotated before, so that cached decoding differs from one full pass, and the longest row of a
batch sets the base of all. The official code then keeps that base for later, shorter inputs; transformers resets it.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

LAYER, OUR_LAYER = "language_model.model.layers.#.", "model.language_model.layers.#."
# (original, ours), in the syntax of `key_map_sa2va.RENAMES`; wq, wk and wv are what `split_qkv` makes of wqkv.
INTERNLM2_KEYS = (
    ("language_model.output.*", "lm_head.*"),
    ("language_model.model.tok_embeddings.*", "model.language_model.embed_tokens.*"),
    ("language_model.model.norm.*", "model.language_model.norm.*"),
    (LAYER + "attention_norm.*", OUR_LAYER + "input_layernorm.*"),
    (LAYER + "ffn_norm.*", OUR_LAYER + "post_attention_layernorm.*"),
    *((LAYER + f"attention.w{part}.*", OUR_LAYER + f"self_attn.{part}_proj.*") for part in "qkvo"),
    (LAYER + "feed_forward.w1.*", OUR_LAYER + "mlp.gate_proj.*"),
    (LAYER + "feed_forward.w3.*", OUR_LAYER + "mlp.up_proj.*"),
    (LAYER + "feed_forward.w2.*", OUR_LAYER + "mlp.down_proj.*"),
)
WQKV = re.compile(r"(language_model\.model\.layers\.\d+\.attention)\.w(qkv|q|k|v)\.weight")


def split_qkv(tensors: Mapping[str, Tensor], text_config: Any) -> dict[str, Tensor]:
    """Replace each `wqkv` (G * (R + 2) * h, D) by `wq` (G * R * h, D), `wk` and `wv` (G * h, D); values are untouched.

    Args:
        tensors: by original names.
        text_config: LlamaConfig of the same checkpoint.
    """
    split: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if not (match := WQKV.fullmatch(key)):
            split[key] = tensor
            continue
        groups = tensor.unflatten(0, (text_config.num_key_value_heads, -1, text_config.head_dim))
        for part, rows in (("q", groups[:, :-2]), ("k", groups[:, -2:-1]), ("v", groups[:, -1:])):
            split[f"{match[1]}.w{part}.weight"] = rows.flatten(0, 2).clone()  # safetensors refuses shared memory
    return split


def join_qkv(tensors: Mapping[str, Tensor], text_config: Any) -> dict[str, Tensor]:
    """The inverse of `split_qkv`, bit for bit."""
    joined: dict[str, Tensor] = {}
    shape = (text_config.num_key_value_heads, -1, text_config.head_dim)
    for key, tensor in tensors.items():
        if not (match := WQKV.fullmatch(key)):
            joined[key] = tensor
        elif match[2] == "q":
            parts = [tensors[f"{match[1]}.w{part}.weight"].unflatten(0, shape) for part in "qkv"]
            joined[f"{match[1]}.wqkv.weight"] = torch.cat(parts, dim=1).flatten(0, 2)
    return joined
