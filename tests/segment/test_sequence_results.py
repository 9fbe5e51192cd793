"""The table, the animation and the predicted numbers of masks on disk."""

import csv
import os
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.report.overlays import GREEN, ORANGE
from rl_reward_network.rewards.learned import ImageScorer
from rl_reward_network.segment.sequence_check import CheckedSequence, check_sequence
from rl_reward_network.segment.sequence_files import SequenceTarget, write_sequence_mask
from rl_reward_network.segment.sequence_results import write_results
from tests.data_import.test_sequences import levels, write_folder


@pytest.fixture
def checked(tmp_path: Path) -> CheckedSequence:
    """Three frames of 40 x 60: the mask is the left half, a quarter, nothing; the truth of frame 1 the upper half."""
    target = SequenceTarget(write_folder(tmp_path / "run", levels(3, (40, 60))), tmp_path / "out")
    for index, width in enumerate((30, 15, 0)):
        mask = np.zeros((40, 60), dtype=bool)
        mask[:, :width] = True
        write_sequence_mask(target, index, mask, "the vessel", "key")
    truth = np.zeros((40, 60), dtype=np.uint8)
    truth[:20] = 255
    (tmp_path / "truth").mkdir()
    Image.fromarray(truth).save(tmp_path / "truth" / "f1.png")
    return check_sequence(target, "the vessel", truth=tmp_path / "truth")


def test_numbers_of_each_frame_are_written(checked: CheckedSequence) -> None:
    numbers = write_results(checked, None)
    with checked.target.results[1].open() as file:
        rows = list(csv.DictReader(file))
    assert [row["frame"] for row in rows] == ["f1.png", "f2.png", "f3.png"]
    assert [row["number"] for row in rows] == ["1", "2", "3"]
    assert [float(row["share"]) for row in rows] == [0.5, 0.25, 0.0]
    assert [row["dice"] for row in rows] == ["0.5", "", ""]
    assert [row["iou_before"] for row in rows] == ["", "0.5", "0.0"]
    assert numbers.dice == [0.5]
    assert numbers.summary["stability"] == 0.25
    assert "predicted_dice" not in numbers.summary


def test_a_frame_whose_name_is_no_utf8_has_a_row(checked: CheckedSequence) -> None:
    latin = os.fsdecode("blätt.png".encode("latin-1"))
    frames = replace(checked.frames, names=(latin, "f2.png", "f3.png"))
    write_results(replace(checked, frames=frames), None)
    assert r"1,bl\udce4tt.png,0.5," in checked.target.results[1].read_text(encoding="utf-8")


def test_the_animation_shows_mask_and_truth(checked: CheckedSequence) -> None:
    write_results(checked, None)
    video = cv2.VideoCapture(str(checked.target.results[0]))
    # JPEG halves the resolution of colours: lines of one pixel are paler
    frames = [video.read()[1][..., ::-1].astype(int) for _ in range(3)]
    assert not video.read()[0]
    assert np.abs(frames[0][30, 29:32] - ORANGE).sum(axis=-1).min() < 180, "right border of the mask"
    assert np.abs(frames[0][19:22, 50] - GREEN).sum(axis=-1).min() < 180, "lower border of the truth"
    assert np.abs(frames[2] - (20, 0, 0)).max() < 12, "nothing is drawn"


def test_a_reward_network_predicts_each_mask(checked: CheckedSequence) -> None:
    network = RewardNetwork(RewardNetworkConfig(channels=(4, 4), packing=2, members=2))
    numbers = write_results(checked, network)
    expected = [
        ImageScorer(network, frame).quality(checked.mask(index)[None].astype(np.float32))["dice"][0]
        for index, frame in enumerate(checked.frames.frames())
    ]
    assert numbers.summary["predicted_dice"] == pytest.approx(np.mean(expected))
    with checked.target.results[1].open() as file:
        assert [float(row["predicted_dice"]) for row in csv.DictReader(file)] == pytest.approx(expected)
