"""The split of a source: folders, lists and files that name it, what an import keeps, and what it refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rl_reward_network.atomic_io import read_json
from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.splits import make_split
from rl_reward_network.data_import.survey import ImportOptions, report_lines, survey_source
from rl_reward_network.data_import.write import write_import
from tests.data_import.sources import (
    annotation,
    as_255,
    coco_content,
    line,
    picture,
    save,
    truth,
    write_dicom,
    write_json,
)

OWN = ImportOptions(patients_csv="none")
PARTS = {"train": (0, 1, 2), "val": (3,), "test": (4, 5)}
KEPT = "split of the source is kept: train 3, val 1, test 2"


def paired(image: str, mask: str, **words: str) -> Callable[[Path], None]:
    def write(source: Path) -> None:
        for part, numbers in PARTS.items():
            for number in numbers:
                save(source / image.format(words.get(part, part), number), picture(number))
                save(source / mask.format(words.get(part, part), number), as_255(truth(number)))

    return write


def coco(json_file: str, image: str) -> Callable[[Path], None]:
    def write(source: Path) -> None:
        for part, numbers in PARTS.items():
            for number in numbers:
                save(source / image.format(part, number), picture(number))
            names = [Path(image.format(part, number)).name for number in numbers]
            drawn = [annotation(number, index) for index, number in enumerate(numbers)]
            write_json(source / json_file.format(part), coco_content(names, drawn, ["vessel"]))

    return write


def yolo(image: str, content: str, lists: bool = False) -> Callable[[Path], None]:
    def write(source: Path) -> None:
        for part, numbers in PARTS.items():
            names = [image.format(part, number) for number in numbers]
            for number, name in zip(numbers, names, strict=True):
                save(source / name, picture(number))
                text = source / name.replace("images", "labels").replace(".png", ".txt")
                text.parent.mkdir(parents=True, exist_ok=True)
                text.write_text(line(number))
            if lists:
                (source / f"{part}.txt").write_text("".join(f"./data/elsewhere/{name}\n" for name in names))
        (source / "data.yaml").write_text(f"{content}\nnames: [vessel]\n")

    return write


def nnunet(folds: bool) -> Callable[[Path], None]:
    def write(source: Path) -> None:
        for part, numbers in PARTS.items():
            end = "Ts" if part == "test" else "Tr"
            for number in numbers:
                save(source / f"images{end}/c{number}_0000.png", picture(number))
                save(source / f"labels{end}/c{number}.png", truth(number).astype("uint8"))
        if folds:
            write_json(source / "splits_final.json", [{"train": ["c0"], "val": ["c3"]}, {"train": [], "val": []}])

    return write


def dicom(source: Path) -> None:
    for part, numbers in PARTS.items():
        for number in numbers:
            write_dicom(source / f"{part}/{number}.dcm", picture(number)[..., 0], bits=8, patient=str(number))
            save(source / f"{part}/masks/{number}.png", as_255(truth(number)))


SOURCES = {
    "folders above": paired("{}/images/{}.png", "{}/masks/{}.png", train="Training", val="Validation"),
    "folders inside": paired("images/{}/{}.png", "masks/{}/{}.png", val="valid", test="TEST"),
    "names of folders": paired("{}_images/{}.png", "{}_masks/{}.png"),
    "below another folder": paired("set/{}/{}.png", "set/{}/{}_mask.png", test="Testing"),
    "COCO": coco("annotations/instances_{}2017.json", "{}2017/{}.png"),
    "ARCADE": coco("{0}/annotations/{0}.json", "{}/images/{}.png"),
    "Roboflow": coco("{}/_annotations.coco.json", "{}/{}.png"),
    "files of COCO alone": coco("annotations/{}.json", "images/{1}.png"),
    "YOLO, folders": yolo("images/{}/{}.png", "train: images/train\nval: [images/val]\ntest: ../images/test"),
    "YOLO, lists": yolo("images/{1}.png", "path: /data\ntrain: train.txt\nval: ./val.txt\ntest: test.txt", lists=True),
    "nnU-Net": nnunet(folds=True),
    "DICOM": dicom,
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_split_of_a_source_is_kept_and_told(tmp_path: Path, name: str) -> None:
    SOURCES[name](tmp_path / "source")
    survey = survey_source(tmp_path / "source", OWN)
    lines = report_lines(survey)
    assert KEPT in lines, lines
    assert not any("not read" in one for one in lines), "no list is called unread"
    write_import(survey, tmp_path / "to")
    given = {sample.split: set[str]() for sample in read_annotations(tmp_path / "to")}
    for sample in read_annotations(tmp_path / "to"):
        (number,) = [n for n in range(6) if (sample.load_mask() == truth(n)).all()]
        assert number in PARTS[sample.split or ""]
        given[sample.split].add(sample.group_id)
    split = make_split(read_annotations(tmp_path / "to"), 0)
    assert (set(split.groups["val"]), set(split.groups["test"])) == (given["val"], given["test"])
    write_import(survey_source(tmp_path / "source", ImportOptions("none", no_split=True)), tmp_path / "anew")
    assert not any("split" in record for record in read_json(tmp_path / "anew/annotations.json"))


def same_folder(source: Path) -> None:  # as coco8-seg.yaml and coco128-seg.yaml
    yolo("images/{1}.png", "train: images\nval: images")(source)


def one_more_folder(source: Path) -> None:
    SOURCES["folders above"](source)
    save(source / "images/7.png", picture(7))
    save(source / "masks/7.png", as_255(truth(7)))


def patients_named_test(source: Path) -> None:
    paired("images/{} patient/{}.png", "masks/{} patient/{}.png")(source)


def without_masks(source: Path) -> None:
    SOURCES["folders above"](source)
    for path in (source / "test/masks").iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("write", "told", "parts"),
    [
        (same_folder, "", set()),
        (patients_named_test, "", set()),
        (paired("images/{}_{}.png", "masks/{}_{}.png"), "", set()),  # names of files are no split
        (one_more_folder, "split of the source is not kept: 1 image(s) are in no part of it (7.png)", set()),
        (without_masks, "2 image(s) of a part without masks (test/4.png, test/5.png) join train", {"train", "val"}),
        (nnunet(folds=False), "split of the source is kept: train 4, test 2", {"train", "test"}),
    ],
)
def test_what_is_no_whole_split(tmp_path: Path, write: Callable[[Path], None], told: str, parts: set[str]) -> None:
    write(tmp_path)
    survey = survey_source(tmp_path, OWN)
    text = "\n".join(report_lines(survey))
    assert (told or "layout: ") in text
    assert set(survey.parts.values()) == parts
    assert ("split of the source" in text) == bool("split of" in told or parts)


def test_a_patient_or_a_picture_in_two_parts_is_one_error_with_its_remedy(tmp_path: Path) -> None:
    SOURCES["folders above"](tmp_path)
    table = tmp_path / "patients.csv"
    table.write_text("image,group\n" + "".join(f"{n},{'P0' if n in (0, 4) else n}\n" for n in range(6)))
    refused = (
        r"1 patient\(s\) or picture\(s\) are in two parts.*\(Training/images/0.png and test/images/4.png\).*no_split"
    )
    with pytest.raises(ValueError, match=refused):
        survey_source(tmp_path, ImportOptions(str(table))).check()
    survey_source(tmp_path, ImportOptions(str(table), no_split=True)).check()
    save(tmp_path / "test/images/5.png", picture(1))  # each image a patient of its own, but this one is image 1
    with pytest.raises(ValueError, match=r"1 patient.*\(Training/images/1.png and test/images/5.png\)"):
        survey_source(tmp_path, OWN).check()


def test_folds_that_are_no_list_are_refused(tmp_path: Path) -> None:
    nnunet(folds=False)(tmp_path)
    write_json(tmp_path / "splits_final.json", {"train": []})
    with pytest.raises(ValueError, match=r"splits_final\.json: expected .*delete it"):
        survey_source(tmp_path, OWN)
