"""What fine-tuning cost elsewhere: gIoU, cIoU, N-acc. and T-acc. by hand, equal texts, and the verdict."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.atomic_io import read_json
from rl_reward_network.cli import evaluate as evaluate_command
from rl_reward_network.data.masks import to_rle
from rl_reward_network.data.referring import IGNORE, Question
from rl_reward_network.grpo.general import item_of, run_general_evaluation, scored, totals_of
from rl_reward_network.grpo.measure import Measured
from tests.conftest import tube_image
from tests.grpo.test_evaluate import copied_run


@pytest.fixture
def asked(tmp_path: Path) -> list[Question]:
    """Masks of one row of ten pixels: five true, of which two are ignored below; none; none; all."""
    Image.new("RGB", (10, 1)).save(tmp_path / "image.png")
    rows = [[1, 1, 1, IGNORE, IGNORE, 0, 0, 0, 0, 0], [0] * 10, [0] * 10, [1] * 10]
    truths = [np.array([row], np.uint8) for row in rows]
    return [Question(tmp_path / "image.png", "q", lambda image, truth=truth: truth) for truth in truths]


def answered(*rows: list[int] | None) -> Measured:
    masks = [None if row is None else to_rle(np.array([row], bool)) for row in rows]
    return Measured({}, [], masks, masks, np.zeros((len(rows), 2), np.int64))


def test_masks_are_scored_as_lisa_and_grefcoco_do(asked):
    predicted = [0, 1, 1, 1, 0, 1, 0, 0, 0, 0], [0] * 10, [1, 1, 0, 0, 0, 0, 0, 0, 0, 0], None
    measured = scored(answered(*predicted), asked)
    assert measured.values["iou"].tolist() == [2 / 4, 1, 0, 0], "two empty masks have 1; ignored pixels count nowhere"
    assert measured.overlap.tolist() == [[2, 4], [0, 0], [0, 2], [0, 10]]
    totals = totals_of(np.array([True, False, False, True]), measured)
    assert totals == {"cIoU": 2 / 16, "N-acc.": 1 / 2, "T-acc.": 1 / 2}
    one = scored(answered(predicted[0]), asked[:1])
    assert totals_of(np.array([True]), one).keys() == {"cIoU"}, "none is without object"


def test_items_have_their_image_as_group_and_no_ignored_pixels(asked):
    first, second = (item_of(one, number) for number, one in enumerate(asked[:2]))
    assert first.sample_id != second.sample_id, "though they ask in equal words"
    assert first.group_id == second.group_id
    assert first.load()[1].sum() == 3
    assert str(asked[0].image) not in first.group_id


def test_both_models_of_a_run_are_asked_and_the_verdict_says_what_was_forgotten(grpo_run, tmp_path, capsys):
    entries: list[dict[str, Any]] = []
    for seed in range(3):
        image, mask = tube_image(64, seed)
        Image.fromarray(image).save(tmp_path / f"{seed}.png")
        entries += [{"image": f"{seed}.png", "question": "Please segment the red circle.", "mask": to_rle(mask > 0)}]
    entries += [{"image": "0.png", "question": "What is this?"}, {"image": "1.png", "question": "And this?"}]
    (tmp_path / "own.json").write_text(json.dumps(entries))
    grpo_run = copied_run(grpo_run, tmp_path)
    evaluate_command.main(evaluate_command.Args((str(grpo_run),), general=(tmp_path / "own.json",), gpu=-1))
    printed = " ".join(capsys.readouterr().out.split())
    saved = read_json(grpo_run / "evaluation_general" / "eval.json")
    assert saved["items"] == 3
    assert saved["totals"].keys() >= {"cIoU", "equal texts"}
    assert saved["totals"]["equal texts"]["before"] == 1
    assert saved["totals"]["equal texts"]["after"] in (0, 0.5, 1)
    assert saved["verdict"]["sentence"].startswith("Whether it forgot cannot be told: Cannot tell: IoU")
    assert "Whether it forgot cannot be told" in printed
    assert "evaluation_general/report.html" in printed
    result, report = run_general_evaluation(grpo_run / "final_model", [tmp_path / "own.json"], gpu=-1, items=2)
    assert report.parent.name == "evaluation_2_general"
    assert len(result.results.ids) == 2


def test_what_does_not_go_with_other_data_is_refused(grpo_run, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "own.json").write_text(json.dumps([{"image": "a.png", "question": "What is this?"}]))
    general = (tmp_path / "own.json",)
    with pytest.raises(ValueError, match="no question has a mask"):
        run_general_evaluation(grpo_run / "final_model", general, gpu=-1)
    for flags, words in (
        ({"data_root": tmp_path}, "--data_root is not for --general"),
        ({"predictions": (tmp_path,), "model_path": ()}, "--general is not for --predictions"),
    ):
        named: dict[str, Any] = {"model_path": (str(grpo_run),), **flags}
        with pytest.raises(ValueError, match=words):
            evaluate_command.main(evaluate_command.Args(general=general, **named))
