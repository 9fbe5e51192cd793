"""The prompts of GRPO, an image with a region or a phrase and the questions about it, and the order they come in."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
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
    """One prompt of GRPO; its ids are pseudonyms, see `RegionSample`."""

    group_id: str
    series_id: str
    sample_id: str
    caption: str  # the reference; if empty, the prompt takes no part in the caption loop
    question: str  # of loop 2, for the mask
    labelled: bool  # whether there is a true mask
    load: Callable[[], tuple[np.ndarray, np.ndarray | None]] = field(repr=False)  # uint8 (H, W, 3), bool (H, W) or None
    describe: str = DESCRIBE  # of loop 1, for the caption of a marked region
    name: str = ""  # of the class that the question asks for; "" where all images have one question
    held_out: str = ""  # the question in a wording that trains nowhere; "" without one
    image_key: str = field(default="", repr=False)  # equal for the prompts of one image; may hold a patient's name
    named: NamedClass | None = None  # the class of a file, which rules others out


def region_prompt(sample: RegionSample, describe: str = DESCRIBE) -> TrainingItem:
    """The prompt of a region with a caption, for both loops."""
    ids, caption = (sample.group_id, sample.series_id, sample.sample_id), sample.caption
    return TrainingItem(*ids, caption, segment_question(caption), True, sample.load, describe)


def image_prompt(sample: Sample, question: str) -> TrainingItem:
    """The prompt of an annotated image, such as an angiogram, for the mask loop; all images share one question."""
    ids, key = (sample.group_id, sample.series_id, sample.sample_id), str(sample.image_path)
    return TrainingItem(
        *ids, "", question, sample.labelled, lambda: (sample.load_image(), sample.load_mask()), image_key=key
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
        named=named,
    )


def class_prompt(named: NamedClass, image: np.ndarray) -> TrainingItem:
    """The prompt of a class in its first wording, about an image alone, uint8 (H, W, 3), that nobody has annotated."""
    question = segment_question(named.phrases[0])
    return TrainingItem(
        "", "", "", "", question, False, lambda: (image, None), name=named.name, image_key="-", named=named
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


def without_masks(prompts: Sequence[TrainingItem]) -> list[TrainingItem]:
    """The same prompts, whose masks nobody reads."""

    def image_of(prompt: TrainingItem) -> tuple[np.ndarray, None]:
        return prompt.load()[0], None

    return [replace(prompt, labelled=False, load=partial(image_of, prompt)) for prompt in prompts]


# ---- order ----------------------------------------------------------------------------------------------------------

FIRST_SHARE = 1 / 3  # of the prompts, the easiest, that are eligible at the start
LOW_WEIGHT = 0.05  # of a prompt that is not eligible yet, and of one whose rewards never differ: all can be drawn
MEMORY = 0.5  # weight of earlier observations when a prompt is drawn again


class PromptOrder:
    """`count` prompts shuffled, each once per epoch, in chunks of one rollout of all processes.

    An incomplete last chunk is left out; less than one chunk is a ValueError. Equal seeds give equal orders.
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

    Random numbers depend on seed and rollout alone; progress is relative to the `rollouts` of the whole run. `update`
    must get the same numbers on every process.
    """

    def __init__(self, count: int, chunk: int, seed: int, rollouts: int) -> None:
        self.count, self.chunk, self.seed, self.rollouts = count, chunk, seed, rollouts
        self.rollouts_per_epoch = count // chunk
        self.reward = torch.full((count,), torch.nan)  # moving mean of each prompt, NaN where unknown
        self.differing = torch.ones(count)  # moving share of its groups whose rewards differ

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
        return torch.where(eligible, 1.0, LOW_WEIGHT) * self.differing.clamp(min=LOW_WEIGHT)

    def update(self, outcomes: Sequence[tuple[int, float, bool]]) -> None:
        """Record (index, mean reward, NaN if unknown, whether the rewards of a group differ) of some prompts."""
        for index, reward, differ in outcomes:
            earlier = self.reward[index]
            if reward == reward:
                self.reward[index] = reward if earlier.isnan() else MEMORY * earlier + (1 - MEMORY) * reward
            self.differing[index] = MEMORY * self.differing[index] + (1 - MEMORY) * float(differ)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"reward": self.reward, "differing": self.differing}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.reward, self.differing = state["reward"], state["differing"]


class MixedOrder:
    """Labelled prompts and prompts without masks in turn, each kind in a shuffled order that begins anew at its end.

    The kinds are given by their indices; a ValueError if there is none of one, or if the chunk is odd. An epoch is one
    pass over the larger kind. As with `PromptOrder`, all follows from seed and rollout.
    """

    def __init__(self, labelled: Sequence[int], unlabelled: Sequence[int], chunk: int, seed: int) -> None:
        if not labelled or not unlabelled:
            raise ValueError(
                f"mean_teacher got {len(labelled)} images with and {len(unlabelled)} without masks, and needs both: "
                "give --unlabelled_root, or a smaller --max_labelled"
            )
        if chunk % 2:
            raise ValueError(
                f"mean_teacher takes as many images with masks as without, but a step has {chunk}; give an even number "
                "(batch_size is that number times num_generations)"
            )
        self.kinds, self.half, self.seed = (list(labelled), list(unlabelled)), chunk // 2, seed
        self.rollouts_per_epoch = math.ceil(max(len(labelled), len(unlabelled)) / self.half)

    def indices(self, rollout: int) -> list[int]:
        """The prompts of a rollout (0, 1, ...): one with and one without a mask, and so on."""
        places = range(rollout * self.half, (rollout + 1) * self.half)
        return [self._drawn(kind, place) for place in places for kind in (0, 1)]

    def _drawn(self, kind: int, place: int) -> int:
        epoch, place = divmod(place, len(self.kinds[kind]))
        return self.kinds[kind][_permutation(len(self.kinds[kind]), (self.seed, kind, epoch))[place]]


@lru_cache(maxsize=4)
def _permutation(count: int, seed: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).permutation(count).tolist())


def prompt_order(
    prompts: Sequence[TrainingItem], together: Sequence[Sequence[int]], args: Sa2VAGRPOConfig
) -> PromptOrder | CurriculumOrder | MixedOrder:
    """The order of the groups of prompts that are taken together; with mean_teacher of one with, one without a mask."""
    chunk = args.prompts_per_step * args.gradient_accumulation_steps * args.world_size
    if args.objective == "mean_teacher":
        if args.prompts_per_step % 2:
            chunk = args.prompts_per_step  # of one pass: each has as many of both
        labelled, others = ([n for n, prompt in enumerate(prompts) if prompt.labelled is has] for has in (True, False))
        return MixedOrder(labelled, others, chunk, args.seed)
    order = PromptOrder(len(together), chunk, args.seed)
    if not args.curriculum:
        return order
    rollouts = args.planned_steps(order.rollouts_per_epoch) // args.num_iterations
    return CurriculumOrder(len(together), chunk, args.seed, rollouts)
