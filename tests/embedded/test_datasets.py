import json
import re
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import rl_reward_network.embedded.datasets as embedded
from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.grasp_any_region import read_grasp_any_region
from rl_reward_network.data.splits import FRACTIONS
from rl_reward_network.embedded.angiograms import CATHETER, LOOKS, TREE, render_series
from rl_reward_network.embedded.regions import DAYLIGHT, LAMPLIGHT, make_scenes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("angiograms")
    embedded.write_angiograms(folder, 7, tuple(LOOKS))
    return folder


def test_the_reader_finds_patients_series_and_frames(folder: Path) -> None:
    samples = read_annotations(folder)
    assert len(samples) == 7 * embedded.SERIES * embedded.FRAMES
    assert len({sample.group_id for sample in samples}) == 7
    assert set(Counter(sample.series_id for sample in samples).values()) == {embedded.FRAMES}
    assert all(sample.labelled and sample.size == (256, 256) for sample in samples)
    names = {sample.image_path.name for sample in samples}
    assert all(re.fullmatch(r"P\d{4}\(\d{10}\)_1-[34]_1_frame_\d{6}\.png", name) for name in names)
    assert any(re.fullmatch(r"P0006\(0000060001\)_1-4_1_frame_\d{6}\.png", name) for name in names)


def test_masks_on_disk_are_the_rendered_trees_to_the_pixel_and_never_catheters(folder: Path) -> None:
    looks = json.loads((folder / "looks.json").read_text())
    for look in ("plain", "catheter"):
        sample = next(s for s in read_annotations(folder) if looks[s.image_path.name] == look)
        name = sample.image_path.name
        rng = np.random.default_rng([embedded.SEED, int(name[1:5]), int(name.split("_1-")[1][0]) - 3])
        rng.integers(5, 40)  # the first frame's number
        frame = next(iter(render_series(rng, look, 3)))
        np.testing.assert_array_equal(sample.load_mask(), frame.parts & TREE > 0)
        np.testing.assert_array_equal(np.asarray(Image.open(sample.image_path)), frame.image)
        assert ((frame.parts & CATHETER > 0) & (frame.parts & TREE == 0)).sum() > 500 * (look == "catheter") - 1


FIRST_FRAMES = [  # of six patients' first series: look, mean grey, pixels of the tree
    ("plain", 155.49, 8178),
    ("bright", 97.99, 9357),
    ("catheter", 127.83, 8346),
    ("faint", 145.74, 10069),
    ("branching", 150.75, 9920),
    ("blurred", 162.02, 9999),
]


def test_the_pictures_are_those_that_all_numbers_were_measured_on(folder: Path) -> None:
    """Where this fails on purpose: count up RECIPE, train nano again, measure again. Slack is for other processors."""
    looks = json.loads((folder / "looks.json").read_text())
    for sample, (look, grey, pixels) in zip(read_annotations(folder)[::6], FIRST_FRAMES, strict=False):
        assert looks[sample.image_path.name] == look
        assert sample.load_image().mean() == pytest.approx(grey, abs=0.02)
        assert sample.load_mask().sum() == pytest.approx(pixels, abs=3)
    scene = next(make_scenes(1, embedded.SEED))
    assert scene.image.mean() == pytest.approx(140.31, abs=0.02)
    assert [int(region.mask.sum()) for region in scene.objects] == pytest.approx([494, 388, 1602, 1628], abs=3)


def test_equal_arguments_give_equal_files(folder: Path, tmp_path: Path) -> None:
    embedded.write_angiograms(tmp_path, 7, tuple(LOOKS))
    names = sorted(path.relative_to(folder) for path in folder.rglob("*.*"))
    assert names == sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.*"))
    assert all((folder / name).read_bytes() == (tmp_path / name).read_bytes() for name in names)


def test_a_patients_two_series_have_different_looks_and_all_looks_come_equally_often() -> None:
    for looks in (tuple(LOOKS), embedded.NO_GAP_LOOKS):
        pairs = [[embedded.look_of(patient, series, looks) for series in (0, 1)] for patient in range(30 * len(looks))]
        assert all(first != second for first, second in pairs)
        assert len(set(Counter(look for pair in pairs for look in pair).values())) == 1
        real = Counter(embedded.look_of(patient, series, looks) for patient in range(160) for series in (0, 1))
        assert max(real.values()) - min(real.values()) <= 2
    assert FRACTIONS[-1] * embedded.PATIENTS >= 40, "enough test patients"


def test_a_made_set_is_used_again_and_another_versions_set_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "PATIENTS", 4)
    made = embedded.embedded_angiograms(tmp_path, no_gap=True)
    assert made == tmp_path / "angiograms_no_gap"
    assert set(json.loads((made / "looks.json").read_text()).values()) == set(embedded.NO_GAP_LOOKS)
    before = (made / "annotations.json").stat().st_mtime_ns
    assert embedded.embedded_angiograms(tmp_path, no_gap=True) == made
    assert (made / "annotations.json").stat().st_mtime_ns == before
    monkeypatch.setattr(embedded, "RECIPE", 99)
    with pytest.raises(ValueError, match=r"recipe\.json: recipe is .*expected .*99"):
        embedded.embedded_angiograms(tmp_path, no_gap=True)


@pytest.mark.parametrize(("daylight", "name"), [(False, "regions_lamplight"), (True, "regions")])
def test_the_scenes_are_made_once_and_read_back(tmp_path, monkeypatch, daylight, name):
    monkeypatch.setattr(embedded, "SCENES", 2)
    made = embedded.embedded_regions(tmp_path, daylight)
    before = (made / "recipe.json").stat().st_mtime_ns
    assert embedded.embedded_regions(tmp_path, daylight) == made == tmp_path / name
    assert (made / "recipe.json").stat().st_mtime_ns == before
    light = np.array(DAYLIGHT if daylight else LAMPLIGHT)
    objects = [(scene, obj) for scene in make_scenes(2, embedded.SEED) for obj in scene.objects]
    for region, (scene, obj) in zip(read_grasp_any_region(made), objects, strict=True):
        np.testing.assert_array_equal(region.load()[0], (scene.image * light).round())
        assert region.caption == obj.caption


def test_a_folder_of_somebody_elses_is_not_taken_for_ours(tmp_path: Path) -> None:
    for name, make in (("angiograms", embedded.embedded_angiograms), ("regions_lamplight", embedded.embedded_regions)):
        (tmp_path / name).mkdir()
        with pytest.raises(ValueError, match=rf"{name}: .*DATA_ROOT"):
            make(tmp_path)


def test_of_two_that_begin_at_once_one_renders_and_the_other_waits(tmp_path: Path) -> None:
    """Each would otherwise put its folder in the place of the other's, while that one is reading."""
    made: list[Path] = []

    def make(folder: Path) -> None:
        time.sleep(0.3)
        made.append(folder)

    threads = [threading.Thread(target=embedded._made, args=(tmp_path / "set", {"recipe": 1}, make)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert (tmp_path / "set" / "recipe.json").exists()
