"""Data folders of another layout (images/ with masks/, COCO, nnU-Net, ...): imported once, then used as our own format.

Training goes through `own_format`, `sa2va-rl doctor` through `imported_root`.
"""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from rl_reward_network.artefacts import locked
from rl_reward_network.data.readers import READERS
from rl_reward_network.data_import.files import check_files, files_below
from rl_reward_network.data_import.groups import NONE
from rl_reward_network.data_import.layouts import LAYOUTS, recognise_layout
from rl_reward_network.data_import.notes import FORMAT_VERSION
from rl_reward_network.data_import.report import report_lines
from rl_reward_network.data_import.survey import ImportOptions, survey_source
from rl_reward_network.data_import.write import check_target, write_import
from rl_reward_network.flags import changed
from rl_reward_network.inputs.config import RunConfig

IMPORTED = "imported"  # below the output folder


def own_format(config: RunConfig) -> RunConfig:
    """The settings with `data_root` in a format of this project; another layout is imported first.

    Raises:
        ValueError: the source cannot be imported as it is, or flags of the import are given for other data.
    """
    if config.unlabelled_root is not None:
        config = replace(config, unlabelled_root=own_unlabelled(config))
    options = ImportOptions(config.groups, config.group_regex, config.label)
    root = imported_root(config.data_root, config.output_dir, options)
    if root is not None:
        regex = config.group_regex if config.unlabelled_root else None  # of no effect on imported data
        return replace(config, data_root=root, groups=None, group_regex=regex, label=None)
    if flags := changed(config, "groups", "label"):
        raise ValueError(f"{flags[0]} is for data that are imported, but {config.data_root} is not: leave it out")
    return config


def own_unlabelled(config: RunConfig) -> Path | None:
    """`unlabelled_root` in a format of this project, or a plain folder of images; another layout is imported first.

    Raises:
        ValueError: the source cannot be imported as it is.
    """
    root = config.unlabelled_root
    if root is None:
        return None
    try:
        options = ImportOptions(None, config.group_regex, config.label, own_groups=True)
        return imported_root(root, config.output_dir, options) or root
    except ValueError as error:
        remedy = f"import it by sa2va-rl data import {root} --to FOLDER --write, and name that folder"
        raise ValueError(f"unlabelled_root: {error}; {remedy}") from None


def imported_root(data_root: Path, output_dir: Path, options: ImportOptions) -> Path | None:
    """The folder of imported data, made if it is missing; None for data that are read as they are.

    Args:
        data_root: any data folder.
        output_dir: parent of the run folders; holds `imported/<name>_<hash of the files and options>`.
        options: of the import.

    Raises:
        ValueError: as `survey_source` and `write_import`.
    """
    if not data_root.is_dir() or _read_as_it_is(data_root):
        return None
    check_files(data_root)  # before they are counted
    if not _of_a_layout(data_root):
        return None
    layout, description = recognise_layout(data_root, options.layout)
    name = layout if layout == "dicom" else data_root.resolve().name  # folders of DICOM files are named after patients
    folder = output_dir / IMPORTED / f"{name}_{_digest(data_root, options)}"
    taken = f"{data_root}: taken for {description}"
    if not folder.exists():
        check_target(data_root, folder)
        tqdm.write(f"{taken}; importing, once")
        survey = survey_source(data_root, options)
        tqdm.write("\n".join(report_lines(survey)))
        survey.check()
        with locked(folder.parent):  # other processes wait while this one writes
            if not folder.exists():
                write_import(survey, folder)
    if os.environ.get("RANK", "0") == "0":
        tqdm.write(f"{taken}; imported: {folder}")
    return folder


def _read_as_it_is(root: Path) -> bool:
    """Whether a reader takes the folder; COCO's annotations.json is an object, ours a list, which can be long."""
    file = root / "annotations.json"
    if file.is_file():
        with file.open(encoding="utf-8-sig", errors="replace") as text:
            object_ = text.read(4096).lstrip().startswith("{")
        return not (object_ and LAYOUTS["coco"].recognise(root))
    return any(recognise(root) for recognise, _ in READERS.values())


def _of_a_layout(root: Path) -> bool:
    return any(layout.recognise(root) for layout in LAYOUTS.values())


def _digest(source: Path, options: ImportOptions) -> str:
    """12 hex digits that change with the files of the source (names, sizes, times) and the options."""
    stats = [(path.relative_to(source).as_posix(), path.stat()) for path in files_below(source)]
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    table = options.groups not in (None, NONE) and Path(str(options.groups)).is_file()
    rows = Path(str(options.groups)).read_text(encoding="utf-8", errors="replace") if table else options.groups
    text = json.dumps([FORMAT_VERSION, files, rows, options.group_regex, options.label, options.own_groups])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
