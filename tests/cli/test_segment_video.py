"""`sa2va-rl segment --video`: what is printed and written, what is refused before a model is loaded, and a kill."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.atomic_io import read_json
from rl_reward_network.cli import segment
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.segment import maker, sequence
from tests.conftest import smooth_image, tube_image
from tests.data_import.sources import SECRET, write_dicom
from tests.data_import.test_sequences import levels, write_folder, write_video


def segmented(capsys: pytest.CaptureFixture[str], *paths: Path, **flags: Any) -> list[str]:
    segment.main(segment.Args(paths, device="cpu", video=True, **flags))
    return capsys.readouterr().out.strip().splitlines()


def tubes(count: int) -> list[np.ndarray]:
    return [np.roll(tube_image(64, 0)[0], 2 * number, axis=1) for number in range(count)]


def test_a_folder_a_dicom_and_a_video_are_segmented(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, video = write_folder(tmp_path / "run", tubes(3)), write_video(tmp_path / "clip.avi", tubes(4))
    dicom = write_dicom(tmp_path / "scan.dcm", np.stack([frame[..., 0] * 16 for frame in tubes(2)]))
    network = RewardNetwork(RewardNetworkConfig(channels=(4,), packing=2, members=2))
    network.save_pretrained(tmp_path / "net")
    lines = segmented(capsys, folder, video, dicom, output=tmp_path / "out", reward_net=tmp_path / "net")
    assert lines[0].startswith("scan: grey of more than 8 bit, black is 0, white is ")
    assert [line for line in lines if line.startswith(("run", "clip", "scan: 2"))] == [
        "run: 3 frames; the model saw [2]",
        "clip: 4 frames; the model saw [3]",
        "scan: 2 frames; the model saw [2]",
    ]
    assert sum(line.startswith("predicted Dice 0.") for line in lines) == 3
    folders = [tmp_path / "out" / f"{name}_segmented" for name in ("run", "clip", "scan")]
    assert lines[-1] == "written: " + " ".join(map(str, folders))
    assert [len(list((place / "masks").iterdir())) for place in folders] == [3, 4, 2]
    assert all((place / "strip.png").stat().st_size for place in folders)
    written = b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert SECRET.encode() not in written
    assert SECRET not in "".join(lines)


def test_the_dice_of_several_sequences_has_an_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_folder(tmp_path / name, tubes(2)) for name in ("a", "b")]
    for name, frames in (("a", (1, 2)), ("b", (2,))):
        (tmp_path / "truth" / name).mkdir(parents=True)
        for frame in frames:
            mask = np.arange(64) < 10 * frame
            Image.fromarray(np.repeat(mask[None], 64, axis=0)).save(tmp_path / "truth" / name / f"f{frame}.png")
    lines = segmented(capsys, *runs, truth=tmp_path / "truth")
    dice = [read_json(tmp_path / f"{name}_segmented" / "sequence.json")["dice"] for name in ("a", "b")]
    truths = [line for line in lines if line.startswith("truth:")]
    assert truths[0].startswith(f"truth:  Dice {dice[0]:.3f} on 2 frames; IoU of consecutive true masks 0.500, of the ")
    assert truths[1] == f"truth:  Dice {dice[1]:.3f} on 1 frames"
    assert lines[-3] == f"Dice over 2 sequences: {np.mean(dice):.2f}"
    assert lines[-2].startswith("2 sequences, fewer than 6: there are no intervals")


def test_what_is_wrong_is_said_before_a_model_is_loaded(tmp_path, capsys, monkeypatch):
    monkeypatch.delattr(maker, "load_sa2va_model")
    (tmp_path / "empty").mkdir()
    RewardNetwork(RewardNetworkConfig(channels=(4,), packing=2, members=1)).save_pretrained(tmp_path / "net")
    good = write_folder(tmp_path / "good", levels(2))
    mixed = write_folder(tmp_path / "mixed", levels(3))
    Image.fromarray(levels(1, (20, 31))[0]).save(mixed / "f2.png")
    broken = write_folder(tmp_path / "broken", [smooth_image(40, 40, seed) for seed in range(2)])
    (broken / "f2.png").write_bytes((broken / "f2.png").read_bytes()[:400])
    cases: tuple[tuple[Sequence[Path], dict[str, Any], str], ...] = (
        ([], {}, "no sequence"),
        ([good, tmp_path / "none"], {}, r"none: no such file or folder"),
        ([good, tmp_path / "empty"], {}, r"empty: holds no frame"),
        ([good, mixed], {}, r"mixed: f2\.png is 31 x 20"),
        ([good, broken], {}, r"f2\.png: not a readable image"),
        ([good], {"truth": tmp_path / "empty"}, r"--truth .*empty: no mask there"),
        ([good, mixed], {"truth": tmp_path / "empty"}, r"--truth .*empty/good: no mask there"),
        ([good], {"bit_depth": 99}, "bit_depth: got 99"),
        ([good], {"policy": tmp_path}, r"--video and --policy: .*one prompt"),
        ([good], {"soft": True}, r"--video and --soft"),
        ([good], {"model_path": str(tmp_path / "net")}, r"net: --video needs one Sa2VA .* this is a plain segmenter"),
        ([good], {"max_tiles": 2}, r"--video and --max_tiles"),
    )
    for paths, flags, message in cases:
        with pytest.raises(ValueError, match=message):
            segmented(capsys, *paths, **flags)
    runs = [write_folder(tmp_path / patient / "run", levels(2)) for patient in ("a", "b")]
    with pytest.raises(ValueError, match=r"--truth .*: sequences of one name.*; segment each by itself"):
        segmented(capsys, *runs, truth=tmp_path / "truth")
    for flag in ("sam2_memory", "truth"):
        with pytest.raises(ValueError, match=f"--{flag}: it is for sequences; add --video"):
            segment.main(segment.Args((tmp_path,), **{flag: tmp_path}))  # type: ignore[arg-type]
    assert not list(tmp_path.glob("*_segmented"))


def test_a_killed_run_leaves_whole_masks_and_is_continued(tmp_path, capsys, monkeypatch):
    run, masks = write_folder(tmp_path / "run", tubes(30)), tmp_path / "run_segmented" / "masks"
    command = [sys.executable, "-m", "rl_reward_network.cli", "segment", str(run), "--video", "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while process.poll() is None and not (masks / "0003.png").exists():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was still working"
    left = {path.name: np.asarray(Image.open(path)) for path in masks.glob("[0-9]*.png")}
    assert 3 <= len(left) < 30
    assert {mask.shape for mask in left.values()} == {(64, 64)}
    assert {path.name for path in masks.parent.iterdir()} == {"masks"}

    computed: list[int] = []
    real = sequence.save_mask
    monkeypatch.setattr(sequence, "save_mask", lambda path, *rest: computed.append(1) or real(path, *rest))
    segmented(capsys, run)
    assert len(computed) == 30 - len(left)
    assert sorted(path.name for path in masks.glob("[0-9]*.png")) == [f"{number:04d}.png" for number in range(1, 31)]
    for name, mask in left.items():
        np.testing.assert_array_equal(np.asarray(Image.open(masks / name)), mask)
