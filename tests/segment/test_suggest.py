"""Which images to annotate next: by chance, one image per patient first, and the data folder."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.atomic_io import read_json
from rl_reward_network.cli.main import main
from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.segment.files import image_files
from rl_reward_network.segment.suggest import choose, mask_names, patients_of, records
from tests.conftest import tube_image, write_tiny_data

ALONE = [str(number) for number in range(12)]


def test_the_choice_depends_on_the_seed_alone() -> None:
    assert choose(ALONE, 6) == choose(ALONE, 6)
    assert len({tuple(choose(ALONE, 6, seed)) for seed in range(5)}) > 1
    assert len(set(choose(ALONE, 6))) == 6


def test_every_patient_has_one_image_before_any_has_two() -> None:
    patients = ["a"] * 7 + ["b"] * 3 + ["c"] * 2
    found = [patients[one] for one in choose(patients, 8)]
    assert [sorted(found[start : start + 3]) for start in (0, 3)] == [["a", "b", "c"]] * 2
    assert sorted(found[6:]) == ["a", "b"], "the third has no more images"


def test_a_number_that_is_too_large_or_zero_is_refused() -> None:
    for number in (0, 13):
        with pytest.raises(ValueError, match=rf"--number {number}: there are 12 images"):
            choose(ALONE, number)


# ---- the data folder -------------------------------------------------------------------------------------------------


def test_patients_are_those_of_the_reader_of_annotations() -> None:
    assert patients_of(["a/x.png", "b/y.png"]) == ["a/x.png", "b/y.png"]
    assert patients_of(["Patient 1/x.png", "patient_01/y.png", "z.png"]) == ["Patient 1", "Patient 1", "z.png"]
    assert patients_of(["P(0000000042)_1_frame_000001.png"]) == ["0000000042"]


def test_masks_of_two_images_of_one_stem_have_different_names() -> None:
    assert mask_names(["a.png", "b/a.png", "c.png", "c.jpg"]) == [
        *("masks/a.png", "masks/b/a.png", "masks/c.png.png", "masks/c.jpg.png")
    ]


def test_a_mask_to_be_drawn_leaves_its_image_unlabelled_until_it_is_there(tmp_path: Path) -> None:
    data = write_tiny_data(tmp_path / "data", images=3, size=32)
    names = [path.name for path in image_files([data / "images"])]
    chosen = choose(names, 2)
    (data / "annotations.json").write_text(json.dumps(records(names, chosen, "blood vessel")))
    with pytest.warns(UserWarning, match=r"2 mask\(s\) are still to be drawn \(`to_draw`\): unlabelled"):
        assert not any(sample.labelled for sample in read_annotations(data))
    first = data / mask_names(names)[chosen[0]]
    Image.fromarray(np.full((32, 32), 255, np.uint8)).save(first)
    with pytest.warns(UserWarning, match=r"1 mask\(s\)"):
        labelled = [sample for sample in read_annotations(data) if sample.labelled]
    assert [sample.image_path.name for sample in labelled] == [names[chosen[0]]]
    Image.fromarray(np.full((16, 16), 255, np.uint8)).save(first)
    with pytest.raises(ValueError, match="mask is 16 x 16"):
        read_annotations(data)


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder with four images of two patients."""
    folder = tmp_path / "images"
    for number in range(4):
        (folder / f"patient {number % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(tube_image(48, number)[0]).save(folder / f"patient {number % 2}" / f"{number}.png")
    return folder


def suggest(images: Path, *words: str) -> Path:
    out = images.parent / "out"
    main(["suggest", "--images", str(images), "--output_dir", str(out), *words])
    (folder,) = out.iterdir()
    return folder


def test_the_suggested_images_become_data(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = suggest(images, "--number", "2")
    assert {path.name for path in folder.iterdir()} == {
        *("annotations.json", "contact_sheet.png", "images", "masks", "suggested.csv")
    }
    with (folder / "suggested.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [list(row) for row in rows] == [["rank", "image", "patient"]] * 2
    assert sorted(row["patient"] for row in rows) == ["patient 0", "patient 1"]
    assert image_files([folder / "images"]) == [
        folder / "images" / p.relative_to(images) for p in image_files([images])
    ]
    lines = capsys.readouterr().out.strip().splitlines()
    assert "note: these are images of 2 patients, and improve needs 6: annotate others, too" in lines
    assert lines[-2].startswith("next: draw each mask as a black and white PNG")
    assert lines[-1] == f"then: sa2va-rl doctor --data_root {folder}, and sa2va-rl improve --data_root {folder}"
    for record in read_json(folder / "annotations.json"):
        if "mask_png" in record:
            Image.fromarray(np.zeros((48, 48), np.uint8)).save(folder / record["mask_png"])
    samples = read_annotations(folder)
    assert (len(samples), sum(sample.labelled for sample in samples)) == (4, 2)
    assert {sample.image_path.name for sample in samples if sample.labelled} == {Path(r["image"]).name for r in rows}


BAD: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "too many": (lambda images: ["--number", "5"], "--number 5: "),
    "none": (lambda images: ["--number", "0"], "number is 0"),
    "annotated": (lambda images: ["--images", str(write_tiny_data(images.parent / "data") / "images")], "are not read"),
    "no text": (lambda images: ["--text", " "], "--text is empty"),
    "inside": (lambda images: ["--output_dir", str(images / "out")], "it lies in the folder of the images"),
    "no folder": (lambda images: ["--images", str(images / "nowhere")], "no such folder"),
    "empty": (lambda images: ["--images", str(images.parent / "empty")], "holds no image"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_done_is_refused_in_words(case: str, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (images.parent / "empty").mkdir()
    words, message = BAD[case]
    with pytest.raises(SystemExit) as stop:
        suggest(images, *words(images))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (images.parent / "out").exists()
