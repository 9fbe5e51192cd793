"""The domain of a reward network: which images it can judge, in numbers that are known by construction."""

from dataclasses import asdict, replace

import cv2
import numpy as np
import pytest
import torch

from rl_reward_network.atomic_io import read_json, write_json
from rl_reward_network.models.domain import Judged, fit_domain, map_statistics
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.rewards.learned import ForegroundMaps, ImageScorer, in_domain, score_masks
from rl_reward_network.rewards.table import learned_reward

SIDE = 96


def picture(seed, size=SIDE, empty=False):
    """A dark bar on a grey, noisy ground, and its mask."""
    rng = np.random.default_rng(seed)
    truth = np.zeros((size, size), bool)
    if not empty:
        top, width = int(rng.integers(10, 60)) * size // SIDE, int(rng.integers(8, 13)) * size // SIDE
        truth[top : top + width, size // 10 : -size // 10] = True
    grey = np.where(truth, 40, 160) + rng.normal(0, 8, truth.shape)
    return np.repeat(grey.clip(0, 255).astype(np.uint8)[..., None], 3, axis=2), truth


class DarkIsObject(RewardNetwork):
    """Sees dark pixels, at the size at which it looks; the second member is a little less sure."""

    def _probs_of(self, image):
        dark = ((0.4 - image.mean(dim=1, keepdim=True)) * 60).sigmoid()
        dark = torch.where(dark < 0.02, 0, dark)
        return torch.stack([dark, 0.97 * dark])


def fitted(empties=0, missed=0):
    """A network with a domain of 12 images with a bar, some without one, and some with a bar that it did not see."""
    network = DarkIsObject(RewardNetworkConfig(members=2, channels=(4, 4)))
    judged, images = [], []
    for seed in range(12 + empties + missed):
        image, truth = picture(seed, empty=seed >= 12)
        maps = ImageScorer(network, image).probs
        true_share = 0.1 if seed >= 12 + empties else float(truth.mean())
        judged.append(Judged(map_statistics(maps), float(maps.mean()), true_share))
        images.append(image)
    network.config = replace(network.config, domain=fit_domain(judged, images, negatives=[False]))
    return network


@pytest.fixture(scope="module")
def network():
    return fitted()


def outside(network, image):
    return ImageScorer(network, image).outside


def test_images_like_those_of_validation_are_inside(network):
    assert [outside(network, picture(seed)[0]) for seed in range(100, 140)] == [None] * 40


ROWS, COLUMNS = np.mgrid[:SIDE, :SIDE][..., None]
SQUARE = (ROWS > 20) & (ROWS < 45) & (COLUMNS < 40)
HALVES = np.where(np.arange(SIDE) < SIDE // 2, 130, 190)[None, :, None]  # as bright and as contrasty, without an object


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("contrast", lambda image: np.full_like(image, 160)),
        ("mean grey level", np.zeros_like),
        ("mean grey level", lambda image: 255 - image),
        ("sees no object", lambda image: np.broadcast_to(HALVES, image.shape)),
        ("colour", lambda image: image * np.array([1, 0.9, 0.75])),
        ("longer side", lambda image: image[:32, :32]),
        ("the object that it sees", lambda image: np.where(np.arange(SIDE)[:, None, None] < 22, 40, image)),
        ("width of what it sees", lambda image: np.where(SQUARE, 40, 160) + 0 * image),
    ],
)
def test_an_image_unlike_them_is_outside_in_one_sentence_and_has_no_number(name, change, network):
    image = np.ascontiguousarray(change(picture(3)[0])).astype(np.uint8)
    scorer = ImageScorer(network, image)
    assert scorer.outside is not None
    assert scorer.outside.startswith("outside the reward network's domain: ")
    assert name in scorer.outside
    quality = scorer.quality(np.zeros((2, *image.shape[:2]), np.float32))
    assert all(np.isnan(column).all() for column in quality.values()), "an empty mask of a blank image had Dice 0.98"


class SeesBrightToo(DarkIsObject):
    """Takes what is bright for the object, too, and is a little less sure of it."""

    def _probs_of(self, image):
        return super()._probs_of(image) + 0.9 * super()._probs_of(1 - image)


def test_a_negative_is_outside_though_all_its_numbers_are_as_usual():
    known = fitted().config.domain
    network = SeesBrightToo(RewardNetworkConfig(members=2, channels=(4, 4)))
    network.config = replace(network.config, domain=replace(known, limits=dict.fromkeys(known.limits, (0.0, 1e9))))
    image = (picture(3)[0] * 0.8).astype(np.uint8)  # a bar of 32 on a ground of 128
    assert known.knows_negatives
    assert outside(network, image) is None
    assert "the negative of this image" in str(outside(network, 255 - image))
    network.config = replace(network.config, domain=replace(network.config.domain, knows_negatives=False))
    assert outside(network, 255 - image) is None
    judged = [Judged(map_statistics(ImageScorer(network, image).probs), 0.1, 0.1)]
    shares = {1: False, 2: False, 19: False, 20: True}  # images, one of which is taken for a negative
    assert {n: fit_domain(judged, [image], [True] + [False] * (n - 1)).knows_negatives for n in shares} == shares


