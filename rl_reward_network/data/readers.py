"""Which of the two public sets of regions with captions a folder holds, and its samples.

Grasp-Any-Region ("gar") and describe-anything ("dam") are often taken for each other: both caption masked regions, but
the one comes as Arrow shards, the other as `annotations.json` and tars.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from rl_reward_network.data.describe_anything import DOWNLOAD, read_describe_anything, subset_folders
from rl_reward_network.data.grasp_any_region import arrow_shards, is_hub_id, locate, read_grasp_any_region
from rl_reward_network.data.images import IMAGE_SUFFIXES
from rl_reward_network.data.region_sample import RegionSample

TITLES = {"gar": "Grasp-Any-Region", "dam": "describe-anything"}
EXPECTED = (
    "give a folder of Grasp-Any-Region (*.arrow files), or of describe-anything (<SUBSET>/annotations.json and "
    "<SUBSET>/images/*.tar)"
)
NAMES_SHOWN = 6


def read_region_data(
    path: Path | str,
    dataset_name: str = "auto",
    limit: int | None = None,
    white_level: int | None = None,
) -> tuple[list[RegionSample], str]:
    """The regions, and one line that says what was read, e.g. "Grasp-Any-Region, 2 shards, 400 images, 1402 regions".

    Args:
        path: a folder, or of Grasp-Any-Region a hub id `owner/name`, which is downloaded whole.
        dataset_name: "auto", or "gar" or "dam" to insist on one.
        limit: stop after so many regions; None: all.
        white_level: of grey images of more than 8 bit, as `decode_image` takes it.

    Raises:
        ValueError: the data are neither set, or not the one in `dataset_name`; or as its reader.
    """
    if dataset_name not in ("auto", *TITLES):
        raise ValueError(f"dataset_name is {dataset_name!r}, expected auto, gar or dam")
    found = recognise(path)
    if dataset_name not in ("auto", found):
        raise ValueError(
            f"{path}: dataset_name is {dataset_name!r} ({TITLES[dataset_name]}), but this is read as {TITLES[found]}; "
            f"give --dataset_name {found} or auto, or name the other folder"
        )
    if found == "dam":
        samples = read_describe_anything(path, limit, white_level)
        parts = [folder.name for folder in subset_folders(Path(path))]
        seen = f"{TITLES[found]}: {', '.join(parts)}"
    else:
        folder = locate(path)
        samples = read_grasp_any_region(folder, limit, white_level)
        seen = f"{TITLES[found]}, {_counted(arrow_shards(folder))}"
    images = len({sample.image_id for sample in samples})
    stopped = " (the limit)" if len(samples) == limit else ""
    return samples, f"{seen}, {images} images, {len(samples)} regions{stopped}"


def _counted(shards: list[Path]) -> str:
    """E.g. "2 of 44 shards"; names like data-00000-of-00044.arrow tell how many belong into a folder."""
    numbers = {
        (shard.parent, int(found[1])) for shard in shards if (found := re.search(r"-of-(\d+)\.arrow$", shard.name))
    }
    whole = max(sum(number for _, number in numbers), len(shards))
    return f"{len(shards)}{f' of {whole}' if whole > len(shards) else ''} shard{'s' if whole > 1 else ''}"


def recognise(path: Path | str) -> Literal["gar", "dam"]:
    """Which set it is, by the names of its files; of a hub id, by that name alone.

    Raises:
        ValueError: no such folder, neither set, or both.
    """
    folder = Path(path)
    if not folder.is_dir():
        return _recognise_hub_id(path)
    shards, subsets = arrow_shards(folder), subset_folders(folder)
    if shards and subsets:
        raise ValueError(
            f"{folder}: holds both Grasp-Any-Region ({shards[0]}) and describe-anything ({subsets[0]}); name one"
        )
    if not shards and not subsets:
        _refuse_bare_images(folder)
        raise ValueError(f"{folder}: neither data set ({_listing(folder)}); {EXPECTED}")
    return "gar" if shards else "dam"


def _refuse_bare_images(folder: Path) -> None:
    """Raise for a folder of images that nothing says anything about."""
    inside = folder / "images" if (folder / "images").is_dir() else folder
    count = sum(path.suffix.lower() in IMAGE_SUFFIXES for path in inside.iterdir())
    if not count or (folder / "annotations.json").exists():
        return
    if (folder.parent / "annotations.json").exists():
        raise ValueError(f"{folder}: the images of {folder.parent / 'annotations.json'}; give {folder.parent}")
    raise ValueError(
        f"{folder}: {count} images and no annotations.json, which says whose they are; write one, a list of records "
        '{"image": NAME, "text": ["blood vessel"], "group": PATIENT}, with the images in images/ (mask_png may be left '
        'out where --reward_net pays); captions of regions come as Arrow rows. Both are in the README, "Your own data"'
    )


def _recognise_hub_id(path: Path | str) -> Literal["gar"]:
    """Raise unless this is an id to be read as Grasp-Any-Region."""
    if not is_hub_id(path):
        raise ValueError(f"{path}: no such folder; {EXPECTED}")
    if "describe-anything" in str(path).lower():
        raise ValueError(f"{path}: describe-anything is read from a folder; download it ({DOWNLOAD}) and give that")
    return "gar"


def _listing(folder: Path) -> str:
    """What lies in `folder`, for a message."""
    if (folder / "annotations.json").is_file():
        return (
            "annotations.json, but no tar in images/: annotated images for the other commands, or a part of a download"
        )
    names = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"it holds {', '.join(names[:NAMES_SHOWN])}{more}" if names else "it is empty"


def region_fingerprint(samples: Iterable[RegionSample]) -> str:
    """64 hex digits that change with any image, caption, mask, group or series, but not with their order."""
    rows = sorted(
        json.dumps(
            [
                s.image_id,
                s.group_id,
                s.series_id,
                s.caption,
                [r["size"] for r in s.mask_parts.rles],
                s.mask_parts.digest(),
            ]
        )
        for s in samples
    )
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()
