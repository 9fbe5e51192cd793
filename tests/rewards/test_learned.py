"""The learned reward in closed form; and its maps: one pass per image in memory and on disk, the same numbers."""

import warnings
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig, soft_overlap
from rl_reward_network.rewards import learned
from rl_reward_network.rewards.learned import (
    ForegroundMaps,
    ImageScorer,
    foreground_prob,
    predict_mask_quality,
    score_masks,
)
from tests.conftest import smooth_image
from tests.models.test_reward_network import SMALL as TWO
from tests.models.test_reward_network import network_of

SMALL = RewardNetworkConfig(channels=(8, 16), packing=2, members=2, caution=0.5)

IMAGE = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
MASKS = np.random.default_rng(1).random((5, 20, 30), dtype=np.float32)


class BrightIsObject(RewardNetwork):
    """Two members that find bright objects, the second with lower probability; counts its passes."""

    passes = 0

    def foreground_probs(self, image):
        self.passes += 1
        bright = image.mean(dim=1, keepdim=True)
        return torch.stack([bright, bright**2])


def test_numbers_and_order_are_those_of_the_network_and_the_image_is_in_unit_range():
    network = BrightIsObject(SMALL)
    result = predict_mask_quality(network, IMAGE, MASKS)
    maps = network.foreground_probs(torch.from_numpy(IMAGE.transpose(2, 0, 1)[None] / 255).float())
    masks = torch.from_numpy(MASKS)[:, None]
    expected = torch.stack([soft_overlap(masks, truth) for truth in maps], dim=1)  # (4, K, P)
    np.testing.assert_allclose(result["members"], expected.permute(2, 1, 0), rtol=1e-4)
    np.testing.assert_allclose(result["dice"], expected[0].mean(dim=0), rtol=1e-4)
    np.testing.assert_allclose(result["score"], result["dice"] - 0.5 * result["std"], rtol=1e-4)
    np.testing.assert_allclose(result["member_scores"], expected[0].T, rtol=1e-4)
    shapes = {"score": (5,), "dice": (5,), "std": (5,), "members": (5, 2, 4), "member_scores": (5, 2)}
    assert {name: column.shape for name, column in result.items()} == shapes
    assert {column.dtype for column in result.values()} == {np.dtype(np.float32)}
    assert np.array_equal(score_masks(network, IMAGE, MASKS), result["score"])
    bright = IMAGE.mean(axis=2) / 255
    np.testing.assert_allclose(foreground_prob(network, IMAGE), (bright + bright**2) / 2, rtol=1e-5)


def test_masks_in_parts_equal_masks_at_once_and_the_network_runs_once_per_image(monkeypatch):
    network = BrightIsObject(SMALL)
    at_once = score_masks(network, IMAGE, MASKS)
    monkeypatch.setattr(learned, "PIXELS_AT_ONCE", 2 * 20 * 30)
    np.testing.assert_allclose(score_masks(network, IMAGE, MASKS), at_once, atol=1e-6)
    assert network.passes == 2


def test_many_masks_of_a_large_image_keep_no_maps(monkeypatch):
    monkeypatch.setattr(learned, "PIXELS_AT_ONCE", 20 * 30)
    maps = []

    class Recording(BrightIsObject):
        def mask_quality(self, mask, foreground_probs):
            assert sum(reference() is not None for reference in maps) <= 1, "those of earlier masks are gone"
            output = super().mask_quality(mask, foreground_probs)
            maps.append(weakref.ref(output.error_map))
            return output

    score_masks(Recording(SMALL), IMAGE, MASKS)
    assert len(maps) == 5


