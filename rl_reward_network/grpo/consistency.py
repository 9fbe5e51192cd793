"""Supervised fine-tuning by Sa2VA's authors compared with GRPO on the same model: one row for each aspect.

The left side is written down here; it is not computed by the code that it is compared with.
Source: bytedance/Sa2VA@9832e1a, training configurations of the models with a Qwen2 language model; @06912e2, those of
the models on a Qwen-VL.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedTokenizerBase

from rl_reward_network.grpo.image_context import make_question
from rl_reward_network.grpo.prompts import segment_question
from rl_reward_network.models.lora import parameter_table
from rl_reward_network.models.sa2va.checkpoint_sa2va import CheckpointFolder, tensor_shapes
from rl_reward_network.models.sa2va.key_map_sa2va import to_original
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.templates import template_name

SAME, DIFFERS = "same", "DIFFERS"
RANK, ALPHA, DROPOUT, TILES = 128, 256, 0.05, 12
TRAINABLE, FROZEN = "trainable", "frozen"

# instruction, suffix, separator of each chat format; a format without a suffix ends its answers with the eos token.
TEMPLATES = {
    "qwen_chat": ("<|im_start|>user\n{input}<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>", "\n"),
    "internlm2_chat": ("<|im_start|>user\n{input}<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>", "\n"),
    "phi3_chat": ("<|user|>\n{input}<|end|>\n<|assistant|>\n", "<|end|>", "\n"),
    "vicuna": ("USER: {input} ASSISTANT:", "", "\n"),
    "llama3_chat": (
        "<|start_header_id|>user<|end_header_id|>\n\n{input}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
        "\n",
    ),
}
PHRASE, QUESTION = "a red circle in this image.", "\nPlease segment the red circle in this image."
IMAGE = ("<img>", "<IMG_CONTEXT>", "</img>")  # before an image's features, in the place of each, behind them
IMAGE_QWEN_VL = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
TURNS = (("<image>" + QUESTION, "Sure, it is [SEG]."), ("What is region1?", "It is a small round object."))

PARTS = {
    "vision tower": FROZEN,
    "merger": FROZEN,  # of a Qwen-VL, in place of mlp1
    "mlp1": TRAINABLE,
    "language model": FROZEN,
    "embeddings": TRAINABLE,
    "LoRA": TRAINABLE,
    "lm_head": TRAINABLE,
    "text_hidden_fcs": TRAINABLE,
    "SAM 2 image encoder": FROZEN,
    "SAM 2 prompt encoder": FROZEN,
    "SAM 2 mask decoder": TRAINABLE,
    "SAM 2 memory": FROZEN,
}
_NO_NEW_TOKENS = "RL adds no token to the vocabulary, so no embedding has to change"
_MASK_PATH = "part of the mask path that RL may train; a run freezes the tensors that no enabled loss reaches"
INTENDED_PARTS = {
    ("embeddings", FROZEN): _NO_NEW_TOKENS,
    ("lm_head", FROZEN): _NO_NEW_TOKENS,
    ("SAM 2 prompt encoder", TRAINABLE): _MASK_PATH,
}
# Why parts of the mask path are frozen under a mask policy: the gradient of the log-probability does not reach them.
FROZEN_BECAUSE = {
    "gaussian": "the gradient of gaussian masks ends at the [SEG] embedding; bernoulli masks, the gradient of a reward "
    "network and supervised training reach the decoder",
    "bernoulli": "the gradient of bernoulli masks reaches the mask head, not the head that predicts its quality",
}
# Image tokens of WIDTH x HEIGHT pixels, resized once, by the size of a patch in pixels.
WIDTH, HEIGHT, TOKENS_ONCE = 301, 199, {16: 425, 14: 532}
SYSTEM_TURN = (
    "the chat template of the folder has a system turn, as the reference's own prediction; its training had none"
)
MASK_PARTS = ("SAM 2 mask decoder", "SAM 2 prompt encoder")


@dataclass(frozen=True)
class ConsistencyRow:
    """One aspect of the comparison; `status` is same, DIFFERS, or `meant: ` and the reason."""

    item: str
    sft: str
    rl: str
    status: str


def consistency_rows(
    model: Any, processor: Sa2VAProcessor, folder: CheckpointFolder, mask_policy: str | None = None
) -> list[ConsistencyRow]:
    """All rows.

    Args:
        model: Sa2VA after `prepare_model`, and after `freeze_unreached` if a mask policy is given.
        processor: of the model, as training uses it.
        folder: the checkpoint the model was loaded from.
        mask_policy: that of the run whose unreached parts were frozen.
    """
    return [
        *lora_rows(model),
        *part_rows(model, mask_policy),
        *text_rows(processor, folder.config.get("template")),
        *dtype_rows(model),
        loading_row(model, folder),
    ]


def differing(rows: Iterable[ConsistencyRow]) -> list[str]:
    """Aspects with a difference that is not intended."""
    return [row.item for row in rows if row.status == DIFFERS]


def lora_rows(model: Any) -> list[ConsistencyRow]:
    """Rank, scale and dropout of the adapter, and the layers that have one."""
    config, width = model.peft_config["default"], model.config.text_config.hidden_size
    small = None
    if width <= 2 * RANK and config.lora_alpha == 2 * config.r:
        small = f"rank {RANK} is not low in layers {width} wide; alpha is twice the rank in both"
    noise = "with dropout, log-probabilities of one caption differ at random"
    linear, adapted = _linear_layers(model)
    targets = _row("LoRA targets", _kinds(linear), _kinds(adapted))
    return [
        _row("LoRA rank", str(RANK), str(config.r), small),
        _row("LoRA alpha", str(ALPHA), str(config.lora_alpha), small),
        _row("LoRA dropout", f"{DROPOUT:g}", f"{config.lora_dropout:g}", None if config.lora_dropout else noise),
        targets if set(linear) == set(adapted) else ConsistencyRow(targets.item, targets.sft, targets.rl, DIFFERS),
    ]


def part_rows(model: Any, mask_policy: str | None = None) -> list[ConsistencyRow]:
    """Trainable and frozen parts with parameter counts; parts that the model lacks are left out."""
    frozen_because = FROZEN_BECAUSE[mask_policy] if mask_policy else None
    words = model.get_input_embeddings().weight
    counts = {part: (total, trained) for part, total, trained in parameter_table(model)}
    embeddings = (words.numel(), words.numel() * words.requires_grad)
    total, trained = counts["language model"]
    counts |= {"language model": (total - embeddings[0], trained - embeddings[1]), "embeddings": embeddings}
    rows = []
    for part, sft in PARTS.items():
        total, trained = counts.get(part, (0, 0))
        rl = TRAINABLE if trained == total else f"{trained:,} {TRAINABLE}" if trained else FROZEN
        row = _row(part, sft, rl, INTENDED_PARTS.get((part, rl)) or (frozen_because if part in MASK_PARTS else None))
        rows += [ConsistencyRow(row.item, row.sft, f"{rl}, {total:,}", row.status)] if total else []
    return rows


def text_rows(processor: Sa2VAProcessor, template: str | None) -> list[ConsistencyRow]:
    """Chat format, ids and labels of a conversation, the question of a rollout and its split, how images are read.

    Args:
        processor: as training uses it.
        template: the name in the checkpoint's config.json; a Qwen-VL was trained with `qwen_chat` whatever it says.
    """
    expected = TEMPLATES["qwen_chat" if processor.patches else template_name(template)]
    tokens = TOKENS_ONCE[processor.patches.patch_size] if processor.patches else processor.tokens_per_tile
    image = IMAGE_QWEN_VL if processor.patches else IMAGE
    ids, labels = reference_conversation(processor.tokenizer, expected, tokens, image)
    used = processor.tokenize_conversation(TURNS, tokens)
    used_ids, used_labels = used["input_ids"].tolist(), used["labels"].tolist()
    prompt = ids[: next(n for n, label in enumerate(labels) if label >= 0)]
    return [
        _template_row(processor, expected),
        _row("conversation: ids", _ids(ids), _ids(used_ids, ids)),
        _row("conversation: labels", _ids(labels), _ids(used_labels, labels)),
        *_question_rows(processor, prompt, tokens),
        _resize_row(processor) if processor.patches else _tiles_row(processor),
    ]


def _template_row(processor: Sa2VAProcessor, expected: tuple[str, str, str]) -> ConsistencyRow:
    """The chat format of rollouts; that of a Qwen-VL is its folder's."""
    template = processor.template
    instruction = processor.chat if processor.patches else template.instruction
    used = (instruction, template.suffix, template.separator)
    reason = SYSTEM_TURN if used == (processor.system_turn + expected[0], *expected[1:]) else None
    return _row("chat template", _escaped(expected), _escaped(used), reason)


