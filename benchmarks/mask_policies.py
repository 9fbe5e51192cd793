"""Why loop 2 samples masks and not words, and how wide each mask policy must be: numbers and docs/mask_policies.png.

    python -m benchmarks.mask_policies

On test scenes, weights as they are shipped: how certain the words of the answer are (the gradient of a policy over
words is proportional to what they leave open); then, for each mask policy and spread, how alike a group's masks are,
and in how many groups the rewards of loop 2 differ at all.
"""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from rl_reward_network.cli.app import run
from rl_reward_network.evaluation.figures import png
from rl_reward_network.grpo.config import Sa2VAGRPOConfig
from rl_reward_network.grpo.inputs import open_grpo_inputs
from rl_reward_network.grpo.items import GRPOItem
from rl_reward_network.grpo.loss.mask_policies import MASK_POLICIES
from rl_reward_network.grpo.rollouts.batch import open_batch, random_stream
from rl_reward_network.grpo.rollouts.maker import RolloutMaker
from rl_reward_network.grpo.rollouts.rewards import Reward
from rl_reward_network.grpo.rollouts.statistics import median_pair_iou
from rl_reward_network.inputs.config import DEFAULT_REGIONS, RunConfig
from rl_reward_network.models.sa2va.checkpoint_sa2va import DEFAULT_MODEL
from rl_reward_network.models.sa2va.generation_sa2va import Decoding
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.rewards.functions import iou_reward, meteor_reward

SPREADS = {
    "gaussian": (0.05, 0.1, 0.2, 0.4, 0.8, 1.6),
    "bernoulli": (0.25, 0.5, 1.0, 2.0, 4.0),
    "candidates": (0.02, 0.05, 0.1, 0.3, 1.0),
}
REWARDS = {"loop2": {"meteor": Reward(meteor_reward, 1.0), "iou": Reward(iou_reward, 0.0)}}
SAMPLED = 16  # answers per prompt


@dataclass(frozen=True)
class Args:
    """Measure what loop 2 can sample."""

    items: int = 48
    """Test regions."""
    picture: Path = Path("docs/mask_policies.png")
    """Where the plot is written."""


def main(args: Args) -> None:
    """Measure, print, draw."""
    items = open_grpo_inputs(RunConfig(data_root=DEFAULT_REGIONS)).pick("test")[: args.items]
    model, processor = load_sa2va_model(DEFAULT_MODEL)
    with TemporaryDirectory() as folder:
        print(words(maker(model, processor, folder, "gaussian"), items))
        found = {
            name: [(s, *group(model, processor, folder, name, s, items)) for s in SPREADS[name]] for name in SPREADS
        }
    show(found)
    args.picture.write_bytes(png(draw(found)))
    print(f"\npicture: {args.picture}")


def maker(model: Any, processor: Any, folder: str, name: str) -> RolloutMaker:
    """Rollouts of loop 2 alone, eight masks each."""
    config = Sa2VAGRPOConfig(
        output_dir=folder,
        mask_policy=name,  # type: ignore[arg-type]
        mask_to_caption_weight=0.0,
        max_completion_length=24,
        per_device_train_batch_size=8,
        report_to="none",
        use_cpu=True,
    )
    return RolloutMaker(model, processor, config, REWARDS)


def words(own: RolloutMaker, items: list[GRPOItem]) -> str:
    """How certain the answer is, and how often sampling it gives anything else."""
    batch = open_batch(items, own.cache)
    context = batch.context(own.model)
    questions = [batch.drawing(row, item.question) for row, item in enumerate(items)]
    greedy = context.answer(questions, Decoding(32))
    certain = [float(np.exp(sum(answer.log_probs))) for (answer,) in greedy]
    sampled = context.answer(questions, Decoding(32, 1.0, generator=random_stream((0,))), SAMPLED)
    other = [
        one.token_ids != first.token_ids
        for own_answers, (first,) in zip(sampled, greedy, strict=True)
        for one in own_answers
    ]
    return (
        f"probability of the whole answer: {np.mean(certain):.6f} in the mean, {min(certain):.6f} at least; "
        f"{sum(other)} of {len(other)} sampled answers differ from it"
    )


def group(
    model: Any, processor: Any, folder: str, name: str, spread: float, items: list[GRPOItem]
) -> tuple[float, ...]:
    """Median IoU between two masks of a group, mean IoU with the truth, share of groups whose METEOR differs."""
    own = maker(model, processor, folder, name)
    own.controller.spread = spread
    with torch.no_grad():
        _, samples = own.make(items, (0, 0, 0))
    loop2 = samples["loop2"]
    assert loop2.advantages is not None
    alike = median_pair_iou(loop2.columns["predicted_masks"], len(items))
    return alike, float(loop2.terms["iou"].mean()), float(loop2.advantages.spread.mean())


def show(found: dict[str, list[tuple[float, ...]]]) -> None:
    """The table, ready for a document."""
    table = Table(box=box.MARKDOWN)
    for name in ("policy", "spread", "IoU between two masks", "IoU with the truth", "groups with different METEOR"):
        table.add_column(name)
    for policy, rows in found.items():
        for spread, alike, iou, differ in rows:
            table.add_row(policy, f"{spread:g}", f"{alike:.3f}", f"{iou:.3f}", f"{differ:.0%}")
    Console(width=120).print(table)


def draw(found: dict[str, list[tuple[float, ...]]]) -> Figure:
    """Over the likeness of a group's masks: how good they are, and in how many groups there is anything to learn."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for policy, rows in found.items():
        _, alike, iou, differ = (np.array(column) for column in zip(*rows, strict=True))
        left.plot(1 - alike, iou, marker=".", label=policy)
        right.plot(1 - alike, differ, marker=".", label=policy)
    left.set(xlabel="1 - IoU between two masks of a group", ylabel="mean IoU with the truth")
    right.set(xlabel="1 - IoU between two masks of a group", ylabel="share of groups with different METEOR")
    left.legend()
    return figure


assert set(SPREADS) == set(MASK_POLICIES)

if __name__ == "__main__":
    run(main, Args)
