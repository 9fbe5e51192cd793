from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest

from rl_reward_network.report.deployment import (
    FOLDS,
    Cost,
    Deployment,
    RunCost,
    best_fixed_prompt,
    decide,
    labels_sentence,
    out_of_fold,
    total_cost,
)
from rl_reward_network.report.statistics import MIN_PATIENTS
from tests.ppo.test_baselines import tables

PATIENTS = [f"p{index}" for index in range(30)]
RNG = np.random.default_rng(0)
NOISE = RNG.normal(0, 0.01, (4, 30))
EVEN = np.arange(30) % 2 == 0
FLAT = 0.6 + NOISE  # no prompt is better than another
BEST = FLAT + np.array([0, 0, 0.1, 0])[:, None]  # prompt 2 is
LOOKS = FLAT + np.array([0 * EVEN, 0.1 * EVEN, 0.1 * ~EVEN, 0 * EVEN])  # prompts 1 and 2, on half of the images each
RIGHT = np.where(EVEN, LOOKS[1], LOOKS[2])


def test_the_fixed_prompt_is_chosen_by_patients_not_images():
    # prompt 0 wins on most images, but they are all of one patient
    train = tables([[0.9, 0.5], [0.9, 0.5], [0.9, 0.5], [0.1, 0.8]], groups=["a", "a", "a", "b"])
    assert best_fixed_prompt(train) == (1, "Dice on 2 labelled patients")
    assert best_fixed_prompt(train[:3])[0] == 0


def test_labels_choose_the_fixed_prompt_where_they_are_of_enough_patients():
    bare, labelled = tables([[0.9, 0.1]] * 9, labelled=False), tables([[0.1, 0.2]] * 6)
    assert best_fixed_prompt([*bare, *labelled]) == (1, "Dice on 6 labelled patients")
    assert best_fixed_prompt([*bare, *labelled[:5]]) == (0, "the reward net on 9 patients")
    assert best_fixed_prompt(bare[:1]) == (0, "the reward net on 1 patients")


@pytest.mark.parametrize(
    ("values", "policy", "choice"),
    [
        (FLAT, FLAT[3], "as it is"),
        (BEST, BEST[2], "fixed"),
        (BEST, BEST[0], "fixed"),
        (LOOKS, RIGHT, "policy"),
        (FLAT, FLAT[0] + 0.05, "policy"),
        (FLAT - np.array([0, 1, 1, 1])[:, None] * 0.1, FLAT[1] - 0.1, "as it is"),
    ],
    ids=["nothing is better", "a prompt", "a prompt, not PPO", "PPO above both", "PPO alone", "all are worse"],
)
def test_only_what_has_beaten_the_model_as_it_is_is_deployed(values, policy, choice):
    found = decide(values, policy, PATIENTS)
    assert found.choice == choice
    assert found.patients == 30
    assert found.policy_gain.mean == pytest.approx((policy - values[0]).mean())
    assert f"{found.policy_gain.signed} by PPO out of fold (p {found.policy_p:.2g})" in found.reason
    assert f"chosen on them (p {found.fixed_p:.2g}); p is corrected for 4 candidates" in found.reason


def test_a_small_gap_does_not_block_a_policy_that_is_surely_better():
    values = np.vstack([np.full(30, 0.6), 0.7 + 0.004 * EVEN, 0.7 + 0.004 * ~EVEN])
    found = decide(values, values.max(axis=0), PATIENTS)
    assert found.difference.low > 0
    assert found.choice == "policy"
    assert found.reason.endswith("a loss larger than any seen, in up to 3/30 of the patients, cannot be excluded")


@pytest.mark.parametrize("patients", [0, 1, 5])
def test_too_few_patients_leave_the_model_as_it_is_in_one_line(patients):
    groups = [name for name in PATIENTS[:patients] for _ in range(3)]
    values = np.tile([[0.1], [0.9]], 3 * patients)
    found = decide(values, None, groups, (1, "the reward net on 9 patients"))
    assert (found.choice, found.best_fixed, found.patients) == ("as it is", 1, patients)
    assert "below 6 no test can tell whether anything is better" in found.reason
    assert "\n" not in found.reason


