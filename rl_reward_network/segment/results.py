"""What `segment` leaves for a person and for the next tool: `results.csv`, a contact sheet, COCO JSON, nnU-Net labels.

Each folder of masks has its own. A file of the same name that was not written here is never replaced.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from pycocotools import mask as coco
from scipy import ndimage
from tqdm import tqdm

from rl_reward_network.atomic_io import read_json, whole_file, write_json
from rl_reward_network.data.annotations import compile_group_regex
from rl_reward_network.data.identity import among, thumbnail
from rl_reward_network.data.images import SHEET, load_for_model, load_grid, load_image
from rl_reward_network.data.masks import to_rle
from rl_reward_network.data.names import NamedClass
from rl_reward_network.report.overlays import AFTER, Colour, class_colours, paint_classes, paint_mask
from rl_reward_network.report.page import csv_text
from rl_reward_network.segment.files import Target, check_apart, check_free, prompt_of, save_mask, write_mask
from rl_reward_network.segment.maker import Answered, Maker, MaskMaker, Predicted, predicted_quality

Format = Literal["png", "coco", "nnunet"]
RESULTS, COCO, NNUNET = "results.csv", "predictions_coco.json", "labelsTs"
COLUMNS = (
    *("file", "mask", "patient", "prompt", "share", "parts"),
    *("predicted_dice", "predicted_low", "predicted_high", "confidence", "verdict"),
)
LOOK = "look at this one"
LOWEST, UNSURE = 0.1, 0.8  # the share of the images with the lowest confidence, and below which it is low
FIRST_CHANNEL = "_0000"  # how nnU-Net ends the name of an image, and not that of its label
MOST_TILES, MOST_ACROSS, TILE, LINE = 100, 10, 240, 15  # of a contact sheet; pixels of a tile's side and a text line
RED = (190, 0, 0)
ALL_CLASSES = "all classes"  # the prompt of a picture of all
INFO = {"description": "masks of sa2va-rl segment"}  # of a JSON that was written here
UNKNOWN = Predicted(None, None, None, None, None)


@dataclass(frozen=True)
class Segmented:
    """The result for one image."""

    target: Target  # nothing is written where `segs` is 0
    prompt: str
    answer: str
    segs: int | None  # number of `[SEG]` in the answer; None where no single answer makes the mask
    size: tuple[int, int]  # (H, W)
    share: float  # of the image that the mask covers, [0, 1]
    parts: int  # connected ones, also over corners
    confidence: float  # in [0, 1], see `soft_dice`
    predicted: Predicted | None  # None without a reward network
    outside: str | None  # why a plain segmenter does not know such images
    name: str = ""  # of a class, which not all images show

    @property
    def fault(self) -> str:
        """What is wrong with the mask whatever the other images are; "" for none."""
        empty = not self.share and not self.absent
        return "no mask" if self.segs == 0 else "empty mask" if empty else self.outside or ""

    @property
    def absent(self) -> bool:
        """Whether the answer is that the image does not show the class; of its confidence this says nothing."""
        return bool(self.name) and self.segs != 0 and not self.share

    @property
    def rank(self) -> tuple[bool, float]:
        """The key that sorts results, those to look at first: predicted Dice or, where none is known, confidence."""
        dice = None if self.predicted is None else self.predicted.dice
        return (False, self.confidence) if dice is None else (True, dice)


def soft_dice(soft: np.ndarray, mask: np.ndarray) -> float:
    """The confidence of a mask, bool (H, W), in its soft mask p, float (H, W): 2 sum(p y) / sum(p + y) in [0, 1].

    It ranks the masks of one trained model: on real angiograms its correlation with the Dice was 0.65 to 0.70. It is no
    estimate of the Dice.
    """
    total = float(soft.sum() + mask.sum())
    return 2 * float(soft[mask].sum()) / total if total else 0.0


def segment_image(
    maker: Maker,
    target: Target,
    prompt: str | None,
    threshold: float,
    keep_soft: bool,
    trained: np.ndarray | None = None,
) -> Segmented:
    """Segment an image, write its mask and overlay, and with `keep_soft` the soft mask; without `[SEG]` nothing.

    `trained` are the thumbnails of what the model was trained on, if known: `evaluate` warns where it is the image.
    """
    image = _loaded(maker, target)
    found = maker.answer(image, prompt, before=lambda used: check_free(target, used))
    return _written(maker, target, image, found, threshold, keep_soft, trained)


def segment_classes(
    maker: MaskMaker,
    targets: Sequence[Target],
    classes: Sequence[NamedClass],
    threshold: float,
    keep_soft: bool,
    trained: np.ndarray | None = None,
) -> list[Segmented]:
    """As `segment_image`, with the files of each class, and a picture of all classes in colour, `classes_picture`."""
    image = _loaded(maker, targets[0])
    answers = maker.answers(image, classes, threshold)
    results = [
        replace(_written(maker, target, image, found, threshold, keep_soft, trained), name=one.name)
        for target, one, found in zip(targets, classes, answers, strict=True)
    ]
    masks = {one.name: found.soft > threshold for one, found in zip(classes, answers, strict=True)}
    largest = sorted(masks, key=lambda name: -masks[name].sum())  # a part is painted over its whole
    colours = class_colours(list(masks))
    painted = paint_classes(image, {name: masks[name] for name in largest}, colours)
    save_mask(classes_picture(targets[0].image, targets[0].mask.parent), _with_legend(painted, colours), ALL_CLASSES)
    return results


def classes_picture(image: Path, folder: Path) -> Path:
    """Where the picture of all classes of an image is."""
    return folder / f"{image.stem}_classes.png"


def _with_legend(picture: np.ndarray, colours: Mapping[str, Colour]) -> np.ndarray:
    """A picture, uint8 (H, W, 3), above a line for each class in its colour."""
    font = _font()
    width = max(picture.shape[1], *(math.ceil(font.getlength(name)) + 2 * LINE for name in colours))
    sheet = Image.new("RGB", (width, picture.shape[0] + LINE * len(colours)), "white")
    sheet.paste(Image.fromarray(picture), (0, 0))
    draw = ImageDraw.Draw(sheet)
    for top, (name, colour) in zip(range(picture.shape[0], sheet.height, LINE), colours.items(), strict=True):
        draw.rectangle((2, top + 2, LINE - 2, top + LINE - 2), colour)
        draw.text((LINE + 2, top), name, "black", font)
    return np.asarray(sheet)


def _loaded(maker: Maker, target: Target) -> np.ndarray:
    image, note = load_for_model(target.image, maker.grey)
    if note:
        tqdm.write(note)
    return image


def _written(
    maker: Maker,
    target: Target,
    image: np.ndarray,
    found: Answered,
    threshold: float,
    keep_soft: bool,
    trained: np.ndarray | None,
) -> Segmented:
    """Write what an answer has, and say what it is."""
    mask = found.soft > threshold
    none = found.segs == 0
    seen = trained is not None and bool(among(thumbnail(image)[None], trained)[0])
    write_mask(target, image, None if none else mask, found.prompt, found.soft if keep_soft else None, seen)
    predicted = None
    if maker.network is not None and found.scorer is not None and not none:
        predicted = predicted_quality(maker.network, found.scorer, mask, found.source)
    numbers = float(mask.mean()), int(ndimage.label(mask, np.ones((3, 3)))[1]), soft_dice(found.soft, mask)
    size = image.shape[0], image.shape[1]
    return Segmented(target, found.prompt, found.answer, found.segs, size, *numbers, predicted, found.outside)


def verdicts(results: Sequence[Segmented]) -> list[str]:
    """ "look at this one: ..." for a mask that is missing, empty or of an unknown kind of image, or unsure; else "".

    Unsure is a confidence below 0.8 that is among the lowest tenth of these images.
    """
    known = [result.confidence for result in results if not result.absent]
    lowest = sorted(known)[: -(-len(known) // int(1 / LOWEST))]
    found = []
    for result in results:
        low = not result.absent and result.confidence < UNSURE and result.confidence <= lowest[-1]
        words = result.fault or ("low confidence" if low else "")
        found.append(f"{LOOK}: {words}" if words else "")
    return found


# ---- files of a folder ----


def check_results_free(targets: Sequence[Target], form: Format = "png") -> None:
    """Raise a ValueError if a file of the results exists that was not written here, or two labels have one name."""
    files = {folder / name for folder in {target.mask.parent for target in targets} for name in (RESULTS, SHEET)}
    files |= {target.mask.parent / COCO for target in targets if form == "coco"}
    if form == "nnunet":
        labels = [label_file(target) for target in targets]
        check_apart(targets, labels)
        files |= set(labels)
    for path in sorted(files):
        if path.exists() and not _is_ours(path):
            raise ValueError(
                f"{path}: exists already and was not written by segment; choose another place by --output, or move it"
            )


def _is_ours(path: Path) -> bool:
    """Whether a file of results was written here."""
    if path.name == RESULTS:
        return bool(_rows(path))
    if path.name == COCO:
        saved = read_json(path)
        return isinstance(saved, dict) and saved.get("info") == INFO
    return prompt_of(path) is not None


def write_results(results: Sequence[Segmented], form: Format = "png") -> None:
    """Write the results of each folder of masks, in place of those of an earlier run."""
    folders: dict[Path, list[tuple[Segmented, str]]] = {}
    for result, verdict in zip(results, verdicts(results), strict=True):
        folders.setdefault(result.target.mask.parent, []).append((result, verdict))
    for folder, here in folders.items():
        _write_table(folder / RESULTS, here)
        if len(here) > 1:
            write_contact_sheet(folder / SHEET, here)
        if form == "coco":
            write_json(folder / COCO, coco_predictions([result for result, _ in here]))
    if form == "nnunet":
        for result in results:
            _write_label(result)


def _write_table(path: Path, results: Sequence[tuple[Segmented, str]]) -> None:
    """Write results.csv: these masks, and those of earlier runs that are still there."""
    earlier = {row["mask"]: [row[name] for name in COLUMNS] for row in _rows(path)}
    lines = {name: line for name, line in earlier.items() if name and (path.parent / name).is_file()}
    lines |= {result.target.mask.name: _line(result, verdict) for result, verdict in results}
    with whole_file(path) as temporary:
        temporary.write_text(csv_text([COLUMNS, *lines.values()]), encoding="utf-8")


def _line(result: Segmented, verdict: str) -> list[Any]:
    """A row of results.csv; what cannot be given is empty."""
    name = result.target.image.name
    patient = compile_group_regex(None).search(name)
    row = [name, "", patient["group"] if patient else "", result.prompt, *[""] * 6, verdict]
    if result.segs != 0:
        known = (*(result.predicted or UNKNOWN)[:3], None if result.absent else result.confidence)
        decimals = ["" if number is None else f"{number:.4f}" for number in known]
        row[1], row[4:10] = result.target.mask.name, [f"{result.share:.6f}", str(result.parts), *decimals]
    return row


def _rows(path: Path) -> list[dict[str, str]]:
    """The rows of a results.csv that was written here; none of another file, or where there is none."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", errors="replace", newline="") as file:  # it may be another's
        table = csv.DictReader(file)
        return list(table) if tuple(table.fieldnames or ()) == COLUMNS else []


