"""Experiment 2: operations on a soft mask, and the search for the sequences of operations that a policy chooses from.

Sizes are shares of the image's longer side. The mask is always where the soft mask is above 0.5.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import cv2
import numpy as np
from scipy.special import expit, logit

from rl_reward_network.env.observation import EdgeFeatures
from rl_reward_network.report.statistics import group_means

Edits = tuple[str, ...]
"""Names of operations, in the order in which they are applied; one may be `THRESHOLD_AT` and a number."""
THRESHOLD_AT = "threshold at "
SMALL_SHARE = 1e-3  # of the image: smaller components are dropped
HOLE_SHARE = 5e-3  # of the image: larger holes are not filled
LOGIT_STEP = 1.0  # shift by one threshold operation
SURE = 1e-4  # soft masks are kept this far from 0 and 1 where logits are taken
STRONG_RIDGE = 0.5  # of the median tubeness inside the mask
ADDED = 0.75  # least soft value of a pixel that is added
KEPT = 24  # soft masks in memory for each image; others are computed again from the nearest kept one
EDGE_RADIUS, EDGE_EPSILON = 3, 1e-3  # units; variance of grey levels in [0, 1] that counts as an edge
THRESHOLDS = (0.01, 0.02, *(round(0.05 * step, 2) for step in range(1, 20)), 0.98, 0.99)
BEAM = 3  # sequences kept at each length
LEAST_GAIN = 1e-4  # of the mean reward: an operation must gain more
MOST_SEQUENCES = 12  # found by search, besides the best threshold


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
OPERATIONS = tuple(_FUNCTIONS)


def apply_operation(name: str, guide: EdgeFeatures, soft: np.ndarray) -> np.ndarray:
    """The soft mask, float32 (H, W) in [0, 1], after one of `OPERATIONS`, or after `THRESHOLD_AT` a number in (0, 1).

    `soft`, of the same form, is not changed. The result is rounded to float16, unless the operation is a threshold.
    """
    if name.startswith(THRESHOLD_AT):  # both sides of it are stretched to the halves of [0, 1]
        best = float(np.float32(name.removeprefix(THRESHOLD_AT)))  # as float32 masks are compared
        wide = soft.astype(np.float64)
        above = np.maximum(0.5 + (wide - best) / (1 - best) / 2, np.nextafter(np.float32(0.5), np.float32(1)))
        return np.where(wide > best, above, wide / best / 2).astype(np.float32)
    return _FUNCTIONS[name](guide, soft).astype(np.float16).astype(np.float32)  # so that half of the memory keeps it


def words(sequence: Sequence[str]) -> str:
    """A sequence in words."""
    return ", ".join(sequence) or "none"


@dataclass(eq=False, repr=False)
class EditedImage:
    """An image and its soft mask; the mask after any operations and its reward, each computed once.

    `soft` is Sa2VA's, float32 (H, W) in [0, 1]; `reward_of` gives the reward in [0, 1] of a mask bool (H, W).
    """

    guide: EdgeFeatures
    soft: np.ndarray
    reward_of: Callable[[np.ndarray], float] = lambda mask: 0.0
    group_id: str = ""
    _rewards: dict[Edits, float] = field(default_factory=dict, init=False)
    _softs: OrderedDict[Edits, np.ndarray] = field(default_factory=OrderedDict, init=False)

    def edited(self, sequence: Edits) -> np.ndarray:
        """float32 (H, W): the soft mask after the operations."""
        if not sequence:
            return self.soft
        if sequence not in self._softs:
            after = apply_operation(sequence[-1], self.guide, self.edited(sequence[:-1]))
            self._softs[sequence] = after if sequence[-1].startswith(THRESHOLD_AT) else after.astype(np.float16)
            if len(self._softs) > KEPT:
                self._softs.popitem(last=False)
            return after
        return self._softs[sequence].astype(np.float32)

    def mask(self, sequence: Edits) -> np.ndarray:
        """bool (H, W): the mask after the operations."""
        return self.edited(sequence) > 0.5

    def reward(self, sequence: Edits) -> float:
        """The reward of the mask after the operations."""
        if sequence not in self._rewards:
            self._rewards[sequence] = self.reward_of(self.mask(sequence))
        return self._rewards[sequence]


def find_sequences(images: Sequence[EditedImage], length: int) -> tuple[Edits, ...]:
    """What a policy chooses from: no operation, the best threshold, the best sequence for all images, and others.

    The others are what is greedy on an image, and beginnings of it. They are added one by one, the next being the one
    that raises the mean reward of the best sequence of each image most. None has more than `length` operations.
    """
    fixed = next(iter(best_sequences(images, length)))
    found = [greedy(image.reward, length) for image in images]
    candidates = sorted({one[:end] for one in found for end in range(1, len(one) + 1)} - {fixed})
    chosen = list(dict.fromkeys([(), fixed]))
    best = _table(images, chosen).max(axis=1)
    table = _table(images, candidates)
    while len(chosen) < MOST_SEQUENCES and candidates:
        gains = np.maximum(table - best[:, None], 0).mean(axis=0)
        place = int(gains.argmax())
        if gains[place] == 0:
            break
        chosen.append(candidates[place])
        best = np.maximum(best, table[:, place])
    return ((), (f"{THRESHOLD_AT}{best_threshold(images):g}",), *chosen[1:])


def _table(images: Sequence[EditedImage], sequences: Sequence[Edits]) -> np.ndarray:
    return np.array([[image.reward(one) for one in sequences] for image in images]).reshape(len(images), -1)


def best_threshold(images: Sequence[EditedImage]) -> float:
    """The threshold of `THRESHOLDS` with the highest mean reward over patients; 0.5 where several are equal."""
    order = sorted(THRESHOLDS, key=lambda threshold: abs(threshold - 0.5))
    rewards = np.array([[image.reward_of(image.soft > threshold) for threshold in order] for image in images])
    return order[int(_means(images, rewards).argmax())]


def best_sequences(images: Sequence[EditedImage], length: int) -> dict[Edits, float]:
    """Mean reward over patients of every fixed sequence that a beam search visits, the best first."""

    def values(sequences: Sequence[Edits]) -> dict[Edits, float]:
        return dict(zip(sequences, _means(images, _table(images, sequences)).tolist(), strict=True))

    visited = values([()])
    beam: list[Edits] = [()]
    for _ in range(length):
        new: list[Edits] = [(*old, name) for old in beam for name in OPERATIONS]
        visited |= values(new)
        beam = sorted(new, key=lambda sequence: -visited[sequence])[:BEAM]
    return dict(sorted(visited.items(), key=lambda item: (LEAST_GAIN * len(item[0]) - item[1], item[0])))


def _means(images: Sequence[EditedImage], rewards: np.ndarray) -> np.ndarray:
    """float64 (P,): means over patients of rewards, (N, P)."""
    return group_means(rewards.T, [image.group_id for image in images]).mean(axis=-1)


def greedy(reward: Callable[[Edits], float], length: int) -> Edits:
    """The sequence of operations each of which is worth most, until none is worth more than stopping."""
    sequence: Edits = ()
    for _ in range(length):
        options = [(*sequence, name) for name in OPERATIONS]
        best = max(options, key=reward)
        if reward(best) <= reward(sequence):
            break
        sequence = best
    return sequence
