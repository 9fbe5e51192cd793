"""Sequences: what is refused before anything is written, what is kept, the masks of small real models, the results."""

import csv
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from rl_reward_network.atomic_io import read_json
from rl_reward_network.data_import.sequences import open_sequence
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.pixels_sa2va import upsample_mask_logits
from rl_reward_network.models.sa2va.video_sa2va import SequenceAnswer, answer_sequence, masks_with_memory
from rl_reward_network.report.overlays import AFTER, TRUTH
from rl_reward_network.rewards.learned import ImageScorer
from rl_reward_network.segment import sequence
from rl_reward_network.segment.files import prompt_of, save_mask, targets, write_mask
from rl_reward_network.segment.maker import MaskMaker, load_mask_maker
from rl_reward_network.segment.sequence import (
    RECORDING_KEY,
    RUN_KEY,
    CheckedSequence,
    FrameMeasures,
    SequenceMaker,
    SequenceTarget,
    check_sequence,
    check_sequence_free,
    measure_frame,
    missing_masks,
    sequence_targets,
    summarise_frames,
    truth_files,
    write_results,
)
from tests.conftest import tube_image
from tests.data_import.test_sequences import levels, write_folder, write_video

PROMPT = PROMPTS[0]
MASK = np.eye(4, dtype=bool)


def target_of(folder: Path) -> SequenceTarget:
    return SequenceTarget(folder, folder.with_name(f"{folder.name}_segmented"))


def write_frame(target: SequenceTarget, index: int, mask: np.ndarray, prompt: str = "this", key: str = "key") -> None:
    save_mask(target.mask(index), mask, prompt, {RUN_KEY: key, RECORDING_KEY: target.recording})


# ---- what is checked, and what is never replaced ----


def break_nothing(folder: Path) -> None:
    (folder / "f0.png").mkdir()
    (target,) = targets([folder / "f1.png"], None, None)
    write_mask(target, levels(1)[0], np.zeros((20, 30), dtype=bool), "the vessel")


def shorten(name: str, size: int) -> Any:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (break_nothing, None),
        *((shorten("f2.png", size), r"f2\.png: not a readable image") for size in (0, 60)),
        (lambda folder: Image.new("1", (20_000, 20_000)).save(folder / "f9.png"), r"f9\.png: .*at most 178 million"),
        (lambda folder: (folder / "f9.png").symlink_to("nowhere.png"), r"f9\.png: a link whose target is missing"),
    ],
)
def test_every_frame_is_decoded_before_anything_is_written(tmp_path: Path, change: Any, message: str | None) -> None:
    folder = write_folder(tmp_path / "run", levels(3))
    change(folder)
    if message is None:
        assert len(check_sequence(target_of(folder), "the vessel").frames) == 3
        return
    with pytest.raises(ValueError, match=message):
        check_sequence(target_of(folder), "the vessel")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_each_sequence_has_a_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    folder, file = sequence_targets([tmp_path / "run", tmp_path / "scan.dcm"], None, None)
    assert (folder.folder, file.folder) == (tmp_path / "run_segmented", tmp_path / "scan_segmented")
    assert folder.mask(0) == tmp_path / "run_segmented" / "masks" / "0001.png"
    (named,) = sequence_targets([tmp_path / "run"], tmp_path / "out", "The catheter!")
    assert named.folder == tmp_path / "out" / "run_the-catheter_segmented"
    series = sequence_targets([tmp_path / "1.2.840.1", tmp_path / "1.2.840.2", tmp_path / "run" / ".."], None, None)
    assert [place.folder.name for place in series[:2]] == ["1.2.840.1_segmented", "1.2.840.2_segmented"]
    assert series[2].folder == tmp_path.with_name(f"{tmp_path.name}_segmented")
    with pytest.raises(ValueError, match=r"run, .*run\.avi: .*one folder, .*; give each an --output"):
        sequence_targets([tmp_path / "run", tmp_path / "run.avi"], None, None)
    with pytest.raises(ValueError, match=r"mask\.png: with --video, give a folder"):
        sequence_targets([tmp_path / "run"], tmp_path / "mask.png", None)
    with pytest.raises(ValueError, match="no sequence"):
        sequence_targets([], None, None)


