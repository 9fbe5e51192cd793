import io
import json
import pickle
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


def picture(level: int) -> bytes:
    """A JPEG, all pixels of grey `level`."""
    Image.new("RGB", SIZE[::-1], (level,) * 3).save(file := io.BytesIO(), "JPEG", quality=95)
    return file.getvalue()


def square(at: int) -> np.ndarray:
    """bool (H, W): 3 x 2 pixels at column `at`."""
    mask = np.zeros(SIZE, dtype=bool)
    mask[4:7, at : at + 2] = True
    return mask


def region(caption: str | None = "a dog", tar: str = "00000000.tar", at: int = 2, **keys: Any) -> dict[str, Any]:
    """One entry of annotations.json."""
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
        "1": [
            region("a dog", image="coco/train2017/000000000001.jpg"),
            region("a cat", at=9, image="x/000000000001.jpg"),
        ],
        "2": [region("a cow", image="coco/train2017/000000000002.jpg")],
        "3": [region("a hen", "00000001.tar", image="coco/train2017/000000000003.jpg")],
    }
    first = {
        f"00000000000{n}.{kind}": picture(50 * n + 5) if kind == "jpg" else b""
        for n in (1, 2)
        for kind in ("jpg", "pickle")
    }
    return write_subset(
        folder, annotations, {"00000000.tar": first, "00000001.tar": {"000000000003.jpg": picture(155)}}
    )


def write_video(folder: Path, frames: int = 11, **keys: Any) -> Path:
    """A video whose frame k has grey 20 k and its mask at column k; its tar holds them in the order of their names."""
    masks = [to_rle(square(k)) for k in range(frames)]
    members = {f"sav_1_0.{k}.jpg": picture(20 * k) for k in sorted(range(frames), key=str)}
    annotations = {"sav_1_0": {"video_id": "sav_1"} | region("a runner", mask_rle=masks) | keys}
    return write_subset(folder, annotations, {"00000000.tar": members})


def grey(sample: RegionSample) -> int:
    return round(float(sample.load()[0].mean()))


def test_each_region_has_its_own_image_mask_and_caption(tmp_path: Path) -> None:
    regions = read_describe_anything(write_coco(tmp_path / "COCOStuff"))
    assert [sample.caption for sample in regions] == ["a dog", "a cat", "a cow", "a hen"]
    assert [grey(sample) for sample in regions] == [55, 55, 105, 155]
    assert [int(sample.load()[1].argmax(axis=1).max()) for sample in regions] == [2, 9, 2, 2]
    dog, cat, cow, hen = (sample.group_id for sample in regions)
    assert dog == cat
    assert len({cat, cow, hen}) == 3
    assert all(sample.group_id == sample.series_id == sample.image_id for sample in regions)


def test_nothing_is_unpacked_and_nothing_decoded_before_it_is_asked_for(tmp_path: Path) -> None:
    annotations = {"1": [region(image="1.jpg")], "2": [region(image="2.jpg")]}
    folder = write_subset(tmp_path / "LVIS", annotations, {"00000000.tar": {"1.jpg": picture(9), "2.jpg": b"damaged"}})
    before = sorted(tmp_path.rglob("*"))
    good, damaged = read_describe_anything(folder)
    assert grey(good) == 9
    with pytest.raises(ValueError, match=r"images/00000000\.tar: member 2\.jpg: not a readable image"):
        damaged.load()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_tar_that_is_gone_when_its_image_is_wanted_is_an_error(tmp_path: Path) -> None:
    sample = read_describe_anything(write_coco(tmp_path / "LVIS"))[0]
    (tmp_path / "LVIS" / "images" / "00000000.tar").unlink()
    with pytest.raises(ValueError, match=r"entry '1', region 0 \(00000000\.tar: 000000000001\.jpg\): .*No such file"):
        sample.load()


