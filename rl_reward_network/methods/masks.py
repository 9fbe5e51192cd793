"""From the view of an image to the mask of a road: sources of soft masks, and refinements."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from scipy.special import expit, logit

from rl_reward_network.methods.methods import Method
from rl_reward_network.methods.views import ImageView

SURE = 1e-4  # soft masks are kept this far from 0 and 1 where logits are taken
ASCENT = 10  # steps
ZOOM = 5 / 8  # side of a magnified quarter of the image; neighbours overlap by a quarter


class PromptChooser(Protocol):
    """A trained prompt policy: the index of the prompt for an image; Sa2VA has the given weights."""

    def __call__(self, view: ImageView, weights: str) -> int:
        """The index of the prompt for an image."""


@dataclass(frozen=True)
class Tools:
    """What the roads of a comparison work with.

    Args:
        prompts: P prompts; index 0 is the default.
        choosers: part -> its prompt policy, as deployed.
        fixed: part -> index of its best fixed prompt.
        edit: (view, weights, soft mask) -> soft mask after the operations that experiment 2 deploys.
        sequence: the same by the best fixed sequence.
        threshold: the best single threshold.
    """

    prompts: tuple[str, ...]
    choosers: dict[str, PromptChooser] = field(default_factory=dict)
    fixed: dict[str, int] = field(default_factory=dict)
    edit: Callable[[ImageView, str, np.ndarray], np.ndarray] | None = None
    sequence: Callable[[ImageView, np.ndarray], np.ndarray] | None = None
    threshold: float = 0.5


def method_mask(method: Method, view: ImageView, tools: Tools, weights: str, parameter: float | None) -> np.ndarray:
    """bool (H, W): the mask of a road.

    Args:
        road: source and refinement.
        view: the image.
        tools: trained parts.
        weights: name of Sa2VA's weights; those of the road, or the best ones.
        parameter: of the refinement, from the road's grid.
    """
    soft = _source(method, view, tools, weights)
    return _refined(method, view, tools, weights, soft, parameter) > 0.5


def masks_of_grid(method: Method, view: ImageView, tools: Tools, weights: str) -> np.ndarray:
    """bool (G, H, W): the mask of a road for each parameter in its grid."""
    soft = _source(method, view, tools, weights)
    return np.stack([_refined(method, view, tools, weights, soft, value) > 0.5 for value in method.grid])


def _source(method: Method, view: ImageView, tools: Tools, weights: str) -> np.ndarray:
    """float32 (H, W): the soft mask that the road begins with."""
    if method.source == "network":
        return view.scorer.foreground_prob
    if method.source == "flips":
        return flips_and_scales(view, weights, tools.prompts[0])
    if method.source in ("best of", "mean", "weighted mean"):
        return _of_all_prompts(method, view, view.soft(weights, tools.prompts))
    index = 0
    if method.source == "fixed":
        index = tools.fixed[method.policy]
    elif method.source == "policy":
        index = tools.choosers[method.policy](view, weights)
    return view.soft(weights, tools.prompts[index : index + 1])[0]


def _of_all_prompts(method: Method, view: ImageView, soft: np.ndarray) -> np.ndarray:
    """float32 (H, W) from the soft masks of all prompts, (P, H, W)."""
    if method.source == "mean":
        return soft.mean(axis=0)
    scores = view.scorer.quality((soft > 0.5).astype(np.float32))["score"]
    if method.source == "best of":
        return soft[scores.argmax()]
    return np.average(soft, axis=0, weights=np.maximum(scores, SURE)).astype(np.float32)


def _refined(
    method: Method, view: ImageView, tools: Tools, weights: str, soft: np.ndarray, parameter: float | None
) -> np.ndarray:
    """float (H, W): the soft mask after the road's refinement; above 0.5 is the mask."""
    if method.refinement == "threshold":
        return soft - tools.threshold + 0.5
    if method.refinement == "sequence":
        assert tools.sequence is not None
        return tools.sequence(view, soft)
    if method.refinement == "policy":
        assert tools.edit is not None
        return tools.edit(view, weights, soft)
    if method.refinement == "fusion":
        assert parameter is not None
        return fusion(soft, view.scorer.foreground_prob, parameter)
    if method.refinement == "ascent":
        assert parameter is not None
        return list(view.scorer.ascend(soft[None], parameter, ASCENT))[-1][0]
    return soft


def fusion(soft: np.ndarray, foreground_prob: np.ndarray, weight: float) -> np.ndarray:
    """float (H, W) in [0, 1]: weighted mean of two soft masks (H, W) in logits; `weight` in [0, 1] is the second's."""
    first, second = (logit(np.clip(mask.astype(np.float64), SURE, 1 - SURE)) for mask in (soft, foreground_prob))
    return expit((1 - weight) * first + weight * second)


def flips_and_scales(view: ImageView, weights: str, prompt: str) -> np.ndarray:
    """float32 (H, W): mean of the soft masks of the image, its three flips, and its four quarters magnified.

    Where quarters overlap, their mean counts; together they count as one of the five.
    """
    total = view.soft(weights, [prompt])[0].copy()
    for name, axes in (("left-right", (1,)), ("up-down", (0,)), ("both", (0, 1))):
        copy = np.ascontiguousarray(np.flip(view.image, axes))
        total += np.flip(view.soft_of(copy, weights, [prompt], name)[0], axes)
    return (total + _magnified(view, weights, prompt)) / 5


def _magnified(view: ImageView, weights: str, prompt: str) -> np.ndarray:
    """float32 (H, W): the soft mask put together from those of the quarters; Sa2VA magnifies each to its input size."""
    total, count = np.zeros(view.size, np.float32), np.zeros(view.size, np.float32)
    for number, (rows, cols) in enumerate(quarters(view.size)):
        copy = np.ascontiguousarray(view.image[rows, cols])
        total[rows, cols] += view.soft_of(copy, weights, [prompt], f"quarter {number}")[0]
        count[rows, cols] += 1
    return total / count


def quarters(size: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of the four overlapping quarters of an image of size (H, W), which cover it."""
    sides = [(slice(0, round(ZOOM * length)), slice(length - round(ZOOM * length), length)) for length in size]
    yield from ((rows, cols) for rows in sides[0] for cols in sides[1])
