"""The data formats that this project reads, in one table, and how a folder's format is recognised.

Formats of images give a `Sample` per image and phrase, formats of regions a `RegionSample` per captioned mask. A new
format is a module of this package with two functions, and one line in `IMAGES` or `REGIONS`:

- `recognise(folder)` returns a short description of what the folder holds, "" if it is of another format;
- `read(folder, ...)` returns the samples, see `ReadImages` and `ReadRegions`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_reward_network.data.annotations import read_annotations, recognise_annotations
from rl_reward_network.data.describe_anything import DOWNLOAD, read_describe_anything, recognise_describe_anything
from rl_reward_network.data.grasp_any_region import is_hub_id, locate, read_grasp_any_region, recognise_grasp_any_region
from rl_reward_network.data.images import IMAGE_SUFFIXES
from rl_reward_network.data.items import RegionSample, Sample, first_names, image_key

EXPECTED = (
    "expected Grasp-Any-Region (*.arrow files), describe-anything (<SUBSET>/annotations.json and <SUBSET>/images/*.tar)"
    " or annotated images (annotations.json and images/)"
)


def recognise_named_regions(folder: Path) -> str:
    """ "annotated images, captioned by their phrases"; "" where `folder` has no annotations.json."""
    return "annotated images, captioned by their phrases" if recognise_annotations(folder) else ""


def read_named_regions(
    folder: Path, limit: int | None = None, bit_depth: int | None = None, group_regex: str | None = None
) -> list[RegionSample]:
    """Regions of annotated images, captioned by their phrases: which object is this? The masks are decoded.

    Phrases with an empty mask, or without one, are left out. `GRPOInputs` splits the patients as it does for images.
    Stops after `limit` regions; the other arguments and errors are those of `read_annotations`, and ValueError for a
    mask that cannot be read, or no region at all.
    """
    regions: list[RegionSample] = []
    for sample in read_annotations(folder, group_regex, bit_depth=bit_depth):
        mask = sample.load_mask()
        if mask is not None and mask.any() and sample.mask_parts is not None:
            with sample.image_path.open("rb") as file:
                image_id = image_key(file, 0, sample.image_path.stat().st_size)
            ids = sample.group_id, sample.series_id, image_id, sample.sample_id
            regions.append(RegionSample(sample.text, *ids, "annotations.json", sample.mask_parts, sample.load_image))
        if len(regions) == limit:
            break
    if not regions:
        raise ValueError(
            f"{folder / 'annotations.json'}: no phrase has a mask with a pixel; draw some, or name other data"
        )
    return regions


Recognise = Callable[[Path], str]
ReadImages = Callable[..., list[Sample]]
"""(folder, group_regex, *, bit_depth), as `read_annotations`; ValueError with file, field and remedy."""
ReadRegions = Callable[..., list[RegionSample]]
"""(folder, limit, bit_depth): at most `limit` captioned regions, bit_depth as `decode_image` takes it."""

NAMES = "names"
IMAGES: dict[str, tuple[Recognise, ReadImages]] = {"annotations": (recognise_annotations, read_annotations)}
REGIONS: dict[str, tuple[Recognise, ReadRegions]] = {
    "gar": (recognise_grasp_any_region, read_grasp_any_region),
    "dam": (recognise_describe_anything, read_describe_anything),
    NAMES: (recognise_named_regions, read_named_regions),
}
BY_REQUEST = (NAMES,)  # another reading of a folder, never recognised by itself
READERS: dict[str, tuple[Recognise, Callable[..., list[Any]]]] = {**REGIONS, **IMAGES}
DATASET_NAMES = ("auto", *READERS)


def recognise(path: Path | str, dataset_name: str = "auto") -> str:
    """The key of `READERS` for a folder or a hub id; file names decide, contents are not read.

    `path` is a folder, or the hub id `owner/name` of a data set in the layout of Grasp-Any-Region; a `dataset_name` but
    "auto" is returned unless the folder is of another format. ValueError if it is unknown or contradicts the folder, or
    there is no such folder, or it is of no format or of several.
    """
    if dataset_name not in DATASET_NAMES:
        raise ValueError(f"dataset_name is {dataset_name!r}, expected {', '.join(DATASET_NAMES)}")
    folder = Path(path)
    if not folder.is_dir():
        if dataset_name not in ("auto", "gar"):
            return dataset_name
        if not is_hub_id(path):
            raise ValueError(f"{path}: no such folder; check the path (--data_root)")
        if "describe-anything" in str(path).lower():
            raise ValueError(f"{path}: describe-anything is read from a folder; download it ({DOWNLOAD}) and give that")
        return "gar"
    tried = {name: reader for name, reader in READERS.items() if name == dataset_name or name not in BY_REQUEST}
    descriptions = {name: text for name, (recognises, _) in tried.items() if (text := recognises(folder))}
    if dataset_name in descriptions or (dataset_name != "auto" and not descriptions):
        return dataset_name  # in the second case the reader raises an error on what is missing
    if len(descriptions) > 1:
        descriptions.pop("annotations", None)  # the other formats have an annotations.json, too
    if not descriptions:
        _refuse_bare_images(folder)
        names = first_names((path.name + "/" * path.is_dir() for path in folder.iterdir()), most=6)
        holds = f"it holds {names}" if names else "it is empty"
        raise ValueError(f"{folder}: no known data format ({holds}); {EXPECTED}")
    if len(descriptions) > 1:
        raise ValueError(
            f"{folder}: holds {' and '.join(descriptions.values())}; give --dataset_name {' or '.join(descriptions)}"
        )
    ((name, description),) = descriptions.items()
    if dataset_name not in ("auto", name):
        raise ValueError(
            f"{folder}: dataset_name is {dataset_name!r}, but the folder holds {description}; give --dataset_name "
            f"{name} or auto, or name another folder"
        )
    return name


def read_images(folder: Path, group_regex: str | None = None, bit_depth: int | None = None) -> list[Sample]:
    """The samples of a folder of images, of whatever format; by default, and with arguments, as `read_annotations`."""
    names = [name for name, (recognises, _) in IMAGES.items() if recognises(folder)]
    _, read = IMAGES[names[0] if names else "annotations"]
    return read(folder, group_regex, bit_depth=bit_depth)


def read_region_data(
    path: Path | str,
    dataset_name: str = "auto",
    limit: int | None = None,
    bit_depth: int | None = None,
    group_regex: str | None = None,
) -> tuple[list[RegionSample], str]:
    """The regions, and one line on what was read, e.g. "Grasp-Any-Region, 2 shards, 400 images, 1402 regions".

    `path` and `dataset_name` are as `recognise` takes them (a hub id is downloaded whole), at most `limit` regions are
    read, `bit_depth` is as `decode_image` takes it, `group_regex` is for `names`. ValueError as `recognise` and the
    reader, and for images without captions.
    """
    name = recognise(path, dataset_name)
    if name not in REGIONS:
        raise ValueError(
            f"{path}: holds {READERS[name][0](Path(path)) or name}, expected captioned regions ({' or '.join(REGIONS)})"
        )
    recognises, read = REGIONS[name]
    folder = locate(path) if name == "gar" else Path(path)
    samples = read(folder, limit, bit_depth, *((group_regex,) if name == NAMES else ()))
    images = len({sample.image_id for sample in samples})
    limited = " (the limit)" if len(samples) == limit else ""
    return samples, f"{recognises(folder)}, {images} images, {len(samples)} regions{limited}"


def _refuse_bare_images(folder: Path) -> None:
    inside = folder / "images" if (folder / "images").is_dir() else folder
    count = sum(path.suffix.lower() in IMAGE_SUFFIXES for path in inside.iterdir())
    if not count:
        return
    if (folder.parent / "annotations.json").exists():
        raise ValueError(f"{folder}: the images of {folder.parent / 'annotations.json'}; give {folder.parent}")
    raise ValueError(
        f"{folder}: {count} images and no annotations.json, which names the patient of each; write one, a list of "
        'records {"image": NAME, "text": ["blood vessel"], "group": PATIENT}, with the images in images/ (`mask_png` '
        "may be missing where --reward_net gives the reward); captions of regions come as Arrow rows. Both are in "
        "docs/how-to/your-data.md"
    )