@pytest.mark.parametrize(
    ("key", "keys", "member"),
    [
        ("k", {"image": "objects365/v1/a.jpg"}, "a.jpg"),
        ("k", {"image": "a.png"}, "a.jpg"),  # the base name may have another ending
        ("k", {"image": "a.jpg"}, "./train/a.JPEG"),
        ("k", {"image": "000000123456.jpg"}, "123456.jpg"),
        ("k", {"image": "123456.jpg"}, "000000123456.jpg"),
        ("k", {"image": "b.jpg", "img_id": "a.b"}, "a.b.jpg"),
        ("k", {"image": "b.jpg", "img_id": 17}, "0017.jpg"),
        ("sa_223750", {"image": None, "img_id": None}, "sa_223750.jpg"),
        ("sa_223750.jpg", {}, "sa_223750.jpg"),
    ],
)
def test_members_are_found_by_any_of_their_names(tmp_path: Path, key: str, keys: dict[str, Any], member: str) -> None:
    tar = {"other.jpg": picture(200), member: picture(50), "more.pickle": b"x"}
    (sample,) = read_describe_anything(write_subset(tmp_path / "SAM", {key: [region(**keys)]}, {"00000000.tar": tar}))
    assert grey(sample) == 50


def test_the_names_are_tried_in_order(tmp_path: Path) -> None:
    tar = {"00a.jpg": picture(50), "a.jpg": picture(100), "b.jpg": picture(150), "c.jpg": picture(200)}
    annotations = {
        "c": [
            region("1", image="x/00a.jpg", img_id="b"),
            region("2", image="x/000a.jpg", img_id="b"),
            region("3", image="x/z.jpg", img_id="b"),
            region("4", image="x/z.jpg", img_id="z"),
        ]
    }
    regions = read_describe_anything(write_subset(tmp_path / "PACO", annotations, {"00000000.tar": tar}))
    assert [grey(sample) for sample in regions] == [50, 100, 150, 200]


def test_a_bare_name_that_two_members_share_chooses_neither(tmp_path: Path) -> None:
    tar = {"007.jpg": picture(50), "07.jpg": picture(100)}
    with pytest.raises(ValueError, match=r"no image named 7 or k in it"):
        read_describe_anything(write_subset(tmp_path / "PACO", {"k": [region(image="7.jpg")]}, {"00000000.tar": tar}))


def test_a_name_that_two_pictures_have_is_refused_where_it_is_asked_for(tmp_path: Path) -> None:
    tar = {"train/1.png": picture(50), "val/1.png": picture(100), "2.png": picture(150)}
    regions = read_describe_anything(
        write_subset(tmp_path / "PACO", {"k": [region(image="2.png")]}, {"00000000.tar": tar})
    )
    assert [grey(sample) for sample in regions] == [150]
    with pytest.raises(ValueError, match=r"00000000\.tar: 2 pictures are named 1\.png, expected one"):
        read_describe_anything(write_subset(tmp_path / "Two", {"k": [region(image="1.png")]}, {"00000000.tar": tar}))


def test_frames_of_a_video_go_by_number_and_stay_in_one_group(tmp_path: Path) -> None:
    regions = read_describe_anything(write_video(tmp_path / "SAV"))
    assert [grey(sample) for sample in regions] == [20 * k for k in range(11)]
    assert [int(sample.load()[1].argmax(axis=1).max()) for sample in regions] == list(range(11))
    assert {sample.caption for sample in regions} == {"a runner"}
    assert len({sample.group_id for sample in regions}) == len({sample.series_id for sample in regions}) == 1
    assert len({sample.image_id for sample in regions}) == len({sample.sample_id for sample in regions}) == 11
    assert regions[0].group_id not in {sample.image_id for sample in regions}


def test_objects_of_one_video_share_its_group(tmp_path: Path) -> None:
    masks = [to_rle(square(k)) for k in range(2)]
    annotations = {f"sav_1_{n}": region(f"runner {n}", mask_rle=masks, video_id="sav_1") for n in (0, 1)}
    annotations["sav_2_0"] = region("runner", mask_rle=masks, video_id="sav_2")
    tar = {f"{key}.{k}.jpg": picture(20 * k) for key in annotations for k in (0, 1)}
    regions = read_describe_anything(write_subset(tmp_path / "SAV", annotations, {"00000000.tar": tar}))
    assert len(regions) == 6
    assert len({sample.group_id for sample in regions[:4]}) == 1
    assert regions[4].group_id != regions[0].group_id


