import warnings
from contextlib import nullcontext

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rl_reward_network.env.mask_bank import NO_MASK_LOGIT, FrozenAnswer, MaskBank

PROMPTS = ("a vessel", "a catheter", "a rib")
IMAGES = [np.full((6, 5, 3), level, np.uint8) for level in (10, 20, 30)]


class Segmenter:
    """Answers with the length of the prompt plus the grey level, and records its calls."""

    def __init__(self, fails_at=None):
        self.calls, self.fails_at = [], fails_at

    def __call__(self, image, prompts):
        if image[0, 0, 0] == self.fails_at:
            raise RuntimeError("out of memory")
        self.calls.append((int(image[0, 0, 0]), list(prompts)))
        masks = np.stack([np.full((4, 4), len(prompt) + image[0, 0, 0] / 3, np.float32) for prompt in prompts])
        return FrozenAnswer(masks, np.array([image[0, 0, 0] / 7, -1], np.float32))


def bank(folder, prompts=PROMPTS, fingerprint="model-1", fails_at=None):
    segmenter = Segmenter(fails_at)
    return MaskBank(folder, segmenter, fingerprint, prompts), segmenter


def counts(of):
    return of.computed, of.reused, of.encoded


def test_each_pair_is_computed_once_and_all_prompts_in_one_call(tmp_path):
    first, segmenter = bank(tmp_path)
    first.build(IMAGES)
    answers = [first.answer(image) for image in IMAGES]
    assert segmenter.calls == [(level, list(PROMPTS)) for level in (10, 20, 30)]
    assert counts(first) == (9, 0, 3)
    second, segmenter = bank(tmp_path)
    for image, expected in zip(IMAGES, answers, strict=True):
        for found, stored in zip(second.answer(image), expected, strict=True):
            np.testing.assert_array_equal(found, stored)
    assert (segmenter.calls, counts(second)) == ([], (0, 9, 0))
    assert second.counts() == "masks computed by Sa2VA: 0, read from the bank: 9; images encoded: 0"
    np.testing.assert_array_equal(answers[1].vision_features, np.array([20 / 7, -1], np.float32))


def test_masks_are_rounded_to_half_precision_in_the_order_of_the_prompts(tmp_path):
    mine, segmenter = bank(tmp_path)
    expected = segmenter(IMAGES[0], PROMPTS).mask_logits
    logits = mine.answer(IMAGES[0]).mask_logits
    assert (logits.dtype, logits.shape) == (np.float32, (3, 4, 4))
    np.testing.assert_array_equal(logits, expected.astype(np.float16).astype(np.float32))
    turned, _ = bank(tmp_path, PROMPTS[::-1])
    np.testing.assert_array_equal(turned.answer(IMAGES[0]).mask_logits, logits[::-1])
    far = MaskBank(tmp_path, lambda *_: FrozenAnswer(np.array([[[1e9, -1e9]]]), np.zeros(1)), "far", ["a vessel"])
    np.testing.assert_array_equal(far.answer(IMAGES[0]).mask_logits, [[[65504, -65504]]])


def test_only_a_new_prompt_is_computed_and_other_models_or_images_share_nothing(tmp_path):
    bank(tmp_path, PROMPTS[:2])[0].build(IMAGES)
    wider, segmenter = bank(tmp_path)
    assert wider.answer(IMAGES[1]).mask_logits.shape == (3, 4, 4)
    assert (segmenter.calls, counts(wider)) == ([(20, [PROMPTS[2]])], (1, 2, 1))
    narrow, segmenter = bank(tmp_path, PROMPTS[:1])
    narrow.answer(IMAGES[1])
    assert segmenter.calls == [], "what other runs stored is kept"
    other, _ = bank(tmp_path, fingerprint="model-2")
    other.answer(IMAGES[1])
    narrow.answer(IMAGES[1].reshape(5, 6, 3))  # the same bytes in another shape
    assert (other.computed, narrow.computed) == (3, 1)


@pytest.mark.parametrize("silent", [2, 3])
def test_a_model_without_any_mask_is_refused_and_missing_masks_are_counted(tmp_path, silent):
    def segment(image, prompts):
        levels = [NO_MASK_LOGIT if number < silent else -40.0 for number in range(len(prompts))]
        return FrozenAnswer(np.stack([np.full((4, 4), level, np.float32) for level in levels]), np.zeros(2, np.float32))

    for _ in range(2):  # computed, and read from the disk
        mine = MaskBank(tmp_path, segment, "model-1", PROMPTS)
        with pytest.raises(ValueError, match=r"none of its 9 answers has a \[SEG\]") if silent == 3 else nullcontext():
            mine.build(IMAGES)
        assert mine.counts().endswith(f"; answers without [SEG]: {3 * silent}")


def test_an_interrupted_build_continues(tmp_path):
    with pytest.raises(RuntimeError, match="out of memory"):
        bank(tmp_path, fails_at=20)[0].build(IMAGES)
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"], "one whole file and no remains"
    resumed, segmenter = bank(tmp_path)
    resumed.build(IMAGES)
    assert [level for level, _ in segmenter.calls] == [20, 30]
    assert counts(resumed) == (6, 3, 2)


def without_features(path):
    stored = load_file(path)
    del stored["vision_features"]
    save_file(stored, path)


@pytest.mark.parametrize(
    ("damage", "warns"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), True),
        (lambda path: path.write_bytes(b""), True),
        (lambda path: path.write_bytes(b"\xff" * 99), True),
        (without_features, False),  # of a version before 0.4
    ],
)
def test_a_damaged_file_is_computed_again_with_a_warning(tmp_path, damage, warns):
    mine, _ = bank(tmp_path)
    expected, path = mine.answer(IMAGES[0]).mask_logits, mine.path(IMAGES[0])
    damage(path)
    again, segmenter = bank(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        np.testing.assert_array_equal(again.answer(IMAGES[0]).mask_logits, expected)
    assert [f"{path.name}" in str(one.message) for one in caught] == [True] * warns
    assert segmenter.calls == [(10, list(PROMPTS))]
    mended, segmenter = bank(tmp_path)
    np.testing.assert_array_equal(mended.answer(IMAGES[0]).mask_logits, expected)
    assert segmenter.calls == []


@pytest.mark.parametrize(
    "answer",
    [
        FrozenAnswer(np.zeros((2, 4, 4)), np.zeros(2)),
        FrozenAnswer(np.zeros((3, 4)), np.zeros(2)),
        FrozenAnswer(np.full((3, 4, 4), np.nan), np.zeros(2)),
        FrozenAnswer(np.zeros((3, 4, 4)), np.full(2, np.inf)),
        FrozenAnswer(np.zeros((3, 4, 4)), np.zeros((1, 2))),
    ],
)
def test_a_wrong_answer_stops_the_run_and_writes_nothing(tmp_path, answer):
    mine = MaskBank(tmp_path, lambda image, prompts: answer, "model-1", PROMPTS)
    with pytest.raises(ValueError, match=r"expected \(3, h, w\) and \(C,\) finite"):
        mine.answer(IMAGES[0])
    assert (list(tmp_path.iterdir()), counts(mine)) == ([], (0, 0, 0))


def test_prompts_and_fingerprint_are_needed(tmp_path):
    for prompts, fingerprint in (([], "model-1"), (PROMPTS, "")):
        with pytest.raises(ValueError, match="mask bank"):
            MaskBank(tmp_path, Segmenter(), fingerprint, prompts)
