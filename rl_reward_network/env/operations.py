"""The actions of experiment 2, operations on a soft mask, and an image whose mask they edit.

Sizes are shares of the image's longer side, so that images of 256 and of 1,024 pixels are treated alike. The mask is
always where the soft mask is above 0.5.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import cv2
import numpy as np
from scipy.special import expit, logit

from rl_reward_network.env.observation import EdgeFeatures, observe_mask
from rl_reward_network.rewards.learned import ImageScorer
from rl_reward_network.rewards.metrics import dice, recall

Operations = tuple[int, ...]
"""Indices in `OPERATIONS`, in the order in which they are applied."""
SMALL_SHARE = 1e-3  # of the image: smaller components are dropped
HOLE_SHARE = 5e-3  # of the image: larger holes are not filled
LOGIT_STEP = 1.0  # shift by one threshold operation
SURE = 1e-4  # soft masks are kept this far from 0 and 1 where logits are taken
STRONG_RIDGE = 0.5  # of the median tubeness inside the mask
ADDED = 0.75  # least soft value of a pixel that is added
KEPT = 24  # soft masks in memory for each image; others are computed again from the nearest kept one
EDGE_RADIUS, EDGE_EPSILON = 3, 1e-3  # units; variance of grey levels in [0, 1] that counts as an edge


def _shifted(soft: np.ndarray, shift: float) -> np.ndarray:
    return expit(logit(np.clip(soft, SURE, 1 - SURE)) + np.float32(shift)).astype(np.float32)


def _element(radius: int) -> np.ndarray:
    return cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (2 * radius + 1, 2 * radius + 1))


def _morphology(kind: int) -> Callable[[EdgeFeatures, np.ndarray], np.ndarray]:
    return lambda guide, soft: cv2.morphologyEx(soft, kind, _element(guide.unit))


def _components(soft: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """8-connected components: labels int32 (H, W), 0 is the background, and the area of each label."""
    _, labels, statistics, _ = cv2.connectedComponentsWithStats((soft > 0.5).astype(np.uint8), connectivity=8)
    return labels, statistics[:, cv2.CC_STAT_AREA]


def _drop_small(guide: EdgeFeatures, soft: np.ndarray) -> np.ndarray:
    labels, areas = _components(soft)
    return _without(guide, soft, labels, areas < SMALL_SHARE * soft.size)


def _keep_largest(guide: EdgeFeatures, soft: np.ndarray) -> np.ndarray:
    labels, areas = _components(soft)
    if len(areas) == 1:
        return soft
    return _without(guide, soft, labels, np.arange(len(areas)) != 1 + areas[1:].argmax())


def _without(guide: EdgeFeatures, soft: np.ndarray, labels: np.ndarray, dropped: np.ndarray) -> np.ndarray:
    """The soft mask, 0 on the dropped components (by label) and their soft rims, which a lower threshold shows."""
    inside = labels > 0
    gone = inside & dropped[labels]
    rim = cv2.dilate(gone.astype(np.uint8), _element(2 * guide.unit)) > 0
    return np.where(gone | (rim & ~inside), np.float32(0), soft)


def _fill_holes(guide: EdgeFeatures, soft: np.ndarray) -> np.ndarray:
    """Fill small holes; large ones are loops of vessels."""
    background = np.pad(soft <= 0.5, 1, constant_values=True).astype(np.uint8)
    _, labels, statistics, _ = cv2.connectedComponentsWithStats(background, connectivity=4)
    small = statistics[:, cv2.CC_STAT_AREA] <= HOLE_SHARE * soft.size
    small[[0, labels[0, 0]]] = False  # the mask itself, and what surrounds the image
    return np.where(small[labels][1:-1, 1:-1], np.maximum(soft, np.float32(ADDED)), soft)


def _bridge(guide: EdgeFeatures, soft: np.ndarray) -> np.ndarray:
    """Add the strong ridges that connect two components of the mask or more, dark or bright ones as the mask has."""
    mask = soft > 0.5
    labels, areas = _components(soft)
    if len(areas) < 3:
        return soft
    inside = guide.ridges[:, mask]
    polarity = int(inside[1].mean() > inside[0].mean())
    strength = guide.ridges[polarity]
    strong = (strength > STRONG_RIDGE * np.median(inside[polarity])) & ~mask
    count, pieces = cv2.connectedComponents(strong.astype(np.uint8), connectivity=8)
    joins = _touching(labels, pieces, count, _element(2 * guide.unit)) > 1
    joins[0] = False  # what is no ridge
    return np.where(joins[pieces], np.maximum(soft, np.float32(ADDED)), soft)


def _touching(labels: np.ndarray, pieces: np.ndarray, count: int, element: np.ndarray) -> np.ndarray:
    """int (count,): 0, 1, or 2 for several: the number of components of the mask that each piece of ridge touches."""
    largest = cv2.dilate(labels.astype(np.float32), element)  # of the labels near a pixel
    smallest = cv2.erode(np.where(labels > 0, labels, np.inf).astype(np.float32), element)
    near = (pieces > 0) & (largest > 0)
    high, low = np.zeros(count), np.full(count, np.inf)
    np.maximum.at(high, pieces[near], largest[near])
    np.minimum.at(low, pieces[near], smallest[near])
    return (high > 0).astype(int) + (high > low)


def _smooth_along_edges(guide: EdgeFeatures, soft: np.ndarray) -> np.ndarray:
    """Guided filter of the soft mask by the grey image. Source: He et al., Guided Image Filtering, 2013, equation 5."""
    size = (2 * EDGE_RADIUS * guide.unit + 1,) * 2

    def mean(values: np.ndarray) -> np.ndarray:
        return cv2.blur(values, size, borderType=cv2.BORDER_REFLECT)

    grey = guide.grey
    mean_grey, mean_soft = mean(grey), mean(soft)
    slope = (mean(grey * soft) - mean_grey * mean_soft) / (mean(grey * grey) - mean_grey**2 + EDGE_EPSILON)
    return np.clip(mean(slope) * grey + mean(mean_soft - slope * mean_grey), 0, 1)


STOP = "stop"
_FUNCTIONS: dict[str, Callable[[EdgeFeatures, np.ndarray], np.ndarray]] = {
    "threshold up": lambda guide, soft: _shifted(soft, -LOGIT_STEP),
    "threshold down": lambda guide, soft: _shifted(soft, LOGIT_STEP),
    "open": _morphology(cv2.MORPH_OPEN),
    "close": _morphology(cv2.MORPH_CLOSE),
    "dilate": _morphology(cv2.MORPH_DILATE),
    "erode": _morphology(cv2.MORPH_ERODE),
    "drop small components": _drop_small,
    "keep the largest": _keep_largest,
    "fill holes": _fill_holes,
    "bridge gaps along ridges": _bridge,
    "smooth along edges": _smooth_along_edges,
}
OPERATIONS: tuple[str, ...] = (*_FUNCTIONS, STOP)


def apply_operation(name: str, guide: EdgeFeatures, soft: np.ndarray) -> np.ndarray:
    """The soft mask after one operation.

    Args:
        name: one of `OPERATIONS`; stop changes nothing.
        guide: the image.
        soft: float32 (H, W) in [0, 1]; not changed.

    Returns:
        float32 (H, W) in [0, 1], rounded to float16.

    Raises:
        KeyError: no operation has that name.
    """
    if name == STOP:
        return soft
    return _FUNCTIONS[name](guide, soft).astype(np.float16).astype(np.float32)  # so that half of the memory keeps it


LABEL_REWARDS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "dice": lambda mask, truth: float(dice(mask[None], truth[None])[0]),
    "dice+recall": lambda mask, truth: float(dice(mask[None], truth[None])[0] + recall(mask[None], truth[None])[0]) / 2,
}
"""Name -> (mask, truth), bool (H, W) each -> reward in [0, 1]."""


@dataclass(eq=False, repr=False)  # an error of gymnasium.make lists all images
class EditedImage:
    """An image and its soft mask; the mask after any operations, what it looks like and what it is worth.

    Each sequence of operations is computed once.

    Args:
        sample_id: hash that names the image and phrase.
        group_id: hash that names the patient.
        guide: the image.
        soft: float32 (H, W) in [0, 1], Sa2VA's soft mask.
        features: float32 (F,), of the image, for the policy.
        truth: bool (H, W); None for an unlabelled image.
        scorer: the reward network applied to the image; None without one.
        reward: "net", or a name in `LABEL_REWARDS`.
        rewarded_by: true mask of the reward, if it is not `truth`: in the control that of another image.
    """

    sample_id: str
    group_id: str
    guide: EdgeFeatures
    soft: np.ndarray
    features: np.ndarray
    truth: np.ndarray | None = None
    scorer: ImageScorer | None = None
    reward: str = "dice"
    rewarded_by: np.ndarray | None = None
    _statistics: dict[Operations, np.ndarray] = field(default_factory=dict, init=False)
    _values: dict[Operations, tuple[float, float | None]] = field(default_factory=dict, init=False)
    _softs: OrderedDict[Operations, np.ndarray] = field(default_factory=OrderedDict, init=False)

    def edited(self, operations: Operations) -> np.ndarray:
        """float32 (H, W): the soft mask after the operations."""
        if not operations:
            return self.soft
        if operations not in self._softs:
            before = self.edited(operations[:-1])
            after = apply_operation(OPERATIONS[operations[-1]], self.guide, before)
            self._softs[operations] = after.astype(np.float16)
            if len(self._softs) > KEPT:
                self._softs.popitem(last=False)
            return after
        return self._softs[operations].astype(np.float32)

    def mask(self, operations: Operations) -> np.ndarray:
        """bool (H, W): the mask after the operations."""
        return self.edited(operations) > 0.5

    def statistics(self, operations: Operations) -> np.ndarray:
        """float32 (M,): `observe_mask` of the mask after the operations."""
        if operations not in self._statistics:
            self._statistics[operations] = observe_mask(self.guide, self.edited(operations))
        return self._statistics[operations]

    def worth(self, operations: Operations) -> float:
        """The reward of the mask after the operations, in [0, 1]."""
        return self._value(operations)[0]

    def dice(self, operations: Operations) -> float:
        """Dice of the mask after the operations; the image is labelled."""
        gold = self._value(operations)[1]
        assert gold is not None
        return gold

    def score(self, operations: Operations) -> float:
        """The reward network's score of the mask after the operations; there is a network."""
        return self._score(self.mask(operations))

    def reward_of(self, mask: np.ndarray) -> float:
        """The reward of a mask, bool (H, W), in [0, 1].

        Raises:
            ValueError: the reward needs a true mask, and the image has none.
        """
        if self.reward == "net":
            return self._score(mask)
        truth = self.truth if self.rewarded_by is None else self.rewarded_by
        if truth is None:
            raise ValueError(f"{self.sample_id}: reward {self.reward} needs a true mask; use --reward net")
        return LABEL_REWARDS[self.reward](mask, truth)

    def _score(self, mask: np.ndarray) -> float:
        assert self.scorer is not None
        score = self.scorer.quality(mask[None].astype(np.float32))["score"][0]
        return float(np.nan_to_num(score))  # without a number no mask is better than another

    def _value(self, operations: Operations) -> tuple[float, float | None]:
        """Reward and Dice."""
        if operations not in self._values:
            mask = self.mask(operations)
            gold = None if self.truth is None else LABEL_REWARDS["dice"](mask, self.truth)
            same = gold is not None and self.reward == "dice" and self.rewarded_by is None
            self._values[operations] = (gold if same and gold is not None else self.reward_of(mask), gold)
        return self._values[operations]