def test_the_domain_is_asked_once_for_an_image(network, monkeypatch):
    asked = []
    monkeypatch.setattr(network, "outside", lambda image, probs: asked.append(image))
    maps = ForegroundMaps(network)
    assert [maps.scorer(picture(5)[0]).outside for _ in range(3)] == [None] * 3
    assert len(asked) == 1


def test_nothing_seen_is_inside_only_where_it_was_right_in_validation():
    image, mask = picture(50, empty=True)[0], np.zeros((1, SIDE, SIDE), np.float32)
    assert "sees no object" in str(outside(fitted(empties=2), image))
    assert "sees no object" in str(outside(fitted(empties=6, missed=2), image)), "2 of 8 empty maps were wrong"
    known = fitted(empties=6)
    assert outside(known, image) is None
    assert ImageScorer(known, image).quality(mask)["dice"][0] > 0.99
    assert "contrast" in str(outside(known, np.full_like(image, 160))), "a blank image is still unlike them"


@pytest.mark.parametrize("scale", [0.5, 2, 4])
def test_the_same_picture_at_another_size_is_seen_as_in_training(scale, network):
    image, truth = picture(7)
    sizes = []
    seen_by = network._probs_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "_probs_of", lambda image: sizes.append(tuple(image.shape[-2:])) or seen_by(image))
        large = cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_LINEAR)
        scorer = ImageScorer(network, large)
    masks = np.stack([np.roll(truth, shift, axis=0) for shift in (0, 3)])
    wide = np.stack([cv2.resize(mask.astype(np.float32), large.shape[1::-1]) > 0.5 for mask in masks])
    assert sizes == [(SIDE, SIDE)]
    assert scorer.probs.shape[-2:] == large.shape[:2]
    if scale < 1:
        assert scorer.outside is None or "how sure it is" in scorer.outside, "details may be lost"
        return
    assert scorer.outside is None
    usual = ImageScorer(network, image).quality(masks.astype(np.float32))["dice"]
    np.testing.assert_allclose(scorer.quality(wide.astype(np.float32))["dice"], usual, atol=0.06)


def test_where_the_training_images_have_several_sizes_another_scale_is_outside():
    network = fitted()
    domain = replace(network.config.domain, sides=(SIDE, 2 * SIDE))
    assert domain.seen_size(4 * SIDE, SIDE) == (4 * SIDE, SIDE)
    network.config = replace(network.config, domain=domain)
    assert outside(network, picture(1)[0]) is None
    assert "longer side in pixels is 288" in str(outside(network, picture(1, 3 * SIDE)[0]))


def test_a_domain_is_saved_and_networks_without_one_say_so_and_give_numbers(network, tmp_path):
    network.save_pretrained(tmp_path / "new")
    loaded = RewardNetwork.from_pretrained(tmp_path / "new")
    assert loaded.config == network.config
    assert loaded.fingerprint == network.fingerprint
    old = read_json(tmp_path / "new" / "config.json")
    del old["domain"]
    write_json(tmp_path / "new" / "config.json", old)
    without = RewardNetwork.from_pretrained(tmp_path / "new")
    with pytest.warns(UserWarning, match=r"new: its domain is unknown.*train the reward network again"):
        quality = score_masks(without, np.full((SIDE, SIDE, 3), 160, np.uint8), np.zeros((1, SIDE, SIDE), np.float32))
    assert np.isfinite(quality).all()
    old["domain"] = {**asdict(network.config.domain), "limits": {"share": [0.2, 0.1]}}
    write_json(tmp_path / "new" / "config.json", old)
    with pytest.raises(ValueError, match=r"config.json: domain has limits .*'share'"):
        RewardNetwork.from_pretrained(tmp_path / "new")


def test_the_learned_reward_of_an_image_outside_is_missing_and_not_zero(network):
    inside, blank = picture(5), np.full((SIDE, SIDE, 3), 160, np.uint8)
    images, masks = [inside[0], blank, blank], [inside[1], np.zeros((SIDE, SIDE), bool), None]
    scores = learned_reward(ForegroundMaps(network))(images=images, predicted_masks=masks)
    assert scores.values[0] == pytest.approx(0.98, abs=0.05)
    assert list(scores.values[1:]) == [None, None]
    assert np.isfinite(scores.members).all()
    joins, check = in_domain(ForegroundMaps(network), images)
    assert joins.tolist() == [True, False, False]
    assert check.sentence.startswith("2 of 3 images have no learned reward and are left out; the first: outside")
