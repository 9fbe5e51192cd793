"""Features of images: those of the encoders themselves, computed once, the oldest let go first."""

from typing import Any

import numpy as np
import pytest
import torch

from rl_reward_network.grpo import image_context as features_file
from rl_reward_network.grpo.image_context import GIBIBYTE, FeatureCache, ImageFeatures, encode_image
from tests.conftest import smooth_image
from tests.grpo.nano import nano

IMAGES = [smooth_image(96, 80, seed) for seed in range(4)]


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    return nano()


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Which images were encoded, in order."""
    calls: list[np.ndarray] = []
    real = features_file.encode_image
    monkeypatch.setattr(features_file, "encode_image", lambda m, p, image: calls.append(image) or real(m, p, image))
    return calls


def features(cache: FeatureCache, images: list[np.ndarray]) -> list[ImageFeatures]:
    digests, by_digest = cache.get(images)
    return [by_digest[digest] for digest in digests]


def assert_same(first: ImageFeatures, second: ImageFeatures) -> None:
    for own, other in zip((first.vision, *first.sam.maps), (second.vision, *second.sam.maps), strict=True):
        assert torch.equal(own, other)


def test_features_are_those_of_both_encoders(parts: tuple[Any, Any]) -> None:
    model, processor = parts
    (result,) = features(FeatureCache(model, processor), IMAGES[:1])
    inputs = processor("<image>Where?", IMAGES[0])
    with torch.no_grad():
        assert torch.equal(result.vision, model.model.get_vision_features(inputs["pixel_values"]))
        for own, direct in zip(result.sam.maps, model.get_sam_features(inputs["sam_pixel_values"]).maps, strict=True):
            assert torch.equal(own, direct)
    assert not any(tensor.requires_grad for tensor in (result.vision, *result.sam.maps))
    assert result.nbytes == sum(4 * tensor.numel() for tensor in (result.vision, *result.sam.maps))


def test_encoding_leaves_the_model_in_the_mode_it_was_in(parts: tuple[Any, Any]) -> None:
    model, processor = parts
    still = encode_image(model, processor, IMAGES[0])
    model.train()
    assert_same(encode_image(model, processor, IMAGES[0]), still)
    assert model.training
    model.eval()


def test_each_image_is_encoded_once(parts: tuple[Any, Any], encoded: list[np.ndarray]) -> None:
    cache = FeatureCache(*parts)
    first = features(cache, IMAGES[:2])
    again = features(cache, [IMAGES[1], IMAGES[2], IMAGES[0]])
    assert [image is own for image, own in zip(encoded, IMAGES[:3], strict=True)] == [True] * 3
    assert (cache.hits, cache.misses) == (2, 3)
    assert_same(again[0], first[1])
    assert_same(again[2], first[0])
    assert not torch.equal(first[0].vision, first[1].vision)


def test_the_images_seen_longest_ago_go_when_the_memory_is_full(
    parts: tuple[Any, Any], encoded: list[np.ndarray]
) -> None:
    size = encode_image(*parts, IMAGES[0]).nbytes
    encoded.clear()
    cache = FeatureCache(*parts, limit_gib=2.5 * size / GIBIBYTE)
    digests = [cache.get([IMAGES[number]])[0][0] for number in (0, 1, 0, 2)]
    assert list(cache.entries) == [digests[0], digests[3]], "the second was seen longest ago"
    assert cache.nbytes == 2 * size
    cache.get(IMAGES[1:2])
    assert list(cache.entries) == [digests[3], digests[1]]
    assert len(encoded) == 4


def test_one_image_stays_however_small_the_memory(parts: tuple[Any, Any], encoded: list[np.ndarray]) -> None:
    cache = FeatureCache(*parts, limit_gib=0.0)
    for number in (0, 1, 1):
        digests, _ = cache.get([IMAGES[number]])
    assert list(cache.entries) == digests
    assert (cache.hits, cache.misses, len(encoded)) == (1, 2, 2)


def test_hits_are_look_ups_without_an_encoder(parts: tuple[Any, Any]) -> None:
    cache = FeatureCache(*parts)
    for number in (0, 0, 1, 0):
        cache.get([IMAGES[number]])
    assert (cache.hits, cache.misses) == (2, 2)
    cache.clear()
    assert (cache.nbytes, len(cache.entries)) == (0, 0)


def test_one_pixel_is_enough_to_be_another_image(parts: tuple[Any, Any], encoded: list[np.ndarray]) -> None:
    cache, other = FeatureCache(*parts), IMAGES[0].copy()
    other[48, 40] ^= 255
    digests, by_digest = cache.get([IMAGES[0], other, IMAGES[0].copy()])
    assert digests[0] == digests[2] != digests[1]
    assert len(encoded) == len(by_digest) == 2
    assert not torch.equal(by_digest[digests[0]].vision, by_digest[digests[1]].vision)
