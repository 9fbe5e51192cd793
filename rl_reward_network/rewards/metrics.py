"""Metrics of binary masks against true masks, pair by pair, the one table of them, `METRICS`, and METEOR of captions.

To add a metric, write its function here and add an entry to `METRICS`: docs/how-to/another-metric.md has an example.

All functions of masks take the predicted and the true masks, bool (N, H, W) of one shape, and return float64 (N,). They
raise a ValueError if the shapes differ, a mask has no pixel, or it is not bool (threshold probabilities first). N may
be 0.

Empty masks, for all overlaps (Dice, IoU, recall, precision, clDice): if prediction and target are both empty the value
is 1, if only one is empty it is 0. An empty prediction therefore has precision 0, which would be undefined otherwise.
"""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from zipfile import BadZipFile

import cv2
import numpy as np

FAILED = 0.1  # Dice; a mask below has missed the object
PERCENT = 95  # of the distances of `hd95`
CALIBRATION_BINS = 15
ROUNDING = 1e-5  # of a mean of float32 probabilities beyond 1
NO_SYNONYMS = SimpleNamespace(synsets=lambda word: [])  # NLTK calls no other method of a WordNet
_CROSS = cv2.getStructuringElement(cv2.MORPH_CROSS, (3, 3))


def dice(pred: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Dice of each pair, 2 |pred & target| / (|pred| + |target|), in [0, 1]."""
    both, predicted, true = _counts(pred, target)
    return _ratio(2 * both, predicted + true, predicted, true)


def failure(pred: np.ndarray, target: np.ndarray) -> np.ndarray:
    """1 where the Dice of a pair is below 0.1, else 0: the mean over patients is the failure rate."""
    return failed(dice(pred, target))


def failed(values: np.ndarray) -> np.ndarray:
    """`failure` of Dice values of any shape, float64."""
    return (values < FAILED).astype(np.float64)


def iou(pred: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Intersection over union of each pair, |pred & target| / |pred | target|, in [0, 1]."""
    both, predicted, true = _counts(pred, target)
    return _ratio(both, predicted + true - both, predicted, true)


def precision(pred: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Share of the predicted pixels that are true, |pred & target| / |pred|, in [0, 1]."""
    both, predicted, true = _counts(pred, target)
    return _ratio(both, predicted, predicted, true)


def recall(pred: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Share of the true pixels that are predicted, |pred & target| / |target|, in [0, 1]."""
    both, predicted, true = _counts(pred, target)
    return _ratio(both, true, predicted, true)


def cldice(pred: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Centreline Dice of each pair, 2ps / (p + s), in [0, 1]; insensitive to width, sensitive to broken branches.

    p is the share of the prediction's skeleton inside the target, s the share of the target's skeleton inside the
    prediction.

    Source: Shit et al., clDice, CVPR 2021, equations 1 to 3; skeletons by `skimage.morphology.skeletonize`.
    """
    from skimage.morphology import skeletonize  # takes half a second to import, and --help needs the table of rewards

    check_masks(pred, target)
    different = {mask.tobytes(): mask for mask in (*pred, *target)}  # each different mask is thinned once
    skeletons = {key: skeletonize(np.array(mask)) for key, mask in different.items()}  # it refuses read-only views

    def of_pair(pred: np.ndarray, target: np.ndarray) -> float:
        if not pred.any() or not target.any():
            return float(pred.any() == target.any())
        thin, true_thin = skeletons[pred.tobytes()], skeletons[target.tobytes()]
        precision, sensitivity = (thin & target).sum() / thin.sum(), (true_thin & pred).sum() / true_thin.sum()
        return float(2 * precision * sensitivity / max(precision + sensitivity, 1e-12))

    return _pair_by_pair(of_pair, pred, target)


def hd95(pred: np.ndarray, target: np.ndarray) -> np.ndarray:
    """95th percentile of the Hausdorff distance of each pair, in pixels: the larger of both directions.

    A direction is the 95th percentile, linearly interpolated, of the Euclidean distances from each boundary pixel of
    one mask to the nearest boundary pixel of the other. A boundary pixel is a foreground pixel with a background pixel
    among its 4 neighbours; outside the image is background. Equal to monai's
    `compute_hausdorff_distance(..., percentile=95)`.

    Empty masks: if both are empty the distance is 0. If only one is empty it is undefined. There are two common
    conventions: NaN (monai: infinity or NaN), which leaves the image out of means and so rewards a method that finds
    nothing, or the diagonal of the image. Here it is the diagonal, sqrt(H^2 + W^2), and every image counts.
    """

    def of_pair(pred: np.ndarray, target: np.ndarray) -> float:
        if not pred.any() or not target.any():
            return 0.0 if pred.any() == target.any() else float(np.hypot(*pred.shape))
        first, second = boundary(pred), boundary(target)
        distances = (_distances(first, second), _distances(second, first))
        return max(float(np.percentile(one, PERCENT)) for one in distances)

    return _pair_by_pair(of_pair, pred, target)


def boundary(mask: np.ndarray) -> np.ndarray:
    """bool (H, W): pixels of a bool (H, W) mask with a 4-neighbour outside the mask or outside the image."""
    pixels = mask.astype(np.uint8)
    inside = cv2.erode(pixels, _CROSS, borderType=cv2.BORDER_CONSTANT, borderValue=(0, 0, 0, 0))
    return mask & (inside == 0)


def _distances(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """float32 (N,): the distance from each pixel of `start` to the nearest of `end`, both bool (H, W)."""
    return cv2.distanceTransform((~end).astype(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_PRECISE)[start]


def betti0_error(pred: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Difference in the number of components (Betti-0) of each pair, a whole number >= 0.

    The foreground is 8-connected and the background 4-connected, so that a diagonal line of pixels is one component and
    closes a loop. The whole image is counted, not windows of it. An empty mask has no component and no hole.
    """
    return _pair_by_pair(lambda a, b: abs(components(a) - components(b)), pred, target)


def betti1_error(pred: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Difference in the number of holes (Betti-1) of each pair, a whole number >= 0; otherwise as `betti0_error`."""
    return _pair_by_pair(lambda a, b: abs(holes(a) - holes(b)), pred, target)


def betti_match(pred: np.ndarray, target: np.ndarray) -> np.ndarray:
    """1 / (1 + Betti-0 error + Betti-1 error) of each pair, in (0, 1]: 1 where both numbers are right."""
    return 1 / (1 + betti0_error(pred, target) + betti1_error(pred, target))


def one_tree(masks: np.ndarray) -> np.ndarray:
    """How nearly each mask, bool (N, H, W), is one connected tree without loops, in [0, 1]; needs no true mask.

    1 / (1 + further components + holes), as counted by `betti0_error`; 0 for an empty mask. It knows nothing of the
    image: a single pixel has 1, so it is a term beside others.
    """
    check_masks(masks, masks)
    return np.array([1 / (components(mask) + holes(mask)) if mask.any() else 0.0 for mask in masks], dtype=np.float64)


def calibration_error(soft: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Expected calibration error of each soft mask, float (N, H, W) in [0, 1], in [0, 1]; lower is better.

    The pixels of an image are sorted into 15 bins of equal width by their foreground probability; the error is the mean
    over pixels of the distance between the mean probability of a bin and the share of its pixels that are true. As most
    pixels are surely background, values are small; they compare methods on the same images.

    Source: Naeini et al., AAAI 2015; Guo et al., "On Calibration of Modern Neural Networks" (arXiv 1706.04599).
    """
    check_masks(target, target)
    if soft.shape != target.shape:
        raise ValueError(f"soft masks must have the shape of the true ones, {target.shape}, got {soft.shape}")
    if not ((soft >= -ROUNDING) & (soft <= 1 + ROUNDING)).all():
        raise ValueError(f"soft masks must be in [0, 1], got {soft.min()} to {soft.max()}; give probabilities")

    def of_pair(soft: np.ndarray, target: np.ndarray) -> float:
        probs = np.clip(soft.ravel().astype(np.float64), 0, 1)
        bins = np.minimum((probs * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
        sums = np.bincount(bins, probs, CALIBRATION_BINS) - np.bincount(bins, target.ravel(), CALIBRATION_BINS)
        return float(np.abs(sums).sum() / probs.size)

    return np.array([of_pair(*pair) for pair in zip(soft, target, strict=True)], dtype=np.float64)


def components(mask: np.ndarray) -> int:
    """Number of 8-connected components of the foreground of a bool (H, W) mask."""
    return int(cv2.connectedComponents(mask.astype(np.uint8), connectivity=8)[0]) - 1  # the label 0 is counted, too


def holes(mask: np.ndarray) -> int:
    """Number of 4-connected components of the background of a bool (H, W) mask, without the one around the image."""
    background = np.pad(~mask, 1, constant_values=True)
    return int(cv2.connectedComponents(background.astype(np.uint8), connectivity=4)[0]) - 2


def _pair_by_pair(
    function: Callable[[np.ndarray, np.ndarray], float], pred: np.ndarray, target: np.ndarray
) -> np.ndarray:
    check_masks(pred, target)
    return np.array([function(*pair) for pair in zip(pred, target, strict=True)], dtype=np.float64)


def _counts(pred: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels in both masks, in `pred`, in `target`: each int (N,)."""
    check_masks(pred, target)
    both, predicted, true = (np.count_nonzero(x, axis=(1, 2)) for x in (pred & target, pred, target))
    return both, predicted, true


def check_masks(pred: np.ndarray, target: np.ndarray) -> None:
    """Raise a ValueError unless two stacks of masks are bool (N, H, W) of one shape, H and W 1 or more."""
    if pred.shape != target.shape or pred.ndim != 3:
        raise ValueError(f"masks must share one (N, H, W) shape, got {pred.shape} and {target.shape}")
    if 0 in pred.shape[1:]:
        raise ValueError(f"masks must have pixels, got (N, H, W) = {pred.shape}; check how they were cut out")
    if pred.dtype != bool or target.dtype != bool:
        raise ValueError(f"masks must be bool, got {pred.dtype} and {target.dtype}; threshold probabilities first")


def _ratio(part: np.ndarray, whole: np.ndarray, predicted: np.ndarray, true: np.ndarray) -> np.ndarray:
    """part / whole, and 1 where both masks are empty; `part` is 0 wherever `whole` is."""
    return np.where(predicted + true == 0, 1.0, part / np.maximum(whole, 1))


@dataclass(frozen=True)
class Metric:
    """What is known about a metric; see `METRICS`."""

    title: str
    """Of its column."""
    function: Callable[[np.ndarray, np.ndarray], np.ndarray]
    """Predicted and true masks, bool (N, H, W), to float64 (N,)."""
    higher_is_better: bool = True
    highest: float | None = 1.0
    """Upper limit of its range, which starts at 0; None without."""
    unit: str = ""
    """Such as "pixels"; empty for a ratio or a number."""
    main: bool = False
    """Whether it stands in the first table of a comparison and in table.tex."""
    in_training: bool = False
    """Whether GRPO measures it in its validation and evaluation, too; thinning and distances take long."""
    note: str = ""
    """What a reader of the table must know, empty masks included; empty for the rule of overlaps."""

    @property
    def column(self) -> str:
        """Title of its column, with the unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    @property
    def is_reward(self) -> bool:
        """Whether PPO and GRPO can be rewarded by it: in [0, 1], and higher is better."""
        return self.higher_is_better and self.highest == 1


METRICS = {
    "dice": Metric("Dice", dice, main=True, in_training=True),
    "failure": Metric(
        "failure rate",
        failure,
        higher_is_better=False,
        in_training=True,
        note=f"The failure rate is the share of the images with a Dice below {FAILED}.",
    ),
    "iou": Metric("IoU", iou, in_training=True),
    "recall": Metric("recall", recall, main=True, in_training=True),
    "precision": Metric("precision", precision, main=True, in_training=True),
    "cldice": Metric("clDice", cldice),
    "hd95": Metric(
        "HD95",
        hd95,
        higher_is_better=False,
        highest=None,
        unit="pixels",
        note="HD95 of two empty masks is 0, of one the diagonal of the image.",
    ),
    "betti0": Metric(
        "Betti-0 error",
        betti0_error,
        higher_is_better=False,
        highest=None,
        note="Betti-0 error: difference in the number of connected components (8-connected foreground) over the whole "
        "image.",
    ),
    "betti1": Metric(
        "Betti-1 error",
        betti1_error,
        higher_is_better=False,
        highest=None,
        note="Betti-1 error: difference in the number of holes (4-connected background) over the whole image.",
    ),
}


def mask_metrics(pred: np.ndarray, target: np.ndarray) -> dict[str, float]:
    """All of `METRICS` for one predicted and one true mask, bool (H, W); raises as they do."""
    return {name: float(metric.function(pred[None], target[None])[0]) for name, metric in METRICS.items()}


def empty_rules() -> str:
    """The range and the rules for empty masks of all metrics, in sentences."""
    overlaps = [metric.title for metric in METRICS.values() if metric.is_reward]
    notes = [metric.note for metric in METRICS.values() if metric.note]
    first = f"{', '.join(overlaps[:-1])} and {overlaps[-1]} of two empty masks are 1, of one empty mask 0."
    return " ".join([first, *notes])


# ---- captions --------------------------------------------------------------------------------------------------------


def meteor(predictions: Sequence[str], references: Sequence[str], normalise: bool = False) -> np.ndarray:
    """METEOR of each caption with its one reference, by NLTK, without any download: float64 (N,) in [0, 1].

    Formula, for m matched words in c chunks, p words predicted, r words in the reference: P = m / p, R = m / r,
    F = P R / (0.9 P + 0.1 R), METEOR = F (1 - 0.5 (c / m)^3). Words match when they are equal, have one stem (Porter),
    or, in the variant "full", are synonyms in WordNet. The variants give different numbers: report `meteor_variant()`
    with every number. The Java METEOR 1.5 has other parameters and is not comparable to either.

    `normalise` divides by the score of the reference with itself, which is 0.5 for one word, 0.94 for two and nearly 1
    for ten, so that a perfect prediction scores 1 at any length. A caption without a word has 0.

    Source: Lavie and Agarwal 2007, as in nltk.translate.meteor_score. NLTK aligns repeated words greedily from the
    right, so the number of chunks of a repetitive caption can be too high.

    Raises:
        ValueError: the lengths differ, a reference has no word, or NLTK is not installed.
    """
    check_pairs(predictions, references)
    for number, reference in enumerate(references):
        if not tokens(reference):
            raise ValueError(f"reference {number} has no word ({reference!r}); leave the sample out")

    def scores(texts: Sequence[str]) -> np.ndarray:
        library, pairs = _nltk(), zip(texts, references, strict=True)
        found = (library.single_meteor_score(tokens(true), tokens(text), wordnet=_wordnet()) for text, true in pairs)
        return np.array([float(score) for score in found], dtype=np.float64)

    return np.minimum(scores(predictions) / scores(references), 1.0) if normalise else scores(predictions)


def meteor_variant() -> str:
    """ "full" if NLTK finds WordNet on this machine, else "exact+stem"; nothing is downloaded."""
    return "exact+stem" if _wordnet() is NO_SYNONYMS else "full"


def tokens(text: str) -> list[str]:
    """The words of `text` in lower case: runs of letters, digits and underscores."""
    # Punctuation is dropped: any two sentences share a full stop, so a policy could raise METEOR with commas.
    return re.findall(r"\w+", text.lower())


def check_pairs(predictions: Sequence[str], references: Sequence[str]) -> None:
    """Raise a ValueError unless both are lists of captions of the same length."""
    if isinstance(predictions, str) or isinstance(references, str):
        raise ValueError("predictions and references must be lists of captions, got one string")
    if len(predictions) != len(references):
        raise ValueError(f"each prediction needs its reference, got {len(predictions)} and {len(references)}")


def _nltk() -> Any:
    """NLTK's METEOR module, imported lazily because the import takes over a second."""
    try:
        from nltk.translate import meteor_score
    except ImportError:
        raise ValueError("METEOR needs the package nltk: pip install -r requirements.txt") from None
    return meteor_score


@functools.cache
def _wordnet() -> Any:
    """NLTK's WordNet, or NO_SYNONYMS if it is not installed.

    Without this check NLTK would fail at the first word without an equal stem, possibly hours into a run.
    """
    _nltk()
    from nltk import data
    from nltk.corpus import wordnet

    def has(place: str) -> bool:
        try:
            data.find(place)
        except LookupError:
            return False
        return True

    try:
        if not (has("corpora/wordnet") or has("corpora/wordnet.zip")):
            return NO_SYNONYMS
        wordnet.ensure_loaded()
    except (LookupError, OSError, BadZipFile) as error:
        raise ValueError(
            f"corpora/wordnet in one of {data.path}: NLTK cannot read it ({type(error).__name__}); delete it, or "
            "download it again with python -m nltk.downloader wordnet"
        ) from None
    return wordnet
