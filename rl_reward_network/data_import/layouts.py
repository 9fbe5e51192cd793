"""The layouts that are imported, in one table, and how a folder's layout is recognised.

A new layout is a module of this package with two functions, and one line of `LAYOUTS` beside its import:

- `recognise(source)` returns a short description of what the folder holds, "" if it is of another layout;
- `read(source, frames)` returns its images as `Found`, nothing decoded; ValueError with file and remedy.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rl_reward_network.data_import.coco import read_coco, recognise_coco
from rl_reward_network.data_import.dicom import read_dicom, recognise_dicom
from rl_reward_network.data_import.files import check_files, unread_note
from rl_reward_network.data_import.items import Found
from rl_reward_network.data_import.labelme import read_labelme, recognise_labelme
from rl_reward_network.data_import.nnunet import read_nnunet, recognise_nnunet
from rl_reward_network.data_import.paired_folders import read_paired_folders, recognise_paired_folders
from rl_reward_network.data_import.yolo import read_yolo, recognise_yolo


class Layout(NamedTuple):
    """How a layout is recognised and read.

    Args:
        recognise, read: see the module's docstring; `frames` is for files with several, see `dicom.FRAMES`.
        words: what it is, for messages.
        private: whether names in the source may be those of patients, as `Found.private`.
    """

    recognise: Callable[[Path], str]
    read: Callable[[Path, str], Found]
    words: str
    private: bool = False


LAYOUTS: dict[str, Layout] = {
    "paired": Layout(recognise_paired_folders, read_paired_folders, "images/ and masks/ with equal names"),
    "coco": Layout(recognise_coco, read_coco, "COCO instances"),
    "nnunet": Layout(recognise_nnunet, read_nnunet, "nnU-Net (imagesTr, labelsTr)"),
    "yolo": Layout(recognise_yolo, read_yolo, "YOLO polygons (images/, labels/*.txt)"),
    "labelme": Layout(recognise_labelme, read_labelme, "LabelMe (one JSON per image)"),
    "dicom": Layout(recognise_dicom, read_dicom, "DICOM", private=True),
}
AUTO = "auto"


def recognise_layout(source: Path, layout: str = AUTO) -> tuple[str, str]:
    """Key of `LAYOUTS` for a folder, and the description of what it holds.

    Args:
        source: the folder.
        layout: "auto", or a key that is taken as it is.

    Raises:
        ValueError: no folder, no known layout, several, or `layout` is unknown.
    """
    if layout not in (AUTO, *LAYOUTS):
        raise ValueError(f"layout is {layout!r}, expected {AUTO}, {', '.join(LAYOUTS)}")
    if not source.is_dir():
        raise ValueError(f"{source}: no such folder; name the folder of your images")
    check_files(source)
    if layout != AUTO:
        return layout, LAYOUTS[layout].recognise(source) or layout
    found = {name: text for name, one in LAYOUTS.items() if (text := one.recognise(source))}
    if not found:
        *words, last = (one.words for one in LAYOUTS.values())
        expected = f"expected {', '.join(words)} or {last}"
        raise ValueError("; ".join([f"{source}: no known layout", *unread_note(source, read=()), expected]))
    if len(found) > 1:
        raise ValueError(
            f"{source}: holds {' and '.join(found.values())}; import one by sa2va-rl data import --layout"
            f" {' or '.join(found)}"
        )
    ((name, text),) = found.items()
    return name, text
