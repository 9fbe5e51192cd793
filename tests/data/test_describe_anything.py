"""Regions of describe-anything: which picture and mask each has, what is left out, what is refused."""

import io
import json
import pickle
import re
import tarfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.data.describe_anything import read_describe_anything, subset_folders
from rl_reward_network.data.items import RegionSample
from rl_reward_network.data.masks import to_rle

SIZE = (12, 16)  # H, W: not square, so that swapped axes show
TAR = "00000000.tar"


def picture(level: int) -> bytes:
    Image.new("RGB", SIZE[::-1], (level,) * 3).save(file := io.BytesIO(), "JPEG", quality=95)
    return file.getvalue()


def square(at: int) -> np.ndarray:
    """bool (H, W): 3 x 2 pixels at column `at`."""
    mask = np.zeros(SIZE, dtype=bool)
    mask[4:7, at : at + 2] = True
    return mask


def region(caption: str | None = "a dog", tar: Any = TAR, at: int = 2, **keys: Any) -> dict[str, Any]:
    return {"ann_id": 7, "caption": caption, "mask_rle": to_rle(square(at)), "tar_file": tar, "category": "x"} | keys


def write_subset(folder: Path, annotations: Any, tars: dict[str, dict[str, bytes]]) -> Path:
    """A subset: annotations.json and, of each tar, the members by name."""
    (folder / "images").mkdir(parents=True)
    (folder / "annotations.json").write_text(json.dumps(annotations))
    for tar, members in tars.items():
        with tarfile.open(folder / "images" / tar, "w") as file:
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))
    return folder


def write_coco(folder: Path) -> Path:
    """Two tars of three images, four regions."""
    annotations = {
        "1": [region(image="coco/train2017/000000000001.jpg"), region("a cat", at=9, image="x/000000000001.jpg")],
        "2": [region("a cow", image="coco/train2017/000000000002.jpg")],
        "3": [region("a hen", "00000001.tar", image="coco/train2017/000000000003.jpg")],
    }
    first = {f"00000000000{n}.jpg": picture(50 * n + 5) for n in (1, 2)} | {"000000000001.pickle": b""}
    return write_subset(folder, annotations, {TAR: first, "00000001.tar": {"000000000003.jpg": picture(155)}})


def write_video(folder: Path, frames: int = 11, **keys: Any) -> Path:
    """A video whose frame k has grey 20 k and its mask at column k; its tar holds them in the order of their names."""
    masks = [to_rle(square(k)) for k in range(frames)]
    members = {f"sav_1_0.{k}.jpg": picture(20 * k) for k in sorted(range(frames), key=str)}
    annotations = {"sav_1_0": {"video_id": "sav_1"} | region("a runner", mask_rle=masks) | keys}
    return write_subset(folder, annotations, {TAR: members})


def grey(sample: RegionSample) -> int:
    return round(float(sample.load()[0].mean()))


def test_each_region_has_its_own_image_mask_and_caption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, really_open = [], tarfile.open
    folder = write_coco(tmp_path / "COCOStuff")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(tarfile, "open", lambda path, mode: opened.append(path.name) or really_open(path, mode))
    regions = read_describe_anything(folder)
    assert [sample.caption for sample in regions] == ["a dog", "a cat", "a cow", "a hen"]
    assert [grey(sample) for sample in regions] == [55, 55, 105, 155]
    assert [int(sample.load()[1].argmax(axis=1).max()) for sample in regions] == [2, 9, 2, 2]
    dog, cat, cow, hen = (sample.group_id for sample in regions)
    assert dog == cat
    assert len({cat, cow, hen}) == 3
    assert all(sample.group_id == sample.series_id == sample.image_id for sample in regions)
    assert grey(pickle.loads(pickle.dumps(regions[3]))) == 155, "a sample survives the way to another process"
    assert opened == [TAR, "00000001.tar"], "each tar is scanned once"
    assert sorted(tmp_path.rglob("*")) == before, "nothing is unpacked"


