"""Reader of Grasp-Any-Region (GAR): Arrow shards whose rows hold an image, one or more masks and a conversation.

| column | meaning |
|---|---|
| `image` | an image file as a struct of `bytes` and `path`, as bytes, as a path, or as text "data:base64,..." |
| `mask_rle` | one COCO RLE {size: [H, W], counts}, or a list of them; null: the conversation is about the whole image |
| `conversations` | a list of {from: "human" or "gpt", value: text} |
| `catagory` (sic) | not read |
| `group` | our extension, optional: patient, or other unit of the split; by default the image |

If no turn contains a `<PromptN>`, the k-th answer is the caption of the k-th mask, and further answers are left out.
Otherwise N is the index of a mask, from 0, and an answer is a caption only if it and its question contain one and the
same N; `<PromptN>` is replaced by "the region". Rows without a mask and turns about several masks, or none, are left
out. One warning counts what was left out.

Source: training data set of Haochen-Wang409/Grasp-Any-Region; in contrast to it, a faulty row is an error.
"""

import base64
import io
import mmap
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from PIL import Image
from tqdm import tqdm

from rl_reward_network.atomic_io import write_remedy
from rl_reward_network.data.images import decode_image, decoded_once, file_stamp
from rl_reward_network.data.items import RegionSample, collect, image_key, make_region, pseudonym, report_left_out
from rl_reward_network.data.splits import one_spelling

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("image", "mask_rle", "conversations")
GROUP = "group"
PROMPT = re.compile(r"<Prompt(\d+)>")
PROMPT_FIRST = re.compile(r"(^|[.!?]\s+)<Prompt\d+>")  # at the start of a sentence
SHARDS_OPEN = 64  # at a time; each holds a file open, and the data set has more shards than the limit of open files
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+", re.ASCII)


def read_grasp_any_region(
    path: Path | str, limit: int | None = None, bit_depth: int | None = None
) -> list[RegionSample]:
    """Every captioned region, in the order of shards and rows; of images only the first and last bytes are read.

    Stops after `limit` regions; `path` is what `locate` takes, `bit_depth` what `decode_image` takes. ValueError for no
    Arrow file, one that is cut off or has other columns, or a row without a caption, with a damaged mask, or with more
    masks than captions; it names shard and row, and the remedy.
    """
    folder = locate(path)
    shards = arrow_shards(folder)
    if not shards:
        raise ValueError(f"{folder}: no *.arrow file in it; give a folder of Grasp-Any-Region, or download it again")
    left_out: Counter[str] = Counter()
    bar = tqdm(shards, "reading shards", unit="shard", leave=False, delay=2)
    tables = map(_open_shard, shards if GROUP in _open_shard(shards[0]).column_names else [])
    columns = (table.column(GROUP).to_pylist() for table in tables if GROUP in table.column_names)
    patients = one_spelling(str(name) for column in columns for name in column if name not in (None, ""))
    regions = collect(
        (region for shard in bar for region in _read_shard(shard, patients, left_out, bit_depth)), limit, left_out
    )
    report_left_out(folder, regions, left_out)
    groups: dict[str, RegionSample] = {}
    for region in regions:
        if (other := groups.setdefault(region.image_id, region)).group_id != region.group_id:
            raise ValueError(f"{region.where}: the same image is in another group at {other.where}; name one group")
    return regions


class GraspAnyRegionDataset:
    """Captioned regions, each {image: PIL RGB, mask: bool (H, W), caption: str}, decoded on demand.

    `path` is what `locate` takes, `parts` are the folders below it to read; None: all.
    """

    def __init__(self, path: Path | str, parts: Iterable[str] | None = None) -> None:
        folders = [path] if parts is None else [Path(path) / part for part in parts]
        self.regions = [region for folder in folders for region in read_grasp_any_region(folder)]

    def __len__(self) -> int:
        return len(self.regions)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, mask = self.regions[index].load()
        return {"image": Image.fromarray(image), "mask": mask, "caption": self.regions[index].caption}


def recognise_grasp_any_region(folder: Path) -> str:
    """E.g. "Grasp-Any-Region, 2 of 44 shards"; "" where `folder` holds no Arrow file.

    Names such as data-00000-of-00044.arrow give the number of shards that belong to a folder.
    """
    if not (shards := arrow_shards(folder)):
        return ""
    matches = [(shard.parent, re.search(r"-of-(\d+)\.arrow$", shard.name)) for shard in shards]
    stated = {(parent, int(match[1])) for parent, match in matches if match}
    total = max(sum(number for _, number in stated), len(shards))
    of_total = f" of {total}" if total > len(shards) else ""
    return f"Grasp-Any-Region, {len(shards)}{of_total} shard{'s' if total > 1 else ''}"


