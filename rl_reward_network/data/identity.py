"""The same picture in another file or under another name: found by thumbnails, also turned, mirrored or re-encoded.

A thumbnail holds what differs from its surroundings, so that brightness and contrast do not matter, and photographs of
one organ, which share their large shapes, differ (docs/how-to/your-data.md has the measured limits). A crop is another
picture. Blank images are like no other: equal ones tell nothing about patients.
"""

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image
from scipy.ndimage import gaussian_filter
from tqdm import tqdm

from rl_reward_network.atomic_io import PICTURES
from rl_reward_network.data.images import decoded_once, file_stamp
from rl_reward_network.data.items import Sample, first_names
from rl_reward_network.data.splits import Split, patient_key, select

SIDE = 32  # pixels of a thumbnail
SURROUNDINGS = 3.0  # sigma in pixels of a thumbnail of the mean that is taken away
BLANK = 0.5  # grey levels; a thumbnail that deviates less from its surroundings shows nothing
SAME = 0.965  # correlation; different patients stay below 0.95 in five sets of real images
BLOCK = 1000  # rows of the correlation matrix at once
_mean_around = partial(gaussian_filter, sigma=SURROUNDINGS, mode="nearest")

S = TypeVar("S", bound=Sample)


def thumbnail(image: np.ndarray) -> np.ndarray:
    """int8 (SIDE, SIDE): how each pixel differs from its surroundings, 0 of a blank image; equal for equal pixels.

    `image` is grey (H, W) of any depth, or RGB (H, W, 3).
    """
    channels = [image] if image.ndim == 2 else list(np.moveaxis(image, 2, 0))  # faster than a mean over axis 2
    grey = np.mean([channel.astype(np.float32) for channel in channels], axis=0)
    small = np.asarray(Image.fromarray(grey).resize((SIDE, SIDE), Image.Resampling.BILINEAR))
    detail = small - _mean_around(small)
    if (overall := float(detail.std())) < BLANK:
        return np.zeros((SIDE, SIDE), np.int8)
    local = np.sqrt(_mean_around(detail**2)) + 0.5 * overall  # an empty margin must not become noise
    return np.clip(np.rint(detail / local * 32), -127, 127).astype(np.int8)


def thumbnails(samples: Sequence[Sample]) -> np.ndarray:
    """int8 (N, SIDE, SIDE): the thumbnails of samples, each image decoded once per process.

    Each image has its own grey window, so that a copy in another format or data set is found, too. A file that cannot
    be read is blank here: whoever uses it says so.
    """

    def read(sample: Sample) -> np.ndarray:
        key = "thumbnail", file_stamp(sample.image_path)
        try:
            return decoded_once(key, lambda: thumbnail(replace(sample, grey=None).load_image()))
        except ValueError:
            return np.zeros((SIDE, SIDE), np.int8)

    with ThreadPoolExecutor() as threads:
        bar = tqdm(threads.map(read, samples), "comparing images", len(samples), leave=False, unit="image", delay=2)
        return np.array(list(bar), np.int8).reshape(-1, SIDE, SIDE)


def among(small: np.ndarray, others: np.ndarray) -> np.ndarray:
    """bool (N,): which of N thumbnails (N, SIDE, SIDE) are among others, in any of the eight orientations."""
    return np.concatenate([np.zeros(0, bool), *((block > SAME).any(axis=1) for _, block in _likeness(small, others))])


def same_in_two_groups(small: np.ndarray, groups: Sequence[str]) -> list[tuple[int, int, float]]:
    """Pairs of images of two groups that are the same picture, the most similar first: index, index, correlation.

    `small` are N thumbnails, `groups` their N groups.
    """
    _, number = np.unique(groups, return_inverse=True)
    pairs = list[tuple[int, int, float]]()
    for start, block in _likeness(small, small, number):
        rows, columns = np.nonzero(np.triu(block > SAME, start + 1))
        apart = number[rows + start] != number[columns]  # beside such a pair, others are compared, too
        rows, columns = rows[apart], columns[apart]
        pairs += zip((rows + start).tolist(), columns.tolist(), block[rows, columns].tolist(), strict=True)
    return sorted(pairs, key=lambda pair: -pair[2])


