"""The section of the report on unlabelled images in step 2."""

from pathlib import Path
from typing import Any

import numpy as np

from rl_reward_network.data.items import Sample
from rl_reward_network.data.splits import spread
from rl_reward_network.inputs.loading import RunInputs
from rl_reward_network.inputs.unlabelled import unchanged
from rl_reward_network.ppo.contexts import prompt_tables
from rl_reward_network.ppo.deploy import load_policy
from rl_reward_network.ppo.policy import choose_prompts
from rl_reward_network.report.deployment import AS_IT_IS, Deployment
from rl_reward_network.report.unlabelled import (
    IMAGES,
    JudgedImages,
    UnlabelledSection,
    judged_images,
    judged_row,
    unlabelled_section,
)
from rl_reward_network.rewards.learned import ForegroundMaps


def policy_section(
    inputs: RunInputs,
    config: dict[str, Any],
    final_model: Path,
    maps: ForegroundMaps,
    tests: tuple[list[Sample], np.ndarray],
) -> UnlabelledSection | None:
    """The section of the report; None where the run had no unlabelled images, or their folder is no longer there.

    Before is the default prompt, after the deployed choice.

    Args:
        inputs: of the evaluation.
        config: config.json of `final_model`.
        final_model: folder of the policy.
        maps: of the reward network.
        tests: test images, and the policy's prompts int64 (N,).

    Raises:
        ValueError: an image or a mask cannot be read.
    """
    facts, plan = config.get("unlabelled"), config["plan"]
    if facts is None or not unchanged(inputs.unlabelled, config["origin"]["unlabelled"]):
        return None
    assert inputs.unlabelled is not None
    samples = spread(inputs.unlabelled.samples, IMAGES, inputs.config.seed)
    entries = prompt_tables(inputs, samples, maps, "unlabelled images", plan["vision_features"])
    policy, contexts = load_policy(final_model), [entry.context for entry in entries]
    chosen = choose_prompts(policy, contexts, plan["ppo"]["max_steps"], plan["reward"] == "net")
    deployment = Deployment.from_json(config["deployment"])
    parts = [_judged(inputs, maps, *part, deployment) for part in (tests, (samples, chosen))]
    return unlabelled_section(parts[0], parts[1], facts, inputs.config.seed)


def _judged(
    inputs: RunInputs, maps: ForegroundMaps, samples: list[Sample], chosen: np.ndarray, deployment: Deployment
) -> JudgedImages:
    rows, fixed = [], deployment.best_fixed if deployment.choice == "fixed" else AS_IT_IS
    for sample, prompt in zip(samples, chosen, strict=True):
        image = sample.load_image()
        masks = inputs.probabilities(image) > 0.5
        after = masks[prompt if deployment.choice == "policy" else fixed]
        rows.append(judged_row(maps, sample.group_id, image, (masks[AS_IT_IS], after), sample.load_mask()))
    return judged_images(rows)
