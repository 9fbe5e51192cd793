"""The control: where features and rewards are independent, a policy gains nothing."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.prompt_seeds import Tables, measured, shuffled, summary
from rl_reward_network.env.sa2va_finetune_env import PromptContext
from rl_reward_network.ppo.prompts import policy_plan
from rl_reward_network.rewards.table import MASK_REWARDS
from tests.ppo.toys import toy_contexts

PLAN = policy_plan("quick")


@pytest.fixture(scope="module")
def tables() -> Tables:
    def entries(count: int, seed: int) -> list[PromptContext]:
        return [
            replace(
                context,
                features=np.append(context.features, [1.0, 2.0]).astype(np.float32),
                metrics=metrics,
                group_id=context.sample_id,
            )
            for context in toy_contexts(count, seed)
            if (metrics := dict.fromkeys(MASK_REWARDS, context.metrics["dice"]))
        ]

    return {"policy": entries(20, 0), "val": entries(48, 1), "test": entries(60, 2)}


@pytest.mark.slow
def test_the_policy_closes_the_gap_and_the_control_gains_nothing(tables: Tables) -> None:
    comparison = measured(tables, PLAN)
    assert "PPO, last weights minus best fixed prompt" in comparison.verdict.sentence, "labels may choose earlier ones"
    result = summary(comparison)
    assert (result["deployed"], result["verdict"]) == ("the policy", "better")
    assert result["closed"]["deployed"] == result["closed"]["PPO"] > 0.8
    assert result["most_chosen"] < 0.7, "it does not collapse onto one prompt"
    looks = {entry.features.tobytes() for entry in shuffled(tables)["policy"]}
    assert (len(looks), len(shuffled(tables)["policy"])) == (20, 400), "each image with all rewards"
    plans = [replace(PLAN, ppo=replace(PLAN.ppo, seed=seed)) for seed in range(4)]
    control = [summary(measured(shuffled(tables), plan))["closed"]["PPO"] for plan in plans]
    assert abs(np.mean(control)) < 0.15, "by chance a little more or less, in the mean nothing"
