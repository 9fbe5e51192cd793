"""What the roads need to be trained: the command of each part, its run, and what it cost."""

import hashlib
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_reward_network.artefacts import read_json
from rl_reward_network.data.splits import Split
from rl_reward_network.methods.methods import POST, PROMPTS_LABELS, PROMPTS_NET, REWARD_NET
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.ppo.deploy import load_policy, load_policy_of_run
from rl_reward_network.report.cost import Cost, sorted_items
from rl_reward_network.report.deployment import labels_of_splits
from rl_reward_network.run import AGREEMENT, BEST_REWARD_NET, FINAL

PPO = ("PPO", "decision")  # among the seconds of a run


@dataclass(frozen=True)
class PartCommand:
    """How a part is made.

    Args:
        part: its name.
        words: command of `sa2va-rl` and flags.
        find: the newest run with these settings, finished or interrupted; None if there is none.
    """

    part: str
    words: tuple[str, ...]
    find: Callable[[], Path | None]


def is_finished(part: str, run: Path) -> bool:
    """Whether the run of a part is complete."""
    return (run / (AGREEMENT if part == REWARD_NET else FINAL)).exists()


def make_part(command: PartCommand) -> tuple[Path, bool]:
    """The finished run of a part, and whether it existed; else it is trained, or resumed, by its command.

    Raises:
        ValueError: the command failed; names it.
    """
    run = command.find()
    if run is not None and is_finished(command.part, run):
        return run, True
    words = [*command.words, *(["--resume", "--run_folder", str(run)] if run is not None else [])]
    line = f"sa2va-rl {shlex.join(words)}"
    print(f"\n{line}", flush=True)
    result = subprocess.run([sys.executable, "-m", "rl_reward_network.cli", *words])
    run = command.find()
    if result.returncode or run is None or not is_finished(command.part, run):
        raise ValueError(f"{command.part} failed with exit status {result.returncode}: {line}")
    return run, False


def check_split(part: str, run: Path, split: Split) -> None:
    """Check that a part was trained with the same split of patients.

    Raises:
        ValueError: it has another split; names the run.
    """
    groups = {name: sorted(ids) for name, ids in read_json(run / "split.json")["groups"].items()}
    if groups != {name: sorted(ids) for name, ids in split.groups.items()}:
        raise ValueError(
            f"{run}: {part} was trained with another split of the patients, so its results cannot stand in one table; "
            "move the run away, or compare with the --split_seed and data of that run"
        )


def part_digest(part: str, run: Path) -> str:
    """A digest of what a part has trained: another training, of the same settings too, has another."""
    if part == REWARD_NET:
        return RewardNetwork.from_pretrained(run / BEST_REWARD_NET).fingerprint
    return hashlib.sha256((run / FINAL / "config.json").read_bytes()).hexdigest()


def cost_of(part: str, run: Path, labelled: dict[str, int], searched: bool = False) -> Cost:
    """What the training of a part cost.

    Args:
        part: its name.
        run: its finished run.
        labelled: split -> number of labelled images in the data.
        searched: only what was found by search before PPO counts.
    """
    if part == REWARD_NET:
        return _reward_net_cost(run)
    config = read_json(run / FINAL / "config.json")
    peak = config.get("peak_memory_gib")
    if part in (PROMPTS_LABELS, PROMPTS_NET, POST):
        parameters = 0 if searched else _parameters(part, run / FINAL)
        seconds = sum(value for name, value in config["seconds"].items() if not (searched and name in PPO))
        return Cost(
            seconds / 60, sorted_items(_labels(config, searched)), parameters, peak, config.get("resumed", False)
        )
    parameters = sum(trained for _, _, trained in config["parameters"])
    reward_split = min(config["labels"], labelled.get("reward", 0))
    chose = (config.get("validation") or {}).get("labelled", 0)  # the weights
    labels = {"reward": reward_split, "policy": config["labels"] - reward_split, "val": chose}
    return Cost(config["minutes"], sorted_items(labels), parameters, peak)


def _reward_net_cost(run: Path) -> Cost:
    result = read_json(run / AGREEMENT)
    network = RewardNetwork.from_pretrained(run / BEST_REWARD_NET)
    minutes = sum(result["seconds"].get(name, 0.0) for name in ("making masks", "training", "calibrating")) / 60
    labels = {split: result["used"][split]["images"] for split in ("reward", "val")}
    parameters = sum(tensor.numel() for tensor in network.parameters())
    return Cost(minutes, sorted_items(labels), parameters, result.get("peak_memory_gib"), result.get("resumed", False))


def _labels(config: dict[str, Any], searched: bool) -> dict[str, int]:
    """Labelled images that a policy, or what was found by search beside it, was trained or chosen on."""
    if "choice" not in config["deployment"]:  # of version 0.11 or earlier, which counted those of training alone
        return dict(config.get("labels", {}))
    uses = {use: of for use, of in config["labels"].items() if use != "weights" or not searched}
    return labels_of_splits(uses)


def _parameters(part: str, final_model: Path) -> int:
    """Number of parameters of a policy."""
    policy = load_policy_of_run(final_model)[0] if part == POST else load_policy(final_model)
    return sum(tensor.numel() for tensor in policy.parameters())
