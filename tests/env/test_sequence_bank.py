"""One answer per sequence, phrase and model: computed once, and found again by another process."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rl_reward_network.env.sequence_bank import SequenceBank, StoredAnswer

FRAMES = [np.full((4, 5, 3), value, dtype=np.uint8) for value in range(3)]


def test_an_answer_is_computed_once(tmp_path: Path) -> None:
    calls = []

    def ask(frames: Sequence[np.ndarray], phrase: str) -> StoredAnswer:
        calls.append(phrase)
        return StoredAnswer(f"Gefäß {phrase} [SEG]", np.arange(6).reshape(2, 3) / 7)

    bank = SequenceBank(tmp_path / "answers", ask, "weights")
    first = bank.answer(FRAMES, "the vessel")
    again = SequenceBank(tmp_path / "answers", ask, "weights").answer([frame.copy() for frame in FRAMES], "the vessel")
    assert calls == ["the vessel"]
    assert again.answer == first.answer == "Gefäß the vessel [SEG]"
    assert again.seg_embeddings.dtype == np.float32
    np.testing.assert_array_equal(again.seg_embeddings, first.seg_embeddings)
    for other, frames, phrase in (
        ("weights", FRAMES, "the catheter"),
        ("weights", FRAMES[:2], "the vessel"),
        ("weights", FRAMES[::-1], "the vessel"),
        ("other weights", FRAMES, "the vessel"),
    ):
        SequenceBank(tmp_path / "answers", ask, other).answer(frames, phrase)
    assert len(calls) == len(list((tmp_path / "answers").iterdir())) == 5


def test_nothing_is_an_answer_too_and_a_damaged_file_is_computed_again(tmp_path: Path) -> None:
    bank = SequenceBank(tmp_path, lambda frames, phrase: StoredAnswer("", np.zeros((0, 3))), "weights")
    for _ in range(2):
        found = bank.answer(FRAMES, "nothing")
        assert (found.answer, found.seg_embeddings.shape) == ("", (0, 3))
    assert (bank.computed, bank.reused) == (1, 1)
    bank.path(FRAMES, "nothing").write_bytes(b"cut off")
    with pytest.warns(UserWarning, match="the model is asked again"):
        bank.answer(FRAMES, "nothing")
    assert (bank.computed, bank.reused) == (2, 1)


def test_what_cannot_be_an_answer_is_refused(tmp_path: Path) -> None:
    for wrong in (np.ones(3), np.full((1, 3), np.nan)):
        bank = SequenceBank(tmp_path, lambda frames, phrase: StoredAnswer("x", wrong), "weights")  # noqa: B023
        with pytest.raises(ValueError, match=r"expected finite \(K, C\)"):
            bank.answer(FRAMES, "x")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="fingerprint"):
        SequenceBank(tmp_path, bank.ask, "")
