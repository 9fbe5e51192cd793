"""The prompts of GRPO: an image with a region or a phrase, and the questions about it."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rl_reward_network.data.items import RegionSample, Sample

TAG = re.compile(r"<[^<>\s]*>|\[SEG\]")
DESCRIBE = "Please describe region1."  # the question the embedded model was trained on
DESCRIBE_REAL = "Can you provide me with a detailed description of the region in the picture marked by region1?"


@dataclass(frozen=True, eq=False)
class GRPOPrompt:
    """One prompt of GRPO.

    Args:
        group_id, series_id, sample_id: pseudonyms, see `RegionSample`.
        caption: the reference caption; if empty, the prompt takes no part in the caption loop.
        question: of loop 2, for the mask.
        labelled: whether there is a true mask.
        load: returns image, uint8 (H, W, 3), and mask, bool (H, W), or None without labels.
        describe: of loop 1, for the caption of a marked region.
    """

    group_id: str
    series_id: str
    sample_id: str
    caption: str
    question: str
    labelled: bool
    load: Callable[[], tuple[np.ndarray, np.ndarray | None]] = field(repr=False)
    describe: str = DESCRIBE


def region_prompt(sample: RegionSample, describe: str = DESCRIBE) -> GRPOPrompt:
    """The prompt of a region with a caption, for both loops."""
    return GRPOPrompt(
        sample.group_id,
        sample.series_id,
        sample.sample_id,
        sample.caption,
        segment_question(sample.caption),
        True,
        sample.load,
        describe,
    )


def image_prompt(sample: Sample, question: str) -> GRPOPrompt:
    """The prompt of an annotated image, such as an angiogram, for the mask loop; all images share one question."""
    return GRPOPrompt(
        sample.group_id,
        sample.series_id,
        sample.sample_id,
        "",
        question,
        sample.labelled,
        lambda: (sample.load_image(), sample.load_mask()),
    )


def segment_question(caption: str) -> str:
    """The question for the mask of a described object: "a red circle." -> "Please segment the red circle.".

    Tags such as "<image>" are removed: if the model writes one into a caption, it must not change the prompt.
    """
    phrase = " ".join(TAG.sub(" ", caption).split()).rstrip(".").strip()
    first, _, rest = phrase.partition(" ")
    if first.lower() in ("a", "an") and rest:
        phrase = f"the {rest}"
    return f"Please segment {phrase}."
