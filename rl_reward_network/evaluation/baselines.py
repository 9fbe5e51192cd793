"""The policy beside what it must beat: every row picks prompts in its own way, all are measured on the same images."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_reward_network.evaluation.bootstrap import Estimate, Verdict, group_bootstrap, group_means, verdict_on
from rl_reward_network.evaluation.metrics import METRICS, SampleTable

RANDOM, DEFAULT, FIXED = "random prompt", "default prompt", "best fixed prompt"
NET, POLICY, ORACLE = "argmax of the reward net", "PPO", "oracle"
SMALLEST_GAP = 1e-6  # Dice; below it a share of the gap is noise over noise


@dataclass(frozen=True, eq=False)
class Row:
    """One way to pick prompts, on the test images.

    Args:
        name: how the prompts are picked.
        weights: float64 (N, P), probability of each prompt on each image.
        means: mean over patients of "score" and, when labelled, of each metric.
        to_default: paired difference to the default prompt, in the comparison's `criterion`.
        to_fixed: the same to the best fixed prompt.
    """

    name: str
    weights: np.ndarray
    means: dict[str, Estimate]
    to_default: Estimate
    to_fixed: Estimate


@dataclass(frozen=True, eq=False)
class Comparison:
    """All rows on the test images, and what they say.

    Args:
        tables: the N test images that were compared.
        rows: in the order of the report; without ground truth there is no oracle.
        criterion: "dice", or "score" when unlabelled.
        best_fixed: index of the prompt that is best on the training images.
        gap_closed: (PPO - best fixed) / (oracle - best fixed); None when there is no gap or no ground truth.
        verdict: on PPO against the best fixed prompt.
        notes: what a reader must know to read the numbers rightly.
    """

    tables: tuple[SampleTable, ...]
    rows: tuple[Row, ...]
    criterion: str
    best_fixed: int
    gap_closed: float | None
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
    return np.einsum("np,np->n", weights, _stack(tables, column))


def best_fixed_prompt(tables: Sequence[SampleTable]) -> int:
    """The prompt with the highest mean over patients: of Dice on labelled images, of the score if there are none."""
    labelled = [table for table in tables if table.metrics is not None]
    tables, column = (labelled, "dice") if labelled else (tables, "score")
    groups = [table.group_id for table in tables]
    return int(np.argmax([group_means(values, groups).mean() for values in _stack(tables, column).T]))


def compare(
    train: Sequence[SampleTable], val: Sequence[SampleTable], test: Sequence[SampleTable], chosen: np.ndarray, seed: int
) -> Comparison:
    """Measure the policy and its baselines on the test images.

    Args:
        train: images that the best fixed prompt is chosen on.
        val: images that tell whether there is a gap to close; may be empty.
        test: images that every row is measured on. Unlabelled ones are left out (and counted) if others are labelled.
        chosen: int (N,), the prompt the policy picks on each test image.
        seed: of the bootstrap.

    Raises:
        ValueError: no training or no test images, or `chosen` does not fit to `test`.
    """
    if not train or not test:
        raise ValueError(f"tables: got {len(train)} training and {len(test)} test images; both need at least one")
    if chosen.shape != (len(test),) or not ((chosen >= 0) & (chosen < len(test[0].scores))).all():
        raise ValueError(f"chosen: got {chosen}; expected one prompt index for each of {len(test)} test images")
    keep = [place for place, table in enumerate(test) if table.metrics is not None] or list(range(len(test)))
    tables, best = tuple(test[place] for place in keep), best_fixed_prompt(train)
    criterion = "score" if tables[0].metrics is None else "dice"
    weights = _weights(tables, criterion, best, chosen[keep])
    rows = tuple(_row(name, weights, tables, criterion, seed) for name in weights)
    difference = next(row.to_fixed for row in rows if row.name == POLICY) if criterion == "dice" else None
    verdict = verdict_on(difference, _oracle_gap(val, best, seed), len(set(chosen[keep].tolist())))
    closed = _gap_closed({row.name: row.means[criterion].mean for row in rows})
    return Comparison(tables, rows, criterion, best, closed, verdict, _notes(train, test, tables))


def overlay_picks(comparison: Comparison) -> dict[str, int]:
    """Places (in `comparison.tables`) of the images on which the policy is best, median and worst."""
    order = np.argsort(comparison.values(comparison.row(POLICY), comparison.criterion), kind="stable")
    return {"best": int(order[-1]), "median": int(order[len(order) // 2]), "worst": int(order[0])}


def _stack(tables: Sequence[SampleTable], column: str) -> np.ndarray:
    """float64 (N, P)."""
    return np.stack([table.column(column) for table in tables])


def _weights(
    tables: Sequence[SampleTable], criterion: str, best_fixed: int, chosen: np.ndarray
) -> dict[str, np.ndarray]:
    """float64 (N, P) for each row: how probable each prompt is on each image."""
    scores = _stack(tables, "score")
    one_hot = np.eye(scores.shape[1])
    weights = {
        RANDOM: np.full(scores.shape, 1 / scores.shape[1]),
        DEFAULT: one_hot[np.zeros(len(tables), dtype=int)],
        FIXED: one_hot[np.full(len(tables), best_fixed)],
        NET: one_hot[scores.argmax(axis=1)],
        POLICY: one_hot[chosen],
    }
    return weights if criterion == "score" else weights | {ORACLE: one_hot[_stack(tables, "dice").argmax(axis=1)]}


def _row(name: str, weights: dict[str, np.ndarray], tables: Sequence[SampleTable], criterion: str, seed: int) -> Row:
    """One row with its intervals; all rows draw the same patients."""
    groups = [table.group_id for table in tables]
    columns = ["score"] if criterion == "score" else ["score", *METRICS]
    means = {column: group_bootstrap(expected(weights[name], tables, column), groups, seed) for column in columns}

    def difference(other: str) -> Estimate:
        return group_bootstrap(expected(weights[name] - weights[other], tables, criterion), groups, seed)

    return Row(name, weights[name], means, difference(DEFAULT), difference(FIXED))


def _oracle_gap(val: Sequence[SampleTable], best_fixed: int, seed: int) -> Estimate | None:
    """Dice of the oracle less Dice of the best fixed prompt on the labelled validation images."""
    labelled = [table for table in val if table.metrics is not None]
    if not labelled:
        return None
    dice = _stack(labelled, "dice")
    return group_bootstrap(dice.max(axis=1) - dice[:, best_fixed], [table.group_id for table in labelled], seed)


def _gap_closed(means: dict[str, float]) -> float | None:
    """Share of the oracle's gain over the best fixed prompt that the policy reaches; negative when it loses."""
    gap = means.get(ORACLE, means[FIXED]) - means[FIXED]
    return (means[POLICY] - means[FIXED]) / gap if gap > SMALLEST_GAP else None


def _notes(train: Sequence[SampleTable], test: Sequence[SampleTable], kept: Sequence[SampleTable]) -> tuple[str, ...]:
    """What a reader must know."""
    notes = []
    if kept[0].metrics is None:
        notes.append("The test images are unlabelled: there are no Dice columns, no oracle and no verdict.")
    if len(kept) < len(test):
        notes.append(f"{len(test) - len(kept)} of {len(test)} test images are unlabelled and left out.")
    if len({table.group_id for table in kept}) < 2:
        notes.append("Fewer than 2 test patients: no interval can be given.")
    if all(table.metrics is None for table in train):
        notes.append("The best fixed prompt is chosen by the reward net's score: the training images are unlabelled.")
    return tuple(notes)
