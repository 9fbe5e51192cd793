"""The watch of a mean teacher: masks on images without masks that are no longer like those at the start end the run.

A mean teacher that loses its masks, or floods the image, teaches that to the model, whose average it is: it does not
recover. Validation on labelled images may be missing, and sees nothing of images of another hospital.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import cv2
import numpy as np
import torch
from transformers import TrainerCallback

from rl_reward_network.grpo.checkpoint import from_first_rank
from rl_reward_network.grpo.image_context import Mask
from rl_reward_network.grpo.measure import measure, unpacked
from rl_reward_network.grpo.trainer import Sa2VAGRPOTrainer
from rl_reward_network.models.lora import trainable_state
from rl_reward_network.run import clock

# A look takes the forward passes of at most 12 images, whose features are cached after the first: 0.22 of a step of the
# embedded model (0.45 of 2.0 CPU seconds, 8 images of 512 x 512), so 2 % of a training; the first look 0.7 of a step.
WATCHED = 10  # optimisation steps between two looks
IMAGES = 12  # without masks, at most
AREAS, PARTS, LOST = 4.0, 8.0, 0.5  # ratios of medians, share of the images, beyond which masks are not like the start
LEAST_PIXELS = 5  # of a part; smaller ones are not counted
REMEDY = (
    "lower side_learning_rate (of a model without a side network learning_rate) or consistency_weight, and look "
    "whether the images without masks are like those with masks"
)
Look = Sequence[tuple[float, int] | None]  # of each image the share of foreground and the number of parts, or no mask


def shape_of(mask: Mask) -> tuple[float, int] | None:
    """Share of foreground in [0, 1] and number of 8-connected parts of a bool (H, W) mask; None without a mask."""
    if mask is None:
        return None
    statistics = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=8)[2]
    return float(mask.mean()), int((statistics[1:, cv2.CC_STAT_AREA] >= LEAST_PIXELS).sum())


def difference(start: Look, now: Look, true: Look) -> str:
    """What sets the masks of some images apart from those of the same images at the start; "" for nothing.

    `true` are true masks of other images. Masks outside the limits around the start that are inside those around the
    true ones have only learned. A median of 0 at the start is no limit below, and above it the true masks alone count;
    where they are empty, too, or nothing had a mask at the start, nothing is compared.
    """
    had = [(before, after) for before, after in zip(start, now, strict=True) if before is not None]
    both = [(before, after) for before, after in had if after is not None]
    if len(had) - len(both) > LOST * len(start):
        return f"{len(had) - len(both)} of {len(start)} images without masks had an answer with [SEG], and have none"
    if not both:
        return ""
    truths = [one for one in true if one is not None] or [before for before, _ in both]
    (area, parts), (area_now, parts_now), (true_area, true_parts) = (
        [median(column) for column in zip(*of, strict=True)] for of in (*zip(*both, strict=True), truths)
    )
    whose = f"masks of {len(both)} images without masks"
    largest = max(area, true_area)
    if largest and not min(area, true_area) / AREAS <= area_now <= AREAS * largest:
        return f"the median area of the {whose} went from {area:.2%} to {area_now:.2%} of the image"
    if largest and parts_now > PARTS * max(parts, true_parts, 1):
        return f"the median number of parts of the {whose} went from {parts:g} to {parts_now:g}"
    return ""


class TeacherWatch(TrainerCallback):
    """Compare the teacher's masks of a few images without masks with those at the start; stop where it has collapsed.

    The looks are before the first step, every `WATCHED` steps, and after the last.
    """

    def __init__(self, trainer: Sa2VAGRPOTrainer) -> None:
        self.trainer = trainer
        order = np.random.default_rng(trainer.args.seed).permutation(len(trainer.prompts))
        self.labelled, self.prompts = (
            [trainer.prompts[n] for n in order if trainer.prompts[n].labelled is has][:IMAGES] for has in (True, False)
        )
        # A resumed run begins with the same weights: they follow from the seed. `reference` has all but LoRA's.
        self.lora = {name: tensor for name, tensor in trainable_state(trainer.sa2va).items() if "lora_" in name}
        self.start: Look = []
        self.true: Look = []
        self.collapse: str | None = None  # a sentence

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The look at the initial model, unless a resumed run has it already."""
        if not self.start:  # a resumed run has it, unless an earlier version began it
            self.true = [shape_of(prompt.load()[1]) for prompt in self.labelled]
            self.start = self._look()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Look, and stop the run where the masks are not like those at the start."""
        last = state.global_step >= state.max_steps or control.should_training_stop
        if state.global_step % WATCHED and not last:
            return
        now = self._look()
        seen = from_first_rank(self.trainer.accelerator, lambda: difference(self.start, now, self.true))
        if seen:
            step = f"step {state.global_step}: the mean teacher has collapsed"
            kept = "those that validation found best" if self._validated else "the initial ones"
            self.collapse = f"{step}: {seen}; training stops, and the weights that are kept are {kept}; {REMEDY}"
            self.trainer.ended = control.should_training_stop = control.should_save = control.should_log = True

    @property
    def _validated(self) -> bool:
        """Whether the choice of weights is validation's; it includes the initial ones."""
        return self.trainer.validation is not None and self.trainer.validation.criterion is not None

    def _look(self) -> Look:
        """The shape of the teacher's mask of each image, as it is; all processes share the images."""
        trainer = self.trainer
        longest, generator = trainer.args.max_completion_length, trainer.rollout_generator
        how: Any = {"quiet": True, "expected": False, "accelerator": trainer.accelerator}
        with clock(trainer.phases, "watch"), generator.teacher_weights():
            found = measure(trainer.sa2va, self.prompts, generator.cache, longest, **how)
        return [shape_of(unpacked(mask)) for mask in found.masks]

    @torch.no_grad()
    def finish(self) -> None:
        """After a collapse give the model its initial weights, unless validation has chosen others."""
        if self.collapse and not self._validated:
            for name, tensor in {**self.trainer.reference, **self.lora}.items():
                self.trainer.sa2va.get_parameter(name).copy_(tensor)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {name: getattr(self, name) for name in ("start", "true", "collapse")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        self.start, self.true, self.collapse = state["start"], state["true"], state["collapse"]
