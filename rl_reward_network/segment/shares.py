"""The images of `segment` shared among processes or machines, and what an interrupted run has finished.

Each share writes a line for each image that it has finished, into a file of its own in a hidden folder of the masks'
folder. All processes read all files: an image is segmented once, also if it was finished by a share of another number.
A line counts as long as its image and its masks are the files that they were.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_reward_network import __version__
from rl_reward_network.segment.files import Target
from rl_reward_network.segment.maker import Predicted
from rl_reward_network.segment.results import Segmented

FOLDER = ".segment_"  # begins the name of the hidden folder; the digest of the settings follows
MODEL_SUFFIXES = (".safetensors", ".zip")
MODEL_FILES = ("config.json", "deployed.json", "method.json")


@dataclass(frozen=True)
class Share:
    """Every `of`-th image, from image `number`, 1 to `of`."""

    number: int = 1
    of: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def own_share(flag: str | None) -> Share:
    """The share of `--shard 3/16` or, without it, of this process of torchrun; a ValueError for another flag."""
    if flag is None:
        return Share(int(os.environ.get("RANK", "0")) + 1, int(os.environ.get("WORLD_SIZE", "1")))
    numbers = re.fullmatch(r"(\d+)/(\d+)", flag)
    if not numbers or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise ValueError(f"--shard {flag}: expected NUMBER/OF, such as 3/16 for the third of 16 processes, from 1/16")
    return Share(int(numbers[1]), int(numbers[2]))


class Record:
    """What is finished of images, in the folder of their masks.

    Args:
        folder: of the masks, or of the first of them.
        settings: all that the masks depend on; results of others are not used.
        share: of this process.
    """

    def __init__(self, folder: Path, settings: str, share: Share) -> None:
        self.folder = folder / f"{FOLDER}{hashlib.sha256(settings.encode()).hexdigest()[:12]}"
        self.file = self.folder / f"{share.number}_of_{share.of}.jsonl"

    def add(self, image: Path, results: Sequence[Segmented]) -> None:
        """Write the line of an image whose masks are written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = [{**asdict(one), "target": key_of(one.target.mask)} for one in results]
        with self.file.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps([key_of(image), rows]) + "\n")  # the line before may have been cut

    def finished(self, images: Mapping[Path, Sequence[Target]]) -> dict[Path, list[Segmented]]:
        """Results of the images that are finished, with the targets of each, in their order."""
        rows: dict[str, list[dict[str, Any]]] = {}
        for file in sorted(self.folder.glob("*.jsonl")):
            rows |= dict(_lines(file))
        found: dict[Path, list[Segmented]] = {}
        for image, targets in images.items() if rows else ():
            own = rows.get(key_of(image), [])
            if own and [row["target"] for row in own] == [key_of(target.mask) for target in targets]:
                found[image] = [_segmented(target, row) for target, row in zip(targets, own, strict=True)]
        return found

    def remove(self) -> None:
        """Remove all lines, of all shares."""
        shutil.rmtree(self.folder, ignore_errors=True)


def key_of(file: Path) -> str:
    """The place, size in bytes and time of a file, which change when it is replaced; the place where there is none."""
    place = file.absolute()  # not resolved: two links to one file are two images
    return f"{place} {(there := file.stat()).st_size} {there.st_mtime_ns}" if file.exists() else str(place)


def settings_of(args: Any, *places: Path | str | None) -> str:
    """Text of flags and of files or models' folders, by which a run that goes on is known."""
    found = [Path(place) for place in places if place is not None and Path(place).exists()]
    inside = [file for place in found for file in ([place] if place.is_file() else sorted(place.rglob("*")))]
    kept = [file for file in inside if file in found or file.name in MODEL_FILES or file.suffix in MODEL_SUFFIXES]
    return "\n".join([__version__, str(args), *map(key_of, kept)])


def _lines(file: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The lines of a file, without those that an interruption has cut; the file may have just been removed."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        with suppress(json.JSONDecodeError):
            key, rows = json.loads(line)
            yield key, rows


def _segmented(target: Target, row: Mapping[str, Any]) -> Segmented:
    predicted = None if row["predicted"] is None else Predicted(*row["predicted"])
    return Segmented(**{**row, "target": target, "size": tuple(row["size"]), "predicted": predicted})
