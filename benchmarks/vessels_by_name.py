"""Vessels by name on real coronary angiograms: the table of docs/results.md.

    python -m benchmarks.vessels_by_name ARCADE                                 # 15 minutes a seed on two cores
    python -m benchmarks.vessels_by_name ARCADE --row side --flags=--side_network   # a further row
    python -m benchmarks.vessels_by_name ARCADE --show                          # the table of what is finished

ARCADE is a folder with segments.json (the SYNTAX segment of each outline), annotations.json (its groups) and images/.
They become COCO files, `sa2va-rl data import --classes benchmarks/arcade_classes.json` makes the task of them, and
`sa2va-rl grpo --objective supervised` trains nano on it. The rival is a U-Net with one output per class, trained on the
same images and questions for as many minutes as the row that is made first; the floor answers every question with that
row's mask of the whole tree.

In all rows names compete, as classes.json says. Intervals are over groups, which in ARCADE are images: no patients are
known.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks.common import call, show, train_once
from benchmarks.named_unet import named_images, segment, train_unet
from rl_reward_network.atomic_io import read_json, write_json
from rl_reward_network.cli.app import run
from rl_reward_network.grpo.competition import without_excluded
from rl_reward_network.grpo.evaluate import held_out_prompts
from rl_reward_network.grpo.image_context import FeatureCache
from rl_reward_network.grpo.inputs import GRPOInputs, of_images, open_grpo_inputs, within_budget
from rl_reward_network.grpo.measure import measure, unpacked
from rl_reward_network.grpo.prompts import TrainingItem
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.report.by_name import mean_of_classes
from rl_reward_network.report.statistics import CHANGE, few_patients_note
from rl_reward_network.rewards.metrics import cldice, dice
from rl_reward_network.run import FINAL

CLASSES = Path(__file__).with_name("arcade_classes.json")
TREE = "blood vessel"
NANO, UNET, FLOOR = "nano", "unet", "tree"
TITLES = {
    NANO: "nano, asked by name",
    UNET: "U-Net, one output per class",
    FLOOR: "nano's whole tree, to every question",
}
Masks = Sequence[np.ndarray]


@dataclass(frozen=True)
class Args:
    """Train and evaluate every row on a folder like ARCADE."""

    data_root: tyro.conf.Positional[Path]
    """Folder with segments.json, annotations.json and images/."""
    seed: int = 0
    """Of all rows."""
    steps: int = 400
    """Optimisation steps of nano."""
    max_labelled: int | None = None
    """Labelled images to learn from; by default all of the training splits."""
    row: str = NANO
    """Name of nano's row, which has a folder of its own."""
    flags: str = ""
    """Further flags of `sa2va-rl grpo` for that row."""
    output_dir: Path = Path("outputs/vessels_by_name")
    """Folder of the task and the runs."""
    show: bool = False
    """Run nothing; show what is finished."""

    def place(self, row: str) -> Path:
        """The folder of a row."""
        return self.output_dir / f"{row}_{self.max_labelled or 'all'}_{self.seed}"


def main(args: Args) -> None:
    """Make the missing rows, and show all."""
    if not args.show:
        task = args.output_dir / "task"
        if not task.exists():
            make_task(args.data_root, args.output_dir)
        inputs = open_grpo_inputs(RunConfig(data_root=task, seed=args.seed, output_dir=args.output_dir, gpu=-1))
        answer_nano(args, inputs)
        answer_unet(args, inputs)
    show_all(args)


# ---- the task -------------------------------------------------------------------------------------------------------


def make_task(source: Path, folder: Path, most: int | None = None) -> None:
    """`folder`/task: the images of a folder like ARCADE with their classes, imported from COCO files."""
    coco = folder / "coco"
    shutil.rmtree(coco, ignore_errors=True)
    groups = {record["image"]: record["group"] for record in read_json(source / "annotations.json")}
    records = read_json(source / "segments.json")
    segments = sorted({segment["segment"] for record in records for segment in record["segments"]})
    content = coco_content(records[:most], segments)
    (coco / "images").mkdir(parents=True)
    for image in content["images"]:
        shutil.copyfile(source / "images" / image["file_name"], coco / "images" / image["file_name"])
    write_json(coco / "annotations.json", content)
    rows = [f"{image['file_name']},{groups[image['file_name']]}" for image in content["images"]]
    (folder / "groups.csv").write_text("\n".join(["image,group", *rows]) + "\n")
    flags = f"--classes {CLASSES} --patients_csv {folder / 'groups.csv'} --to {folder / 'task'} --write"
    call(f"data import {coco} {flags}")


