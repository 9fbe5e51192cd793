"""Groups from a table, from names, from the layout, or none."""

from pathlib import Path

import numpy as np
import pytest

from rl_reward_network.data_import.items import Item, groups_of


def item(found_as: str, **fields: str) -> Item:
    return Item(found_as.removeprefix("images/"), found_as, lambda: np.zeros((2, 2), np.uint8), None, **fields)


ITEMS = [item("images/a/1.png"), item("images/a/2.png"), item("images/b/1.png")]


@pytest.mark.parametrize("names", [("a/1.png", "a/2", "images/b/1.png"), ("images\\a\\1.png", "a\\2", "b\\1")])
@pytest.mark.parametrize("form", ["{},{}", "{};{}", "{}\t{}"])
def test_a_table_names_images_with_or_without_folder_and_suffix(tmp_path, names, form):
    rows = ["image,group", *map(",".join, zip(names, ("7", "7", "8"), strict=True)), "other.png,9"]
    (tmp_path / "patients.csv").write_text("\n".join(form.format(*row.split(",")) for row in rows), "utf-8-sig")
    assert groups_of(ITEMS, str(tmp_path / "patients.csv"), None) == (
        [("7", None), ("7", None), ("8", None)],
        "--patients_csv",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image,patient\n1,7\n", r"columns are \['image', 'patient'\], expected image, group"),
        ("", r"columns are \[\]"),
        ("image,group\na/1,7\na/1,8\n", r"column image holds 'a/1' more than once"),
        ("image,group\na/1,7\n", r"no row for 2 of 3 images \(images/a/2\.png, images/b/1\.png\)"),
        ("image,group\na/1,\n", r"line 2: image is 'a/1', group is ''"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.csv").write_text(text)
    with pytest.raises(ValueError, match=rf"p\.csv: .*{message}"):
        groups_of(ITEMS, str(tmp_path / "p.csv"), None)


def test_names_give_groups_by_an_expression_which_angiograms_do_not_need():
    found = groups_of(ITEMS, None, r"(?P<group>\w)/(?P<series>\d)")
    assert found == ([("a", "1"), ("a", "2"), ("b", "1")], "file names")
    with pytest.raises(ValueError, match=r"group_regex .* no group in 1 of 3 images \(images/b/1\.png\)"):
        groups_of(ITEMS, None, "(?P<group>a)/")
    names = [f"images/DOE^({number:010d})_{series}_frame_000001.png" for number in (1, 2) for series in (1, 2)]
    found, _ = groups_of([item(name) for name in names], None, None)
    assert [group for group, _ in found] == ["0000000001"] * 2 + ["0000000002"] * 2


def test_versions_of_one_picture_share_a_group() -> None:
    names = ("train/a_png.rf.0f1e.jpg", "valid/a_png.rf.77Aa.jpg", "train/b.rf.jpg", "train/a_png.jpg")
    items = [item(name) for name in names]
    expected = ["a_png.jpg", "a_png.jpg", "train/b.rf.jpg", "train/a_png.jpg"]
    for groups, own in (("none", False), (None, True)):
        assert [group for group, _ in groups_of(items, groups, None, own)[0]] == expected


def test_none_makes_each_image_its_own_and_the_layout_gives_groups_unless_flags_do():
    found = groups_of(ITEMS, "none", None)
    assert found == ([(item.found_as, None) for item in ITEMS], "none"), "written names may change with other files"
    items = [item("1.png", group="x", series="s"), item("2.png", group="y")]
    assert groups_of(items, None, None) == ([("x", "s"), ("y", None)], "the files themselves")
    assert groups_of(items, None, r"(?P<group>\d)")[0] == [("1", "s"), ("2", None)]


def test_a_table_that_is_missing_or_has_a_rival_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"nowhere\.csv: file not found.*sa2va-rl doctor --data_root DATA --patients_csv"
    ):
        groups_of(ITEMS, str(tmp_path / "nowhere.csv"), None)
    with pytest.raises(ValueError, match="patients_csv is 'none' and group_regex is"):
        groups_of(ITEMS, "none", "(?P<group>a)")


@pytest.mark.parametrize("row", ["1.png", "1"])
def test_a_name_that_several_images_have_gives_no_group(tmp_path: Path, row: str) -> None:
    (tmp_path / "p.csv").write_text(f"image,group\n{row},7\na/2,7\n")
    with pytest.raises(ValueError, match=rf"p\.csv: column image holds '{row}', .* several images, images/a/1\.png"):
        groups_of(ITEMS, str(tmp_path / "p.csv"), None)


def test_a_whole_path_and_frames_of_one_file_are_no_doubt_and_empty_rows_are_skipped(tmp_path: Path) -> None:
    rows = ["image;group;series", '1.png;"Doe, J";s1', "a/1.png;Patient 8;", "run.dcm;patient_08;", ";;"]
    (tmp_path / "p.csv").write_text("\n".join(rows))
    items = [item("1.png"), item("a/1.png"), item("run.dcm"), item("run.dcm")]
    found, _ = groups_of(items, str(tmp_path / "p.csv"), None)
    assert found == [("Doe, J", "s1"), *[("Patient 8", None)] * 3], "a patient in two spellings is one group"


@pytest.mark.parametrize(
    ("items", "groups", "source"),
    [
        (ITEMS, [one.found_as for one in ITEMS], "none"),
        ([item("images/Patient 01/a.png"), item("x.png")], ["Patient 01", "x.png"], "proposed from folder names"),
        (
            [item("a.png"), item("DOE(0000012345)_1_frame_000001.png")],
            ["a.png", "0000012345"],
            "proposed from file names",
        ),
        ([item("0.png", group="p0"), item("1.png")], ["p0", "1.png"], "proposed from the files themselves"),
        (
            [item("0.png", group="Patient 1"), item("patient_01/1.png")],
            ["Patient 1"] * 2,
            "proposed from folder names and the files themselves",
        ),
    ],
)
@pytest.mark.parametrize("own", [False, True])
def test_what_nobody_names_is_proposed(items: list[Item], groups: list[str], source: str, own: bool) -> None:
    found, by = groups_of(items, None, None, own)
    assert ([group for group, _ in found], by) == (groups, source)


def test_a_table_and_a_file_may_write_an_umlaut_in_different_forms(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("image,group\nM\u00fcller 1.png,7\n", "utf-8")
    assert groups_of([item("Mu\u0308ller 1.png")], str(tmp_path / "p.csv"), None)[0] == [("7", None)]