def test_masks_of_the_same_run_are_kept(tmp_path: Path) -> None:
    target = target_of(tmp_path / "run")
    assert missing_masks(target, 3, "key") == [0, 1, 2]
    for index, key in enumerate(("key", "other", "key", "key")):
        write_frame(target, index, MASK, key=key)
    for path in target.results:
        path.touch()
    target.mask(1).with_name(".0002_x8d.png").write_bytes(b"a killed run")
    assert prompt_of(target.mask(0)) == "this"
    np.testing.assert_array_equal(np.asarray(Image.open(target.mask(0))), 255 * MASK)
    assert missing_masks(target, 4, "key") == [1]
    assert not any(path.exists() for path in (*target.results, target.mask(1))), "results of another run"
    write_frame(target, 1, MASK)
    assert missing_masks(target, 4, "key") == []


def test_only_masks_of_this_prompt_are_replaced(tmp_path: Path) -> None:
    target = target_of(tmp_path / "run")
    check_sequence_free(target, "this")
    write_frame(target, 0, MASK)
    target.results[0].touch()
    check_sequence_free(target, "this")
    with pytest.raises(ValueError, match=r"0001\.png: .*another prompt, 'this'; .*--output"):
        check_sequence_free(target, "that")
    with pytest.raises(ValueError, match=r"0001\.png: .*another sequence of this name; .*--output"):
        check_sequence_free(SequenceTarget(target.source.with_suffix(".avi"), target.folder), "this")
    Image.fromarray(MASK).save(target.mask(1))
    with pytest.raises(ValueError, match=r"0002\.png: .*not written by segment"):
        check_sequence_free(target, "this")
    for path in target.masks:
        path.unlink()
    with pytest.raises(ValueError, match=r"frames\.csv: .*not written by segment"):
        check_sequence_free(target, "this")


def write_truth(folder: Path, *names: str, size: tuple[int, int] = (20, 30)) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        Image.fromarray(np.full(size, 255, dtype=np.uint8)).save(folder / name)
    return folder


def test_true_masks_are_named_like_the_frames(tmp_path: Path) -> None:
    frames = open_sequence(write_folder(tmp_path / "run", levels(12)))
    truth = write_truth(tmp_path / "truth", "f2.png", "f11.png")
    (truth / "._f2.png").write_bytes(b"what macOS leaves beside f2.png on a USB stick")
    assert truth_files(frames, truth) == {1: truth / "f2.png", 10: truth / "f11.png"}
    video = open_sequence(write_video(tmp_path / "run.avi", levels(12)))
    numbered = write_truth(tmp_path / "numbered", "run2_0001.png", "12.png")
    assert truth_files(video, numbered) == {11: numbered / "12.png", 0: numbered / "run2_0001.png"}


@pytest.mark.parametrize(
    ("names", "size", "message"),
    [
        ((), (20, 30), r"--truth .*truth: no mask there"),
        (("f13.png",), (20, 30), r"f13\.png: no frame of run is named so"),
        (("f1.bmp", "f1.png"), (20, 30), r"f1\.png: f1\.bmp is a mask of the same frame"),
        (("f1.png",), (21, 30), r"f1\.png: mask is 30 x 21"),
    ],
)
def test_true_masks_that_do_not_fit_are_refused(tmp_path, names, size, message):
    folder = write_folder(tmp_path / "run", levels(3))
    with pytest.raises(ValueError, match=message):
        truth_files(open_sequence(folder), write_truth(tmp_path / "truth", *names, size=size))
    Image.fromarray(levels(1)[0]).save(folder / "f1.bmp")
    with pytest.raises(ValueError, match=r"no mask there|run: 2 frames are named f1"):
        truth_files(open_sequence(folder), tmp_path / "truth")


# ---- the masks of small real models ----


@pytest.fixture(scope="module")
def nano() -> SequenceMaker:
    return SequenceMaker(load_mask_maker("sa2va-nano", PROMPT, device="cpu"))


@pytest.fixture
def tiny(tiny_video_model: Any, tiny_processor: Any) -> SequenceMaker:
    return SequenceMaker(MaskMaker(tiny_video_model, tiny_processor, 16, PROMPT, {}, None, None), True)


