"""What training cost: minutes, labelled images, trained parameters, memory."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Cost:
    """What one or several parts cost.

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


def total_cost(costs: Iterable[Cost]) -> Cost:
    """The cost of several parts together; parts that learn from one split share its labels."""
    costs = list(costs)
    labels: Counter[str] = Counter()
    for cost in costs:
        labels |= Counter(dict(cost.labels))  # the larger number of each split: budgets are nested
    peaks = [cost.peak_gib for cost in costs if cost.peak_gib is not None]
    return Cost(
        sum(cost.minutes for cost in costs),
        tuple(sorted(labels.items())),
        sum(cost.parameters for cost in costs),
        max(peaks, default=None),
        any(cost.resumed for cost in costs),
    )


def sorted_items(labels: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The splits with labelled images, as `Cost.labels`."""
    return tuple(sorted((name, count) for name, count in labels.items() if count))


def cost_json(cost: Cost) -> dict[str, Any]:
    """A cost as JSON."""
    return asdict(cost) | {"labels": dict(cost.labels)}


def cost_from_json(value: dict[str, Any]) -> Cost:
    """A cost that `cost_json` wrote."""
    return Cost(**{**value, "labels": sorted_items(value["labels"])})
