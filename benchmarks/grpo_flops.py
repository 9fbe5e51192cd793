"""FLOP of one GRPO group at the size of Sa2VA-4B, ours and in the usual layout, counted on the meta device.

    python -m benchmarks.grpo_flops

Counted by torch's FLOP counter (2 FLOP per multiply and add): both image encoders, the blocks of the
language model, its head, SAM 2's mask decoder. Assumed, as in most such counts: a backward pass is twice a forward pass
(LoRA needs no gradients of frozen weights, but they are counted for both), a caption has 50 tokens, an answer 10.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from rl_reward_network.cli.app import run
from rl_reward_network.models.sa2va.configuration_sa2va import HIERA_L, config_from_original
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration

SIZES_4B = {
    "architectures": ["Sa2VAChatModel"],
    "model_type": "sa2va_chat",
    "template": "qwen_chat",
    "ps_version": "v2",
    "select_layer": -1,
    "downsample_ratio": 0.5,
    "force_image_size": 448,
    "vision_config": {
        "architectures": ["InternVisionModel"],
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "image_size": 448,
        "patch_size": 14,
        "qkv_bias": True,
        "qk_normalization": False,
        "norm_type": "layer_norm",
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu",
    },
    "llm_config": {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 151674,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 8192,
    },
}


@dataclass(frozen=True)
class Args:
    """Count the FLOP of one group."""

    num_generations: int = 4
    """Captions."""
    num_mask_generations: int = 8
    """Masks."""
    prefix: int = 262
    """Tokens up to the end of the image, one tile."""
    region: int = 90
    """Tokens of a region and its question."""
    phrase: int = 30
    """Tokens of a request for a mask."""
    caption: int = 50
    """Tokens of a caption."""
    answer: int = 10
    """Tokens of an answer with `[SEG]`."""


@dataclass(frozen=True)
class Costs:
    """TFLOP of one call of each part."""

    vision: float
    sam: float
    decoder: float
    head_per_token: float
    tokens: Callable[[int], float]
    """TFLOP of the language model's blocks on one text, by its number of tokens."""


def main(args: Args) -> None:
    """Count and print."""
    costs = count()
    rows = group(costs, args)
    table = Table(box=box.MARKDOWN)
    for name in ("part of one group, TFLOP", "ours", "usual layout"):
        table.add_column(name)
    for name, (ours, usual) in rows.items():
        table.add_row(name, f"{ours:.1f}", f"{usual:.1f}")
    ours, usual = (sum(pair[side] for pair in rows.values()) for side in (0, 1))
    table.add_row("together", f"{ours:.1f}", f"{usual:.1f}")
    Console().print(table)
    print(
        f"ratio: {usual / ours:.1f}x; with cached image features (every epoch but the first): "
        f"{usual / (ours - rows['image encoders'][0]):.1f}x"
    )


def count() -> Costs:
    """The cost of each part of the model."""
    with torch.device("meta"):
        model: Any = Sa2VAForConditionalGeneration(config_from_original(SIZES_4B, HIERA_L, "config.json")).eval()
        tile, square = torch.empty(1, 3, 448, 448), torch.empty(1, 3, 1024, 1024)
        maps = model.get_sam_features(square)
        prompt, state = torch.empty(1, 256), torch.empty(1, 2048)

    def blocks(length: int) -> float:
        with torch.device("meta"):
            inputs = {"inputs_embeds": torch.empty(1, length, 2048), "position_ids": torch.arange(length)[None]}
            inputs["attention_mask"] = torch.ones(1, 1, length, length, dtype=torch.bool)
        return flop(lambda: model.model.language_model(**inputs, use_cache=False))

    return Costs(
        flop(lambda: model.model.project(model.model.get_vision_features(tile))),
        flop(lambda: model.get_sam_features(square)),
        flop(lambda: model.decode_masks(maps, prompt)),
        flop(lambda: model.lm_head(state)),
        blocks,
    )


def flop(call: Callable[[], Any]) -> float:
    """TFLOP of a call."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    return counter.get_total_flops() / 1e12


def group(costs: Costs, args: Args) -> dict[str, tuple[float, float]]:
    """Part -> TFLOP of one group, ours and in the usual layout."""
    count, masks = args.num_generations, args.num_mask_generations
    describe, phrase = args.prefix + args.region, args.prefix + args.phrase
    text = costs.tokens

    def extra(before: int, new: int) -> float:
        """Cost of the last `new` tokens of a text whose first tokens are in the cache."""
        return text(before + new) - text(before)

    packed = text(args.prefix + args.region + count * args.caption + args.phrase + args.answer)
    encoders = costs.vision + costs.sam
    calls = count + count + masks + masks  # captions, their masks, masks, their captions
    scored = count * args.caption
    repeated = count * text(describe + args.caption) + masks * text(phrase + args.answer)
    full_logits = (count * (describe + args.caption) + masks * (phrase + args.answer)) * costs.head_per_token
    reading = 2 * text(args.prefix)  # policy and EMA teacher
    ours_sampling = (
        extra(args.prefix, args.region)
        + count * extra(describe, args.caption)
        + extra(args.prefix, args.phrase + args.answer)
    )
    teacher = count * extra(args.prefix, args.phrase + args.answer) + masks * extra(
        args.prefix, args.region + args.caption
    )
    usual_sampling = count * text(describe + args.caption) + masks * text(phrase + args.answer)
    usual_teacher = count * text(phrase + args.answer) + masks * text(describe + args.caption)
    return {
        "image encoders": (encoders, calls * encoders + 2 * (count + masks) * costs.vision),
        "sampling": (reading + ours_sampling + masks * costs.decoder, usual_sampling + masks * costs.decoder),
        "teacher": (teacher + count * costs.decoder, usual_teacher + count * costs.decoder),
        "reference": (packed + scored * costs.head_per_token, repeated + full_logits),
        "loss and gradients": (3 * (packed + scored * costs.head_per_token), 3 * (repeated + full_logits)),
    }


if __name__ == "__main__":
    run(main, Args)
