"""Validation during training: curves, the best weights, an alarm for empty masks, and a stop rule.

The criterion is Dice for annotated images (the mean over classes, where these are asked for by name), IoU of mask' for
captioned regions, and the share of exact names where the captions are names. Whatever the objective, the weights with
the best criterion are kept; those before training take part, so a run never leaves a model that validation finds worse.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback

from rl_reward_network.atomic_io import write_json
from rl_reward_network.curves import over_optimised
from rl_reward_network.grpo.checkpoint import from_first_rank
from rl_reward_network.grpo.measure import OVERLAPS, Measured, exact_share, measure, unpacked
from rl_reward_network.grpo.prompts import TrainingItem
from rl_reward_network.grpo.trainer import Sa2VAGRPOTrainer
from rl_reward_network.models.ema import swapped
from rl_reward_network.models.lora import trainable_state
from rl_reward_network.report.by_name import class_means
from rl_reward_network.report.overlays import SHOWN, mask_sheet
from rl_reward_network.report.statistics import known_means
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.rewards.table import learned_reward
from rl_reward_network.run import clock

LOOKS = "validation.json"  # in the folder of a run: the Dice of each prompt at each look
COLLAPSED = "those before training: the mean teacher has collapsed"
EXACT, TIE = "val/name_exact", 1e-6  # of equal shares of exact names the better METEOR counts, too little to be seen
# The first that the data allow is the criterion.
METRICS = {EXACT: "share of exact names", "val/cycle_iou": "IoU of mask'", "val/gt_dice": "Dice"}


@dataclass(frozen=True)
class Outcome:
    """What validation says about a run; in its config.json."""

    metric: str | None  # criterion, of `METRICS`; None if no item has a label, so that nothing can be compared
    items: int
    labelled: int  # items with a true mask, which the choice of weights has used
    before: float | None  # metric of the initial model
    last: float | None  # after the last step
    best: float | None
    kept_step: int  # whose weights are in final_model; 0 are the initial ones
    last_step: int
    kept_teacher: bool = False  # whether they are a mean teacher's in place of the model's


def outcome_of(steps: Sequence[int], values: Sequence[float], metric: str | None, items: int, labelled: int) -> Outcome:
    """The outcome of validations at `steps`, from 0 on, with these values; of equal ones the earlier step counts."""
    if not values:
        return Outcome(None, items, labelled, None, None, None, steps[-1], steps[-1])
    best = max(values)
    return Outcome(metric, items, labelled, values[0], values[-1], best, steps[values.index(best)], steps[-1])


def notice(config: Mapping[str, Any]) -> str:
    """A sentence for the first line of results if training ended below the initial model, by a final_model's config."""
    if not (said := config.get("validation")) or said["metric"] is None:
        return ""
    worse, measured = said["last"] < said["before"], f"on {said['items']} validation items {METRICS[said['metric']]}"
    change = f"{measured} was {said['before']:.3f} before, {said['last']:.3f} at the end"
    if said["kept_step"] == 0:
        first = "Worse" if worse else "Not better"
        return f"{first} than the initial model: {change}, never higher; final_model is the initial model."
    kept = f"final_model holds the best weights, of step {said['kept_step']}, with {said['best']:.3f}"
    return f"Worse at the end than the initial model: {change}; {kept}." if worse else ""


def kept_weights(config: Mapping[str, Any]) -> str:
    """The line of a card on the choice of weights."""
    facts = config.get("validation")
    if config.get("collapse") and (facts is None or facts["metric"] is None):
        return COLLAPSED
    if facts is None:  # not validated, or not at its end
        return "of the last step; the run was not validated" if "validation" in config else "not recorded"
    said = Outcome(**facts)
    if said.metric is None:
        return f"of the last step; none of {said.items} validation items has a label"
    step = f"{'the moving average, ' * said.kept_teacher}of step {said.kept_step} of {said.last_step}"
    values = f"the best {METRICS[said.metric]} ({said.best:.3f}; {said.before:.3f} before)"
    return f"{step}, {values} on {said.items} validation items, {said.labelled} of them labelled"


PROXY, EMPTY, SILENT = "val/score", "val/empty_share", "val/no_seg_share"
TAGS = {name: f"val/{name}" for name in (*OVERLAPS, "cycle_iou", "meteor", "cycle_meteor")} | {"dice": "val/gt_dice"}
ALARM = 0.5  # share of empty masks
KEEP_SEG = "their answers have no [SEG]: lower learning_rate, or raise seg_text_weight"
REMEDIES = {
    "supervised": "lower learning_rate or bce_weight, or raise dice_weight",
    "mean_teacher": "lower consistency_weight or learning_rate, or raise dice_weight",
    "grpo": "lower learning_rate, or raise kl_coef",
    "dpo": "lower learning_rate",
}


