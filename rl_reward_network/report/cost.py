"""What training cost: each run writes cost.json, which the comparison of methods reads."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_reward_network.atomic_io import read_json, write_json

COST = "cost.json"
AFTER_SEARCH = ("PPO", "decision")  # seconds that a method does not need which uses what was found by search


@dataclass(frozen=True)
class Cost:
    """What a method costs: the total of the runs that it needs.

    Args:
        minutes: of training.
        labels: split -> labelled images that training learned from, or that chose weights, parameters or what is
            deployed; those of the validation split too.
        parameters: number of trained parameters.
        peak_gib: largest memory of a training process, in GiB; None if not recorded.
        resumed: a run was interrupted, and its minutes are those of its last process alone.
    """

    minutes: float = 0.0
    labels: tuple[tuple[str, int], ...] = ()
    parameters: int = 0
    peak_gib: float | None = None
    resumed: bool = False

    @property
    def labelled_images(self) -> int:
        """Number of labelled images."""
        return sum(count for _, count in self.labels)


@dataclass(frozen=True)
class RunCost:
    """What one run cost, the content of its cost.json.

    Args:
        seconds: phase -> its duration.
        labels: use, as in `report.deployment.USES` -> split -> labelled images.
        parameters: number of trained parameters.
        peak_memory_gib: of the process while it trained; None if not recorded.
        resumed: the run was interrupted, and `seconds` are those of its last process.
    """

    seconds: Mapping[str, float]
    labels: Mapping[str, Mapping[str, int]]
    parameters: int
    peak_memory_gib: float | None
    resumed: bool

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
        return Cost(seconds / 60, _items(labels), parameters, self.peak_memory_gib, self.resumed)


def total_cost(costs: Iterable[Cost]) -> Cost:
    """The cost of several runs together; runs that learn from one split share its labels."""
    costs = list(costs)
    labels: Counter[str] = Counter()
    for cost in costs:
        labels |= Counter(dict(cost.labels))  # the larger number of each split: budgets are nested
    peaks = [cost.peak_gib for cost in costs if cost.peak_gib is not None]
    return Cost(
        sum(cost.minutes for cost in costs),
        _items(labels),
        sum(cost.parameters for cost in costs),
        max(peaks, default=None),
        any(cost.resumed for cost in costs),
    )


def _items(labels: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((name, count) for name, count in labels.items() if count))


def cost_json(cost: Cost) -> dict[str, Any]:
    """A cost as JSON."""
    return asdict(cost) | {"labels": dict(cost.labels)}


def cost_from_json(value: dict[str, Any]) -> Cost:
    """A cost that `cost_json` wrote."""
    return Cost(**{**value, "labels": _items(value["labels"])})
