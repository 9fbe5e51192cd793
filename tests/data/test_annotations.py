import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
from PIL import ExifTags, Image
from pycocotools import mask as coco

from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.items import data_fingerprint
from tests.conftest import CHASE, needs_chase

H, W = 48, 64
LEFT, RIGHT = [4, 4, 14, 4, 14, 14, 4, 14], [30, 4, 40, 4, 40, 14, 30, 14]  # 100 px each, disjoint
OVER = [9, 4, 19, 4, 19, 14, 9, 14]  # 100 px, of which 50 in LEFT
SQUARE = np.zeros((H, W), dtype=np.uint8)
SQUARE[4:14, 4:14] = 1
RLE = {"size": [H, W], "counts": coco.encode(np.asfortranarray(SQUARE))["counts"].decode()}
RUNS = {"size": [H, W], "counts": [4 * H + 4, *[10, H - 10] * 9, 10, H * W - 13 * H - 14]}


def record(**fields):
    return {"image": "a.png", "text": ["blood vessel"], "mask": [LEFT], "group": "P1"} | fields


def without(key, **fields):
    return {k: v for k, v in record(**fields).items() if k != key}


@pytest.fixture
def read(tmp_path):
    def read(*records, **options):
        """Write an image for each record that names one, then read the records."""
        for name in {r["image"] for r in records if isinstance(r, dict) and isinstance(r.get("image"), str)}:
            path = tmp_path / "images" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() and not name.startswith("missing"):
                Image.new("L", (W, H)).save(path, format="PNG")
        (tmp_path / "annotations.json").write_text(json.dumps(records))
        return read_annotations(tmp_path, **options)

    return read


