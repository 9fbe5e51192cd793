"""Which images to annotate next: `choose` ranks the images of a folder by a rule, `write` makes a data folder of them.

The rules use what a model says about each image: a summary of its appearance, and its soft mask. While some patient
has no chosen image, no other patient gets a further one. Axes: N images, C channels.
"""

import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

from rl_reward_network.atomic_io import whole_file, whole_folder, write_json
from rl_reward_network.data.annotations import compile_group_regex
from rl_reward_network.data.images import load_for_model
from rl_reward_network.data.patients import picture_name, propose_patients
from rl_reward_network.data.splits import one_spelling
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.sa2va.generation_sa2va import image_features
from rl_reward_network.report.page import csv_text
from rl_reward_network.segment.files import SHEET, save_mask
from rl_reward_network.segment.maker import Fusion, Maker, MaskMaker, load_maker
from rl_reward_network.segment.results import TILE, contact_sheet

Rule = Literal["typical", "unsure", "random"]
TABLE, COLUMNS = "suggested.csv", ("rank", "image", "patient", "why")
SUGGESTED = "suggested images"  # marks the sheet as written here, so that it is no image of a data folder
STARTS = 10  # of k-means


@dataclass(frozen=True)
class Suggestion:
    """A chosen image: its number among all images, and the reason in words."""

    index: int
    why: str


# ---- what is known of the images -------------------------------------------------------------------------------------


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


def encoder_of(maker: Maker) -> MaskMaker:
    """The Sa2VA whose image encoder describes the images: the maker's own, or the embedded one where it has none."""
    members = maker.members if isinstance(maker, Fusion) else (maker,)
    found = next((member for member in members if isinstance(member, MaskMaker)), None)
    if found is not None:
        return found
    embedded = load_maker(DEFAULT_MODEL)
    assert isinstance(embedded, MaskMaker)
    return embedded


def appearance(encoder: MaskMaker, image: np.ndarray) -> np.ndarray:
    """float32 (C,) of length 1: SAM 2's coarsest map of an image, uint8 (H, W, 3), averaged over the map."""
    pooled = image_features(encoder.model, encoder.processor, [image]).pooled()[0].detach().cpu().float().numpy()
    return np.asarray(pooled / max(float(np.linalg.norm(pooled)), 1e-12))


def uncertainty(soft: np.ndarray) -> float:
    """The sum of p (1 - p) over the pixels of a soft mask, float (H, W) in [0, 1], for each pixel of the mask p > 0.5.

    That is the mean of p (1 - p) divided by the mask's share of the image. An empty mask counts as one pixel.
    """
    soft = soft.astype(np.float64)
    return float((soft * (1 - soft)).sum() / max(int((soft > 0.5).sum()), 1))


def describe(rule: Rule, maker: Maker, images: Sequence[Path], each: Callable[[Any], Any] = iter) -> np.ndarray:
    """What a rule needs of N images: `typical` float32 (N, C), `unsure` float64 (N,), infinite where an answer has no
    mask, `random` zeros (N,). `each` wraps the images, for a progress bar.
    """
    if rule == "random":
        return np.zeros(len(images))
    encoder = encoder_of(maker) if rule == "typical" else None
    values = list[Any]()
    for path in each(images):
        image, _ = load_for_model(path, maker.grey)
        if encoder is not None:
            values.append(appearance(encoder, image))
            continue
        found = maker.answer(image)
        values.append(np.inf if found.segs == 0 else uncertainty(found.soft))
    return np.array(values)


# ---- the choice ------------------------------------------------------------------------------------------------------


def choose(rule: Rule, values: np.ndarray, patients: Sequence[str], number: int, seed: int = 0) -> list[Suggestion]:
    """The `number` images to annotate by a rule, the most useful first; a ValueError where there are not so many.

    Args:
        rule: `typical` takes the images nearest to the centres of k-means, those of the largest clusters first;
            `unsure` those with the largest uncertainty; `random` any.
        values: as `describe` gives them.
        patients: of the N images.
        number: how many to choose.
        seed: of the chance in k-means and in `random`.
    """
    if not 1 <= number <= len(patients):
        raise ValueError(f"--number {number}: there are {len(patients)} images; give a number from 1 to that")
    if rule == "typical":
        return _typical(values, patients, number, seed)
    rng = np.random.default_rng(seed)
    costs = -values if rule == "unsure" else rng.permutation(len(patients)).astype(float)
    picked = _one_per_patient([costs] * number, patients)
    words = {"unsure": "uncertainty {:.3f} for each pixel of the mask", "random": "drawn by chance"}[rule]
    return [Suggestion(one, words.format(values[one]) if values[one] < np.inf else "no mask") for one in picked]


