"""What an evaluation measures of names: each class, absences and a held-out wording; and captions that are names."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rl_reward_network.data.annotations import phrase_key
from rl_reward_network.grpo.measure import Measured, unpacked
from rl_reward_network.grpo.prompts import TrainingItem
from rl_reward_network.report.by_name import Answers, Questions


def held_out_prompts(prompts: Sequence[TrainingItem]) -> list[TrainingItem]:
    """The prompts in their held-out wording; [] unless all have one."""
    return [replace(prompt, question=prompt.held_out) for prompt in prompts] if all(p.held_out for p in prompts) else []


def questions_of(prompts: Sequence[TrainingItem]) -> Questions:
    """The questions of labelled prompts; decodes their masks."""
    truths = [prompt.load()[1] for prompt in prompts]
    there = np.array([truth is not None and bool(truth.any()) for truth in truths])
    return Questions([prompt.name for prompt in prompts], [prompt.group_id for prompt in prompts], there)


def answers_of(measured: Measured) -> Answers:
    """The answers of a model."""
    masks = (unpacked(mask) for mask in measured.masks)
    return Answers(measured.values["dice"], np.array([mask is None or not mask.any() for mask in masks]))


def exact_share(prompts: Sequence[TrainingItem], measured: Measured) -> float:
    """Share of the captions that are the reference but for case, a final dot and an article."""
    pairs = zip(prompts, measured.captions, strict=True)
    return float(np.mean([_bare(caption) == _bare(prompt.caption) for prompt, caption in pairs]))


def _bare(caption: str) -> str:
    first, _, rest = phrase_key(caption).partition(" ")
    return rest if first in ("a", "an", "the") and rest else phrase_key(caption)


def picked(measured: Measured, kept: np.ndarray) -> Measured:
    """What was measured of some prompts, bool (N,)."""
    numbers = np.flatnonzero(kept)

    def some(column: list) -> list:  # type: ignore[type-arg]
        return [column[number] for number in numbers]

    values = {name: column[kept] for name, column in measured.values.items()}
    return Measured(values, some(measured.captions), some(measured.masks), some(measured.drawn), measured.overlap[kept])
