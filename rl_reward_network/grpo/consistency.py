"""Supervised fine-tuning as Sa2VA's authors do it, beside what GRPO does to the same model: one row for each item.

The left side is written down here, not computed by the code it judges.
Source: bytedance/Sa2VA@9832e1a, training configurations of the models with a Qwen2 language model.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedTokenizerBase

from rl_reward_network.grpo.items import segment_question
from rl_reward_network.grpo.rollouts.generation import ask
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
TURNS = (("<image>" + QUESTION, "Sure, it is [SEG]."), ("What is region1?", "It is a small round object."))

PARTS = {
    "vision tower": FROZEN,
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
_WORDS = "no word is new to RL, so none needs another embedding"
_PROMPTS = "part of the mask path that RL may train; a run freezes what no enabled loss reaches"
MEANT_PARTS = {
    ("embeddings", FROZEN): _WORDS,
    ("lm_head", FROZEN): _WORDS,
    ("SAM 2 prompt encoder", TRAINABLE): _PROMPTS,
}
# Why parts of the mask path do not train under a mask policy: rewards of sampled masks reach no more.
REACHED_BY = {
    "gaussian": "gaussian masks vary the [SEG] vector, so their rewards end there; bernoulli masks, the gradient of a "
    "reward network and supervised training reach the decoder",
    "bernoulli": "bernoulli masks reach what draws a mask, not what guesses its quality",
    "candidates": "a choice among candidates reaches only what guesses their quality",
}
MASK_PARTS = ("SAM 2 mask decoder", "SAM 2 prompt encoder")


@dataclass(frozen=True)
class Row:
    """One item of the comparison; `status` is same, DIFFERS, or `meant: ` and the reason."""

    item: str
    sft: str
    rl: str
    status: str


def consistency_rows(
    model: Any, processor: Sa2VAProcessor, folder: CheckpointFolder, mask_policy: str | None = None
) -> list[Row]:
    """All rows.

    Args:
        model: Sa2VA after `setup.prepare_model`; after `setup.freeze_unreached`, too, where there is a mask policy.
        processor: its processor, as training uses it.
        folder: the checkpoint it was loaded from.
        mask_policy: what unreached parts were frozen for.
    """
    return [
        *lora_rows(model),
        *part_rows(model, mask_policy),
        *text_rows(processor, folder.config.get("template")),
        *dtype_rows(model),
        loading_row(model, folder),
    ]


def differing(rows: Iterable[Row]) -> list[str]:
    """Items whose difference nobody meant."""
    return [row.item for row in rows if row.status == DIFFERS]


def lora_rows(model: Any) -> list[Row]:
    """Rank, scale and dropout of the adapter, and the layers it is on."""
    config, width = model.peft_config["default"], model.config.text_config.hidden_size
    small = None
    if width <= 2 * RANK and config.lora_alpha == 2 * config.r:
        small = f"rank {RANK} is not low in layers {width} wide; alpha is twice the rank in both"
    noise = "with dropout, log-probabilities of one caption differ by chance"
    linear, adapted = _linear_layers(model)
    targets = _row("LoRA targets", _kinds(linear), _kinds(adapted))
    return [
        _row("LoRA rank", str(RANK), str(config.r), small),
        _row("LoRA alpha", str(ALPHA), str(config.lora_alpha), small),
        _row("LoRA dropout", f"{DROPOUT:g}", f"{config.lora_dropout:g}", None if config.lora_dropout else noise),
        targets if set(linear) == set(adapted) else Row(targets.item, targets.sft, targets.rl, DIFFERS),
    ]


def part_rows(model: Any, mask_policy: str | None = None) -> list[Row]:
    """What trains and what does not, with parameter counts; parts that the model has not are left out."""
    reached = REACHED_BY[mask_policy] if mask_policy else None
    words = model.get_input_embeddings().weight
    counts = {part: (total, trained) for part, total, trained in parameter_table(model)}
    own = (words.numel(), words.numel() * words.requires_grad)
    total, trained = counts["language model"]
    counts |= {"language model": (total - own[0], trained - own[1]), "embeddings": own}
    rows = []
    for part, sft in PARTS.items():
        total, trained = counts[part]
        rl = TRAINABLE if trained == total else f"{trained:,} {TRAINABLE}" if trained else FROZEN
        row = _row(part, sft, rl, MEANT_PARTS.get((part, rl)) or (reached if part in MASK_PARTS else None))
        rows += [Row(row.item, row.sft, f"{rl}, {total:,}", row.status)] if total else []
    return rows


def text_rows(processor: Sa2VAProcessor, template: str | None) -> list[Row]:
    """Chat format, ids and labels of a conversation, what a rollout asks and how it is cut, tiles.

    Args:
        processor: as training uses it.
        template: the name in the checkpoint's config.json.
    """
    expected, used = TEMPLATES[template_name(template)], processor.template
    ids, labels = reference_conversation(processor.tokenizer, expected, processor.tokens_per_tile)
    found = {name: values.tolist() for name, values in processor.tokenize_conversation(TURNS, num_tiles=1).items()}
    prompt = ids[: next(n for n, label in enumerate(labels) if label >= 0)]
    return [
        _row("chat template", _shown(expected), _shown((used.instruction, used.suffix, used.separator))),
        _row("conversation: ids", _ids(ids), _ids(found["input_ids"], ids)),
        _row("conversation: labels", _ids(labels), _ids(found["labels"], labels)),
        *_question_rows(processor, prompt),
    ]


def _question_rows(processor: Sa2VAProcessor, prompt: list[int]) -> list[Row]:
    """What a rollout asks, against the ids of the recipe's first question."""
    own, asked = segment_question(PHRASE), ask(processor, 0, 1, QUESTION)
    unbroken = "the reference's own prediction has no line break there" if own == QUESTION.strip() else None
    tiles = f"up to {TILES}, and a thumbnail"
    few = "several times cheaper; --max_dynamic_patch raises it"
    return [
        _row("question for a mask", repr(QUESTION), repr(own), unbroken),
        _row("question cut behind the image", _ids(prompt), _ids(asked.prefix_ids + asked.suffix_ids, prompt)),
        _row("tiles", tiles, tiles if processor.max_tiles == TILES else f"up to {processor.max_tiles}", few),
    ]


