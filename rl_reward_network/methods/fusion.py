"""Methods that use the reward network's own segmentation, or climb its score."""

import numpy as np
from scipy.special import expit, logit

from rl_reward_network.methods.prompts import default_prompt
from rl_reward_network.methods.view import ImageView, Trained

SURE = 1e-4  # soft masks are kept this far from 0 and 1 where logits are taken
ASCENT = 10  # steps
FUSION_WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of the reward network's map
ASCENT_STEPS = (0.05, 0.1, 0.2, 0.5, 1.0)  # largest change of a pixel in one of ten steps


def own_segmentation(view: ImageView, trained: Trained, parameter: float | None) -> np.ndarray:
    """The reward network's own segmentation: a plain segmenter."""
    return view.scorer.foreground_prob


def fused(view: ImageView, trained: Trained, parameter: float | None) -> np.ndarray:
    """Sa2VA's soft mask and the reward network's; `parameter` is the weight of the second."""
    assert parameter is not None
    return fusion(default_prompt(view, trained), view.scorer.foreground_prob, parameter)


def fusion(soft: np.ndarray, foreground_prob: np.ndarray, weight: float) -> np.ndarray:
    """float (H, W) in [0, 1]: weighted mean of two soft masks (H, W) in logits; `weight` in [0, 1] is the second's."""
    first, second = (logit(np.clip(mask.astype(np.float64), SURE, 1 - SURE)) for mask in (soft, foreground_prob))
    return np.asarray(expit((1 - weight) * first + weight * second))


def ascent(view: ImageView, trained: Trained, parameter: float | None) -> np.ndarray:
    """Sa2VA's soft mask after ten steps up the reward network's score; `parameter` is their size."""
    assert parameter is not None
    soft = default_prompt(view, trained)
    return np.asarray(list(view.scorer.ascend(soft[None], parameter, ASCENT))[-1][0])
