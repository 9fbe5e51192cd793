"""What step 2 deploys, on tables without a model: out of fold, on few patients, and with a useless reward network."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_reward_network.ppo import stage
from rl_reward_network.ppo.config import PPOSettings
from rl_reward_network.ppo.ppo import train_prompt_policy
from rl_reward_network.ppo.stage import Tables, choose, decide_prompts, fit, labels_used, policy_plan
from rl_reward_network.ppo.tables import PromptTable
from rl_reward_network.report.baselines import LAST, POLICY, RIDGE, Comparison, compare
from rl_reward_network.report.metrics import SampleTable
from rl_reward_network.rewards.table import MASK_REWARDS
from tests.ppo.test_ppo import toy_contexts


def entries(count: int, seed: int, scores: str = "true", labelled: bool = True) -> list[PromptTable]:
    """Images of one patient each; two prompts suit half of them each. Scores: the Dice, random, or all equal."""
    rng, made = np.random.default_rng(seed), []
    for context in toy_contexts(count, seed):
        dice = context.metrics["dice"]
        given = {"true": dice, "random": rng.random(len(dice), np.float32), "constant": np.full_like(dice, 0.5)}
        metrics = dict.fromkeys(MASK_REWARDS, dice) if labelled else None
        table = SampleTable(context.sample_id, context.sample_id, given[scores], metrics)
        made.append(PromptTable(context.features, table))
    return made


def plan_of(**settings: Any) -> stage.PolicyPlan:
    reward = settings.pop("reward", "net")
    return policy_plan("quick", reward=reward, ppo=PPOSettings(**settings))


def test_ppo_is_deployed_with_the_36_patients_of_a_first_user() -> None:
    """11 of the split `policy` and 5 of `val`: the latter alone can prove nothing."""
    tables = {"policy": entries(11, 0), "val": entries(5, 1)}
    found = decide_prompts(tables, plan_of(reward="dice"))
    assert (found.choice, found.patients) == ("policy", 16)
    too_few = decide_prompts({"policy": entries(3, 0), "val": entries(2, 1)}, plan_of())
    assert (too_few.choice, too_few.policy_gain) == ("as it is", None)


@pytest.mark.parametrize("reward", ["net", "dice"])
def test_a_patient_who_judges_has_neither_trained_nor_chosen(reward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"policy": entries(8, 0), "val": entries(6, 1)}
    seen: list[set[str]] = []
    judged: list[set[str]] = []
    train, choice = train_prompt_policy, choose

    def training(contexts: Any, val: Any, *rest: Any) -> Any:
        assert contexts
        seen.append({context.sample_id for context in (*contexts, *val)})
        return train(contexts, val, *rest)

    def choosing(model: Any, held: Any, *rest: Any) -> Any:
        judged.append({entry.table.group_id for entry in held})
        return choice(model, held, *rest)

    monkeypatch.setattr(stage, "train_prompt_policy", training)
    monkeypatch.setattr(stage, "choose", choosing)
    decide_prompts(tables, plan_of(reward=reward, total_timesteps=64))
    everybody = {entry.table.group_id for part in tables.values() for entry in part}
    assert [ids | held for ids, held in zip(seen, judged, strict=True)] == [everybody] * 3
    assert not any(ids & held for ids, held in zip(seen, judged, strict=True))
    assert set.union(*judged) == everybody


def judged_on_test(tables: Tables, plan: stage.PolicyPlan, run: Path) -> Comparison:
    """The evaluation of a run with these tables."""
    test = entries(60, 2)
    picks = choose(fit(tables, plan, run), test, plan)
    rows = [entry.table for entry in test]
    deployment = decide_prompts(tables, plan)
    val = [entry.table for entry in tables["val"]]
    return compare(val, rows, {POLICY: picks, LAST: picks, RIDGE: picks}, deployment, 0)


@pytest.mark.parametrize("scores", ["random", "constant"])
@pytest.mark.parametrize("labelled", [True, False], ids=["labels", "no labels of policy patients"])
def test_a_useless_reward_network_is_neither_deployed_nor_better(scores: str, labelled: bool, tmp_path: Path) -> None:
    tables = {"policy": entries(20, 10, scores, labelled), "val": entries(20, 20, scores)}
    comparison = judged_on_test(tables, plan_of(total_timesteps=400), tmp_path)
    assert comparison.deployment.choice != "policy"
    assert comparison.verdict.label != "better"


def test_a_useful_reward_network_is_both(tmp_path: Path) -> None:
    """Although no policy patient is labelled."""
    tables = {"policy": entries(20, 10, labelled=False), "val": entries(20, 20)}
    comparison = judged_on_test(tables, plan_of(total_timesteps=1200), tmp_path)
    assert (comparison.deployment.choice, comparison.verdict.label) == ("policy", "better")


def test_labels_are_named_by_what_they_chose() -> None:
    tables = {"policy": [*entries(4, 0, labelled=False), *entries(2, 1)], "val": entries(3, 2)}
    chosen = {"policy": 2, "val": 3}
    expected: dict[Any, Any] = {
        "net": {"reward": {}, "weights": {"val": 3}, "deployment": chosen},
        "mix": {"reward": {"policy": 2}, "weights": {"val": 3}, "deployment": chosen},
        "dice": {"reward": {"policy": 2}, "weights": {}, "deployment": chosen},
    }
    assert {reward: labels_used(tables, plan_of(reward=reward)) for reward in expected} == expected
    bare = {"policy": entries(4, 0, labelled=False), "val": entries(3, 2, labelled=False)}
    assert labels_used(bare, plan_of()) == {"reward": {}, "weights": {}, "deployment": {}}


def test_stop_needs_a_reward_of_labels() -> None:
    for reward in ("net", "mix"):
        with pytest.raises(ValueError, match=rf"--stop is for rewards of labels \(dice, .*dice\+recall\).* {reward}$"):
            policy_plan("quick", reward=reward, ppo=PPOSettings(stop=True))