def _question_rows(processor: Sa2VAProcessor, prompt: list[int], tokens: int) -> list[ConsistencyRow]:
    """The question of a rollout compared with the ids of the recipe's first question."""
    text, question = segment_question(PHRASE), make_question(processor, 0, tokens, QUESTION)
    unbroken = "the reference's own prediction has no line break there" if text == QUESTION.strip() else None
    ids, system = question.prefix_ids + question.suffix_ids, processor.token_ids(processor.system_turn)
    reason = SYSTEM_TURN if ids == system + prompt else None
    return [
        _row("question for a mask", repr(QUESTION), repr(text), unbroken),
        _row("question cut behind the image", _ids(prompt), _ids(ids, prompt), reason),
    ]


def _tiles_row(processor: Sa2VAProcessor) -> ConsistencyRow:
    """The tiles of an InternVL."""
    tiles = f"up to {TILES}, and a thumbnail"
    few = "several times cheaper; --max_dynamic_patch raises it"
    return _row("tiles", tiles, tiles if processor.max_tiles == TILES else f"up to {processor.max_tiles}", few)


def _resize_row(processor: Sa2VAProcessor) -> ConsistencyRow:
    """How often a Qwen-VL's image is resized, with the tokens of an image for which it matters."""
    assert processor.patches is not None
    _, (tokens,) = processor.vision_inputs([np.zeros((HEIGHT, WIDTH, 3), dtype=np.uint8)])
    once, size = TOKENS_ONCE[processor.patches.patch_size], f"tokens of {WIDTH} x {HEIGHT} pixels"
    times = {"training": "once", "prediction": "twice"}[processor.image_resize]
    reason = "as in the reference's own prediction; --image_resize training does it once" if times == "twice" else None
    return _row("image resize", f"once: {once} {size}", f"{times}: {tokens} {size}", reason)


