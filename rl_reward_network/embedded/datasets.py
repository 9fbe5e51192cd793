"""The embedded data sets: rendered angiograms as annotated images, and rendered scenes in GAR's layout.

They are rendered once and then read from disk like any other data. 160 patients, two series each in different looks,
three nearly identical frames per series. `looks.json` beside the annotations holds the look of each frame; it is for
scores by look and for the test of the observation, never for training.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from rl_reward_network.atomic_io import locked, read_json, whole_folder, write_json
from rl_reward_network.data.masks import to_rle
from rl_reward_network.embedded.angiograms import LOOKS, TREE, render_series
from rl_reward_network.embedded.regions import DAYLIGHT, LAMPLIGHT, write_regions

PATIENTS, SERIES, FRAMES = 160, 2, 3
SCENES = 400
SEED = 1
RECIPE = 1  # version of the pictures; increase it when they change, and measure all numbers again
NO_GAP_LOOKS = ("plain", "catheter")  # one prompt is the best in both: "... without the catheter."
RECIPE_FILE = "recipe.json"  # marks a rendered folder, and holds its settings
DEFAULT_FOLDER = Path("data")
DEFAULT_DATA = DEFAULT_FOLDER / "angiograms"


def angiogram_folder(parent: Path, no_gap: bool = False) -> Path:
    """The folder of the angiograms below `parent`."""
    return parent / ("angiograms_no_gap" if no_gap else "angiograms")


def is_rendered(folder: Path) -> bool:
    """Whether this project rendered the folder."""
    return (folder / RECIPE_FILE).exists()


def embedded_angiograms(parent: Path = DEFAULT_FOLDER, no_gap: bool = False) -> Path:
    """The folder of the rendered angiograms below `parent`; they are rendered if it does not exist.

    With `no_gap`, one prompt is the best on every picture. ValueError where the folder exists, but was not rendered by
    this version of the project.
    """
    folder = angiogram_folder(parent, no_gap)
    looks = NO_GAP_LOOKS if no_gap else tuple(LOOKS)
    recipe = {"recipe": RECIPE, "patients": PATIENTS, "series": SERIES, "frames": FRAMES, "looks": list(looks)}
    return _made(folder, recipe, lambda empty: write_angiograms(empty, PATIENTS, looks))


def region_folder(parent: Path, daylight: bool = False) -> Path:
    """The folder of the scenes below `parent`."""
    return parent / ("regions" if daylight else "regions_lamplight")


def embedded_regions(parent: Path = DEFAULT_FOLDER, daylight: bool = False) -> Path:
    """The folder of the rendered scenes below `parent` (GAR's Arrow layout); they are rendered if it does not exist.

    Scenes are lit by a warm lamp, so that they differ from the training data of `sa2va-nano`, as a user's images do; in
    `daylight`, as in that training, little is left to learn. Raises as `embedded_angiograms`.
    """
    light = DAYLIGHT if daylight else LAMPLIGHT
    recipe = {"recipe": RECIPE, "scenes": SCENES} | ({} if daylight else {"light": list(light)})
    return _made(region_folder(parent, daylight), recipe, lambda empty: write_regions(empty, SCENES, SEED, light=light))


def _made(folder: Path, recipe: dict[str, Any], make: Callable[[Path], None]) -> Path:
    """`folder`, made by `make` (whole or not at all) if it does not exist; ValueError if its recipe is another."""
    with nullcontext() if folder.exists() else locked(folder.parent):  # other processes wait while this one renders
        if not folder.exists():
            tqdm.write(f"rendering {folder.resolve()}, once")
            with whole_folder(folder) as temporary:
                make(temporary)
                write_json(temporary / RECIPE_FILE, recipe)
    if not is_rendered(folder):
        raise ValueError(f"{folder}: exists, but was not rendered by this project; move it, or name it as DATA_ROOT")
    if (existing := read_json(folder / RECIPE_FILE)) != recipe:
        raise ValueError(f"{folder / RECIPE_FILE}: recipe is {existing}, expected {recipe}; delete the folder")
    return folder


def write_angiograms(
    folder: Path, patients: int, looks: tuple[str, ...], seed: int = SEED, first_patient: int = 0
) -> None:
    """Render `patients` x SERIES x FRAMES pictures into `folder`: annotations.json, images/, looks.json.

    Equal arguments give equal files, on one machine and with equal versions of NumPy and SciPy.
    """
    (folder / "images").mkdir(parents=True)
    numbers = range(first_patient, first_patient + patients)
    pairs = [(patient, series) for patient in numbers for series in range(SERIES)]
    bar = tqdm(pairs, "rendering", unit="series")
    records = [record for pair in bar for record in _write_series(folder, looks, seed, *pair)]
    write_json(folder / "looks.json", {record["image"]: record.pop("look") for record in records})
    write_json(folder / "annotations.json", records)


def read_looks(folder: Path) -> dict[str, str]:
    """The look of each frame of a rendered folder, by its file name; ValueError for any other folder."""
    return dict(read_json(folder / "looks.json"))


def look_of(patient: int, series: int, looks: tuple[str, ...]) -> str:
    """The look of a series. A patient's two looks differ if there are two, and all pairs are about equally frequent."""
    step = 0 if series == 0 else 1 + patient // len(looks) % max(1, len(looks) - 1)
    return looks[(patient + step) % len(looks)]


def _write_series(folder: Path, looks: tuple[str, ...], seed: int, patient: int, series: int) -> list[dict[str, Any]]:
    """The frames of one series; returns their annotation records, with the look added."""
    rng = np.random.default_rng([seed, patient, series])
    look = look_of(patient, series, looks)
    first = int(rng.integers(5, 40))
    records = []
    for number, frame in enumerate(render_series(rng, look, FRAMES)):
        name = f"P{patient:04d}({patient:06d}0001)_1-{series + 3}_1_frame_{first + number:06d}.png"
        Image.fromarray(frame.image).save(folder / "images" / name)
        mask = to_rle(frame.parts & TREE > 0)
        records.append({"image": name, "text": ["blood vessel"], "mask": mask, "look": look})
    return records