def arrow_shards(folder: Path) -> list[Path]:
    """The `*.arrow` files below `folder`, sorted; hidden ones and the caches of `datasets` (`cache-*`) do not count."""
    shards = sorted(folder.rglob("*.arrow"))
    return [s for s in shards if not any(part.startswith((".", "cache-")) for part in s.relative_to(folder).parts)]


def is_hub_id(path: Path | str) -> bool:
    """Whether `path` has the form owner/name of a hub id and does not exist."""
    return HUB_ID.fullmatch(str(path)) is not None and not Path(path).exists()


def locate(path: Path | str) -> Path:
    """The folder with the shards; of a hub id `owner/name`, *.arrow and *.json files are downloaded, all of them.

    A folder may be written by `save_to_disk`, hold some shards without the JSON files, or be a parent of such folders.
    To read a part of the data set, download that part and give its folder.
    """
    if Path(path).is_dir():
        return Path(path)
    remedy = f"{path}: no such folder, and not a hub id that can be fetched; give a folder, or an id like owner/name"
    if not is_hub_id(path):
        raise ValueError(remedy)
    try:
        return Path(snapshot_download(str(path), repo_type="dataset", allow_patterns=["*.arrow", "*.json"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        if full := write_remedy(error):
            raise ValueError(f"{path}: cannot be downloaded ({error}); {full}") from error
        raise ValueError(f"{remedy} ({type(error).__name__})") from error


def _read_shard(
    shard: Path, patients: Mapping[str, str], left_out: Counter[str], bit_depth: int | None
) -> Iterator[RegionSample]:
    """The regions of one shard, row by row; `patients` gives the spelling that stands for all of a name."""
    table = _open_shard(shard)
    read = [name for name in ("mask_rle", "conversations", GROUP) if name in table.column_names]  # no image among them
    batches = table.select(read).to_batches()
    for row, stored in enumerate(stored for batch in batches for stored in batch.to_pylist()):
        where = f"{shard}: row {row}"
        if not (rles := _masks(stored["mask_rle"])):
            left_out["row(s) without a mask"] += 1
        elif captions := _captions(stored["conversations"], len(rles), where, left_out):
            with _image_file(shard, row) as file:
                image_id = image_key(file, 0, file.seek(0, 2))
            opened, group = partial(_open_image, shard, row, bit_depth), None
            if GROUP in stored:
                if stored[GROUP] in (None, ""):
                    raise ValueError(f"{where}: group is empty; name the patient in each row, or leave the column out")
                group = pseudonym("group", patients.get(str(stored[GROUP]), str(stored[GROUP])))
            for index, caption in captions:
                yield make_region(caption, rles[index], image_id, f"{where}, region {index}", opened, group)


def _open_shard(shard: Path) -> "pa.Table":
    """One shard as a table, memory-mapped, its columns checked; works on a bare shard, as `load_from_disk` does not."""
    table = _map_shard(shard, shard.stat().st_mtime_ns)
    if not set(COLUMNS) <= set(table.column_names):
        raise ValueError(
            f"{shard}: columns are {', '.join(table.column_names)}, expected {', '.join(COLUMNS)}; it is not a shard "
            "of Grasp-Any-Region"
        )
    return table


@lru_cache(maxsize=SHARDS_OPEN)
def _map_shard(shard: Path, changed: int) -> "pa.Table":
    """The table in an Arrow stream; `changed` is its time stamp, part of the cache's key.

    `Dataset.from_file` and `pyarrow.memory_map` are not used: with their read-ahead, reading the captions would read
    every image from the disk.
    """
    import pyarrow as pa  # a slow import that most commands do not need

    try:
        with shard.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.madvise(mmap.MADV_RANDOM)
        return pa.ipc.open_stream(pa.py_buffer(mapped)).read_all()
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError; mmap raises one for an empty file
        raise ValueError(f"{shard}: cut off, or no Arrow stream ({error}); download it again") from error


def _masks(stored: Any) -> list[Any]:
    """The RLEs of a row: one, a list, or none (null, or a struct of nulls, as some writers store it)."""
    rles = [stored] if isinstance(stored, dict) else stored or []
    return [] if all(isinstance(rle, dict) and set(map(type, rle.values())) == {type(None)} for rle in rles) else rles


def _captions(turns: Any, masks: int, where: str, left_out: Counter[str]) -> list[tuple[int, Any]]:
    """(index of the mask, caption) by the rule in the module text; a caption may still be None or empty."""
    pairs = _questions_and_answers(turns, where)
    named = [{int(number) for number in PROMPT.findall(f"{question} {answer}")} for question, answer in pairs]
    if any(named):
        captions = [(*names, _in_words(pair[1])) for names, pair in zip(named, pairs, strict=True) if len(names) == 1]
        if wrong := [number for number, _ in captions if number >= masks]:
            raise ValueError(
                f"{where}: <Prompt{wrong[0]}> is named, but mask_rle holds {masks} mask(s); leave the row out"
            )
        left_out["turn(s) about several masks or none"] += len(pairs) - len(captions)
        return captions
    if len(pairs) < masks:
        raise ValueError(
            f"{where}: mask_rle holds {masks} mask(s), but conversations only {len(pairs)} caption(s) (turns from "
            "'gpt'); add the missing ones, or leave the row out"
        )
    left_out["answer(s) after that of the last mask"] += len(pairs) - masks
    return [(index, pair[1]) for index, pair in enumerate(pairs[:masks])]


def _questions_and_answers(turns: Any, where: str) -> list[tuple[str, Any]]:
    """(question, answer) of each turn from 'gpt'; the question is the text of all turns since the previous answer."""
    if not isinstance(turns, list | None) or not all(isinstance(turn, dict) for turn in turns or []):
        raise ValueError(f"{where}: conversations must be a list of {{from, value}}, got {type(turns).__name__}")
    pairs, question = [], ""
    for turn in turns or []:
        if turn.get("from") == "gpt":
            pairs.append((question, turn.get("value")))
            question = ""
        else:
            question += f" {turn.get('value')}"
    return pairs


def _in_words(answer: Any) -> Any:
    """`answer` with "the region" for `<PromptN>`, a capital at the start of a sentence; other types as they are."""
    if isinstance(answer, str):
        return PROMPT.sub("the region", PROMPT_FIRST.sub(r"\1The region", answer.strip()))
    return answer


def _image_file(shard: Path, row: int) -> BinaryIO:
    """The stored image file of a row, open for reading; a path may be relative to the folder of `shard`."""
    import pyarrow as pa

    cell = _open_shard(shard).column("image").slice(row, 1).chunk(0)
    if pa.types.is_struct(cell.type) and not cell.null_count:
        forms = [cell.field(name) for name in ("bytes", "path") if cell.type.get_field_index(name) >= 0]
        cell = next((form for form in forms if not form.null_count), cell)
    if cell.null_count or cell.type not in (pa.binary(), pa.large_binary(), pa.string(), pa.large_string()):
        raise ValueError(f"{shard}: row {row}: column image holds no image file and no path; download the shard again")
    if cell.type in (pa.binary(), pa.large_binary()):
        _, offsets, data = cell.buffers()  # `cell[0]` would copy the bytes, and so read all of them from the disk
        wide = np.int64 if cell.type == pa.large_binary() else np.int32
        start, end = np.frombuffer(offsets, wide)[cell.offset : cell.offset + 2].tolist()
        return pa.BufferReader(data.slice(start, end - start))
    text = cell[0].as_py()
    try:
        if text.startswith("data:"):
            return io.BytesIO(base64.b64decode(text.partition(",")[2], validate=True))
        path = shard.parent / PureWindowsPath(text).as_posix()  # with either slash
        if PureWindowsPath(text).drive or not path.resolve().is_relative_to(shard.parent.resolve()):  # or by a link
            raise ValueError(f"{text!r} leaves the folder {shard.parent}")
        return path.open("rb")
    except (OSError, ValueError) as error:  # no such file, or not base64
        raise ValueError(f"{shard}: row {row}: the image cannot be opened ({error}); put the file there") from error


def _open_image(shard: Path, row: int, bit_depth: int | None) -> np.ndarray:
    def decode() -> np.ndarray:
        with _image_file(shard, row) as file:
            return decode_image(file.read(), f"{shard}: row {row}", bit_depth)

    return decoded_once((file_stamp(shard), row, bit_depth), decode)
