import numpy as np
import pytest

from rl_reward_network.env.vector_env import make_vector_env
from tests.env.test_sa2va_finetune_env import RECORDED, RECORDED_CASES, make_contexts, recorded_actions


def play(venv, steps=30):
    """Random prompts; (observations, rewards, infos) of every step."""
    rng = np.random.default_rng(0)
    venv.reset()
    return [
        (observations.tolist(), rewards, infos)
        for observations, rewards, _, infos in (
            venv.step(rng.integers(venv.action_space.n, size=venv.num_envs)) for _ in range(steps)
        )
    ]


def test_rewards_are_centred_per_image_and_the_monitor_stays_raw():
    contexts = {context.sample_id: context for context in make_contexts()}
    for _, rewards, infos in play(make_vector_env(list(contexts.values()), n_envs=3, seed=0)):
        for reward, info in zip(rewards, infos, strict=True):
            scores = contexts[info["sample_id"]].scores
            assert info["episode"]["r"] == pytest.approx(scores[info["prompt"]]) == pytest.approx(info["score"])
            assert reward == pytest.approx(scores[info["prompt"]] - scores.mean(), abs=1e-6)
            assert info["TimeLimit.truncated"] is False


def test_centring_leaves_only_the_choice():
    contexts = make_contexts(prompts=3)
    venv, paid = make_vector_env(contexts, n_envs=1, seed=0), {}
    venv.reset()
    for step in range(200):
        _, rewards, _, infos = venv.step(np.array([step % 3]))
        paid[infos[0]["sample_id"], infos[0]["prompt"]] = float(rewards[0])
    assert len(paid) == len(contexts) * 3
    for context in contexts:
        assert sum(paid[context.sample_id, prompt] for prompt in range(3)) == pytest.approx(0, abs=1e-6)


def test_longer_episodes_keep_their_improvements():
    steps = play(make_vector_env(make_contexts(), n_envs=2, seed=0, max_steps=3))
    assert min(rewards.min() for _, rewards, _ in steps) >= 0
    ended = [info for _, _, infos in steps for info in infos if "episode" in info]
    assert {info["episode"]["l"] for info in ended} == {3}


@pytest.mark.parametrize("max_steps", [1, 4])
def test_with_stop_rewards_are_changes_and_not_centred(max_steps):
    contexts = {context.sample_id: context.metrics["dice"] for context in make_contexts()}
    venv = make_vector_env(make_contexts(), 2, seed=0, max_steps=max_steps, reward="dice", stop=True)
    ended = [info for _, _, infos in play(venv, 60) for info in infos if "episode" in info]
    for info in ended:
        dices = contexts[info["sample_id"]]
        assert info["episode"]["r"] == pytest.approx(dices[info["prompt"]] - dices[0], abs=1e-6)
    assert {info["episode"]["l"] for info in ended} == set(range(1, max_steps + 1))


def test_environments_differ_and_equal_seeds_repeat():
    first, second, other = (play(make_vector_env(make_contexts(), n_envs=2, seed=seed)) for seed in (3, 3, 4))
    orders = [[infos[index]["sample_id"] for _, _, infos in first] for index in range(2)]
    assert orders[0] != orders[1]
    assert [(seen, rewards.tolist()) for seen, rewards, _ in first] == [(s, r.tolist()) for s, r, _ in second]
    assert [seen for seen, _, _ in first] != [seen for seen, _, _ in other]


def test_no_environment_is_refused():
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
