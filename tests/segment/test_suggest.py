"""Which images to annotate next: the rules on planted images, one image per patient, and the data folder."""

import csv
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.suggest import difference, halves, parts, show_all
from rl_reward_network.atomic_io import read_json
from rl_reward_network.cli.main import main
from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.segment.files import image_files
from rl_reward_network.segment.suggest import choose, describe, mask_names, patients_of, records, uncertainty
from tests.conftest import tube_image, write_tiny_data

ALONE = [str(number) for number in range(12)]
CENTRES = {0: (1.0, 0.0), 3: (0.0, 1.0), 7: (-1.0, 0.0)}  # image -> where it lies, the middle of its cluster
SIZES = {0: 3, 3: 4, 7: 5}


def planted() -> np.ndarray:
    """float64 (12, 2): three clusters, each about its first image."""
    points = []
    for start, size in SIZES.items():
        around = 0.05 * np.array([(np.cos(angle), np.sin(angle)) for angle in np.linspace(0, 2 * np.pi, size)[:-1]])
        points += [CENTRES[start], *(CENTRES[start] + around)]
    return np.array(points)


# ---- rules -----------------------------------------------------------------------------------------------------------


def test_typical_takes_the_centres_of_the_clusters_the_largest_first() -> None:
    found = choose("typical", planted(), ALONE, 3)
    assert [one.index for one in found] == [7, 3, 0]
    assert [one.why for one in found] == [f"nearest to the centre of {n} similar images" for n in (5, 4, 3)]


def test_typical_of_equal_images_takes_different_ones_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len({one.index for one in choose("typical", np.ones((5, 2)), ALONE[:5], 4)}) == 4


def test_unsure_takes_the_largest_uncertainty_and_answers_without_a_mask_first() -> None:
    values = np.array([0.1, 0.5, np.inf, 0.3])
    found = choose("unsure", values, ALONE[:4], 3)
    assert [one.index for one in found] == [2, 1, 3]
    assert [one.why for one in found] == [
        "no mask",
        *(f"uncertainty {v} for each pixel of the mask" for v in ("0.500", "0.300")),
    ]


def test_uncertainty_by_hand() -> None:
    soft = np.array([[0.9, 0.6], [0.5, 0.0]], np.float32)
    by_hand = np.mean([0.09, 0.24, 0.25, 0.0]) / (2 / 4)
    assert uncertainty(soft) == pytest.approx(by_hand)
    assert uncertainty(np.zeros((2, 2))) == 0.0
    assert uncertainty(np.full((2, 2), 0.5)) == pytest.approx(1.0), "an empty mask counts as one pixel"


def test_unsure_is_told_by_the_soft_masks_of_the_model(tmp_path: Path) -> None:
    softs = {"sure.png": np.array([[1.0, 0.0]]), "unsure.png": np.array([[0.6, 0.4]]), "nothing.png": np.zeros((1, 2))}
    for name in softs:
        Image.new("RGB", (2, 1), (len(name), 0, 0)).save(tmp_path / name)

    def answer(image: np.ndarray) -> Any:
        name = next(name for name in softs if len(name) == image[0, 0, 0])
        return SimpleNamespace(segs=0 if name == "nothing.png" else 1, soft=softs[name])

    maker: Any = SimpleNamespace(grey=None, answer=answer)
    values = describe("unsure", maker, [tmp_path / name for name in softs])
    np.testing.assert_allclose(values, [0.0, 0.48, np.inf])


def test_random_depends_on_the_seed_alone() -> None:
    def picked(seed: int) -> list[int]:
        return [one.index for one in choose("random", np.zeros(12), ALONE, 6, seed)]

    assert picked(0) == picked(0)
    assert len({tuple(picked(seed)) for seed in range(5)}) > 1
    assert len(set(picked(0))) == 6


@pytest.mark.parametrize("rule", ["typical", "unsure", "random"])
def test_every_patient_has_one_image_before_any_has_two(rule: Any) -> None:
    patients = ["a"] * 7 + ["b"] * 3 + ["c"] * 2
    values = planted() if rule == "typical" else np.arange(12.0)[::-1]
    found = [patients[one.index] for one in choose(rule, values, patients, 8)]
    assert [sorted(found[start : start + 3]) for start in (0, 3)] == [["a", "b", "c"]] * 2
    assert sorted(found[6:]) == ["a", "b"], "the third has no more images"


def test_a_number_that_is_too_large_or_zero_is_refused() -> None:
    for number in (0, 13):
        with pytest.raises(ValueError, match=rf"--number {number}: there are 12 images"):
            choose("random", np.zeros(12), ALONE, number)


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
    chosen = choose("random", np.zeros(3), names, 2)
    (data / "annotations.json").write_text(json.dumps(records(names, chosen, "blood vessel")))
    with pytest.warns(UserWarning, match=r"2 mask\(s\) are still to be drawn \(`to_draw`\): unlabelled"):
        assert not any(sample.labelled for sample in read_annotations(data))
    first = data / mask_names(names)[chosen[0].index]
    Image.fromarray(np.full((32, 32), 255, np.uint8)).save(first)
    with pytest.warns(UserWarning, match=r"1 mask\(s\)"):
        labelled = [sample for sample in read_annotations(data) if sample.labelled]
    assert [sample.image_path.name for sample in labelled] == [names[chosen[0].index]]
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
    main(["suggest", "--images", str(images), "--output_dir", str(out), "--device", "cpu", *words])
    (folder,) = out.iterdir()
    return folder


@pytest.mark.parametrize("rule", ["typical", "unsure", "random"])
def test_the_embedded_model_suggests_and_the_folder_becomes_data(
    rule: str, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = suggest(images, "--number", "2", "--rule", rule)
    assert {path.name for path in folder.iterdir()} == {
        *("annotations.json", "contact_sheet.png", "images", "masks", "suggested.csv")
    }
    with (folder / "suggested.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [list(row) for row in rows] == [["rank", "image", "patient", "why"]] * 2
    assert sorted(row["patient"] for row in rows) == ["patient 0", "patient 1"]
    assert image_files([folder / "images"]) == [
        folder / "images" / p.relative_to(images) for p in image_files([images])
    ]
    lines = capsys.readouterr().out.strip().splitlines()
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
    "needless model": (lambda images: ["--model_path", "sa2va-nano"], "--model_path: chance needs no model"),
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


# ---- the benchmark ---------------------------------------------------------------------------------------------------


def test_the_benchmark_keeps_images_apart_and_names_what_beats_chance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool, apart = parts(read_annotations(write_tiny_data(tmp_path / "data", images=8, size=32)))
    assert (len(pool), len(apart)) == (4, 4)
    assert not {one.group for one in pool} & {one.group for one in apart}
    assert [len(half) for half in halves(9, 2)] == [4, 4]
    mean, low, high = difference([0.5, 0.6, 0.7], [0.4, 0.4, 0.4])
    assert (mean, low, high) == pytest.approx((0.2, 0.2 - 0.2484, 0.2 + 0.2484), abs=1e-4)
    base = [0.4, 0.5, 0.6]
    show_all({"typical": [0.51, 0.6, 0.7], "unsure": base, "random": base})
    assert capsys.readouterr().out.endswith("typical beats the random choice with the lower bound above 0.\n")
    show_all({"typical": [0.1, 0.9, 0.5], "unsure": base, "random": base})
    assert capsys.readouterr().out.endswith("Nothing beats the random choice with the lower bound above 0.\n")
