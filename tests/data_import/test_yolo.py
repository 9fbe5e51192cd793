"""YOLO polygons: text files of shares."""

from pathlib import Path

import pytest

from rl_reward_network.data_import.yolo import read_yolo, recognise_yolo
from tests.data_import.sources import SIZE, box_polygon, picture, save, truth

NAMES = {
    "data.yaml": "train: images/train\nnames:\n  0: vessel\n  1: catheter\n",
    "classes.txt": "vessel\ncatheter\n",
}


def line(number: int, index: int = 0) -> str:
    numbers = (value / SIZE[1 - place % 2] for place, value in enumerate(box_polygon(number)))
    return " ".join([str(index), *(f"{number:.6f}" for number in numbers)])


def write_yolo(source: Path, part: str = "train/", names: str = "data.yaml") -> Path:
    """Images with one object, two objects, none, and without a text file."""
    for number in range(4):
        save(source / f"images/{part}{number}.png", picture(number))
    (source / f"labels/{part}").mkdir(parents=True)
    for number, text in enumerate([line(0), f"{line(1)}\n{line(8, 1)}\n", ""]):
        (source / f"labels/{part}{number}.txt").write_text(text)
    (source / names).write_text(NAMES[names])
    return source


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("part", ["", "train/"])
def test_polygons_are_read_with_the_names_of_their_classes(tmp_path: Path, part: str, names: str) -> None:
    write_yolo(tmp_path, part, names)
    assert recognise_yolo(tmp_path) == "YOLO polygons (images with 3 text files)"
    found = read_yolo(tmp_path)
    assert (found.faults, found.class_ids) == ([], {"0": "vessel", "1": "catheter"})
    assert [item.name for item in found.items] == [f"{part}{number}.png" for number in range(4)]
    first, second, third, fourth = (item.load_masks and item.load_masks(SIZE) for item in found.items)
    assert first is not None
    assert second is not None
    assert (first["vessel"] == truth(0)).all()
    assert (second["vessel"] == truth(1)).all()
    assert (second["catheter"] == truth(8)).all()
    assert third == {}, "an empty text file: no object"
    assert fourth is None, "no text file: not annotated"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 0.5 0.5 0.2 0.2", "line 1: 4 numbers, which is a box"),
        (f"{line(0)}\n0 0.1 0.2 0.3 0.4 0.5 0.6 0.7", "line 2: 7 numbers, expected"),
        ("5 0.1 0.2 0.3 0.4 0.5 0.6", "line 1: class 5 is not in"),
        ("0 0.1 0.2 0.3 x 0.5 0.6", "line 1: not a line of numbers"),
    ],
)
def test_lines_that_are_no_polygons_are_faults(tmp_path: Path, text: str, message: str) -> None:
    write_yolo(tmp_path)
    (tmp_path / "labels/train/1.txt").write_text(text)
    found = read_yolo(tmp_path)
    (fault,) = found.broken.values()
    assert f"1.txt: {message}" in fault
    assert "train/1.png" in found.broken
    assert "train/1.png" not in [item.name for item in found.items], "it is annotated"


def test_names_and_texts_that_cannot_be_read_are_told_with_their_file(tmp_path: Path) -> None:
    write_yolo(tmp_path)
    (tmp_path / "labels/train/1.txt").write_bytes(b"0 \xff")
    (tmp_path / "gt/train").mkdir(parents=True)
    (tmp_path / "gt/train/0.txt").write_text(line(2))
    found = read_yolo(tmp_path)
    assert ["1.txt: not a text in UTF-8" in fault for fault in found.broken.values()] == [True]
    (fault,) = found.faults
    assert "gt/train/0.txt, labels/train/0.txt: masks of one image; delete all but one" in fault
    (tmp_path / "data.yaml").write_text("names:\n")
    assert read_yolo(tmp_path).class_ids == {}
    (tmp_path / "data.yaml").write_text("names: vessel\n")
    with pytest.raises(ValueError, match=r"data\.yaml: `names` is 'vessel', expected a list"):
        read_yolo(tmp_path)
    (tmp_path / "data.yaml").unlink()
    (tmp_path / "labels/train/classes.txt").write_text(NAMES["classes.txt"])  # where labelImg writes it
    found = read_yolo(tmp_path)
    assert found.class_ids == {"0": "vessel", "1": "catheter"}
    assert not any("without an image" in note for note in found.notes)
