"""Do images without masks help where the labelled ones never had their look? The table of docs/results.md.

    python -m benchmarks.new_look --seeds 0 1 2 --look faint --output_dir outputs/new_look
    python -m benchmarks.new_look --look faint --output_dir outputs/new_look --show     # of what is finished

20 labelled patients have every look of the embedded world but one. 100 other patients have that look alone; their
images join GRPO without masks. 40 more patients of that look are the test. For each seed: a reward network (quick),
and GRPO (quick, 60 steps) without the unlabelled images, with those in the network's domain (the default), and with all
of them. Every command is printed; finished runs are not repeated.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from rl_reward_network.atomic_io import read_json, whole_folder, write_json
from rl_reward_network.cli import grpo
from rl_reward_network.cli.app import run
from rl_reward_network.data.items import Sample
from rl_reward_network.data.splits import subsample
from rl_reward_network.embedded.angiograms import LOOKS
from rl_reward_network.embedded.datasets import write_angiograms
from rl_reward_network.grpo.final_model import load_base
from rl_reward_network.grpo.image_context import FeatureCache
from rl_reward_network.grpo.measure import measure
from rl_reward_network.grpo.prompts import image_prompt
from rl_reward_network.grpo.trainable import prepare_model
from rl_reward_network.inputs.config import RegionConfig
from rl_reward_network.inputs.loading import read_samples
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.lora import load_trainable
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.checkpoint_sa2va import TRAINABLE
from rl_reward_network.report.statistics import CHANGE, UNIT, few_patients_note, mean_interval
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.rewards.metrics import dice
from rl_reward_network.run import AGREEMENT, BEST_REWARD_NET, FINAL

PATIENTS = {"labelled": 20, "unlabelled": 100, "test": 40}
STEPS = 60
WITHOUT, WITH, ALL = "without", "with", "with_all"
Name = Literal["with", "with_all"]
RULES = (WITH, ALL)
ROWS = {
    "base": "sa2va-nano as it is",
    WITHOUT: "GRPO without the unlabelled images",
    WITH: "GRPO with those in the network's domain (the default)",
    ALL: "GRPO with all of them",
    "network": "the reward network's own segmentation",
}
DIFFERENCES = (
    *((name, "base") for name in (WITHOUT, WITH, ALL)),
    *((name, WITHOUT) for name in (WITH, ALL)),
)
RESULTS = "results.json"


@dataclass(frozen=True)
class Args:
    """Train with and without unlabelled images of a new look, and evaluate on patients of that look."""

    seeds: tuple[int, ...] = (0,)
    """Seeds of every run."""
    look: str = "faint"
    """Look of the unlabelled and the test patients, a key of LOOKS."""
    output_dir: Path = Path("outputs/new_look")
    """Parent of the data and the runs."""
    rules: tuple[Name, ...] = ("with", "with_all")
    """Which unlabelled images join: those in the domain, all."""
    show: bool = False
    """Run nothing; show what is finished."""

    def __post_init__(self) -> None:
        """Refuse unknown looks."""
        if self.look not in LOOKS:
            raise ValueError(f"look is {self.look!r}, expected one of {', '.join(LOOKS)}")

    @property
    def folder(self) -> Path:
        """Of this look."""
        return self.output_dir / self.look


def main(args: Args) -> None:
    """Make the missing runs, and show all."""
    if not args.show:
        data = make_data(args.folder / "data", args.look)
        for seed in args.seeds:
            if not _finished(args.folder / f"seed_{seed}" / RESULTS, args.rules):
                train(data, args.folder / f"seed_{seed}", seed, args.rules)
                evaluate(data, args.folder / f"seed_{seed}", _trained(args.folder / f"seed_{seed}"))
    show(args)


def _finished(results: Path, rules: Sequence[str]) -> bool:
    """Whether every rule that is asked for was evaluated."""
    return results.exists() and set(rules) <= set(read_json(results)["dice"])


def _trained(folder: Path) -> list[str]:
    """The rules of which a run is finished, those of earlier calls, too."""
    return [name for name in RULES if (folder / name / FINAL).exists()]


def make_data(folder: Path, look: str) -> Path:
    """The folders labelled/, unlabelled/ and test/ of different patients, rendered if they are missing."""
    others, first = tuple(name for name in LOOKS if name != look), 0
    for name, count in PATIENTS.items():
        if not (folder / name).exists():
            with whole_folder(folder / name) as temporary:
                write_angiograms(temporary, count, others if name == "labelled" else (look,), first_patient=first)
        first += count
    return folder


def train(data: Path, folder: Path, seed: int, rules: Sequence[str]) -> None:
    """The reward network and the runs of GRPO of a seed."""
    flags = f"--data_root {data / 'labelled'} --seed {seed} --output_dir {folder}"
    if not list(folder.glob(f"*/{AGREEMENT}")):
        _call(f"reward quick {flags}")
    flags += f" --reward_net {_reward_net(folder)} --max_steps {STEPS}"
    unlabelled = f"--unlabelled_root {data / 'unlabelled'}"
    for name in (WITHOUT, *rules):
        if not (folder / name / FINAL).exists():
            resume = "--resume" if (folder / name / "config.json").exists() else ""
            more = unlabelled if name in RULES else ""
            _call(f"grpo quick {flags} {more} --run_folder {folder / name} {resume}", name == ALL)


def _reward_net(folder: Path) -> Path:
    return next(iter(sorted(folder.glob(f"*/{AGREEMENT}")))).parent / BEST_REWARD_NET


def _call(command: str, everywhere: bool = False) -> None:
    """Run a command of `sa2va-rl`; a network that judges `everywhere` needs this process."""
    print(f"\nsa2va-rl {command}", flush=True)
    words = shlex.split(command)
    if not everywhere:
        subprocess.run([sys.executable, "-m", "rl_reward_network.cli", *words], check=True, env=os.environ)
        return
    with patch.object(RewardNetwork, "outside", lambda *_: None):
        grpo.main(tyro.cli(grpo.Args, args=words[1:], config=(tyro.conf.FlagCreatePairsOff,)))


def evaluate(data: Path, folder: Path, rules: Sequence[str]) -> None:
    """Write results.json: Dice of each row on one test image per series, and what the network says of both looks."""
    tests = read_samples(data / "test")
    tests = subsample(tests, len(tests) // 3, seed=0)  # one of three frames
    result: dict[str, object] = {"groups": [sample.group_id for sample in tests]}
    columns = {name: _dice(folder / name, tests) for name in (WITHOUT, *rules)}
    columns["base"] = _dice(folder / WITHOUT, tests, trained=False)
    network = RewardNetwork.from_pretrained(_reward_net(folder))
    maps = ForegroundMaps.beside(folder / WITHOUT, network)
    columns["network"] = np.array([_own_dice(maps, sample) for sample in tests])
    labelled = [s for s in read_samples(data / "labelled") if s.group_id not in network.training_info["train_groups"]]
    for name, samples in (("known looks", labelled), ("new look", tests)):
        own = np.array([_own_quality(maps, sample) for sample in samples])
        result[name] = {"score": float(own[:, 0].mean()), "spread_median": float(np.median(own[:, 1]))}
    result["left out"] = {name: read_json(folder / name / "config.json")["domain"]["outside"] for name in rules}
    write_json(folder / RESULTS, result | {"dice": {name: values.tolist() for name, values in columns.items()}})


def _dice(run_folder: Path, tests: list[Sample], trained: bool = True) -> np.ndarray:
    """float64 (N,): Dice of a run's model, or of the model that it began with."""
    config = read_json(run_folder / FINAL / "config.json")
    origin = config["settings"]
    model, processor = load_base(DEFAULT_MODEL, origin["model_fingerprint"])
    processor.max_tiles = 1
    prepare_model(model, origin["lora_r"], origin["lora_alpha"])
    if trained:
        load_trainable(model, run_folder / FINAL / TRAINABLE)
    prompts = [image_prompt(sample, RegionConfig().segment_question) for sample in tests]
    longest = origin["training"]["max_completion_length"]
    return measure(model, prompts, FeatureCache(model, processor), longest).values["dice"]


