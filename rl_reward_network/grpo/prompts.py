"""The prompts of GRPO: an image with a region or a phrase, and the questions about it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_reward_network.data.annotations import phrase_key
from rl_reward_network.data.items import RegionSample, Sample
from rl_reward_network.data.names import NamedClass, definite
from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig

DESCRIBE = "Please describe region1."  # the question the embedded model was trained on
DESCRIBE_REAL = "Can you provide me with a detailed description of the region in the picture marked by region1?"


@dataclass(frozen=True, eq=False)
class TrainingItem:
    """One prompt of GRPO.

    Args:
        group_id, series_id, sample_id: pseudonyms, see `RegionSample`.
        caption: the reference caption; if empty, the prompt takes no part in the caption loop.
        question: of loop 2, for the mask.
        labelled: whether there is a true mask.
        load: returns image, uint8 (H, W, 3), and mask, bool (H, W), or None without labels.
        describe: of loop 1, for the caption of a marked region.
        name: of the class that the question asks for; "" where all images have one question.
        held_out: the question in a wording that trains nowhere; "" without one.
        image_key: equal for the prompts of one image; may hold a patient's name.
    """

    group_id: str
    series_id: str
    sample_id: str
    caption: str
    question: str
    labelled: bool
    load: Callable[[], tuple[np.ndarray, np.ndarray | None]] = field(repr=False)
    describe: str = DESCRIBE
    name: str = ""
    held_out: str = ""
    image_key: str = field(default="", repr=False)


def region_prompt(sample: RegionSample, describe: str = DESCRIBE) -> TrainingItem:
    """The prompt of a region with a caption, for both loops."""
    return TrainingItem(
        sample.group_id,
        sample.series_id,
        sample.sample_id,
        sample.caption,
        segment_question(sample.caption),
        True,
        sample.load,
        describe,
    )


def image_prompt(sample: Sample, question: str) -> TrainingItem:
    """The prompt of an annotated image, such as an angiogram, for the mask loop; all images share one question."""
    return TrainingItem(
        sample.group_id,
        sample.series_id,
        sample.sample_id,
        "",
        question,
        sample.labelled,
        lambda: (sample.load_image(), sample.load_mask()),
        image_key=str(sample.image_path),
    )


def named_prompt(sample: Sample, named: NamedClass | None) -> TrainingItem:
    """The prompt of an image and a class, for the mask loop; without a class of a file the phrase is all of it.

    Equal samples are asked in equal words. The wordings of a class are shared out among its images.
    """
    question = segment_question(named.wording(sample.sample_id) if named else sample.text)
    return replace(
        image_prompt(sample, question),
        name=named.name if named else phrase_key(sample.text),  # two spellings are one class
        held_out=segment_question(named.held_out) if named else "",
    )


def segment_question(caption: str) -> str:
    """The question for the mask of a described object: "a red circle." -> "Please segment the red circle.".

    Tags such as "<image>" are removed: if the model writes one into a caption, it must not change the prompt.
    """
    return f"Please segment {definite(caption)}."


def of_one_image(prompts: Sequence[TrainingItem]) -> list[list[int]]:
    """The indices of the prompts of each image; a prompt without `image_key` is alone."""
    groups: dict[str | int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(prompt.image_key or index, []).append(index)
    return list(groups.values())


FIRST_SHARE = 1 / 3  # of the prompts, the easiest, that are eligible at the start
LOW_WEIGHT = 0.05  # of a prompt that is not eligible yet, and of one without spread: all can still be drawn
MEMORY = 0.5  # weight of earlier observations when a prompt is drawn again


class PromptOrder:
    """Shuffled prompts, each once per epoch, in chunks of one rollout; an incomplete last chunk is left out.

    Args:
        count: number of prompts.
        chunk: prompts of one rollout of all processes.
        seed: equal seeds give equal orders.

    Raises:
        ValueError: there are fewer prompts than one rollout takes.
    """

    def __init__(self, count: int, chunk: int, seed: int) -> None:
        if count < chunk:
            raise ValueError(
                f"{count} training prompts, but one optimisation step takes {chunk}; lower batch_size or add data (in "
                "supervised training by name both are numbers of images)"
            )
        self.count, self.chunk, self.seed = count, chunk, seed
        self.rollouts_per_epoch = count // chunk

    def indices(self, rollout: int) -> list[int]:
        """The prompts of a rollout (0, 1, ...), those of the first process and first batch first."""
        epoch, place = divmod(rollout, self.rollouts_per_epoch)
        return list(_shuffled(self.count, self.seed, epoch)[place * self.chunk : (place + 1) * self.chunk])


@lru_cache(maxsize=2)
def _shuffled(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return tuple(torch.randperm(count, generator=generator).tolist())


class CurriculumOrder:
    """The prompts of each rollout, drawn by the rewards of earlier ones; otherwise as `PromptOrder`.

    Random numbers depend on seed and rollout alone. `update` must get the same numbers on every process.

    Args:
        count: number of prompts.
        chunk: prompts of one rollout of all processes.
        seed: equal seeds and equal rewards give equal orders.
        rollouts: of the whole run, which progress is relative to.
    """

    def __init__(self, count: int, chunk: int, seed: int, rollouts: int) -> None:
        self.count, self.chunk, self.seed, self.rollouts = count, chunk, seed, rollouts
        self.rollouts_per_epoch = count // chunk
        self.reward, self.spread = torch.full((count,), torch.nan), torch.ones(count)

    def indices(self, rollout: int) -> list[int]:
        """The prompts of a rollout, none twice."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + rollout)
        weights = self.weights(rollout)
        return torch.multinomial(weights, self.chunk, replacement=False, generator=generator).tolist()

    def weights(self, rollout: int) -> Tensor:
        """float32 (count,): probability of each prompt, up to a constant."""
        progress = min(1.0, rollout / max(1, self.rollouts))
        share = (FIRST_SHARE**2 + (1 - FIRST_SHARE**2) * progress) ** 0.5
        known = self.reward[~self.reward.isnan()]
        threshold = known.quantile(1 - share) if len(known) else -torch.inf
        eligible = self.reward.isnan() | (self.reward >= threshold)
        return torch.where(eligible, 1.0, LOW_WEIGHT) * self.spread.clamp(min=LOW_WEIGHT)

    def update(self, outcomes: Sequence[tuple[int, float, bool]]) -> None:
        """Record (index, mean reward, NaN if unknown, whether a group had spread) of some prompts."""
        for index, reward, spread in outcomes:
            earlier = self.reward[index]
            if reward == reward:
                self.reward[index] = reward if earlier.isnan() else MEMORY * earlier + (1 - MEMORY) * reward
            self.spread[index] = MEMORY * self.spread[index] + (1 - MEMORY) * float(spread)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"reward": self.reward, "spread": self.spread}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.reward, self.spread = state["reward"], state["spread"]


def prompt_order(count: int, args: Sa2VAGRPOConfig) -> PromptOrder | CurriculumOrder:
    """The order of `count` prompts.

    Raises:
        ValueError: there are fewer prompts than one optimisation step takes.
    """
    chunk = args.prompts_per_step * args.gradient_accumulation_steps * args.world_size
    order = PromptOrder(count, chunk, args.seed)
    if not args.curriculum:
        return order
    return CurriculumOrder(count, chunk, args.seed, args.planned_steps(order.rollouts_per_epoch) // args.num_iterations)
