"""Unlabelled images in GRPO: which of them join the training, and the section of the report."""

from collections.abc import Callable
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from rl_reward_network.data.splits import spread
from rl_reward_network.grpo.inputs import GRPOInputs, validation_prompts
from rl_reward_network.grpo.measure import Measured, unpacked
from rl_reward_network.grpo.prompts import GRPOPrompt, image_prompt
from rl_reward_network.inputs.unlabelled import unchanged
from rl_reward_network.report.unlabelled import (
    IMAGES,
    JudgedImages,
    UnlabelledSection,
    judged_images,
    judged_row,
    unlabelled_section,
)
from rl_reward_network.rewards.familiar import Familiarity, LoadImage, familiar
from rl_reward_network.rewards.foreground_maps import ForegroundMaps


def with_unlabelled(
    inputs: GRPOInputs, prompts: list[GRPOPrompt], maps: ForegroundMaps | None
) -> tuple[list[GRPOPrompt], Familiarity | None]:
    """The training prompts with those of the unlabelled images, and how many of these were left out.

    Args:
        inputs: data, split, and perhaps unlabelled images.
        prompts: of the data.
        maps: of the reward network; without one no unlabelled image joins.

    Raises:
        ValueError: an image cannot be read.
    """
    if inputs.unlabelled is None or maps is None:
        return prompts, None
    known = validation_prompts(inputs)
    known = [prompt for prompt in known if prompt.labelled] or known
    new = inputs.unlabelled_prompts
    decided = [familiar(maps, [_image(prompt) for prompt in known], [_image(prompt) for prompt in new])]
    if PartialState().num_processes > 1:
        broadcast_object_list(decided)  # an image near a limit must not join on one rank alone
    joins, familiarity = decided[0]
    return [*prompts, *(prompt for prompt, join in zip(new, joins, strict=True) if join)], familiarity


def _image(prompt: GRPOPrompt) -> LoadImage:
    return lambda: prompt.load()[0]


def grpo_section(
    inputs: GRPOInputs,
    config: dict[str, Any],
    maps: ForegroundMaps,
    tests: tuple[list[GRPOPrompt], Measured, Measured],
    measure_both: Callable[[list[GRPOPrompt]], tuple[Measured, Measured]],
) -> UnlabelledSection | None:
    """The section of the report; None where the run had no unlabelled images, or their folder is no longer there.

    Args:
        inputs: of the evaluation.
        config: the run's config.json.
        maps: of the reward network.
        tests: test prompts, and what was measured of the base model and of the trained one.
        measure_both: measures both models on further prompts.

    Raises:
        ValueError: an image or a mask cannot be read.
    """
    facts = config.get("unlabelled")
    if facts is None or not unchanged(inputs.unlabelled, config["origin"]["unlabelled"]):
        return None
    assert inputs.unlabelled is not None
    samples = spread(inputs.unlabelled.samples, IMAGES, inputs.config.seed)
    prompts = [image_prompt(sample, inputs.regions.segment_question) for sample in samples]
    new = _judged(maps, prompts, *measure_both(prompts))
    return unlabelled_section(_judged(maps, *tests), new, facts, inputs.config.seed)


def _judged(maps: ForegroundMaps, prompts: list[GRPOPrompt], before: Measured, after: Measured) -> JudgedImages:
    rows = []
    for prompt, old, new in zip(prompts, before.masks, after.masks, strict=True):
        image, truth = prompt.load()
        rows.append(judged_row(maps, prompt.group_id, image, (unpacked(old), unpacked(new)), truth))
    return judged_images(rows)
