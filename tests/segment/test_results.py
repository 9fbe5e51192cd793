"""What `segment` leaves beside the masks: the table, the soft masks, the contact sheet, COCO and nnU-Net files."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco
from pycocotools.coco import COCO

from rl_reward_network.atomic_io import read_json, write_json
from rl_reward_network.cli import segment
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.segment.files import Target
from rl_reward_network.segment.results import (
    LINE,
    TILE,
    UNKNOWN,
    Segmented,
    check_results_free,
    soft_dice,
    verdicts,
    write_contact_sheet,
)
from tests.conftest import tube_image

NAMES = ("P0001(0000000042)_1_frame_000001.png", "b_0000.png")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    for seed, name in enumerate(NAMES):
        Image.fromarray(tube_image(64, seed)[0][:, :50]).save(tmp_path / "images" / name)
    return tmp_path / "images"


def run(*images: Path, **flags: Any) -> None:
    segment.main(segment.Args(images, device="cpu", **flags))


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def result(name: str, confidence: float = 0.9, share: float = 0.1, **changes: Any) -> Segmented:
    target = Target(*(Path(f"{name}{kind}.png") for kind in ("", "_mask", "_overlay", "_soft")))
    known = {"segs": 1, "size": (20, 30), "parts": 1, "predicted": None, "outside": None} | changes
    return Segmented(target, "the rib", "[SEG]", share=share, confidence=confidence, **known)


def test_the_table_has_a_row_for_each_mask_in_the_folder(images: Path, tmp_path: Path) -> None:
    RewardNetwork(RewardNetworkConfig(channels=(4, 4), packing=2, members=2)).save_pretrained(tmp_path / "net")
    run(images, output=tmp_path / "out", soft=True, threshold=0.3, reward_net=tmp_path / "net")
    first, second = rows(tmp_path / "out")
    assert (first["file"], second["file"]) == NAMES
    assert (first["patient"], second["patient"], second["prompt"]) == ("0000000042", "", PROMPTS[0])
    model, processor = load_sa2va_model("sa2va-nano")
    for row in (first, second):
        image = np.asarray(Image.open(images / row["file"]))
        soft = model.segment([image], [PROMPTS[0]], processor)[0][0].probabilities().max(axis=0)
        mask, stored = np.asarray(Image.open(tmp_path / "out" / row["mask"])) > 0, soft > 0.3
        np.testing.assert_array_equal(mask, stored)
        written = np.asarray(Image.open(tmp_path / "out" / row["mask"].replace("_mask", "_soft")))
        assert written.dtype == np.uint16
        np.testing.assert_allclose(written / 65535, soft, atol=1e-5)
        assert float(row["share"]) == pytest.approx(mask.mean(), abs=1e-6)
        assert float(row["confidence"]) == pytest.approx(2 * soft[mask].sum() / (soft.sum() + mask.sum()), abs=1e-4)
        assert 0 < float(row["predicted_dice"]) < 1
        assert row["predicted_low"] == row["predicted_high"] == "", "no interval was fitted"
    run(images / NAMES[1], output=tmp_path / "out")
    assert [row["file"] for row in rows(tmp_path / "out")] == list(NAMES), "the row of the mask that is still there"
    assert rows(tmp_path / "out")[1]["predicted_dice"] == ""
    assert not (tmp_path / "out" / "b_0000_soft.png").exists(), "it was of another mask"
    (tmp_path / "out" / first["mask"]).unlink()
    run(images / NAMES[1], output=tmp_path / "out")
    assert [row["file"] for row in rows(tmp_path / "out")] == [NAMES[1]]


def test_masks_for_the_next_tool(images: Path, tmp_path: Path) -> None:
    for form in ("coco", "nnunet"):
        for _ in range(2):
            run(images, output=tmp_path / form, format=form)
    read, labels = COCO(tmp_path / "coco" / "predictions_coco.json"), tmp_path / "nnunet" / "labelsTs"
    assert sorted(path.name for path in labels.iterdir()) == [NAMES[0], "b.png"]
    for image in read.loadImgs(read.getImgIds()):
        mask = np.asarray(Image.open(tmp_path / "coco" / image["file_name"].replace(".png", "_mask.png"))) > 0
        (annotation,) = read.loadAnns(read.getAnnIds(imgIds=[image["id"]]))
        np.testing.assert_array_equal(read.annToMask(annotation), mask)
        assert annotation["area"] == mask.sum() == coco.area(annotation["segmentation"])
        label = np.asarray(Image.open(labels / image["file_name"].replace("b_0000", "b")))
        np.testing.assert_array_equal(label, mask.astype(np.uint8))
    for name, damage in (
        ("results.csv", lambda path: path.write_text("file,dice\na.png,0.5\n")),
        ("contact_sheet.png", lambda path: Image.new("L", (9, 9)).save(path)),
        ("predictions_coco.json", lambda path: write_json(path, {"images": []})),
        ("labelsTs/b.png", lambda path: Image.new("L", (9, 9)).save(path)),
    ):
        folder, form = (tmp_path / "nnunet", "nnunet") if name.startswith("labels") else (tmp_path / "coco", "coco")
        kept = (folder / name).read_bytes()
        damage(folder / name)
        with pytest.raises(ValueError, match=rf"{Path(name).name}: exists already and was not written by segment"):
            run(images, output=folder, format=form)
        (folder / name).write_bytes(kept)
    assert len(read_json(tmp_path / "coco" / "predictions_coco.json")["categories"]) == 1
    Image.new("L", (9, 9)).save(images / "b.png")
    with pytest.raises(ValueError, match=r"b.png, .*b_0000.png: their masks would have the same name, .*labelsTs"):
        run(images, output=tmp_path / "both", format="nnunet")


def test_nothing_is_written_where_an_image_is_broken_or_the_prompt_empty(images: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--prompt is empty"):
        run(images, output=tmp_path / "out", prompt=" ")
    (images / "c.png").write_bytes((images / NAMES[0]).read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"c.png: not a readable image"):
        run(images, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_numbers_and_verdicts_by_hand() -> None:
    soft, mask = np.array([[0.9, 0.6], [0.2, 0.1]]), np.array([[True, True], [False, False]])
    assert soft_dice(soft, mask) == pytest.approx(2 * 1.5 / (1.8 + 2))
    assert soft_dice(np.zeros((2, 2)), np.zeros((2, 2), bool)) == 0
    faults = [result("a", share=0.0), result("b", segs=0, share=0.0), result("c", outside="outside: too dark")]
    words = ["empty mask", "no mask", "outside: too dark"]
    assert verdicts(faults) == [f"look at this one: {word}" for word in words]
    many = [result(str(number), 0.5 + 0.01 * number) for number in range(20)]
    assert [bool(words) for words in verdicts(many)] == [True] * 2 + [False] * 18, "the lowest tenth"
    assert verdicts([result("sure", 0.81)]) == [""]
    assert verdicts([result("unsure", 0.79)]) == ["look at this one: low confidence"]
    by_dice = [result("a", 0.5, predicted=UNKNOWN._replace(dice=0.9)), result("b", 0.4), result("c", 0.95)]
    assert [one.target.image.name for one in sorted(by_dice, key=lambda one: one.rank)] == ["b.png", "c.png", "a.png"]


def test_a_contact_sheet_shows_a_hundred_tiles_with_whole_names(tmp_path: Path, monkeypatch: Any) -> None:
    drawn: list[str] = []
    monkeypatch.setattr("PIL.ImageDraw.ImageDraw.text", lambda self, place, text, *rest: drawn.append(text))
    long = "a name of an image that is far too long for a tile of a contact sheet (0000000042)_1_frame_000001"
    results = []
    for number in range(102):
        made = result(str(tmp_path / (f"{number}" if number else long)), 0.01 * number, segs=0)
        Image.new("L", (40, 30)).save(made.target.image)
        results.append((made, "look" if number == 0 else ""))
    write_contact_sheet(tmp_path / "contact_sheet.png", results)
    assert "".join(drawn).count(f"{long}.png") == 1
    assert drawn[0] == "100 of 102 masks, the lowest predicted Dice or confidence first"
    assert "101.png" not in drawn
    assert Image.open(tmp_path / "contact_sheet.png").width == 10 * (TILE + LINE) + LINE


def test_no_name_is_cut_on_the_screen_and_empty_masks_are_named(
    images: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = images / f"{'x' * 150}.png"
    Image.fromarray(tube_image(64, 5)[0]).save(long)
    monkeypatch.setenv("COLUMNS", "60")
    run(images, threshold=0.999999)
    printed = capsys.readouterr().out
    assert printed.replace(" ", "").replace("\n", "").count("x" * 150) >= 1 or printed.count("x") >= 150
    (line,) = (line for line in printed.splitlines() if line.startswith("empty mask: "))
    assert all(name in line for name in (*NAMES, long.name))


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, float("nan")])
def test_a_threshold_is_between_0_and_1(images: Path, value: float) -> None:
    with pytest.raises(ValueError, match=rf"--threshold {value}: expected a number between 0 and 1"):
        run(images, threshold=value)


def test_results_are_checked_in_each_folder(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("mine\n")
    target = Target(*(tmp_path / f"a{kind}.png" for kind in ("", "_mask", "_overlay", "_soft")))
    with pytest.raises(ValueError, match=r"results\.csv: exists already"):
        check_results_free([target])
