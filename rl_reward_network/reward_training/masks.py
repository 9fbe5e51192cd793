"""The masks on which a reward network is calibrated and tested, by source: each is wrong in another way.

Each family of damage is a pure function of a mask bool (H, W) and a random generator; an empty result is kept.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import ndimage
from skimage import color, draw, filters, morphology
from tqdm import tqdm

from rl_reward_network.data.images import ridge_strength
from rl_reward_network.data.items import Sample
from rl_reward_network.inputs.loading import RunInputs
from rl_reward_network.rewards.metrics import dice

SHIFT = "shift"
SEGMENTER, DAMAGED, SHIFTED, RIDGE = "Sa2VA", "damaged true masks", "shifted true masks", "ridge filter"
OWN = "own segmentation"  # of the reward network: the mask that shares all of its errors
SOURCES = (SEGMENTER, DAMAGED, SHIFTED, RIDGE, OWN)
OTSU_FACTORS = (0.6, 1.0, 1.5)
RIDGE_SIGMAS = (1, 2, 3)  # pixels

Damage = Callable[[np.ndarray, np.random.Generator], np.ndarray]


class RewardExample(NamedTuple):
    """One labelled image uint8 (H, W, 3), its truth bool (H, W), and the segmenter's masks of it."""

    image: np.ndarray
    truth: np.ndarray
    masks: np.ndarray
    """bool (P, H, W), one per prompt, the default prompt first; P may be 0."""


def reward_examples(inputs: RunInputs, samples: Sequence[Sample], desc: str) -> Iterator[RewardExample]:
    """Labelled samples with every prompt's mask, one image in memory at a time; `desc` names the progress bar."""
    for sample in tqdm(samples, desc=desc, unit="image"):
        image = sample.load_image()
        yield RewardExample(image, true_mask(sample), inputs.probabilities(image) > 0.5)


def true_mask(sample: Sample) -> np.ndarray:
    """bool (H, W), of a labelled sample."""
    truth = sample.load_mask()
    assert truth is not None, "only labelled samples are picked"
    return truth