def areas(samples):
    return {s.text: None if (mask := s.load_mask()) is None else int(mask.sum()) for s in samples}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"mask": [LEFT]}, {"blood vessel": 100}, id="user format, which the official loader crashes on"),
        pytest.param({"mask": [LEFT, RIGHT]}, {"blood vessel": 200}, id="one phrase: no polygon is cut off"),
        pytest.param({"mask": [LEFT, RIGHT, OVER]}, {"blood vessel": 250}, id="overlap is a union, not the value 2"),
        pytest.param({"mask": [LEFT, RIGHT], "text": ["a", "b"]}, {"a": 100, "b": 100}, id="one phrase per polygon"),
        pytest.param({"mask": [LEFT, OVER], "text": ["v", "v"]}, {"v": 150}, id="text repeated per polygon: merged"),
        pytest.param({"mask": [LEFT, RIGHT], "text": ["V.", " v"]}, {"V.": 200}, id="phrases the model sees as equal"),
        pytest.param({"mask": [[LEFT, RIGHT]]}, {"blood vessel": 200}, id="official format"),
        pytest.param({"mask": [[LEFT, OVER], [RIGHT]], "text": ["a", "b"]}, {"a": 150, "b": 100}, id="official, two"),
        pytest.param({"mask": [[LEFT], []], "text": ["a", "b"]}, {"a": 100, "b": None}, id="official, one unlabelled"),
        pytest.param({"mask": RLE}, {"blood vessel": 100}, id="compressed RLE"),
        pytest.param({"mask": [RLE]}, {"blood vessel": 100}, id="compressed RLE in a list"),
        pytest.param({"mask": RUNS}, {"blood vessel": 100}, id="uncompressed RLE"),
        pytest.param({"mask": [[RUNS]]}, {"blood vessel": 100}, id="uncompressed RLE in an official object"),
        pytest.param({"mask": [RLE, [RIGHT, LEFT]], "text": ["a", "b"]}, {"a": 100, "b": 200}, id="RLE beside object"),
        pytest.param({"mask": [RLE, RUNS], "text": ["a", "b"]}, {"a": 100, "b": 100}, id="an RLE per phrase"),
        pytest.param({"mask": [RLE, RIGHT]}, {"blood vessel": 200}, id="RLE and polygon of one object"),
        pytest.param({"text": "blood vessel "}, {"blood vessel": 100}, id="text as plain string"),
        pytest.param({"mask": None}, {"blood vessel": None}, id="null mask is unlabelled"),
        pytest.param({"mask": []}, {"blood vessel": None}, id="empty mask list is unlabelled"),
        pytest.param({"mask": [], "text": ["a", "b"]}, {"a": None, "b": None}, id="unlabelled with two phrases"),
    ],
)
def test_formats(read, fields, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert areas(read(record(**fields))) == expected


def test_mask_png_wins_and_may_be_one_per_phrase(read, tmp_path):
    for name, width in (("m", 8), ("n", 16)):
        Image.fromarray(np.arange(W)[None].repeat(H, 0) < width).save(tmp_path / f"{name}.png")
    assert areas(read(record(mask_png="m.png", mask="not even looked at"))) == {"blood vessel": 8 * H}
    assert areas(read(record(mask_png=["m.png", "n.png"], text=["a", "b"]))) == {"a": 8 * H, "b": 16 * H}
    assert areas(read(record(mask_png=None))) == {"blood vessel": 100}


def test_short_polygons_are_dropped_with_one_count_and_leave_no_empty_truth(read):
    """The user's data hold a polygon of one point, in the file of the one image nobody annotated."""
    with pytest.warns(UserWarning, match=r"dropped 3 polygon\(s\).*; 1 phrase\(s\)") as caught:
        one, two = read(record(mask=[[5, 5]]), record(image="b.png", mask=[LEFT, [1, 2], [1, 2, 3, 4]]))
    assert len(caught) == 1
    assert not one.labelled
    assert two.load_mask().sum() == 100


def test_other_keys_give_one_warning_for_the_file_that_names_nobody(read):
    with pytest.warns(UserWarning, match="keys that are not read: conversations, eye") as caught:
        read(record(conversations=[], eye="L"), record(image="Doe_John.png", conversations=[]))
    assert [str(w.message) for w in caught] == ["annotations.json: keys that are not read: conversations, eye"]
    assert caught[0].filename == __file__  # shown at the caller's line, not at one of ours


@pytest.mark.parametrize(
    ("records", "message"),
    [
        pytest.param([record(mask=[[LEFT], [RIGHT]])], "2 object.* 1 phrase", id="official, text too short"),
        pytest.param([record(mask=[[LEFT]], text=["a", "b"])], "1 object.* 2 phrase", id="official, text too long"),
        pytest.param([record(mask=[LEFT] * 3, text=["a", "b"])], "3 object.* 2 phrase", id="user, neither 1 nor n"),
        pytest.param([record(mask_png="m.png", text=["a", "b"])], "mask_png.* 1 object", id="one png, two phrases"),
        pytest.param([record(mask=[LEFT, [RIGHT]])], "different nesting.*record 0.*record 0", id="mixed in a record"),
        pytest.param([record(), record(image="b.png", mask=[[LEFT]])], "record 0 and .*record 1", id="mixed in a file"),
        pytest.param([record(mask=LEFT)], r"1 list\(s\) deep", id="flat polygon as mask"),
        pytest.param([record(mask=[[[LEFT]]])], r"4 list\(s\) deep", id="nested too deep"),
        pytest.param([record(mask=[[1, 2], [9, 2], [9, 9]])], "write it flat", id="polygon as points"),
        pytest.param([record(mask=[[[1, 2], [9, 2], [9, 9]]])], "write it flat", id="labelme points"),
        pytest.param([record(mask="polygon")], "list of polygons or an RLE", id="mask is text"),
        pytest.param([record(mask=[LEFT, None])], "flat list", id="null among polygons"),
        pytest.param([record(mask=[[1, 2, 3, 4, 5]])], "5 numbers", id="odd length"),
        pytest.param([record(mask=[[1, 2, float("nan"), 4, 5, 6]])], "finite", id="NaN"),
        pytest.param([record(mask=[[1, 1, 79, 1, 79, 40]])], "image is 64 x 48.*rescale", id="drawn at 800, not 512"),
        pytest.param(
            [record(imageWidth=80, imageHeight=60)], "`imageHeight` is 60.*64 x 48", id="labelme size, in range"
        ),
        pytest.param([record(width=H, height=W)], "`height` is 64", id="width and height swapped"),
        pytest.param([record(mask={"size": [W, H], "counts": [H * W]})], "RLE size", id="RLE of another size"),
        pytest.param([record(mask={"size": [H, W], "counts": [H * W, 1]})], "sum to H", id="RLE sum"),
        pytest.param([record(mask_png="none.png")], "none.png: image file not found", id="png missing"),
        pytest.param([without("text")], "`text` must", id="no text"),
        pytest.param([without("text", mask=None)], "`text` must", id="unlabelled needs a text too"),
        pytest.param([record(text=[])], "`text` must", id="no phrase"),
        pytest.param([record(text=["a", " "], mask=[LEFT, LEFT])], "`text` must", id="empty phrase"),
        pytest.param([record(text=[3])], "`text` must", id="phrase is a number"),
        pytest.param([without("image")], "`image` must", id="no image"),
        pytest.param([record(image="missing.png")], "missing.png: image file not found", id="image missing"),
        pytest.param([record(), record(text="Blood vessel.")], "came before; join", id="duplicate"),
        pytest.param([record(), record(text="b", group="P2")], "another `group`", id="one image in two groups"),
        pytest.param([record(group="")], "`group` must", id="empty group"),
        pytest.param([record(series=["x"])], "`series` must", id="series is a list"),
        pytest.param(["a.png"], "a record must be an object", id="record is text"),
    ],
)
def test_bad_records_are_refused(read, records, message):
    with pytest.raises(ValueError, match=rf"annotations\.json: record \d.*{message}"):
        read(*records)


@pytest.mark.parametrize("field", ["image", "mask_png"])
@pytest.mark.parametrize("name", ["/etc/x.png", "../x.png", "a/../../x.png", "..\\x.png", "C:\\x.png", "\\x.png"])
def test_paths_out_of_the_data_folder_are_refused(tmp_path, field, name):
    (tmp_path / "images").mkdir()
    Image.new("L", (W, H)).save(tmp_path / "images" / "a.png")
    (tmp_path / "annotations.json").write_text(json.dumps([record(**{field: name})]))
    with pytest.raises(ValueError, match=f"`{field}` must be relative and without"):
        read_annotations(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "file not found; a data folder holds"),
        ("", "not valid JSON"),
        ("[{]", "not valid JSON"),
        ("{}", "list of records.*got dict"),
        ("[]", "got an empty list"),
    ],
)
def test_file_that_is_no_list_of_records_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "annotations.json").write_text(text)
    with pytest.raises(ValueError, match=rf"annotations\.json: .*{message}"):
        read_annotations(tmp_path)


