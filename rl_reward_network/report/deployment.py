"""What to deploy: the policy, one choice for all images, or the model as it is; and what a training cost.

Only what has beaten the model as it is on labelled patients is deployed. The candidates are every fixed choice (each
prompt, each sequence of operations) and the policy, and they are tested together (`max_t`), because the best of many is
too good by chance. The policy is judged out of fold: on patients that neither trained it nor chose its weights.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from sklearn.model_selection import GroupKFold

from rl_reward_network.atomic_io import read_json, write_json
from rl_reward_network.report.metrics import SCORE, SampleTable
from rl_reward_network.report.statistics import (
    CHANGE,
    LEVEL,
    MIN_PATIENTS,
    Estimate,
    few_patients_note,
    group_means,
    max_t,
    mean_interval,
    rare_loss,
    sign_of,
)

COST = "cost.json"  # of each run
AFTER_SEARCH = ("PPO", "decision")  # seconds that a method does not need which uses what was found by search
FOLDS = 3  # fits of the policy for its own decision; each takes as long as the training
AS_IT_IS = 0  # index of the fixed choice that leaves the model as it is: the default prompt, no operation
Choice = Literal["policy", "fixed", "as it is"]
Labels = dict[str, dict[str, int]]  # use, as in `USES` -> split -> number of labelled images
USES = {
    "reward": "rewarded the policy",
    "weights": "chose when training ended and which weights are used",
    "deployment": "chose the best fixed choice and what is deployed",
}


@dataclass(frozen=True)
class Deployment:
    """What is deployed, and why; p-values are corrected for all candidates."""

    choice: Choice
    best_fixed: int  # index of the best fixed choice
    fixed_by: str  # metric and data that selected it, in words
    patients: int  # labelled patients of the decision
    policy_gain: Estimate | None  # Dice, out of fold, less that of the model as it is; None if nothing could be tested
    policy_p: float | None
    fixed_gain: Estimate | None  # the same of the best fixed choice
    fixed_p: float | None
    difference: Estimate | None  # Dice of the policy less that of the best fixed choice, both out of fold
    reason: str  # of the decision, in words

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Deployment":
        """The deployment that `asdict` made JSON of; one of version 0.11 or earlier was not tested: as it is."""
        if "choice" not in value:
            reason = "version 0.11 or earlier did not test against it; train again to have it tested"
            return cls("as it is", value["best_fixed"], value["fixed_by"], 0, None, None, None, None, None, reason)
        names = ("policy_gain", "fixed_gain", "difference")
        return cls(**{**value, **{name: value[name] and Estimate(**value[name]) for name in names}})

    @property
    def notes(self) -> tuple[str, ...]:
        """Whether the intervals of the decision, where there are any, are rough."""
        return () if self.policy_gain is None else few_patients_note(self.patients, "labelled patients of the decision")

    def words(self, fixed: str, as_it_is: str = "the model as it is (default prompt)") -> str:
        """What is deployed, in words; `fixed` is the best fixed choice in words."""
        return {"policy": "the policy", "fixed": f"the {fixed}", "as it is": as_it_is}[self.choice]


def can_decide(groups: Sequence[str]) -> bool:
    """Whether there are enough labelled patients for any difference, however clear, to be significant."""
    return len(set(groups)) >= MIN_PATIENTS


def decide(
    values: np.ndarray,
    policy: np.ndarray | None,
    groups: Sequence[str],
    fixed: tuple[int, str] | None = None,
    name: str = "best fixed prompt",
    seed: int = 0,
) -> Deployment:
    """The policy, the best fixed choice, or the model as it is.

    Deployed is what has beaten the model as it is: p <= 0.05, two-sided, corrected for all fixed choices and the
    policy. If both have, it is the policy where it beats the best fixed choice, too, with both out of fold.

    Args:
        values: float (P, N), Dice of P fixed choices on N labelled images of no test patient; row `AS_IT_IS` is the
            model as it is.
        policy: float (N,), Dice of the policy's choices out of fold, see `out_of_fold`; None if `can_decide` is false.
        fixed: the best fixed choice and what selected it, in words; by default the best of `values`.
        name: of the best fixed choice, in words.
    """
    patients = len(set(groups))
    best, fixed_by = fixed or (best_choice(values, groups), f"Dice on {patients} labelled patients")
    if policy is None or not can_decide(groups):
        few = f"{patients or 'no'} labelled patient{'s' * (patients > 1)}"
        reason = f"{few} outside the test split: below {MIN_PATIENTS} no test can tell whether anything is better"
        return Deployment("as it is", best, fixed_by, patients, None, None, None, None, None, reason)
    gains = np.vstack([values, policy]) - values[AS_IT_IS]
    tested = max_t(gains, groups)
    difference = policy - best_out_of_fold(values, groups)
    fixed_better = tested.signs[best] > 0
    choice: Choice = "fixed" if fixed_better else "as it is"
    if tested.signs[-1] > 0 and (not fixed_better or sign_of(difference, groups) > 0):
        choice = "policy"
    fixed_gain, policy_gain, measured = (
        mean_interval(of, groups, seed, bounds=CHANGE) for of in (gains[best], gains[-1], difference)
    )
    fixed_p, policy_p = float(tested.p[best]), float(tested.p[-1])
    reason = (
        f"on {patients} labelled patients outside the test split the gain over the model as it is, in Dice, is "
        f"{policy_gain.signed} by PPO out of fold (p {policy_p:.2g}) and {fixed_gain.signed} by the {name}, chosen on "
        f"them (p {fixed_p:.2g}); p is corrected for {len(gains) - 1} candidates, and {LEVEL} is needed; PPO minus "
        f"{name}, both out of fold, is {measured.signed}"
    )
    if choice != "as it is":
        reason += f"; {rare_loss(patients)}"
    return Deployment(choice, best, fixed_by, patients, policy_gain, policy_p, fixed_gain, fixed_p, measured, reason)


def labels_sentence(labels: Labels) -> str:
    """Which labels of a run chose what, in a sentence; those of its reward network are not counted."""
    uses = [(USES[use], of) for use, of in labels.items() if of]
    parts = [f"{' and '.join(f'{n} of {split}' for split, n in of.items())} {words}" for words, of in uses]
    return f"Labelled images, besides those of a reward network: {'; '.join(parts) or 'none'}."


def out_of_fold(groups: Sequence[str], measure: Callable[[frozenset[str], np.ndarray], np.ndarray]) -> np.ndarray:
    """float64 (N,): values by `measure(patients of a fold, indices (n,) of their images)`, which has not seen these."""
    values, names = np.empty(len(groups)), np.asarray(groups)
    for _, indices in GroupKFold(min(FOLDS, len(set(groups)))).split(names, groups=names):
        values[indices] = measure(frozenset(names[indices].tolist()), indices)
    return values


def best_out_of_fold(values: np.ndarray, groups: Sequence[str]) -> np.ndarray:
    """float64 (N,): Dice of the fixed choice that is best on the patients outside the image's fold; as in `decide`."""

    def of_others(patients: frozenset[str], indices: np.ndarray) -> np.ndarray:
        others = [index for index, group in enumerate(groups) if group not in patients]
        return np.asarray(values[best_choice(values[:, others], [groups[index] for index in others]), indices])

    return out_of_fold(groups, of_others)


