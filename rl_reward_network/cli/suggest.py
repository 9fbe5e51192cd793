"""Suggest which images of a folder to annotate next, and prepare the data folder into which their masks are drawn.

    sa2va-rl suggest --images FOLDER --number 6
    sa2va-rl suggest --images FOLDER --number 6 --rule typical [--model_path outputs/improve_<time>]

Written to a new folder OUTPUT_DIR/suggest_<time>: suggested.csv (rank, image, patient, why), contact_sheet.png,
annotations.json with copies of all images in images/, and masks/, which is empty: draw the masks there.
"""

from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from rl_reward_network.atomic_io import check_writable
from rl_reward_network.flags import Rare, check_at_least
from rl_reward_network.models.default import DEFAULT_MODEL

if TYPE_CHECKING:
    from rl_reward_network.segment.suggest import Suggestion


@dataclass(frozen=True)
class Args:
    """Suggest which images of a folder to annotate next."""

    images: Path
    """Folder of images, also in folders below it."""
    number: int = 6
    """How many images to suggest; at most one of each patient until every patient has one."""
    rule: Literal["typical", "unsure", "random"] = "random"
    """typical: images nearest to the centres of k-means on features of the model's image encoder. unsure: images with
    the largest uncertainty of the model's soft mask. random: by chance, the default, since on angiograms neither of the
    others was better."""
    model_path: str | None = None
    """The model that describes the images, for typical and unsure: a Sa2VA (folder, hub id), or the folder of a
    finished run; by default the small embedded Sa2VA."""
    text: str = "blood vessel"
    """What is to be drawn, as a phrase: the field `text` of annotations.json."""
    output_dir: Path = Path("outputs")
    """Parent of the new folder."""
    device: str | None = None
    """cpu, cuda:0, ...; by default the first GPU if there is one, else the CPU."""
    seed: Rare[int] = 0
    """Of the chance in k-means and in random."""


def main(args: Args) -> None:
    """Find the images, describe them by the model, choose, write, and print what to do next."""
    check_at_least(args, 1, "number")
    check_at_least(args, 0, "seed")
    if not args.text.strip():
        raise ValueError("--text is empty; name what is to be drawn, such as 'blood vessel'")
    if args.rule == "random" and args.model_path is not None:
        raise ValueError("--model_path: chance needs no model; give --rule typical or unsure, or leave it out")
    if not args.images.is_dir():
        raise ValueError(f"--images {args.images}: no such folder; name the folder that holds the images")
    if args.output_dir.resolve().is_relative_to(args.images.resolve()):
        raise ValueError(f"--output_dir {args.output_dir}: it lies in the folder of the images; choose one outside it")
    check_writable(args.output_dir)
    from tqdm import tqdm

    from rl_reward_network.data.images import load_image
    from rl_reward_network.inputs.loading import check_readable
    from rl_reward_network.segment.files import image_files
    from rl_reward_network.segment.maker import load_maker
    from rl_reward_network.segment.suggest import choose, describe, patients_of, write

    files = image_files([args.images])
    if args.number > len(files):
        raise ValueError(f"--number {args.number}: {args.images} holds {len(files)} images; give at most so many")
    check_readable([partial(load_image, file) for file in files])
    names = [file.relative_to(args.images).as_posix() for file in files]
    values = np.zeros(len(files))
    if args.rule != "random":
        maker = load_maker(args.model_path or DEFAULT_MODEL, device=args.device)
        values = describe(args.rule, maker, files, partial(tqdm, desc="looking", unit="image"))
    chosen = choose(args.rule, values, patients_of(names), args.number, args.seed)
    folder = args.output_dir / f"suggest_{datetime.now():%Y%m%d_%H%M%S_%f}"
    write(folder, args.images, names, chosen, args.text.strip())
    show(chosen, names, folder)


def show(chosen: "list[Suggestion]", names: list[str], folder: Path) -> None:
    """Print the suggested images, and how their masks become training data."""
    from rl_reward_network.segment.suggest import mask_names

    masks = mask_names(names)
    for rank, one in enumerate(chosen, 1):
        print(f"{rank:>3}. {names[one.index]}: {one.why}; mask: {masks[one.index]}")
    print(f"written: suggested.csv, contact_sheet.png, annotations.json, images/ and masks/ in {folder}")
    print(
        "next: draw each mask as a black and white PNG of the image's size under the name above, in that folder;"
        " annotations.json needs no change. An image whose mask is not there yet counts as one without a mask."
    )
    print(f"then: sa2va-rl doctor --data_root {folder}, and sa2va-rl improve --data_root {folder}")
