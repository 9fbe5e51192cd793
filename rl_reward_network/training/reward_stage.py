"""Step 1 as a whole: a reward network from the patients of the `reward` split, and how far it can be trusted."""

from dataclasses import replace
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
from rl_reward_network.training.reward_network import PRESETS, RewardExample, train_reward_network
from rl_reward_network.training.run_folder import describe_run
from rl_reward_network.training.world import World, reward_examples

TEST_IMAGES = 8
DAMAGED_MASKS = 8  # per test image, beside Sa2VA's own


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
    config = replace(PRESETS[mode], seed=world.config.seed, device=world.config.device)
    config = replace(config, steps=steps) if steps is not None else config
    counts = {"reward": config.images, "val": config.val_images, "test": TEST_IMAGES}
    picked = {name: world.pick(name, count, labelled=True) for name, count in counts.items()}
    describe_run(run, world, {"stage": "reward network", "mode": mode})
    train, val, test = (reward_examples(world, picked[name], f"masks of {name} patients") for name in counts)
    network = train_reward_network(train, val, config, run, info=origin(world, mode))
    write_json(run / "agreement.json", judge_agreement(network, test, world.config.seed))
    return network


def origin(world: World, mode: str) -> dict[str, Any]:
    """What a reward network must have in common with a later run to be used by it without a word."""
    return {
        "mode": mode,
        "data_fingerprint": world.data_fingerprint,
        "model_fingerprint": world.segmenter.fingerprint,
        "split_seed": world.split.seed,
    }


def find_reward_network(world: World, mode: str) -> Path | None:
    """The newest `best_reward_net` under the output folder that was trained in this mode on these data and masks."""
    folders = sorted(world.config.output_dir.glob("reward_net_*/best_reward_net"), reverse=True)
    wanted = origin(world, mode)
    for folder in folders:
        info = RewardNetwork.from_pretrained(folder).training_info
        if all(info.get(name) == value for name, value in wanted.items()):
            return folder
    return None


def check_no_leak(world: World, network: RewardNetwork, where: Path) -> None:
    """Refuse a reward network that has seen patients on whom it will be asked to judge.

    Raises:
        ValueError: a training patient of the network is in the policy, val or test split.
    """
    seen = set(network.training_info.get("train_groups", ()))
    for name in ("policy", "val", "test"):
        if shared := seen & set(world.split.groups[name]):
            raise ValueError(
                f"{where}: the reward network was trained on {len(shared)} patients of the {name} split; "
                "train one with this seed and these data: bash run_experiment3.sh quick"
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
