"""InternLM2, the language model of Sa2VA-8B and 26B: Llama under other key names, and its tokenizer.

Axes: G key-value heads, R query heads for each of them, h width of a head, D language width.

Source: bytedance/Sa2VA@06912e2. The rotary embedding is Llama's "dynamic" one, which equals the official code up to
`max_position_embeddings` (32,768 in the releases). Beyond, both choose a base from the length so far and leave the keys
in the cache as they were rotated before, so that cached decoding differs from one full pass, and the longest row of a
batch sets the base of all. The official code then keeps that base for later, shorter inputs; transformers resets it.

Added tokens have fixed ids; some take the place of a piece that the sentencepiece file holds in reserve. Ids equal
those of the sentencepiece library, except that a piece of several characters is not found if one of them is no piece by
itself (as in the official converter), and rare sequences where the file asks for a Unicode normalisation.
"""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from google.protobuf.message import DecodeError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges, import_protobuf

from rl_reward_network.atomic_io import write_json

LAYER, OUR_LAYER = "language_model.model.layers.#.", "model.language_model.layers.#."
# (original, ours), in the syntax of `checkpoint_sa2va.RENAMES`; wq, wk and wv are what `split_qkv` makes of wqkv.
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

MODEL_FILE = "tokenizer.model"
SPACE = "▁"
END_OF_TURN = "<|im_end|>"
BPE_MODEL, NORMAL, USER_DEFINED = 2, 1, 4  # numbers of sentencepiece_model.proto


def split_qkv(tensors: Mapping[str, Tensor], text_config: Any) -> dict[str, Tensor]:
    """Replace each `wqkv` (G * (R + 2) * h, D) by `wq` (G * R * h, D), `wk` and `wv` (G * h, D); same values."""
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


class InternLM2Tokenizer(PreTrainedTokenizerFast):
    """Reads `tokenizer.json` where a folder has it, else `tokenizer.model`; a beginning-of-text token is not added."""

    vocab_files_names = {"vocab_file": MODEL_FILE, "tokenizer_file": "tokenizer.json"}  # noqa: RUF012
    padding_side = "left"

    @classmethod
    def convert_to_native_format(cls, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The arguments of a folder with its vocabulary, as transformers' `from_pretrained` asks for them."""
        if kwargs.get("tokenizer_file"):
            return super().convert_to_native_format(**kwargs)
        if not kwargs.get("vocab_file"):
            raise ValueError(f"{kwargs.get('name_or_path')}: {MODEL_FILE} is missing; download or copy it again")
        file, added = Path(kwargs["vocab_file"]), kwargs["added_tokens_decoder"]
        settings = file.with_name("tokenizer_config.json")
        if END_OF_TURN not in map(str, added.values()):  # it would be cut into letters, and no answer would end
            raise ValueError(
                f"{settings}: missing, or {END_OF_TURN!r} is not in added_tokens_decoder; "
                "download or copy the tokenizer's files again"
            )
        return kwargs | {"tokenizer_object": read_sentencepiece(file, added)}

    def save_pretrained(self, save_directory: str | os.PathLike[Any], *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """As in transformers, with what the official layout needs: `tokenizer.model` and the ids of added tokens."""
        names = super().save_pretrained(save_directory, *args, **kwargs)
        if source := getattr(self, "vocab_file", None):
            target = Path(save_directory) / MODEL_FILE
            if not (target.exists() and target.samefile(source)):
                shutil.copyfile(source, target)
            write_json(Path(save_directory) / "added_tokens.json", self.added_tokens_encoder)
        return names


def read_sentencepiece(file: Path, added_tokens: Mapping[int, AddedToken]) -> Tokenizer:
    """A sentencepiece file with a BPE vocabulary as a tokenizer with the same ids.

    Added tokens, by id, replace the file's pieces at these ids, and continue its list. A ValueError for a file that is
    damaged, is not BPE, or is too short for their ids.
    """
    proto = _read_proto(file)
    first = min((index for index in added_tokens if index >= len(proto.pieces)), default=len(proto.pieces))
    if first > len(proto.pieces):
        raise ValueError(
            f"{file}: holds {len(proto.pieces)} pieces, but the first added token after them has id {first}; download "
            "or copy the tokenizer's files again"
        )
    pieces = {index: piece for index, piece in enumerate(proto.pieces) if index not in added_tokens}
    # Sentencepiece looks for these before all others; it never meets a space, which it replaces first.
    matched = {index: piece for index, piece in pieces.items() if piece.type == USER_DEFINED and " " not in piece.piece}
    whole = {index: piece.piece.replace(SPACE, " ") for index, piece in matched.items()}
    names = {index: piece.piece for index, piece in pieces.items()} | whole
    names |= {index: str(token) for index, token in added_tokens.items()}
    tokenizer = Tokenizer(_bpe(proto.trainer_spec, pieces, names))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in whole.values()])
    tokens = [added_tokens[index] for index in sorted(added_tokens)]
    tokenizer.add_tokens([AddedToken(str(token), normalized=False, special=token.special) for token in tokens])
    tokenizer.normalizer = _normalizer(proto.normalizer_spec)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", left=1)]
    )
    return tokenizer


def _read_proto(file: Path) -> Any:
    """The parsed file, a `ModelProto` of sentencepiece."""
    proto, remedy = import_protobuf().ModelProto(), "download or copy it again"
    try:
        proto.ParseFromString(file.read_bytes())
    except DecodeError as error:
        raise ValueError(f"{file}: not a whole sentencepiece file ({error}); {remedy}") from error
    if not (proto.pieces and proto.HasField("trainer_spec") and proto.HasField("normalizer_spec")):
        raise ValueError(f"{file}: not a whole sentencepiece file ({len(proto.pieces)} pieces, no settings); {remedy}")
    if proto.trainer_spec.model_type != BPE_MODEL:
        kind = proto.trainer_spec.ModelType.Name(proto.trainer_spec.model_type)
        raise ValueError(f"{file}: trainer_spec.model_type is {kind}, expected BPE; {remedy}")
    return proto


def _bpe(spec: Any, pieces: Mapping[int, Any], names: Mapping[int, str]) -> BPE:
    """The model that joins two pieces to the one with the best score; `names` are the texts of all ids."""
    normal = {index: piece for index, piece in pieces.items() if piece.type == NORMAL}
    ids = {piece.piece: index for index, piece in normal.items()}
    return BPE(
        vocab={name: index for index, name in names.items()},
        merges=generate_merges(ids, [(piece.piece, piece.score) for piece in normal.values()]),
        unk_token=spec.unk_piece,
        fuse_unk=True,
        byte_fallback=spec.byte_fallback,
    )


def _normalizer(spec: Any) -> normalizers.Normalizer:
    """What sentencepiece does to a text before it looks for pieces."""
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
