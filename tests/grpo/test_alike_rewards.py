"""The warning for rewards that are alike: in time, once, with the steps, the loop and a remedy."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rl_reward_network.grpo import rewards as alike_file
from rl_reward_network.grpo.rewards import LONGEST, AlikeRewards, LoopRollouts, Reward
from rl_reward_network.grpo.trainer import Sa2VAGRPOTrainer
from rl_reward_network.rewards.combine import Advantages
from tests.grpo.nano import config, make_trainer, nano, regions


def rollouts(**differ: bool) -> dict[str, LoopRollouts]:
    nothing = np.zeros((1, 2))
    return {
        loop: LoopRollouts({}, {}, Advantages(nothing, nothing, np.array([spread]))) for loop, spread in differ.items()
    }


def alone(**facts: Any) -> Any:
    """An accelerator of one process."""
    return SimpleNamespace(is_main_process=True, device="cpu", reduce=lambda tensor, how: tensor, **facts)


def test_the_warning_names_the_steps_and_the_remedy_once() -> None:
    alike = AlikeRewards(["loop1", "loop2"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(5 + LONGEST - 1):
            alike.note(rollouts(loop1=True, loop2=step < 5))
            alike.note(rollouts(loop1=False, loop2=False))
            alike.end_step(alone(), step, 1)
    alike.note(rollouts(loop1=True, loop2=False))
    with pytest.warns(UserWarning, match="steps 6 to 25: the rewards of every group of loop2 .*num_mask_generations"):
        alike.end_step(alone(), 24, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alike.note(rollouts(loop1=True, loop2=False))
        alike.end_step(alone(), 25, 1)


def test_a_loop_without_weighted_rewards_has_nothing_to_be_alike() -> None:
    alike = AlikeRewards(["loop1"])
    for step in range(2 * LONGEST):
        alike.note(rollouts(loop2=False))
        alike.end_step(alone(), step, 1)
    assert alike.steps == {"loop1": 0}


def test_a_loop_without_weight_is_not_learned_from(tmp_path: Path) -> None:
    assert make_trainer(tmp_path, caption_to_mask_weight=0.0).alike_rewards.loops == ["loop1"]


def test_a_run_says_so_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on the same rollouts count, too."""
    monkeypatch.setattr(alike_file, "LONGEST", 2)
    equal = {"a": Reward(lambda **columns: [0.5] * len(columns["prompts"]), 1.0)}
    settings = config(tmp_path, num_iterations=2, per_device_train_batch_size=4)
    trainer = Sa2VAGRPOTrainer(*nano(), settings, regions(), {"loop1": equal, "loop2": equal})
    with pytest.warns(UserWarning, match="steps 1 to 2: the rewards of every group of loop1 .*temperature"):
        trainer.train()
