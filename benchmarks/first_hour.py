"""The first hour of a user with own images: each command of the README, in each of six layouts, timed and judged.

    python -m benchmarks.first_hour ARCADE UNLABELLED [--layouts paired coco] [--output_dir outputs/first_hour]

ARCADE is a folder in our format whose file names begin with the publishers' parts (train_0001.png, test_0001.png);
UNLABELLED is a plain folder of images. Thirty training images, each of its own patient, are written in each layout, as
a user has them. Then run, as they stand in the README:

    sa2va-rl doctor --data_root DATA
    sa2va-rl data import DATA --to FOLDER --write      (not of our own format)
    sa2va-rl improve quick --data_root FOLDER --unlabelled_root UNLABELLED
    sa2va-rl segment TEST --model_path RUN --output after
    sa2va-rl evaluate --predictions before after --data_root TEST

TEST are images of the publishers' test part, which nothing else sees; `before` are the masks of the model as it is. Our
own format has an official-style split in its field `split`: 20 patients train, 10 are for validation, and the test
images are those of TEST. A layout passes where the improved masks of TEST are better, the interval of `improve` lies
above 0, and everything took at most 12 minutes.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tyro
from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table

from rl_reward_network.atomic_io import read_json, write_json
from rl_reward_network.cli.app import run
from rl_reward_network.report.statistics import Estimate

LABELLED, UNLABELLED, TEST = 30, 40, 60  # images
MINUTES = 12.0
RESULTS = "first_hour.json"
Layout = Literal["paired", "patients", "coco", "nnunet", "labelme", "own"]


@dataclass(frozen=True)
class Args:
    """Time and judge the first hour with own images."""

    arcade: tyro.conf.Positional[Path]
    """ARCADE in our format: annotations.json with polygons, and images/."""
    unlabelled: tyro.conf.Positional[Path]
    """A plain folder of images without masks."""
    layouts: tuple[Layout, ...] = ("paired", "patients", "coco", "nnunet", "labelme", "own")
    """The layouts, in this order."""
    steps: int | None = None
    """Steps of each training in place of those of quick, for a trial of the commands alone."""
    output_dir: Path = Path("outputs/first_hour")
    """For the data, the runs and the results; must not exist."""


class Picture(NamedTuple):
    """An annotated image."""

    path: Path
    record: dict[str, Any]

    @property
    def polygons(self) -> list[list[float]]:
        """Flat lists of points, whose union is the mask."""
        return list(self.record["mask"])

    def mask(self) -> np.ndarray:
        """bool (H, W)."""
        from rl_reward_network.data.masks import MaskParts, rasterise

        with Image.open(self.path) as image:
            return rasterise(MaskParts(polygons=tuple(np.array(one) for one in self.polygons)), image.size[::-1])


def save_mask(picture: Picture, path: Path, value: int = 255) -> None:
    """Write a mask as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture.mask().astype(np.uint8) * value).save(path)