def _likeness(
    small: np.ndarray, others: np.ndarray, number: np.ndarray | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks of rows of the correlations, the highest over all orientations: first row, float32 (BLOCK, M).

    Only those above `SAME` are exact: vectors whose averages over 4 x 4 pixels are far apart are far apart themselves.
    With `number`, int (N,), of groups, images of one group are not compared.
    """
    turned = [np.rot90(side, turns, (1, 2)) for side in (others, others[:, :, ::-1]) for turns in range(4)]
    targets = [(one, _coarse(one)) for one in map(_standardised, turned)]
    fine = _standardised(small)
    coarse = _coarse(fine)
    for start in range(0, len(small), BLOCK):
        rows = slice(start, start + BLOCK)
        best = np.zeros((len(fine[rows]), len(others)), np.float32)
        for target, target_coarse in targets:
            squares = (coarse[rows] ** 2).sum(axis=1)[:, None] + (target_coarse**2).sum(axis=1)
            near = squares - 2 * coarse[rows] @ target_coarse.T < 2.001 * (1 - SAME)  # squared distance
            if number is not None:
                near &= number[rows, None] != number
            block = np.ix_(near.any(axis=1), near.any(axis=0))
            best[block] = np.maximum(best[block], fine[rows][block[0].ravel()] @ target[block[1].ravel()].T)
        yield start, best


def _coarse(flat: np.ndarray) -> np.ndarray:
    """float32 (N, 64): the averages of standardised thumbnails over 4 x 4 pixels, so scaled that no distance grows."""
    sums = flat.reshape(-1, SIDE // 4, 4, SIDE // 4, 4).sum(axis=(2, 4))
    return np.asarray(sums.reshape(len(flat), (SIDE // 4) ** 2) / 4)


def _standardised(small: np.ndarray) -> np.ndarray:
    """float32 (N, SIDE * SIDE) of mean 0 and norm 1 each, 0 of a blank one: their products are correlations."""
    flat = small.reshape(len(small), SIDE * SIDE).astype(np.float32)
    flat -= flat.mean(axis=1, keepdims=True)
    return np.asarray(flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1.0))


def join_groups(samples: list[S]) -> list[S]:
    """The samples with one `group_id` for groups that hold the same picture, so that no split parts them."""
    images = list({sample.image_path: sample for sample in samples}.values())
    own = [sample.group_id for sample in images]
    stands_for = {group_id: group_id for group_id in own}
    for i, j, _ in same_in_two_groups(thumbnails(images), own):
        kept, dropped = sorted((stands_for[own[i]], stands_for[own[j]]))
        if kept != dropped:
            stands_for = {name: kept if other == dropped else other for name, other in stands_for.items()}
    return [replace(sample, group_id=stands_for[sample.group_id]) for sample in samples]


def joined_note(samples: Iterable[Sample]) -> str:
    """What `join_groups` has done, in words; "" where it has changed nothing."""
    owners = {(sample.group_id, patient_key(sample.group)) for sample in samples}
    joined = [count for count in Counter(group_id for group_id, _ in owners).values() if count > 1]
    return f"{sum(joined)} groups that share pictures, taken for {len(joined)}" if joined else ""


# ---- what trained weights have seen ---------------------------------------------------------------------------------

VAL = "the val split"
TRAIN_ANEW = "train one on these data and this split: sa2va-rl reward quick"
USES = {"train": "trained", "val": "chosen", "unlabelled": "trained without masks"}
Pictures = Mapping[str, np.ndarray]
"""Use (key of `USES`) -> int8 (N, SIDE, SIDE): the thumbnails of the images that weights were trained or chosen on."""


def copy_pictures(trained: Path | None, folder: Path) -> None:
    """Copy the pictures of trained weights, those of a checkpoint from its run; None, and older runs, have none."""
    for place in (trained, trained.parent) if trained else ():
        if (place / PICTURES).is_file():
            (folder / PICTURES).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(place / PICTURES, folder / PICTURES)
            return


def together(*pictures: Pictures) -> dict[str, np.ndarray]:
    """The pictures of several trainings."""
    uses = dict.fromkeys(use for one in pictures for use in one)
    return {use: np.unique(np.concatenate([one[use] for one in pictures if use in one]), axis=0) for use in uses}


def judged_parts(
    samples: Iterable[S], split: Split, names: Sequence[str] = ("policy", "val", "test")
) -> dict[str, list[S]]:
    """The `parts` of `check_apart`: the samples of some splits, by default of those that a reward network judges."""
    listed = list(samples)
    return {f"the {name} split": select(listed, split, name) for name in names}


def check_apart(known: Pictures, parts: Mapping[str, Sequence[Sample]], whose: str, remedy: str) -> None:
    """Refuse weights that have seen the images that they are to judge or to be measured on; counts and names them.

    `parts` are name, such as "the test split" -> its samples; those of `VAL` may have chosen the weights. `whose` (file
    and what the weights are) and `remedy` begin and end the ValueError. {} as `known` checks nothing.
    """
    for part, samples in parts.items() if known else ():
        small = thumbnails(samples)
        for use, pictures in known.items():
            if (use, part) == ("val", VAL):
                continue
            shared = {sample.image_path for sample, same in zip(samples, among(small, pictures), strict=True) if same}
            if shared:
                total = len({sample.image_path for sample in samples})
                raise ValueError(
                    f"{whose} was {USES[use]} on {len(shared)} of the {total} images of {part}, perhaps under other"
                    f" names ({first_names({path.name for path in shared})}); {remedy}"
                )
