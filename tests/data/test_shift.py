"""Whether two sets of images come from different places."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.items import Sample
from rl_reward_network.data.shift import ELSEWHERE, domain_auc, image_statistics
from tests.conftest import write_tiny_data


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """Sixty images of a patient each."""
    return read_annotations(write_tiny_data(tmp_path_factory.mktemp("shift") / "data", images=60, size=64), None)


def test_images_of_one_place_are_not_told_apart(samples: list[Sample]) -> None:
    order = np.random.default_rng(0)
    found = []
    for _ in range(20):
        drawn = [samples[index] for index in order.permutation(60)]
        found.append(domain_auc(drawn[:12], drawn[12:32]))
    assert max(found) < ELSEWHERE
    assert np.mean(found) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("change", ["darker", "blurred"])
def test_images_of_another_place_are(change: str, samples: list[Sample], tmp_path: Path) -> None:
    there = []
    for number, sample in enumerate(samples[30:]):
        image = Image.fromarray(sample.load_image())
        pixels = np.asarray(image.reduce(4).resize((64, 64)) if change == "blurred" else image)
        Image.fromarray(pixels // 2 if change == "darker" else pixels).save(tmp_path / f"{number}.png")
        there.append(replace(sample, image_path=tmp_path / f"{number}.png", size=pixels.shape[:2]))
    assert domain_auc(samples[:10], there) >= ELSEWHERE


def test_an_export_at_another_size_is_no_other_place(tmp_path: Path) -> None:
    here, there = list[Sample](), list[Sample]()
    for number, sample in enumerate(read_annotations(write_tiny_data(tmp_path / "data", images=40, size=256), None)):
        image = Image.fromarray(sample.load_image()).filter(ImageFilter.GaussianBlur(3))  # no noise of single pixels
        size = (256 + 64 * (number % 2),) * 2
        image.resize(size).save(tmp_path / f"{number}.png")
        (here, there)[number % 2].append(replace(sample, image_path=tmp_path / f"{number}.png", size=size))
    assert domain_auc(here, there) < ELSEWHERE


def test_few_patients_decide_nothing(samples: list[Sample]) -> None:
    assert np.isnan(domain_auc(samples[:4], samples[4:30]))


def test_the_statistics_of_an_image_are_known() -> None:
    image = np.zeros((40, 80, 3), np.uint8)
    image[:, 40:, 0] = 90
    values = image_statistics(image)
    assert values[:4] == pytest.approx([15, 0, 15, 30])
    assert values[5] == pytest.approx(45)