def best_choice(values: np.ndarray, groups: Sequence[str]) -> int:
    """The row of `values`, float (P, N), with the highest mean over patients; the first of equal ones."""
    return int(group_means(values, groups).mean(axis=-1).argmax())


def best_fixed_prompt(tables: Sequence[SampleTable]) -> tuple[int, str]:
    """The prompt with the highest mean over patients, and the metric and data that selected it.

    The metric is Dice on labelled images. If these are of fewer than `MIN_PATIENTS` patients and other images are
    unlabelled, it is the score on all images.
    """
    compared, column, by = [one for one in tables if np.isfinite(one.scores).all()], SCORE, "the reward net on {}"
    labelled = [table for table in tables if table.metrics is not None]
    enough = len({table.group_id for table in labelled}) >= MIN_PATIENTS
    if labelled and (enough or not compared or len(labelled) == len(tables)):
        compared, column, by = labelled, "dice", "Dice on {} labelled"
    groups = [table.group_id for table in compared]
    return best_choice(stack(compared, column).T, groups), f"{by.format(len(set(groups)))} patients"


def oracle_gap(tables: Sequence[SampleTable], best_fixed: int, seed: int) -> Estimate | None:
    """Dice of the oracle less Dice of the best fixed prompt on labelled images; None without any."""
    labelled = [table for table in tables if table.metrics is not None]
    if not labelled:
        return None
    dice, groups = stack(labelled, "dice"), [table.group_id for table in labelled]
    return mean_interval(dice.max(axis=1) - dice[:, best_fixed], groups, seed, bounds=CHANGE)


