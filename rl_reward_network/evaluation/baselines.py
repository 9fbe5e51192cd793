"""The policy beside what it must beat: every row picks prompts in its own way, all are measured on the same images."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.linear_model import RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from rl_reward_network.evaluation.bootstrap import (
    MIN_PATIENTS,
    NO_GAP,
    Estimate,
    Verdict,
    group_bootstrap,
    group_means,
    verdict_on,
)
from rl_reward_network.evaluation.deployment import Deployment, comparable, oracle_gap, stack
from rl_reward_network.evaluation.metrics import SampleTable
from rl_reward_network.rewards.table import MASK_REWARDS

RANDOM, DEFAULT, FIXED = "random prompt", "default prompt", "best fixed prompt"
NET, RIDGE, POLICY = "argmax of the reward net", "ridge per prompt", "PPO"
DEPLOYED, ORACLE = "deployed", "oracle"


@dataclass(frozen=True, eq=False)
class Row:
    """One way to pick prompts, on the test images.

    Args:
        name: how the prompts are picked.
        weights: float64 (N, P), probability of each prompt on each image.
        means: mean over patients of "score" and, when labelled, of each metric.
        to_default: paired difference to the default prompt, in the comparison's `criterion`.
        to_fixed: the same to the best fixed prompt.
        gap_closed: share of the oracle's gain over the best fixed prompt; None below `NO_GAP` or without ground truth.
        asked: prompts that Sa2VA answers for each new image; None where it takes the ground truth.
    """

    name: str
    weights: np.ndarray
    means: dict[str, Estimate]
    to_default: Estimate
    to_fixed: Estimate
    gap_closed: float | None
    asked: int | None


@dataclass(frozen=True, eq=False)
class Comparison:
    """All rows on the test images, and what they say.

    Args:
        tables: the N test images that were compared.
        rows: in the order of the report; without ground truth there is no oracle.
        criterion: "dice", or "score" when unlabelled.
        deployment: what was chosen on validation, and the best fixed prompt.
        verdict: on PPO against the best fixed prompt.
        notes: what a reader must know to read the numbers rightly.
    """

    tables: tuple[SampleTable, ...]
    rows: tuple[Row, ...]
    criterion: str
    deployment: Deployment
    verdict: Verdict
    notes: tuple[str, ...]

    @property
    def labelled(self) -> bool:
        """True when the rows have metrics of the ground truth."""
        return self.criterion == "dice"

    def row(self, name: str) -> Row:
        """The row of that name."""
        return next(row for row in self.rows if row.name == name)

    def values(self, row: Row, column: str) -> np.ndarray:
        """float64 (N,): the row's expected score or metric on each image."""
        return expected(row.weights, self.tables, column)


def expected(weights: np.ndarray, tables: Sequence[SampleTable], column: str) -> np.ndarray:
    """float64 (N,): the exact expectation of a column under the probabilities `weights` (N, P); nothing is sampled."""
    return np.einsum("np,np->n", weights, stack(tables, column))


def ridge_per_prompt(features: np.ndarray, rewards: np.ndarray, new_features: np.ndarray) -> np.ndarray:
    """int64 (M,): for each new image the prompt whose reward a ridge regression predicts to be the highest.

    One regression for each prompt, from the standardised observation to its reward less the image's mean; the penalty
    of each is chosen by leave-one-out. With the whole table at hand this is the plain alternative to PPO.

    Args:
        features: float (N, F) of the training images.
        rewards: float (N, P), what PPO was paid there.
        new_features: float (M, F).

    Returns:
        int64 (M,); from a single training image its best prompt, always.
    """
    if len(features) < 2:  # nothing can be left out
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
) -> Comparison:
    """Measure the policy and its baselines on the test images.

    Args:
        val: images that tell whether there is a gap to close; may be empty.
        test: images that every row is measured on. Unlabelled ones are left out (and counted) if others are labelled.
        chosen: int (N,), the prompts that `PPO` and `ridge per prompt` pick on each test image.
        deployment: what validation decided.
        seed: of the bootstrap.
        max_steps: prompts that PPO tries for each image.

    Raises:
        ValueError: no test images, or `chosen` does not fit to `test`.
    """
    if not test:
        raise ValueError("tables: got no test images; at least one is needed")
    for name, picks in chosen.items():
        if picks.shape != (len(test),) or not ((picks >= 0) & (picks < len(test[0].scores))).all():
            raise ValueError(f"chosen: {name} is {picks}; expected a prompt's index for each of {len(test)} images")
    keep, criterion = comparable(test)
    tables = [test[place] for place in keep]
    weights = _weights(tables, criterion, deployment, {name: picks[keep] for name, picks in chosen.items()})
    prompts = len(test[0].scores)
    asked = {NET: prompts, POLICY: max_steps, DEPLOYED: max_steps if deployment.policy else 1, ORACLE: None}
    rows = tuple(_row(name, weights, tables, criterion, seed, asked.get(name, 1)) for name in weights)
    difference = next(row.to_fixed for row in rows if row.name == POLICY) if criterion == "dice" else None
    gap = oracle_gap(val, deployment.best_fixed, seed)
    verdict = verdict_on(difference, gap, len(set(chosen[POLICY][keep].tolist())))
    return Comparison(tuple(tables), rows, criterion, deployment, verdict, _notes(test, tables))


