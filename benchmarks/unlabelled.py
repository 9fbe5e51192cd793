"""What images without masks are worth: teachers, rewards and preferences, each from the same start, in equal minutes.

    python -m benchmarks.unlabelled ARCADE --unlabelled IMAGES --budgets 20 195 --seeds 0 1 2
    python -m benchmarks.unlabelled ARCADE --unlabelled DCA1/images --tests DCA1 --budgets 195     # another hospital
    python -m benchmarks.unlabelled ARCADE --show                                   # the tables of what is finished

A budget N is the number of labelled images that any part of a row learns from. The start is Sa2VA with a side network,
trained on them; every row continues from it, for about as many minutes, with the same trainable parts; its weights are
chosen on the same validation images, whose masks are counted. Images without masks are those of `--unlabelled` and the
training images beyond the budget; rows with a reward network use those of its own patients' split alone, since it has
learned the others. Every run is a command of `sa2va-rl`, printed before it starts; finished runs are not repeated,
interrupted ones are resumed. Each row is measured on the test images of ARCADE, and on all images of each folder of
`--tests`. Differences are to the start; the rows `longer` and `average` say what more of the same labels, and a moving
average of them, would have given.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from tqdm import tqdm

from benchmarks.common import call, show, train_once, train_reward_once, with_seeds
from rl_reward_network.atomic_io import read_json, write_json
from rl_reward_network.cli.app import run
from rl_reward_network.grpo.inputs import open_grpo_inputs
from rl_reward_network.grpo.prompts import TrainingItem
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.segmenter import load_segmenter
from rl_reward_network.report.statistics import CHANGE, UNIT, few_patients_note, group_means, mean_interval
from rl_reward_network.report.table import ECE, TITLES
from rl_reward_network.rewards.metrics import calibration_error, mask_metrics
from rl_reward_network.run import BEST_REWARD_NET, FINAL

START, LONGER = "start", "longer"
START_FLAGS = "--objective supervised --side_network --max_steps 700 --warmup_steps 100 --eval_steps 100"
VALIDATIONS = 6  # of each row
LEARNED = "--batch_size 32 --caption_to_mask_weight 0"  # the gradient of the reward network alone


@dataclass(frozen=True)
class Method:
    """A row.

    Args:
        title: in the table.
        flags: of `sa2va-rl grpo quick`.
        steps: that take about as many minutes as those of the other rows.
        labels: whether it learns from the true masks of the budget.
        network: whether it needs the reward network of the budget.
    """

    title: str
    flags: str
    steps: int
    labels: bool = False
    network: bool = False


TEACHER = "--objective mean_teacher"
GRPO = "--batch_size 32 --pathwise_weight 0"
SUPERVISED = (
    "--objective supervised --augment True --bce_weight 1 --dice_weight 0.5 --warmup_steps 0.15 --batch_size 32"
)
METHODS = {
    LONGER: Method("supervised, as long", SUPERVISED, 330, labels=True),
    "average": Method("mean teacher, loss on true masks alone", f"{TEACHER} --consistency_weight 0", 250, labels=True),
    "mean_teacher": Method("mean teacher", TEACHER, 250, labels=True),
    "gradient": Method("gradient of the reward network", LEARNED, 200, network=True),
    "grpo": Method("GRPO, reward network", GRPO, 420, network=True),
    "grpo_cells": Method("GRPO, reward network, cells", f"{GRPO} --mask_policy bernoulli", 200, network=True),
    "dpo_learned": Method("DPO, reward network", "--objective dpo --preferred_by learned", 150, network=True),
}
METRICS_SHOWN = ("dice", "cldice", "betti0", "betti1", "recall", "precision", "hd95", ECE)


@dataclass(frozen=True)
class Args:
    """Train every row from the same start, and measure all on the same images."""

    data_root: tyro.conf.Positional[Path]
    """Labelled images, in a format that `sa2va-rl doctor` reads."""
    unlabelled: Path | None = None
    """Folder of images without masks, or whose masks are ignored."""
    tests: tuple[Path, ...] = ()
    """Further folders with masks to measure on."""
    budgets: tuple[int, ...] = (20,)
    """Labelled images to learn from."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of every run."""
    rows: tuple[str, ...] = tuple(METHODS)
    """Rows beside the start."""
    learning_rates: tuple[float, ...] = (1e-3, 1e-4)
    """Peak learning rates that every row tries; validation chooses."""
    times: float = 1.0
    """Multiply the steps of every row by this; 1 is about ten minutes a row on two cores."""
    output_dir: Path = Path("outputs/unlabelled")
    """Folder of the runs."""
    show: bool = False
    """Run nothing; show what is finished."""

    def __post_init__(self) -> None:
        """Refuse unknown rows."""
        if unknown := set(self.rows) - set(METHODS):
            raise ValueError(f"rows: got {sorted(unknown)[0]!r}, expected some of {', '.join(METHODS)}")


