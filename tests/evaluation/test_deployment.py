import numpy as np
import pytest

from rl_reward_network.evaluation.deployment import best_fixed_prompt, decide
from tests.evaluation.test_baselines import tables

ALTERNATING = np.where(np.arange(30)[:, None] % 2 == np.arange(2), 0.8, 0.6)
RIGHT = np.arange(30) % 2
TRAIN = tables([[0.7, 0.6]])


def test_the_fixed_prompt_is_chosen_on_training_patients_not_images():
    # prompt 0 wins on most images, but they are all of one patient
    train = tables([[0.9, 0.5], [0.9, 0.5], [0.9, 0.5], [0.1, 0.8]], groups=["a", "a", "a", "b"])
    assert best_fixed_prompt(train) == (1, "Dice on 2 training patients")
    assert best_fixed_prompt(train[:3])[0] == 0


def test_labels_choose_the_fixed_prompt_where_they_are_of_enough_patients():
    bare, labelled = tables([[0.9, 0.1]] * 9, labelled=False), tables([[0.1, 0.2]] * 6)
    assert best_fixed_prompt([*bare, *labelled]) == (1, "Dice on 6 training patients")
    assert best_fixed_prompt([*bare, *labelled[:5]]) == (0, "the reward net on 9 training patients")
    assert best_fixed_prompt(bare[:1]) == (0, "the reward net on 1 training patients")


def test_a_policy_is_deployed_where_validation_proves_it():
    chosen = decide(TRAIN, tables(ALTERNATING), RIGHT, seed=0)
    assert (chosen.policy, chosen.best_fixed, chosen.criterion) == (True, 0, "dice")
    assert chosen.difference.mean == pytest.approx(0.1)
    assert "0.100 [" in chosen.reason
    worse = decide(TRAIN, tables(ALTERNATING), 1 - RIGHT, seed=0)
    assert not worse.policy
    fixed = decide(TRAIN, tables(ALTERNATING), np.zeros(30, int), seed=0)
    assert (fixed.policy, fixed.difference.mean) == (False, 0), "a policy that is the fixed prompt proves nothing"


def test_a_policy_that_gains_nothing_is_deployed_in_one_of_forty_cases():
    """The lower bound of a 95 % interval is above 0 by chance in 2.5 %."""
    rng = np.random.default_rng(0)
    noise = [tables((0.5 + rng.normal(0, 0.1, (30, 2))).clip(0, 1)) for _ in range(200)]
    assert np.mean([decide(TRAIN, val, np.ones(30, int), seed=0).policy for val in noise]) <= 0.05


def test_without_a_gap_the_fixed_prompt_is_deployed_even_if_the_policy_surely_gains_a_little():
    tiny = 0.7 + 0.004 * (np.arange(30)[:, None] % 2 == np.arange(2))
    chosen = decide(TRAIN, tables(tiny), RIGHT, seed=0)
    assert chosen.difference.low > 0
    assert not chosen.policy
    assert "gain is negligible" in chosen.reason


def test_too_few_patients_prove_nothing():
    for val in (tables(ALTERNATING[:5]), tables(ALTERNATING, groups=["a", "b", "c"] * 10), tables(ALTERNATING[:1])):
        chosen = decide(TRAIN, val, RIGHT[: len(val)], seed=0)
        assert not chosen.policy
        assert "too few patients" in chosen.reason


def test_unlabelled_images_are_left_out_or_all_there_is():
    val = [*tables(1 - ALTERNATING, labelled=False), *tables(ALTERNATING)]
    chosen = decide(TRAIN, val, np.concatenate([RIGHT, RIGHT]), seed=0)
    assert (chosen.policy, chosen.criterion) == (True, "dice")
    assert chosen.difference.mean == pytest.approx(0.1)
    bare = decide(TRAIN, tables(ALTERNATING, labelled=False), RIGHT, seed=0)
    assert (bare.policy, bare.criterion) == (True, "score")
    assert "reward net's score" in bare.reason
