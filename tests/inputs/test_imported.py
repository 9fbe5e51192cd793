"""A data folder of another layout is imported once, wherever data are read."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rl_reward_network.data_import.survey import ImportOptions
from rl_reward_network.grpo.inputs import open_grpo_inputs
from rl_reward_network.inputs import loading
from rl_reward_network.inputs.config import RegionConfig, RunConfig
from rl_reward_network.inputs.doctor import check_data
from rl_reward_network.inputs.loading import describe_run, imported_root, open_inputs, own_format, saved_config
from rl_reward_network.run import REWARD_RUN, Run
from tests.conftest import write_tiny_data
from tests.data_import.sources import SIZE, annotation, coco_content, picture, save, truth, write_json, write_pairs


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "load_segmenter", lambda *_: SimpleNamespace(segment=None, fingerprint="none"))


def own(source: Path, **changes: Any) -> RunConfig:
    return RunConfig(data_root=source, gpu=-1, **{"patients_csv": "none", **changes})


def test_the_main_job_says_what_it_takes_the_folder_for_and_imports_it_once(capsys, monkeypatch):
    source = write_pairs(Path("photos"), count=8)
    save(source / "masks/lost.png", truth(1))
    inputs = open_inputs(own(source))
    said = capsys.readouterr().out
    assert "1 mask(s) without an image, left out: masks/lost.png" in said
    assert "photos: taken for paired folders (images with masks)" in said
    (folder,) = Path("outputs/imported").glob("[!.]*")
    assert folder.name.startswith("photos_")
    assert str(folder) in said
    assert len(inputs.samples) == 8
    assert (inputs.config.data_root, inputs.config.patients_csv) == (folder, None)
    assert "each image a group of its own" in inputs.summary
    monkeypatch.setattr(loading.write, "write_import", lambda *_: pytest.fail("imported again"))
    assert open_inputs(own(source)).data_fingerprint == inputs.data_fingerprint
    monkeypatch.setattr(loading, "recognise_layout", lambda *_: pytest.fail("imported data need no import"))
    run = Path("outputs/run")
    config = describe_run(Run(run, REWARD_RUN), inputs, {})
    assert config["inputs"]["data_root"] == f"../imported/{folder.name}"
    again = open_inputs(*saved_config(run, config), run / "split.json")
    assert again.data_fingerprint == inputs.data_fingerprint


def test_grpo_and_the_doctor_use_the_same_folder() -> None:
    source = write_pairs(Path("photos"), count=8)
    config = open_grpo_inputs(own(source)).config
    regions = RegionConfig("annotations")
    finding = check_data(own(source), regions)
    assert "8 annotated images, 8 with a mask" in finding.details
    assert any("Possible leak" in note for note in finding.notes)
    assert list(Path("outputs/imported").glob("[!.]*")) == [config.data_root]
    assert check_data(RunConfig(data_root=source), regions).details == finding.details, "without a flag it goes on"


@pytest.mark.parametrize(
    ("images", "masks", "bare", "ending"),
    [
        (
            "Patient {:02}/a.png",
            "Patient {:02}/a_mask.png",
            0,
            (
                "there: 8 images with masks, 0 without; 8 patients, 8 of them with masks;"
                " patients proposed from folder names, not confirmed",
                "works: segment, the prompt policy, improve;"
                " improve has its verdict from folds, the others not yet from a test split, which has 2 patients with"
                " masks, of 6",
                "next: sa2va-rl improve quick --data_root 'my data'",
            ),
        ),
        (
            "images/{}.png",
            "masks/{}.png",
            40,
            (
                "there: 8 images with masks, 40 without; 48 patients, 8 of them with masks; no patient named",
                "",
                "next: sa2va",
            ),
        ),
        ("p{}_f0.png", "p{}_f0_mask.png", 0, ("there: 8 images with masks, 0 without; 8 patients", "", "next: ")),
    ],
)
def test_the_doctor_ends_with_what_is_there_what_works_and_the_next_command(images, masks, bare, ending):
    source = write_pairs(Path("my data"), images, masks, count=8)
    for number in range(bare):
        save(source / f"images/bare{number}.png", picture(100 + number))
    config = RunConfig(data_root=source)
    found = check_data(config, RegionConfig())
    assert [line.startswith(start) for line, start in zip(found.ending, ending, strict=True)] == [True] * 3, (
        found.ending
    )
    assert (f", {bare} without" in found.details) == bool(bare)


def test_few_patients_are_told_how_many_are_missing_and_all_frames_of_one_stay_together() -> None:
    source = write_pairs(Path("few"), "p{}_frame1.png", "p{}_frame1_mask.png", count=5)
    for number in range(5):
        save(source / f"p{number}_frame2.png", picture(10 + number))
    found = check_data(RunConfig(data_root=source), RegionConfig())
    assert found.ending[2] == "next: annotate images of 1 more patients, then sa2va-rl improve quick --data_root few"
    inputs = open_inputs(RunConfig(data_root=source, gpu=-1))
    assert len({sample.group_id for sample in inputs.samples}) == 5
    config = describe_run(Run(Path("outputs/run"), REWARD_RUN), inputs, {})
    assert config["grouping"] == "patients proposed from file names, not confirmed"


def test_a_folder_without_any_mask_is_told_what_works() -> None:
    save(Path("bare/a.png"), picture(1))
    for check in (check_data, open_grpo_inputs):
        with pytest.raises(
            ValueError, match=r"bare: 1 images, none with a mask: `sa2va-rl segment bare` .* 6 patients"
        ):
            check(RunConfig(data_root=Path("bare")), RegionConfig())


def test_another_folder_for_other_files_options_and_tables() -> None:
    source = write_pairs(Path("photos"), count=8)
    Path("p.csv").write_text("image,group\n" + "".join(f"{n},{n}\n" for n in range(8)))
    folders = [imported_root(source, Path("outputs"), ImportOptions("none"))]
    folders += [imported_root(source, Path("outputs"), ImportOptions("p.csv"))]
    Path("p.csv").write_text("image,group\n" + "".join(f"{n},{n // 2}\n" for n in range(8)))
    folders += [imported_root(source, Path("outputs"), ImportOptions("p.csv"))]
    save(source / "images/9.png", picture(9))
    folders += [imported_root(source, Path("outputs"), ImportOptions("none"))]
    os.utime(source / "images/9.png", (1, 1))
    folders += [imported_root(source, Path("outputs"), ImportOptions("none"))]
    assert len(set(folders)) == 5


def test_coco_in_a_file_called_as_ours_is_imported() -> None:
    for number in range(5):
        save(Path(f"coco/images/{number}.png"), picture(number))
    names = [f"{number}.png" for number in range(5)]
    annotations = [annotation(number, number) for number in range(5)]
    write_json(Path("coco/annotations.json"), coco_content(names, annotations, ["polyp"]))
    samples = open_inputs(own(Path("coco"))).samples
    assert {sample.text for sample in samples} == {"polyp"}
    assert (samples[3].load_mask() == truth(3)).all()


def test_our_own_format_is_read_as_it_is_and_takes_no_flags_of_the_import() -> None:
    config = RunConfig(data_root=write_tiny_data(Path("own")))
    assert own_format(config) is config
    assert not Path("outputs").exists()
    for flag in ("patients_csv", "label"):
        with pytest.raises(ValueError, match=rf"--{flag} is for data that are imported, but own is not"):
            own_format(replace(config, **{flag: "none"}))


def test_a_source_with_open_points_leaves_nothing() -> None:
    source = write_pairs(Path("photos"), stored=lambda mask: mask.astype(np.uint8) * 3)
    save(source / "masks/1.png", truth(1))
    with pytest.raises(ValueError, match=r"2 classes: 1 \(1 images\), 3 \(4 images\)"):
        open_inputs(own(source))
    assert not Path("outputs").exists()
    with pytest.raises(ValueError, match="name a folder beside it"):
        open_inputs(replace(own(source), output_dir=source / "outputs"))
    assert len(open_inputs(own(source, label="all")).samples) == 5


def test_deep_images_are_8_bit_after_the_import_and_their_window_is_recorded_with_a_run() -> None:
    source = write_pairs(Path("photos"), "images/{}.tif", count=8)
    for number in range(8):
        grey = np.random.default_rng(number).integers(1000, 3000, SIZE).astype(np.uint16)
        save(source / f"images/{number}.tif", grey)
    for bits, window in ((None, [1002, 2997]), (12, [0, 4095])):
        inputs = open_inputs(own(source, bit_depth=bits))
        assert inputs.grey_levels == {"data set": pytest.approx(window, abs=3)}
        assert all(sample.grey is None for sample in inputs.samples)
        (line,) = (line for line in check_data(own(source, bit_depth=bits), RegionConfig()).details.split("\n")[1:2])
        assert line.startswith("grey above 8 bit, imported as 8 bit: black was ")
    run = Path("outputs/run")
    assert describe_run(Run(run, REWARD_RUN), inputs, {})["inputs"]["grey_levels"] == {"data set": [0, 4095]}
