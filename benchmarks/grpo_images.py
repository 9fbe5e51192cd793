"""CPU seconds of each part of a GRPO step on annotated images with a reward network, its maps kept and not kept.

    python -m benchmarks.grpo_images --data_root DATA

Before: the learned reward ran the U-Nets in every step, and the pathwise reward kept maps of its own. Now both share
`ForegroundMaps`. An image's first step also runs the image encoders, whose features are kept in both cases. The time
of a step depends on the sizes of images and network, not on weights, so the network is not trained. The optimiser is
left out. CPU time of all threads, so that other programs matter little; both cases are measured in turn.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from rl_reward_network.cli.app import run
from rl_reward_network.grpo import rollouts as generator_file
from rl_reward_network.grpo import trainer as trainer_file
from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig
from rl_reward_network.grpo.inputs import open_grpo_inputs
from rl_reward_network.grpo.losses import PathwiseReward
from rl_reward_network.grpo.policy import prepare_model
from rl_reward_network.grpo.rewards import Reward, step_advantages
from rl_reward_network.grpo.stage import load_model
from rl_reward_network.grpo.trainer import Sa2VAGRPOTrainer, with_advantages
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.rewards.functions import learned_reward
from rl_reward_network.rewards.learned import ForegroundMaps, ImageScorer

CASES = ("first step before", "first step now", "later step before", "later step now")


@dataclass(frozen=True)
class Args:
    """Measure a GRPO step on annotated images by parts."""

    data_root: Path
    """Folder of annotated images."""
    model_path: str = DEFAULT_MODEL
    """Sa2VA folder or hub id."""
    prompts: int = 16
    """Images in a step."""
    repeats: int = 2
    """Measurements of each case; the table has their medians."""
    gpu: int = -1
    """Index of the GPU; -1 is the CPU."""


@dataclass
class Parts:
    """CPU seconds by part; a part inside another one is not counted twice."""

    seconds: dict[str, float] = field(default_factory=dict)
    open: list[str] = field(default_factory=lambda: ["other"])
    since: float = 0.0

    def _charge(self) -> None:
        now = time.process_time()
        self.seconds[self.open[-1]] = self.seconds.get(self.open[-1], 0.0) + now - self.since
        self.since = now

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Charge the time in the block to a part."""
        self._charge()
        self.open.append(name)
        try:
            yield
        finally:
            self._charge()
            self.open.pop()

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Charge the calls of a function to a part, from now on."""
        function = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.of(name):
                return function(*args, **kwargs)

        setattr(owner, attribute, timed)

    def measured(self, step: Callable[[], None]) -> dict[str, float]:
        """The seconds of one step."""
        self.seconds, self.since = {}, time.process_time()
        step()
        self._charge()
        return self.seconds


def main(args: Args) -> None:
    """Measure and print."""
    with TemporaryDirectory() as folder:
        trainer, maps = make_trainer(args, Path(folder))
        parts = timed_parts()
        step(trainer)  # not counted
        results: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
        for _ in range(args.repeats):
            for case in CASES:
                prepare(trainer, maps, case)
                results[case].append(parts.measured(lambda: step(trainer)))
    show(results)


def make_trainer(args: Args, folder: Path) -> tuple[Sa2VAGRPOTrainer, ForegroundMaps]:
    """A trainer with learned and pathwise reward, as `sa2va-rl grpo --reward_net` has them, and the maps of both."""
    inputs = open_grpo_inputs(RunConfig(data_root=args.data_root, gpu=args.gpu))
    prompts = inputs.pick("policy")[: args.prompts]
    model, processor = load_model(args.model_path, inputs.device, False)
    prepare_model(model, 16, 32)
    settings = Sa2VAGRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=len(prompts) * 4,
        num_generations=4,
        max_completion_length=24,
        mask_to_caption_weight=0.0,
        pathwise_weight=1.0,
        report_to="none",
        use_cpu=inputs.device == "cpu",
    )
    maps = ForegroundMaps(RewardNetwork().eval().requires_grad_(False).to(inputs.device))
    rewards = {"loop1": {}, "loop2": {"learned": Reward(learned_reward(maps), 1.0)}}
    pathwise = PathwiseReward(maps, processor.sam_image_size)
    trainer = Sa2VAGRPOTrainer(model, processor, settings, prompts, rewards, pathwise)
    trainer.freeze_unreached(prompts[:2])
    trainer.reset_reference()
    trainer.current_gradient_accumulation_steps = 1
    return trainer, maps


def timed_parts() -> Parts:
    """The clock of all parts."""
    parts = Parts()
    parts.wrap(RewardNetwork, "foreground_probs", "U-Nets of the reward network")
    parts.wrap(generator_file, "open_batch", "images read, and encoded at first")
    parts.wrap(trainer_file, "score", "rewards")
    parts.wrap(generator_file.RolloutGenerator, "generate", "rollouts")
    parts.wrap(trainer_file, "rollout_statistics", "statistics")
    parts.wrap(PathwiseReward, "scores", "pathwise loss")
    parts.wrap(Sa2VAGRPOTrainer, "compute_loss", "policy and its loss")
    parts.wrap(torch.Tensor, "backward", "backward")
    return parts


def prepare(trainer: Sa2VAGRPOTrainer, maps: ForegroundMaps, case: str) -> None:
    """Forget what a case has not computed yet, and set its learned reward."""
    if case.startswith("first"):
        trainer.rollout_generator.cache.clear()
        maps.entries.clear()
    unkept: Any = SimpleNamespace(scorer=lambda image: ImageScorer(maps.network, image))
    reward = learned_reward(maps if case.endswith("now") else unkept)
    trainer.rewards = {"loop1": {}, "loop2": {"learned": Reward(reward, 1.0)}}


def step(trainer: Sa2VAGRPOTrainer) -> None:
    """Rollouts, rewards, loss and gradients of all prompts."""
    trainer.sa2va.zero_grad()
    batch, terms = trainer.generate_and_score(trainer.prompts, 0)
    (advantages,) = step_advantages([terms], trainer.rewards, trainer.args)
    trainer.compute_loss(trainer.policy, with_advantages(batch, advantages)).backward()


def show(results: dict[str, list[dict[str, float]]]) -> None:
    """Print the medians by part."""
    table = Table("part", *CASES, title="one GRPO step, CPU seconds")
    for name in dict.fromkeys(name for repeats in results.values() for parts in repeats for name in parts):
        medians = (statistics.median(parts.get(name, 0.0) for parts in repeats) for repeats in results.values())
        table.add_row(name, *(f"{median:.2f}" for median in medians))
    totals = [statistics.median(sum(parts.values()) for parts in repeats) for repeats in results.values()]
    table.add_row("whole step", *(f"{total:.2f}" for total in totals))
    Console().print(table)
    print(f"before / now: first step {totals[0] / totals[1]:.2f}, later steps {totals[2] / totals[3]:.2f}")


if __name__ == "__main__":
    run(main, Args)