def coco_content(records: Sequence[dict[str, Any]], segments: Sequence[str]) -> dict[str, Any]:
    """Records of segments.json as COCO instances; the categories are the segments."""
    numbers = {name: number for number, name in enumerate(segments, 1)}
    images = [{"id": n, "file_name": Path(record["image"]).name} for n, record in enumerate(records)]
    outlines = [
        {"image_id": n, "category_id": numbers[one["segment"]], "segmentation": one["polygons"]}
        for n, record in enumerate(records)
        for one in record["segments"]
    ]
    annotations = [{"id": n, **outline} for n, outline in enumerate(outlines)]
    categories = [{"id": number, "name": name} for name, number in numbers.items()]
    return {"images": images, "annotations": annotations, "categories": categories}


def training_prompts(args: Args, inputs: GRPOInputs) -> list[TrainingItem]:
    """The questions that every row learns from."""
    prompts = inputs.pick("reward", "policy")
    return within_budget(inputs, prompts, args.max_labelled) if args.max_labelled else prompts


# ---- rows -----------------------------------------------------------------------------------------------------------


def answer_nano(args: Args, inputs: GRPOInputs) -> None:
    """Train nano, and write its answers and those of its whole tree."""
    place = args.place(args.row)
    if (place / "answers.json").exists():
        return
    labels = f"--max_labelled {args.max_labelled}" if args.max_labelled else ""
    steps = f"--max_steps {args.steps} --eval_steps 100"
    data = f"--data_root {inputs.config.data_root} --seed {args.seed} --gpu -1"
    train_once(place, f"--objective supervised {data} {labels} {steps} {args.flags}")
    if not (place / "merged").exists():
        call(f"merge --model_path {place / FINAL} --output {place / 'merged'}")
    own: dict[str, Any] = {"minutes": read_json(place / FINAL / "config.json")["minutes"]}
    tree = {}
    for split in ("val", "test"):
        prompts = inputs.pick(split)
        reworded = {"trained": prompts, "held_out": held_out_prompts(prompts)}
        masks = {wording: nano_masks(place / "merged", inputs, asked) for wording, asked in reworded.items()}
        own[split] = {wording: answers(prompts, of_wording) for wording, of_wording in masks.items()}
        of_tree = {p.image_key: m for p, m in zip(prompts, masks["trained"], strict=True) if p.name == TREE}
        tree[split] = {"trained": answers(prompts, [of_tree[prompt.image_key] for prompt in prompts])}
    write_json(place / "answers.json", own)
    if not (args.place(FLOOR) / "answers.json").exists():
        args.place(FLOOR).mkdir(exist_ok=True)
        write_json(args.place(FLOOR) / "answers.json", tree)


def nano_masks(model_path: Path, inputs: GRPOInputs, prompts: Sequence[TrainingItem]) -> list[np.ndarray]:
    """bool (H, W) of each question; empty where the answer has none."""
    model, processor = load_sa2va_model(str(model_path), "cpu")
    inputs.set_up(processor)
    measured = measure(model, prompts, FeatureCache(model, processor), 24, desc=model_path.parent.name)
    masks = (unpacked(mask) for mask in measured.masks)
    sizes = (prompt.load()[0].shape[:2] for prompt in prompts)
    return [np.zeros(size, bool) if mask is None else mask for mask, size in zip(masks, sizes, strict=True)]


