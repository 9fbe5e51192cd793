"""The prompt policy and its baselines: each row selects prompts by another rule, on the same test images."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.linear_model import RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from rl_reward_network.report.bootstrap import (
    NO_GAP,
    Estimate,
    Verdict,
    few_patients_note,
    group_means,
    mean_interval,
    verdict_on,
)
from rl_reward_network.report.deployment import Deployment, comparable, oracle_gap, stack
from rl_reward_network.report.metrics import SampleTable
from rl_reward_network.rewards.table import MASK_REWARDS

RANDOM, DEFAULT, FIXED = "random prompt", "default prompt", "best fixed prompt"
NET, RIDGE, POLICY = "argmax of the reward net", "ridge per prompt", "PPO"
LAST = "PPO, last weights"  # beside a policy whose weights labels may have chosen, although the reward network paid it
BANDIT = "bandit"  # PPO with one prompt, beside a policy that may try several until it stops
DEPLOYED, ORACLE = "deployed", "oracle"


@dataclass(frozen=True, eq=False)
class ComparisonRow:
    """One rule that selects prompts, measured on the test images.

    Args:
        name: the rule, such as `DEFAULT` or `POLICY`.
        weights: float64 (N, P), probability of each prompt on each image.
        means: mean over patients of "score" and, if labelled, of each metric.
        to_default: paired difference to the default prompt, in the comparison's `criterion`.
        to_fixed: the same to the best fixed prompt.
        gap_closed: share of the oracle's gain over the best fixed prompt; None below `NO_GAP` or without ground truth.
        prompts_asked: number of prompts that Sa2VA must answer per new image; None if the rule needs the ground truth.
    """

    name: str
    weights: np.ndarray
    means: dict[str, Estimate]
    to_default: Estimate
    to_fixed: Estimate
    gap_closed: float | None
    prompts_asked: int | None


@dataclass(frozen=True, eq=False)
class Comparison:
    """All rows on the test images, and the verdict.

    Args:
        tables: the N test images that were compared.
        rows: in the order of the report; without ground truth there is no oracle.
        criterion: "dice", or "score" when unlabelled.
        deployment: what was decided without the test images, and the best fixed prompt.
        verdict: on PPO, or on its last weights where they have a row, against every fixed prompt.
        notes: limits of the data that a reader of the numbers must know.
    """

    tables: tuple[SampleTable, ...]
    rows: tuple[ComparisonRow, ...]
    criterion: str
    deployment: Deployment
    verdict: Verdict
    notes: tuple[str, ...]

    @property
    def labelled(self) -> bool:
        """Whether the test images have ground truth."""
        return self.criterion == "dice"

    def row(self, name: str) -> ComparisonRow:
        """The row of that name."""
        return next(row for row in self.rows if row.name == name)

    def values(self, row: ComparisonRow, column: str) -> np.ndarray:
        """float64 (N,): the row's expected score or metric on each image."""
        return expected(row.weights, self.tables, column)


def expected(weights: np.ndarray, tables: Sequence[SampleTable], column: str) -> np.ndarray:
    """float64 (N,): the exact expectation of a column under the probabilities `weights` (N, P); no sampling."""
    return np.einsum("np,np->n", weights, stack(tables, column))


