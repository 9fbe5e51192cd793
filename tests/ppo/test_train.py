"""PPO on known optima: it finds them, its curves are whole, it stops when over-optimised, and can be resumed."""

import copy
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_reward_network.curves import Curves
from rl_reward_network.ppo.evaluate import _labels_note
from rl_reward_network.ppo.policy import choose_prompts
from rl_reward_network.ppo.train import CurvesWriter, make_vector_env
from tests.env.test_sa2va_finetune_env import RECORDED, RECORDED_CASES, make_contexts, recorded_actions
from tests.ppo.toys import curves, toy_contexts, train

TAGS = {"rollout/ep_rew_mean", "rollout/ep_len_mean", "custom/reward_net_score", "custom/best_reward"}


def play(venv, steps=30):
    rng, record = np.random.default_rng(0), []
    venv.reset()
    for _ in range(steps):
        observations, rewards, _, infos = venv.step(rng.integers(venv.action_space.n, size=venv.num_envs))
        record.append((observations.tolist(), rewards, infos))
    return record


def test_rewards_are_centred_per_image_and_the_monitor_stays_raw():
    contexts = {context.sample_id: context for context in make_contexts()}
    for _, rewards, infos in play(make_vector_env(list(contexts.values()), n_envs=3, seed=0)):
        for reward, info in zip(rewards, infos, strict=True):
            scores = contexts[info["sample_id"]].scores
            assert info["episode"]["r"] == pytest.approx(scores[info["prompt"]]) == pytest.approx(info["score"])
            assert reward == pytest.approx(scores[info["prompt"]] - scores.mean(), abs=1e-6)
            assert info["TimeLimit.truncated"] is False


def test_environments_differ_and_equal_seeds_repeat():
    first, second, other = (play(make_vector_env(make_contexts(), n_envs=2, seed=seed)) for seed in (3, 3, 4))
    orders = [[infos[index]["sample_id"] for _, _, infos in first] for index in range(2)]
    assert orders[0] != orders[1]
    assert [(seen, rewards.tolist()) for seen, rewards, _ in first] == [(s, r.tolist()) for s, r, _ in second]
    assert [seen for seen, _, _ in first] != [seen for seen, _, _ in other]
    with pytest.raises(ValueError, match=r"n_envs.* 0"):
        make_vector_env(make_contexts(), n_envs=0, seed=0)


@pytest.mark.parametrize(("max_steps", "reward"), RECORDED_CASES)
def test_steps_are_those_of_version_0_7_to_the_last_bit(max_steps, reward):
    """200 steps of 3 environments, recorded before the environments became SB3's `DummyVecEnv`."""
    expected = {name: RECORDED[f"{reward}_{max_steps}/{name}"] for name in ("observations", "rewards", "dones")}
    infos, terminal = (RECORDED[f"{reward}_{max_steps}/{name}"].tolist()[::-1] for name in ("infos", "terminal"))
    venv = make_vector_env(make_contexts(vision=2), 3, 7, max_steps, reward)
    np.testing.assert_array_equal(venv.reset(), expected["observations"][0])
    for step, actions in enumerate(recorded_actions()):
        observations, rewards, dones, step_infos = venv.step(actions)
        np.testing.assert_array_equal(observations, expected["observations"][step + 1])
        np.testing.assert_array_equal(rewards, expected["rewards"][step])
        np.testing.assert_array_equal(dones, expected["dones"][step])
        for done, info in zip(dones, step_infos, strict=True):
            episode = info.get("episode", {"r": -1, "l": -1})
            numbers = [info[name] for name in ("prompt", "score", "dice", "iou")] + [episode["r"], episode["l"]]
            assert [int(info["sample_id"].removeprefix("sample")), *numbers] == infos.pop()
            assert ("episode" in info) == ("terminal_observation" in info) == done
            if done:
                assert info["terminal_observation"].tolist() == terminal.pop()
    assert rewards.dtype == observations.dtype == np.float32


def test_ppo_learns_the_known_best_prompt_of_each_image(tmp_path):
    unseen = toy_contexts(40, seed=1)
    model = train(tmp_path, toy_contexts(40, seed=0), unseen, total_timesteps=2000)
    assert model.num_timesteps == 2000
    assert (choose_prompts(model, unseen) == 2 + np.arange(40) % 2).mean() >= 0.95
    scores = [value for _, value in curves(tmp_path)["custom/val_score"]]
    assert scores[-1] > scores[0] + 0.03


@pytest.mark.parametrize(("reward", "proxy"), [("single_tree", 0.25), ("net_and_dice", 0.75), ("dice", 0.75)])
def test_validation_watches_the_reward_where_neither_network_nor_labels_give_it(tmp_path, reward, proxy):
    """Else the stop rule would watch a score that the training does not raise."""
    images = [replace(context, scores=np.full(4, 0.75, np.float32)) for context in make_contexts(4)]
    images = [replace(one, metrics={"dice": np.full(4, 0.5), "single_tree": np.full(4, 0.25)}) for one in images]
    train(tmp_path, images[:2], images[2:], reward)
    assert {value for _, value in curves(tmp_path)["custom/val_score"]} == {proxy}


