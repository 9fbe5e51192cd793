"""Scores of predicted masks: numbers by hand, paired differences, and images without a prediction."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rl_reward_network.cli import evaluate
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.segment.score import score_predictions
from tests.data_import.sources import SIZE, as_255, save, truth
from tests.report.html_page import Page
from tests.segment.test_predictions import NAMES, write_data

LABELLED = NAMES[:-1]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, true masks as predictions, and their upper halves, of which the first is empty."""
    root = tmp_path_factory.mktemp("scored")
    write_data(root / "data")
    for number, name in enumerate(LABELLED):
        half = truth(number)
        half[6:] = False
        save(root / f"true/{name}_mask.png", as_255(truth(number)))
        save(root / f"half/{name}.png", as_255(half & (number > 0)))
    return root


def test_two_folders_are_compared_image_by_image(folders: Path, tmp_path: Path) -> None:
    sources, data = [folders / "true", folders / "half"], RunConfig(data_root=folders / "data")
    scores, report = score_predictions(sources, data, "all", False, tmp_path, show_names=True)
    first, second = scores.results.rows
    areas = [truth(number).sum() for number in range(6)]
    upper = [truth(number)[:6].sum() for number in range(6)]
    expected = [0, *(2 * up / (up + area) for up, area in zip(upper[1:], areas[1:], strict=True))]
    np.testing.assert_allclose(second.values["dice"], expected)
    assert first.values["dice"].tolist() == [1] * 6
    assert second.values["failure"].tolist() == [1, 0, 0, 0, 0, 0]
    assert scores.change(second, "dice").mean == pytest.approx(np.mean(expected) - 1)
    assert scores.verdicts[0].label == scores.word(second) == "worse"
    assert scores.verdicts[0].sentence.startswith("Worse: half - true, Dice -0.")
    saved = json.loads((tmp_path / "eval.json").read_text())
    assert saved["rows"][1]["verdict"] == "worse"
    assert saved["rows"][1]["means"]["failure"]["mean"] == pytest.approx(1 / 6)
    lines = list(csv.DictReader((tmp_path / "predictions_eval.csv").open()))
    assert [line["sample_id"] for line in lines] == [f"{name}.png" for name in LABELLED] * 2
    assert float(lines[7]["dice"]) == pytest.approx(expected[1], abs=1e-6)
    page = Page(report.read_text())
    assert page.text.index("case_0.png: Dice 0.000") < page.text.index("case_5.png: Dice"), "the worst first"
    assert "errors of half" in page.text


def test_one_folder_has_its_dice_and_failures(folders: Path, tmp_path: Path) -> None:
    scores, report = score_predictions(
        [folders / "half"], RunConfig(data_root=folders / "data"), "all", False, tmp_path
    )
    assert scores.verdicts[0].sentence.endswith("on 6 images of 6 patients; 1 of them below 0.1.")
    assert [line[0] for line in scores.table().lines][:2] == ["Dice", "failure rate"]
    assert "case_0" not in report.read_text(), "names are hidden unless --show_names"


def test_dots_in_names_of_folders_are_kept(folders: Path, tmp_path: Path) -> None:
    for name in ("masks.v1", "masks.v2"):
        shutil.copytree(folders / "true", tmp_path / name)
    sources = [tmp_path / "masks.v1", tmp_path / "masks.v2"]
    scores, _ = score_predictions(sources, RunConfig(data_root=folders / "data"), "all", False, tmp_path / "out")
    assert [row.name for row in scores.results.rows] == ["masks.v1", "masks.v2"]


def test_a_missing_prediction_is_an_error_with_its_remedies(folders: Path, tmp_path: Path) -> None:
    data, few = RunConfig(data_root=folders / "data"), tmp_path / "few"
    for name in LABELLED[1:3]:
        save(few / f"{name}.png", as_255(np.ones(SIZE, bool)))
    with pytest.raises(ValueError, match=r"4 of 6 images have no prediction \(case_0.png, case_3.png, .* and 1 more\)"):
        score_predictions([few], data, "all", False, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    scores, _ = score_predictions([folders / "true", few], data, "all", True, tmp_path / "out")
    assert len(scores.results.ids) == 2
    assert "4 of 6 images have no prediction and are left out." in scores.notes[0]
    assert any("no verdict is possible" in note for note in scores.notes)


def test_splits_share_no_image_and_are_all_of_them(folders: Path, tmp_path: Path) -> None:
    found = []
    for split in ("train", "val", "test"):
        scores, _ = score_predictions([folders / "true"], RunConfig(data_root=folders / "data"), split, False, tmp_path)
        found += scores.results.ids
    assert len(found) == len(set(found)) == 6


def test_one_mask_an_image_and_different_folders(folders: Path, tmp_path: Path) -> None:
    data = RunConfig(data_root=folders / "data")
    with pytest.raises(ValueError, match="a folder is given twice"):
        score_predictions([folders / "true"] * 2, data, "all", False, tmp_path)
    records = json.loads((folders / "data/annotations.json").read_text())
    other = write_data(tmp_path / "data")
    records[0]["text"] = ["vessel", "stent"]
    records[0]["mask_png"] = [records[0]["mask_png"]] * 2
    (other / "annotations.json").write_text(json.dumps(records))
    with pytest.raises(ValueError, match=r"2 phrases \(stent, vessel\), but a folder has one mask"):
        score_predictions([folders / "true"], replace(data, data_root=other), "all", False, tmp_path)


def test_the_command_prints_table_verdict_and_report(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = folders / "true", folders / "half"
    evaluate.main(evaluate.Args(predictions=sources, data_root=folders / "data", output=tmp_path))
    printed = capsys.readouterr().out
    assert "failure rate" in printed
    assert "Worse: half - true" in printed
    assert f"report: {tmp_path / 'report.html'}" in printed


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (evaluate.Args(), "give either --model_path"),
        (evaluate.Args(model_path=("a",), predictions=(Path("b"),)), "give either --model_path"),
        (evaluate.Args(predictions=(Path("b"),)), "give --data_root"),
        (evaluate.Args(predictions=(Path("b"),), images=3), "--images is not for --predictions"),
        (evaluate.Args(model_path=("a",), only_predicted=True), "--only_predicted is not for --model_path"),
        (evaluate.Args(model_path=("a",), split="val"), "--split val: a run is evaluated on test"),
    ],
)
def test_flags_of_runs_and_of_predictions_are_not_mixed(args: evaluate.Args, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate.main(args)
