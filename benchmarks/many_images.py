"""Seconds and memory of everything that is done per image, except the networks, for up to 10,000 images.

    python -m benchmarks.many_images

Small pictures of four per patient are written, and read, checked and split as in a run. Their masks are mocked: each
image gets a random row of scores and metrics, for PPO and for the evaluation. Each number of images runs in a separate
process, so that its memory is measured alone. The last column is the growth from the last but one number
to the last, divided by linear growth: 1.0 is linear.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from PIL import Image
from rich.console import Console
from rich.table import Table

from rl_reward_network.atomic_io import write_json
from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.masks import to_rle
from rl_reward_network.data.splits import make_split, select
from rl_reward_network.env.observation import IMAGE_FEATURES
from rl_reward_network.env.sa2va_finetune_env import PromptContext
from rl_reward_network.inputs.loading import check_files
from rl_reward_network.ppo.baselines import POLICY, RIDGE, compare
from rl_reward_network.ppo.contexts import load_tables, ridge_choices, save_tables, table_of
from rl_reward_network.ppo.policy import choose_prompts
from rl_reward_network.ppo.prompt_report import EvaluationResult, write_report
from rl_reward_network.ppo.settings import PPOSettings
from rl_reward_network.ppo.train import train_prompt_policy
from rl_reward_network.report.deployment import Deployment, decide, stack
from rl_reward_network.report.metrics import SampleTable
from rl_reward_network.rewards.table import MASK_REWARDS

SIDE, PER_PATIENT, PROMPTS, VISION = 64, 4, 11, 128  # pixels, images, prompts, features of Sa2VA's


@dataclass(frozen=True)
class Args:
    """Seconds and memory of everything but the networks, for growing numbers of images."""

    images: tuple[int, ...] = (1250, 2500, 5000, 10000)
    """How many images, smallest first."""
    alone: bool = False
    """Measure the first number in this process and print JSON; used for the separate processes."""


def main(args: Args) -> None:
    """One process for each number of images, then the table."""
    if args.alone:
        print(json.dumps(measured(args.images[0])))
        return
    rows = []
    for count in args.images:
        command = [sys.executable, "-m", "benchmarks.many_images", "--alone", "--images", str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"{count} images measured")
    show(args.images, rows)


def show(counts: tuple[int, ...], rows: list[dict[str, float]]) -> None:
    """A line for each stage."""
    table = Table(title="seconds, and peak memory in MB until then")
    for name in ("", *(f"{count} images" for count in counts), "to linear"):
        table.add_column(name, justify="left" if not name else "right")
    grown = counts[-1] / counts[-2] if len(counts) > 1 else 1.0
    for name in rows[0]:
        values = [row[name] for row in rows]
        ratio = f"{values[-1] / values[-2] / grown:.2f}" if len(values) > 1 and values[-2] else "-"
        table.add_row(name, *(f"{value:.2f}" if "MB" not in name else f"{value:.0f}" for value in values), ratio)
    Console(width=120).print(table)


def measured(count: int) -> dict[str, float]:
    """Seconds of each stage and the peak of memory after it."""
    measurements: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        measurements[name] = time.perf_counter() - start
        measurements[f"{name}, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return result

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "data", count)
        samples = timed("read annotations", lambda: read_annotations(folder / "data"))
        timed("decode every image", lambda: check_files(samples))
        split = timed("split", lambda: make_split(samples, 0))
        timed("select", lambda: [select(samples, split, part) for part in split.groups])
        entries = mocked_tables([(sample.sample_id, sample.group_id) for sample in samples])
        timed("save tables", lambda: save_tables(folder / "t.json", {"policy": entries, "val": entries}))
        loaded = timed("load tables", lambda: load_tables(folder / "t.json"))["policy"]
        contexts = loaded
        ppo = PPOSettings(learning_rate=3e-4)
        model = timed("PPO, 2000 steps", lambda: train_prompt_policy(contexts, contexts, ppo, folder / "run"))
        tables, chosen = [table_of(entry) for entry in loaded], choose_prompts(model, contexts)
        deployment = timed("decide", lambda: decide_on(tables, chosen))
        picks = {POLICY: chosen, RIDGE: timed("ridge per prompt", lambda: ridge_choices(loaded, loaded, "net"))}
        comparison = timed("compare", lambda: compare(tables, tables, picks, deployment, 0))
        result = EvaluationResult(comparison, tuple(map(str, range(PROMPTS))), {})
        timed("report", lambda: write_report(folder / "evaluation", result))
    return measurements


def decide_on(tables: list[SampleTable], chosen: np.ndarray) -> Deployment:
    """The decision, without the fits of PPO for it."""
    dice = stack(tables, "dice").T
    return decide(dice, dice[chosen, np.arange(len(tables))], [table.group_id for table in tables])


def write_data(folder: Path, count: int) -> None:
    """`count` small noisy pictures with a disc as their mask, four for each patient."""
    (folder / "images").mkdir(parents=True)
    rng, records = np.random.default_rng(0), []
    rows, cols = np.mgrid[0:SIDE, 0:SIDE]
    mask = to_rle((rows - SIDE / 2) ** 2 + (cols - SIDE / 2) ** 2 < SIDE**2 / 16)
    for number in range(count):
        name = f"{number:06d}.png"
        Image.fromarray(rng.integers(0, 256, (SIDE, SIDE), dtype=np.uint8)).save(folder / "images" / name)
        group = f"patient {number // PER_PATIENT}"
        records.append({"image": name, "text": ["blood vessel"], "mask": mask, "group": group})
    write_json(folder / "annotations.json", records)


def mocked_tables(ids: list[tuple[str, str]]) -> list[PromptContext]:
    """A random row for each image."""
    rng = np.random.default_rng(0)

    def numbers() -> np.ndarray:
        return rng.random(PROMPTS, dtype=np.float32)

    def entry(sample: str, group: str) -> PromptContext:
        metrics = {name: numbers().astype(np.float64) for name in MASK_REWARDS}
        features = np.zeros(IMAGE_FEATURES + VISION, dtype=np.float32)
        features[IMAGE_FEATURES:] = rng.normal(size=VISION)
        return PromptContext(sample, features, numbers(), metrics, group, own_dice=0.5)

    return [entry(*names) for names in ids]


if __name__ == "__main__":
    main(tyro.cli(Args))
