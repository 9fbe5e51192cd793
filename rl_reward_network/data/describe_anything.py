"""Reader of describe-anything (DAM): `<SUBSET>/annotations.json` and the numbered tars in `<SUBSET>/images/`.

`annotations.json` is an object: id of an image -> a list of regions, or one region. Of a region is read:

| key | meaning |
|---|---|
| `caption` | text |
| `mask_rle` | COCO RLE {size: [H, W], counts}; of a video (subset SAV) a list with one RLE or null per frame |
| `tar_file` | the tar in `images/` with the picture, e.g. 00000113.tar |
| `image`, `img_id`, `video_id` | with the id above, what the picture may be called in the tar (below) |

The picture of a region is the member named like the file in `image`, the same without leading zeros, `img_id`, the id
above, or `video_id`, the first that is there; folders and endings do not count, since subsets differ in them. Frames of
a video are the members `<name>.0.jpg`, `<name>.1.jpg`, ... in numeric order; each is one region, the video (`video_id`,
else the id above) their group. The tars also hold `<name>.pickle` with the same regions. Those are never opened:
reading a pickle can run code.

Source: the layout that four public programs read; the data set's repository has no reader.
"""

import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from tqdm import tqdm

from rl_reward_network.atomic_io import read_json
from rl_reward_network.data.images import decode_image, decoded_once, file_stamp
from rl_reward_network.data.items import RegionSample, collect, image_key, make_region, pseudonym, report_left_out

ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
FRAME = re.compile(r"(.+)\.(\d+)")  # <name>.<number> in the name of a video's frame, its ending off
DOWNLOAD = "hf download nvidia/describe-anything-dataset --repo-type dataset --local-dir <folder>"


@dataclass(frozen=True)
class Member:
    """Where an image file lies: `size` bytes from `offset` on in `tar`; `name` is for messages."""

    tar: Path
    name: str
    offset: int
    size: int

    def open_image(self, bit_depth: int | None = None) -> np.ndarray:
        """The image, uint8 (H, W, 3) RGB, without unpacking the tar; see `decode_image`."""

        def decode() -> np.ndarray:
            with self.tar.open("rb") as file:
                file.seek(self.offset)
                return decode_image(file.read(self.size), f"{self.tar}: member {self.name}", bit_depth)

        return decoded_once((file_stamp(self.tar), self.offset, bit_depth), decode)

    def key(self) -> str:
        """Its `image_key`."""
        with self.tar.open("rb") as file:
            return image_key(file, self.offset, self.size)


Names = dict[str, tuple[Member, ...]]  # name in a tar -> the picture, or the frames of a video in order


def read_describe_anything(
    root: Path | str, limit: int | None = None, bit_depth: int | None = None
) -> list[RegionSample]:
    """Every region, subset by subset in the order of `annotations.json`; images are not decoded, nothing is unpacked.

    `annotations.json` is read whole (of subset SAM some gigabytes of memory); each needed tar is scanned once for its
    headers, which stay in memory. `root` is a subset, or the parent of subsets. Stops after `limit` regions (a frame of
    a video is one); `bit_depth` is that of `decode_image`. ValueError for another layout, missing or damaged tars,
    members, captions and masks; it names file and entry, and the remedy.
    """
    subsets = subset_folders(Path(root))
    if not subsets:
        raise ValueError(
            f"{root}: no <SUBSET>/annotations.json with tars in <SUBSET>/images/; give a folder of describe-anything "
            f"({DOWNLOAD})"
        )
    left_out: Counter[str] = Counter()
    tars = _Tars()
    regions = collect(
        (region for subset in subsets for region in _read_subset(subset, tars, left_out, bit_depth)), limit, left_out
    )
    if tars.missing:
        (tar, fault), damaged = tars.missing[0], {tar for tar, _ in tars.missing}
        raise ValueError(
            f"{tar}: {fault}; {len(tars.missing)} region(s) in {len(damaged)} tar(s) have no image: download "
            "the tar(s) again, or delete those regions from annotations.json"
        )
    report_left_out(root, regions, left_out)
    return regions


def recognise_describe_anything(folder: Path) -> str:
    """E.g. "describe-anything: LVIS, SAV"; "" where `folder` is no subset and holds none."""
    names = ", ".join(subset.name for subset in subset_folders(folder))
    return names and f"describe-anything: {names}"


def subset_folders(root: Path) -> list[Path]:
    """`root` or the folders in it that hold an `annotations.json`, if a tar lies in `images/` of any; else none."""
    folders = [folder for folder in (root, *sorted(root.glob("*/"))) if (folder / "annotations.json").is_file()]
    return folders if any(any(folder.glob("images/*.tar")) for folder in folders) else []