def comparable(tables: Sequence[SampleTable]) -> tuple[list[int], str]:
    """Indices of the labelled images and "dice"; without labels, of those with a score and `SCORE`."""
    labelled = [index for index, table in enumerate(tables) if table.metrics is not None]
    judged = [index for index, table in enumerate(tables) if np.isfinite(table.scores).all()]
    return (labelled, "dice") if labelled else (judged, SCORE)


def stack(tables: Sequence[SampleTable], column: str) -> np.ndarray:
    """float64 (N, P): a column of N images."""
    return np.stack([table.column(column) for table in tables])


@dataclass(frozen=True)
class Cost:
    """What a method costs: the total of the runs that it needs."""

    minutes: float = 0.0  # of training
    labels: dict[str, int] = field(default_factory=dict)  # split, also val -> images whose labels were used in any way
    parameters: int = 0  # that were trained
    peak_gib: float | None = None  # largest memory of a training process; None if not recorded
    resumed: bool = False  # a run was interrupted: what it did since its last checkpoint it has done twice

    @property
    def labelled_images(self) -> int:
        """Number of labelled images."""
        return sum(self.labels.values())


@dataclass(frozen=True)
class RunCost:
    """What one run cost, the content of its cost.json."""

    seconds: Mapping[str, float]  # phase -> seconds in which a process worked on it
    labels: Labels
    parameters: int  # that were trained
    peak_memory_gib: float | None  # of the process while it trained; None if not recorded
    resumed: bool  # the run was interrupted; `seconds` are those of all its processes

    def save(self, run: Path) -> None:
        """Write cost.json; it must be there before the run counts as finished."""
        write_json(run / COST, asdict(self))

    @classmethod
    def load(cls, run: Path) -> "RunCost":
        """Read what `save` wrote."""
        return cls(**read_json(run / COST))

    def total(self, searched: bool = False) -> Cost:
        """All phases and uses; with `searched` only what was found by search, before PPO began."""
        seconds = sum(value for name, value in self.seconds.items() if not (searched and name in AFTER_SEARCH))
        labels: Counter[str] = Counter()
        for use, of in self.labels.items():
            if not (searched and use == "weights"):
                labels |= Counter(of)  # the uses of a split share its images
        parameters = 0 if searched else self.parameters
        return Cost(seconds / 60, dict(sorted(labels.items())), parameters, self.peak_memory_gib, self.resumed)


def total_cost(costs: Iterable[Cost]) -> Cost:
    """The cost of several runs together; runs that learn from one split share its labels."""
    costs = list(costs)
    labels: Counter[str] = Counter()
    for cost in costs:
        labels |= Counter(cost.labels)  # the larger number of each split: budgets are nested
    peaks = [cost.peak_gib for cost in costs if cost.peak_gib is not None]
    return Cost(
        sum(cost.minutes for cost in costs),
        dict(sorted(labels.items())),
        sum(cost.parameters for cost in costs),
        max(peaks, default=None),
        any(cost.resumed for cost in costs),
    )
