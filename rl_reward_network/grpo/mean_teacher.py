"""Mean teacher for Sa2VA: which images a step takes, and what their masks are.

In each step half of the images are labelled, and the model learns their true masks as in supervised training. Of the
others the teacher, the moving average, segments the image as it is; the model sees a strong view of it, and the
teacher's mask turns with the view. Loss, fading and references are in `models/mean_teacher.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_reward_network.data.windows import augmented, strongly_augmented
from rl_reward_network.grpo.image_context import FeatureCache, Mask, PromptBatch, make_batch, mirrored, open_batch
from rl_reward_network.grpo.prompts import TrainingItem
from rl_reward_network.models.ema import swapped
from rl_reward_network.models.mean_teacher import consistency_losses
from rl_reward_network.models.sa2va.grounding_sa2va import soft_targets


def without_masks(prompts: Sequence[TrainingItem]) -> list[TrainingItem]:
    """The same prompts, whose masks nobody reads."""
    return [replace(prompt, labelled=False, load=_image_of(prompt)) for prompt in prompts]


def _image_of(prompt: TrainingItem) -> Any:
    return lambda: (prompt.load()[0], None)


def untaught_line(images: int, no_seg: int) -> str:
    """A sentence on the images without masks that the teacher gave none to either, counted each time they came up."""
    return (
        f"the teacher gave no mask ([SEG]) for {no_seg} of {images} views of images without masks, which taught "
        "nothing: lower learning_rate, or raise seg_text_weight"
    )


class MixedOrder:
    """Labelled prompts and prompts without masks in turn, each kind in a shuffled order that begins anew at its end.

    An epoch is one pass over the larger kind. As with `PromptOrder`, all follows from seed and rollout.

    Args:
        labelled, unlabelled: indices of the prompts of each kind.
        chunk: prompts of one rollout of all processes.
        seed: equal seeds give equal orders.

    Raises:
        ValueError: there is none of a kind, or the chunk is odd.
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
        of_kind = [self._drawn(kind, number, rollout) for number, kind in enumerate(self.kinds)]
        return [index for pair in zip(*of_kind, strict=True) for index in pair]

    def _drawn(self, kind: list[int], number: int, rollout: int) -> list[int]:
        places = range(rollout * self.half, (rollout + 1) * self.half)
        orders = {
            epoch: np.random.default_rng([self.seed, number, epoch]).permutation(len(kind))
            for epoch in {place // len(kind) for place in places}
        }
        return [kind[orders[place // len(kind)][place % len(kind)]] for place in places]


def taught_batch(
    prompts: Sequence[TrainingItem],
    cache: FeatureCache,
    teacher: dict[str, Tensor],
    views: np.random.Generator,
    rows_at_once: int,
) -> tuple[PromptBatch, list[Mask]]:
    """Random views of the prompts' images, strong ones of those without masks, and the teacher's masks of the latter.

    Args:
        prompts: of both kinds.
        cache: of features; its model has the student's weights.
        teacher: weights of the moving average.
        views: randomness of the views.
        rows_at_once: most answers decoded in one batch.

    Returns:
        The batch, and for each prompt the teacher's soft mask float32 (H, W); None for a labelled one, and where the
        teacher's answer has no mask.
    """
    loaded = [prompt.load() for prompt in prompts]
    unlabelled = [row for row, (_, truth) in enumerate(loaded) if truth is None]
    found = teacher_masks([prompts[row] for row in unlabelled], cache, teacher, rows_at_once)
    masks = dict(zip(unlabelled, found, strict=True))
    images: list[np.ndarray] = []
    truths: list[Mask] = []
    taught: list[Mask] = [None] * len(prompts)
    for row, (image, truth) in enumerate(loaded):
        mirror, mask = mirrored([prompts[row]]), masks.get(row)
        if truth is not None:
            image, of_view = augmented(image, truth[None], views, mirror)
            truth = of_view[0]
        elif mask is not None:
            image, soft = strongly_augmented(image, mask[None], views, mirror)
            taught[row] = soft[0]
        images.append(image)
        truths.append(truth)
    return make_batch(prompts, images, truths, cache, repeated=False), taught


@torch.no_grad()
def teacher_masks(
    prompts: Sequence[TrainingItem], cache: FeatureCache, teacher: dict[str, Tensor], rows_at_once: int
) -> list[Mask]:
    """float32 (H, W) in [0, 1] of each prompt's image as it is, by the moving average; None without `[SEG]`."""
    if not prompts:
        return []
    batch = open_batch(prompts, cache)
    with swapped(cache.model, teacher):
        context = batch.context(cache.model, rows_at_once)
        return batch.masks(context, range(len(prompts)), [prompt.question for prompt in prompts])


def consistency_loss(logits: Tensor, taught: Tensor, bce_weight: float, dice_weight: float) -> Tensor:
    """The loss of one mask against the teacher's, a scalar, differentiable in the logits; see `consistency_losses`.

    Args:
        logits: float (h, w), of the model.
        taught: float32 (H, W) in [0, 1], the teacher's soft mask.
        bce_weight, dice_weight: factors of the two losses.
    """
    cross_entropy, dice_loss = consistency_losses(logits[None], soft_targets(taught[None], logits[None]))
    return bce_weight * cross_entropy + dice_weight * dice_loss