def overlay_picks(comparison: Comparison) -> dict[str, int]:
    """Places (in `comparison.tables`) of the images on which the policy is best, median and worst."""
    order = np.argsort(comparison.values(comparison.row(POLICY), comparison.criterion), kind="stable")
    return {"best": int(order[-1]), "median": int(order[len(order) // 2]), "worst": int(order[0])}


def _weights(
    tables: Sequence[SampleTable], criterion: str, deployment: Deployment, chosen: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """float64 (N, P) for each row: how probable each prompt is on each image."""
    scores = stack(tables, "score")
    one_hot = np.eye(scores.shape[1])
    fixed = one_hot[np.full(len(tables), deployment.best_fixed)]
    weights = {
        RANDOM: np.full(scores.shape, 1 / scores.shape[1]),
        DEFAULT: one_hot[np.zeros(len(tables), dtype=int)],
        FIXED: fixed,
        NET: one_hot[scores.argmax(axis=1)],
        RIDGE: one_hot[chosen[RIDGE]],
        POLICY: one_hot[chosen[POLICY]],
        DEPLOYED: one_hot[chosen[POLICY]] if deployment.policy else fixed,
    }
    return weights if criterion == "score" else weights | {ORACLE: one_hot[stack(tables, "dice").argmax(axis=1)]}


def _row(
    name: str,
    weights: dict[str, np.ndarray],
    tables: Sequence[SampleTable],
    criterion: str,
    seed: int,
    asked: int | None,
) -> Row:
    """One row with its intervals; all rows draw the same patients."""
    groups = [table.group_id for table in tables]
    columns = ["score"] if criterion == "score" else ["score", *MASK_REWARDS]
    means = {column: group_bootstrap(expected(weights[name], tables, column), groups, seed) for column in columns}

    def difference(other: str) -> Estimate:
        return group_bootstrap(expected(weights[name] - weights[other], tables, criterion), groups, seed)

    to_fixed = difference(FIXED)
    gap = 0.0
    if ORACLE in weights:
        gap = float(group_means(expected(weights[ORACLE] - weights[FIXED], tables, criterion), groups).mean())
    closed = to_fixed.mean / gap if gap >= NO_GAP else None  # else noise over noise
    return Row(name, weights[name], means, difference(DEFAULT), to_fixed, closed, asked)


def _notes(test: Sequence[SampleTable], kept: Sequence[SampleTable]) -> tuple[str, ...]:
    """What a reader must know."""
    notes = []
    if kept[0].metrics is None:
        notes.append("The test images are unlabelled: there are no Dice columns, no oracle and no verdict.")
    if len(kept) < len(test):
        notes.append(f"{len(test) - len(kept)} of {len(test)} test images are unlabelled and left out.")
    patients = len({table.group_id for table in kept})
    if patients < 2:
        notes.append("Fewer than 2 test patients: no interval can be given.")
    elif patients < MIN_PATIENTS:
        notes.append(f"{patients} test patients, fewer than {MIN_PATIENTS}: the intervals prove nothing.")
    return tuple(notes)