@pytest.mark.parametrize(
    ("reward", "said"),
    [("net_and_dice", "The reward network gave"), ("single_tree", "The reward was single_tree, which needs")],
)
def test_the_report_says_what_gave_the_reward(reward, said):
    labels = {"reward": {}, "weights": {}, "deployment": {}}
    config = {"deployment": {"choice": 0}, "plan": {"reward": reward}, "labels": labels}
    (note,) = _labels_note(config)
    assert note.startswith(said)
    (of_labels,) = _labels_note({**config, "plan": {"reward": "dice"}})
    assert note.endswith(of_labels)


def test_equal_seeds_give_equal_policies(tmp_path):
    first, second, other = (
        train(tmp_path / name, seed=seed).policy.state_dict() for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not all(torch.equal(value, other[name]) for name, value in first.items())


@pytest.mark.parametrize("reward", ["net", "dice", "iou", "net_and_dice"])
def test_longer_episodes_train_and_a_reward_of_labels_is_not_observed(tmp_path, reward):
    model = train(tmp_path, reward=reward, total_timesteps=96, max_steps=3)
    best_score = model.rollout_buffer.observations[..., -1]
    assert (best_score.max() == 0) == (reward != "net")
    assert {value for _, value in curves(tmp_path)["rollout/ep_len_mean"]} == {3}


def test_the_reward_is_the_one_that_was_asked_for(tmp_path):
    """The reward net is wrong on purpose: it likes the prompt that names the other bar."""
    contexts = toy_contexts(40, seed=0)
    for context in contexts:
        object.__setattr__(context, "scores", context.scores[[0, 1, 3, 2]])
    right = 2 + np.arange(40) % 2
    by_net, by_dice = (
        choose_prompts(train(tmp_path / reward, contexts, reward=reward, total_timesteps=2000), contexts)
        for reward in ("net", "dice")
    )
    assert (by_dice == right).mean() >= 0.95
    assert (by_net == 5 - right).mean() >= 0.95
    with pytest.raises(ValueError, match=r"reward.*iou.*labelled"):
        train(tmp_path / "no", toy_contexts(8, 0, labelled=False), reward="iou")
    assert not (tmp_path / "no").exists()


def test_a_run_of_64_steps_has_8_rollouts_and_every_curve_from_the_first_on(tmp_path):
    train(tmp_path, val=toy_contexts(4, seed=1))
    tags, steps = curves(tmp_path), [8 * rollout for rollout in range(1, 9)]
    for tag in (*TAGS, "custom/gt_dice", "custom/val_score", "custom/val_gt_dice"):
        assert [step for step, _ in tags[tag]] == steps, tag
    raw, best = ([value for _, value in tags[tag]] for tag in ("rollout/ep_rew_mean", "custom/best_reward"))
    assert min(raw) > 0.2, "the monitor sees scores, not centred rewards"
    np.testing.assert_allclose(best, np.maximum.accumulate(raw), rtol=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == steps
    np.testing.assert_allclose([line["custom/best_reward"] for line in lines], best, rtol=1e-5)
    explained = (Path(__file__).parents[2] / "docs" / "reference" / "tensorboard.md").read_text()
    assert [tag for tag in tags if f"`{tag}`" not in explained] == []


def test_clock_times_and_infinite_numbers_stay_out_of_the_rows(tmp_path):
    with closing(Curves(tmp_path, {"step": 0}, board_step=0)) as run_curves:
        values = {"custom/best_reward": np.float32(0.5), "time/fps": 100, "train/explained_variance": np.nan}
        CurvesWriter(run_curves).write(values, {name: () for name in values}, step=8)
    assert run_curves.rows == [{"step": 8, "custom/best_reward": 0.5}]
    assert set(curves(tmp_path)) == set(values)


def test_an_over_optimised_run_stops_and_has_the_weights_of_its_peak(tmp_path, capsys):
    """The reward of prompt 2 rises with training while its truth is the worst on validation images."""
    contexts, val = toy_contexts(40, 0), toy_contexts(40, 1)
    for context in (*contexts, *val):
        object.__setattr__(context, "metrics", {"dice": 1 - context.scores})
    model = train(tmp_path, contexts, val, total_timesteps=6000)
    assert "back to the best weights" in capsys.readouterr().out
    assert model.num_timesteps < 6000
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    gold = [row["custom/val_gt_dice"] for row in rows]
    chosen = choose_prompts(model, val)
    assert np.mean([c.metrics["dice"][a] for c, a in zip(val, chosen, strict=True)]) == pytest.approx(max(gold))
    weights = copy.deepcopy(model.policy.state_dict())
    again = train(tmp_path, contexts, val, total_timesteps=6000)  # killed after the stop
    assert all(torch.equal(value, again.policy.state_dict()[name]) for name, value in weights.items())
