"""Names that compete for an image: what their classes rule out, in the losses and in the answers.

Classes without a common category are rivals: a pixel belongs to one of them at most. In training each of their masks
has two losses, alone and against its rivals. Classes that no image shows together exclude each other: of the answers
about an image the one with the largest clear area stays, and the masks that it excludes are emptied. A name that is
asked alone wins nothing and loses nothing. `data/names.py` says which classes are which.

Axes: K names of one image.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rl_reward_network.data.names import NamedClass
from rl_reward_network.grpo.prompts import TrainingItem, of_one_image

FINEST = 512  # pixels along an axis, above which areas are those of every second pixel, or fewer
LARGEST = 60.0  # of a rival's logit, far below where float32 ends
CERTAIN = 1e-7  # a probability is at least this far from 0 and 1
Classes = Sequence[NamedClass | None]


def rivals(classes: Classes) -> np.ndarray:
    """bool (K, K): whether no pixel belongs to both; never of an unknown class."""
    return np.array([[bool(a and b and a.is_rival(b)) for b in classes] for a in classes])


def contested(logits: Tensor, rival: np.ndarray) -> Tensor:
    """float32 (K, h, w), differentiable: the log-odds of each name against the background and all its rivals.

    From logits (K, h, w), the log-odds against the background alone. Without rivals these are unchanged.
    """
    logits = logits.float()
    highest = logits.detach().amax(dim=0).clamp(0, LARGEST)  # so that no exponential overflows
    odds = (logits.clamp(max=LARGEST) - highest).exp()  # one exponential for each name, not for each pair
    with torch.autocast(logits.device.type, enabled=False):
        others = torch.einsum("kj,jhw->khw", torch.from_numpy(rival).to(logits), odds)
    return logits - highest - (others + (-highest).exp()).log()


def clear_areas(soft: Sequence[np.ndarray], rival: np.ndarray) -> np.ndarray:
    """float64 (K,): share of the pixels where a name is more probable than its rivals and the background together.

    From probabilities float32 (K, H, W) against the background alone.
    """
    stride = max(1, max(soft[0].shape) // FINEST)
    p = np.stack([one[::stride, ::stride] for one in soft]).astype(np.float64).clip(CERTAIN, 1 - CERTAIN)
    odds = p / (1 - p)
    return np.asarray((odds > 1 + np.einsum("kj,jhw->khw", rival, odds)).mean(axis=(1, 2)))


def ruled_out(soft: Sequence[np.ndarray], classes: Classes, threshold: float = 0.5) -> np.ndarray:
    """bool (K,): which masks are emptied, since a class with a larger clear area excludes theirs.

    Of equal clear areas, such as none, the larger mask counts; an empty one excludes nothing. From probabilities
    float32 (K, H, W) against the background alone; a mask is where they are above `threshold`.
    """
    out = np.zeros(len(classes), dtype=bool)
    excludes = np.array([[bool(a and b and a.excludes(b)) for b in classes] for a in classes])
    if not excludes.any():
        return out
    areas = np.array([(one > threshold).mean() for one in soft])
    for row in np.lexsort((-areas, -clear_areas(soft, rivals(classes)))):
        if areas[row] and not out[row]:
            out |= excludes[row]
    return out


def without_excluded(
    prompts: Sequence[TrainingItem], soft: Sequence[np.ndarray | None], threshold: float = 0.5
) -> list[np.ndarray | None]:
    """The soft masks, 0 where another name of the same image rules theirs out."""
    kept = list(soft)
    for rows in of_one_image(prompts):
        asked = [(row, mask) for row in rows if (mask := soft[row]) is not None]
        out = ruled_out([mask for _, mask in asked], [prompts[row].named for row, _ in asked], threshold)
        for (row, mask), is_out in zip(asked, out, strict=True):
            kept[row] = np.zeros_like(mask) if is_out else mask
    return kept