@pytest.mark.parametrize(("patients", "noted"), [(5, False), (6, True), (19, True), (20, False)])
def test_the_intervals_of_a_decision_by_few_patients_are_called_rough(patients, noted):
    groups = PATIENTS[:patients]
    policy = RIGHT[:patients] if patients > 5 else None
    notes = decide(LOOKS[:, :patients], policy, groups).notes
    assert bool(notes) == noted
    assert all(f"{patients} labelled patients of the decision, fewer than 20: the intervals" in note for note in notes)


def test_six_patients_are_enough():
    """Holm over two candidates could not reach 0.05 there, nor 5 validation patients anything."""
    values = np.vstack([np.full(MIN_PATIENTS, 0.5), 0.6 + 0.01 * np.arange(MIN_PATIENTS)])
    assert decide(values, values[0], PATIENTS[:MIN_PATIENTS]).choice == "fixed"
    assert decide(values[:1], values[1], PATIENTS[:MIN_PATIENTS]).choice == "policy"


def test_in_null_worlds_next_to_nothing_is_deployed():
    """A policy that takes the best prompt of its training patients, and one that fits noise; at most 5 % are right."""
    rng, worlds, found = np.random.default_rng(1), 200, Counter()
    for world in range(worlds):
        values = rng.normal(0.6, 0.05, (11, 20)) + rng.normal(0, 0.1, 20)
        groups, images = PATIENTS[:20], np.arange(20)
        looks = rng.integers(0, 3, 20) if world % 2 else np.zeros(20, int)

        def policy(patients, indices, values=values, groups=groups, looks=looks, images=images):
            others = [image for image in images if groups[image] not in patients]
            best = [
                values[:, [i for i in others if looks[i] == look] or others].mean(axis=1).argmax() for look in range(3)
            ]
            return values[[best[looks[image]] for image in indices], indices]

        found[decide(values, out_of_fold(groups, policy), groups).choice] += 1
    assert worlds - found["as it is"] <= 0.05 * worlds


def test_folds_hold_out_each_patient_once():
    groups, folds = ["a", "a", "b", "c", "d", "e", "e"], []

    def measure(patients, indices):
        folds.append(indices.tolist())
        assert {groups[index] for index in indices} == patients
        return np.ones(len(indices))

    assert out_of_fold(groups, measure).all()
    assert len(folds) == FOLDS
    assert sorted(index for fold in folds for index in fold) == list(range(7))
    folds.clear()
    groups = ["a", "b", "b"]
    out_of_fold(groups, measure)
    assert len(folds) == 2, "no more folds than patients"


def test_a_deployment_survives_json_and_an_old_one_deploys_nothing():
    for found in (decide(LOOKS, RIGHT, PATIENTS), decide(LOOKS[:, :3], None, PATIENTS[:3])):
        assert Deployment.from_json(asdict(found)) == found
    found = Deployment.from_json({"policy": True, "best_fixed": 9, "fixed_by": "Dice on 3 training patients"})
    assert (found.choice, found.best_fixed) == ("as it is", 9)
    assert "train again" in found.reason
    assert found.words("best fixed prompt") == "the model as it is (default prompt)"


def test_labels_are_named_by_use():
    sentence = labels_sentence({"reward": {}, "weights": {"val": 48}, "deployment": {"policy": 20, "val": 40}})
    assert sentence.startswith("Labelled images, besides those of a reward network: 48 of val chose when")
    assert "20 of policy and 40 of val chose the best fixed choice and what is deployed" in sentence
    assert labels_sentence({"reward": {}, "weights": {}, "deployment": {}}).endswith("reward network: none.")


def test_runs_that_learn_from_one_split_share_its_labels():
    both = total_cost([Cost(2, {"reward": 50}, 10, 1.5), Cost(3, {"policy": 20, "reward": 40}, 5, None)])
    assert both == Cost(5, {"policy": 20, "reward": 50}, 15, 1.5)
    assert both.labelled_images == 70
    assert total_cost([]) == Cost()


def test_the_cost_of_a_run_is_read_as_it_was_written(tmp_path):
    seconds = {"masks and scores": 30, "PPO": 50, "decision": 10}
    labels = {"reward": {}, "weights": {"val": 48}, "deployment": {"policy": 20, "val": 40}}
    RunCost(seconds, labels, 7, None, resumed=True).save(tmp_path)
    run = RunCost.load(tmp_path)
    assert run.total() == Cost(1.5, {"policy": 20, "val": 48}, 7, None, resumed=True)
    assert run.total(searched=True) == Cost(0.5, {"policy": 20, "val": 40}, 0, None, resumed=True)
