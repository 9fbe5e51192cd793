"""The commands that train what the roads of a comparison need, and the runs that they have made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import tyro

from rl_reward_network.artefacts import read_json, weights_fingerprint
from rl_reward_network.cli import grpo_flags, operations, prompts, reward
from rl_reward_network.flags import parse
from rl_reward_network.grpo.inputs import open_grpo_inputs
from rl_reward_network.grpo.stage import find_grpo_run
from rl_reward_network.inputs.config import PromptConfig, RunConfig
from rl_reward_network.inputs.loading import RunInputs
from rl_reward_network.methods.methods import (
    AFTER,
    GRADIENT,
    GRPO_LABELS,
    GRPO_NET,
    POST,
    PROMPTS_LABELS,
    PROMPTS_NET,
    REWARD_NET,
    SUPERVISED,
)
from rl_reward_network.methods.parts import PartCommand
from rl_reward_network.methods.stage import MERGED
from rl_reward_network.models.default import is_small
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.ppo.operations import find_post_run
from rl_reward_network.ppo.prompts import find_policy_run
from rl_reward_network.reward_training.stage import find_reward_network, find_unfinished
from rl_reward_network.reward_training.train import PRESETS
from rl_reward_network.run import AGREEMENT, BEST_REWARD_NET

Args = TypeVar("Args")
SUPERVISED_STEPS = {"quick": 200, "full": 300}  # of a model of the embedded one's size; others train for epochs
GRPO_STEPS = {"quick": 60, "full": 140}
LABELS = ("--loop2_iou_weight", "1")  # GRPO paid by labels
WITH_UNLABELLED = (PROMPTS_NET, GRPO_NET, GRADIENT, AFTER)  # paid by the reward network alone
ONLY_GRADIENT = ("--caption_to_mask_weight", "0")


class PartCommands:
    """The command of each part, with the flags of the comparison.

    Args:
        mode: quick or full.
        config: model, data and device, as the user gave them.
        prompting: prompts and limits of the segmenter.
        inputs: opened from both.
        reward_net: reward network to use in place of a new one; None finds or trains one.
    """

    def __init__(
        self, mode: str, config: RunConfig, prompting: PromptConfig, inputs: RunInputs, reward_net: Path | None
    ) -> None:
        self.mode, self.config, self.prompting = mode, config, prompting
        self.inputs, self.reward_net = inputs, reward_net

    def __call__(self, part: str, seed: int, runs: Mapping[str, Path]) -> PartCommand:
        """The command of a part; `runs` are those of the parts that it needs."""
        config = replace(self.config, seed=seed)
        if part not in WITH_UNLABELLED:
            config = replace(config, unlabelled_root=None)
        if part == REWARD_NET:
            return self._reward(config)
        if part in (PROMPTS_LABELS, PROMPTS_NET):
            return self._prompts(part, config, runs)
        if part == POST:
            return self._operations(config)
        return self._grpo(part, config, runs)

    def _reward(self, config: RunConfig) -> PartCommand:
        words = [self.mode, *flags_of(config), *flags_of(self.prompting)]

        def find() -> Path | None:
            if self.reward_net is not None:
                return named_run(self.reward_net)
            inputs, plan = self._inputs(config.seed), reward.check(parsed(reward.Args, words))
            folder, unfinished = find_reward_network(inputs, plan, config.seed), find_unfinished(inputs, plan)
            return folder.parent if folder is not None else unfinished and unfinished.path

        return PartCommand(REWARD_NET, ("reward", *words), find)

    def _prompts(self, part: str, config: RunConfig, runs: Mapping[str, Path]) -> PartCommand:
        network = runs[REWARD_NET] / BEST_REWARD_NET
        labels = ["--reward", "dice"] if part == PROMPTS_LABELS else []
        words = [self.mode, *flags_of(config), *flags_of(self.prompting), *labels, "--reward_net", str(network)]

        def find() -> Path | None:
            inputs = self._inputs(config.seed)
            inputs = inputs if config.unlabelled_root else replace(inputs, unlabelled=None)
            plan, rewards = prompts.check(parsed(prompts.Args, words))
            return find_policy_run(inputs, plan, rewards, network)

        return PartCommand(part, ("prompts", *words), find)

    def _operations(self, config: RunConfig) -> PartCommand:
        words = [self.mode, *flags_of(config), *flags_of(self.prompting)]

        def find() -> Path | None:
            return find_post_run(self._inputs(config.seed), operations.check(parsed(operations.Args, words)))

        return PartCommand(POST, ("operations", *words), find)

    def _grpo(self, part: str, config: RunConfig, runs: Mapping[str, Path]) -> PartCommand:
        if part == AFTER:
            config = replace(config, model_path=str(runs[SUPERVISED] / MERGED))
        words = [self.mode, *flags_of(config), *self._grpo_flags(part, runs)]
        words += ["--segment_question", self.inputs.prompts[0]]
        words += ["--max_dynamic_patch", str(self.prompting.max_tiles)]

        def find() -> Path | None:
            weights = self._merged_fingerprint(runs[SUPERVISED]) if part == AFTER else self.inputs.segmenter.fingerprint
            args = parsed(grpo_flags.Args, words)
            inputs, folder = open_grpo_inputs(args.inputs, args.regions), args.rewards.reward_net
            network = None if folder is None else RewardNetwork.from_pretrained(folder)
            plan = grpo_flags.make_plan(args, inputs, network)
            return find_grpo_run(inputs, plan, lambda run: weights.startswith(run.settings["model_fingerprint"]))

        return PartCommand(part, ("grpo", *words), find)

    def _grpo_flags(self, part: str, runs: Mapping[str, Path]) -> list[str]:
        network = ["--reward_net", str(runs[REWARD_NET] / BEST_REWARD_NET)] if REWARD_NET in runs else []
        images = PRESETS[self.mode].images
        if self.reward_net is not None:
            images = read_json(named_run(self.reward_net) / AGREEMENT)["used"]["reward"]["images"]
        budget = ["--max_labelled", str(images)]  # the labels of the reward network
        own: dict[str, Sequence[str]] = {
            SUPERVISED: ["--objective", "supervised", *budget],
            GRPO_LABELS: LABELS,
            GRPO_NET: network,
            GRADIENT: [*network, *ONLY_GRADIENT],
            AFTER: network,
        }
        steps = SUPERVISED_STEPS if part == SUPERVISED else GRPO_STEPS
        small = is_small(self.config.model_path)
        return [*own[part], *(["--max_steps", str(steps[self.mode])] if small else [])]

    def _merged_fingerprint(self, run: Path) -> str:
        """Of the weights that a run has trained, as they are loaded to train on."""
        config = self.config
        return weights_fingerprint(load_sa2va_model(run / MERGED, config.device, dtype=config.dtype)[0])

    def _inputs(self, seed: int) -> RunInputs:
        return replace(self.inputs, config=replace(self.inputs.config, seed=seed))


def named_run(reward_net: Path) -> Path:
    """The run of a reward network that the user names.

    Raises:
        ValueError: the folder is not that of a finished run; its split and its cost would be unknown.
    """
    run = reward_net.resolve().parent
    if not ((run / AGREEMENT).exists() and (run / "split.json").exists()):
        raise ValueError(
            f"--reward_net {reward_net}: name the folder {BEST_REWARD_NET} of a finished run reward_net_<time>; a copy "
            "tells neither the split nor the cost of its training"
        )
    return run


def _trained_weights(run: Path) -> str:
    """The fingerprint of the weights that a GRPO run began with: two runs may differ in nothing else."""
    return str(read_json(run / "config.json")["origin"]["model_fingerprint"])


def parsed(args_type: Callable[..., Args], words: Sequence[str]) -> Args:
    """The arguments of a command from its flags."""
    return parse(args_type, words, config=(tyro.conf.FlagCreatePairsOff,))


def flags_of(settings: Any) -> list[str]:
    """Flags and values of the settings that are not the default; the data are always named."""
    words = []
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        if entry.name == "grey_levels" or value is None:  # levels are measured again
            continue
        if value != entry.default or entry.name == "data_root":
            words += [f"--{entry.name}", str(value)]
    return words
