"""Names that compete for an image: what their classes rule out, in the losses and in the answers.

Classes without a common category are rivals: a pixel belongs to one of them at most. In training their masks are asked
twice, by themselves and against their rivals. Classes that no image shows together exclude each other: of the answers
to all names of an image the clearest stays, and empties the masks of those that it excludes. Alone, a name wins nothing
and loses nothing. `data/names.py` says which classes are which.

Axes: K names of one image.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rl_reward_network.data.names import NamedClass
from rl_reward_network.grpo.prompts import TrainingItem, of_one_image

MOST_PIXELS = 512  # along an axis: areas need no more
LARGEST = 60.0  # a logit beyond which float32 would lose the background
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
    others = torch.einsum(
        "kj,jhw->khw", torch.from_numpy(rival).to(logits), (logits - highest).exp()
    )  # one exponential for each name, not for each pair
    return logits - highest - (others + (-highest).exp()).log()


def clear_areas(soft: Sequence[np.ndarray], rival: np.ndarray) -> np.ndarray:
    """float64 (K,): share of the pixels where a name is more probable than its rivals and the background together.

    From probabilities float32 (K, H, W) against the background alone.
    """
    stride = max(1, max(soft[0].shape) // MOST_PIXELS)
    logits = torch.logit(torch.from_numpy(np.stack([one[::stride, ::stride] for one in soft])), eps=1e-6)
    return (contested(logits, rival) > 0).double().mean(dim=(1, 2)).numpy()


def ruled_out(soft: Sequence[np.ndarray], classes: Classes) -> np.ndarray:
    """bool (K,): which masks are emptied, since a class with a larger clear area excludes theirs.

    From probabilities float32 (K, H, W) against the background alone.
    """
    out = np.zeros(len(classes), dtype=bool)
    excludes = np.array([[bool(a and b and a.excludes(b)) for b in classes] for a in classes])
    if not excludes.any():
        return out
    areas = clear_areas(soft, rivals(classes))
    for row in np.argsort(-areas, kind="stable"):
        if areas[row] and not out[row]:
            out |= excludes[row]
    return out


def without_excluded(prompts: Sequence[TrainingItem], soft: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """The soft masks, 0 where another name of the same image rules theirs out."""
    kept = list(soft)
    for rows in of_one_image(prompts):
        asked = [(row, mask) for row in rows if (mask := soft[row]) is not None]
        out = ruled_out([mask for _, mask in asked], [prompts[row].named for row, _ in asked])
        for (row, mask), is_out in zip(asked, out, strict=True):
            kept[row] = np.zeros_like(mask) if is_out else mask
    return kept