def test_the_folder_may_stand_before_the_name_of_an_image(read, tmp_path):
    (plain,) = read(record(image="p1/a.png"))
    (tmp_path / "annotations.json").write_text(json.dumps([record(image="images/p1/a.png")]))
    assert read_annotations(tmp_path) == [plain], "with the same ids, so that an old split still fits"
    both = [record(image=f"{at}p1/a.png") for at in ("", "images/")]
    (tmp_path / "annotations.json").write_text(json.dumps(both))
    with pytest.raises(ValueError, match=r"record 1 \(image 'images/p1/a.png'\): .*image and phrase"):
        read_annotations(tmp_path)
    (inner,) = read(record(image="images/b.png"))
    assert inner.image_path == tmp_path / "images" / "images" / "b.png", "a folder of that name inside is one"


def test_all_faults_are_counted_and_ten_are_told(read):
    spoiled = [{"text": []}, {"group": ""}, {"image": "missing.png"}, {"mask": [[1, 2, 3, 4, 5]]}, {"width": 7}]
    records = [record(image=f"{n}.png") | fields for n, fields in enumerate([{}, *spoiled, {}])]
    with pytest.raises(ValueError, match=r"annotations\.json: 5 records have faults\n") as caught:
        read(*records)
    head, *faults = str(caught.value).splitlines()
    assert "1.png" not in head
    assert [line.split(":")[0] for line in faults] == [
        "  record 1 (image '1.png')",
        "  record 2 (image '2.png')",
        "  record 3 (image 'missing.png')",
        "  record 4 (image '4.png')",
        "  record 5 (image '5.png')",
    ]
    for line, word in zip(faults, ("`text`", "`group`", "not found", "5 numbers", "`width`"), strict=True):
        assert word in line
    with pytest.raises(ValueError, match="13 records have faults") as caught:
        read(record(), *(record(image=f"{n}.png", text=[]) for n in range(13)))
    lines = str(caught.value).splitlines()
    assert len(lines) == 12
    assert lines[10].startswith("  record 10 ")
    assert lines[11] == "  ... and 3 more"


