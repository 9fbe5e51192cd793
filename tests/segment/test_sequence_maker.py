"""Sequences end to end with small real models; only the 2,000 frames have a stand-in for the model."""

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

from rl_reward_network.artefacts import read_json
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.pixels_sa2va import upsample_mask_logits
from rl_reward_network.models.sa2va.video_sa2va import SequenceAnswer, answer_sequence, masks_with_memory
from rl_reward_network.segment import sequence_maker
from rl_reward_network.segment.maker import MaskMaker
from rl_reward_network.segment.sequence_check import CheckedSequence, check_sequence
from rl_reward_network.segment.sequence_files import SequenceTarget
from rl_reward_network.segment.sequence_maker import SequenceMaker, load_sequence_maker
from tests.conftest import tube_image
from tests.data_import.test_sequences import write_folder, write_video

PROMPT = PROMPTS[0]


@pytest.fixture(scope="module")
def nano() -> SequenceMaker:
    """The embedded model, whose SAM 2 has no memory."""
    return load_sequence_maker("sa2va-nano", PROMPT, device="cpu")


@pytest.fixture
def tiny(tiny_video_model: Any, tiny_processor: Any) -> SequenceMaker:
    """A model of random weights whose SAM 2 has a memory."""
    return SequenceMaker(MaskMaker(tiny_video_model, tiny_processor, 16, PROMPT, {}, None, None), "tiny", True, "first")


def moving(count: int) -> list[np.ndarray]:
    """A tube that moves to the right, uint8 (48, 56, 3)."""
    image = np.concatenate([tube_image(48, 0)[0], tube_image(48, 1)[0][:, :8]], axis=1)
    return [np.roll(image, 3 * number, axis=1) for number in range(count)]


def checked(folder: Path, frames: list[np.ndarray], **settings: Any) -> CheckedSequence:
    path = folder / "run"
    if not path.exists():
        write_folder(path, frames)
    return check_sequence(SequenceTarget(path, folder / "run_segmented"), PROMPT, **settings)


