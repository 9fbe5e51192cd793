"""Regions of Grasp-Any-Region: images in any form, captions by the rules, what is left out, what is refused."""

import base64
import io
import pickle
import re
from pathlib import Path
from typing import Any

import datasets as hf
import numpy as np
import pyarrow as pa
import pytest
from PIL import ExifTags, Image

from rl_reward_network.data import grasp_any_region
from rl_reward_network.data.grasp_any_region import arrow_shards, locate, read_grasp_any_region
from rl_reward_network.data.masks import to_rle

SIZE = (12, 16)  # H, W: not square, so that swapped axes show
TEXT, NUMBER = hf.Value("string"), hf.Value("int64")
RLE = {"size": [NUMBER], "counts": TEXT}
TURNS = [{"from": TEXT, "value": TEXT}]


def picture(seed: int, size: tuple[int, int] = SIZE, **options: Any) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG", **options)
    return file.getvalue()


def square(at: int) -> np.ndarray:
    """bool (H, W): 3 x 2 pixels."""
    mask = np.zeros(SIZE, dtype=bool)
    mask[at : at + 3, at : at + 2] = True
    return mask


def turns(*values: str | None) -> list[dict[str, str | None]]:
    return [{"from": ("human", "gpt")[index % 2], "value": value} for index, value in enumerate(values)]


def fine(seed: int, caption: str | None, at: int = 2, **changes: Any) -> dict[str, Any]:
    """A row of a Fine-Grained folder: one mask as a struct."""
    return {
        "image": {"bytes": picture(seed), "path": None},
        "mask_rle": to_rle(square(at)),
        "conversations": turns("<image>\nDescribe the masked region.", caption),
        "catagory": "thing",
    } | changes


def relation(seed: int, masks: int, *values: str) -> dict[str, Any]:
    """A row of the Relation folder: a list of masks."""
    return {
        "image": {"bytes": picture(seed), "path": None},
        "mask_rle": [to_rle(square(2 * index)) for index in range(masks)],
        "conversations": turns(*values),
    }


def write(folder: Path, rows: list[dict[str, Any]], shards: int = 1) -> Path:
    """Rows as `save_to_disk` writes them, with the Image feature, `mask_rle` as the rows have it."""
    features = {"image": hf.Image(), "mask_rle": RLE, "conversations": TURNS, "catagory": TEXT}
    if isinstance(rows[0]["mask_rle"], list):
        features = {"image": hf.Image(), "mask_rle": [RLE], "conversations": TURNS}
    hf.Dataset.from_list(rows, features=hf.Features(features)).save_to_disk(str(folder), num_shards=shards)
    return folder


