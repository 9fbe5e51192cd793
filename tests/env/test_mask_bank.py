import warnings

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rl_reward_network.env.mask_bank import FrozenAnswer, MaskBank

PROMPTS = ("a vessel", "a catheter", "a rib")
IMAGES = [np.full((6, 5, 3), level, np.uint8) for level in (10, 20, 30)]


class Segmenter:
    """Answers with the length of the prompt plus the grey level, and records its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, image, prompts):
        self.calls.append((int(image[0, 0, 0]), list(prompts)))
        masks = np.stack([np.full((4, 4), len(prompt) + image[0, 0, 0] / 3, np.float32) for prompt in prompts])
        return FrozenAnswer(masks, np.array([image[0, 0, 0] / 7, -1], np.float32))


def bank(folder, prompts=PROMPTS, fingerprint="model-1"):
    segmenter = Segmenter()
    return MaskBank(folder, segmenter, fingerprint, prompts), segmenter


def test_each_pair_is_computed_once_and_all_prompts_in_one_call(tmp_path):
    first, segmenter = bank(tmp_path)
    first.build(IMAGES)
    logits = [first.answer(image).mask_logits for image in IMAGES]
    assert segmenter.calls == [(10, list(PROMPTS)), (20, list(PROMPTS)), (30, list(PROMPTS))]
    assert (first.computed, first.reused, first.encoded) == (9, 0, 3)
    second, segmenter = bank(tmp_path)
    for image, expected in zip(IMAGES, logits, strict=True):
        np.testing.assert_array_equal(second.answer(image).mask_logits, expected)
    assert segmenter.calls == []
    assert (second.computed, second.reused, second.encoded) == (0, 9, 0)
    assert second.counts() == "masks computed by Sa2VA: 0, read from the bank: 9; images encoded: 0"


def test_masks_are_rounded_to_half_precision_in_the_order_of_the_prompts(tmp_path):
    mine, segmenter = bank(tmp_path)
    expected = segmenter(IMAGES[0], PROMPTS).mask_logits
    logits = mine.answer(IMAGES[0]).mask_logits
    assert logits.dtype == np.float32
    assert logits.shape == (3, 4, 4)
    np.testing.assert_array_equal(logits, expected.astype(np.float16).astype(np.float32))
    turned, _ = bank(tmp_path, PROMPTS[::-1])
    np.testing.assert_array_equal(turned.answer(IMAGES[0]).mask_logits, logits[::-1])


def test_only_a_new_prompt_is_computed(tmp_path):
    bank(tmp_path, PROMPTS[:2])[0].build(IMAGES)
    wider, segmenter = bank(tmp_path)
    assert wider.answer(IMAGES[1]).mask_logits.shape == (3, 4, 4)
    assert segmenter.calls == [(20, [PROMPTS[2]])]
    assert (wider.computed, wider.reused) == (1, 2)
    narrow, segmenter = bank(tmp_path, PROMPTS[:1])
    narrow.answer(IMAGES[1])
    assert segmenter.calls == [], "what other runs stored is kept"


def test_another_model_or_another_image_shares_nothing(tmp_path):
    bank(tmp_path)[0].answer(IMAGES[0])
    other, _ = bank(tmp_path, fingerprint="model-2")
    other.answer(IMAGES[0])
    mine, _ = bank(tmp_path)
    mine.answer(IMAGES[0].reshape(5, 6, 3))  # the same bytes in another shape
    assert (other.computed, mine.computed) == (3, 3)
    assert len(list(tmp_path.iterdir())) == 3


def test_an_interrupted_build_continues(tmp_path):
    def fails_on_the_second(image, prompts):
        if image[0, 0, 0] == 20:
            raise RuntimeError("out of memory")
        return Segmenter()(image, prompts)

    with pytest.raises(RuntimeError, match="out of memory"):
        MaskBank(tmp_path, fails_on_the_second, "model-1", PROMPTS).build(IMAGES)
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"], "one whole file and no remains"
    resumed, segmenter = bank(tmp_path)
    resumed.build(IMAGES)
    assert [level for level, _ in segmenter.calls] == [20, 30]
    assert (resumed.computed, resumed.reused) == (6, 3)


@pytest.mark.parametrize("damage", [lambda data: data[:-7], lambda data: b"", lambda data: b"\xff" * len(data)])
def test_a_damaged_file_is_computed_again_with_a_warning(tmp_path, damage):
    mine, _ = bank(tmp_path)
    expected, path = mine.answer(IMAGES[0]).mask_logits, mine.path(IMAGES[0])
    path.write_bytes(damage(path.read_bytes()))
    again, _ = bank(tmp_path)
    with pytest.warns(UserWarning, match=f"{path.name}.*computed again"):
        np.testing.assert_array_equal(again.answer(IMAGES[0]).mask_logits, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(bank(tmp_path)[0].answer(IMAGES[0]).mask_logits, expected)


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
    with pytest.raises(ValueError, match=r"segment .*shapes .*expected \(3, h, w\) and \(C,\) finite"):
        mine.answer(IMAGES[0])
    assert list(tmp_path.iterdir()) == []
    assert (mine.computed, mine.encoded) == (0, 0)


def test_logits_beyond_half_precision_stay_finite(tmp_path):
    mine = MaskBank(tmp_path, lambda *_: FrozenAnswer(np.array([[[1e9, -1e9]]]), np.zeros(1)), "model-1", ["a vessel"])
    np.testing.assert_array_equal(mine.answer(IMAGES[0]).mask_logits, [[[65504, -65504]]])


def test_prompts_and_fingerprint_are_needed(tmp_path):
    for prompts, fingerprint in (([], "model-1"), (PROMPTS, "")):
        with pytest.raises(ValueError, match="mask bank"):
            MaskBank(tmp_path, Segmenter(), fingerprint, prompts)


def test_features_come_with_the_masks_and_are_kept(tmp_path):
    first, _ = bank(tmp_path)
    np.testing.assert_array_equal(first.answer(IMAGES[1]).vision_features, np.array([20 / 7, -1], np.float32))
    second, segmenter = bank(tmp_path)
    np.testing.assert_array_equal(second.answer(IMAGES[1]).vision_features, np.array([20 / 7, -1], np.float32))
    assert segmenter.calls == []


def test_a_file_without_features_is_computed_again_whole(tmp_path):
    mine, _ = bank(tmp_path)
    expected, path = mine.answer(IMAGES[0]), mine.path(IMAGES[0])
    stored = load_file(path)
    del stored["vision_features"]
    save_file(stored, path)
    again, segmenter = bank(tmp_path)
    np.testing.assert_array_equal(again.answer(IMAGES[0]).mask_logits, expected.mask_logits)
    assert segmenter.calls == [(10, list(PROMPTS))]