class ValidationCallback(TrainerCallback):
    """Measure the validation prompts before the first step, every few steps, and after the last.

    With a reward network and true masks, the network's score is the proxy and the criterion the gold standard: training
    stops when the proxy rises while the gold standard has fallen. A mean teacher is measured beside the model, and of
    the two the better one counts. `names`: whether the captions are names, which are right or wrong as a whole.
    """

    def __init__(
        self,
        trainer: Sa2VAGRPOTrainer,
        prompts: Sequence[TrainingItem],
        every: int,
        maps: ForegroundMaps | None = None,
        names: bool = False,
    ) -> None:
        self.trainer, self.prompts, self.every, self.maps, self.names = trainer, prompts, every, maps, names
        self.steps: list[int] = []
        self.proxy: list[float] = []
        self.gold: list[float] = []  # the criterion
        self.criterion: str | None = None
        self.shown: np.ndarray | None = None  # picture of masks at the last look at the model, uint8 (H, W, 3)
        self.looks: list[list[float]] = []  # Dice of each prompt, a look of the model or of its teacher after another
        self.best_weights: dict[str, Tensor] = {}
        self.best_is_teacher = self.has_warned = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The first point, unless a resumed run has it already."""
        if state.global_step == 0:
            self._validate(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Add a point, also at the end, and apply the stop rule."""
        rollouts_used_up = state.global_step % args.num_iterations == 0
        stalled = self._stalled(args.early_stopping_patience)
        last = state.global_step >= state.max_steps or self.trainer.ended or (stalled and rollouts_used_up)
        if state.global_step % self.every == 0 or last:
            self._validate(state.global_step)
        if self._stalled(args.early_stopping_patience) and rollouts_used_up:  # also by this validation
            self.trainer.ended = control.should_training_stop = control.should_save = control.should_log = True

    def _stalled(self, patience: int | None) -> bool:
        """Whether training has no more to gain: it over-optimises, or has not become better for too long.

        Validations while the loss or the learning rate still rises do not count as such.
        """
        if self.over_optimised or patience is None or not self.gold:
            return self.over_optimised
        since = max(self.steps[self.gold.index(max(self.gold))], self.trainer.settling_steps)
        return sum(step > since for step in self.steps) >= patience

    @property
    def over_optimised(self) -> bool:
        """Whether the stop rule applies."""
        return self.maps is not None and over_optimised(self.proxy, self.gold)

    def finish(self) -> Outcome:
        """Restore the weights with the best criterion; without a criterion, those of the last step stay."""
        with torch.no_grad():
            for name, tensor in self.best_weights.items():
                self.trainer.sa2va.get_parameter(name).copy_(tensor)
        labelled = sum(prompt.labelled for prompt in self.prompts)
        outcome = outcome_of(self.steps, self.gold, self.criterion, len(self.prompts), labelled)
        return replace(outcome, kept_teacher=self.best_is_teacher)

    def save_looks(self, path: Path) -> None:
        """Write each prompt's group, and its Dice at every look, from the start on; None without a true mask."""
        looks = [[None if np.isnan(value) else value for value in look] for look in self.looks]
        write_json(path, {"groups": [prompt.group_id for prompt in self.prompts], "dice": looks})

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, which holds the current weights already."""
        best_is_now = self.gold and self.steps[self.gold.index(max(self.gold))] == self.trainer.state.global_step
        return {name: getattr(self, name) for name in ("steps", "proxy", "gold", "looks", "criterion")} | {
            "peak": {} if best_is_now and not self.best_is_teacher else self.best_weights,
            "peak_is_teacher": self.best_is_teacher,
            "has_warned": self.has_warned,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint whose weights have been loaded."""
        for name in ("steps", "proxy", "gold", "criterion", "has_warned"):
            setattr(self, name, state[name])
        self.looks, self.best_is_teacher = state.get("looks", []), state.get("peak_is_teacher", False)
        best_is_now = self.gold and not state["peak"]
        self.best_weights = trainable_state(self.trainer.sa2va) if best_is_now else state["peak"]

    def _validate(self, step: int) -> None:
        trainer, of_teacher = self.trainer, dict[str, float]()
        with clock(trainer.phases, "validation"):
            points = self._points()
            if step and trainer.args.objective == "mean_teacher" and trainer.ema:  # at step 0 it is the model
                with swapped(trainer.sa2va, trainer.ema.weights):
                    of_teacher = self._points()
        self.steps.append(step)
        self._alarm(step, points)
        if PROXY in points:
            self.proxy.append(points[PROXY])
        self.criterion = next((tag for tag in METRICS if tag in points), None)
        if self.criterion is not None:
            finer = TIE * points["val/meteor"] if self.criterion == EXACT else 0.0
            self._keep_best(points[self.criterion] + finer, of_teacher.get(self.criterion, -np.inf))
        trainer.log_now(points | {name.replace("val/", "val/teacher_"): value for name, value in of_teacher.items()})

    def _keep_best(self, value: float, of_teacher: float) -> None:
        """Add the criterion of the model, or of its teacher if that is better, and keep the weights of the best."""
        better = max(value, of_teacher)
        if not self.gold or better > max(self.gold):
            self.best_weights = trainable_state(self.trainer.sa2va)
            self.best_is_teacher = of_teacher > value
            if self.best_is_teacher and self.trainer.ema:
                self.best_weights |= {name: tensor.cpu().clone() for name, tensor in self.trainer.ema.weights.items()}
        self.gold.append(better)

    def _alarm(self, step: int, points: Mapping[str, float]) -> None:
        """Warn if most masks are empty: at step 0 the question is not understood; later training has collapsed."""
        if points[EMPTY] <= ALARM or self.has_warned:
            return
        self.has_warned = step > 0
        remedy = KEEP_SEG if points[SILENT] > ALARM else REMEDIES[self.trainer.args.objective]
        remedy = remedy if step else "give a question that the model understands"
        items = f"{points[EMPTY]:.0%} of {len(self.prompts)} validation items"
        if self.trainer.args.should_log:
            warnings.warn(f"step {step}: the masks of {items} are empty ({EMPTY}); {remedy}", stacklevel=2)

    def _points(self) -> dict[str, float]:
        """tag -> mean over the patients of the prompts, which all processes measure together."""
        trainer = self.trainer
        longest, cache = trainer.args.max_completion_length, trainer.rollout_generator.cache
        ranks = trainer.accelerator
        measured = measure(trainer.sa2va, self.prompts, cache, longest, quiet=True, expected=False, accelerator=ranks)
        return from_first_rank(ranks, lambda: self._means(measured))  # all stop at one step, or none

    def _means(self, measured: Measured) -> dict[str, float]:
        self.looks.append(measured.values["dice"].tolist())
        masks = zip(self.prompts, map(unpacked, measured.masks[:SHOWN]), strict=False)
        self.shown = mask_sheet([(*prompt.load(), mask) for prompt, mask in masks])
        columns = {tag: measured.values[name] for name, tag in TAGS.items() if name in measured.values}
        groups, classes = [prompt.group_id for prompt in self.prompts], [prompt.name for prompt in self.prompts]
        means = {tag: mean_over_classes(column, groups, classes) for tag, column in columns.items()}
        points = {tag: mean for tag, mean in means.items() if mean is not None}
        points |= {EXACT: exact_share(self.prompts, measured)} if self.names else {}
        points[EMPTY] = empty_share(measured)
        points[SILENT] = float(np.mean([mask is None for mask in measured.masks]))
        if self.maps is not None:
            proxy = known_means(scores(self.maps, self.prompts, measured), groups)
            points |= {PROXY: float(np.mean(proxy))} if proxy else {}
        return points


