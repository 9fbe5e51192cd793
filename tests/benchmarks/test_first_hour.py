"""The benchmark of the first hour: its layouts are what users have, and hold the masks that they were made of."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.first_hour import WRITERS, Picture, passed
from rl_reward_network.data.readers import read_images
from rl_reward_network.data_import.survey import ImportOptions, survey_source
from rl_reward_network.data_import.write import write_import
from tests.conftest import tube_image

OUTLINE = [[8.0, 8.0, 40.0, 10.0, 38.0, 20.0, 9.0, 18.0]]


@pytest.fixture
def pictures(tmp_path: Path) -> list[Picture]:
    (tmp_path / "source").mkdir()
    found = []
    for number in range(8):
        path = tmp_path / "source" / f"train_{number:04d}.png"
        Image.fromarray(tube_image(64, number)[0]).save(path)
        record = {"image": path.name, "text": ["blood vessel"], "mask": OUTLINE, "group": f"case {number}"}
        found.append(Picture(path, record))
    return found


@pytest.mark.parametrize("layout", WRITERS)
def test_each_layout_is_read_with_its_masks_and_patients(layout: str, pictures: list[Picture], tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    WRITERS[layout](pictures[:6], pictures[6:], folder)
    if layout != "own":
        write_import(survey_source(folder, ImportOptions()), tmp_path / "imported")
        folder = tmp_path / "imported"
    samples = read_images(folder)
    assert len({sample.group_id for sample in samples}) == len(samples) == (8 if layout == "own" else 6)
    assert [sample.split for sample in samples if sample.split] == (["train"] * 4 + ["val"] * 2 + ["test"] * 2) * (
        layout == "own"
    )
    expected = pictures[0].mask()
    for sample in samples:
        mask = sample.load_mask()
        assert mask is not None
        assert np.mean(mask != expected) < 0.01, "rasterisers may differ at the border"


def test_a_layout_passes_only_with_better_masks_an_interval_above_0_and_in_time() -> None:
    result = {
        "minutes": {"improve": 9.0, "segment": 1.0},
        "improve": {"gain_out_of_fold": {"low": 0.1}},
        "test": [{}, {"verdict": "better"}],
    }
    assert passed(result)
    for name, value in (
        ("minutes", {"improve": 12.1}),
        ("improve", {"gain_out_of_fold": {"low": None}}),
        ("test", [{}, {"verdict": "cannot tell"}]),
    ):
        assert not passed(json.loads(json.dumps(result | {name: value})))
