"""A tiny Sa2VA with InternLM2 in the official layout, as Sa2VA-8B and 26B come: with `tokenizer.model`, without
`tokenizer.json`; "26b" has the vision tower of Sa2VA-26B (qk-norm, RMSNorm, no bias of q, k and v).
"""

import json
import string
from pathlib import Path
from typing import Any

from transformers.convert_slow_tokenizer import import_protobuf

from rl_reward_network.models.sa2va.configuration_sa2va import config_from_original
from rl_reward_network.models.sa2va.internlm2 import InternLM2Tokenizer
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from tests.conftest import SHARED, SPECIAL, TINY_SAM, randomise, teach_answer, tiny_config, write_official

GOLDEN_LLM = SHARED / "golden" / "internlm2_llm"
VIT_6B = {"qkv_bias": False, "qk_normalization": True, "norm_type": "rms_norm"}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # types of sentencepiece's pieces
RESERVED = ["[UNUSED_TOKEN_0]", "[UNUSED_TOKEN_1]"]
MERGED = ["se", "seg", "▁t", "▁the", "th", "he", "▁▁", "▁▁▁▁", "血管"]


def tiny_pieces() -> list[tuple[str, int]]:
    """(text, type) of the pieces: control, bytes, merged ones in the order of their scores, characters, reserve."""
    letters = ["▁", "\n", *string.ascii_letters, *string.digits, *".,?!<>|/[]:;-_", "血", "管"]
    return [
        *[("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)],
        *[(f"<0x{byte:02X}>", BYTE) for byte in range(256)],
        *[(text, NORMAL) for text in (*MERGED, *letters)],
        *[(text, USER_DEFINED) for text in RESERVED],
    ]


def sentencepiece_bytes(pieces: list[tuple[str, int]] | None = None, **normalizer: bool) -> bytes:
    """The content of a `tokenizer.model`."""
    proto = import_protobuf().ModelProto()
    for number, (text, kind) in enumerate(tiny_pieces() if pieces is None else pieces):
        proto.pieces.add(piece=text, type=kind, score=-float(number) if kind == NORMAL else 0.0)
    proto.trainer_spec.model_type = 2
    proto.trainer_spec.byte_fallback = True
    settings = {"add_dummy_prefix": False, "remove_extra_whitespaces": False, "escape_whitespaces": True} | normalizer
    for name, value in settings.items():
        setattr(proto.normalizer_spec, name, value)
    return bytes(proto.SerializeToString())


def write_tokenizer(folder: Path) -> Path:
    """The tokenizer's files of an official folder; `<|im_end|>` and `<|im_start|>` replace the last two pieces."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(sentencepiece_bytes())
    count = len(tiny_pieces())
    inside = {"<unk>": 0, "<s>": 1, "</s>": 2, "<|im_end|>": count - 2, "<|im_start|>": count - 1}
    behind = [token for token in SPECIAL if token not in (*inside, "<|endoftext|>")]
    ids = inside | {token: count + number for number, token in enumerate(behind)}
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}
    settings = named | {
        "added_tokens_decoder": {str(i): {"content": token, "special": True, **flags} for token, i in ids.items()},
        "additional_special_tokens": [token for token in ids if token not in named.values()],
        "auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]},
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "tokenizer_class": "InternLM2Tokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    (folder / "added_tokens.json").write_text(json.dumps({token: i for token, i in ids.items() if i >= count}))
    return folder


def tiny_internlm2_config(vocab_size: int, vision: dict[str, Any] | None = None) -> dict[str, Any]:
    """An original `config.json` at toy size."""
    original = tiny_config(vocab_size) | {"template": "internlm2_chat"}
    original["vision_config"] |= vision or {}
    original["llm_config"] |= {
        "architectures": ["InternLM2ForCausalLM"],
        "bias": False,
        "hidden_act": "silu",
        "num_attention_heads": 8,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
        "rms_norm_eps": 1e-5,
    }
    return original


def write_tiny_internlm2(folder: Path, vision: dict[str, Any] | None = None) -> Path:
    """An original-layout folder whose model answers "Sure [SEG]." to whatever it is asked."""
    tokenizer = InternLM2Tokenizer.from_pretrained(write_tokenizer(folder))
    original = tiny_internlm2_config(len(tokenizer), vision)
    model = Sa2VAForConditionalGeneration(config_from_original(original, TINY_SAM, "config.json"))
    randomise(model)
    teach_answer(model, tokenizer)
    return write_official(folder, model, original)
