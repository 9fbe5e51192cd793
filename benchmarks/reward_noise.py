"""Is a group whose learned rewards spread less than the reward network's noise worth learning from?

    python -m benchmarks.reward_noise --data_root DATA --reward_net outputs/RUN/best_reward_net

The embedded model samples groups of masks for labelled images of the policy split, as loop 2 does. Groups are sorted by
their signal, the spread of the rewards over their noise (`ensemble_noise`); for each class of groups the table has the
correlation of reward and true Dice within the group, and the gain: mean Dice weighted by the advantages of full size,
i.e. what a step towards them earns. The last rows are the gain and its noise over all groups, for each way to scale
them; the quotient counts, since the learning rate scales both.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from rl_reward_network.cli.app import run
from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig
from rl_reward_network.grpo.inputs import open_grpo_inputs
from rl_reward_network.grpo.policy import prepare_model
from rl_reward_network.grpo.prompts import TrainingItem
from rl_reward_network.grpo.rewards import Reward, score
from rl_reward_network.grpo.rollouts import RolloutGenerator
from rl_reward_network.inputs.config import RegionConfig, RunConfig
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.rewards.combine import group_advantages
from rl_reward_network.rewards.functions import learned_reward, mask_reward
from rl_reward_network.rewards.learned import ForegroundMaps

SIGNAL = (0.0, 0.5, 1.0, 2.0, 4.0, np.inf)  # limits of the classes, of spread / noise


@dataclass(frozen=True)
class Args:
    """Compare learned advantages with the true Dice, by signal."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    reward_net: Path
    """Folder of the reward network."""
    images: int = 60
    """Labelled images of the policy split."""
    repeats: int = 2
    """Groups of each image."""
    spread: float = 0.3
    """Of the mask policy; see docs/explanation/mask-policies.md."""


class Groups(NamedTuple):
    """Learned rewards and true Dice (P, G), and the noise (P,)."""

    learned: np.ndarray
    dice: np.ndarray
    noise: np.ndarray


def main(args: Args) -> None:
    """Sample, score, print."""
    inputs = open_grpo_inputs(args.config, RegionConfig())
    prompts = [prompt for prompt in inputs.pick("policy") if prompt.labelled][: args.images]
    parts = list(tqdm(_parts(args, prompts), total=args.repeats * len(prompts), unit="group"))
    groups = Groups(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    show(groups)


def _parts(args: Args, prompts: list[TrainingItem]) -> Iterator[Groups]:
    """One group after the other."""
    model, processor = load_sa2va_model(args.config.model_path)
    torch.manual_seed(0)
    prepare_model(model, 16, 32)
    settings = Sa2VAGRPOConfig(
        output_dir="unused", num_mask_generations=8, mask_to_caption_weight=0.0, report_to="none", use_cpu=True
    )
    maps = ForegroundMaps(RewardNetwork.from_pretrained(args.reward_net))
    rewards = {"loop2": {"learned": Reward(learned_reward(maps), 1.0), "dice": Reward(mask_reward("dice"), 0.0)}}
    generator = RolloutGenerator(model, processor, settings)
    generator.sigma_controller.sigma = args.spread
    for repeat in range(args.repeats):
        for number, prompt in enumerate(prompts):
            with torch.no_grad():
                rollouts = generator.generate([prompt], (args.config.seed, repeat, number))
            loop2 = score(rollouts, rewards)["loop2"]
            yield Groups(loop2.values["learned"], loop2.values["dice"], loop2.noise["learned"])


def show(groups: Groups) -> None:
    """Print the table of the classes and the gains."""
    spread = groups.learned.std(axis=1, ddof=1)
    signal = spread / groups.noise
    table = Table("spread / noise", "groups", "spread", "noise", "correlation with Dice", "gain", title="by signal")
    full = _advantages(groups, 1e-9, noise=False)
    for low, high in pairwise(SIGNAL):
        some = (low <= signal) & (signal < high)
        if some.any():
            numbers = (spread[some].mean(), groups.noise[some].mean(), _correlation(groups, some))
            gain = _gains(full, groups.dice)[some]
            cells = (*(f"{number:.4f}" for number in numbers), _interval(gain))
            table.add_row(f"{low:g} to {high:g}", f"{some.sum()}", *cells)
    Console().print(table)
    half, limit = np.where(signal < 1, 0.0, 1.0)[:, None], "left out below their noise"
    ways = {
        "full size": full,
        "floor 0.05": _advantages(groups, 0.05, noise=False),
        "floor 0.05, noise as a floor": _advantages(groups, 0.05, noise=True),
        f"floor 0.05, {limit}": half * _advantages(groups, 0.05, noise=False),
        f"full size, {limit}": half * full,
        "full size, noise as a floor": _advantages(groups, 1e-9, noise=True),
    }
    for way, advantages in ways.items():
        gains = _gains(advantages, groups.dice)
        size = np.sqrt((advantages**2).mean())
        print(f"{way}: gain {gains.mean():.5f}, size {size:.3f}, gain / size {gains.mean() / size:.5f}")


def _advantages(groups: Groups, floor: float, noise: bool) -> np.ndarray:
    known = {"learned": groups.noise} if noise else None
    return group_advantages({"learned": groups.learned}, {"learned": 1.0}, floor=floor, noise=known).values


def _gains(advantages: np.ndarray, dice: np.ndarray) -> np.ndarray:
    """(P,): covariance of advantages and true Dice within each group."""
    return (advantages * (dice - dice.mean(axis=1, keepdims=True))).mean(axis=1)


def _correlation(groups: Groups, some: np.ndarray) -> float:
    """Mean over groups of the correlation of learned reward and true Dice."""
    rows = zip(groups.learned[some], groups.dice[some], strict=True)
    return float(np.mean([np.corrcoef(a, b)[0, 1] for a, b in rows if a.std() > 0 < b.std()]))


def _interval(values: np.ndarray) -> str:
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
    return f"{values.mean():.5f} +- {1.96 * error:.5f}"


if __name__ == "__main__":
    run(main, Args, "rl_reward_network.benchmarks.reward_noise")