def test_frames_may_be_named_by_the_video(tmp_path: Path) -> None:
    tar = {f"sav_1.{k}.jpg": picture(20 * k) for k in range(2)}
    row = region(mask_rle=[to_rle(square(k)) for k in range(2)], video_id="sav_1")
    regions = read_describe_anything(write_subset(tmp_path / "SAV", {"0": [row]}, {"00000000.tar": tar}))
    assert [grey(sample) for sample in regions] == [0, 20]


def test_frames_without_a_mask_are_left_out_and_counted(tmp_path: Path) -> None:
    masks = [None, to_rle(square(1)), None]
    write_video(tmp_path / "SAV", frames=3, mask_rle=masks)
    with pytest.warns(UserWarning, match=r"left out 2 frame\(s\) without a mask$"):
        (sample,) = read_describe_anything(tmp_path / "SAV")
    assert grey(sample) == 20


def test_the_parent_gives_all_subsets_in_order(tmp_path: Path) -> None:
    write_video(tmp_path / "SAV", frames=2)
    write_coco(tmp_path / "COCOStuff")
    (tmp_path / "README").write_text("x")
    assert [folder.name for folder in subset_folders(tmp_path)] == ["COCOStuff", "SAV"]
    whole = read_describe_anything(str(tmp_path))
    parts = read_describe_anything(tmp_path / "COCOStuff") + read_describe_anything(tmp_path / "SAV")
    assert [sample.sample_id for sample in whole] == [sample.sample_id for sample in parts]
    assert len(whole) == 6


def test_a_subset_without_any_tar_is_no_less_a_subset(tmp_path: Path) -> None:
    write_coco(tmp_path / "COCOStuff")
    write_subset(tmp_path / "LVIS", {"k": [region()]}, {})
    with pytest.raises(ValueError, match=r"LVIS/images/00000000\.tar: file not found; 1 region"):
        read_describe_anything(tmp_path)


def test_each_tar_is_scanned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, really_open = [], tarfile.open
    folder = write_coco(tmp_path / "LVIS")
    monkeypatch.setattr(tarfile, "open", lambda path, mode: opened.append(path.name) or really_open(path, mode))
    for sample in read_describe_anything(folder):
        sample.load()
    assert opened == ["00000000.tar", "00000001.tar"]


def test_an_image_in_two_subsets_is_one_group_and_equal_regions_one_sample(tmp_path: Path) -> None:
    write_coco(tmp_path / "COCOStuff")
    write_coco(tmp_path / "LVIS")
    with pytest.warns(UserWarning, match=r"left out 4 exact repeat\(s\)"):
        assert len(read_describe_anything(tmp_path)) == 4


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "boom")


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    harm = pickle.dumps(Bomb(tmp_path / "harm"))
    tar = {"k.pickle": harm, "k.jpg": picture(50), "j.pkl": harm}
    (sample,) = read_describe_anything(write_subset(tmp_path / "SAM", {"k": [region()]}, {"00000000.tar": tar}))
    assert grey(sample) == 50
    assert not (tmp_path / "harm").exists()
    pickle.loads(harm)
    assert (tmp_path / "harm").read_text() == "boom"  # so it would have shown


def test_reading_stops_at_the_limit(tmp_path: Path) -> None:
    folder = write_coco(tmp_path / "LVIS")
    (folder / "images" / "00000001.tar").unlink()  # needed by the fourth region only
    assert [sample.caption for sample in read_describe_anything(folder, limit=3)] == ["a dog", "a cat", "a cow"]
    with pytest.raises(ValueError, match="limit is -1"):
        read_describe_anything(folder, limit=-1)


def test_a_sample_survives_the_way_to_another_process(tmp_path: Path) -> None:
    sample = read_describe_anything(write_coco(tmp_path / "LVIS"))[3]
    assert grey(pickle.loads(pickle.dumps(sample))) == 155


def test_a_whole_data_set_is_read_without_a_warning(tmp_path: Path) -> None:
    write_coco(tmp_path / "LVIS")
    write_video(tmp_path / "SAV")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read_describe_anything(tmp_path)) == 15
