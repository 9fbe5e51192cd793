import re
from pathlib import Path
from typing import Any

import datasets as hf
import pyarrow as pa
import pytest

from rl_reward_network.data import grasp_any_region
from rl_reward_network.data.grasp_any_region import locate, read_grasp_any_region
from rl_reward_network.data.masks import to_rle
from tests.data.test_grasp_any_region import fine, relation, square, write, write_bare


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (fine(0, "  "), "row 0, region 0: the caption is empty; write one there"),
        (fine(0, None), r"row 0, region 0: the caption is missing \(NoneType\)"),
        (fine(0, "x", conversations=[]), r"row 0: mask_rle holds 1 mask\(s\), but conversations only 0 caption"),
        (fine(0, "x", conversations=None), r"row 0: mask_rle holds 1 mask\(s\), but conversations only 0 caption"),
        (relation(0, 3, "?", "a", "?", "b"), r"row 0: mask_rle holds 3 mask\(s\), but conversations only 2 .*add the"),
        (
            relation(0, 2, "<Prompt2>?", "a"),
            r"row 0: <Prompt2> is named, but mask_rle holds 2 mask\(s\); leave the row",
        ),
        (
            fine(0, "x", mask_rle={"size": [12, 16], "counts": "00"}),
            r"row 0, region 0: mask_rle: RLE runs must .*got a sum",
        ),
        (fine(0, "x", image=None), "row 0: column image holds no image file and no path; download the shard again"),
    ],
)
def test_a_bad_row_is_an_error_that_names_shard_row_and_remedy(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    write(tmp_path / "x", [row])
    with pytest.raises(ValueError, match=rf"x/data-00000-of-00001\.arrow: {message}"):
        read_grasp_any_region(tmp_path)


def test_a_row_without_an_image_is_an_error_though_its_parts_look_filled(tmp_path: Path) -> None:
    write_bare(tmp_path, [fine(0, "a dog", image=None)], pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    with pytest.raises(ValueError, match=r"x\.arrow: row 0: column image holds no image file"):
        read_grasp_any_region(tmp_path)


@pytest.mark.parametrize(
    ("image", "reason"),
    [("data:base64,%%%", "base64"), ("gone.png", r"No such file .*/gone\.png"), ("", "Is a directory")],
)
def test_an_image_that_is_not_where_its_row_says_is_an_error(tmp_path: Path, image: str, reason: str) -> None:
    write_bare(tmp_path, [fine(0, "a dog", image=image)], pa.string())
    with pytest.raises(ValueError, match=rf"x\.arrow: row 0: .*image cannot be opened .*{reason}"):
        read_grasp_any_region(tmp_path)


def test_conversations_that_are_no_list_of_turns_are_an_error(tmp_path: Path) -> None:
    rows = [{"image": b"x", "mask_rle": to_rle(square(2)), "conversations": "a dog"}]
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    with pytest.raises(ValueError, match=r"row 0: conversations .*\{from, value\}, got str"):
        read_grasp_any_region(tmp_path)


def test_a_folder_without_shards_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"^{re.escape(str(tmp_path))}: no \*\.arrow file"):
        read_grasp_any_region(tmp_path)


@pytest.mark.parametrize("kept", [0, 3, 300, 0.3, 0.9])
def test_a_shard_that_is_cut_off_is_an_error(tmp_path: Path, kept: float) -> None:
    write(tmp_path / "x", [fine(seed, "a dog") for seed in range(3)])
    shard = tmp_path / "x" / "data-00000-of-00001.arrow"
    shard.write_bytes(shard.read_bytes()[: kept if isinstance(kept, int) else int(kept * shard.stat().st_size)])
    with pytest.raises(ValueError, match=r"data-00000-of-00001\.arrow: cut off, or no Arrow stream .*download"):
        read_grasp_any_region(tmp_path)


def test_other_columns_are_an_error_that_lists_both(tmp_path: Path) -> None:
    hf.Dataset.from_list([{"image": "x", "text": "a dog"}]).save_to_disk(str(tmp_path))
    with pytest.raises(ValueError, match=r"arrow: columns are image, text, expected image, mask_rle, conversations"):
        read_grasp_any_region(tmp_path)


@pytest.mark.parametrize("name", ["/nowhere/data", "~/data", "./data", "data", "a/b/c", "../data"])
def test_what_cannot_be_owner_and_name_is_never_looked_for_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grasp_any_region, "snapshot_download", lambda *_, **__: pytest.fail("called the hub"))
    with pytest.raises(ValueError, match=r"no such folder.*owner/name"):
        locate(name)


def test_of_a_hub_id_only_arrow_and_json_files_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        grasp_any_region, "snapshot_download", lambda *args, **options: asked.append((args, options)) or str(tmp_path)
    )
    write(tmp_path / "fine", [fine(0, "a dog")])
    (region,) = read_grasp_any_region("owner/name")
    assert region.caption == "a dog"
    assert asked == [(("owner/name",), {"repo_type": "dataset", "allow_patterns": ["*.arrow", "*.json"]})]


def test_a_hub_that_cannot_be_reached_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> str:
        raise ConnectionError("no network")

    monkeypatch.setattr(grasp_any_region, "snapshot_download", unreachable)
    with pytest.raises(ValueError, match=r"^owner/name: .*\(ConnectionError\)"):
        read_grasp_any_region("owner/name")


@pytest.mark.parametrize(
    "name", ["../secret.png", "a/../../secret.png", "..\\secret.png", "{root}/secret.png", "link.png"]
)
def test_a_path_that_leaves_the_folder_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    folder = write_bare(tmp_path / "data", [fine(0, "a dog", image=name.format(root=tmp_path))], pa.string())
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(
        ValueError, match=r"x\.arrow: row 0: the image cannot be opened .*leaves the folder .*; put the"
    ):
        read_grasp_any_region(folder)
