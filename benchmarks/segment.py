"""One image, eleven prompts: `segment` once against eleven calls of the shipped `predict_forward`, in one run.

    python -m benchmarks.segment --model_path MODEL --image IMAGE
    python -m benchmarks.segment --model_path MODEL OTHER --image IMAGE     # one after the other, a line for each

Prints the seconds of both (median over pairs), their ratio, and the share of mask pixels that differ. The two are timed
in turn, so that a slower machine slows both.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import seconds
from rl_reward_network.cli.app import run
from rl_reward_network.data.images import load_image
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model


@dataclass(frozen=True)
class Args:
    """Time `segment` against single calls."""

    model_path: tuple[str, ...]
    """Sa2VA folders or hub ids."""
    image: Path
    """Image file."""
    device: str = "cuda:0" if torch.cuda.is_available() else "cpu"
    """cpu, cuda:0, ..."""
    max_new_tokens: int = 64
    """Longest answer, for both."""
    repeats: int = 5
    """Pairs of measurements, after one that is not counted."""


def main(args: Args) -> None:
    """Measure one model after the other."""
    for model_path in args.model_path:
        if len(args.model_path) > 1:
            print(f"{model_path}:")
        measure(args, model_path)


def measure(args: Args, model_path: str) -> None:
    """Measure a model and print."""
    model, processor = load_sa2va_model(model_path, args.device)
    processor.max_tiles = 1
    image = load_image(args.image)
    settings: dict[str, Any] = {"processor": processor, "max_new_tokens": args.max_new_tokens}

    def batched() -> list[np.ndarray]:
        (answers,) = model.segment([image], list(PROMPTS), **settings)
        return [answer.masks() for answer in answers]

    def singly() -> list[np.ndarray]:
        results = [model.predict_forward(image=image, text="<image>" + prompt, **settings) for prompt in PROMPTS]
        return [np.array(one["prediction_masks"], dtype=bool).reshape(-1, *image.shape[:2]) for one in results]

    differ = [one != other for one, other in zip(batched(), singly(), strict=True)]
    pairs = [(seconds(batched), seconds(singly)) for _ in range(args.repeats)]
    together, each = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratios = [b / a for a, b in pairs]
    print(f"segment, {len(PROMPTS)} prompts: {together:.3f} s; {len(PROMPTS)} x predict_forward: {each:.3f} s")
    print(f"ratio: {statistics.median(ratios):.2f}x (pairs {min(ratios):.2f} to {max(ratios):.2f})")
    share = sum(int(one.sum()) for one in differ) / max(sum(one.size for one in differ), 1)
    print(f"mask pixels that differ: {share:.4%}")


if __name__ == "__main__":
    run(main, Args)
