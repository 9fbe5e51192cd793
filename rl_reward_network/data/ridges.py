"""Strength of tubes, such as vessels, at every pixel of an image."""

from collections.abc import Sequence

import numpy as np
from skimage import feature


def ridge_strength(grey: np.ndarray, sigmas: Sequence[float]) -> np.ndarray:
    """Sato's tubeness of dark and of bright tubes.

    Equal to two calls of `skimage.filters.sato`, which would compute the second derivatives twice.

    Args:
        grey: float (H, W).
        sigmas: radii of the tubes, in pixels.

    Returns:
        float (2, H, W), at least 0: dark tubes, then bright ones.
    """
    strongest = np.zeros((2, *grey.shape))
    for sigma in sigmas:
        hessian = feature.hessian_matrix(grey, sigma, mode="reflect", use_gaussian_derivatives=True)
        largest, smallest = feature.hessian_matrix_eigvals(hessian)
        np.maximum(strongest, sigma**2 * np.stack([largest, -smallest]), out=strongest)
    return strongest
