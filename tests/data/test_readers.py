from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_reward_network.data import grasp_any_region
from rl_reward_network.data.items import region_fingerprint
from rl_reward_network.data.masks import parse_rle, to_rle
from rl_reward_network.data.readers import read_region_data, recognise
from tests.data.test_describe_anything import write_coco, write_video
from tests.data.test_grasp_any_region import fine, write


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    write(
        tmp_path / "gar" / "fine", [fine(seed, f"thing {seed}") for seed in (0, 1, 2)] + [fine(0, "x", at=5)], shards=2
    )
    write_coco(tmp_path / "dam" / "LVIS")
    write_video(tmp_path / "dam" / "SAV")
    return tmp_path / "gar", tmp_path / "dam"


def test_each_set_is_recognised_and_told(both: tuple[Path, Path]) -> None:
    gar, dam = both
    samples, description = read_region_data(gar)
    assert recognise(gar) == "gar"
    assert (len(samples), description) == (4, "Grasp-Any-Region, 2 shards, 3 images, 4 regions")
    samples, description = read_region_data(str(dam))
    assert recognise(str(dam)) == "dam"
    assert (len(samples), description) == (15, "describe-anything: LVIS, SAV, 14 images, 15 regions")


def test_a_part_of_the_shards_and_a_limit_are_told(both: tuple[Path, Path]) -> None:
    (both[0] / "fine" / "data-00001-of-00002.arrow").unlink()
    write(both[0] / "more", [fine(7, "more")])
    assert read_region_data(both[0])[1] == "Grasp-Any-Region, 2 of 3 shards, 3 images, 3 regions"
    assert read_region_data(both[1], limit=2)[1] == "describe-anything: LVIS, SAV, 1 images, 2 regions (the limit)"


def test_a_folder_with_both_is_an_error(both: tuple[Path, Path]) -> None:
    write_coco(both[0] / "LVIS")
    with pytest.raises(ValueError, match=r"gar: holds Grasp-Any-Region.* and describe-anything: LVIS; give"):
        recognise(both[0])
    assert [recognise(both[0], name) for name in ("gar", "dam")] == ["gar", "dam"]
    for name, key in (("gar", "sample_id"), ("dam", "image_id")):
        assert all(getattr(sample, key) for sample in read_region_data(both[0], name)[0])


@pytest.mark.parametrize(
    ("folder", "name", "message"),
    [
        ("gar", "dam", "gar: dataset_name is 'dam', .* Grasp-Any-Region.*--dataset_name gar or auto"),
        ("dam", "gar", "dam: dataset_name is 'gar', .* describe-anything.*--dataset_name dam or auto"),
        ("gar", "GAR", "dataset_name is 'GAR', expected auto, gar, dam"),
        ("nowhere", "auto", "nowhere: no such folder; check the path"),
        ("x.arrow", "auto", r"x\.arrow: no such folder; check the path"),
        (
            "empty",
            "auto",
            r"no known data format \(it is empty\); expected Grasp-Any-Region .*SUBSET.*annotations\.json",
        ),
        ("other", "auto", r"format \(it holds 0\.json, 1\.json, 2\.json, 3\.json, images/, x\.parquet and 1 more\)"),
    ],
)
def test_what_is_no_data_set_of_that_name_is_refused(both, tmp_path, folder, name, message):
    (tmp_path / "x.arrow").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "other/images").mkdir(parents=True)
    for file in ("0.json", "1.json", "2.json", "3.json", "x.parquet", "z"):
        (tmp_path / "other" / file).write_text("[]")
    with pytest.raises(ValueError, match=message):
        read_region_data(tmp_path / folder, name)


def test_images_without_annotations_are_an_error_that_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "data" / "images").mkdir(parents=True)
    for name in ("1.png", "2.JPG", "notes.txt"):
        (tmp_path / "data" / "images" / name).touch()
    for folder in (tmp_path / "data", tmp_path / "data" / "images"):
        with pytest.raises(
            ValueError,
            match=rf"{folder}: 2 images and no annotations\.json.*write one.*\"group\": PATIENT.*docs/how-to/your-data",
        ):
            recognise(folder)
    (tmp_path / "data" / "annotations.json").write_text("[]")
    with pytest.raises(ValueError, match=rf"images: the images of .*annotations\.json; give {tmp_path / 'data'}$"):
        recognise(tmp_path / "data" / "images")
    assert recognise(tmp_path / "data") == "annotations"
    with pytest.raises(
        ValueError, match=r"data: holds annotated images, expected captioned regions \(gar or dam or names\)"
    ):
        read_region_data(tmp_path / "data")


def test_of_hub_ids_only_grasp_any_region_is_fetched(both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(grasp_any_region, "snapshot_download", lambda name, **_: asked.append(name) or str(both[0]))
    for name in ("auto", "gar"):  # with gar, too: hundreds of GB would be fetched for nothing
        with pytest.raises(ValueError, match=r"describe-anything .*\(hf download"):
            read_region_data("nvidia/describe-anything-dataset", name)
    with pytest.raises(ValueError, match=r"owner/name: .*describe-anything \(hf download"):
        read_region_data("owner/name", "dam")
    assert asked == []
    assert read_region_data("owner/name")[1] == "Grasp-Any-Region, 2 shards, 3 images, 4 regions"
    assert asked == ["owner/name"]


def test_the_fingerprint_is_of_the_content_and_not_of_order_and_place(both: tuple[Path, Path], tmp_path: Path) -> None:
    samples = read_region_data(both[0])[0]
    fingerprint = region_fingerprint(samples)
    assert len(fingerprint) == 64
    assert region_fingerprint(reversed(samples)) == fingerprint
    write(tmp_path / "again", [fine(seed, f"thing {seed}") for seed in (0, 1, 2)] + [fine(0, "x", at=5)])
    assert region_fingerprint(read_region_data(tmp_path / "again")[0]) == fingerprint
    turned = parse_rle(to_rle(np.ones((16, 12), dtype=bool)), (16, 12))
    full = replace(samples[0], mask_parts=parse_rle(to_rle(np.ones((12, 16), dtype=bool)), (12, 16)))
    names = ("image_id", "group_id", "series_id", "caption")
    others = [
        samples[1:],
        [*samples, samples[0]],
        *([replace(samples[0], **{name: "changed"}), *samples[1:]] for name in names),
        [full, *samples[1:]],
        [replace(full, mask_parts=turned), *samples[1:]],  # the same runs at another size
    ]
    assert len({region_fingerprint(changed) for changed in others} | {fingerprint}) == len(others) + 1