def write_bare(folder: Path, rows: list[dict[str, Any]], image_type: pa.DataType) -> Path:
    rle = pa.struct([("size", pa.list_(pa.int64())), ("counts", pa.string())])
    turn = pa.struct([("from", pa.string()), ("value", pa.string())])
    schema = pa.schema([("image", image_type), ("mask_rle", rle), ("conversations", pa.list_(turn))])
    folder.mkdir(exist_ok=True)
    with pa.OSFile(str(folder / "x.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        stream.write_table(pa.Table.from_pylist(rows, schema=schema), max_chunksize=2)
    return folder


def captions(folder: Path) -> list[str]:
    return [region.caption for region in read_grasp_any_region(folder)]


def test_a_parent_chains_folders_of_different_schema(tmp_path: Path) -> None:
    write(tmp_path / "Fine-Grained-Dataset-Part1", [fine(0, "a dog")])
    write(tmp_path / "Relation-Dataset", [relation(1, 2, "What is it?", "a cat", "And this?", "a cow")])
    found = read_grasp_any_region(str(tmp_path))
    assert [region.caption for region in found] == ["a dog", "a cat", "a cow"]
    expected = [square(2), square(0), square(2)]
    assert all((region.load()[1] == mask).all() for region, mask in zip(found, expected, strict=True))


def test_caches_and_hidden_folders_are_no_shards(tmp_path: Path) -> None:
    write(tmp_path / "fine", [fine(0, "a dog")])
    (tmp_path / "fine" / "cache-12ab.arrow").write_bytes(b"")
    write(tmp_path / ".fine_old", [fine(1, "a cat")])
    assert [shard.name for shard in arrow_shards(tmp_path)] == ["data-00000-of-00001.arrow"]


@pytest.mark.parametrize("kind", ["named", "struct", "bytes", "path", "base64"])
def test_an_image_may_be_stored_in_any_form(tmp_path: Path, kind: str) -> None:
    (tmp_path / "0.png").write_bytes(picture(0))
    text = f"data:base64,{base64.b64encode(picture(0)).decode()}"
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    stored, image_type = {
        "named": ({"bytes": picture(0), "path": "its_former_name.png"}, struct),
        "struct": ({"bytes": None, "path": "0.png"}, struct),
        "bytes": (picture(0), pa.large_binary()),
        "path": (str(tmp_path / "0.png"), pa.string()),
        "base64": (text, pa.string()),
    }[kind]
    write_bare(tmp_path, [fine(0, "a dog", image=stored)], image_type)
    (region,) = read_grasp_any_region(tmp_path)
    assert (region.load()[0] == np.array(Image.open(tmp_path / "0.png"))).all()
    (reference,) = read_grasp_any_region(write(tmp_path / "reference", [fine(0, "a dog")]))
    assert region.sample_id == reference.sample_id


def test_a_shard_written_anew_is_read_anew_in_every_batch_and_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for first in (0, 5):
        seeds = range(first, first + 3)
        rows = [fine(seed, "a dog", image=picture(seed)) for seed in seeds]
        (write_bare(tmp_path / "new", rows, pa.binary()) / "x.arrow").rename(tmp_path / "data" / "x.arrow")
        for seed, region in zip(seeds, read_grasp_any_region(tmp_path / "data"), strict=True):
            image, mask = pickle.loads(pickle.dumps(region)).load()
            assert (image == np.array(Image.open(io.BytesIO(picture(seed))))).all()
            assert (mask == square(2)).all()


def test_an_image_is_one_group_and_rows_may_name_their_patient(tmp_path: Path) -> None:
    rows = [fine(0, "a dog"), fine(1, "a cat"), fine(0, "a cow", at=5)]
    found = read_grasp_any_region(write(tmp_path / "x", rows))
    dog, cat, cow = (region.image_id for region in found)
    assert dog == cow != cat
    assert all(region.group_id == region.series_id == region.image_id for region in found)

    def named(*names: str | None) -> Path:
        folder = tmp_path / "-".join(map(str, names))
        rows_named = [row | {"group": name} for row, name in zip(rows, names, strict=True)]
        hf.Dataset.from_list(rows_named).save_to_disk(str(folder))
        return folder

    first, second, third = read_grasp_any_region(named("patient 7", "patient 8", "patient 7"))
    assert first.group_id == third.group_id != second.group_id
    with pytest.raises(ValueError, match=r"row 2.*: .*another group at .*row 0, region 0"):
        read_grasp_any_region(named("patient 7", "patient 7", "patient 8"))
    with pytest.raises(ValueError, match=r"row 1: group is empty"):
        read_grasp_any_region(named("patient 7", None, "patient 7"))


def test_exif_rotation_is_applied_before_sizes_are_compared(tmp_path: Path) -> None:
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = 6  # stored (16, 12), upright (12, 16)
    turned = {"bytes": picture(0, SIZE[::-1], exif=tags), "path": None}
    (region,) = read_grasp_any_region(write(tmp_path / "x", [fine(0, "a dog", image=turned)]))
    assert region.load()[0].shape == (*SIZE, 3)


def test_reading_stops_at_the_limit(tmp_path: Path) -> None:
    write(tmp_path / "x", [fine(0, "a dog"), fine(1, "a cat"), fine(2, "")])  # the third row would be an error
    assert [region.caption for region in read_grasp_any_region(tmp_path / "x", limit=2)] == ["a dog", "a cat"]
    with pytest.raises(ValueError, match="limit is 0"):
        read_grasp_any_region(tmp_path / "x", limit=0)


def test_what_is_left_out_is_counted_in_one_warning(tmp_path: Path) -> None:
    rows = [
        fine(0, "a dog"),
        fine(1, "a whole image", mask_rle=None),
        fine(2, "another", mask_rle={"size": None, "counts": None}),
        fine(0, "a dog"),
        fine(3, "nothing", mask_rle=to_rle(np.zeros(SIZE, dtype=bool))),
        fine(4, "", conversations=turns("What?", "a cat", "What colour?", "black")),
    ]
    with pytest.warns(UserWarning, match="left out") as caught:
        assert captions(write(tmp_path / "x", rows)) == ["a dog", "a cat"]
    expected = (
        "1 answer(s) after that of the last mask, 1 exact repeat(s), 1 mask(s) without a pixel, 2 row(s) without a mask"
    )
    assert [str(warning.message) for warning in caught] == [f"{tmp_path / 'x'}: left out {expected}"]


def test_a_numbered_prompt_chooses_the_mask(tmp_path: Path) -> None:
    row = relation(
        0,
        3,
        "<image>\nThere are <Prompt0>, <Prompt1> and <Prompt2>. What is <Prompt2>?",  # names three
        "a cat",
        "Describe <Prompt2>.",
        "<Prompt2> is red. <Prompt2>'s ear, on the left of <Prompt2>, is blue",
        "What stands beside it?",
        "<Prompt0>",  # an answer alone may name it
        "And what is <Prompt1>?",
        "It belongs to <Prompt0>.",  # question and answer name different ones
        "Is it late?",
        "yes",  # names none
    )
    with pytest.warns(UserWarning, match=r"left out 3 turn\(s\) about several masks or none$"):
        found = read_grasp_any_region(write(tmp_path / "x", [row]))
    assert [region.caption for region in found] == [
        "The region is red. The region's ear, on the left of the region, is blue",
        "The region",
    ]
    assert (found[0].load()[1] == square(4)).all()
    assert (found[1].load()[1] == square(0)).all()
    assert found[0].where.endswith("row 0, region 2")


def test_prompts_named_before_the_question_count_for_it(tmp_path: Path) -> None:
    """Else the row would be taken for one where the k-th answer belongs to the k-th mask."""
    row = relation(0, 2)
    row["conversations"] = [
        {"from": "human", "value": "<Prompt0> and <Prompt1> are marked."},
        *turns("How do they go together?", "one carries the other", "Name the first.", "a cart"),
    ]
    with pytest.raises(ValueError, match=r"no region .*left out: 2 turn"):
        read_grasp_any_region(write(tmp_path / "x", [row]))


def test_shards_are_read_in_order_with_or_without_their_json(tmp_path: Path) -> None:
    folder = write(tmp_path / "fine", [fine(seed, f"thing {seed}") for seed in range(5)], shards=3)
    for name in ("", "state.json", "dataset_info.json"):
        (folder / name).unlink() if name else None
        assert captions(folder) == [f"thing {seed}" for seed in range(5)]
    (folder / "data-00001-of-00003.arrow").unlink()
    assert captions(folder) == ["thing 0", "thing 1", "thing 4"], "a part gives what is there"


def stream(folder: Path, rows: list[dict[str, Any]]) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(folder / "x.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as opened:
        opened.write_table(table)
    return folder


BAD_RLE = {"size": [12, 16], "counts": "00"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (fine(0, "  "), "row 0, region 0: the caption is empty; write one there"),
        (fine(0, None), r"row 0, region 0: the caption is missing \(NoneType\)"),
        *(
            (fine(0, "x", conversations=none), r"row 0: mask_rle holds 1 mask\(s\), but conversations only 0 caption")
            for none in ([], None)
        ),
        (relation(0, 3, "?", "a", "?", "b"), r"row 0: mask_rle holds 3 mask\(s\), but conversations only 2 .*add the"),
        (relation(0, 2, "<Prompt2>?", "a"), "row 0: <Prompt2> is named, but mask_rle holds 2 mask"),
        (fine(0, "x", mask_rle=BAD_RLE), r"row 0, region 0: mask_rle: RLE runs must .*got a sum"),
        (fine(0, "x", image=None), "row 0: column image holds no image file and no path; download the shard again"),
        (fine(0, "x", image={"bytes": b"no picture", "path": None}), "row 0: not a readable image"),
        (fine(0, "x", image={"bytes": b"", "path": None}), r"row 0: not a readable image \(the file is empty\)"),
        (fine(0, "x", mask_rle=to_rle(square(2).T)), r"row 0, region 0: mask_rle has size \[16, 12\] .*\[12, 16\]"),
    ],
)
def test_a_bad_row_is_an_error_that_names_shard_row_and_remedy(tmp_path: Path, row: Any, message: str) -> None:
    write(tmp_path / "x", [row])
    with pytest.raises(ValueError, match=rf"x/data-00000-of-00001\.arrow: {message}"):
        read_grasp_any_region(tmp_path)[0].load()


STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.mark.parametrize(
    ("image", "kind", "message"),
    [
        (None, STRUCT, "column image holds no image file"),
        ("data:base64,%%%", pa.string(), "image cannot be opened .*base64"),
        ("gone.png", pa.string(), r"image cannot be opened .*No such file .*/gone\.png"),
        ("", pa.string(), "image cannot be opened .*Is a directory"),
        *(
            (name, pa.string(), "image cannot be opened .*leaves the folder .*; put the")
            for name in ("../s.png", "link")
        ),
        *((name, pa.string(), "leaves the folder") for name in ("a/../../s.png", "..\\s.png", "{root}/s.png")),
    ],
)
def test_an_image_that_is_not_where_its_row_says_is_an_error(tmp_path, image, kind, message):
    (tmp_path / "s.png").write_bytes(b"secret")
    stored = image and image.format(root=tmp_path)
    folder = write_bare(tmp_path / "data", [fine(0, "a dog", image=stored)], kind)
    (folder / "link").symlink_to(tmp_path / "s.png")
    with pytest.raises(ValueError, match=rf"x\.arrow: row 0: .*{message}"):
        read_grasp_any_region(folder)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"^{folder}: no \*\.arrow file"),
        ([{"image": b"x", "mask_rle": BAD_RLE, "conversations": "dog"}], "row 0: conversations .* got str"),
        ([{"image": "x", "text": "a dog"}], "columns are image, text, expected image, mask_rle, conversations"),
    ],
)
def test_a_folder_of_other_data_is_an_error(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    if rows:
        stream(tmp_path, rows)
    with pytest.raises(ValueError, match=message.format(folder=re.escape(str(tmp_path)))):
        read_grasp_any_region(tmp_path)


@pytest.mark.parametrize("kept", [0, 300, 0.9])
def test_a_shard_that_is_cut_off_is_an_error(tmp_path: Path, kept: float) -> None:
    write(tmp_path / "x", [fine(seed, "a dog") for seed in range(3)])
    shard = tmp_path / "x" / "data-00000-of-00001.arrow"
    shard.write_bytes(shard.read_bytes()[: kept if isinstance(kept, int) else int(kept * shard.stat().st_size)])
    with pytest.raises(ValueError, match=r"data-00000-of-00001\.arrow: cut off, or no Arrow stream .*download"):
        read_grasp_any_region(tmp_path)


def test_only_what_may_be_owner_and_name_is_looked_for_on_the_hub_and_only_arrow_and_json_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[Any] = []

    def download(*args: Any, **options: Any) -> str:
        calls.append((args, options))
        return str(write(tmp_path / "fine", [fine(0, "a dog")]))

    def unreachable(*_: Any, **__: Any) -> str:
        raise ConnectionError("no network")

    monkeypatch.setattr(grasp_any_region, "snapshot_download", download)
    for name in ("/nowhere/data", "~/data", "./data", "data", "a/b/c", "../data"):
        with pytest.raises(ValueError, match=r"no such folder.*owner/name"):
            locate(name)
    assert [region.caption for region in read_grasp_any_region("owner/name")] == ["a dog"]
    assert calls == [(("owner/name",), {"repo_type": "dataset", "allow_patterns": ["*.arrow", "*.json"]})]
    monkeypatch.setattr(grasp_any_region, "snapshot_download", unreachable)
    with pytest.raises(ValueError, match=r"^owner/name: .*\(ConnectionError\)"):
        read_grasp_any_region("owner/name")