def main(args: Args) -> None:
    """Make the missing runs, measure them, and show all."""
    if not args.show:
        for seed in args.seeds:
            for budget in args.budgets:
                train(args, budget, seed)
    for budget in args.budgets:
        for name in ("test", *(path.name for path in args.tests)):
            show_budget(args, budget, name)


def train(args: Args, budget: int, seed: int) -> None:
    """The start, the reward network and the rows of a budget and a seed."""
    folder = args.output_dir / f"{budget}_{seed}"
    data = f"--data_root {args.data_root} --seed {seed}"
    make_row(folder / START, f"{data} {START_FLAGS} --max_labelled {budget}")
    measure_row(args, folder / START, seed)
    reward_net = None
    if any(METHODS[name].network for name in args.rows):
        reward_net = train_reward_once(folder, f"{data} --max_labelled {budget}").parent / BEST_REWARD_NET
    for name in args.rows:
        method, steps = METHODS[name], _steps(args, name)
        flags = f"{data} --model_path {folder / START / 'merged'} {method.flags} --max_steps {steps}"
        flags += f" --eval_steps {-(-steps // VALIDATIONS)}"
        flags += f" --max_labelled {budget}" if method.labels else ""
        flags += f" --reward_net {reward_net}" if method.network else ""
        flags += f" --unlabelled_root {args.unlabelled}" if args.unlabelled and name != LONGER else ""
        for rate in args.learning_rates:
            side = "" if name == "grpo" else f" --side_learning_rate {rate:g}"  # no loss of that row reaches it
            make_row(folder / f"{name}_{steps}_{rate:g}", f"{flags} --learning_rate {rate:g}{side}")
        best = _best_run(args, budget, seed, name, FINAL)
        assert best is not None
        measure_row(args, best, seed)


def _steps(args: Args, name: str) -> int:
    """Optimisation steps of a row."""
    return round(METHODS[name].steps * args.times)


def make_row(folder: Path, flags: str) -> None:
    """A run of `sa2va-rl grpo` and its merged model, unless they are finished."""
    train_once(folder, f"{flags} --output_dir {folder.parent}")
    if not (folder / "merged").exists():
        call(f"merge --model_path {folder / FINAL} --output {folder / 'merged'}")


# ---- measuring ------------------------------------------------------------------------------------------------------


def measure_row(args: Args, run_folder: Path, seed: int) -> None:
    """Write measured_<name>.json for the test images and each further folder, unless it is there."""
    for name, root in (("test", args.data_root), *((path.name, path) for path in args.tests)):
        path = run_folder / f"measured_{name}.json"
        if not path.exists():
            inputs = open_grpo_inputs(RunConfig(data_root=root, seed=seed, gpu=-1))
            prompts = inputs.pick("test") if root == args.data_root else inputs.prompts
            write_json(path, measured(run_folder / "merged", [prompt for prompt in prompts if prompt.labelled]))


