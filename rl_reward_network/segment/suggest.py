"""Which images to annotate next: `choose` draws some by chance, `write` makes a data folder of all.

Chance is the rule, since no other was better (docs/log.md). While some patient has no chosen image, no other patient
gets a further one.
"""

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rl_reward_network.atomic_io import whole_file, whole_folder, write_json
from rl_reward_network.data.annotations import compile_group_regex
from rl_reward_network.data.images import SHEET, load_for_model
from rl_reward_network.data.patients import picture_name, propose_patients
from rl_reward_network.data.splits import one_spelling
from rl_reward_network.report.page import csv_text
from rl_reward_network.segment.files import save_mask
from rl_reward_network.segment.results import TILE, contact_sheet

TABLE, COLUMNS = "suggested.csv", ("rank", "image", "patient")
SUGGESTED = "suggested images"  # marks the sheet as written here, so that it is no image of a data folder


def patients_of(names: Sequence[str]) -> list[str]:
    """The patient of each image, named below the folder with forward slashes, as the annotations' reader finds it."""
    pattern = compile_group_regex(None)
    found = [match["group"] if (match := pattern.search(name)) else "" for name in names]
    if not all(found):
        shown = propose_patients(names)
        found = [
            group or patient or picture_name(name)
            for name, group, (patient, _) in zip(names, found, shown, strict=True)
        ]
    spelling = one_spelling(found)
    return [spelling[name] for name in found]


def choose(patients: Sequence[str], number: int, seed: int = 0) -> list[int]:
    """`number` of N images by chance, of the patients with the fewest chosen images first; `patients` are the images'.

    A ValueError where there are not so many.
    """
    if not 1 <= number <= len(patients):
        raise ValueError(f"--number {number}: there are {len(patients)} images; give a number from 1 to that")
    left, chosen, picked = np.random.default_rng(seed).permutation(len(patients)).tolist(), Counter[str](), list[int]()
    for _ in range(number):
        picked.append(min(left, key=lambda one: chosen[patients[one]]))  # the first of those, in the drawn order
        left.remove(picked[-1])
        chosen[patients[picked[-1]]] += 1
    return picked


def mask_names(names: Sequence[str]) -> list[str]:
    """Where the mask of each image is drawn: masks/STEM.png, with the whole name where two images share a stem."""
    stems = [name.rpartition(".")[0] for name in names]
    counts = Counter(stems)
    return [
        f"masks/{name if counts[stem] > 1 else stem}.png".replace("\\", "/")
        for name, stem in zip(names, stems, strict=True)
    ]


def records(names: Sequence[str], chosen: Sequence[int], text: str) -> list[dict[str, Any]]:
    """annotations.json: a record of each image; of those chosen the mask to be drawn."""
    masks = mask_names(names)
    return [
        {"image": name, "text": [text], **({"mask_png": masks[index], "to_draw": True} if index in chosen else {})}
        for index, name in enumerate(names)
    ]


def write(folder: Path, source: Path, names: Sequence[str], chosen: Sequence[int], text: str) -> None:
    """Make the data folder: copies of all images, annotations.json, an empty masks/, suggested.csv, the sheet."""
    patients, drawn = patients_of(names), mask_names(names)
    with whole_folder(folder) as new:
        for name in names:
            (new / "images" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, new / "images" / name)
        for one in chosen:
            (new / drawn[one]).parent.mkdir(parents=True, exist_ok=True)
        write_json(new / "annotations.json", records(names, chosen, text))
        lines = [[rank, names[one], patients[one]] for rank, one in enumerate(chosen, 1)]
        with whole_file(new / TABLE) as temporary:
            temporary.write_text(csv_text([COLUMNS, *lines]), encoding="utf-8")
        _write_sheet(new / SHEET, source, names, chosen)


def _write_sheet(path: Path, source: Path, names: Sequence[str], chosen: Sequence[int]) -> None:
    """Draw the chosen images by rank."""
    tiles = []
    for rank, one in enumerate(chosen, 1):
        picture = Image.fromarray(load_for_model(source / names[one], None)[0])
        picture.thumbnail((TILE, TILE))
        tiles.append((picture, [f"{rank}. {names[one]}"], False))
    title = f"{len(chosen)} of {len(names)} images to annotate, by rank"
    save_mask(path, contact_sheet(tiles, title), SUGGESTED)
