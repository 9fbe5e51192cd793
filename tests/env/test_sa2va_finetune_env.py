from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check_env
from gymnasium.wrappers import RenderCollection
from stable_baselines3.common.env_checker import check_env as sb3_check_env

from rl_reward_network import ENV_ID
from rl_reward_network.env.observation import EPISODE_FEATURES, bounds, observation_table
from rl_reward_network.env.sa2va_finetune_env import (
    PromptContext,
    Sa2VAFinetuneEnv,
    observations,
    prompt_rewards,
)
from rl_reward_network.ppo.contexts import contexts_from_masks

# 200 steps of each of these cases, recorded with version 0.7: (max_steps, reward)
RECORDED_CASES = ((1, "net"), (3, "net"), (2, "net_and_dice"), (1, "dice"))
RECORDED = np.load(Path(__file__).parents[1] / "fixtures" / "episodes_0_7.npz")


def recorded_actions():
    """int (200, 3), the actions of the recorded steps."""
    return np.random.default_rng(5).integers(4, size=(200, 3))


def make_contexts(count=6, prompts=4, labelled=True, seed=0, vision=0):
    rng = np.random.default_rng(seed)
    low, high = bounds(vision)
    return [
        PromptContext(
            f"sample{index}",
            rng.uniform(low, high)[:-EPISODE_FEATURES].astype(np.float32),
            rng.random(prompts, dtype=np.float32),
            {"dice": rng.random(prompts), "iou": rng.random(prompts)} if labelled else {},
        )
        for index in range(count)
    ]


def rollout(env, seed, steps=40):
    env.action_space.seed(seed)
    observation, info = env.reset(seed=seed)
    record = [observation.tolist(), info]
    for _ in range(steps):
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        record += [observation.tolist(), reward, terminated, truncated, info]
        if terminated:
            observation, info = env.reset()
            record += [observation.tolist(), info]
    return record


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("max_steps", "labelled", "reward", "vision"),
    [(1, True, "net", 0), (3, True, "dice", 5), (2, False, "net", 5), (2, True, "net_and_dice", 0)],
)
def test_both_checkers_pass(max_steps, labelled, reward, vision):
    contexts = make_contexts(labelled=labelled, vision=vision)
    env = gym.make(ENV_ID, contexts=contexts, max_steps=max_steps, reward=reward)
    gymnasium_check_env(env.unwrapped, skip_render_check=True)
    sb3_check_env(env.unwrapped, skip_render_check=True)


def test_the_last_mask_is_drawn_on_the_image():
    """What RecordVideo calls, through both wrappers of gymnasium.make."""
    rng = np.random.default_rng(0)
    images, masks = rng.integers(0, 100, (3, 16, 20, 3), dtype=np.uint8), rng.random((3, 4, 16, 20)) > 0.5
    contexts = contexts_from_masks(images, masks, rng.random((3, 4)))
    env = RenderCollection(gym.make(ENV_ID, contexts=contexts, render_mode="rgb_array"))
    for action in (2, 3):
        number = int(env.reset(seed=action)[1]["sample_id"][-1])
        env.step(action)
        before, after = env.render()
        np.testing.assert_array_equal(before, images[number])
        np.testing.assert_array_equal((after != before).any(axis=2), masks[number, action])
    gymnasium_check_env(gym.make(ENV_ID, contexts=contexts, render_mode="rgb_array").unwrapped)
    assert gym.make(ENV_ID, contexts=contexts, render_mode=None).unwrapped.render() is None