def copied(picture: Picture, path: Path) -> Path:
    """Copy the image; returns its new place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(picture.path, path))


def write_paired(pictures: Sequence[Picture], test: Sequence[Picture], folder: Path) -> None:
    """images/ and masks/ of equal names, which tell no patient."""
    for picture in pictures:
        copied(picture, folder / "images" / picture.path.name)
        save_mask(picture, folder / "masks" / picture.path.name)


def write_patients(pictures: Sequence[Picture], test: Sequence[Picture], folder: Path) -> None:
    """A folder for each patient, with the mask beside the image."""
    for number, picture in enumerate(pictures, 1):
        copied(picture, folder / f"Patient {number:02d}" / "frame.png")
        save_mask(picture, folder / f"Patient {number:02d}" / "frame_mask.png")


def write_coco(pictures: Sequence[Picture], test: Sequence[Picture], folder: Path) -> None:
    """COCO: one JSON file, and images/."""
    images, annotations = [], list[dict[str, Any]]()
    for number, picture in enumerate(pictures, 1):
        copied(picture, folder / "images" / picture.path.name)
        height, width = picture.mask().shape
        images.append({"id": number, "file_name": picture.path.name, "width": width, "height": height})
        for polygon in picture.polygons:
            x, y = polygon[::2], polygon[1::2]
            bbox = [min(x), min(y), max(x) - min(x), max(y) - min(y)]
            about = {"id": len(annotations) + 1, "image_id": number, "category_id": 1, "iscrowd": 0}
            annotations.append({**about, "bbox": bbox, "area": bbox[2] * bbox[3], "segmentation": [polygon]})
    categories = [{"id": 1, "name": "vessel", "supercategory": ""}]
    write_json(folder / "instances.json", {"images": images, "annotations": annotations, "categories": categories})


def write_nnunet(pictures: Sequence[Picture], test: Sequence[Picture], folder: Path) -> None:
    """nnU-Net: imagesTr/, labelsTr/, dataset.json."""
    for picture in pictures:
        copied(picture, folder / "imagesTr" / f"{picture.path.stem}_0000.png")
        save_mask(picture, folder / "labelsTr" / f"{picture.path.stem}.png", value=1)
    labels = {"background": 0, "vessel": 1}
    about = {"channel_names": {"0": "xray"}, "labels": labels, "numTraining": len(pictures), "file_ending": ".png"}
    write_json(folder / "dataset.json", about)


def write_labelme(pictures: Sequence[Picture], test: Sequence[Picture], folder: Path) -> None:
    """LabelMe: a JSON file beside each image."""
    for picture in pictures:
        copied(picture, folder / picture.path.name)
        height, width = picture.mask().shape
        shapes = [
            {"label": "vessel", "shape_type": "polygon", "points": np.reshape(polygon, (-1, 2)).tolist(), "flags": {}}
            for polygon in picture.polygons
        ]
        about = {"version": "5.5.0", "imagePath": picture.path.name, "imageHeight": height, "imageWidth": width}
        write_json(folder / f"{picture.path.stem}.json", {**about, "flags": {}, "imageData": None, "shapes": shapes})


def write_own(pictures: Sequence[Picture], test: Sequence[Picture], folder: Path) -> None:
    """Our own format, with the user's split; the last third is for validation."""
    parts = ["train" if number < 2 * len(pictures) // 3 else "val" for number in range(len(pictures))]
    write_test([*pictures, *test], folder, [*parts, *["test"] * len(test)])


def write_test(pictures: Sequence[Picture], folder: Path, parts: Sequence[str] = ()) -> None:
    """Our own format, with a field `split` where `parts` are given."""
    for picture in pictures:
        copied(picture, folder / "images" / picture.path.name)
    splits = [{"split": part} for part in parts] or [{}] * len(pictures)
    records = [picture.record | split for picture, split in zip(pictures, splits, strict=True)]
    write_json(folder / "annotations.json", records)


WRITERS: dict[str, Callable[[Sequence[Picture], Sequence[Picture], Path], None]] = {
    "paired": write_paired,
    "patients": write_patients,
    "coco": write_coco,
    "nnunet": write_nnunet,
    "labelme": write_labelme,
    "own": write_own,
}


def called(words: Sequence[object], log: Path) -> float:
    """Run a command of sa2va-rl as a user without a terminal does; minutes. A ValueError if it fails."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "rl_reward_network.cli", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ sa2va-rl {' '.join(map(str, words))}\n{done.stdout}{done.stderr}\n")
    if done.returncode:
        raise ValueError(f"sa2va-rl {words[0]} failed with status {done.returncode}: see {log}")
    return (time.perf_counter() - start) / 60


def first_hour(
    layout: str, pictures: Sequence[Picture], test: Sequence[Picture], folder: Path, steps: int | None
) -> dict[str, Any]:
    """What a user of this layout gets; `folder` is new, and beside it are unlabelled/, test/ and before/."""
    data, log, inputs = folder / "data", folder / "commands.log", folder / "imported"
    data.mkdir(parents=True)
    WRITERS[layout](pictures, test, data)
    minutes = {"doctor": called(["doctor", "--data_root", data], log)}
    if layout == "own":
        inputs = data
    else:
        minutes["import"] = called(["data", "import", data, "--to", inputs, "--write"], log)
    beside = folder.parent
    flags = ["--data_root", inputs, "--unlabelled_root", beside / "unlabelled", "--output_dir", folder / "outputs"]
    fewer = [] if steps is None else ["--steps", steps]
    minutes["improve"] = called(["improve", "quick", *flags, *fewer], log)
    (made,) = (folder / "outputs").glob("improve_*")
    after, report = folder / "after", folder / "evaluation"
    minutes["segment"] = called(["segment", beside / "test" / "images", "--model_path", made, "--output", after], log)
    scored = ["--predictions", beside / "before", after, "--data_root", beside / "test", "--output", report]
    minutes["evaluate"] = called(["evaluate", *scored], log)
    rows = read_json(report / "eval.json")["rows"]  # before, after
    return {"layout": layout, "minutes": minutes, "improve": read_json(made / "eval.json"), "test": rows}


def main(args: Args) -> None:
    """Run every layout, and print and write what came of it."""
    args.output_dir.mkdir(parents=True)
    records = json.loads((args.arcade / "annotations.json").read_text(encoding="utf-8"))
    known = [Picture(args.arcade / "images" / Path(record["image"]).name, record) for record in records]
    pictures = [one for one in known if one.path.name.startswith("train")][:LABELLED]
    test = [one for one in known if one.path.name.startswith("test")][:TEST]
    for path in sorted(args.unlabelled.glob("*.png"))[:UNLABELLED]:
        copied(Picture(path, {}), args.output_dir / "unlabelled" / path.name)
    write_test(test, args.output_dir / "test")
    images = args.output_dir / "test" / "images"
    called(["segment", images, "--output", args.output_dir / "before"], args.output_dir / "before.log")
    results = []
    for layout in args.layouts:
        results.append(first_hour(layout, pictures, test, args.output_dir / layout, args.steps))
        write_json(args.output_dir / RESULTS, results)
        show(results)


def passed(result: dict[str, Any]) -> bool:
    """Whether a layout meets the bar."""
    _, after = result["test"]
    better, gain = after["verdict"] == "better", result["improve"]["gain_out_of_fold"]
    return better and (gain["low"] or 0) > 0 and sum(result["minutes"].values()) <= MINUTES


def show(results: Sequence[dict[str, Any]]) -> None:
    """Print a line for each layout."""
    table = Table(box=box.SIMPLE)
    for head in (
        "layout",
        "minutes",
        "of these improve",
        "deployed",
        "gain out of fold",
        "before",
        "after",
        "gain",
        "met",
    ):
        table.add_column(head, no_wrap=True)
    for result in results:
        before, after = result["test"]
        minutes = result["minutes"]
        gains = [Estimate(**gain) for gain in (result["improve"]["gain_out_of_fold"], after["differences"]["dice"])]
        table.add_row(
            result["layout"],
            f"{sum(minutes.values()):.1f}",
            f"{minutes['improve']:.1f}",
            result["improve"]["chosen"],
            gains[0].signed,
            *(str(Estimate(**row["means"]["dice"])) for row in (before, after)),
            gains[1].signed,
            "yes" if passed(result) else "no",
        )
    Console(width=160).print(table)
    print(
        f"{sum(map(passed, results))} of {len(results)} layouts: better masks, an interval above 0, {MINUTES:g} minutes"
    )


if __name__ == "__main__":
    run(main, Args)