def dtype_rows(model: nn.Module) -> list[Row]:
    """Number formats: the recipe holds all in float32 and computes in bfloat16."""
    half = "half the memory; both compute in bfloat16 on a GPU"
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    return [
        _row("dtype of what trains", "float32", _dtypes(trained)),
        _row("dtype of what is frozen", "float32", _dtypes(frozen), half if frozen == {torch.bfloat16} else None),
    ]


def loading_row(model: Any, folder: CheckpointFolder) -> Row:
    """Tensors of the checkpoint against those of the loaded model, by name and shape."""
    state = {
        name.replace(".base_layer.", "."): tensor.to("meta")
        for name, tensor in model.state_dict().items()
        if "lora_" not in name and not (name == "lm_head.weight" and model.config.tie_word_embeddings)
    }
    state = to_original(state, model.config) if folder.original else state
    own = {name: tuple(tensor.shape) for name, tensor in state.items()}
    files = tensor_shapes(folder.path)
    right = sum(own.get(name) == shape for name, shape in files.items())
    layout = "official" if folder.original else "our"
    status = SAME if right == len(files) == len(own) else DIFFERS
    rl = f"{right} loaded, {len(own) - right} missing, {len(files) - right} surplus"
    return Row("loading", f"{len(files)} tensors, {layout} layout", rl, status)


def reference_conversation(
    tokenizer: PreTrainedTokenizerBase, template: tuple[str, str, str], tokens_per_tile: int
) -> tuple[list[int], list[int]]:
    """Ids and labels of `TURNS` with one tile, as the reference tokenises them: piece by piece, no bos.

    Labels are -100 but on answers and on what ends them; the separator before the next turn is not labelled.
    """
    instruction, suffix, separator = template
    ids: list[int] = []
    labels: list[int] = []
    for question, answer in TURNS:
        end = [] if suffix else [tokenizer.eos_token_id]
        pieces = (_with_image(instruction, question, tokens_per_tile), answer + suffix, separator)
        prompt, reply, gap = (tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces)
        ids += [*prompt, *reply, *end, *gap]
        labels += [*(-100 for _ in prompt), *reply, *end, *(-100 for _ in gap)]
    return ids, labels


def _with_image(instruction: str, question: str, tokens_per_tile: int) -> str:
    """A turn of the user with the image's tokens in their place."""
    image = "<img>" + "<IMG_CONTEXT>" * tokens_per_tile + "</img>"
    return instruction.replace("{input}", question.replace("<image>", image))


def _linear_layers(model: Any) -> tuple[list[str], list[str]]:
    """Names of the linear layers of the language model's blocks, and of those with LoRA anywhere in the model."""
    adapted = [name for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    plain = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("model.language_model.") and not _inside(name, adapted)
    ]
    return plain + [name for name in adapted if name.startswith("model.language_model.")], adapted


def _inside(name: str, layers: Iterable[str]) -> bool:
    """Whether a module is part of one of some layers."""
    return any(name == layer or name.startswith(layer + ".") for layer in layers)


def _kinds(names: Iterable[str]) -> str:
    """`down_proj 4, gate_proj 4, ...`."""
    counts: Mapping[str, int] = Counter(name.rpartition(".")[2] for name in names)
    return ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())) or "none"


def _row(item: str, sft: str, rl: str, reason: str | None = None) -> Row:
    return Row(item, sft, rl, SAME if sft == rl else f"meant: {reason}" if reason else DIFFERS)


def _shown(template: tuple[str, str, str]) -> str:
    """Line ends as \\n."""
    return " ".join(repr(part)[1:-1] for part in template[:2]) + f" {template[2]!r}"


def _ids(ids: list[int], expected: list[int] | None = None) -> str:
    """How many ids, and where they leave the expected ones."""
    if expected is None or ids == expected:
        return f"{len(ids)} ids"
    place = next(
        (n for n, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), min(map(len, (ids, expected)))
    )
    return f"{len(ids)} ids, others from position {place}"


def _dtypes(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
