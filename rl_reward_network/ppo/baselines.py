"""A policy and its baselines: each row selects prompts, or sequences of operations, by another rule."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from sklearn.linear_model import RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from rl_reward_network.report.deployment import Deployment, comparable, oracle_gap, stack
from rl_reward_network.report.metrics import SCORE, SampleTable
from rl_reward_network.report.statistics import Estimate, few_patients_note, group_means, is_no_gap, sign_of
from rl_reward_network.report.table import (
    ORACLE,
    Results,
    Row,
    Verdict,
    change_interval,
    make_row,
    policy_verdict,
)
from rl_reward_network.rewards.metrics import failed
from rl_reward_network.rewards.table import MASK_REWARDS

NET, POLICY, DEPLOYED, THRESHOLD = "argmax of the reward net", "PPO", "deployed", "best threshold"
LAST = "PPO, last weights"  # beside a policy whose weights labels may have chosen although the reward network rewarded


class Names(NamedTuple):
    """What a policy chooses from, in words, and the rows whose names depend on it."""

    arm: str
    """One of the actions."""
    what: str
    """What is chosen per image."""
    default: str
    """The row of the first action; then of one at random, of one for all images, and of ridge regression."""
    random: str
    fixed: str
    ridge: str


PROMPTS = Names("prompt", "the prompt", "default prompt", "random prompt", "best fixed prompt", "ridge per prompt")
SEQUENCES = Names(
    "sequence", "operations", "mask as it is", "random sequence", "best fixed sequence", "ridge per sequence"
)
RANDOM, DEFAULT, FIXED, RIDGE = PROMPTS.random, PROMPTS.default, PROMPTS.fixed, PROMPTS.ridge


@dataclass(frozen=True, eq=False)
class Comparison:
    """All rows on the N test images, and the verdict.

    The criterion of `results` is Dice, or the score when unlabelled. `weights`: row -> float64 (N, P), probability of
    each prompt on each image. `prompts_asked`: row -> prompts that Sa2VA must answer per new image; None if it needs
    the ground truth. The verdict is on PPO, or on its last weights where they have a row, against every fixed prompt.
    """

    names: Names
    results: Results
    tables: tuple[SampleTable, ...]
    weights: dict[str, np.ndarray]
    prompts_asked: dict[str, int | None]
    deployment: Deployment
    verdict: Verdict
    notes: tuple[str, ...]

    @property
    def labelled(self) -> bool:
        """Whether the test images have ground truth."""
        return self.results.criterion != SCORE

    def closed(self, row: Row) -> float | None:
        """Share of the oracle's gain over the best fixed choice; None if that is negligible or unknown."""
        return self.results.gap_closed(row, self.names.fixed, ORACLE)

    def prompts(self, name: str) -> np.ndarray:
        """int64 (N,): the prompt, or sequence, of each image in a row that chooses one."""
        return self.weights[name].argmax(axis=1)


def ridge_per_prompt(features: np.ndarray, rewards: np.ndarray, new_features: np.ndarray) -> np.ndarray:
    """int64 (M,): for each new image the prompt with the highest reward as predicted by ridge regression.

    One regression per prompt, from the standardised observation (N, F) to the prompt's reward (N, P) less the image's
    mean reward; the penalty of each is selected by leave-one-out. Given all rewards, this is the supervised alternative
    to PPO. With a single training image, its best prompt is chosen for all.
    """
    if len(features) < 2:  # leave-one-out needs two images
        return np.full(len(new_features), rewards[0].argmax(), dtype=np.int64)
    ridge = RidgeCV(alphas=np.logspace(-2, 4, 13), alpha_per_target=True)
    model = make_pipeline(StandardScaler(), ridge).fit(features, rewards - rewards.mean(axis=1, keepdims=True))
    return model.predict(new_features).argmax(axis=1).astype(np.int64)


def compare(
    val: Sequence[SampleTable],
    test: Sequence[SampleTable],
    chosen: dict[str, np.ndarray],
    deployment: Deployment,
    seed: int,
    max_steps: int = 1,
    names: Names = PROMPTS,
) -> Comparison:
    """Measure the policy and its baselines on the test images.

    Args:
        val: validation images, for the oracle's gain over the best fixed choice; may be empty.
        test: images for all rows. Unlabelled ones are left out, with a note, if others are labelled.
        chosen: `POLICY`, the ridge row and, where they have a row, `LAST` and others -> int (N,), index of the selected
            prompt or sequence on each test image.
        max_steps: number of prompts that PPO tries per image.

    Raises:
        ValueError: no test images, or `chosen` does not fit to `test`.
    """
    if not test:
        raise ValueError("test: got no images, expected at least one")
    arms = len(test[0].scores)
    for name, picks in chosen.items():
        if picks.shape != (len(test),) or not ((picks >= 0) & (picks < arms)).all():
            raise ValueError(f"chosen: {name} is {picks}, expected a prompt's index for each of {len(test)} images")
    indices, criterion = comparable(test)
    if not indices:
        raise ValueError(f"none of {len(test)} test images has a true mask or is in the reward network's domain")
    tables = [test[index] for index in indices]
    groups = [table.group_id for table in tables]
    scores = stack(tables, SCORE)
    judged = not np.isnan(scores).all()
    weights = _weights(scores, names, deployment, {name: picks[indices] for name, picks in chosen.items()})
    if criterion != SCORE:
        weights[ORACLE] = np.eye(arms)[stack(tables, "dice").argmax(axis=1)]
    known = [name for name in MASK_REWARDS if criterion != SCORE and name in (tables[0].metrics or {})]
    metrics = {name: stack(tables, name) for name in (*([SCORE] if judged else []), *known)}  # before 0.15 no `betti`
    metrics |= {"failure": failed(metrics["dice"])} if known else {}
    rows = tuple(
        make_row(
            name,
            {metric: _expected(of_row, of_arms) for metric, of_arms in metrics.items()},
            {
                other: {criterion: _expected(of_row - weights[other], metrics[criterion])}
                for other in (names.default, names.fixed)
            },
            groups,
            seed,
        )
        for name, of_row in weights.items()  # the exact expectations under its weights; no sampling
    )
    several = arms if names is PROMPTS else 1  # operations change the mask of one prompt
    prompts = {NET: several, POLICY: max_steps, LAST: max_steps, ORACLE: None}
    prompts[DEPLOYED] = max_steps if deployment.choice == "policy" else 1
    gap = oracle_gap(val, deployment.best_fixed, seed)
    results = Results(rows, tuple((table.sample_id, table.group_id) for table in tables), criterion)
    verdict = Verdict("unlabelled", "Unlabelled: no verdict. Without ground truth, only the reward is known.")
    if criterion != SCORE:
        row = results.row(LAST if LAST in chosen else POLICY)
        rival = _rival(row.name, weights[row.name], metrics[criterion], names, groups, seed)
        p = results.p(names.fixed)[row.name]
        verdict = prompt_verdict(results.difference(row, names.fixed), p, gap, rival, row.name, names)
    return Comparison(
        names,
        results,
        tuple(tables),
        weights,
        {name: prompts.get(name, 1) for name in weights},
        deployment,
        verdict,
        (*_notes(test, tables, judged or names is PROMPTS), *deployment.notes),
    )


