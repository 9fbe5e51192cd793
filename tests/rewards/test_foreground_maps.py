"""The maps of a frozen reward network: one pass per image in memory and on disk, and numbers that stay the same."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.rewards.learned import ForegroundMaps, ImageScorer
from tests.conftest import smooth_image
from tests.models.test_reward_network import SMALL, network_of

IMAGES = [smooth_image(32, 48, seed) for seed in range(4)]
ONE = 2 * 32 * 48 * 2  # bytes of one image's maps: two members, float16


def masks(height: int, width: int) -> np.ndarray:
    """Soft, binary, empty and full."""
    soft = np.random.default_rng(0).random((2, height, width), dtype=np.float32)
    return np.concatenate([soft, soft > 0.7, np.zeros_like(soft[:1]), np.ones_like(soft[:1])]).astype(np.float32)


def scores(maps: ForegroundMaps, image: np.ndarray) -> np.ndarray:
    return maps.scorer(image).quality(masks(*image.shape[:2]))["score"]


def test_an_image_is_computed_once_whoever_asks() -> None:
    maps = ForegroundMaps(network_of())
    first = scores(maps, IMAGES[0])
    assert np.array_equal(scores(maps, IMAGES[0].copy()), first), "known by its pixels"
    maps.probs(IMAGES[0])
    assert maps.computed == 1
    maps.probs(np.ascontiguousarray(IMAGES[0].transpose(1, 0, 2)))
    assert maps.computed == 2, "another image"


@pytest.mark.parametrize("size", [(32, 48), (200, 130)])
def test_float16_does_not_change_scores_or_gradients(size: tuple[int, int]) -> None:
    network, image = network_of(replace(SMALL, caution=1.0)), smooth_image(*size)
    exact, kept = ImageScorer(network, image), ForegroundMaps(network).scorer(image)
    assert kept.probs.dtype == torch.float32
    for name, values in exact.quality(masks(*size)).items():
        np.testing.assert_allclose(kept.quality(masks(*size))[name], values, atol=5e-5, err_msg=name)

    def gradient(probs: Tensor) -> Tensor:
        mask = torch.from_numpy(masks(*size)[:, None]).requires_grad_()
        return torch.autograd.grad(network.mask_quality(mask, probs).score.sum(), mask)[0]

    expected = gradient(exact.probs)
    torch.testing.assert_close(gradient(kept.probs), expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


def test_a_later_process_reads_the_same_numbers(tmp_path: Path) -> None:
    network = network_of()
    first, later = ForegroundMaps.beside(tmp_path / "run", network), ForegroundMaps.beside(tmp_path / "run", network)
    expected = [scores(first, image) for image in IMAGES]
    assert all(np.array_equal(scores(later, image), e) for image, e in zip(IMAGES, expected, strict=True))
    assert (first.computed, later.computed) == (4, 0)
    assert later.folder == tmp_path / "foreground_maps" / network.fingerprint
    assert len(list(later.folder.iterdir())) == 4


def test_another_network_shares_nothing(tmp_path: Path) -> None:
    scores(ForegroundMaps.beside(tmp_path / "run", network_of()), IMAGES[0])
    torch.manual_seed(7)
    other = ForegroundMaps.beside(tmp_path / "run", RewardNetwork(SMALL).eval())
    scores(other, IMAGES[0])
    assert other.computed == 1


def test_memory_holds_the_images_used_last_and_the_disk_the_others(tmp_path: Path) -> None:
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


def test_the_disk_has_a_limit_over_all_runs(tmp_path: Path) -> None:
    for number in range(4):
        ForegroundMaps(network_of(), tmp_path, disk_bytes=int(1.5 * ONE)).probs(IMAGES[number])
    assert len(list(tmp_path.iterdir())) == 2
    maps = ForegroundMaps(network_of(), tmp_path, disk_bytes=0)
    for number in (0, 3, 3):
        maps.probs(IMAGES[number])
    assert maps.computed == 1, "written files are read, and memory still serves"


def test_a_file_that_another_process_is_writing_is_not_looked_at(tmp_path: Path) -> None:
    """It is renamed at any moment: its size must not be asked for."""
    (tmp_path / ".0_unfinished.safetensors").symlink_to(tmp_path / "gone")
    assert ForegroundMaps(network_of(), tmp_path).disk_used == 0


@pytest.mark.parametrize("damage", [lambda data: data[:-7], lambda data: b"", lambda data: b"\xff" * len(data)])
def test_a_damaged_file_is_computed_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    expected = scores(ForegroundMaps(network_of(), tmp_path), IMAGES[0])
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match=f"{path.name}.*maps are computed again"):
        assert np.array_equal(scores(ForegroundMaps(network_of(), tmp_path), IMAGES[0]), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(scores(ForegroundMaps(network_of(), tmp_path), IMAGES[0]), expected)


def test_a_wrong_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"uint8 \(H, W, 3\), got float64"):
        ForegroundMaps(network_of(), tmp_path / "new").scorer(IMAGES[0] / 255)
    assert not (tmp_path / "new").exists()
