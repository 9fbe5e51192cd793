import copy
import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_reward_network.curves import Curves
from rl_reward_network.ppo.callbacks import CurvesWriter
from rl_reward_network.ppo.policy import choose_prompts
from tests.ppo.test_ppo import curves, toy_contexts, train

TAGS = {"rollout/ep_rew_mean", "rollout/ep_len_mean", "custom/reward_net_score", "custom/best_reward"}


def test_a_run_of_64_steps_has_8_rollouts_and_every_tag_from_the_first_on(tmp_path):
    val = toy_contexts(4, seed=1)
    train(tmp_path, val=val)
    tags = curves(tmp_path)
    steps = [8 * rollout for rollout in range(1, 9)]
    for tag in (*TAGS, "custom/gt_dice", "custom/val_score", "custom/val_gt_dice"):
        assert [step for step, _ in tags[tag]] == steps, tag
    assert {value for _, value in tags["rollout/ep_len_mean"]} == {1}
    raw = [value for _, value in tags["rollout/ep_rew_mean"]]
    assert min(raw) > 0.2, "the monitor sees scores, not centred rewards"
    best = [value for _, value in tags["custom/best_reward"]]
    np.testing.assert_allclose(best, np.maximum.accumulate(raw), rtol=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == steps
    np.testing.assert_allclose([line["custom/best_reward"] for line in lines], best, rtol=1e-5)


def test_every_curve_is_explained(tmp_path):
    train(tmp_path, val=toy_contexts(4, seed=1))
    explained = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert [tag for tag in curves(tmp_path) if f"`{tag}`" not in explained] == []


def test_unlabelled_images_have_no_dice_curve(tmp_path):
    train(tmp_path, toy_contexts(8, 0, labelled=False), toy_contexts(4, 1, labelled=False))
    tags = set(curves(tmp_path))
    assert tags >= TAGS
    assert not any("dice" in tag for tag in tags)


def test_an_over_optimised_run_stops_and_has_the_weights_of_its_peak(tmp_path, capsys):
    """The reward of prompt 2 rises with training while its truth is the worst on validation images."""
    contexts, val = toy_contexts(40, 0), toy_contexts(40, 1)
    for context in (*contexts, *val):
        object.__setattr__(context, "metrics", {"dice": 1 - context.scores})
    model = train(tmp_path, contexts, val, total_timesteps=6000, learning_rate=3e-4)
    assert "back to the best weights" in capsys.readouterr().out
    assert model.num_timesteps < 6000
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    gold = [row["custom/val_gt_dice"] for row in rows]
    chosen = choose_prompts(model, val)
    assert np.mean([c.metrics["dice"][a] for c, a in zip(val, chosen, strict=True)]) == pytest.approx(max(gold))
    weights = copy.deepcopy(model.policy.state_dict())
    again = train(tmp_path, contexts, val, total_timesteps=6000, learning_rate=3e-4)  # killed after the stop
    assert all(torch.equal(value, again.policy.state_dict()[name]) for name, value in weights.items())


def test_clock_times_and_infinite_numbers_stay_out_of_the_rows(tmp_path):
    with closing(Curves(tmp_path, {"step": 0}, board_step=0)) as run_curves:
        values = {"custom/best_reward": np.float32(0.5), "time/fps": 100, "train/explained_variance": np.nan}
        CurvesWriter(run_curves).write(values, {name: () for name in values}, step=8)
    assert run_curves.rows == [{"step": 8, "custom/best_reward": 0.5}]
    assert set(curves(tmp_path)) == set(values)
