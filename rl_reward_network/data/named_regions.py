"""Regions of annotated images, captioned by their phrases: which object is this? Read by `--dataset_name names` alone.

The folder is that of `annotations`; phrases with an empty mask, or without one, are left out. The groups are those of
the images, and `GRPOInputs` splits the patients as it does for them.
"""

from pathlib import Path

from rl_reward_network.bit_depth import Levels
from rl_reward_network.data.annotations import read_annotations, recognise_annotations
from rl_reward_network.data.images import DATA_SET
from rl_reward_network.data.items import RegionSample, Sample, image_key


def recognise_named_regions(folder: Path) -> str:
    """ "annotated images, captioned by their phrases"; "" where `folder` has no annotations.json."""
    return "annotated images, captioned by their phrases" if recognise_annotations(folder) else ""


def read_named_regions(
    folder: Path, limit: int | None = None, levels: Levels | None = None, group_regex: str | None = None
) -> list[RegionSample]:
    """A region for each phrase whose mask has a pixel; the masks are decoded.

    Args:
        folder: holds annotations.json and images/.
        limit: stop after so many regions; None: all.
        levels: of grey images of more than 8 bit, as `decode_image` takes it; None measures them.
        group_regex: as `read_annotations` takes it.

    Raises:
        ValueError: as `read_annotations`, a mask that cannot be read, or no region at all.
    """
    regions: list[RegionSample] = []
    for sample in read_annotations(folder, group_regex, grey_levels=None if levels is None else {DATA_SET: levels}):
        mask = sample.load_mask()
        if mask is not None and mask.any():
            regions.append(_region(sample))
        if len(regions) == limit:
            break
    if not regions:
        raise ValueError(
            f"{folder / 'annotations.json'}: no phrase has a mask with a pixel; draw some, or name other data"
        )
    return regions


def _region(sample: Sample) -> RegionSample:
    assert sample.mask_parts is not None
    with sample.image_path.open("rb") as file:
        image_id = image_key(file, 0, sample.image_path.stat().st_size)
    ids = sample.group_id, sample.series_id, image_id, sample.sample_id
    return RegionSample(sample.text, *ids, "annotations.json", sample.mask_parts, sample.load_image)
