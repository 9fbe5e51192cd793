"""What to deploy: the policy, one choice for all images, or the model as it is.

Only what has beaten the model as it is on labelled patients is deployed. The candidates are every fixed choice (each
prompt, each sequence of operations) and the policy, and they are tested together (`max_t`), because the best of many is
too good by chance. The policy is judged out of fold: on patients that neither trained it nor chose its weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from sklearn.model_selection import GroupKFold

from rl_reward_network.report.metrics import SampleTable
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
    """What is deployed, and why.

    Args:
        choice: what is deployed.
        best_fixed: index of the best fixed choice.
        fixed_by: metric and data that selected it, in words.
        patients: labelled patients of the decision.
        policy_gain: Dice of the policy, out of fold, less that of the model as it is; None if nothing could be tested.
        policy_p: its p-value, corrected for all candidates.
        fixed_gain, fixed_p: the same of the best fixed choice.
        difference: Dice of the policy less that of the best fixed choice, both out of fold.
        reason: of the decision, in words.
    """

    choice: Choice
    best_fixed: int
    fixed_by: str
    patients: int
    policy_gain: Estimate | None
    policy_p: float | None
    fixed_gain: Estimate | None
    fixed_p: float | None
    difference: Estimate | None
    reason: str

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Deployment":
        """The deployment that `asdict` made a JSON object of.

        That of version 0.11 or earlier was not tested against the model as it is, which is therefore deployed.
        """
        if "choice" not in value:
            reason = "version 0.11 or earlier did not test against it; train again to have it tested"
            fixed = value["best_fixed"], value["fixed_by"]
            return cls("as it is", *fixed, 0, None, None, None, None, None, reason)
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
        policy: float (N,), Dice of the policy's choices out of fold, see `held_out`; None if `can_decide` is false.
        groups: the patient of each image.
        fixed: the best fixed choice and what selected it, in words; by default the best of `values`.
        name: of the best fixed choice, in words.
        seed: of the bootstrap.
    """
    best, fixed_by = fixed or (best_choice(values, groups), f"Dice on {len(set(groups))} labelled patients")
    patients = len(set(groups))
    if policy is None or not can_decide(groups):
        few = f"{patients or 'no'} labelled patient{'s' * (patients > 1)}"
        reason = f"{few} outside the test split: below {MIN_PATIENTS} no test can tell whether anything is better"
        return Deployment("as it is", best, fixed_by, patients, None, None, None, None, None, reason)
    gains = np.vstack([values, policy]) - values[AS_IT_IS]
    tested = max_t(gains, groups)
    difference = policy - best_out_of_fold(values, groups)
    choice = _choice(tested.signs[-1] > 0, tested.signs[best] > 0, sign_of(difference, groups) > 0)
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


def _choice(policy: bool, fixed: bool, policy_over_fixed: bool) -> Choice:
    """What is deployed, given which of both has beaten the model as it is."""
    if policy and (policy_over_fixed or not fixed):
        return "policy"
    return "fixed" if fixed else "as it is"


def labels_sentence(labels: Labels) -> str:
    """Which labels of a run chose what, in a sentence; those of its reward network are not counted."""
    uses = [(USES[use], of) for use, of in labels.items() if of]
    parts = [f"{' and '.join(f'{n} of {split}' for split, n in of.items())} {words}" for words, of in uses]
    return f"Labelled images, besides those of a reward network: {'; '.join(parts) or 'none'}."


def labels_of_splits(labels: Labels) -> dict[str, int]:
    """Split -> number of labelled images that were used for anything; the uses of a split share its images."""
    counts: dict[str, int] = {}
    for of in labels.values():
        counts |= {split: max(images, counts.get(split, 0)) for split, images in of.items()}
    return counts


def held_out(groups: Sequence[str]) -> Iterator[tuple[frozenset[str], np.ndarray]]:
    """`FOLDS` folds by patient: the patients that are held out, and the indices of their images, int (n,)."""
    names = np.asarray(groups)
    for _, indices in GroupKFold(min(FOLDS, len(set(groups)))).split(names, groups=names):
        yield frozenset(names[indices].tolist()), indices


def out_of_fold(groups: Sequence[str], measure: Callable[[frozenset[str], np.ndarray], np.ndarray]) -> np.ndarray:
    """float64 (N,): a value per image, by what has not seen its patient.

    Args:
        groups: the patient of each of N images.
        measure: (patients that are held out, indices int (n,) of their images) -> float (n,) of these images.
    """
    values = np.empty(len(groups))
    for patients, indices in held_out(groups):
        values[indices] = measure(patients, indices)
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
    compared, column = [table for table in tables if np.isfinite(table.scores).all()], "score"
    indices, criterion = comparable(tables)
    if criterion == "dice":
        labelled = [tables[index] for index in indices]
        if not compared or len(labelled) == len(tables) or len({table.group_id for table in labelled}) >= MIN_PATIENTS:
            compared, column = labelled, "dice"
    groups = [table.group_id for table in compared]
    by = f"Dice on {len(set(groups))} labelled" if column == "dice" else f"the reward net on {len(set(groups))}"
    return best_choice(stack(compared, column).T, groups), f"{by} patients"


def oracle_gap(tables: Sequence[SampleTable], best_fixed: int, seed: int) -> Estimate | None:
    """Dice of the oracle less Dice of the best fixed prompt on labelled images; None without any."""
    indices, column = comparable(tables)
    if column == "score":
        return None
    dice = stack([tables[index] for index in indices], "dice")
    groups = [tables[index].group_id for index in indices]
    return mean_interval(dice.max(axis=1) - dice[:, best_fixed], groups, seed, bounds=CHANGE)


def comparable(tables: Sequence[SampleTable]) -> tuple[list[int], str]:
    """Indices of the labelled images and "dice"; without labels, of those with a score and "score"."""
    labelled = [index for index, table in enumerate(tables) if table.metrics is not None]
    judged = [index for index, table in enumerate(tables) if np.isfinite(table.scores).all()]
    return (labelled, "dice") if labelled else (judged, "score")


def stack(tables: Sequence[SampleTable], column: str) -> np.ndarray:
    """float64 (N, P): a column of N images."""
    return np.stack([table.column(column) for table in tables])