def mean_over_classes(values: np.ndarray, groups: Sequence[str], classes: Sequence[str]) -> float | None:
    """The mean over classes of the mean over groups of N values, NaN left out; None if all are NaN."""
    means = class_means(values, classes, groups)
    known = means[~np.isnan(means).all(axis=1)]
    return float(np.nanmean(known, axis=1).mean()) if len(known) else None


def empty_share(measured: Measured) -> float:
    """Share of the prompts whose mask is missing or empty, unless the true one is empty, too."""
    masks = (unpacked(mask) for mask in measured.masks)
    empty = np.array([mask is None or not mask.any() for mask in masks])
    right = np.isfinite(measured.values["dice"]) & (measured.overlap[:, 1] == 0)  # nothing in the union of both
    return float((empty & ~right).mean())


def scores(maps: ForegroundMaps, prompts: Sequence[TrainingItem], measured: Measured) -> np.ndarray:
    """float64 (N,): the reward network's score of each prompt's mask; 0 without a mask, NaN outside its domain."""
    reward, pairs = learned_reward(maps), zip(prompts, measured.masks, strict=True)
    judged = (reward(images=[prompt.load()[0]], predicted_masks=[unpacked(mask)]) for prompt, mask in pairs)
    return np.array([one.values[0] for one in judged], dtype=float)