def _typical(values: np.ndarray, patients: Sequence[str], number: int, seed: int) -> list[Suggestion]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer different images than centres
        found = KMeans(number, n_init=STARTS, random_state=seed).fit(values)
    sizes = np.bincount(found.labels_, minlength=number).tolist()
    largest = sorted(range(number), key=lambda cluster: -sizes[cluster])
    distances = np.linalg.norm(values[None] - found.cluster_centers_[largest][:, None], axis=2)  # (number, N)
    picked = _one_per_patient(list(distances), patients)
    return [
        Suggestion(one, f"nearest to the centre of {sizes[cluster]} similar image{'s' * (sizes[cluster] != 1)}")
        for one, cluster in zip(picked, largest, strict=True)
    ]


def _one_per_patient(costs: Sequence[np.ndarray], patients: Sequence[str]) -> list[int]:
    """An image for each row of costs, (N,): the cheapest that is left of the patients with the fewest chosen images."""
    left, chosen, picked = set(range(len(patients))), Counter[str](), list[int]()
    for row in costs:
        fewest = min(chosen[patients[one]] for one in left)
        best = min((one for one in left if chosen[patients[one]] == fewest), key=lambda one: (row[one], one))
        left.remove(best)
        chosen[patients[best]] += 1
        picked.append(best)
    return picked


# ---- files -----------------------------------------------------------------------------------------------------------


def mask_names(names: Sequence[str]) -> list[str]:
    """Where the mask of each image is drawn: masks/STEM.png, with the whole name where two images share a stem."""
    stems = [name.rpartition(".")[0] for name in names]
    counts = Counter(stems)
    return [
        f"masks/{name if counts[stem] > 1 else stem}.png".replace("\\", "/")
        for name, stem in zip(names, stems, strict=True)
    ]


def records(names: Sequence[str], chosen: Sequence[Suggestion], text: str) -> list[dict[str, Any]]:
    """annotations.json: a record of each image; of those chosen the mask to be drawn."""
    to_draw, masks = {one.index for one in chosen}, mask_names(names)
    return [
        {"image": name, "text": [text], **({"mask_png": masks[index], "to_draw": True} if index in to_draw else {})}
        for index, name in enumerate(names)
    ]


def write(folder: Path, source: Path, names: Sequence[str], chosen: Sequence[Suggestion], text: str) -> None:
    """Make the data folder: copies of all images, annotations.json, an empty masks/, suggested.csv, the sheet."""
    patients, drawn = patients_of(names), mask_names(names)
    with whole_folder(folder) as new:
        for name in names:
            (new / "images" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, new / "images" / name)
        for one in chosen:
            (new / drawn[one.index]).parent.mkdir(parents=True, exist_ok=True)
        write_json(new / "annotations.json", records(names, chosen, text))
        lines = [[rank, names[one.index], patients[one.index], one.why] for rank, one in enumerate(chosen, 1)]
        with whole_file(new / TABLE) as temporary:
            temporary.write_text(csv_text([COLUMNS, *lines]), encoding="utf-8")
        _write_sheet(new / SHEET, source, names, chosen)


def _write_sheet(path: Path, source: Path, names: Sequence[str], chosen: Sequence[Suggestion]) -> None:
    """Draw the chosen images by rank."""
    tiles = []
    for rank, one in enumerate(chosen, 1):
        picture = Image.fromarray(load_for_model(source / names[one.index], None)[0])
        picture.thumbnail((TILE, TILE))
        tiles.append((picture, [f"{rank}. {names[one.index]}", one.why], False))
    title = f"{len(chosen)} of {len(names)} images to annotate, by rank"
    save_mask(path, contact_sheet(tiles, title), SUGGESTED)
