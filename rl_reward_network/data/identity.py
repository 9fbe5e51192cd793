"""The same picture in another file or under another name: found by thumbnails, also turned, mirrored or re-encoded.

A thumbnail holds what differs from its surroundings, so that brightness and contrast do not matter, and photographs of
one organ, which share their large shapes, differ (docs/how-to/your-data.md has the measured limits). A crop is another
picture. Blank images are like no other: equal ones tell nothing about patients.
"""

import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image
from scipy.ndimage import gaussian_filter
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from tqdm import tqdm

from rl_reward_network.artefacts import whole_file
from rl_reward_network.data.images import decoded_once, file_stamp
from rl_reward_network.data.items import Sample
from rl_reward_network.data.splits import patient_key

SIDE = 32  # pixels of a thumbnail
SURROUNDINGS = 4.0  # sigma of the Gaussian mean around a pixel of a thumbnail
BLANK = 0.5  # grey levels; a thumbnail that deviates less from its surroundings shows nothing
SAME = 0.97  # correlation; 150,000 pairs of different patients stay below 0.95
BLOCK = 1000  # rows of the correlation matrix at once
PICTURES = "pictures.npz"  # beside weights: what they were trained on; not safetensors, which would be taken for weights

S = TypeVar("S", bound=Sample)


def thumbnail(image: np.ndarray) -> np.ndarray:
    """int8 (SIDE, SIDE): how each pixel differs from its surroundings, 0 of a blank image; equal for equal pixels.

    Args:
        image: grey (H, W) of any depth, or RGB (H, W, 3).
    """
    channels = [image] if image.ndim == 2 else np.moveaxis(image, -1, 0)
    grey = sum(channel.astype(np.float32) for channel in channels) / len(channels)  # faster than a mean over axis 2
    small = np.asarray(Image.fromarray(grey).resize((SIDE, SIDE), Image.Resampling.BOX))
    detail = small - _surroundings(small)
    if (overall := float(detail.std())) < BLANK:
        return np.zeros((SIDE, SIDE), np.int8)
    local = np.sqrt(_surroundings(detail**2)) + 0.1 * overall  # an empty margin must not become noise
    return np.clip(np.rint(detail / local * 32), -127, 127).astype(np.int8)


def _surroundings(values: np.ndarray) -> np.ndarray:
    return np.asarray(gaussian_filter(values, SURROUNDINGS, mode="nearest"))


def thumbnails(samples: Sequence[Sample]) -> np.ndarray:
    """int8 (N, SIDE, SIDE): the thumbnails of samples, each image decoded once per process.

    Each image has its own levels, so that a copy in another format or data set is found, too.
    """

    def read(sample: Sample) -> np.ndarray:
        key = "thumbnail", file_stamp(sample.image_path)
        return decoded_once(key, lambda: thumbnail(replace(sample, levels=None).load_image()))

    with ThreadPoolExecutor() as threads:
        rows = threads.map(read, samples)
        read_ = list(tqdm(rows, "comparing images", len(samples), leave=False, unit="image", delay=2))
    return np.stack(read_) if read_ else np.zeros((0, SIDE, SIDE), np.int8)