def test_no_masks_half_precision_scores_below_zero_and_damaged_weights():
    network = BrightIsObject(SMALL)
    assert score_masks(network, IMAGE, MASKS[:0]).shape == (0,)
    half = score_masks(network, IMAGE, MASKS.astype(np.float16))
    np.testing.assert_allclose(half, score_masks(network, IMAGE, MASKS), rtol=1e-3)
    doubtful = BrightIsObject(replace(SMALL, caution=100.0))
    assert np.array_equal(score_masks(doubtful, IMAGE, MASKS), np.zeros(5, dtype=np.float32)), "never below 0"
    network.foreground_probs = lambda image: torch.full((2, 1, 1, 20, 30), torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        score_masks(network, IMAGE, MASKS)


def test_the_ascent_climbs_step_by_step_to_the_predicted_object():
    network = BrightIsObject(SMALL)
    image = np.zeros((20, 30, 3), dtype=np.uint8)
    image[5:12, 8:20] = 250
    object_, start = image[..., 0] > 0, (MASKS > 0.5).astype(np.float32)
    scores = [score_masks(network, image, start)]
    path = list(ImageScorer(network, image).ascend(start, 0.2, 12))
    scores += [score_masks(network, image, masks) for masks in path]
    assert len(path) == 12
    assert all(np.abs(b - a).max() <= 0.2 + 1e-6 for a, b in zip([start, *path], path, strict=False))
    assert (np.diff(scores, axis=0) > -1e-6).all()
    assert np.array_equal(path[-1] > 0.5, np.broadcast_to(object_, start.shape))
    assert network.passes == 1 + 1 + 12, "one pass for the whole ascent"


def test_each_mask_climbs_by_itself_and_from_nothing_or_everything():
    scorer = ImageScorer(BrightIsObject(SMALL), IMAGE)
    *_, together = scorer.ascend(MASKS, 0.3, 4)
    *_, alone = scorer.ascend(MASKS[2:3], 0.3, 4)
    np.testing.assert_allclose(together[2:3], alone, atol=1e-5)
    for value in (0.0, 1.0):
        *_, last = scorer.ascend(np.full((1, 20, 30), value, dtype=np.float32), 0.4, 5)
        assert np.isfinite(last).all()
        assert (last != value).any()


@pytest.mark.parametrize(
    ("image", "masks", "message"),
    [
        (IMAGE / 255, MASKS, r"uint8 \(H, W, 3\), got float64"),
        (IMAGE[..., 0], MASKS, r"uint8 \(H, W, 3\), got uint8 \(20, 30\)"),
        (IMAGE, MASKS[:, :, :-1], r"of \(20, 30\), got float32 \(5, 20, 29\)"),
        (IMAGE, MASKS > 0.5, "got bool"),
        (IMAGE, MASKS * 3, r"in \[0, 1\], got .*sigmoid"),
        (IMAGE, MASKS * np.nan, r"in \[0, 1\]"),
    ],
)
def test_bad_input(image, masks, message):
    with pytest.raises(ValueError, match=message):
        score_masks(BrightIsObject(SMALL), image, masks)


# ---- maps in memory and on disk -------------------------------------------------------------------------------------

IMAGES = [smooth_image(32, 48, seed) for seed in range(4)]
ONE = 2 * 32 * 48 * 2  # bytes of one image's maps: two members, float16


def masks(height, width):
    """Soft, binary, empty and full."""
    soft = np.random.default_rng(0).random((2, height, width), dtype=np.float32)
    return np.concatenate([soft, soft > 0.7, np.zeros_like(soft[:1]), np.ones_like(soft[:1])]).astype(np.float32)


def scores(maps, image):
    return maps.scorer(image).quality(masks(*image.shape[:2]))["score"]


def test_an_image_is_computed_once_whoever_asks():
    maps = ForegroundMaps(network_of())
    first = scores(maps, IMAGES[0])
    assert np.array_equal(scores(maps, IMAGES[0].copy()), first), "known by its pixels"
    maps.probs(IMAGES[0])
    assert maps.computed == 1
    maps.probs(np.ascontiguousarray(IMAGES[0].transpose(1, 0, 2)))
    assert maps.computed == 2, "another image"


@pytest.mark.parametrize("size", [(32, 48), (200, 130)])
def test_float16_does_not_change_scores_or_gradients(size):
    network, image = network_of(replace(TWO, caution=1.0)), smooth_image(*size)
    exact, kept = ImageScorer(network, image), ForegroundMaps(network).scorer(image)
    assert kept.probs.dtype == torch.float32
    for name, values in exact.quality(masks(*size)).items():
        np.testing.assert_allclose(kept.quality(masks(*size))[name], values, atol=5e-5, err_msg=name)

    def gradient(probs):
        mask = torch.from_numpy(masks(*size)[:, None]).requires_grad_()
        return torch.autograd.grad(network.mask_quality(mask, probs).score.sum(), mask)[0]

    expected = gradient(exact.probs)
    torch.testing.assert_close(gradient(kept.probs), expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


def test_a_later_process_reads_the_same_numbers(tmp_path):
    network = network_of()
    first, later = ForegroundMaps.beside(tmp_path / "run", network), ForegroundMaps.beside(tmp_path / "run", network)
    expected = [scores(first, image) for image in IMAGES]
    assert all(np.array_equal(scores(later, image), e) for image, e in zip(IMAGES, expected, strict=True))
    assert (first.computed, later.computed) == (4, 0)
    assert later.folder == tmp_path / "foreground_maps" / network.fingerprint
    assert len(list(later.folder.iterdir())) == 4
    torch.manual_seed(7)
    other = ForegroundMaps.beside(tmp_path / "run", RewardNetwork(TWO).eval())
    scores(other, IMAGES[0])
    assert other.computed == 1, "another network shares nothing"


def test_memory_holds_the_images_used_last_and_the_disk_the_others(tmp_path):
    maps = ForegroundMaps(network_of(), tmp_path, memory_bytes=2 * ONE)
    for number in (0, 1, 0, 2):
        maps.probs(IMAGES[number])
    assert (len(maps.entries), maps.nbytes, maps.computed) == (2, 2 * ONE, 3)
    maps.probs(IMAGES[0])
    for path in tmp_path.iterdir():
        path.unlink()
    maps.probs(IMAGES[0])
    assert maps.computed == 3, "0 was used after 1, so it is still in memory"
    maps.probs(IMAGES[1])
    assert maps.computed == 4
    (last,) = ForegroundMaps(network_of(), memory_bytes=0).scorer(IMAGES[0]).probs[0, 0]
    assert last.shape == (32, 48), "without any memory the maps asked for still come"


def test_the_disk_has_a_limit_over_all_runs(tmp_path):
    for number in range(4):
        ForegroundMaps(network_of(), tmp_path, disk_bytes=int(1.5 * ONE)).probs(IMAGES[number])
    assert len(list(tmp_path.iterdir())) == 2
    maps = ForegroundMaps(network_of(), tmp_path, disk_bytes=0)
    for number in (0, 3, 3):
        maps.probs(IMAGES[number])
    assert maps.computed == 1, "written files are read, and memory still serves"


def test_a_file_that_another_process_is_writing_is_not_looked_at(tmp_path):
    """It is renamed at any moment: its size must not be asked for."""
    (tmp_path / ".0_unfinished.safetensors").symlink_to(tmp_path / "gone")
    assert ForegroundMaps(network_of(), tmp_path).disk_used == 0


@pytest.mark.parametrize("damage", [lambda data: data[:-7], lambda data: b"", lambda data: b"\xff" * len(data)])
def test_a_damaged_file_is_computed_again(tmp_path, damage):
    expected = scores(ForegroundMaps(network_of(), tmp_path), IMAGES[0])
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match=f"{path.name}.*maps are computed again"):
        assert np.array_equal(scores(ForegroundMaps(network_of(), tmp_path), IMAGES[0]), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(scores(ForegroundMaps(network_of(), tmp_path), IMAGES[0]), expected)
