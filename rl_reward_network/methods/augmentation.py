"""Test-time augmentation: the mean over flips and scales of the image."""

from collections.abc import Iterator

import numpy as np

from rl_reward_network.methods.view import ImageView, Trained

FLIPS = {"left-right": (1,), "up-down": (0,), "both": (0, 1)}
ZOOM = 5 / 8  # side of a magnified quarter of the image; neighbours overlap by a quarter


def flips_and_scales(view: ImageView, trained: Trained, parameter: float | None) -> np.ndarray:
    """The mean of the soft masks of the image, its three flips, and its four quarters magnified.

    Where quarters overlap, their mean counts; together they count as one of the five.
    """
    prompt = trained.prompts[:1]
    total = view.soft(prompt)[0].copy()
    for name, axes in FLIPS.items():
        copy = np.ascontiguousarray(np.flip(view.image, axes))
        total += np.flip(view.soft_of(copy, prompt, name)[0], axes)
    magnified, count = np.zeros(view.size, np.float32), np.zeros(view.size, np.float32)
    for number, (rows, cols) in enumerate(quarters(view.size)):
        copy = np.ascontiguousarray(view.image[rows, cols])  # Sa2VA magnifies it to its input size
        magnified[rows, cols] += view.soft_of(copy, prompt, f"quarter {number}")[0]
        count[rows, cols] += 1
    return np.asarray((total + magnified / count) / 5)


def quarters(size: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of the four overlapping quarters of an image of size (H, W), which cover it."""
    sides = [(slice(0, round(ZOOM * length)), slice(length - round(ZOOM * length), length)) for length in size]
    yield from ((rows, cols) for rows in sides[0] for cols in sides[1])