def test_one_record_of_another_nesting_is_the_only_one_to_blame(read):
    with pytest.raises(ValueError, match=r"record 1 \(image 'b.png'\): masks of different nesting") as caught:
        read(record(), record(image="b.png", mask=[[LEFT]]), record(image="c.png"), record(image="d.png"))
    assert "\n" not in str(caught.value)


def write_deep(folder, name, top, series=None, side=(H, W)):
    """A ramp up to `top` with one hot pixel, 16-bit PNG; its record."""
    grey = np.linspace(0, top, side[0] * side[1]).astype(np.uint16).reshape(side)
    grey[3, 3] = 65535
    (folder / "images").mkdir(exist_ok=True)
    Image.fromarray(grey).save(folder / "images" / name)
    return record(image=name, text=["v"]) | ({} if series is None else {"series": series})


def test_images_above_8_bit_share_one_scale_and_each_series_that_is_named_has_its_own(tmp_path):
    records = [write_deep(tmp_path, f"{name}.png", top) for name, top in (("a", 1023), ("b", 511), ("c", 1023))]
    Image.new("L", (W, H), 200).save(tmp_path / "images" / "d.png")
    (tmp_path / "annotations.json").write_text(json.dumps([*records, record(image="d.png", text=["v"])]))
    samples = read_annotations(tmp_path)
    (window,) = {s.grey for s in samples[:3]}
    assert 1015 <= window.white <= 1023
    bright, dim, _, plain = (s.load_image().mean() for s in samples)
    assert 126 < bright < 130
    assert 62 < dim < 66, "half as bright as it was"
    assert (plain, samples[3].grey) == (200, None)
    given = read_annotations(tmp_path, bit_depth=12)
    assert [s.grey and s.grey.white for s in given] == [4095] * 3 + [None]
    assert 31 < given[0].load_image().mean() < 34
    raised = [s if s.grey is None else replace(s, grey=s.grey._replace(black=7)) for s in given]
    assert len({data_fingerprint(found) for found in (samples, given, raised)}) == 3, "other pictures, other data"
    tops = {"a.png": (1023, "one"), "b.png": (511, "one"), "c.png": (4095, "two"), "d.png": (2000, None)}
    records = [write_deep(tmp_path, name, *how) for name, how in tops.items()]
    (tmp_path / "annotations.json").write_text(json.dumps(records))
    one, same, two, none = read_annotations(tmp_path)
    assert one.grey == same.grey
    whites = [s.grey.white for s in (one, two, none)]
    assert whites == [pytest.approx(1020, abs=4), pytest.approx(4088, abs=10), pytest.approx(1996, abs=6)]
    assert [s.grey.of_series for s in (one, same, two, none)] == [True, True, True, False]


def test_declared_size_and_polygons_belong_to_the_image_after_exif(read, tmp_path):
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = 6
    (tmp_path / "images").mkdir()
    Image.new("L", (H, W)).save(tmp_path / "images" / "turned.jpg", exif=tags)  # stored upright, shown lying
    (sample,) = read(record(image="turned.jpg", width=W, height=H, mask=[[50, 4, 60, 4, 60, 14, 50, 14]]))
    assert sample.size == sample.load_mask().shape == sample.load_image().shape[:2] == (H, W)


VESSELS = [
    "Doe_John(1234567)_LCA_1_frame_000001.jpg",
    "Doe_John^(1234567)_LCA_1_frame_000002.jpg",
    "Doe_John__1234567__LCA_1_frame_000003.jpg",
    "Doe_John(1234567)_RCA_frame_000001.jpg",  # a second video of the same patient
    "Roe(7654321)_RCA_frame_000001.jpg",
]