def test_damage_of_tars_and_annotations_and_of_images_that_are_loaded_is_an_error(tmp_path: Path) -> None:
    annotations = {"1": [region(image="1.jpg")], "2": [region(image="2.jpg")]}
    folder = write_subset(tmp_path / "LVIS", annotations, {TAR: {"1.jpg": picture(9), "2.jpg": b"damaged"}})
    good, damaged = read_describe_anything(folder)
    with pytest.raises(ValueError, match=r"images/00000000\.tar: member 2\.jpg: not a readable image"):
        damaged.load()
    tar = folder / "images" / TAR
    whole = tar.read_bytes()
    tar.unlink()
    with pytest.raises(ValueError, match=r"entry '1', region 0 \(00000000\.tar: 1\.jpg\): .*No such file"):
        good.load()
    for data in (whole[:700], b"no tar at all"):  # 512 bytes of header, then the picture
        tar.write_bytes(data)
        with pytest.raises(ValueError, match=r"images/00000000\.tar: not a whole tar .*download"):
            read_describe_anything(folder)
    (folder / "annotations.json").write_text('{"1": [')
    with pytest.raises(ValueError, match=r"annotations\.json: not valid JSON"):
        read_describe_anything(folder)


@pytest.mark.parametrize(
    ("key", "keys", "member"),
    [
        ("k", {"image": "a.png"}, "a.jpg"),  # the base name may have another ending
        ("k", {"image": "objects365/v1/a.jpg"}, "./train/a.JPEG"),
        ("k", {"image": "000000123456.jpg"}, "123456.jpg"),
        ("k", {"image": "123456.jpg"}, "000000123456.jpg"),
        ("k", {"image": "b.jpg", "img_id": "a.b"}, "a.b.jpg"),
        ("k", {"image": "b.jpg", "img_id": 17}, "0017.jpg"),
        ("sa_223750.jpg", {"image": None, "img_id": None}, "sa_223750.jpg"),
    ],
)
def test_members_are_found_by_any_of_their_names(tmp_path: Path, key: str, keys: dict[str, Any], member: str) -> None:
    tar = {"other.jpg": picture(200), member: picture(50), "more.pickle": b"x"}
    (sample,) = read_describe_anything(write_subset(tmp_path / "SAM", {key: [region(**keys)]}, {TAR: tar}))
    assert grey(sample) == 50


def test_frames_of_a_video_go_by_number_and_stay_in_one_group(tmp_path: Path) -> None:
    regions = read_describe_anything(write_video(tmp_path / "SAV"))
    assert [grey(sample) for sample in regions] == [20 * k for k in range(11)]
    assert [int(sample.load()[1].argmax(axis=1).max()) for sample in regions] == list(range(11))
    assert {sample.caption for sample in regions} == {"a runner"}
    assert len({(sample.group_id, sample.series_id) for sample in regions}) == 1
    assert len({sample.image_id for sample in regions} - {regions[0].group_id}) == 11
    assert len({sample.sample_id for sample in regions}) == 11
    masks = [to_rle(square(k)) for k in range(2)]
    annotations = {f"sav_1_{n}": region(f"runner {n}", mask_rle=masks, video_id="sav_1") for n in (0, 1)}
    annotations["2"] = region("runner", mask_rle=masks, video_id="sav_2")  # whose frames are named by it
    names = {"sav_1_0": 0, "sav_1_1": 40, "sav_2": 80}
    tar = {f"{key}.{k}.jpg": picture(level + 20 * k) for key, level in names.items() for k in (0, 1)}
    regions = read_describe_anything(write_subset(tmp_path / "two" / "SAV", annotations, {TAR: tar}))
    assert [grey(sample) for sample in regions] == [0, 20, 40, 60, 80, 100]
    assert len({sample.group_id for sample in regions[:4]}) == 1
    assert regions[4].group_id != regions[0].group_id