def moving(count: int) -> list[np.ndarray]:
    image = np.concatenate([tube_image(48, 0)[0], tube_image(48, 1)[0][:, :8]], axis=1)
    return [np.roll(image, 3 * number, axis=1) for number in range(count)]


def checked(folder: Path, frames: list[np.ndarray], **settings: Any) -> CheckedSequence:
    path = folder / "run"
    if not path.exists():
        write_folder(path, frames)
    return check_sequence(SequenceTarget(path, folder / "run_segmented"), PROMPT, **settings)


def masks_of(run: CheckedSequence) -> np.ndarray:
    return np.stack([np.asarray(Image.open(path)) for path in run.target.masks])


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Count the calls of a function of the model, by the number of frames."""
    calls: list[int] = []
    real = getattr(sequence, name)

    def count(model: Any, frames: Iterable[Any], *rest: Any) -> Any:
        seen = list(frames)
        calls.append(len(seen))
        return real(model, seen, *rest)

    monkeypatch.setattr(sequence, name, count)
    return calls


def test_each_mask_is_that_of_the_frame_with_the_answer_about_the_middle(tmp_path: Path, nano: SequenceMaker) -> None:
    frames = moving(4)
    run = checked(tmp_path, frames)
    done = nano(run)
    model, processor = load_sa2va_model("sa2va-nano")
    answer = answer_sequence(model, [frames[2]], PROMPT, processor)
    for index, mask in enumerate(masks_of(run)):
        features = model.get_sam_features(processor.sam_pixel_values(frames[index]))
        with torch.no_grad():
            logits = model.decode_masks(features, answer.seg_embeddings).mask_logits
        logits = torch.nn.functional.interpolate(logits[:, None], (processor.sam_image_size,) * 2, mode="bilinear")
        expected = torch.nn.functional.interpolate(logits, (48, 56), mode="bilinear")[0, 0] > 0
        np.testing.assert_array_equal(mask, 255 * expected.numpy())
    assert read_json(run.target.results[2]) == done.summary
    assert done.summary["key_frames"] == [3]
    assert (done.summary["segs"], done.summary["sam2_memory"], done.summary["frames"]) == (1, False, 4)
    assert done.summary["share"] == pytest.approx((masks_of(run) > 0).mean())
    assert {path.name for path in run.target.folder.iterdir()} == {
        *("masks", "frames.csv", "strip.png", "sequence.json")
    }


def test_memory_is_that_of_the_model(tmp_path: Path, tiny: SequenceMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, remembered = counted(monkeypatch, "answer_sequence"), counted(monkeypatch, "masks_with_memory")
    run = checked(tmp_path, moving(7))
    done = tiny(run)
    assert (asked, remembered, done.summary["key_frames"]) == ([5], [7], [1, 2, 3, 4, 5])
    with_memory = masks_of(run)
    model, processor = tiny.maker.model, tiny.maker.processor
    answer = answer_sequence(model, moving(7)[:5], PROMPT, processor, 16)
    for logits, mask in zip(
        masks_with_memory(model, moving(7), answer.seg_embeddings, processor), with_memory, strict=True
    ):
        expected = upsample_mask_logits(logits, (48, 56), processor.sam_image_size) > 0
        np.testing.assert_array_equal(mask, 255 * expected.any(dim=0).numpy())

    without = replace(tiny, sam2_memory=False)(checked(tmp_path, []))
    assert (without.summary["sam2_memory"], without.summary["key_frames"]) == (False, [1, 3, 4, 5, 7])
    assert (masks_of(run)[5:] != with_memory[5:]).any()
    tiny(checked(tmp_path, []))
    assert remembered == [7, 7]
    np.testing.assert_array_equal(masks_of(run), with_memory)
    run.target.mask(6).unlink()
    tiny(checked(tmp_path, []))
    assert remembered == [7, 7, 7], "a mask depends on the frames before"
    np.testing.assert_array_equal(masks_of(run), with_memory)


def test_a_second_run_computes_the_missing_masks_alone(tmp_path, nano, monkeypatch):
    segmented = counted(monkeypatch, "masks_without_memory")
    run = checked(tmp_path, moving(5))
    first = nano(run)
    before = masks_of(run)
    for index in (1, 4):
        run.target.mask(index).unlink()
    assert nano(checked(tmp_path, [])).summary == first.summary
    np.testing.assert_array_equal(masks_of(run), before)
    nano(checked(tmp_path, []))
    assert segmented == [5, 2]
    Image.fromarray(moving(5)[0]).save(tmp_path / "run" / "f5.png")
    nano(checked(tmp_path, []))
    assert segmented == [5, 2, 5], "a frame has changed"


def test_no_seg_is_an_error_and_writes_nothing(tmp_path: Path, nano: SequenceMaker) -> None:
    speechless = replace(nano, maker=replace(nano.maker, max_new_tokens=1))
    with pytest.raises(ValueError, match=r"run: no \[SEG\] in the answer .*; there is no mask"):
        speechless(checked(tmp_path, moving(2)))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_memory_needs_a_model_that_has_one(nano: SequenceMaker) -> None:
    with pytest.raises(ValueError, match="SAM 2 has no memory"):
        replace(nano, sam2_memory=True)


@contextmanager
def growth() -> Iterator[list[int]]:
    """Bytes by which the process grew at most in the block, in a list that is filled at its end."""
    process, done, result = psutil.Process(), Event(), list[int]()
    sizes = [process.memory_info().rss]

    def sample() -> None:
        while not done.wait(0.01):
            sizes.append(process.memory_info().rss)

    thread = Thread(target=sample)
    thread.start()
    yield result
    done.set()
    thread.join()
    result.append(max(sizes) - sizes[0])


def test_memory_does_not_grow_with_1000_frames(tmp_path, nano, monkeypatch):
    """The model is replaced here alone: it would take minutes."""

    def bright(model: Any, frames: Iterable[np.ndarray], *rest: Any) -> Iterator[torch.Tensor]:
        return (torch.from_numpy(frame[None, ..., 0].astype(np.float32)) - 128 for frame in frames)

    monkeypatch.setattr(sequence, "answer_sequence", lambda *_: SequenceAnswer("[SEG]", torch.ones(1, 4)))
    monkeypatch.setattr(sequence, "masks_without_memory", bright)
    monkeypatch.setattr(sequence, "upsample_mask_logits", lambda logits, *size: logits)

    def segment(count: int) -> int:
        frames = (np.full((80, 80, 3), 40 * (number % 5), dtype=np.uint8) for number in range(count))
        path = write_video(tmp_path / f"{count}.avi", frames)
        with growth() as grown:
            done = nano(check_sequence(SequenceTarget(path, tmp_path / str(count)), PROMPT))
        assert done.summary["frames"] == len(list((tmp_path / str(count) / "masks").iterdir())) == count
        assert done.summary["share"] == pytest.approx(0.2)
        return grown[0]

    segment(100)
    assert segment(1000) < 12_000_000, "the frames have 19 MB"


# ---- the table, the strip, the predicted numbers ----


@pytest.fixture
def written(tmp_path: Path) -> CheckedSequence:
    """Three frames of 40 x 60: the mask is the left half, a quarter, nothing; the truth of frame 1 the upper half."""
    target = SequenceTarget(write_folder(tmp_path / "run", levels(3, (40, 60))), tmp_path / "out")
    for index, width in enumerate((30, 15, 0)):
        mask = np.zeros((40, 60), dtype=bool)
        mask[:, :width] = True
        write_frame(target, index, mask, "the vessel")
    truth = np.zeros((40, 60), dtype=np.uint8)
    truth[:20] = 255
    (tmp_path / "truth").mkdir()
    Image.fromarray(truth).save(tmp_path / "truth" / "f1.png")
    return check_sequence(target, "the vessel", truth=tmp_path / "truth")


def columns(first: int, last: int) -> np.ndarray:
    mask = np.zeros((2, 10), dtype=bool)
    mask[:, first:last] = True
    return mask


def test_numbers_of_a_sequence_by_hand() -> None:
    masks = [columns(0, 4), columns(2, 6), columns(2, 6), columns(0, 0), columns(0, 0)]
    truths = [columns(0, 4), columns(0, 6), None, columns(0, 1), columns(0, 0)]
    before = [(None, None), *zip(masks, truths, strict=True)]
    frames = [measure_frame(*row) for row in zip(before[:-1], masks, truths, strict=True)]
    of_truth = pytest.approx(2 * 4 / (4 + 6)), pytest.approx(2 / 6), pytest.approx(4 / 6)
    assert frames[:2] == [FrameMeasures(0.4, 1.0, None, None), FrameMeasures(0.4, *of_truth)]
    assert frames[2] == FrameMeasures(0.4, None, 1.0, None)
    assert frames[3] == FrameMeasures(0.0, 0.0, 0.0, None), "the frame before has no truth"
    assert frames[4] == FrameMeasures(0.0, 1.0, 1.0, 0.0), "empty masks that stay empty are stable"
    assert summarise_frames(frames) == {
        **{"frames": 5, "share": pytest.approx(1.2 / 5), "stability": pytest.approx((1 / 3 + 1 + 0 + 1) / 4)},
        **{"annotated": 4, "dice": pytest.approx((1 + 0.8 + 0 + 1) / 4)},
        **{"true_stability": pytest.approx(1 / 3), "stability_there": pytest.approx(2 / 3)},
    }
    missing = dict.fromkeys(("stability", "dice", "true_stability", "stability_there"))
    assert summarise_frames(frames[2:3]) == missing | {"frames": 1, "share": 0.4, "stability": 1.0, "annotated": 0}
    with pytest.raises(ValueError, match=r"one \(N, H, W\) shape"):
        measure_frame((None, None), columns(0, 1), np.zeros((3, 10), dtype=bool))


def test_numbers_of_each_frame_and_a_strip_are_written(written: CheckedSequence) -> None:
    measures, predicted = write_results(written, None)
    with written.target.results[0].open() as file:
        rows = list(csv.DictReader(file))
    assert [row["frame"] for row in rows] == ["f1.png", "f2.png", "f3.png"]
    assert [row["number"] for row in rows] == ["1", "2", "3"]
    assert [float(row["share"]) for row in rows] == [0.5, 0.25, 0.0]
    assert [row["dice"] for row in rows] == ["0.5", "", ""]
    assert [row["iou_before"] for row in rows] == ["", "0.5", "0.0"]
    assert [frame.dice for frame in measures] == [0.5, None, None]
    assert predicted == []
    strip = np.asarray(Image.open(written.target.results[1]))
    assert strip.shape == (40, 180, 3)
    assert (strip[30, 29:32] == AFTER).all(axis=-1).any(), "right border of the first mask"
    assert (strip[19:22, 50] == TRUTH).all(axis=-1).any(), "lower border of the truth"
    np.testing.assert_array_equal(strip[:, 120:], list(written.frames.frames())[2], "an empty mask draws nothing")


def test_a_frame_whose_name_is_no_utf8_has_a_row(written: CheckedSequence) -> None:
    latin = os.fsdecode("blätt.png".encode("latin-1"))
    frames = replace(written.frames, names=(latin, "f2.png", "f3.png"))
    write_results(replace(written, frames=frames), None)
    assert r"1,bl\udce4tt.png,0.5," in written.target.results[0].read_text(encoding="utf-8")


def test_frames_outside_the_networks_domain_have_no_number(written, monkeypatch, capsys):
    network = RewardNetwork(RewardNetworkConfig(channels=(4, 4), packing=2, members=2))
    _, (usual, _) = write_results(written, network)
    expected = [
        ImageScorer(network, frame).quality(written.mask(index)[None].astype(np.float32))["dice"][0]
        for index, frame in enumerate(written.frames.frames())
    ]
    with written.target.results[0].open() as file:
        assert [float(row["predicted_dice"]) for row in csv.DictReader(file)] == pytest.approx(expected)
    assert usual == pytest.approx(np.mean(expected))
    first = next(iter(written.frames.frames()))
    reason = "outside the reward network's domain: too dark"
    monkeypatch.setattr(RewardNetwork, "outside", lambda _, image, maps: reason if (image == first).all() else None)
    _, (dice, _) = write_results(written, network)
    with written.target.results[0].open() as file:
        numbers = [row["predicted_dice"] for row in csv.DictReader(file)]
    assert numbers[0] == ""
    assert dice == pytest.approx(np.mean(expected[1:])) != usual
    assert f"no Dice is predicted for 1 of {len(numbers)} frames; the first: {reason}" in capsys.readouterr().out
    monkeypatch.setattr(RewardNetwork, "outside", lambda *_: reason)
    assert write_results(written, network)[1] == []