def _own_quality(maps: ForegroundMaps, sample: Sample) -> tuple[float, float]:
    """Score and spread of the network's own segmentation, also outside its domain."""
    scorer = maps.scorer(sample.load_image())
    scorer.outside = None
    quality = scorer.quality(scorer.own_mask[None].astype(np.float32))
    return float(quality["score"][0]), float(quality["std"][0])


def _own_dice(maps: ForegroundMaps, sample: Sample) -> float:
    truth = sample.load_mask()
    assert truth is not None
    return float(dice(maps.scorer(sample.load_image()).own_mask[None], truth[None])[0])


def show(args: Args) -> None:
    """Print the tables in Markdown."""
    files = [file for seed in args.seeds if (file := args.folder / f"seed_{seed}" / RESULTS).exists()]
    results = [read_json(file) for file in files]
    if not results:
        raise ValueError(f"{args.folder}: no finished seed of {list(args.seeds)}; leave --show out")
    groups = results[0]["groups"]
    rows = [name for name in ROWS if all(name in result["dice"] for result in results)]
    values = {name: np.mean([result["dice"][name] for result in results], axis=0) for name in rows}
    each = {name: [float(np.mean(result["dice"][name])) for result in results] for name in rows}
    console = Console(width=200)
    table = Table(f"test patients of look {args.look}", "Dice", "each seed", box=box.MARKDOWN)
    for name in rows:
        table.add_row(
            ROWS[name],
            str(mean_interval(values[name], groups, bounds=UNIT)),
            ", ".join(f"{one:.3f}" for one in each[name]),
        )
    console.print(table, end="\n\n")
    table = Table("difference", "Dice", "each seed", box=box.MARKDOWN)
    for name, other in ((name, other) for name, other in DIFFERENCES if name in rows):
        gain = mean_interval(values[name] - values[other], groups, bounds=CHANGE).signed
        seeds = ", ".join(f"{a - b:+.3f}" for a, b in zip(each[name], each[other], strict=True))
        table.add_row(f"{ROWS[name]} - {ROWS[other]}", gain, seeds)
    console.print(table, end="\n\n")
    columns = ("own score, known looks", "new look", "own spread (median), known looks", "new look")
    table = Table("seed", *columns, *(f"left out: {name}" for name in RULES if name in rows), box=box.MARKDOWN)
    for file, result in zip(files, results, strict=True):
        parts = result["known looks"], result["new look"]
        cells = [f"{part[key]:.4f}" for key in ("score", "spread_median") for part in parts]
        table.add_row(file.parent.name, *cells, *(str(result["left out"][name]) for name in RULES if name in rows))
    console.print(table)
    for note in few_patients_note(len(set(groups))):
        print(note)


if __name__ == "__main__":
    run(main, Args)