# ---- contact sheet ----


def write_contact_sheet(path: Path, results: Sequence[tuple[Segmented, str]]) -> None:
    """Draw the overlays, those to look at first; with more than a hundred only these."""
    chosen = sorted((one for one in results if not one[0].absent), key=lambda one: one[0].rank)[:MOST_TILES]
    if not chosen:
        return path.unlink(missing_ok=True)
    title = f"{len(chosen)} of {len(results)} masks, the lowest predicted Dice or confidence first"
    tiles = [(_tile(result), _caption(result, verdict), bool(verdict)) for result, verdict in chosen]
    save_mask(path, contact_sheet(tiles, title), chosen[0][0].prompt)


def contact_sheet(tiles: Sequence[tuple[Image.Image, Sequence[str], bool]], title: str) -> np.ndarray:
    """uint8 (H, W, 3) of tiles: a picture of at most `TILE` pixels a side, its texts, and whether they are red.

    At most `MOST_TILES` are drawn.
    """
    tiles = tiles[:MOST_TILES]
    font = _font()
    words = [_lines(texts, font) for _, texts, _ in tiles]
    across = min(MOST_ACROSS, math.ceil(math.sqrt(len(tiles))))
    tall = TILE + LINE * max(len(lines) for lines in words) + LINE
    size = across * (TILE + LINE) + LINE, -(-len(tiles) // across) * tall + 2 * LINE
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((LINE, LINE // 2), title, "black", font)
    for number, ((picture, _, red), lines) in enumerate(zip(tiles, words, strict=True)):
        left, top = LINE + number % across * (TILE + LINE), 2 * LINE + number // across * tall
        sheet.paste(picture, (left, top))
        for row, line in enumerate(lines):
            draw.text((left, top + picture.height + row * LINE), line, RED if red else "black", font)
    return np.asarray(sheet)


def _font() -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", LINE - 4)


def _tile(result: Segmented) -> Image.Image:
    """The image, shrunk, with its mask painted in that size: a line of the overlay would fade."""
    picture = Image.fromarray(load_image(result.target.image if result.segs == 0 else result.target.overlay))
    picture.thumbnail((TILE, TILE))
    if result.segs == 0:
        return picture
    return Image.fromarray(paint_mask(np.asarray(picture), load_grid(result.target.mask) > 0, AFTER))


def _caption(result: Segmented, verdict: str) -> list[str]:
    """The texts below a tile: the whole file name, the number that sorts it, and the verdict."""
    known, number = result.rank
    words = f"{'predicted Dice' if known else 'confidence'} {number:.3f}"
    return [result.target.image.name, result.name, "" if result.segs == 0 else words, verdict]


def _lines(texts: Sequence[str], font: ImageFont.FreeTypeFont) -> list[str]:
    """Each text in lines that are no wider than a tile."""
    lines: list[str] = []
    for text in texts:
        for letter in text:
            if not lines or lines[-1] == "\n" or font.getlength(lines[-1] + letter) > TILE:
                lines.append("")
            lines[-1] += letter
        lines.append("\n")
    return [line for line in lines if line != "\n"]


# ---- for the next tool ----


def coco_predictions(results: Sequence[Segmented]) -> dict[str, Any]:
    """The masks as COCO's results of a data set: one category, or one for each class, and an RLE for each mask.

    An empty mask has none.
    """
    sizes = {result.target.image: result.size for result in results}
    numbers = {image: number for number, image in enumerate(sizes, 1)}
    names = dict.fromkeys(one.name or results[0].prompt for one in results)
    categories = {name: number for number, name in enumerate(names, 1)}
    images = [
        {"id": numbers[image], "file_name": image.name, "height": height, "width": width}
        for image, (height, width) in sizes.items()
    ]
    annotations = list[dict[str, Any]]()
    for result in results:
        if not result.share:
            continue
        rle = to_rle(load_grid(result.target.mask) > 0)
        annotations.append(
            {
                "id": len(annotations) + 1,
                "image_id": numbers[result.target.image],
                "category_id": categories[result.name or results[0].prompt],
                "segmentation": rle,
                "area": int(coco.area(rle)),
                "bbox": coco.toBbox(rle).tolist(),
                "iscrowd": 0,
                "score": result.rank[1],
            }
        )
    named = [{"id": number, "name": name} for name, number in categories.items()]
    return {"info": INFO, "images": images, "annotations": annotations, "categories": named}


def label_file(target: Target) -> Path:
    """Where the label of an image is for nnU-Net: `labelsTs/NAME.png` of the image `NAME.png` or `NAME_0000.png`."""
    return target.mask.parent / NNUNET / f"{target.image.stem.removesuffix(FIRST_CHANNEL)}.png"


def _write_label(result: Segmented) -> None:
    """Write the label of 0 and 1; of an answer without a mask, remove that of an earlier run."""
    path = label_file(result.target)
    if result.segs == 0:
        return path.unlink(missing_ok=True)
    save_mask(path, (load_grid(result.target.mask) > 0).astype(np.uint8), result.prompt)