class _Tars:
    """Index of the tars that were opened, and the images that were missing in them."""

    def __init__(self) -> None:
        self.index = cache(_index)
        self.key = cache(Member.key)  # an image may have many regions
        self.missing: list[tuple[Path, str]] = []

    def find(self, tar: Path, names: list[str], video: bool) -> tuple[Member, ...]:
        """The member of the first of `names` that exists, or the frames of that video; () is recorded as missing."""
        if not tar.is_file():
            self.missing.append((tar, "file not found"))
            return ()
        index = self.index(tar)[video]
        if members := next((index[name] for name in names if name in index), None):
            if len(members) > 1 and not video:
                raise ValueError(
                    f"{tar}: {len(members)} pictures are named {members[0].name}, expected one; rename the others"
                )
            return members
        self.missing.append((tar, f"no {'frames' if video else 'image'} named {' or '.join(names)} in it"))
        return ()


def _index(tar: Path) -> tuple[Names, Names]:
    """The pictures and the videos in a tar; only the headers are read."""
    try:
        with tarfile.open(tar, "r:") as opened:
            infos = [(PurePosixPath(info.name), info) for info in opened if info.isreg()]
    except (tarfile.TarError, OSError) as error:
        raise ValueError(f"{tar}: not a whole tar ({error}); download it again") from error
    pictures: Names = {}
    frames: dict[str, dict[int, Member]] = {}
    for path, info in infos:
        if path.suffix.lower() in ENDINGS:
            member = Member(tar, path.name, info.offset_data, info.size)
            pictures[path.stem] = (*pictures.get(path.stem, ()), member)
            if match := FRAME.fullmatch(path.stem):
                frames.setdefault(match[1], {})[int(match[2])] = member
    videos = {name: tuple(numbered[n] for n in sorted(numbered)) for name, numbered in frames.items()}
    return _with_bare_names(pictures), _with_bare_names(videos)


def _with_bare_names(names: Names) -> Names:
    """`names`, and each without leading zeros unless that is ambiguous."""
    counts = Counter(name.lstrip("0") for name in names)
    return {name.lstrip("0"): members for name, members in names.items() if counts[name.lstrip("0")] == 1} | names


def _read_subset(subset: Path, tars: _Tars, left_out: Counter[str], bit_depth: int | None) -> Iterator[RegionSample]:
    """The regions of one subset; those without an image are counted in `tars`."""
    file = subset / "annotations.json"
    for key, index, region in tqdm(_entries(file), f"reading {subset.name}", unit="region", leave=False, delay=2):
        where = f"{file}: entry {key!r}, region {index}"
        video = isinstance(region.get("mask_rle"), list)
        name = region.get("tar_file")
        if not isinstance(name, str) or not PurePosixPath(name).name:
            raise ValueError(
                f"{where}: tar_file is {name!r}, expected the name of a tar in images/; download the file again"
            )
        tar = subset / "images" / PurePosixPath(name).name  # whatever folder is written before it
        stated = (region.get("image"), region.get("img_id"), key, region.get("video_id"))  # best first
        paths = [PurePosixPath(str(one)) for one in stated if one is not None]
        stems = [path.stem if path.suffix.lower() in ENDINGS else path.name for path in paths]
        names = [one for one in dict.fromkeys(one for full in stems for one in (full, full.lstrip("0"))) if one]
        if members := tars.find(tar, names, video):
            group = pseudonym("video", subset.name, str(region.get("video_id") or key)) if video else None
            for member, rle in _frames(members, region.get("mask_rle"), where, left_out):
                place = f"{where} ({member.tar.name}: {member.name})"
                opened = partial(member.open_image, bit_depth)
                yield make_region(region.get("caption"), rle, tars.key(member), place, opened, group)


def _frames(members: tuple[Member, ...], rles: Any, where: str, left_out: Counter[str]) -> list[tuple[Member, Any]]:
    """(frame, RLE) where there is one; of a picture that one pair, whatever the RLE is."""
    if not isinstance(rles, list):
        return [(members[0], rles)]
    if len(rles) != len(members):
        raise ValueError(
            f"{where}: mask_rle has {len(rles)} mask(s), but {members[0].tar} {len(members)} frame(s) "
            f"({members[0].name}, ...); download both again"
        )
    left_out["frame(s) without a mask"] += sum(rle is None for rle in rles)
    return [(member, rle) for member, rle in zip(members, rles, strict=True) if rle is not None]


def _entries(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(id, index, region) of an annotation file."""
    table = read_json(path)
    if not isinstance(table, dict):
        raise ValueError(
            f"{path}: expected an object {{image id: regions}}, got {type(table).__name__}; name a folder of "
            "describe-anything"
        )
    for key, value in table.items():
        regions = value if isinstance(value, list) else [value]
        for index, region in enumerate(regions):
            if not isinstance(region, dict):
                raise ValueError(
                    f"{path}: entry {key!r}: expected regions {{caption, mask_rle, tar_file, ...}}, got "
                    f"{type(region).__name__}; download the file again"
                )
            yield key, index, region
