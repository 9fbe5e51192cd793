"""The names that users of the original specification import, in its argument order; the docs compare both."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_reward_network.data.grasp_any_region import GraspAnyRegionDataset
from rl_reward_network.grpo.card import card_text as create_model_card
from rl_reward_network.models.ema import EMAModel
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor as Sa2VADataPreprocessor
from rl_reward_network.rewards.captions import meteor
from rl_reward_network.rewards.judge import Judge
from rl_reward_network.rewards.metrics import iou

__all__ = ["EMAModel", "GraspAnyRegionDataset", "Sa2VADataPreprocessor", "create_model_card"]


def compute_iou(mask1: Any, mask2: Any) -> float:
    """IoU of two masks (H, W), bool, 0 and 1, or probabilities (cut at 0.5); two empty masks have IoU 1."""
    return float(iou(*(np.asarray(mask)[None] > 0.5 for mask in (mask1, mask2)))[0])


def compute_meteor(reference: str, hypothesis: str) -> float:
    """METEOR of one caption, in [0, 1]."""
    return float(meteor([hypothesis], [reference])[0])


def combined_caption_reward(
    gt_captions: Sequence[str],
    pred_captions: Sequence[str],
    llm_judge: Judge | None = None,
    use_llm_judge: bool = False,
    meteor_weight: float = 0.25,
    llm_judge_weight: float = 0.75,
) -> list[float]:
    """The weighted sum, with a judge in [-1, 1]; METEOR alone without one, or where its score is missing."""
    words = [float(score) for score in meteor(pred_captions, gt_captions)]
    if not use_llm_judge or llm_judge is None:
        return words
    pairs = zip(words, llm_judge.scores(pred_captions, gt_captions), strict=True)
    return [word if score is None else meteor_weight * word + llm_judge_weight * score for word, score in pairs]


def loop1_caption_reward(prompts: Any, completions: Sequence[str], **kwargs: Any) -> list[float]:
    """As TRL calls it: captions against `gt_captions`, by `llm_judge`, too, if there is one."""
    return combined_caption_reward(kwargs["gt_captions"], completions, kwargs.get("llm_judge"), use_llm_judge=True)


def loop2_caption_reward(prompts: Any, completions: Sequence[str], **kwargs: Any) -> list[float]:
    """As `loop1_caption_reward`, but the judge is asked only with `use_llm_judge_loop2`."""
    judged = bool(kwargs.get("use_llm_judge_loop2"))
    return combined_caption_reward(kwargs["gt_captions"], completions, kwargs.get("llm_judge"), judged)


def collate_fn_sa2va_rl(batch: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """{images, masks, captions} of items of a `GraspAnyRegionDataset`, as lists: sizes differ."""
    return {f"{name}s": [item[name] for item in batch] for name in ("image", "mask", "caption")}
