"""Python in a few lines: load, segment, save; every form of an image and of a mask; a light import."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import rl_reward_network
from rl_reward_network import RewardNetwork, api, load
from rl_reward_network.bit_depth import window_of_bits
from rl_reward_network.data.images import as_image
from rl_reward_network.data.masks import as_mask
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.models.reward_network import RewardNetwork as Plain
from rl_reward_network.models.reward_network import RewardNetworkConfig
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from tests.conftest import smooth_image, tube_image

COLOUR = smooth_image(40, 56)
GREY = COLOUR[..., 0]
GREY3 = np.repeat(GREY[..., None], 3, axis=2)
MASK = tube_image(56, 1)[1][:40]


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, rl_reward_network as p; print('load' in dir(p), {'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True set()\n"
    assert all(hasattr(rl_reward_network, name) for name in rl_reward_network.__all__)
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        rl_reward_network.train  # noqa: B018


def test_a_mask_in_five_lines(tmp_path: Path) -> None:
    image = tube_image(64, 1)[0][:50]
    Image.fromarray(image).save(tmp_path / "a.png")
    found = load("sa2va-nano", device="cpu").segment(tmp_path / "a.png", PROMPTS[1], threshold=0.4)
    model, processor = load_sa2va_model("sa2va-nano")
    answer = model.segment([image], [PROMPTS[1]], processor)[0][0]
    np.testing.assert_array_equal(found.soft, answer.probabilities().max(axis=0))
    np.testing.assert_array_equal(found.mask, found.soft > 0.4)
    assert (found.text, found.prompt, found.score, found.soft.dtype) == (answer.answer, PROMPTS[1], None, np.float32)
    np.testing.assert_array_equal(np.asarray(Image.open(found.save(tmp_path / "deep" / "m.png"))), 255 * found.mask)
    assert found.overlay().shape == image.shape
    with pytest.raises(ValueError, match=r"m\.jpg: a mask is saved as PNG"):
        found.save("m.jpg")


def test_a_score_and_a_judgement_are_the_same_number(tmp_path: Path) -> None:
    network = Plain(RewardNetworkConfig(channels=(4, 4), packing=2, members=2))
    network.save_pretrained(tmp_path / "net")
    model = load(tmp_path / "net", device="cpu", reward_net=tmp_path / "net")
    found = model.segment(COLOUR)
    Image.fromarray(COLOUR).save(tmp_path / "a.png")
    judged = RewardNetwork.from_pretrained(tmp_path / "net").predict(tmp_path / "a.png", found.save(tmp_path / "m.png"))
    assert found.score == judged.dice == pytest.approx(0.5, abs=0.5)
    assert (judged.low, judged.high, found.text) == (None, None, "")
    with pytest.raises(ValueError, match="do not depend on a prompt"):
        model.segment(COLOUR, "the vessel")
    with pytest.raises(ValueError, match="threshold is 1, expected"):
        model.segment(COLOUR, threshold=1)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (COLOUR, COLOUR),
        (np.dstack([COLOUR, GREY]), COLOUR),
        (COLOUR.astype(np.int64), COLOUR),
        (COLOUR / 255, COLOUR),
        ((COLOUR / 255).astype(np.float32).transpose(2, 0, 1), COLOUR),
        (torch.tensor(COLOUR).permute(2, 0, 1), COLOUR),
        (torch.tensor(COLOUR / 255, requires_grad=True), COLOUR),
        (GREY, GREY3),
        (GREY[None], GREY3),
        (torch.tensor(GREY)[..., None], GREY3),
        (Image.fromarray(COLOUR).convert("RGBA"), COLOUR),
        (Image.fromarray(GREY), GREY3),
    ],
)
def test_an_image_of_any_form(image: Any, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(as_image(image), expected)


def test_deep_grey_and_files_are_seen_as_segment_sees_them(tmp_path: Path) -> None:
    deep = (GREY.astype(np.uint16) * 16).clip(0, 4000)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    for given in (deep, Image.fromarray(deep), torch.tensor(deep.astype(np.int32))):
        for window in (None, window_of_bits(12)):
            np.testing.assert_array_equal(as_image(given, window), as_image(tmp_path / "deep.png", window))
    assert as_image(deep, window_of_bits(12)).max() == round(int(deep.max()) * 255 / 4095)
    np.testing.assert_array_equal(as_image(GREY, window_of_bits(12)), GREY3, "8 bit is not scaled")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(COLOUR).save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as opened:
        np.testing.assert_array_equal(as_image(opened), as_image(str(tmp_path / "turned.png")))
    assert as_image(tmp_path / "turned.png").shape == (56, 40, 3)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (COLOUR.astype(float), r"holds float64 in \d+\.0\.\.2\d\d\.0, expected floats in 0\.\.1"),
        (COLOUR.astype(np.uint16) * 200, r"whole numbers in 0\.\.255; scale it"),
        (np.full((9, 9), np.nan), "holds float64 in nan"),
        (MASK, "holds bool"),
        (COLOUR[None], r"has shape \(1, 40, 56, 3\), expected one image"),
        (np.zeros((0, 5, 3), np.uint8), "has shape"),
        ([1, 2], "got list, expected a path, a picture of Pillow, an array or a tensor"),
        (Path("gone.png"), r"gone\.png: image file not found"),
    ],
)
def test_what_is_no_image_gets_one_sentence(image: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_image(image)


def test_a_mask_of_any_form(tmp_path: Path) -> None:
    Image.fromarray(MASK.astype(np.uint8) * 255).save(tmp_path / "m.png")
    soft = np.where(MASK, 0.7, 0.1).astype(np.float32)
    forms = (MASK, MASK.astype(np.uint8), MASK[None] * 255, MASK * 1.0, torch.tensor(MASK)[..., None])
    for form in (*forms, Image.fromarray(MASK), tmp_path / "m.png", str(tmp_path / "m.png")):
        np.testing.assert_array_equal(as_mask(form, MASK.shape), MASK.astype(np.float32))
    np.testing.assert_array_equal(as_mask(torch.tensor(soft), MASK.shape), soft)
    for wrong, message in (
        (MASK.T, r"has shape \(56, 40\), but its image is 40 x 56"),
        (GREY, r"holds uint8 in \d+\.\.\d+, expected True and False"),
        (2 * soft, r"holds float32 in 0\.2"),
        (None, "got NoneType"),
    ):
        with pytest.raises(ValueError, match=message):
            as_mask(wrong, MASK.shape)


def test_improve_takes_folders_as_text_and_refuses_an_unknown_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[RunConfig] = []
    monkeypatch.setattr(api, "open_improve_inputs", lambda config: given.append(config) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        api.improve("d", "u", "quick", output_dir="o", seed=3)
    assert given == [RunConfig(data_root=Path("d"), unlabelled_root=Path("u"), output_dir=Path("o"), seed=3)]
    with pytest.raises(ValueError, match="mode is 'slow', expected quick or full"):
        api.improve("d", mode="slow")  # type: ignore[arg-type]
