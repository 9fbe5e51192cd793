"""GRPO's rewards as functions of named columns, one value per generation: TRL's reward-function protocol.

A function takes the columns that it needs by name and ignores the rest; None means that the reward is missing, which
differs from 0. A reward that is the estimate of an ensemble may return `EnsembleScores` in place of a list, so that
its noise is known. Columns, each a list with one entry per generation:

- `prompts`: questions to the model.
- `completions`: captions, of the policy in loop 1, of the EMA teacher in loop 2.
- `completion_ids`: their tokens, as generated, the stop token included.
- `captions`: reference captions.
- `images`: uint8 (H, W, 3).
- `masks`: ground truth, bool (H, W), or None.
- `predicted_masks`: bool (H, W), or None if the answer has no `[SEG]`; overlap rewards are then 0.
- `mask_probabilities`: float32 (H, W) in [0, 1], or None likewise.

TRL's further arguments (`trainer_state`, `log_extra`, `log_metric`) are not passed.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from rl_reward_network.rewards.captions import meteor
from rl_reward_network.rewards.combine import caption_reward
from rl_reward_network.rewards.judge import Judge
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.rewards.table import IMAGE_REWARDS, MASK_REWARDS


class EnsembleScores(NamedTuple):
    """Rewards of N generations by an ensemble.

    Args:
        values: N rewards.
        members: float (N, K), the rewards by each of its members.
    """

    values: Sequence[float | None]
    members: np.ndarray


RewardFunction = Callable[..., Sequence[float | None] | EnsembleScores]
GroupFunction = Callable[..., np.ndarray]  # of other terms, each float64 (P, G) with NaN where missing
Mask = np.ndarray | None


def mask_reward(name: str) -> RewardFunction:
    """A reward of `MASK_REWARDS` or `IMAGE_REWARDS` as a function of columns, in [0, 1]; None without its truth."""
    of_image = name in IMAGE_REWARDS
    function = IMAGE_REWARDS[name] if of_image else MASK_REWARDS[name]

    def of_one(given: Mask, predicted: Sequence[Mask]) -> Sequence[float | None]:
        """Rewards of masks on one image, from its true mask or, `of_image`, from the image."""
        if given is None:
            return [None] * len(predicted)
        stack = np.stack([np.zeros(given.shape[:2], dtype=bool) if mask is None else mask for mask in predicted])
        values = function(stack, given if of_image else np.broadcast_to(given, stack.shape))
        return [0.0 if mask is None else float(value) for mask, value in zip(predicted, values, strict=True)]

    def reward(*, predicted_masks: Sequence[Mask], **columns: Any) -> list[float | None]:
        given = columns["images" if of_image else "masks"]
        return [value for group in _runs(given, predicted_masks) for value in of_one(*group)]

    return reward


def _runs(keys: Sequence[Any], masks: Sequence[Mask]) -> Iterator[tuple[Any, list[Mask]]]:
    """Each run of one image or true mask, and the predicted masks beside it."""
    for _, group in groupby(zip(keys, masks, strict=True), key=lambda pair: id(pair[0])):
        pairs = list(group)
        yield pairs[0][0], [mask for _, mask in pairs]


iou_reward = mask_reward("iou")


def meteor_reward(*, completions: Sequence[str], captions: Sequence[str], **_: Any) -> list[float | None]:
    """METEOR of each caption, divided by the METEOR of its reference with itself, in [0, 1]."""
    return [float(value) for value in meteor(completions, captions, normalise=True)]


def judge_reward(judge: Judge) -> RewardFunction:
    """The LLM judge's score in [-1, 1], below 0 for wrong statements; None where it is missing."""

    def reward(*, completions: Sequence[str], captions: Sequence[str], **_: Any) -> list[float | None]:
        return judge.scores(completions, captions)

    return reward


def judged_caption_reward(judge: Judge) -> GroupFunction:
    """0.25 METEOR + 0.75 judge of whole groups, see `caption_reward`; the judge counts the imputed scores."""

    def reward(meteor: np.ndarray, judged: np.ndarray) -> np.ndarray:
        missing = np.isnan(judged)
        alone = missing.all(axis=1)
        judge.note(imputed=int(missing[~alone].sum()), groups_paid_by_meteor=int(alone.sum()))
        return caption_reward(meteor, judged)

    return reward


def learned_reward(maps: ForegroundMaps) -> Callable[..., EnsembleScores]:
    """The reward network's score of each mask, in [0, 1], and those of its members; needs no ground truth.

    It is missing where the image is outside the network's domain.
    """

    def of_one_image(image: np.ndarray, masks: Sequence[Mask]) -> np.ndarray:
        """Score and members' scores (N, 1 + K); 0 without a mask."""
        present = np.array([mask is not None for mask in masks])
        stack = [mask.astype(np.float32) for mask in masks if mask is not None]
        scorer = maps.scorer(image)
        quality = scorer.quality(np.array(stack, dtype=np.float32).reshape(-1, *image.shape[:2]))
        columns = np.column_stack([quality["score"], quality["member_scores"]])
        scores = np.full((len(masks), columns.shape[1]), np.nan if scorer.outside else 0.0)
        scores[present] = columns
        return scores

    def reward(*, images: Sequence[np.ndarray], predicted_masks: Sequence[Mask], **_: Any) -> EnsembleScores:
        scores = np.concatenate([of_one_image(*group) for group in _runs(images, predicted_masks)])
        values = [None if np.isnan(score) else float(score) for score in scores[:, 0]]
        return EnsembleScores(values, np.nan_to_num(scores[:, 1:]))

    return reward


def confidence_reward(*, mask_probabilities: Sequence[Mask], **_: Any) -> list[float | None]:
    """Mean probability inside the predicted mask, scaled from [0.5, 1] to [0, 1]; favours clear edges."""
    inside = [np.empty(0) if probs is None else probs[probs > 0.5] for probs in mask_probabilities]
    return [float(2 * probs.mean() - 1) if len(probs) else 0.0 for probs in inside]
