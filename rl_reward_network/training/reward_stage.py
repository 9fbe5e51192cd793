"""Step 1 as a whole: a reward network from the patients of the `reward` split, and how far it can be trusted."""

import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from rl_reward_network.artefacts import write_json
from rl_reward_network.evaluation.agreement import Row, agreement_table
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.rewards.learned import score_masks
from rl_reward_network.rewards.masks import dice
from rl_reward_network.training.damage import damage
from rl_reward_network.training.reward_network import PRESETS, RewardExample, RewardTrainingConfig, train_reward_network
from rl_reward_network.training.run_folder import describe_run
from rl_reward_network.training.world import World, reward_examples

TEST_IMAGES = 8
DAMAGED_MASKS = 8  # per test image, beside Sa2VA's own


def reward_config(world: World, mode: str, steps: int | None = None) -> RewardTrainingConfig:
    """The mode's settings on this world; `steps` replaces the preset's."""
    config = replace(PRESETS[mode], seed=world.config.seed, device=world.config.device)
    return config if steps is None else replace(config, steps=steps)


def run_reward_stage(world: World, mode: str, run: Path, steps: int | None = None) -> RewardNetwork:
    """Train a reward network in `run`, judge it on test patients, and return it.

    Writes best_reward_net/, agreement.json, config.json, split.json, metrics.jsonl and logs/.

    Args:
        world: data, split and frozen model.
        mode: "quick" or "full", a key of `PRESETS`.
        run: an empty run folder.
        steps: fewer or more optimiser steps than the preset's.

    Raises:
        ValueError: a split has no labelled image.
    """
    config = reward_config(world, mode, steps)
    counts = {"reward": config.images, "val": config.val_images, "test": TEST_IMAGES}
    picked = {name: world.pick(name, count, labelled=True) for name, count in counts.items()}
    describe_run(run, world, {"stage": "reward network", "mode": mode})
    train, val, test = (reward_examples(world, picked[name], f"masks of {name} patients") for name in counts)
    network = train_reward_network(train, val, config, run, info=origin(world, mode, config))
    write_json(run / "agreement.json", judge_agreement(network, test, world.config.seed))
    return network


def origin(world: World, mode: str, config: RewardTrainingConfig) -> dict[str, Any]:
    """What a reward network must have in common with a later run to be used by it without a word."""
    return {
        "mode": mode,
        "settings": {name: value for name, value in asdict(config).items() if name not in ("seed", "device")},
        "data_fingerprint": world.data_fingerprint,
        "model_fingerprint": world.segmenter.fingerprint,
        "prompts": list(world.prompts),
        "split_seed": world.split.seed,
    }


def find_reward_network(world: World, mode: str, steps: int | None = None) -> Path | None:
    """The newest finished reward network under the output folder that this very step 1 would train again."""
    wanted = origin(world, mode, reward_config(world, mode, steps))
    for finished in sorted(world.config.output_dir.glob("reward_net_*/agreement.json"), reverse=True):
        folder = finished.parent / "best_reward_net"  # agreement.json is written last: without it training was cut off
        try:
            info = RewardNetwork.from_pretrained(folder).training_info
        except ValueError as error:
            warnings.warn(f"passed over: {error}", stacklevel=2)
            continue
        if all(info.get(name) == value for name, value in wanted.items()):
            return folder
    return None


def check_no_leak(world: World, network: RewardNetwork, where: Path) -> None:
    """Refuse a reward network that has seen patients on whom it will be asked to judge.

    Raises:
        ValueError: its weights were trained on patients of the policy, val or test split, or chosen on patients of
            policy or test, or it does not say.
    """
    remedy = "train one on these data and this split: bash run_experiment3.sh quick"
    for groups, use, splits in (
        ("train_groups", "trained", ("policy", "val", "test")),
        ("val_groups", "chosen", ("policy", "test")),
    ):
        if groups not in network.training_info:
            raise ValueError(f"{where}: the reward network does not say which patients it was {use} on; {remedy}")
        for name in splits:
            if shared := set(network.training_info[groups]) & set(world.split.groups[name]):
                raise ValueError(
                    f"{where}: the reward network was {use} on {len(shared)} patients of the {name} split; {remedy}"
                )


def judge_agreement(network: nn.Module, examples: list[RewardExample], seed: int) -> dict[str, Row]:
    """Predicted against true Dice of Sa2VA's and damaged masks, beside predicting the mean."""
    rng = np.random.default_rng(seed)
    predicted, true, images = [], [], []
    for number, example in enumerate(examples):
        masks = [np.asarray(mask) > 0.5 for mask in example.masks]
        masks += [damage(example.truth, rng) for _ in range(DAMAGED_MASKS)]
        stack = np.stack(masks)
        predicted.append(score_masks(network, example.image, stack.astype(np.float32)))
        true.append(dice(stack, np.broadcast_to(example.truth, stack.shape)))
        images += [number] * len(stack)
    return agreement_table(np.concatenate(predicted), np.concatenate(true), np.array(images))
