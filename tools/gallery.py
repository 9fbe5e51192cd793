"""The pictures of `docs/gallery.md`, from finished runs: nothing is trained, and masks that a run holds are read.

    python -m tools.gallery --comparison outputs/compare_<time>
    python -m tools.gallery --render outputs/series
    sa2va-rl segment outputs/series --video --truth outputs/series_masks --output outputs/frames
    python -m tools.gallery --sequences outputs/series outputs/frames/series_segmented

Everywhere the mask is tinted in orange and the truth is outlined in blue. Written to --to: `methods_<group>.png` of a
comparison, and for each sequence a picture with the name of the folder above it, here `frames.png`. A picture is small:
it has a palette of grey, tinted grey, orange and blue, and no other colours.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from rl_reward_network.atomic_io import read_json, whole_file, whole_folder
from rl_reward_network.cli.app import run
from rl_reward_network.data.images import load_grid
from rl_reward_network.data.masks import load_mask
from rl_reward_network.data_import.sequences import key_frames, open_sequence
from rl_reward_network.embedded.angiograms import TREE, render_series
from rl_reward_network.inputs.loading import RunInputs, open_inputs, saved_config, segmenter_with
from rl_reward_network.methods import GROUPS
from rl_reward_network.methods.methods import METHODS, WEIGHTS, Method
from rl_reward_network.methods.training import MERGED, REWARD_NET
from rl_reward_network.methods.view import ImageView, Models, Trained
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.report.overlays import AFTER, TINT, TRUTH, paint_mask
from rl_reward_network.report.table import picks
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.rewards.metrics import dice
from rl_reward_network.run import BEST_REWARD_NET
from rl_reward_network.segment.sequence import SequenceTarget, truth_files

PANEL, FRAME = 160, 320  # pixels of a side: of an image of a comparison, of a frame
GAP, LINE, LETTERS = 4, 24, 15  # pixels: between panels, height of a line of text, height of its letters
FRAMES, SEED, LOOK = 6, 0, "catheter"  # of the series that --render makes
GREYS = 24  # of the palette
ROUNDED = 2e-3  # of Dice: between a mask and its table, which was computed on another day


@dataclass(frozen=True)
class Args:
    """Make the pictures of the gallery from finished runs."""

    comparison: Path | None = None
    """Folder of a finished comparison."""
    sequences: tuple[tuple[Path, Path], ...] = ()
    """Pairs: frames, and the folder <name>_segmented that `segment --video` wrote for them. True masks are drawn where
    a folder <name>_masks lies beside the frames."""
    render: Path | None = None
    """Render a series of frames into this folder, and its true masks into <folder>_masks beside it."""
    to: Path = Path("docs/pictures/gallery")
    """Folder of the pictures."""


def main(args: Args) -> None:
    """Make what is asked for."""
    if args.render is not None:
        write_series(args.render)
    if args.comparison is not None:
        for name, sheet in method_sheets(Comparison(args.comparison)):
            save(sheet, args.to / f"methods_{name}.png")
    for frames, segmented in args.sequences:
        save(frame_sheet(frames, segmented), args.to / f"{segmented.resolve().parent.name}.png")


# ---- panels and sheets -----------------------------------------------------------------------------------------------


class Panel(NamedTuple):
    """A square picture, uint8 (S, S, 3), and the words below it."""

    pixels: np.ndarray
    words: str


def panel(image: np.ndarray, mask: np.ndarray, truth: np.ndarray | None, side: int, words: str) -> Panel:
    """An image, uint8 (H, W, 3), with its mask and the truth, bool (H, W), fitted into a square of `side` pixels."""
    pixels = paint_mask(np.asarray(ImageOps.contain(Image.fromarray(image), (side, side))), mask, AFTER)
    pixels = pixels if truth is None else paint_mask(pixels, truth, TRUTH, opacity=0)
    return Panel(np.asarray(ImageOps.pad(Image.fromarray(pixels), (side, side), color="white")), words)


def block(panels: Sequence[Panel], columns: int, heads: Sequence[str] = ()) -> Image.Image:
    """Panels in rows, each with its words below, under lines of text."""
    side, rows, top = len(panels[0].pixels), -(-len(panels) // columns), LINE * len(heads)
    sheet = Image.new("RGB", (columns * (side + GAP) - GAP, top + rows * (side + LINE)), "white")
    write, font = ImageDraw.Draw(sheet), ImageFont.load_default(LETTERS)
    for number, head in enumerate(heads):
        write.text((0, number * LINE), head, "dimgrey" if number else "black", font)
    for number, shown in enumerate(panels):
        x, y = number % columns * (side + GAP), top + number // columns * (side + LINE)
        sheet.paste(Image.fromarray(shown.pixels), (x, y))
        write.text((x + side // 2, y + side + 2), shown.words, "black", font, anchor="ma")
    return sheet


def grid(blocks: Sequence[Image.Image]) -> Image.Image:
    """Blocks of one size in two columns, with a margin between them."""
    width, height = (side + 6 * GAP for side in blocks[0].size)
    sheet = Image.new("RGB", (2 * width - 6 * GAP, -(-len(blocks) // 2) * height - 6 * GAP), "white")
    for number, one in enumerate(blocks):
        sheet.paste(one, (number % 2 * width, number // 2 * height))
    return sheet


def save(sheet: Image.Image, path: Path) -> None:
    """Write a sheet with the palette, whole or not at all."""
    greys = np.linspace(0, 255, GREYS)[:, None].repeat(3, axis=1)
    colours = np.concatenate([greys, greys + TINT * (np.array(AFTER) - greys), [TRUTH, AFTER]])
    palette = Image.new("P", (1, 1))
    palette.putpalette(colours.round().astype(np.uint8).tobytes())
    with whole_file(path) as temporary:
        sheet.quantize(palette=palette, dither=Image.Dither.NONE).save(temporary, format="PNG", optimize=True)
    print(f"{path}: {sheet.width} x {sheet.height} pixels, {path.stat().st_size / 1000:.0f} kB")


# ---- methods ---------------------------------------------------------------------------------------------------------


class Comparison:
    """A finished comparison, opened again; of several seeds, the first.

    ValueError: it is not finished, or data or model are missing.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "eval.json").exists():
            raise ValueError(f"--comparison {folder}: holds no eval.json; name a finished compare_<time> folder")
        self.folder, config = folder, read_json(folder / "config.json")
        settings, limits = saved_config(folder, config)
        self.inputs: RunInputs = open_inputs(settings, limits, folder / "split.json", config["prompts"])
        saved: dict[str, Any] = read_json(folder / "eval.json")
        self.rows: dict[str, dict[str, Any]] = {row["method"]: row for row in saved["rows"]}
        runs = {name: (folder / path).resolve() for name, path in saved["config"]["runs"].items()}
        self.trained = Trained(self.inputs.prompts, runs)
        merged = {name: path / MERGED for name, path in runs.items() if name in WEIGHTS}
        load = partial(segmenter_with, config=settings, limits=limits)
        self.models = Models(self.inputs.segmenter, merged, load, self.inputs.bank.folder)
        self.maps = None
        if run := runs.get(REWARD_NET):
            network = RewardNetwork.from_pretrained(run / BEST_REWARD_NET)
            self.maps = ForegroundMaps.beside(run, network.to(self.inputs.config.device))
        self.dice: dict[str, dict[str, float]] = {}  # method -> test image -> value
        with (folder / "eval.csv").open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                self.dice.setdefault(line["method"], {}).setdefault(line["sample_id"], float(line["dice"]))

    def mask(self, method: Method, image: np.ndarray) -> np.ndarray:
        """bool (H, W): the mask of a method."""
        row, scorer = self.rows[method.name], None if self.maps is None else self.maps.scorer
        view = ImageView(image, self.models(row["weights"][0]), scorer)
        parameter = float(row["chosen_on_validation"].split("; ")[0].rpartition(", ")[2]) if method.grid else None
        return np.asarray(method.predict(view, self.trained, parameter) > 0.5)

    def panels(self, method: Method) -> list[Panel]:
        """The best, the median and the worst test image of a method.

        Raises:
            ValueError: a mask is not the one that was measured.
        """
        known = self.dice[method.name]
        samples = {sample.sample_id: sample for sample in self.inputs.samples}
        shown = []
        for word, place in picks(np.array(list(known.values()))).items():
            name = list(known)[place]
            image, truth = samples[name].load_image(), samples[name].load_mask()
            assert truth is not None
            mask = self.mask(method, image)
            if abs((found := float(dice(mask[None], truth[None])[0])) - known[name]) > ROUNDED:
                was = f"{method.name}: Dice of {name} is {found:.3f}, in eval.csv {known[name]:.3f}"
                raise ValueError(f"{self.folder}: {was}; what it used was changed, run the comparison again")
            shown.append(panel(image, mask, truth, PANEL, f"{word} {known[name]:.2f}"))
        return shown


