"""Values of the curves: recorded by tag during an optimisation step, averaged when the Trainer logs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from accelerate.utils import gather_object


class StepMetrics:
    """Values recorded since the last log, by tag.

    Args:
        world_size: number of processes; `means` must then be called on each.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.values: dict[str, list[float]] = defaultdict(list)

    def record(self, values: Mapping[str, float]) -> None:
        """Add one value for each tag."""
        for tag, value in values.items():
            self.values[tag].append(value)

    def mean_of_last(self, tags: Sequence[str], count: int) -> list[float]:
        """Mean of the last `count` values of each tag, of this process."""
        return [sum(self.values[tag][-count:]) / count for tag in tags]

    def means(self) -> dict[str, float]:
        """Mean over the values of each process, then over the processes that recorded the tag."""
        means = {tag: sum(values) / len(values) for tag, values in self.values.items()}
        processes = gather_object([means]) if self.world_size > 1 else [means]
        tags = dict.fromkeys(tag for values in processes for tag in values)
        present = {tag: [values[tag] for values in processes if tag in values] for tag in tags}
        return {tag: sum(values) / len(values) for tag, values in present.items()}

    def clear(self) -> None:
        """Forget all values."""
        self.values.clear()


def summed_counts(counts: Mapping[str, int], world_size: int) -> dict[str, float]:
    """The counts of all processes together; every process must call this."""
    processes = gather_object([counts]) if world_size > 1 else [counts]
    return {name: float(sum(values[name] for values in processes)) for name in processes[0]}


def with_learning(phases: Mapping[str, float], total: float) -> dict[str, float]:
    """Seconds of each phase, such as rollouts with their rewards, and validations; the rest of `total` is learning."""
    return {**phases, "learning": total - sum(phases.values())}
