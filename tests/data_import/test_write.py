"""What is written: our own format, whole or not at all; the source stays as it is."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.bit_depth import GreyWindow, windows_of
from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.images import load_deep, load_image
from rl_reward_network.data_import import write
from rl_reward_network.data_import.survey import ImportOptions, survey_source
from tests.data_import.sources import SIZE, picture, save, truth, write_pairs

OWN = ImportOptions(patients_csv="none")


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_images_masks_groups_and_series_arrive(tmp_path: Path) -> None:
    source, to = write_pairs(tmp_path / "source", "images/p{}/a.png", "masks/p{}/a.png"), tmp_path / "to"
    before = snapshot(source)
    write.write_import(survey_source(source, ImportOptions(group_regex=r"(?P<group>p\d)", phrase="tree")), to)
    assert snapshot(source) == before
    samples = read_annotations(to)
    assert [(sample.group, sample.text) for sample in samples] == [(f"p{number}", "tree") for number in range(5)]
    for number, sample in enumerate(samples):
        assert (sample.load_mask() == truth(number)).all()
        assert (sample.load_image() == picture(number)).all()
    assert write.import_notes(to) == ()
    assert sorted(path.name for path in to.iterdir()) == ["annotations.json", "images", "import.json", "masks"]


def test_files_are_copied_and_deep_ones_become_8_bit_as_training_sees_them(tmp_path: Path) -> None:
    source, to = write_pairs(tmp_path / "source", "images/{}.jpg"), tmp_path / "to"
    rng = np.random.default_rng(0)
    for name, white in (("deep.tif", 34_000), ("dark.png", 31_000)):
        save(source / f"images/{name}", rng.integers(30_000, white, SIZE).astype(np.uint16))
    save(source / "images/flat.bmp", picture(7))
    for number, bits in enumerate((None, 16)):
        write.write_import(survey_source(source, replace(OWN, bit_depth=bits)), to / str(number))
    for number in range(5):
        name = f"0/images/{number}.jpg"
        assert (to / name).read_bytes() == (source / f"images/{number}.jpg").read_bytes()
    assert (load_image(to / "0/images/flat.png") == picture(7)).all()
    # What reading the source itself would give: the same to the bit.
    read = windows_of({source / "images/deep.tif": None, source / "images/dark.png": None}, None, load_deep)
    for name in ("deep", "dark"):
        file = next((source / "images").glob(f"{name}.*"))
        assert Image.open(to / f"0/images/{name}.png").mode == "L", "a viewer shows it"
        assert (load_image(to / f"0/images/{name}.png") == load_image(file, read[file])).all()
        assert (load_image(to / f"1/images/{name}.png") == load_image(file, GreyWindow(0, 65535))).all()
    assert all(sample.grey is None for sample in read_annotations(to / "0"))
    assert write.imported_grey(to / "0") == {"data set": list(read[file][:2])}
    assert write.imported_grey(to / "1") == {"data set": [0, 65535]}
    assert write.imported_grey(source) is None


def test_groups_none_are_told_ever_after(tmp_path: Path) -> None:
    source, to = write_pairs(tmp_path / "Jane Doe"), tmp_path / "to"
    save(source / "images/3.png", picture(1))
    write.write_import(survey_source(source, OWN), to)
    text = (to / "import.json").read_text()
    assert "Doe" not in text, "no path"
    assert json.loads(text)["layout"] == "paired"
    (note,) = write.import_notes(to)
    assert "Possible leak" in note
    assert "--patients_csv none" in note
    assert "1 pairs look nearly identical" in note
    (to / "import.json").write_text('{"format_version": 7}')
    with pytest.raises(ValueError, match=r"import\.json: expected format_version 1 or 2"):
        write.import_notes(to)


@pytest.mark.parametrize(
    ("confirmed", "loose", "starts"),
    [
        (False, 0, ["Patients proposed from folder names, not confirmed: "]),
        (False, 1, ["Possible leak: 1 images name no patient, so each ", "Patients proposed from folder names"]),
        (True, 0, []),
    ],
)
def test_proposed_patients_are_told_until_they_are_confirmed(tmp_path, confirmed, loose, starts):
    source, to = write_pairs(tmp_path / "source", "Patient {}/a.png", "Patient {}/a_mask.png"), tmp_path / "to"
    for number in range(loose):
        save(source / f"{number}.png", picture(9))
    survey = survey_source(source, ImportOptions())
    write.write_import(replace(survey, groups_from="folder names") if confirmed else survey, to)
    notes = write.import_notes(to)
    assert [note.startswith(start) for note, start in zip(notes, starts, strict=True)] == [True] * len(starts)
    unknown = " (1 images name none)" * bool(loose)
    assert write.grouping_note(to) == f"patients proposed from folder names, not confirmed{unknown}" * (not confirmed)
    assert len({sample.group_id for sample in read_annotations(to)}) == 5 + loose


def test_a_target_that_would_harm_something_is_refused(tmp_path: Path) -> None:
    source = write_pairs(tmp_path / "source")
    for to in (source, source / "to", source / "images", tmp_path, source / ".." / "source" / "x"):
        with pytest.raises(ValueError, match=r"written to .*name a folder beside it"):
            write.check_target(source, to)
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(ValueError, match="name a folder beside it"):
        write.check_target(source, tmp_path / "link" / "to")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("x")
    for to in (tmp_path / "full", tmp_path / "full/file"):
        with pytest.raises(ValueError, match=r"written to .*not empty"):
            write.write_import(survey_source(source, OWN), to)
    assert (tmp_path / "full/file").read_text() == "x"
    (tmp_path / "empty").mkdir()
    write.write_import(survey_source(source, OWN), tmp_path / "empty")


def test_open_points_and_a_file_that_changes_leave_nothing(tmp_path: Path) -> None:
    source = write_pairs(tmp_path / "source")
    with pytest.raises(ValueError, match="nowhere"):
        write.write_import(survey_source(source, ImportOptions("nowhere.csv")), tmp_path / "to")
    survey = survey_source(source, OWN)
    (source / "masks/4.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"4\.png: not a readable image"):
        write.write_import(survey, tmp_path / "to")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def imported(folder: Path, layout: str, key: bytes | None) -> Path:
    folder.mkdir(parents=True)
    (folder / "import.json").write_text(json.dumps({"format_version": 1, "layout": layout}))
    if key is not None:
        (folder.parent / write.KEY_FILE).write_bytes(key)
    return folder


def test_imports_that_name_a_patient_differently_are_refused(tmp_path: Path) -> None:
    here, there = imported(tmp_path / "a" / "x", "dicom", b"1" * 32), imported(tmp_path / "b" / "y", "dicom", b"2" * 32)
    with pytest.raises(ValueError, match=r"x and .*y: imports of DICOM .* into one parent folder"):
        write.check_named_alike(here, there)
    write.check_named_alike(here, imported(tmp_path / "a" / "z", "dicom", None))
    write.check_named_alike(here, imported(tmp_path / "c" / "coco", "coco", None))
    write.check_named_alike(here, imported(tmp_path / "d" / "copied", "dicom", b"1" * 32))
    with pytest.raises(ValueError, match="imports of DICOM"):
        write.check_named_alike(here, imported(tmp_path / "e" / "lost", "dicom", None))
    (here / "import.json").write_text(json.dumps({"layout": "dicom", "format_version": 2}))
    with pytest.raises(ValueError, match="or by different versions, name one patient differently"):
        write.check_named_alike(here, imported(tmp_path / "a" / "old", "dicom", None))