def method_sheets(comparison: Comparison) -> Iterator[tuple[str, Image.Image]]:
    """Group -> a sheet of its methods, after the model as it is, in the order of the table.

    Each has its three images under its title and its line of the table.
    """

    def block_of(method: Method) -> Image.Image:
        row = comparison.rows[method.name]
        line = f"mean Dice {row['means']['dice']['mean']:.3f}"
        if row["verdict"]:
            line += f", {row['dice_minus_base']['mean']:+.3f} to the model as it is: {row['verdict']}"
        return block(comparison.panels(method), 3, (method.title, line))

    compared = [method for method in METHODS if method.name in comparison.rows]
    base = [block_of(method) for method in compared if method.group is None]
    for group in GROUPS:
        if blocks := [block_of(method) for method in compared if method.group == group]:
            yield group, grid(base + blocks)


# ---- sequences -------------------------------------------------------------------------------------------------------


def write_series(folder: Path) -> None:
    """Render a series of the embedded world into `folder`, and its true masks into `<folder>_masks`."""
    masks = folder.with_name(f"{folder.name}_masks")
    with whole_folder(folder) as images, whole_folder(masks) as truths:
        for number, frame in enumerate(render_series(np.random.default_rng(SEED), LOOK, FRAMES), 1):
            Image.fromarray(frame.image).save(images / f"{number:04d}.png")
            Image.fromarray((frame.parts & TREE > 0).astype(np.uint8) * 255).save(truths / f"{number:04d}.png")


def frame_sheet(frames: Path, segmented: Path) -> Image.Image:
    """Up to six frames of a sequence, evenly spaced, with their masks, and the truth where it is known.

    Raises:
        ValueError: there is not one mask for each frame.
    """
    sequence = open_sequence(frames)
    masks = SequenceTarget(frames, segmented).masks
    if len(masks) != len(sequence):
        raise ValueError(f"{segmented}: {len(masks)} masks of {len(sequence)} frames; run `segment --video` again")
    chosen = key_frames(len(sequence), "uniform", FRAMES)
    folder = frames.with_name(f"{frames.name}_masks")
    truths = truth_files(sequence, folder) if folder.is_dir() else {}
    panels = []
    for index, image in zip(chosen, sequence.frames(chosen), strict=True):
        mask, truth, words = load_grid(masks[index]) > 0, None, f"frame {index + 1} of {len(sequence)}"
        if index in truths:
            truth = load_mask(truths[index], sequence.size)
            words += f": Dice {float(dice(mask[None], truth[None])[0]):.2f}"
        panels.append(panel(image, mask, truth, FRAME, words))
    return block(panels, min(3, len(panels)))


if __name__ == "__main__":
    run(main, Args)
