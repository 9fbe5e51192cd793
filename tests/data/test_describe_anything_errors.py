import re
from pathlib import Path
from typing import Any

import pytest

from rl_reward_network.data.describe_anything import read_describe_anything
from rl_reward_network.data.masks import to_rle
from tests.data.test_describe_anything import picture, region, square, write_coco, write_subset, write_video


def test_missing_tars_are_one_error_with_their_count(tmp_path: Path) -> None:
    annotations = {str(n): [region(tar=f"0000000{n}.tar")] * 2 for n in range(3)}
    folder = write_subset(tmp_path / "SAM", annotations, {"00000000.tar": {"0.jpg": picture(9)}})
    with pytest.raises(ValueError, match=r"images/00000001\.tar: file not found; 4 region.* 2 tar"):
        read_describe_anything(folder)


def test_missing_members_are_one_error_with_their_count(tmp_path: Path) -> None:
    annotations = {str(n): [region(image=f"x/00{n}.jpg", img_id=n)] for n in range(3)}
    folder = write_subset(tmp_path / "SAM", annotations, {"00000000.tar": {"000.jpg": picture(9)}})
    with pytest.raises(
        ValueError,
        match=r"images/00000000\.tar: .*001 or 1 .*2 region.* 1 tar",
    ):
        read_describe_anything(folder)


def test_missing_frames_are_an_error(tmp_path: Path) -> None:
    folder = write_subset(
        tmp_path / "SAV", {"v": region(mask_rle=[to_rle(square(1))])}, {"00000000.tar": {"v.jpg": b""}}
    )
    with pytest.raises(ValueError, match=r"00000000\.tar: no frames named v in it; 1 region"):
        read_describe_anything(folder)


@pytest.mark.parametrize("frames", [10, 12])
def test_another_number_of_frames_than_of_masks_is_an_error(tmp_path: Path, frames: int) -> None:
    folder = write_video(tmp_path / "SAV", mask_rle=[to_rle(square(1))] * frames)
    with pytest.raises(
        ValueError,
        match=rf"entry 'sav_1_0', region 0: mask_rle has {frames} mask\(s\), but .*00000000\.tar 11 frame\(s\)",
    ):
        read_describe_anything(folder)


def test_a_tar_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    folder = write_coco(tmp_path / "LVIS")
    tar = folder / "images" / "00000001.tar"
    tar.write_bytes(tar.read_bytes()[:700])  # 512 bytes of header, then the picture
    with pytest.raises(ValueError, match=r"images/00000001\.tar: not a whole tar .*download"):
        read_describe_anything(folder)
    tar.write_text("no tar at all")
    with pytest.raises(ValueError, match=r"images/00000001\.tar: not a whole tar"):
        read_describe_anything(folder)


def test_a_tar_is_only_looked_for_in_its_folder(tmp_path: Path) -> None:
    write_coco(tmp_path / "LVIS")
    folder = write_subset(tmp_path / "SAM", {"1": [region(tar="../../LVIS/images/00000000.tar")]}, {"1.tar": {}})
    with pytest.raises(ValueError, match=r"SAM/images/00000000\.tar: file not found"):
        read_describe_anything(folder)


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        ([region()], r"expected an object \{image id: regions\}, got list; name a folder of describe-anything"),
        ({"k": ["x"]}, r"entry 'k': expected regions \{caption, mask_rle, tar_file, \.\.\.\}, got str; download"),
        ({"k": None}, r"entry 'k': expected regions .* got NoneType"),
        ({"k": [region(), region(caption="")]}, r"entry 'k', region 1 \(00000000\.tar: k\.jpg\): the caption is empty"),
        ({"k": [region(caption=None)]}, r"entry 'k', region 0 .*: the caption is missing \(NoneType\)"),
        ({"k": [region(mask_rle=None)]}, r"entry 'k', region 0 .*: mask_rle: expected an RLE"),
        ({"k": [region(mask_rle={"size": [12, 16], "counts": "00"})]}, r"entry 'k', region 0 .*: mask_rle: RLE runs"),
        ({"k": [region(tar=None)]}, r"entry 'k', region 0: tar_file is None, expected the name of a tar"),  # type: ignore[arg-type]
        ({"k": [region(tar="")]}, r"entry 'k', region 0: tar_file is ''"),
    ],
)
def test_a_bad_entry_is_an_error_that_names_file_entry_and_remedy(
    tmp_path: Path, annotations: Any, message: str
) -> None:
    write_subset(tmp_path / "SAM", annotations, {"00000000.tar": {"k.jpg": picture(9)}})
    with pytest.raises(ValueError, match=rf"SAM/annotations\.json: {message}"):
        read_describe_anything(tmp_path)


def test_annotations_that_are_no_json_are_an_error(tmp_path: Path) -> None:
    folder = write_coco(tmp_path / "SAM")
    (folder / "annotations.json").write_text('{"1": [')
    with pytest.raises(ValueError, match=r"annotations\.json: not valid JSON"):
        read_describe_anything(folder)


def test_no_region_at_all_is_an_error(tmp_path: Path) -> None:
    write_subset(tmp_path / "SAM", {"k": []}, {"00000000.tar": {}})
    with pytest.raises(ValueError, match=r"no region with a mask and a caption \(left out: nothing\)"):
        read_describe_anything(tmp_path)


def test_a_mask_of_another_size_than_the_image_is_an_error(tmp_path: Path) -> None:
    row = region(mask_rle=to_rle(square(2).T))
    (sample,) = read_describe_anything(
        write_subset(tmp_path / "SAM", {"k": row}, {"00000000.tar": {"k.jpg": picture(9)}})
    )
    with pytest.raises(
        ValueError, match=r"region 0 \(00000000\.tar: k\.jpg\): mask_rle has size \[16, 12\] .*\[12, 16\]"
    ):
        sample.load()


@pytest.mark.parametrize("kind", ["missing", "empty", "images"])
def test_a_folder_of_another_layout_is_an_error(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "x"
    if kind != "missing":
        root.mkdir()
    if kind == "images":
        (root / "annotations.json").write_text("[]")
    with pytest.raises(
        ValueError, match=rf"^{re.escape(str(root))}: no <SUBSET>/annotations\.json with tars .*hf download"
    ):
        read_describe_anything(root)