def masks_of(sequence: CheckedSequence) -> np.ndarray:
    return np.stack([np.asarray(Image.open(path)) for path in sorted(sequence.target.masks.glob("*.png"))])


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Count the calls of a function of the model, by the number of frames."""
    calls: list[int] = []
    real = getattr(sequence_maker, name)

    def count(model: Any, frames: Iterable[Any], *rest: Any) -> Any:
        seen = list(frames)
        calls.append(len(seen))
        return real(model, seen, *rest)

    monkeypatch.setattr(sequence_maker, name, count)
    return calls


def test_each_mask_is_that_of_the_frame_with_the_answer_about_the_middle(tmp_path: Path, nano: SequenceMaker) -> None:
    frames = moving(4)
    sequence = checked(tmp_path, frames)
    done = nano(sequence)
    model, processor = load_sa2va_model("sa2va-nano")
    answer = answer_sequence(model, [frames[2]], PROMPT, processor)
    for index, mask in enumerate(masks_of(sequence)):
        features = model.get_sam_features(processor.sam_pixel_values(frames[index]))
        with torch.no_grad():
            logits = model.decode_masks(features, answer.seg_embeddings).mask_logits
        logits = torch.nn.functional.interpolate(logits[:, None], (processor.sam_image_size,) * 2, mode="bilinear")
        expected = torch.nn.functional.interpolate(logits, (48, 56), mode="bilinear")[0, 0] > 0
        np.testing.assert_array_equal(mask, 255 * expected.numpy())
    assert read_json(sequence.target.results[2]) == done.summary
    assert done.summary["key_frames"] == [3]
    assert (done.summary["segs"], done.summary["memory"], done.summary["frames"]) == (1, False, 4)
    assert done.summary["share"] == pytest.approx((masks_of(sequence) > 0).mean())
    assert {path.name for path in sequence.target.folder.iterdir()} == {
        *("answers", "masks", "overlay.avi", "frames.csv", "sequence.json")
    }


def test_the_truth_of_some_frames_is_measured(tmp_path: Path, nano: SequenceMaker) -> None:
    sequence = checked(tmp_path, moving(3))
    nano(sequence)
    (tmp_path / "truth").mkdir()
    for number, rolled in ((1, 0), (2, 5)):
        truth = np.roll(masks_of(sequence)[number - 1], rolled, axis=0)
        Image.fromarray(truth).save(tmp_path / "truth" / f"f{number}.png")
    done = nano(checked(tmp_path, [], truth=tmp_path / "truth"))
    shifted, mask = truth > 0, masks_of(sequence)[1] > 0
    second = 2 * (shifted & mask).sum() / (shifted.sum() + mask.sum())
    assert done.dice == [1.0, pytest.approx(second)]
    assert done.summary["dice"] == pytest.approx((1 + second) / 2)
    assert done.summary["annotated"] == 2


def test_memory_is_that_of_the_model_and_the_model_is_asked_once(
    tmp_path: Path, tiny: SequenceMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, remembered = counted(monkeypatch, "answer_sequence"), counted(monkeypatch, "masks_with_memory")
    sequence = checked(tmp_path, moving(7))
    done = tiny(sequence)
    assert (asked, remembered, done.summary["key_frames"]) == ([5], [7], [1, 2, 3, 4, 5])
    with_memory = masks_of(sequence)
    model, processor = tiny.maker.model, tiny.maker.processor
    answer = answer_sequence(model, moving(7)[:5], PROMPT, processor, 16)
    for logits, mask in zip(
        masks_with_memory(model, moving(7), answer.seg_embeddings, processor), with_memory, strict=True
    ):
        expected = upsample_mask_logits(logits, (48, 56), processor.sam_image_size) > 0
        np.testing.assert_array_equal(mask, 255 * expected.any(dim=0).numpy())

    without = replace(tiny, memory=False)(checked(tmp_path, []))
    assert asked == [5], "the answer is read from disk"
    assert without.summary["memory"] is False
    assert (masks_of(sequence)[5:] != with_memory[5:]).any()
    tiny(checked(tmp_path, []))
    assert (asked, remembered) == ([5], [7, 7])
    np.testing.assert_array_equal(masks_of(sequence), with_memory)
    sequence.target.mask(6).unlink()
    tiny(checked(tmp_path, []))
    assert remembered == [7, 7, 7], "a mask depends on the frames before"
    np.testing.assert_array_equal(masks_of(sequence), with_memory)
    replace(tiny, key_frames="uniform")(checked(tmp_path, []))
    assert asked == [5, 5], "about other frames"


def test_a_second_run_computes_the_missing_masks_alone(
    tmp_path: Path, nano: SequenceMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, segmented = counted(monkeypatch, "answer_sequence"), counted(monkeypatch, "masks_without_memory")
    sequence = checked(tmp_path, moving(5))
    first = nano(sequence)
    before = masks_of(sequence)
    for index in (1, 4):
        sequence.target.mask(index).unlink()
    assert nano(checked(tmp_path, [])).summary == first.summary
    np.testing.assert_array_equal(masks_of(sequence), before)
    nano(checked(tmp_path, []))
    assert (asked, segmented) == ([1], [5, 2])
    Image.fromarray(moving(5)[0]).save(tmp_path / "run" / "f5.png")
    nano(checked(tmp_path, []))
    assert segmented == [5, 2, 5], "a frame has changed"


def test_one_frame_is_a_sequence(tmp_path: Path, nano: SequenceMaker) -> None:
    done = nano(checked(tmp_path, moving(1)))
    assert (done.summary["frames"], done.summary["key_frames"], done.summary["stability"]) == (1, [1], None)


def test_no_seg_gives_empty_masks_and_a_warning(tmp_path: Path, nano: SequenceMaker) -> None:
    speechless = replace(nano, maker=replace(nano.maker, max_new_tokens=1))
    with pytest.warns(UserWarning, match=r"run: no \[SEG\] in the answer .*; its masks are empty"):
        done = speechless(checked(tmp_path, moving(2)))
    assert (done.summary["segs"], done.summary["share"], done.summary["stability"]) == (0, 0.0, 1.0)
    assert masks_of(checked(tmp_path, [])).shape == (2, 48, 56)


def test_contrast_chooses_the_frame_with_vessels(tmp_path: Path, nano: SequenceMaker) -> None:
    frames = [np.full((48, 56, 3), 90, dtype=np.uint8)] * 3
    sequence = checked(tmp_path, [*frames, moving(1)[0]], contrast=True)
    assert replace(nano, key_frames="contrast")(sequence).summary["key_frames"] == [4]


def test_memory_needs_a_model_that_has_one() -> None:
    with pytest.raises(ValueError, match="SAM 2 has no memory"):
        load_sequence_maker("sa2va-nano", PROMPT, device="cpu", memory=True)


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


def test_memory_does_not_grow_with_2000_frames(
    tmp_path: Path, nano: SequenceMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is replaced here alone: it would take minutes."""

    def bright(model: Any, frames: Iterable[np.ndarray], *rest: Any) -> Iterator[torch.Tensor]:
        return (torch.from_numpy(frame[None, ..., 0].astype(np.float32)) - 128 for frame in frames)

    monkeypatch.setattr(sequence_maker, "answer_sequence", lambda *_: SequenceAnswer("[SEG]", torch.ones(1, 4)))
    monkeypatch.setattr(sequence_maker, "masks_without_memory", bright)
    monkeypatch.setattr(sequence_maker, "upsample_mask_logits", lambda logits, *size: logits)

    def segment(count: int) -> int:
        frames = (np.full((80, 80, 3), 40 * (number % 5), dtype=np.uint8) for number in range(count))
        path = write_video(tmp_path / f"{count}.avi", frames)
        with growth() as grown:
            done = nano(check_sequence(SequenceTarget(path, tmp_path / str(count)), PROMPT))
        assert done.summary["frames"] == len(list((tmp_path / str(count) / "masks").iterdir())) == count
        assert done.summary["share"] == pytest.approx(0.2)
        return grown[0]

    segment(100)
    assert segment(2000) < 15_000_000, "the frames have 38 MB"