def test_the_parent_gives_all_subsets_in_order_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    write_video(tmp_path / "whole" / "SAV", frames=2)
    write_coco(tmp_path / "whole" / "COCOStuff")
    (tmp_path / "whole" / "README").write_text("x")
    assert [folder.name for folder in subset_folders(tmp_path / "whole")] == ["COCOStuff", "SAV"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = read_describe_anything(str(tmp_path / "whole"))
        parts = [
            region for name in ("COCOStuff", "SAV") for region in read_describe_anything(tmp_path / "whole" / name)
        ]
    assert [sample.sample_id for sample in whole] == [sample.sample_id for sample in parts]
    assert len(whole) == 6
    write_video(tmp_path / "video" / "SAV", frames=3, mask_rle=[None, to_rle(square(1)), None])
    with pytest.warns(UserWarning, match=r"left out 2 frame\(s\) without a mask$"):
        (sample,) = read_describe_anything(tmp_path / "video")
    assert grey(sample) == 20
    write_coco(tmp_path / "twice" / "COCOStuff")
    write_coco(tmp_path / "twice" / "LVIS")
    with pytest.warns(UserWarning, match=r"left out 4 exact repeat\(s\)"):
        assert len(read_describe_anything(tmp_path / "twice")) == 4, "an image in two subsets is one group"


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "boom")


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    harm = pickle.dumps(Bomb(tmp_path / "harm"))
    tar = {"k.pickle": harm, "k.jpg": picture(50), "j.pkl": harm}
    (sample,) = read_describe_anything(write_subset(tmp_path / "SAM", {"k": [region()]}, {TAR: tar}))
    assert grey(sample) == 50
    assert not (tmp_path / "harm").exists()
    pickle.loads(harm)
    assert (tmp_path / "harm").read_text() == "boom"  # so it would have shown


FRAMES = [to_rle(square(1))]


@pytest.mark.parametrize(
    ("annotations", "members", "message"),
    [
        ({n: [region(tar=f"{n}.tar")] * 2 for n in "012"}, None, r"images/0\.tar: file not found; 6 region.* 3 tar"),
        ({n: [region(image=f"x/00{n}.jpg")] for n in "123"}, {"1.jpg": b""}, r"00000000\.tar: .*002 or 2 .*2 region"),
        ({"v": region(mask_rle=FRAMES)}, {"v.jpg": b""}, r"00000000\.tar: no frames named v in it; 1 region"),
        ({"v": region(mask_rle=FRAMES * 2)}, {"v.0.jpg": b""}, r"'v', region 0: mask_rle has 2 mask.*\.tar 1 frame"),
        ({"k": [region(image="7.jpg")]}, {"007.jpg": b"", "07.jpg": b""}, "no image named 7 or k in it"),
        ({"k": [region(image="1.png")]}, {"a/1.png": b"", "b/1.png": b""}, r"2 pictures are named 1\.png, expected"),
        ({"1": [region(tar="../../LVIS/images/00000000.tar")]}, None, r"SAM/images/00000000\.tar: file not found"),
        ({"k": []}, {}, r"no region with a mask and a caption \(left out: nothing\)"),
        ([region()], {}, r"annotations\.json: expected an object \{image id: regions\}, got list; name a folder"),
        ({"k": ["x"]}, {}, r"annotations\.json: entry 'k': expected regions .* got str; download"),
        ({"k": None}, {}, r"entry 'k': expected regions .* got NoneType"),
        ({"k": [region(), region("")]}, {"k.jpg": b""}, r"region 1 \(00000000\.tar: k\.jpg\): the caption is empty"),
        ({"k": [region(None)]}, {"k.jpg": b""}, r"entry 'k', region 0 .*: the caption is missing \(NoneType\)"),
        ({"k": [region(mask_rle=None)]}, {"k.jpg": b""}, "entry 'k', region 0 .*: mask_rle: expected an RLE"),
        ({"k": [region(mask_rle={"size": [12, 16], "counts": "00"})]}, {"k.jpg": b""}, "mask_rle: RLE runs"),
        ({"k": [region(tar=None)]}, {"k.jpg": b""}, "region 0: tar_file is None, expected the name of a tar"),
        ({"k": [region(tar="")]}, {"k.jpg": b""}, "region 0: tar_file is ''"),
    ],
)
def test_faults_name_file_entry_and_remedy(tmp_path: Path, annotations: Any, members: Any, message: str) -> None:
    write_subset(tmp_path / "SAM", annotations, {"9.tar": {}} if members is None else {TAR: members})
    with pytest.raises(ValueError, match=message):
        read_describe_anything(tmp_path)


@pytest.mark.parametrize("kind", ["missing", "empty", "images"])
def test_a_folder_of_another_layout_is_an_error(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "x"
    if kind != "missing":
        root.mkdir()
    if kind == "images":
        (root / "annotations.json").write_text("[]")
    expected = rf"^{re.escape(str(root))}: no <SUBSET>/annotations\.json with tars .*hf download"
    with pytest.raises(ValueError, match=expected):
        read_describe_anything(root)