def same_pictures(ones: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which pictures of two sets are the same, in any of the eight orientations.

    Args:
        ones, others: int8 (N, SIDE, SIDE) and (M, SIDE, SIDE), as `thumbnail` gives them.

    Returns:
        int64 (K, 2): indices into both sets; and float32 (K,): their correlation, above `SAME`.
    """
    turned = [np.rot90(side, turns, (1, 2)) for side in (others, others[:, :, ::-1]) for turns in range(4)]
    targets, sources, found = [_standardised(one) for one in turned], _standardised(ones), []
    for start in range(0, len(ones), BLOCK):
        rows = sources[start : start + BLOCK]
        likeness = rows @ targets[0].T  # (rows, M)
        for target in targets[1:]:
            np.maximum(likeness, rows @ target.T, out=likeness)
        pairs = np.argwhere(likeness > SAME)
        found.append((pairs + [start, 0], likeness[tuple(pairs.T)]))
    if not found:
        return np.zeros((0, 2), np.int64), np.zeros(0, np.float32)
    return np.concatenate([pairs for pairs, _ in found]), np.concatenate([values for _, values in found])


def _standardised(small: np.ndarray) -> np.ndarray:
    """float32 (N, SIDE * SIDE) of mean 0 and norm 1 each, 0 of a blank one: their products are correlations."""
    flat = small.reshape(len(small), SIDE * SIDE).astype(np.float32)
    flat -= flat.mean(axis=1, keepdims=True)
    return flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1.0)


def same_in_two_groups(small: np.ndarray, groups: Sequence[str]) -> list[tuple[int, int, float]]:
    """Pairs of images of two groups that are the same picture, the most similar first: index, index, correlation.

    Args:
        small: int8 (N, SIDE, SIDE) as `thumbnail` gives them.
        groups: N group names.
    """
    pairs, likeness = same_pictures(small, small)
    listed = [(int(i), int(j), float(value)) for (i, j), value in zip(pairs, likeness, strict=True)]
    return sorted((pair for pair in listed if pair[0] < pair[1] and groups[pair[0]] != groups[pair[1]]), key=_unlike)


def _unlike(pair: tuple[int, int, float]) -> float:
    return -pair[2]


def join_groups(samples: list[S]) -> list[S]:
    """The samples with one `group_id` for groups that hold the same picture, so that no split parts them."""
    ids = sorted({sample.group_id for sample in samples})
    number = {group_id: index for index, group_id in enumerate(ids)}
    own = [sample.group_id for sample in samples]
    pairs = [(number[own[i]], number[own[j]]) for i, j, _ in same_in_two_groups(thumbnails(samples), own)]
    if not pairs:
        return samples
    rows, columns = zip(*pairs, strict=True)
    _, label = connected_components(coo_array((np.ones(len(pairs)), (rows, columns)), (len(ids), len(ids))), False)
    first = {int(label[index]): group_id for index, group_id in reversed(list(enumerate(ids)))}
    return [replace(sample, group_id=first[int(label[number[sample.group_id]])]) for sample in samples]


def joined_note(samples: Iterable[Sample]) -> str:
    """What `join_groups` has done, in words; "" where it has changed nothing."""
    owners = {(sample.group_id, patient_key(sample.group)) for sample in samples}
    joined = [count for count in Counter(group_id for group_id, _ in owners).values() if count > 1]
    return f"{sum(joined)} groups that share pictures, taken for {len(joined)}" if joined else ""


# ---- what trained weights have seen ---------------------------------------------------------------------------------

VAL = "the val split"
USES = {"train": "trained", "val": "chosen", "unlabelled": "trained without masks"}
Pictures = Mapping[str, np.ndarray]
"""Use (key of `USES`) -> int8 (N, SIDE, SIDE): the thumbnails of the images that weights were trained or chosen on."""


def save_pictures(folder: Path, pictures: Pictures) -> None:
    """Write the pictures beside weights, for `check_apart`; they name nobody, and hold no image in its resolution."""
    with whole_file(folder / PICTURES) as temporary:
        np.savez_compressed(temporary, **pictures)


def load_pictures(folder: Path) -> dict[str, np.ndarray]:
    """The pictures beside weights; {} where none are recorded.

    Raises:
        ValueError: the file is damaged; names it.
    """
    path = folder / PICTURES
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
        if any(name not in USES or one.shape[1:] != (SIDE, SIDE) or one.dtype != np.int8 for name, one in found.items()):
            raise ValueError(f"arrays are {sorted(found)}, expected int8 (N, {SIDE}, {SIDE}) of {', '.join(USES)}")
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: damaged ({error}); copy the folder again, or delete the file") from None
    return found


def together(*pictures: Pictures) -> dict[str, np.ndarray]:
    """The pictures of several trainings, one after the other."""
    uses = dict.fromkeys(use for one in pictures for use in one)
    return {use: np.unique(np.concatenate([one[use] for one in pictures if use in one]), axis=0) for use in uses}


def check_apart(known: Pictures, parts: Mapping[str, Sequence[Sample]], whose: str, remedy: str) -> None:
    """Refuse weights that have seen the images that they are to judge or to be measured on.

    Args:
        known: of the weights; {} checks nothing.
        parts: name, such as "the test split" -> its samples. Those of `VAL` may have chosen the weights.
        whose: file and what the weights are, the beginning of the message.
        remedy: the end of the message.

    Raises:
        ValueError: images of a part trained the weights, or chose them; counts and names them.
    """
    for part, samples in parts.items() if known else ():
        small = thumbnails(samples)
        for use, pictures in known.items():
            if (use, part) == ("val", VAL):
                continue
            if shared := {samples[j].image_path for j in same_pictures(pictures, small)[0][:, 1]}:
                total = len({sample.image_path for sample in samples})
                raise ValueError(
                    f"{whose} was {USES[use]} on {len(shared)} of the {total} images of {part}, perhaps under other"
                    f" names ({some_names(shared)}); {remedy}"
                )


def some_names(paths: Iterable[Path]) -> str:
    """The names of the first three files, for a message on the screen: they may name a patient."""
    names = sorted({path.name for path in paths})
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
