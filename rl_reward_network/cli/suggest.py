"""Suggest which images of a folder to annotate next, and prepare the data folder into which their masks are drawn.

    sa2va-rl suggest --images FOLDER --number 6

Written to a new folder OUTPUT_DIR/suggest_<time>: suggested.csv (rank, image, patient), contact_sheet.png,
annotations.json with copies of all images in images/, and masks/, which is empty: draw the masks there.
"""

from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from rl_reward_network.atomic_io import check_writable
from rl_reward_network.flags import Rare, check_at_least


@dataclass(frozen=True)
class Args:
    """Suggest which images of a folder to annotate next: by chance, which no other rule has beaten."""

    images: Path
    """Folder of images, also in folders below it; folders or file names that name patients are understood."""
    number: int = 6
    """How many images to suggest; at most one of each patient until every patient has one."""
    text: str = "blood vessel"
    """What is to be drawn, as a phrase: the field `text` of annotations.json."""
    output_dir: Path = Path("outputs")
    """Parent of the new folder."""
    seed: Rare[int] = 0
    """Of the choice."""


def main(args: Args) -> None:
    """Find the images, choose, write, and print what to do next."""
    check(args)
    from rl_reward_network.data.images import load_image
    from rl_reward_network.inputs.loading import check_readable
    from rl_reward_network.segment.files import image_files
    from rl_reward_network.segment.suggest import choose, patients_of, write

    files = image_files([args.images])
    if args.number > len(files):
        raise ValueError(f"--number {args.number}: {args.images} holds {len(files)} images; give at most so many")
    check_readable([partial(load_image, file) for file in files])
    names = [file.relative_to(args.images).as_posix() for file in files]
    patients = patients_of(names)
    chosen = choose(patients, args.number, args.seed)
    folder = args.output_dir / f"suggest_{datetime.now():%Y%m%d_%H%M%S_%f}"
    write(folder, args.images, names, chosen, args.text.strip())
    show(chosen, names, patients, folder)


def check(args: Args) -> None:
    """Raise a ValueError for what can be refused before an image is read."""
    check_at_least(args, 1, "number")
    check_at_least(args, 0, "seed")
    if not args.text.strip():
        raise ValueError("--text is empty; name what is to be drawn, such as 'blood vessel'")
    if not args.images.is_dir():
        raise ValueError(f"--images {args.images}: no such folder; name the folder that holds the images")
    if args.output_dir.resolve().is_relative_to(args.images.resolve()):
        raise ValueError(f"--output_dir {args.output_dir}: it lies in the folder of the images; choose one outside it")
    for folder in (args.images, args.images.resolve().parent):
        if (folder / "annotations.json").exists():
            raise ValueError(
                f"--images {args.images}: {folder / 'annotations.json'} has patients and masks, which are not read"
                " here: draw further masks in that data folder, or name a folder of images alone"
            )
    check_writable(args.output_dir)


def show(chosen: list[int], names: list[str], patients: list[str], folder: Path) -> None:
    """Print the suggested images, and how their masks become training data."""
    from rl_reward_network.report.statistics import MIN_PATIENTS
    from rl_reward_network.segment.suggest import mask_names

    masks = mask_names(names)
    for rank, one in enumerate(chosen, 1):
        print(f"{rank:>3}. {names[one]}: mask: {masks[one]}")
    if (found := len({patients[one] for one in chosen})) < MIN_PATIENTS:
        print(f"note: these are images of {found} patients, and improve needs {MIN_PATIENTS}: annotate others, too")
    print(f"written: suggested.csv, contact_sheet.png, annotations.json, images/ and masks/ in {folder}")
    print(
        "next: draw each mask as a black and white PNG of the image's size under the name above, in that folder;"
        " annotations.json needs no change. An image whose mask is not there yet counts as one without a mask."
    )
    print(f"then: sa2va-rl doctor --data_root {folder}, and sa2va-rl improve --data_root {folder}")
