"""Import images and masks of another layout into a data folder of this project; the source is only read.

sa2va-rl data import SOURCE                                  # tells what it finds, writes nothing
sa2va-rl data import SOURCE --to FOLDER --patients_csv patients.csv --write
"""

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from rl_reward_network.flags import Rare


@dataclass(frozen=True)
class Args:
    """Import images and masks of other layouts. Without --write it only tells."""

    source: tyro.conf.Positional[Path]
    """Folder with the images and masks; nothing in it is changed."""
    to: Path | None = None
    """New data folder, DATA_ROOT of the training; it must not lie in the source."""
    write: bool = False
    """Write it, whole or not at all."""
    patients_csv: str | None = None
    """Who is a patient, where names of folders and files do not show it: a CSV table with the columns image, group and
    perhaps series (--patients_csv patients.csv), or none. Then each image is a group of its own, and every report
    repeats that as a possible leak."""
    group_regex: str | None = None
    """Regular expression with a group named `group` that finds the patient in the path of an image below the source,
    e.g. --group_regex '(?P<group>[^_/]+)_' for images/PATIENT_1.png."""
    yes: bool = False
    """Take the patients that names of folders and files propose, without a question."""
    label: str | None = None
    """The class that is the mask, where there are several, e.g. --label vessel: name, number or #rrggbb; several with
    commas between, or all for the union."""
    phrase: str | None = None
    """The phrase of the object; by default the class's name, or "blood vessel" for none or several."""
    classes: Path | None = None
    """A file with several classes that are asked for by name, their wordings and their certain absences, in place of
    --label and --phrase; docs/how-to/your-data.md describes it."""
    frames: Rare[str] = "middle"
    """Frames of a DICOM file with several: first, middle or all."""
    no_split: Rare[bool] = False
    """Split the patients anew, where the source has parts train, val and test."""
    skip: Rare[int] = 0
    """Leave out broken files, images with a broken mask among them, if there are at most so many; they are listed here
    and in skipped.txt."""
    bit_depth: Rare[int | None] = None
    """Bits of grey images above 8 bit, which are written as 8 bit, as `--bit_depth` of a training that imports."""
    layout: Rare[str] = "auto"
    """auto, or one of the layouts, where a folder holds two; a wrong name lists them."""


def main(args: Args) -> None:
    """Tell what the source holds, and import it with --write."""
    from rl_reward_network.data.patients import PROPOSED
    from rl_reward_network.data_import.survey import ImportOptions, report_lines, survey_source
    from rl_reward_network.data_import.write import check_target, write_import

    if args.write and args.to is None:
        raise ValueError("write is True, but to is not given; name the new data folder by --to FOLDER")
    if args.to is not None:
        check_target(args.source, args.to)
    flags = args.patients_csv, args.group_regex, args.label, args.phrase, args.layout, args.frames, args.skip
    options = ImportOptions(*flags, classes=args.classes, bit_depth=args.bit_depth, no_split=args.no_split)
    survey = survey_source(args.source, options)
    print("\n".join(report_lines(survey)))
    survey.check()
    if args.to is None or not args.write:
        print(
            f"nothing was written; next: the same command with --to {args.to or 'FOLDER'} --write, or sa2va-rl improve"
            f" --data_root {shlex.quote(str(args.source))}, which imports by itself"
        )
        return
    if survey.groups_from.startswith(PROPOSED) and (args.yes or sys.stdin.isatty()):
        if not args.yes and input("take these patients? [Y/n] ").strip().lower() not in ("", "y", "yes"):
            raise ValueError(
                "the patients are not taken: name them by --patients_csv patients.csv, or by --group_regex"
            )
        survey = replace(survey, groups_from=survey.groups_from.removeprefix(PROPOSED))
    write_import(survey, args.to)
    by_name = "grpo quick --objective supervised" if survey.named else "improve quick"
    print(f"imported: {args.to}; next: sa2va-rl {by_name} --data_root {shlex.quote(str(args.to))}")