def measured(model: Path, prompts: list[TrainingItem]) -> dict[str, Any]:
    """Metric -> its value for each prompt; and the groups."""
    segmenter, columns = load_segmenter(model, "cpu"), dict[str, list[float]]()
    for prompt in tqdm(prompts, model.parent.name, unit="image"):
        image, truth = prompt.load()
        assert truth is not None
        answer = segmenter.segment(image, [prompt.question])
        soft = segmenter.upsample(answer.mask_logits, image.shape[:2])[0]
        for name, value in (
            mask_metrics(soft > 0.5, truth) | {ECE: float(calibration_error(soft[None].astype(float), truth[None])[0])}
        ).items():
            columns.setdefault(name, []).append(value)
    return {"groups": [prompt.group_id for prompt in prompts], **columns}


# ---- tables ---------------------------------------------------------------------------------------------------------


def show_budget(args: Args, budget: int, name: str) -> None:
    """Print the table of a budget on some images: means over seeds, differences to the start."""
    starts, groups, rows = dict(_results(args, budget, START, name)), list[str](), []
    for row in (START, *METHODS):
        if results := {seed: result for seed, result in _results(args, budget, row, name) if seed in starts}:
            groups = next(iter(results.values()))["groups"]
            rows.append(_row(row, budget, list(results.values()), [starts[seed] for seed in results]))
    if rows:
        columns = (TITLES[metric] for metric in METRICS_SHOWN)
        title = f"{budget} labelled images, {name}: {len(groups)} images"
        show(("row", "less the start", *columns, "val", "labels", "images", "minutes", "seeds"), rows, title)
        print("\n".join(few_patients_note(len(set(groups)), "test groups")))


def _row(row: str, budget: int, results: list[dict[str, Any]], starts: list[dict[str, Any]]) -> list[object]:
    """The cells of a row, from its results and those of its starts, by seed."""
    groups, configs = results[0]["groups"], [one["config"] for one in results]
    gains = [np.subtract(one["dice"], start["dice"]) for one, start in zip(results, starts, strict=True)]
    gain = mean_interval(np.mean(gains, axis=0), groups, bounds=CHANGE).signed
    val, minutes, images = (float(np.mean(column)) for column in zip(*map(_costs, configs), strict=True))
    title = ["start: supervised, side network", "-"] if row == START else [METHODS[row].title, gain]
    labels = f"{budget} + {configs[0]['validation']['labelled']}"
    cells = (_cell(metric, results, groups) for metric in METRICS_SHOWN)
    return [*title, *cells, f"{val:.3f}", labels, f"{images:.0f}", f"{minutes:.1f}", len(results)]


def _costs(config: dict[str, Any]) -> tuple[float, float, float]:
    """The best Dice on validation images, minutes of training, and images looked at, from config.json."""
    settings = config["settings"]["training"]
    images = settings["per_device_train_batch_size"] // settings["num_generations"] * config["steps"]
    return config["validation"]["best"], config["minutes"], images


def _cell(metric: str, results: list[dict[str, Any]], groups: list[str]) -> str:
    values = np.array([result[metric] for result in results])
    if metric == "dice":
        return with_seeds(mean_interval(values.mean(axis=0), groups, bounds=UNIT), values, groups)
    return f"{group_means(values, groups).mean():.{4 if metric == ECE else 3}f}"


def _results(args: Args, budget: int, row: str, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Seed -> measured values and config.json of the run of a row that validation chose."""
    for seed in args.seeds:
        if best := _best_run(args, budget, seed, row, f"measured_{name}.json"):
            config = read_json(best / FINAL / "config.json")
            yield seed, read_json(best / f"measured_{name}.json") | {"config": config}


def _best_run(args: Args, budget: int, seed: int, row: str, file: str) -> Path | None:
    """The run of a row that validation chose, of those that have a file; None without any."""
    name = START if row == START else f"{row}_{_steps(args, row)}_*"

    def validated(folder: Path) -> float:
        return float(read_json(folder / FINAL / "config.json")["validation"]["best"])

    folders = sorted((args.output_dir / f"{budget}_{seed}").glob(name))
    return max((folder for folder in folders if (folder / file).exists()), key=validated, default=None)


if __name__ == "__main__":
    run(main, Args)
