"""Unlabelled images in GRPO: which of them join the training."""

from rl_reward_network.grpo.inputs import GRPOInputs, validation_prompts
from rl_reward_network.grpo.prompts import GRPOPrompt
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
    joins, familiarity = familiar(maps, [_image(prompt) for prompt in known], [_image(prompt) for prompt in new])
    return [*prompts, *(prompt for prompt, join in zip(new, joins, strict=True) if join)], familiarity


def _image(prompt: GRPOPrompt) -> LoadImage:
    return lambda: prompt.load()[0]