def dtype_rows(model: nn.Module) -> list[ConsistencyRow]:
    """Number formats: the recipe stores all weights in float32 and computes in bfloat16."""
    half = "half the memory; both compute in bfloat16 on a GPU"
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    return [
        _row("dtype of what trains", "float32", _dtypes(trained)),
        _row("dtype of what is frozen", "float32", _dtypes(frozen), half if frozen == {torch.bfloat16} else None),
    ]


def loading_row(model: Any, folder: CheckpointFolder) -> ConsistencyRow:
    """Tensors of the checkpoint against those of the loaded model, by name and shape."""
    state = {
        name.replace(".base_layer.", "."): tensor.to("meta")
        for name, tensor in model.state_dict().items()
        if "lora_" not in name and not (name == "lm_head.weight" and model.config.tie_word_embeddings)
    }
    state = to_original(state, model.config) if folder.original else state
    loaded = {name: tuple(tensor.shape) for name, tensor in state.items()}
    files = tensor_shapes(folder.path)
    right = sum(loaded.get(name) == shape for name, shape in files.items())
    layout = "official" if folder.original else "our"
    status = SAME if right == len(files) == len(loaded) else DIFFERS
    rl = f"{right} loaded, {len(loaded) - right} missing, {len(files) - right} surplus"
    return ConsistencyRow("loading", f"{len(files)} tensors, {layout} layout", rl, status)


def reference_conversation(
    tokenizer: PreTrainedTokenizerBase,
    template: tuple[str, str, str],
    tokens: int,
    image_tokens: tuple[str, str, str] = IMAGE,
) -> tuple[list[int], list[int]]:
    """Ids and labels of `TURNS` with an image of this number of tokens, as the reference tokenises them.

    That is, piece by piece. A bos token, if the tokenizer has one, is the first (Qwen's has none).

    Labels are -100 except on answers and their end tokens; the separator before the next turn is not labelled.
    """
    instruction, suffix, separator = template
    image = image_tokens[0] + image_tokens[1] * tokens + image_tokens[2]
    ids = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    labels = [-100 for _ in ids]
    for question, answer in TURNS:
        end = [] if suffix else [tokenizer.eos_token_id]
        request = instruction.replace("{input}", question.replace("<image>", image))
        pieces = (request, answer + suffix, separator)
        prompt, reply, gap = (tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces)
        ids += [*prompt, *reply, *end, *gap]
        labels += [*(-100 for _ in prompt), *reply, *end, *(-100 for _ in gap)]
    return ids, labels


def _linear_layers(model: Any) -> tuple[list[str], list[str]]:
    """Names of the linear layers in the blocks of the language model, and of all layers with LoRA."""
    adapted = [name for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    inside = tuple(f"{name}." for name in adapted)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    layers = adapted + [name for name in linear if not f"{name}.".startswith(inside)]
    return [name for name in layers if name.startswith("model.language_model.")], adapted


def _kinds(names: Iterable[str]) -> str:
    """`down_proj 4, gate_proj 4, ...`."""
    counts: Mapping[str, int] = Counter(name.rpartition(".")[2] for name in names)
    return ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())) or "none"


def _row(item: str, sft: str, rl: str, reason: str | None = None) -> ConsistencyRow:
    return ConsistencyRow(item, sft, rl, SAME if sft == rl else f"meant: {reason}" if reason else DIFFERS)


def _escaped(template: tuple[str, str, str]) -> str:
    """On one line, with line breaks as \\n."""
    return " ".join(repr(part)[1:-1] for part in template[:2]) + f" {template[2]!r}"


def _ids(ids: list[int], expected: list[int] | None = None) -> str:
    """The number of ids, and the first position at which they differ from the expected ones."""
    if expected is None or ids == expected:
        return f"{len(ids)} ids"
    place = next(
        (n for n, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), min(map(len, (ids, expected)))
    )
    return f"{len(ids)} ids, others from position {place}"


def _dtypes(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
