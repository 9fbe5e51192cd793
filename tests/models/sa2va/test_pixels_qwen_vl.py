"""Resizing for a Qwen-VL: sizes and token counts of the reference, and what the pixels are."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from rl_reward_network.models.sa2va.pixels_sa2va import ImageResize, patch_inputs, resized_image
from tests.conftest import smooth_image


def patches(side: int, mean: float = 0.5) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(patch_size=side, image_mean=[mean] * 3, image_std=[0.25] * 3)


# (image, patch, how, size): made with the reference's own functions.
SIZES: list[tuple[tuple[int, int], int, ImageResize, tuple[int, int], int]] = [
    ((512, 512), 14, "prediction", (644, 644), 529),
    ((512, 512), 14, "training", (644, 644), 529),
    ((512, 512), 16, "prediction", (640, 640), 400),
    ((512, 512), 16, "training", (640, 640), 400),
    ((1024, 1024), 14, "prediction", (1036, 1036), 1369),
    ((1024, 1024), 14, "training", (1036, 1036), 1369),
    ((1024, 1024), 16, "prediction", (1024, 1024), 1024),
    ((1024, 1024), 16, "training", (1024, 1024), 1024),
    ((960, 999), 14, "prediction", (952, 1008), 1224),
    ((960, 999), 14, "training", (952, 1008), 1224),
    ((960, 999), 16, "prediction", (960, 1024), 960),
    ((960, 999), 16, "training", (960, 992), 930),
    ((480, 640), 14, "prediction", (560, 756), 540),
    ((480, 640), 14, "training", (560, 756), 540),
    ((480, 640), 16, "prediction", (576, 768), 432),
    ((480, 640), 16, "training", (576, 736), 414),
    ((1080, 1920), 14, "prediction", (952, 1680), 2040),
    ((1080, 1920), 14, "training", (924, 1680), 1980),
    ((1080, 1920), 16, "prediction", (928, 1664), 1508),
    ((1080, 1920), 16, "training", (928, 1664), 1508),
    ((199, 301), 14, "prediction", (532, 812), 551),
    ((199, 301), 14, "training", (532, 784), 532),
    ((199, 301), 16, "prediction", (512, 800), 400),
    ((199, 301), 16, "training", (544, 800), 425),
]


@pytest.mark.parametrize(("image", "patch", "how", "size", "tokens"), SIZES)
def test_sizes_are_those_of_the_reference(
    image: tuple[int, int], patch: int, how: ImageResize, size: tuple[int, int], tokens: int
) -> None:
    resized = resized_image(np.zeros((*image, 3), np.uint8), 2 * patch, how)
    assert resized.dtype == torch.uint8
    assert tuple(resized.shape) == (3, *size)
    assert size[0] * size[1] == tokens * (2 * patch) ** 2


def test_training_resizes_the_image_itself_and_prediction_a_resized_one() -> None:
    image = smooth_image(199, 301)
    first = Image.fromarray(image).resize((308, 196), Image.Resampling.BICUBIC)
    for how, source, size in (("training", image, (544, 800)), ("prediction", np.array(first), (512, 800))):
        pixels = torch.from_numpy(source.copy()).permute(2, 0, 1)[None]
        expected = F.interpolate(pixels, size=size, mode="bicubic", antialias=True)[0]
        assert torch.equal(resized_image(image, 32, how), expected)  # type: ignore[arg-type]


def test_an_image_of_the_right_size_is_left_alone() -> None:
    image = smooth_image(672, 896)  # multiples of 28 and of 32
    for cell in (28, 32):
        for how in ("prediction", "training"):
            resized = resized_image(image, cell, how)  # type: ignore[arg-type]
            assert torch.equal(resized.permute(1, 2, 0), torch.from_numpy(image))


def test_a_patch_holds_its_pixels_twice_and_normalised() -> None:
    image = smooth_image(640, 640)
    inputs = patch_inputs([image], patches(16), "training")
    assert inputs["image_grid_thw"].tolist() == [[1, 40, 40]]
    assert inputs["pixel_values"].shape == (1600, 2 * 3 * 16 * 16)
    block = inputs["pixel_values"][1].view(3, 2, 16, 16)  # the second patch of the first 2 x 2 block: to the right
    expected = (torch.from_numpy(image[:16, 16:32].copy()).permute(2, 0, 1) / 255 - 0.5) / 0.25
    torch.testing.assert_close(block[:, 0], expected, atol=1e-5, rtol=0)
    assert torch.equal(block[:, 0], block[:, 1]), "as two equal frames"
    below = inputs["pixel_values"][2].view(3, 2, 16, 16)[:, 0]
    expected = (torch.from_numpy(image[16:32, :16].copy()).permute(2, 0, 1) / 255 - 0.5) / 0.25
    torch.testing.assert_close(below, expected, atol=1e-5, rtol=0)


def test_images_of_different_size_are_packed_one_after_the_other() -> None:
    images = [smooth_image(640, 640), smooth_image(200, 500, seed=1)]
    together = patch_inputs(images, patches(14), "prediction")
    alone = [patch_inputs([image], patches(14), "prediction") for image in images]
    assert torch.equal(together["pixel_values"], torch.cat([inputs["pixel_values"] for inputs in alone]))
    assert torch.equal(together["image_grid_thw"], torch.cat([inputs["image_grid_thw"] for inputs in alone]))
    assert together["image_grid_thw"].dtype == torch.int64


def test_grey_and_transparent_pictures_are_taken_as_rgb() -> None:
    grey = Image.fromarray(smooth_image(100, 100)).convert("L")
    expected = resized_image(grey.convert("RGB"), 28, "prediction")
    assert torch.equal(resized_image(grey, 28, "prediction"), expected)
    assert torch.equal(resized_image(grey.convert("RGBA"), 28, "prediction"), expected)


@pytest.mark.parametrize("how", ["prediction", "training"])
def test_a_strip_is_refused_with_its_size(how: ImageResize) -> None:
    with pytest.raises(ValueError, match=r"the image has 2 x 500 pixels \(.*200.*\); crop it"):
        resized_image(np.zeros((500, 2, 3), np.uint8), 28, how)


def test_an_array_that_is_no_image_is_refused() -> None:
    with pytest.raises(ValueError, match=r"uint8.*float64"):
        patch_inputs([np.zeros((20, 20, 3))], patches(14), "prediction")
