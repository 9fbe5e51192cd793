"""Rewards as functions of named columns, one value per generation: TRL's reward-function protocol.

A function takes the columns it knows by name and swallows the rest; None means that the reward could not be had, which
is never a 0. Columns, each a list with one entry per generation: `prompts` (what was asked), `completions` (captions of
the policy in loop 1, of the partner in loop 2), `completion_ids` (their tokens), `captions` (references), `images`
(uint8 (H, W, 3)), `masks` (bool (H, W), the truth, or None), `predicted_masks` (bool (H, W), or None where no `[SEG]`
was said, which is a true 0), `mask_probabilities` (float32 (H, W) in [0, 1], or None likewise). What TRL gives besides
(`trainer_state`, `log_extra`, `log_metric`) is not there.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from rl_reward_network.rewards.captions import meteor
from rl_reward_network.rewards.combine import caption_reward
from rl_reward_network.rewards.learned import Judge as RewardNetwork
from rl_reward_network.rewards.learned import score_masks
from rl_reward_network.rewards.masks import dice, iou

RewardFunction = Callable[..., list[float | None]]
GroupFunction = Callable[..., np.ndarray]  # of other terms, each float64 (P, G) with NaN where missing, by their names
Mask = np.ndarray | None


class CaptionJudge(Protocol):
    """What compares captions: a language model behind a server."""

    @property
    def counts(self) -> dict[str, int]:
        """How often it was asked, how that went, and what was noted."""

    @property
    def last_failure(self) -> str:
        """Why the latest failed call failed; empty where none did."""

    def note(self, **counts: int) -> None:
        """Add to the counts."""

    def failing(self) -> str | None:
        """Why it cannot be relied on any more, with the remedy; None while it can. A run must then end."""

    def scores(self, predictions: Sequence[str], references: Sequence[str]) -> list[float | None]:
        """In [-1, 1]; None where the judge could not be had."""


def iou_reward(*, predicted_masks: Sequence[Mask], masks: Sequence[Mask], **_: Any) -> list[float | None]:
    """Intersection over union with the truth, in [0, 1]; None without a truth."""
    return [_overlap(iou, predicted, true) for predicted, true in zip(predicted_masks, masks, strict=True)]


def dice_reward(*, predicted_masks: Sequence[Mask], masks: Sequence[Mask], **_: Any) -> list[float | None]:
    """Dice with the truth, in [0, 1]; None without a truth."""
    return [_overlap(dice, predicted, true) for predicted, true in zip(predicted_masks, masks, strict=True)]


def _overlap(score: Callable[..., np.ndarray], predicted: Mask, true: Mask) -> float | None:
    if true is None:
        return None
    return 0.0 if predicted is None else float(score(predicted[None], true[None])[0])


def meteor_reward(*, completions: Sequence[str], captions: Sequence[str], **_: Any) -> list[float | None]:
    """METEOR of each caption against its reference, divided by the reference's own, in [0, 1]."""
    return [float(value) for value in meteor(completions, captions, normalise=True)]


def judge_reward(judge: CaptionJudge) -> RewardFunction:
    """The judge's score, in [-1, 1] (what a caption says wrongly counts against it); None where it could not be had."""

    def reward(*, completions: Sequence[str], captions: Sequence[str], **_: Any) -> list[float | None]:
        return judge.scores(completions, captions)

    return reward


def judged_caption_reward(judge: CaptionJudge) -> GroupFunction:
    """0.25 METEOR + 0.75 judge of whole groups, see `caption_reward`; what the judge left open is noted with it."""

    def reward(meteor: np.ndarray, judged: np.ndarray) -> np.ndarray:
        missing = np.isnan(judged)
        alone = missing.all(axis=1)
        judge.note(imputed=int(missing[~alone].sum()), groups_paid_by_meteor=int(alone.sum()))
        return caption_reward(meteor, judged)

    return reward


def learned_reward(network: RewardNetwork) -> RewardFunction:
    """What the reward network thinks of each mask, in [0, 1]; no truth is needed."""

    def reward(*, images: Sequence[np.ndarray], predicted_masks: Sequence[Mask], **_: Any) -> list[float | None]:
        rows = zip(images, predicted_masks, strict=True)
        return [score for _, own in groupby(rows, key=lambda row: id(row[0])) for score in _learned(network, list(own))]

    return reward


def _learned(network: RewardNetwork, rows: list[tuple[np.ndarray, Mask]]) -> list[float]:
    """Scores of masks of one image, which is looked at once; 0 where there is no mask."""
    masks = [np.zeros(image.shape[:2], dtype=bool) if mask is None else mask for image, mask in rows]
    scores = score_masks(network, rows[0][0], np.stack(masks).astype(np.float32))
    return [0.0 if mask is None else float(score) for (_, mask), score in zip(rows, scores, strict=True)]


def confidence_reward(*, mask_probabilities: Sequence[Mask], **_: Any) -> list[float | None]:
    """Mean probability inside the predicted mask, scaled from 0.5..1 to 0..1: a small push towards clear edges."""
    return [0.0 if one is None else _confidence(one) for one in mask_probabilities]


def _confidence(probability: np.ndarray) -> float:
    inside = probability[probability > 0.5]
    return float(2 * inside.mean() - 1) if len(inside) else 0.0