def source_masks(
    example: RewardExample,
    rng: np.random.Generator,
    count: int,
    sources: Sequence[str] = SOURCES,
    own: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Masks of a whole image by source, bool (n, H, W): `count` for each kind of damage, all of the other sources.

    `own`, bool (H, W), is the network's own segmentation, which the source `OWN` needs.
    """
    make = {
        SEGMENTER: lambda: example.masks,
        DAMAGED: lambda: np.stack([damage(example.truth, rng, OTHER_FAMILIES) for _ in range(count)]),
        SHIFTED: lambda: np.stack([DAMAGES[SHIFT](example.truth, rng) for _ in range(count)]),
        RIDGE: lambda: ridge_masks(example.image),
        OWN: lambda: np.stack([own]),  # type: ignore[list-item]  # given where it is asked for
    }
    return {name: make[name]() for name in sources}


def true_dice(masks: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Dice float64 (n,) of masks bool (n, H, W) of one image with truth bool (H, W)."""
    return dice(masks, np.broadcast_to(truth, masks.shape))


def dilate(mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The mask grown by 1 to 4 pixels."""
    return ndimage.binary_dilation(mask, morphology.disk(rng.integers(1, 5)))


def erode(mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The mask shrunk by 1 or 2 pixels, but not from the image border; thin parts disappear."""
    return ndimage.binary_erosion(mask, morphology.disk(rng.integers(1, 3)), border_value=1)


def drop_branches(mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The mask without a random 10 to 80 % of its branches (whole components where there are no branches)."""
    if not mask.any():
        return mask.copy()
    skeleton = morphology.skeletonize(mask)
    neighbours = ndimage.convolve(skeleton.astype(np.uint8), np.ones((3, 3), dtype=np.uint8), mode="constant")
    forks = ndimage.binary_dilation(skeleton & (neighbours > 3), np.ones((3, 3)))
    branches, count = ndimage.label(skeleton & ~forks, np.ones((3, 3)))
    if count == 0:  # a skeleton of forks only
        branches, count = ndimage.label(mask, np.ones((3, 3)))
    nearest = ndimage.distance_transform_edt(branches == 0, return_distances=False, return_indices=True)
    dropped = rng.random(count + 1) < rng.uniform(0.1, 0.8)
    dropped[rng.integers(1, count + 1)] = True
    return mask & ~dropped[branches[tuple(nearest)]]


def shift(mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The mask moved by 1 to 8 pixels along each axis; the border is padded with edge values."""
    reach = [min(int(distance), size) for distance, size in zip(rng.integers(1, 9, 2), mask.shape, strict=True)]
    top, left = (2 * distance * int(rng.integers(0, 2)) for distance in reach)
    padded = np.pad(mask, [(distance, distance) for distance in reach], mode="edge")
    return padded[top : top + mask.shape[0], left : left + mask.shape[1]].copy()


def cut_out(mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The mask with 1 to 5 elliptic holes of 5 to 25 % of the image size, centred on the object."""
    result, pixels = mask.copy(), np.argwhere(mask)
    for _ in range(rng.integers(1, 6) if len(pixels) else 0):
        centre = pixels[rng.integers(len(pixels))]
        result[_ellipse(mask.shape, centre, rng.uniform(0.05, 0.25, 2))] = False
    return result


def false_blobs(mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The mask with 1 to 5 elliptic blobs of 2 to 15 % of the image size, anywhere."""
    result = mask.copy()
    for _ in range(rng.integers(1, 6)):
        result[_ellipse(mask.shape, rng.integers(0, mask.shape), rng.uniform(0.02, 0.15, 2))] = True
    return result


def false_tubes(mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The mask with 1 to 4 curved tubes of 1 to 7 pixels width, such as a catheter or a rib edge."""
    tubes = np.zeros_like(mask)
    for _ in range(rng.integers(1, 5)):
        (r0, c0), (r1, c1), (r2, c2) = rng.integers(0, mask.shape, (3, 2)).tolist()
        tubes[draw.bezier_curve(r0, c0, r1, c1, r2, c2, weight=1, shape=mask.shape)] = True
    return mask | ndimage.binary_dilation(tubes, morphology.disk(rng.integers(0, 4)))


DAMAGES: Mapping[str, Damage] = {
    "dilate": dilate,
    "erode": erode,
    "drop_branches": drop_branches,
    "shift": shift,
    "cut_out": cut_out,
    "false_blobs": false_blobs,
    "false_tubes": false_tubes,
}
OTHER_FAMILIES = {name: family for name, family in DAMAGES.items() if name != SHIFT}


def damage(mask: np.ndarray, rng: np.random.Generator, families: Mapping[str, Damage] = DAMAGES) -> np.ndarray:
    """The mask, bool (H, W), after one to three different families of damage in random order."""
    for name in rng.permutation(sorted(families))[: rng.integers(1, 4)]:
        mask = families[name](mask, rng)
    return mask


def ridge_masks(image: np.ndarray) -> np.ndarray:
    """Masks without network or label: Sato's ridge filter at three thresholds around Otsu's, bool (6, H, W).

    Of an image uint8 (H, W, 3): dark tubes (X-ray contrast, retina), then bright ones, each from the lowest threshold
    to the highest; empty for an image without ridges.
    """
    both = ridge_strength(color.rgb2gray(image), RIDGE_SIGMAS)
    return np.stack([ridges > factor * filters.threshold_otsu(ridges) for ridges in both for factor in OTSU_FACTORS])


def _ellipse(shape: tuple[int, ...], centre: np.ndarray, radii: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pixels of an ellipse; `radii` are shares of the shorter side, at least one pixel."""
    rows, columns = np.maximum(radii * min(shape), 1)
    return draw.ellipse(centre[0], centre[1], rows, columns, shape=shape)
