"""Suspected leaks: nearly identical images in two groups, by the correlation of small grey thumbnails."""

import numpy as np
from PIL import Image

SIDE = 32  # of a thumbnail, in pixels
SUSPECT = 0.97  # correlation; the frames of one series reach it, two patients seldom
BLOCK = 1000  # rows of the correlation matrix at once


def thumbnail(image: np.ndarray) -> np.ndarray:
    """float32 (SIDE * SIDE,) of mean 0 and norm 1 (0 of a blank image): grey, squeezed to a square.

    Args:
        image: uint8 (H, W, 3), uint8 (H, W) or uint16 (H, W).
    """
    grey = image.mean(axis=2, dtype=np.float32) if image.ndim == 3 else image.astype(np.float32)
    small = np.asarray(Image.fromarray(grey).resize((SIDE, SIDE), Image.Resampling.BOX)).ravel()
    centred = small - small.mean()
    norm = float(np.linalg.norm(centred))
    return centred / norm if norm > 1e-3 * SIDE else np.zeros_like(centred)


def suspected_leaks(
    thumbnails: np.ndarray, groups: list[str], limit: int = 10
) -> tuple[int, list[tuple[int, int, float]]]:
    """Pairs of images of two groups whose thumbnails correlate above `SUSPECT`.

    Args:
        thumbnails: float32 (N, SIDE * SIDE) as `thumbnail` gives them.
        groups: N group names.
        limit: pairs that are returned.

    Returns:
        The number of pairs, and the most similar ones: (index, index, correlation).
    """
    _, numbers = np.unique(groups, return_inverse=True)
    count, pairs = 0, list[tuple[int, int, float]]()
    for start in range(0, len(thumbnails), BLOCK):
        likeness = thumbnails[start : start + BLOCK] @ thumbnails[start:].T  # (rows, N - start)
        rows, columns = np.nonzero(np.triu(likeness > SUSPECT, 1))
        other = numbers[start + rows] != numbers[start + columns]
        rows, columns = rows[other], columns[other]
        count += len(rows)
        values = likeness[rows, columns]
        for best in np.argsort(-values, kind="stable")[:limit]:
            pairs.append((int(start + rows[best]), int(start + columns[best]), float(values[best])))
    return count, sorted(pairs, key=lambda pair: -pair[2])[:limit]