def test_vessel_names_group_by_patient_number_and_names_without_are_refused(read):
    samples = read(*(without("group", image=name) for name in VESSELS))
    assert [s.group for s in samples] == ["1234567"] * 4 + ["7654321"]
    assert len({s.group_id for s in samples}) == 2
    assert len({s.series_id for s in samples[:3]}) == 1
    assert len({s.series_id for s in samples}) == 3  # RCA of one patient is not RCA of another
    with pytest.raises(ValueError, match=r"record 1 \(image 'scan.png'\): no group.*`group`.*--group_regex") as caught:
        read(record(image=VESSELS[0], group="7"), without("group", image="scan.png"))
    assert "Doe" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "groups", "shown_by"),
    [
        (["a.png", "b.png"], ["a.png", "b.png"], ["none"] * 2),
        (
            ["Patient 1/a.png", "images/Patient 1/b.png", "c.png"],
            ["Patient 1"] * 2 + ["c.png"],
            ["folder names"] * 2 + ["none"],
        ),
        ([VESSELS[0], "scan.png"], ["1234567", "scan.png"], ["file names", "none"]),
        (VESSELS[3:], ["1234567", "7654321"], [""] * 2),
    ],
)
def test_where_no_record_names_a_group_names_propose_it(read, names, groups, shown_by):
    samples = read(*(without("group", image=name) for name in names))
    assert [sample.group for sample in samples] == groups
    assert [sample.shown_by for sample in samples] == shown_by
    assert not any(
        one.shown_by for one in read(*(without("group", image=name) for name in names), group_regex="(?P<group>.)")
    )


def test_group_regex_sees_folders_and_fields_win(read):
    names = ["p1/a.png", "p1/b.png", "p2/a.png"]
    options = {"group_regex": r"^(?P<group>[^/]+)/(?P<series>.)"}
    assert [s.group for s in read(*(without("group", image=n) for n in names), **options)] == ["p1", "p1", "p2"]
    first, second = read(record(image="p1/a.png", group=7), record(image="p2/b.png", group="7", series="a"), **options)
    assert (first.group, first.series_id) == ("7", second.series_id)


@pytest.mark.parametrize(("regex", "message"), [("(", "not a regular expression"), (r"(\d+)", "named group 'group'")])
def test_bad_group_regex_is_refused(read, regex, message):
    with pytest.raises(ValueError, match=message):
        read(record(), group_regex=regex)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (("train", "val", "tset"), r"record 2 \(image 'c\.png'\): `split` is 'tset', expected train, val, test"),
        (("train", None, None), "2 of 3 records have no `split`; give it to all or to none"),
        (("train", "val", "test"), ""),
        ((None, None, None), ""),
    ],
)
def test_all_records_or_none_have_a_split(read, splits, message):
    records = [record(image=f"{name}.png", split=split) for name, split in zip("abc", splits, strict=True)]
    if message:
        with pytest.raises(ValueError, match=message):
            read(*records)
    else:
        assert tuple(sample.split for sample in read(*records)) == splits


def test_fingerprint_changes_with_the_data_but_not_with_their_order(read, tmp_path):
    base = [record(), record(image="b.png", mask=RLE)]
    first = data_fingerprint(read(*base))
    assert first == data_fingerprint(read(*reversed(base)))
    Image.new("L", (W, H + 1)).save(tmp_path / "images" / "taller.png")
    changes = [
        {"image": "c.png"},
        {"image": "taller.png"},
        {"text": "vessel"},
        {"mask": [RIGHT]},
        {"mask": None},
        {"group": "P2"},
        {"series": "x"},
    ]
    prints = [data_fingerprint(read(record(**change), base[1])) for change in changes]
    assert len({first, *prints}) == len(changes) + 1


def test_nothing_that_may_be_written_holds_a_name(read):
    (sample,) = read(without("group", image=VESSELS[0]))
    written = " ".join([repr(sample), sample.group_id, sample.series_id, sample.sample_id, data_fingerprint([sample])])
    assert not any(secret in written for secret in ("Doe", "John", "1234567", "LCA"))


@pytest.fixture(scope="module")
def chase():
    with pytest.warns(UserWarning, match="keys that are not read: eye, mask_png_2nd"):
        return read_annotations(CHASE)


@needs_chase
def test_chase_has_28_photographs_of_14_children_and_its_polygons_are_its_png_masks(chase, tmp_path):
    assert (len(chase), len({s.group_id for s in chase}), len({s.series_id for s in chase})) == (28, 14, 28)
    (tmp_path / "images").symlink_to(CHASE / "images")
    records = json.loads((CHASE / "annotations.json").read_text())
    known = [{k: r[k] for k in ("image", "text", "mask", "group", "width", "height")} for r in records]
    (tmp_path / "annotations.json").write_text(json.dumps(known))
    for drawn, stored in zip(read_annotations(tmp_path), chase, strict=True):
        polygons, png = drawn.load_mask(), stored.load_mask()
        assert 2 * (polygons & png).sum() / (polygons.sum() + png.sum()) >= 0.999
        assert 0.03 < png.mean() < 0.12
