"""What GRPO trains on: images with a region or a phrase, and the words that are asked."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rl_reward_network.data.region_sample import RegionSample
from rl_reward_network.data.sample import Sample

TAG = re.compile(r"<[^<>\s]*>|\[SEG\]")
DESCRIBE = "Please describe region1."  # what the embedded model was taught
DESCRIBE_REAL = "Can you provide me with a detailed description of the region in the picture marked by region1?"


@dataclass(frozen=True, eq=False)
class GRPOItem:
    """One prompt of GRPO.

    Args:
        image_id: equal for items of one image, whose features are computed once.
        group_id, series_id, sample_id: pseudonyms, see `RegionSample`.
        caption: the reference; empty where there is none, so no caption loop.
        question: what asks for the mask.
        labelled: whether there is a true mask.
        load: image, uint8 (H, W, 3), and mask, bool (H, W), or None without labels.
        describe: what asks for the caption of a region that is pointed at.
    """

    image_id: str
    group_id: str
    series_id: str
    sample_id: str
    caption: str
    question: str
    labelled: bool
    load: Callable[[], tuple[np.ndarray, np.ndarray | None]] = field(repr=False)
    describe: str = DESCRIBE


def region_item(sample: RegionSample, describe: str = DESCRIBE) -> GRPOItem:
    """A region with its caption: for both loops."""
    return GRPOItem(
        sample.image_id,
        sample.group_id,
        sample.series_id,
        sample.sample_id,
        sample.caption,
        segment_question(sample.caption),
        True,
        sample.load,
        describe,
    )


def prompted_item(sample: Sample, question: str) -> GRPOItem:
    """An annotated image with one prompt for all, such as an angiogram: for the mask loop on a learned reward."""
    return GRPOItem(
        sample.sample_id,
        sample.group_id,
        sample.series_id,
        sample.sample_id,
        "",
        question,
        sample.labelled,
        lambda: (sample.load_image(), sample.load_mask()),
    )


def segment_question(caption: str) -> str:
    """What asks for the mask of what a caption describes: "a red circle." -> "Please segment the red circle.".

    Tags such as "<image>" are left out: a model that writes one must not change the prompt.
    """
    phrase = " ".join(TAG.sub(" ", caption).split()).rstrip(".").strip()
    first, _, rest = phrase.partition(" ")
    if first.lower() in ("a", "an") and rest:
        phrase = f"the {rest}"
    return f"Please segment {phrase}."