def prompt_verdict(
    difference: Estimate,
    p: float,
    val_gap: Estimate | None,
    rival: str = "",
    name: str = "PPO",
    names: Names = PROMPTS,
) -> Verdict:
    """The verdict on a policy by its Dice less that of the best fixed choice on test patients, see `policy_verdict`.

    `p` is of the difference, from `max_t`; `val_gap` the oracle's gain on validation, None when that is unlabelled;
    `rival` a single choice that the policy does not beat, in words.
    """
    arm = names.arm
    measured = f"{name} minus {names.fixed} on {difference.groups} test patients: {difference} Dice."
    gain = f"on validation, the best {arm} of each image gains {val_gap} Dice over one {arm} for all"
    enough = f"{gain}, so one {arm} is enough" if is_no_gap(val_gap) else ""
    rival = f"{rival}, one {arm} for all images" if rival else ""
    return policy_verdict(difference, p, arm, names.what, measured, enough, rival)


def _rival(name: str, weights: np.ndarray, dice: np.ndarray, names: Names, groups: Sequence[str], seed: int) -> str:
    """The one prompt for all images that a row is farthest from beating, in words; empty if it beats every prompt.

    A choice that does not depend on the image is never better than the best single prompt, so a policy that beats each
    has chosen by the image, whatever its reward. All must be beaten, so no correction for several tests is needed.
    """
    gains = [_expected(weights, dice) - one for one in dice.T]
    means = group_means(np.stack(gains), groups).mean(axis=1)
    index = next((index for index in np.argsort(means).tolist() if sign_of(gains[index], groups) <= 0), -1)
    gain = change_interval("dice", gains[index], groups, seed).signed
    return "" if index < 0 else f"the {names.arm} with index {index} ({name} minus it: {gain} Dice)"


def _weights(
    scores: np.ndarray, names: Names, deployment: Deployment, chosen: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Row name -> float64 (N, P), probability of each choice on each image; without the oracle."""
    one_hot = np.eye(scores.shape[1])
    others = {name: one_hot[picks] for name, picks in chosen.items() if name not in (names.ridge, LAST, POLICY)}
    weights = {
        names.random: np.full(scores.shape, 1 / scores.shape[1]),
        names.default: one_hot[np.zeros(len(scores), dtype=int)],
        **others,
        names.fixed: one_hot[np.full(len(scores), deployment.best_fixed)],
        NET: one_hot[scores.argmax(axis=1)],
        names.ridge: one_hot[chosen[names.ridge]],
        **{name: one_hot[chosen[name]] for name in (LAST, POLICY) if name in chosen},
    }
    if np.isnan(scores).all():
        del weights[NET]
    row = {"policy": POLICY, "fixed": names.fixed, "as it is": names.default}[deployment.choice]
    return weights | {DEPLOYED: weights[row]}


def _expected(weights: np.ndarray, of_prompts: np.ndarray) -> np.ndarray:
    """float64 (N,): the expectation of a metric, float64 (N, P), under probabilities (N, P)."""
    return np.einsum("np,np->n", weights, of_prompts)


def _notes(test: Sequence[SampleTable], compared: Sequence[SampleTable], judged: bool) -> tuple[str, ...]:
    """Limits of the data: missing labels, too few patients, and, if a network judges, images without a score."""
    notes = []
    if compared[0].metrics is None:
        notes.append("The test images are unlabelled: there are no Dice columns, no oracle and no verdict.")
    if len(compared) < len(test):
        why = "unlabelled" if compared[0].metrics else "outside the reward network's domain"
        notes.append(f"{len(test) - len(compared)} of {len(test)} test images are {why} and left out.")
    elif judged and (outside := sum(bool(np.isnan(table.scores).any()) for table in compared)):
        notes.append(f"{outside} of {len(compared)} test images are outside the reward network's domain: no score.")
    return (*notes, *few_patients_note(len({table.group_id for table in compared})))