@pytest.mark.filterwarnings("ignore:.*render")  # gymnasium's, of a mode that is not there
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"render_mode": "rgb_array"}, "the contexts have no image and masks; make them by contexts_from_masks"),
        ({"render_mode": "ansi"}, "render_mode is 'ansi', expected None or 'rgb_array'"),
        ({"wrong": 1}, "wrong"),
    ],
)
def test_an_error_of_make_does_not_print_the_tables(more, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        gym.make(ENV_ID, contexts=make_contexts(count=6), **more)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("max_steps", [1, 3])
def test_equal_seeds_give_equal_rollouts(max_steps):
    first, second = (Sa2VAFinetuneEnv(make_contexts(), max_steps) for _ in range(2))
    assert rollout(first, seed=5) == rollout(second, seed=5)
    assert rollout(first, seed=5) == rollout(second, seed=5), "a seed starts a new pass over the images"
    assert rollout(first, seed=5) != rollout(second, seed=6)


def test_each_pass_shows_every_image_once_in_a_new_order():
    env = Sa2VAFinetuneEnv(make_contexts(count=6))
    names = [env.reset(seed=0)[1]["sample_id"], *(env.reset()[1]["sample_id"] for _ in range(17))]
    passes = [names[start : start + 6] for start in (0, 6, 12)]
    assert all(sorted(part) == [f"sample{index}" for index in range(6)] for part in passes)
    assert passes[0] != passes[1]


def test_the_reward_of_one_step_is_the_score_and_info_names_it():
    (context,) = make_contexts(count=1)
    env = Sa2VAFinetuneEnv([context])
    observation, _ = env.reset(seed=0)
    np.testing.assert_array_equal(observation, observations([context])[0])
    observation, reward, terminated, truncated, info = env.step(2)
    assert (terminated, truncated) == (True, False)
    assert type(reward) is float
    assert reward == info["score"] == float(context.scores[2])
    expected = {"sample_id": "sample0", "prompt": 2, "score": reward, "dice": context.metrics["dice"][2]}
    assert info == expected | {"iou": context.metrics["iou"][2]}
    np.testing.assert_allclose(observation[-2:], [1, reward])


def test_the_reward_of_more_steps_is_the_improvement_and_0_for_a_repeated_prompt():
    (context,) = make_contexts(count=1)
    scores = np.array([0.5, 0.25, 0.75, 1], dtype=np.float32)
    env = Sa2VAFinetuneEnv([PromptContext("a", context.features, scores)], max_steps=5)
    env.reset(seed=0)
    steps = [env.step(action) for action in (0, 0, 1, 2, 2)]
    assert [reward for _, reward, *_ in steps] == [0.5, 0, 0, 0.25, 0]
    assert [bool(terminated) for _, _, terminated, *_ in steps] == [False] * 4 + [True]
    np.testing.assert_allclose([observation[-2] for observation, *_ in steps], [0.2, 0.4, 0.6, 0.8, 1])
    np.testing.assert_allclose([observation[-1] for observation, *_ in steps], [0.5, 0.5, 0.5, 0.75, 0.75])


@pytest.mark.parametrize("reward", ["dice", "net_and_dice"])
def test_observations_carry_nothing_of_the_ground_truth(reward):
    first, second = make_contexts(seed=0), make_contexts(seed=0)
    for context in second:
        object.__setattr__(context, "metrics", {"dice": 1 - context.metrics["dice"]})
    records = [rollout(Sa2VAFinetuneEnv(contexts, 3, reward), seed=1) for contexts in (first, second)]
    seen = [[part for part in record if isinstance(part, list)] for record in records]
    assert seen[0] == seen[1]
    assert records[0] != records[1]


def test_each_reward_has_its_closed_form():
    (context,) = make_contexts(count=1)
    context.metrics["recall"] = 1 - context.metrics["iou"]
    expected = {
        "net": context.scores,
        "dice": context.metrics["dice"],
        "iou": context.metrics["iou"],
        "dice+recall": (context.metrics["dice"] + context.metrics["recall"]) / 2,
        "net_and_dice": 0.5 * context.scores + 0.5 * context.metrics["dice"],
    }
    for reward, values in expected.items():
        env = Sa2VAFinetuneEnv([context], reward=reward)
        env.reset(seed=0)
        _, value, _, _, info = env.step(1)
        assert value == pytest.approx(values[1])
        assert info["score"] == pytest.approx(context.scores[1]), "the reward network's, whatever the reward is"
    with pytest.raises(ValueError, match=r"reward: got 'best'.*net, dice, iou.*cldice, betti, single_tree, net_and_di"):
        prompt_rewards(context, "best")
    (bare,) = make_contexts(count=1, labelled=False)
    env = Sa2VAFinetuneEnv([bare])
    env.reset(seed=0)
    assert set(env.step(0)[-1]) == {"sample_id", "prompt", "score"}
    with pytest.raises(ValueError, match="sample0: reward 'iou' needs"):
        Sa2VAFinetuneEnv([bare], reward="iou")


def test_steps_outside_an_episode_and_other_actions_are_refused():
    env = Sa2VAFinetuneEnv(make_contexts())
    with pytest.raises(gym.error.ResetNeeded):
        env.step(0)
    env.reset(seed=0)
    for action in (4, -1, 0.5):
        with pytest.raises(ValueError, match=rf"action is .*{action}.*0 to 3"):
            env.step(action)
    env.step(3)
    with pytest.raises(gym.error.ResetNeeded):
        env.step(0)


@pytest.mark.parametrize(
    ("contexts", "more", "message"),
    [
        ([], {}, r"contexts is empty.*contexts_from_run.*contexts_from_masks"),
        ([*make_contexts(), make_contexts(prompts=5)[0]], {}, r"scores .*\[4, 5\]"),
        ([*make_contexts(), make_contexts(vision=3)[0]], {}, r"features .*\[30, 33\]"),
        (make_contexts() * 2, {}, "sample_id"),
        (make_contexts(), {"max_steps": 0}, r"max_steps.* 0"),
    ],
)
def test_contexts_that_do_not_fit_are_refused(contexts, more, message):
    with pytest.raises(ValueError, match=message):
        gym.make(ENV_ID, contexts=contexts, **more)


def changed(values, place, value):
    values = values.copy()
    values[place] = value
    return values


GOOD = make_contexts(count=1)[0]
NAMES = [entry.name for entry in observation_table()]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("features", changed(GOOD.features, 3, 2), f"a: features: {NAMES[3]} is 2.0"),
        ("features", changed(GOOD.features, 0, np.nan), f"a: features: {NAMES[0]} is nan"),
        ("features", GOOD.features[:-1], "a: features: got shape"),
        ("scores", np.array([0.5, 1.5]), r"a: scores: .*1.* is 1\.5"),
        ("scores", np.array([0.5]), "P >= 2"),
        ("metrics", {"dice": np.zeros(3)}, r"a: dice: got shape \(3,\); expected \(4,\)"),
    ],
)
def test_a_context_refuses_bad_numbers_and_names_them(field, value, message):
    with pytest.raises(ValueError, match=message):
        PromptContext(**{"sample_id": "a", "features": GOOD.features, "scores": GOOD.scores, field: value})


def test_an_image_outside_the_networks_domain_has_no_score_and_can_still_be_rewarded_by_labels():
    context = replace(make_contexts(1)[0], scores=np.full(4, np.nan, np.float32))
    assert not context.judged
    with pytest.raises(ValueError, match=r"sample0: it is outside the reward network's domain and has no score"):
        Sa2VAFinetuneEnv([context])
    env = Sa2VAFinetuneEnv([context], reward="dice")
    env.reset(seed=0)
    _, reward, _, _, info = env.step(np.int64(2))
    assert reward == pytest.approx(context.metrics["dice"][2])
    assert "score" not in info
    with pytest.raises(ValueError, match="scores: action 1 is nan"):
        replace(context, scores=np.array([0.1, np.nan, 0.2, 0.3], np.float32))