def ridge_per_prompt(features: np.ndarray, rewards: np.ndarray, new_features: np.ndarray) -> np.ndarray:
    """int64 (M,): for each new image the prompt with the highest reward as predicted by ridge regression.

    One regression per prompt, from the standardised observation to the prompt's reward less the image's mean reward;
    the penalty of each is selected by leave-one-out. Given all rewards, this is the supervised alternative to PPO.

    Args:
        features: float (N, F) of the training images.
        rewards: float (N, P), PPO's rewards on them.
        new_features: float (M, F).

    Returns:
        int64 (M,); with a single training image, its best prompt for all.
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
) -> Comparison:
    """Measure the policy and its baselines on the test images.

    Args:
        val: validation images, for the oracle's gain over the best fixed prompt; may be empty.
        test: images for all rows. Unlabelled ones are left out, with a note, if others are labelled.
        chosen: `POLICY`, `RIDGE` and, where they have rows, `BANDIT` and `LAST` -> int (N,), index of the selected
            prompt on each test image.
        deployment: what was decided without the test images.
        seed: of the bootstrap.
        max_steps: number of prompts that PPO tries per image.

    Raises:
        ValueError: no test images, or `chosen` does not fit to `test`.
    """
    if not test:
        raise ValueError("test: got no images, expected at least one")
    for name, picks in chosen.items():
        if picks.shape != (len(test),) or not ((picks >= 0) & (picks < len(test[0].scores))).all():
            raise ValueError(f"chosen: {name} is {picks}, expected a prompt's index for each of {len(test)} images")
    indices, criterion = comparable(test)
    tables = [test[index] for index in indices]
    weights = _weights(tables, criterion, deployment, {name: picks[indices] for name, picks in chosen.items()})
    prompts = len(test[0].scores)
    asked = max_steps if deployment.choice == "policy" else 1
    prompts_asked = {NET: prompts, POLICY: max_steps, LAST: max_steps, DEPLOYED: asked, ORACLE: None}
    rows = tuple(_row(name, weights, tables, criterion, seed, prompts_asked.get(name, 1)) for name in weights)
    judged = next(row for row in rows if row.name == (LAST if LAST in chosen else POLICY))
    difference = judged.to_fixed if criterion == "dice" else None
    rival = _rival(judged, tables, seed) if criterion == "dice" else ""
    gap = oracle_gap(val, deployment.best_fixed, seed)
    verdict = verdict_on(difference, gap, rival, judged.name)
    of_gap = few_patients_note(gap.groups, "validation patients") if gap and verdict.label == "no gap" else ()
    notes = (*_notes(test, tables), *of_gap, *deployment.notes)
    return Comparison(tuple(tables), rows, criterion, deployment, verdict, notes)


def _rival(row: ComparisonRow, tables: Sequence[SampleTable], seed: int) -> str:
    """The one prompt for all images that the row is farthest from beating, in words; empty if it beats every prompt.

    A choice that does not depend on the image is never better than the best single prompt. So a policy that beats each
    of them has chosen by the image, whatever paid it. All must be beaten, so no correction for several tests is needed.
    """
    dice, groups = stack(tables, "dice"), [table.group_id for table in tables]
    gains = [mean_interval(expected(row.weights, tables, "dice") - one, groups, seed) for one in dice.T]
    index = min((index for index, gain in enumerate(gains) if gain.sign <= 0), key=lambda i: gains[i].mean, default=-1)
    return "" if index < 0 else f"the prompt with index {index} ({row.name} minus it: {gains[index].signed} Dice)"


def overlay_picks(comparison: Comparison) -> dict[str, int]:
    """Indices in `comparison.tables` of the images on which the deployed choice is best, median and worst."""
    order = np.argsort(comparison.values(comparison.row(DEPLOYED), comparison.criterion), kind="stable")
    return {"best": int(order[-1]), "median": int(order[len(order) // 2]), "worst": int(order[0])}


def _weights(
    tables: Sequence[SampleTable], criterion: str, deployment: Deployment, chosen: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Row name -> float64 (N, P), probability of each prompt on each image."""
    scores = stack(tables, "score")
    one_hot = np.eye(scores.shape[1])
    fixed = one_hot[np.full(len(tables), deployment.best_fixed)]
    weights = {
        RANDOM: np.full(scores.shape, 1 / scores.shape[1]),
        DEFAULT: one_hot[np.zeros(len(tables), dtype=int)],
        FIXED: fixed,
        NET: one_hot[scores.argmax(axis=1)],
        RIDGE: one_hot[chosen[RIDGE]],
        **{name: one_hot[chosen[name]] for name in (BANDIT, LAST, POLICY) if name in chosen},
    }
    weights[DEPLOYED] = weights[{"policy": POLICY, "fixed": FIXED, "as it is": DEFAULT}[deployment.choice]]
    return weights if criterion == "score" else weights | {ORACLE: one_hot[stack(tables, "dice").argmax(axis=1)]}


def _row(
    name: str,
    weights: dict[str, np.ndarray],
    tables: Sequence[SampleTable],
    criterion: str,
    seed: int,
    prompts_asked: int | None,
) -> ComparisonRow:
    """One row with its intervals; all rows resample the same patients."""
    groups = [table.group_id for table in tables]
    columns = ["score"] if criterion == "score" else ["score", *MASK_REWARDS]
    means = {column: mean_interval(expected(weights[name], tables, column), groups, seed) for column in columns}

    def difference(other: str) -> Estimate:
        return mean_interval(expected(weights[name] - weights[other], tables, criterion), groups, seed)

    to_fixed = difference(FIXED)
    gap = 0.0
    if ORACLE in weights:
        gap = float(group_means(expected(weights[ORACLE] - weights[FIXED], tables, criterion), groups).mean())
    closed = to_fixed.mean / gap if gap >= NO_GAP else None  # below, the share is dominated by noise
    return ComparisonRow(name, weights[name], means, difference(DEFAULT), to_fixed, closed, prompts_asked)


def _notes(test: Sequence[SampleTable], compared: Sequence[SampleTable]) -> tuple[str, ...]:
    """Limits of the data: missing labels, too few patients."""
    notes = []
    if compared[0].metrics is None:
        notes.append("The test images are unlabelled: there are no Dice columns, no oracle and no verdict.")
    if len(compared) < len(test):
        notes.append(f"{len(test) - len(compared)} of {len(test)} test images are unlabelled and left out.")
    return (*notes, *few_patients_note(len({table.group_id for table in compared})))