def answer_unet(args: Args, inputs: GRPOInputs) -> None:
    """Train the U-Net for as many minutes as the row of nano, and write its answers."""
    place = args.place(UNET)
    if (place / "answers.json").exists():
        return
    named = {prompt.name: prompt.named for prompt in inputs.prompts}
    names = sorted(named)
    minutes = read_json(args.place(args.row) / FINAL / "config.json")["minutes"]
    train = named_images(training_prompts(args, inputs), names)
    val = named_images(of_images(inputs.pick("val"), 48), names)
    classes = [named[name] for name in names]
    net = train_unet(list(train.values()), list(val.values()), classes, minutes, args.seed)
    content: dict[str, Any] = {"minutes": minutes}
    for split in ("val", "test"):
        prompts = inputs.pick(split)
        of_image = {p.image_key: segment(net, p.load()[0]) for p in prompts if p.name == TREE}
        soft = [of_image[prompt.image_key][names.index(prompt.name)] for prompt in prompts]
        masks = [mask > 0.5 for mask in without_excluded(prompts, soft) if mask is not None]
        content[split] = {"trained": answers(prompts, masks)}
    place.mkdir(exist_ok=True)
    write_json(place / "answers.json", content)


def answers(prompts: Sequence[TrainingItem], masks: Masks) -> dict[str, list[Any]]:
    """Columns of N questions: class, group, whether it is there, Dice, clDice, and whether the answer is empty."""
    columns: dict[str, list[Any]] = {key: [] for key in ("name", "group", "there", "dice", "cldice", "empty")}
    for prompt, mask in zip(prompts, masks, strict=True):
        truth = prompt.load()[1]
        assert truth is not None
        scores = (float(metric(mask[None], truth[None])[0]) for metric in (dice, cldice))
        values = prompt.name, prompt.group_id, bool(truth.any()), *scores, not mask.any()
        for key, value in zip(columns, values, strict=True):
            columns[key].append(value)
    return columns


# ---- the table ------------------------------------------------------------------------------------------------------


def show_all(args: Args) -> None:
    """Print both tables."""
    places = sorted(args.output_dir.glob(f"*_{args.max_labelled or 'all'}_{args.seed}/answers.json"))
    found = {place.parent.name.rsplit("_", 2)[0]: read_json(place) for place in places}
    if not found:
        raise ValueError(f"{args.output_dir}: nothing is finished; leave --show out")
    names = sorted(set(next(iter(found.values()))["test"]["trained"]["name"]) - {TREE})
    rows, tests = [], {}
    for row, content in found.items():
        spent = f", {content['minutes']:.0f} minutes" if "minutes" in content else ""
        for wording, of_test in content["test"].items():
            tests[row, wording] = test = {key: np.array(values) for key, values in of_test.items()}
            rows.append((f"{TITLES.get(row, row)}{spent}, {wording}", *_cells(test, names)))
    columns = ("Dice: mean of arteries", *names, TREE, "clDice: mean of arteries", "absent recognised")
    show(("row, wording", *columns), rows)
    show(("difference", "Dice: mean of arteries", "absent recognised"), _differences(tests))
    groups = next(iter(found.values()))["test"]["trained"]["group"]
    print("\n".join(few_patients_note(len(set(groups)), "test groups")))


def _cells(test: dict[str, np.ndarray], names: Sequence[str]) -> list[str]:
    there, artery = test["there"], test["name"] != TREE

    def mean(key: str, counted: np.ndarray) -> str:
        return str(mean_of_classes(test[key][counted].astype(float), test["name"][counted], test["group"][counted]))

    by_class = [mean("dice", there & (test["name"] == name)) for name in (*names, TREE)]
    return [mean("dice", there & artery), *by_class, mean("cldice", there & artery), mean("empty", ~there)]


def _differences(tests: dict[tuple[str, str], dict[str, np.ndarray]]) -> Iterator[list[str]]:
    """Paired differences of the mean over arteries: held-out less trained wording, and each row less the rival."""
    pairs = [((row, wording), (row, "trained")) for row, wording in tests if wording == "held_out"]
    rival = (UNET, "trained")
    pairs += [(one, rival) for one in tests if one[1] == "trained" and one != rival and rival in tests]
    for one, other in pairs:
        test, base = tests[one], tests[other]
        cells = [" - ".join(f"{TITLES.get(row, row)}, {wording}" for row, wording in (one, other))]
        for key, counted in (("dice", test["there"] & (test["name"] != TREE)), ("empty", ~test["there"])):
            gain = test[key][counted].astype(float) - base[key][counted].astype(float)
            mean = mean_of_classes(gain, test["name"][counted], test["group"][counted], bounds=CHANGE)
            cells.append(mean.signed)
        yield cells


if __name__ == "__main__":
    run(main, Args)
