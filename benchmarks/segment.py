"""One image, eleven prompts: `segment` once against eleven calls of the shipped `predict_forward`, in one run.

    python -m benchmarks.segment --model_path MODEL --image IMAGE
    python -m benchmarks.segment --model_path MODEL OTHER --image IMAGE     # one after the other, a line for each

Prints the seconds of both (median over pairs), their ratio, and the share of mask pixels that differ. The two are timed
in turn, so that a slower machine slows both.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

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
    prompts: Path | None = None
    """Prompts, one per line; without it the built-in eleven."""
    device: str = "cuda:0" if torch.cuda.is_available() else "cpu"
    """cpu, cuda:0, ..."""
    max_tiles: int = 1
    """Most tiles the image is cut into, for both."""
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
    processor.max_tiles = args.max_tiles
    image = load_image(args.image)
    prompts = args.prompts.read_text().splitlines() if args.prompts else list(PROMPTS)

    def batched_call() -> list[np.ndarray]:
        (answers,) = model.segment([image], prompts, processor, max_new_tokens=args.max_new_tokens)
        return [answer.masks() for answer in answers]

    def single_calls() -> list[np.ndarray]:
        return [single(prompt) for prompt in prompts]

    def single(prompt: str) -> np.ndarray:
        result: dict[str, Any] = model.predict_forward(
            image=image, text="<image>" + prompt, processor=processor, max_new_tokens=args.max_new_tokens
        )
        return np.array(result["prediction_masks"], dtype=bool).reshape(-1, *image.shape[:2])

    masks, expected = batched_call(), single_calls()
    pairs = [(seconds(batched_call), seconds(single_calls)) for _ in range(args.repeats)]
    batched, singly = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    print(f"segment, {len(prompts)} prompts: {batched:.3f} s; {len(prompts)} x predict_forward: {singly:.3f} s")
    print(f"ratio: {ratio:.2f}x (pairs {min(b / a for a, b in pairs):.2f} to {max(b / a for a, b in pairs):.2f})")
    print(f"mask pixels that differ: {share_of_different_pixels(masks, expected):.4%}")


def seconds(function: Callable[[], Any]) -> float:
    """Wall time of one call in seconds, with the GPU synchronised."""
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


@contextmanager
def exact_float32() -> Iterator[None]:
    """Full float32 inside the block: by default a GPU rounds the factors of float32 convolutions to ten bits (TF32)."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def share_of_different_pixels(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    """Share of all mask pixels that differ; ValueError if the numbers or sizes of masks differ."""
    if [mask.shape for mask in a] != [mask.shape for mask in b]:
        raise ValueError(f"mask shapes are {[m.shape for m in a]} and {[m.shape for m in b]}, expected equal shapes")
    total = sum(mask.size for mask in a)
    return sum(int((x != y).sum()) for x, y in zip(a, b, strict=True)) / max(total, 1)


if __name__ == "__main__":
    run(main, Args)
