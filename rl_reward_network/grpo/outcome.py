"""The outcome of a run on its validation items, as its config.json, card, report and last line give it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

METRICS = {"val/iou_of_drawn": "IoU of mask'", "val/gt_dice": "Dice"}  # the first that the data allow is the criterion


@dataclass(frozen=True)
class Outcome:
    """What validation says about a run.

    Args:
        metric: criterion, one of `METRICS`; None if no validation item has a label, so that nothing can be compared.
        items: number of validation items.
        labelled: those of them with a true mask, which the choice of weights has used.
        before: metric of the model as it was.
        last: metric after the last step.
        best: the highest metric.
        kept_step: optimisation step whose weights are in final_model; 0 is the model as it was.
        last_step: steps of the run.
    """

    metric: str | None
    items: int
    labelled: int
    before: float | None
    last: float | None
    best: float | None
    kept_step: int
    last_step: int

    @property
    def as_it_was(self) -> bool:
        """Whether final_model holds the model as it was."""
        return self.kept_step == 0

    @property
    def facts(self) -> dict[str, Any]:
        """For config.json."""
        return asdict(self)


def outcome_of(steps: Sequence[int], values: Sequence[float], metric: str | None, items: int, labelled: int) -> Outcome:
    """The outcome of validations at `steps`, the first of which is 0; equal values count for the earlier step.

    Args:
        steps: of the validations, at least one.
        values: of the metric; empty if there is none.
        metric, items, labelled: as in `Outcome`.
    """
    if not values:
        return Outcome(None, items, labelled, None, None, None, steps[-1], steps[-1])
    best = max(values)
    kept_step = steps[values.index(best)]
    return Outcome(metric, items, labelled, values[0], values[-1], best, kept_step, steps[-1])


def notice(config: Mapping[str, Any]) -> str:
    """A sentence for the first line of results if training ended below the model as it was; otherwise empty.

    Args:
        config: config.json of a final_model.
    """
    outcome = saved_outcome(config)
    if outcome is None or outcome.metric is None or outcome.last is None or outcome.before is None:
        return ""
    name = METRICS[outcome.metric]
    change = (
        f"on {outcome.items} validation items {name} was {outcome.before:.3f} before, {outcome.last:.3f} at the end"
    )
    worse = outcome.last < outcome.before
    if outcome.as_it_was:
        first = "Worse" if worse else "Not better"
        return f"{first} than the model as it was: {change}, never higher; final_model is the model as it was."
    if worse:
        kept = f"final_model holds the best weights, of step {outcome.kept_step}, with {outcome.best:.3f}"
        return f"Worse at the end than the model as it was: {change}; {kept}."
    return ""


def kept_weights(config: Mapping[str, Any]) -> str:
    """The line of a card on the choice of weights."""
    outcome = saved_outcome(config)
    if outcome is None:
        return "of the last step; the run was not validated" if "validation" in config else "not recorded"
    if outcome.metric is None:
        return f"of the last step; none of {outcome.items} validation items has a label"
    return (
        f"of step {outcome.kept_step} of {outcome.last_step}, the best {METRICS[outcome.metric]} ({outcome.best:.3f}; "
        f"{outcome.before:.3f} before) on {outcome.items} validation items, {outcome.labelled} of them labelled"
    )


def saved_outcome(config: Mapping[str, Any]) -> Outcome | None:
    """The outcome in a config.json; None if the run was not validated, has not ended, or is of 0.8 or earlier."""
    facts = config.get("validation")
    return None if facts is None else Outcome(**facts)
