"""Compare a trained prompt policy with its baselines on patients it has never seen, and write the report.

    python -m scripts.evaluate_rl_finetuned_sa2va --model_path outputs/sa2va_rl_finetune_*/final_model --split test

Model, data, prompts and reward network are the run's own, read from its config.json. Written: <run>/evaluation/ with
eval.json, eval.csv and report.html (one file; open it in a browser).
"""

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from rl_reward_network.data.sample import Sample
from rl_reward_network.evaluation.baselines import Comparison, compare, overlay_picks
from rl_reward_network.evaluation.report import EvaluationResult, Overlay, write_report
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.training.policy_stage import load_tables
from rl_reward_network.training.prompt_ppo import choose_prompts, load_policy
from rl_reward_network.training.reward_stage import check_no_leak
from rl_reward_network.training.run_folder import read_run_config
from rl_reward_network.training.world import World, WorldConfig, open_world, prompt_tables
from scripts.cli import run


@dataclass(frozen=True)
class Args:
    """Compare a trained prompt policy with its baselines on patients it has never seen."""

    model_path: tuple[str, ...]
    """The run's final_model folder; several (a pattern) mean the newest of them."""
    split: Literal["test", "val"] = "test"
    """Patients to evaluate on; val has already been looked at during training."""
    images: int | None = None
    """At most this many images, one per series before a second; without it all."""
    data_root: Path | None = None
    """Where the data are now, if not where they were in training."""
    gpu: int | None = None
    """Index of the GPU; -1 is the CPU; without it as in training."""


def main(args: Args) -> None:
    """Score every prompt on the split, compare the rows, write the report."""
    final_model = newest(args.model_path)
    folder = final_model.parent
    config = read_run_config(folder)
    world = _open_as_trained(config, args, folder)
    network = _reward_network(config, world, folder)
    samples = world.pick(args.split, args.images or len(world.samples))
    tables = prompt_tables(world, samples, network.to(world.config.device), f"{args.split} patients")
    chosen = choose_prompts(load_policy(final_model), [entry.context for entry in tables])
    seen = load_tables(folder / "tables.json")
    comparison = compare(seen["policy"], seen["val"], [e.table for e in tables], chosen, world.config.seed)
    overlays = _overlays(world, comparison, samples, chosen, [entry.table.sample_id for entry in tables])
    result = EvaluationResult(comparison, world.prompts, _about(config, args.split, world), overlays=overlays)
    whole_test = args.split == "test" and args.images is None
    report = write_report(folder / ("evaluation" if whole_test else f"evaluation_{args.split}_{len(samples)}"), result)
    _show(comparison)
    print(f"\nreport: {report}")


def newest(paths: tuple[str, ...]) -> Path:
    """The newest of the folders that the paths or patterns name.

    Raises:
        ValueError: no folder matches.
    """
    matches = {Path(match) for path in paths for match in ([path] if Path(path).exists() else glob.glob(path))}
    found = sorted(matches, key=lambda match: match.stat().st_mtime)
    if not found:
        raise ValueError(
            f"model_path {' '.join(paths)}: no such folder; train a policy: bash run_step2_finetune.sh quick"
        )
    if len(found) > 1:
        print(f"{len(found)} folders match, the newest is evaluated: {found[-1]}")
    return found[-1]


def _open_as_trained(config: dict[str, Any], args: Args, folder: Path) -> World:
    """The world of the run; a split that no longer fits the data is an error."""
    own = dict(config["world"])
    for name in ("data_root", "output_dir", "prompts"):
        own[name] = Path(own[name]) if own[name] is not None else None
    own["data_root"] = args.data_root or own["data_root"]
    own["gpu"] = own["gpu"] if args.gpu is None else args.gpu
    world = open_world(WorldConfig(**own), folder / "split.json")
    for name, value in (("model_fingerprint", world.segmenter.fingerprint), ("prompts", list(world.prompts))):
        if config[name] != value:
            raise ValueError(f"{folder / 'config.json'}: {name} is {config[name]}, now it is {value}; train again")
    return world


def _reward_network(config: dict[str, Any], world: World, folder: Path) -> RewardNetwork:
    """The network that rewarded this run, proven to be the same one."""
    path = Path(config["reward_net"])
    network = RewardNetwork.from_pretrained(path)
    check_no_leak(world, network, path)
    if network.fingerprint != config["reward_net_fingerprint"]:
        raise ValueError(f"{folder / 'config.json'}: reward_net {path} has other weights now; run step 2 again")
    return network


def _overlays(
    world: World, comparison: Comparison, samples: list[Sample], chosen: np.ndarray, ids: list[str]
) -> tuple[Overlay, ...]:
    """Best, median and worst image of the policy, with the masks of the default and of the chosen prompt."""
    overlays = []
    for title, place in overlay_picks(comparison).items():
        index = ids.index(comparison.tables[place].sample_id)
        image = samples[index].load_image()
        masks = world.probabilities(image) > 0.5
        truth = samples[index].load_mask()
        overlays.append(Overlay(title, ids[index], image, truth, masks[0], masks[chosen[index]]))
    return tuple(overlays)


def _about(config: dict[str, Any], split: str, world: World) -> dict[str, Any]:
    """What the reader of the report must know about where the numbers come from."""
    return {
        "mode": config["mode"],
        "split": split,
        "Sa2VA": Path(config["world"]["model_path"]).name,
        "model fingerprint": config["model_fingerprint"],
        "data fingerprint": config["data_fingerprint"][:16],
        "reward network": f"{config['reward_net_info']['mode']}, seed {config['reward_net_info']['seed']}",
        "seed": world.config.seed,
        "commit": config["commit"],
        "masks computed / read from the bank": f"{world.bank.computed} / {world.bank.reused}",
    }


def _show(comparison: Comparison) -> None:
    """The rows on the terminal, and the verdict in words."""
    table = Table(title=f"mean over patients ({comparison.criterion})")
    for name in ("", "mean", "95 % interval", "to default", "to best fixed"):
        table.add_column(name)
    for row in comparison.rows:
        mean = row.means[comparison.criterion]
        interval = "-" if mean.low is None else f"{mean.low:.3f} to {mean.high:.3f}"
        table.add_row(
            row.name, f"{mean.mean:.3f}", interval, f"{row.to_default.mean:+.3f}", f"{row.to_fixed.mean:+.3f}"
        )
    Console().print(table)
    for line in (comparison.verdict.sentence, *comparison.notes):
        print(line)


if __name__ == "__main__":
    run(main, Args)
