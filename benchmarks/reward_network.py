"""Speed of a reward network, and its memory for large images.

    python -m benchmarks.reward_network

The weights are random. Compared timings alternate, so that a slower phase of the machine affects both; medians over the
repeats. The peak memory of the process is read after each image size, in increasing order.
"""

import resource
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.segment import seconds
from rl_reward_network.cli.app import run
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.rewards.learned import score_masks

SIZES = ((256, 256), (512, 512), (999, 960), (2000, 1500), (3000, 4000))
PROMPTS, MANY, IMAGES = 11, 256, 16


@dataclass(frozen=True)
class Args:
    """Time a reward network."""

    threads: int = 2
    """CPU threads."""
    device: str = "cuda:0" if torch.cuda.is_available() else "cpu"
    """cpu, cuda:0, ..."""
    repeats: int = 9
    """Measurements of each, after one that is not counted."""


def main(args: Args) -> None:
    """Measure and print."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    ensemble = RewardNetwork().eval().requires_grad_(False).to(args.device)
    member = ensemble.member(0).requires_grad_(False)
    image, masks = _pair(256, 256, MANY)

    batch = torch.rand(IMAGES, 3, 256, 256, device=args.device), torch.rand(IMAGES, 1, 256, 256, device=args.device)

    member_one, ensemble_one, together, one_by_one, many, member_batch, ensemble_batch = _alternating(
        args.repeats,
        lambda: score_masks(member, image, masks[:1]),
        lambda: score_masks(ensemble, image, masks[:1]),
        lambda: score_masks(ensemble, image, masks[:PROMPTS]),
        lambda: [score_masks(ensemble, image, mask[None]) for mask in masks[:PROMPTS]],
        lambda: score_masks(ensemble, image, masks),
        lambda: member(*batch).score.cpu(),
        lambda: ensemble(*batch).score.cpu(),
    )
    print(f"one 256x256 mask: one member {member_one * 1e3:.1f} ms, ensemble {ensemble_one * 1e3:.1f} ms")
    ratio = one_by_one / together
    print(f"{PROMPTS} masks of one image: together {together * 1e3:.1f} ms, one by one {ratio:.1f}x that")
    print(f"{MANY} masks of one image: ensemble {MANY / many:.0f} masks/s")
    member_speed, ensemble_speed = IMAGES / member_batch, IMAGES / ensemble_batch
    print(
        f"batch of {IMAGES} images, a mask each: one member {member_speed:.0f} images/s, "
        f"ensemble {ensemble_speed:.0f} images/s"
    )
    for height, width in SIZES:
        image, masks = _pair(height, width, 1)
        (took,) = _alternating(1, lambda image=image, masks=masks: score_masks(ensemble, image, masks))  # type: ignore[misc]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{height}x{width}: ensemble {took:.2f} s for one mask, peak memory of the process so far {peak:.0f} MB")


def _pair(height: int, width: int, masks: int) -> tuple[np.ndarray, np.ndarray]:
    """A random image uint8 (H, W, 3) and float32 masks (P, H, W)."""
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return image, (rng.random((masks, height, width), dtype=np.float32) > 0.9).astype(np.float32)


def _alternating(repeats: int, *functions: Callable[[], object]) -> list[float]:
    """Median seconds of each function, called in turn in every round; the first round is not counted."""
    rounds = [[seconds(function) for function in functions] for _ in range(repeats + 1)][1:]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


if __name__ == "__main__":
    run(main, Args)
