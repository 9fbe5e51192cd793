"""GRPO's rewards as functions of named columns, one value per generation: TRL's reward-function protocol.

A function takes the columns that it needs by name and ignores the rest; None means that the reward is missing, which
differs from 0. Columns, each a list with one entry per generation:

- `prompts`: questions to the model.
- `completions`: captions, of the policy in loop 1, of the partner in loop 2.
- `completion_ids`: their tokens.
- `captions`: reference captions.
- `images`: uint8 (H, W, 3).
- `masks`: ground truth, bool (H, W), or None.
- `predicted_masks`: bool (H, W), or None if the answer has no `[SEG]`; overlap rewards are then 0.
- `mask_probabilities`: float32 (H, W) in [0, 1], or None likewise.

TRL's further arguments (`trainer_state`, `log_extra`, `log_metric`) are not passed.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from rl_reward_network.rewards.captions import meteor
from rl_reward_network.rewards.combine import caption_reward
from rl_reward_network.rewards.learned import MaskQualityModel, score_masks
from rl_reward_network.rewards.table import MASK_REWARDS, MaskReward

RewardFunction = Callable[..., list[float | None]]
GroupFunction = Callable[..., np.ndarray]  # of other terms, each float64 (P, G) with NaN where missing
Mask = np.ndarray | None


class CaptionJudge(Protocol):
    """A language model that compares captions."""

    @property
    def counts(self) -> dict[str, int]:
        """Calls, failures, tokens and imputed scores so far, by name."""

    @property
    def last_failure(self) -> str:
        """Reason of the latest failed call; empty without one."""

    def note(self, **counts: int) -> None:
        """Add to the counts."""

    def failing(self) -> str | None:
        """Reason and remedy once the judge has failed for good and the run must end; None before."""

    def scores(self, predictions: Sequence[str], references: Sequence[str]) -> list[float | None]:
        """Scores in [-1, 1]; None where a score is missing."""


def mask_reward(name: str) -> RewardFunction:
    """The mask reward `name` of `MASK_REWARDS` as a function of columns, in [0, 1]; None without ground truth."""
    overlap = MASK_REWARDS[name]

    def reward(*, predicted_masks: Sequence[Mask], masks: Sequence[Mask], **_: Any) -> list[float | None]:
        pairs = zip(predicted_masks, masks, strict=True)
        truths_in_turn = groupby(pairs, key=lambda pair: id(pair[1]))
        return [value for _, group in truths_in_turn for value in _of_one_truth(overlap, group)]

    return reward


def _of_one_truth(overlap: MaskReward, pairs: Iterable[tuple[Mask, Mask]]) -> list[float | None]:
    """Overlaps of predicted masks with one true mask; 0 without a predicted mask, None without a true one."""
    predicted, masks = zip(*pairs, strict=True)
    truth = masks[0]
    if truth is None:
        return [None] * len(predicted)
    stack = np.stack([np.zeros_like(truth) if mask is None else mask for mask in predicted])
    values = overlap(stack, np.broadcast_to(truth, stack.shape))
    return [0.0 if mask is None else float(value) for mask, value in zip(predicted, values, strict=True)]


iou_reward = mask_reward("iou")


def meteor_reward(*, completions: Sequence[str], captions: Sequence[str], **_: Any) -> list[float | None]:
    """METEOR of each caption, divided by the METEOR of its reference with itself, in [0, 1]."""
    return [float(value) for value in meteor(completions, captions, normalise=True)]


def judge_reward(judge: CaptionJudge) -> RewardFunction:
    """The LLM judge's score in [-1, 1], below 0 for wrong statements; None where it is missing."""

    def reward(*, completions: Sequence[str], captions: Sequence[str], **_: Any) -> list[float | None]:
        return judge.scores(completions, captions)

    return reward


def judged_caption_reward(judge: CaptionJudge) -> GroupFunction:
    """0.25 METEOR + 0.75 judge of whole groups, see `caption_reward`; counts the imputed scores in `judge.counts`."""

    def reward(meteor: np.ndarray, judged: np.ndarray) -> np.ndarray:
        missing = np.isnan(judged)
        alone = missing.all(axis=1)
        judge.note(imputed=int(missing[~alone].sum()), groups_paid_by_meteor=int(alone.sum()))
        return caption_reward(meteor, judged)

    return reward


def learned_reward(network: MaskQualityModel) -> RewardFunction:
    """The reward network's score of each mask, in [0, 1]; needs no ground truth."""

    def reward(*, images: Sequence[np.ndarray], predicted_masks: Sequence[Mask], **_: Any) -> list[float | None]:
        rows = zip(images, predicted_masks, strict=True)
        images_in_turn = groupby(rows, key=lambda row: id(row[0]))
        return [score for _, group in images_in_turn for score in _learned(network, list(group))]

    return reward


def _learned(network: MaskQualityModel, rows: list[tuple[np.ndarray, Mask]]) -> list[float]:
    """Scores of masks of one image in one pass of the network; 0 without a mask."""
    masks = [np.zeros(image.shape[:2], dtype=bool) if mask is None else mask for image, mask in rows]
    scores = score_masks(network, rows[0][0], np.stack(masks).astype(np.float32))
    return [0.0 if mask is None else float(score) for (_, mask), score in zip(rows, scores, strict=True)]


def confidence_reward(*, mask_probabilities: Sequence[Mask], **_: Any) -> list[float | None]:
    """Mean probability inside the predicted mask, scaled from [0.5, 1] to [0, 1]; favours clear edges."""
    return [0.0 if probability is None else _confidence(probability) for probability in mask_probabilities]


def _confidence(probability: np.ndarray) -> float:
    inside = probability[probability > 0.5]
    return float(2 * inside.mean() - 1) if len(inside) else 0.0
