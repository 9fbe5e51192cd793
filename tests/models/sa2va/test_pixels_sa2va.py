"""From an image to tiles, patches, SAM 2's square and drawn regions, and back to the size of the image."""

import io

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from rl_reward_network.models.sa2va.pixels_sa2va import (
    RED,
    cut_tiles,
    draw_region,
    patch_inputs,
    resized_image,
    sam_pixels,
    tile_grid,
    upsample_mask_logits,
)
from tests.conftest import smooth_image


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    [
        (420, 380, (1, 1)),
        (700, 640, (2, 2)),  # a near-square photo above 401,408 px
        (634, 633, (1, 1)),  # 401,322 px: just below
        (951, 951, (3, 3)),  # above 903,168 px
        (640, 480, (4, 3)),
        (1280, 720, (4, 2)),
        (100, 1200, (1, 12)),
        (999, 960, (3, 3)),
    ],
)
def test_tile_grid_follows_the_reference(width, height, grid):
    assert tile_grid(width, height) == grid


COLOUR_16 = Image.open(io.BytesIO(cv2.imencode(".png", np.full((9, 9, 3), 3000, np.uint16))[1].tobytes()))


def test_upsampling_goes_over_sam2s_square():
    logits = torch.randn(2, 32, 32)
    square = F.interpolate(logits[:, None], size=(128, 128), mode="bilinear")
    expected = F.interpolate(square, size=(70, 90), mode="bilinear")[:, 0]
    assert torch.equal(upsample_mask_logits(logits, (70, 90), sam_image_size=128), expected)


def patches(side: int, mean: float = 0.5) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(patch_size=side, image_mean=[mean] * 3, image_std=[0.25] * 3)


# (image, patch, (size, tokens) in prediction, in training): made with the reference's own functions.
SIZES = [
    ((512, 512), 14, ((644, 644), 529), ((644, 644), 529)),
    ((512, 512), 16, ((640, 640), 400), ((640, 640), 400)),
    ((1024, 1024), 14, ((1036, 1036), 1369), ((1036, 1036), 1369)),
    ((1024, 1024), 16, ((1024, 1024), 1024), ((1024, 1024), 1024)),
    ((960, 999), 14, ((952, 1008), 1224), ((952, 1008), 1224)),
    ((960, 999), 16, ((960, 1024), 960), ((960, 992), 930)),
    ((480, 640), 14, ((560, 756), 540), ((560, 756), 540)),
    ((480, 640), 16, ((576, 768), 432), ((576, 736), 414)),
    ((1080, 1920), 14, ((952, 1680), 2040), ((924, 1680), 1980)),
    ((1080, 1920), 16, ((928, 1664), 1508), ((928, 1664), 1508)),
    ((199, 301), 14, ((532, 812), 551), ((532, 784), 532)),
    ((199, 301), 16, ((512, 800), 400), ((544, 800), 425)),
]


@pytest.mark.parametrize(("image", "patch", "prediction", "training"), SIZES)
def test_sizes_are_those_of_the_reference(image, patch, prediction, training):
    for how, (size, tokens) in (("prediction", prediction), ("training", training)):
        resized = resized_image(np.zeros((*image, 3), np.uint8), 2 * patch, how)
        assert resized.dtype == torch.uint8
        assert tuple(resized.shape) == (3, *size)
        assert size[0] * size[1] == tokens * (2 * patch) ** 2


def test_training_resizes_the_image_itself_and_prediction_a_resized_one():
    image = smooth_image(199, 301)
    first = Image.fromarray(image).resize((308, 196), Image.Resampling.BICUBIC)
    for how, source, size in (("training", image, (544, 800)), ("prediction", np.array(first), (512, 800))):
        pixels = torch.from_numpy(source.copy()).permute(2, 0, 1)[None]
        expected = F.interpolate(pixels, size=size, mode="bicubic", antialias=True)[0]
        assert torch.equal(resized_image(image, 32, how), expected)  # type: ignore[arg-type]


def test_a_patch_holds_its_pixels_twice_and_normalised():
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


SCALE = r"(uint8|8 bit).*; scale it to 0\.\.255, .*load_image"


@pytest.mark.parametrize(
    ("image", "message"),
    [
        *((Image.new(mode, (9, 9)), SCALE) for mode in ("I;16", "I;16L", "I;16B", "I", "F")),  # Pillow cuts at 255
        *((np.zeros((9, 9, 3), dtype), SCALE) for dtype in (np.uint16, np.float32, np.float64)),
        *((np.zeros((9, 9), np.uint16), SCALE), (COLOUR_16, SCALE)),
        (np.zeros((0, 0, 3), np.uint8), r"an image must have pixels, got 0 x 0 \(width x height\)"),
        (Image.new("RGB", (0, 5)), r"an image must have pixels, got 0 x 5 \(width x height\)"),
        (np.zeros((500, 2, 3), np.uint8), r"the image has 2 x 500 pixels \(.*200.*\); crop it"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_image_is_refused(image, message):
    reads = [lambda one: resized_image(one, 28, "prediction"), lambda one: resized_image(one, 28, "training")]
    reads += [] if "crop" in message else [lambda one: cut_tiles(one, 1, 8), lambda one: sam_pixels(one, 8)]
    for read in reads:
        with pytest.raises(ValueError, match=message):
            read(image)


def test_images_are_packed_one_after_the_other_and_taken_as_rgb():
    grey = Image.fromarray(smooth_image(200, 500, seed=1)).convert("L")
    images = [smooth_image(640, 640), grey.convert("RGBA"), grey]
    together = patch_inputs(images, patches(14), "prediction")
    alone = [patch_inputs([image], patches(14), "prediction") for image in images]
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(together[name], torch.cat([inputs[name] for inputs in alone]))
    assert torch.equal(alone[1]["pixel_values"], alone[2]["pixel_values"])
    assert together["image_grid_thw"].dtype == torch.int64


IMAGE = np.random.default_rng(0).integers(0, 255, (400, 600, 3)).astype(np.uint8)


def line(thickness: int = 1) -> np.ndarray:
    region = np.zeros((400, 600), dtype=bool)
    region[100 : 100 + thickness, 50:300] = True
    return region


@pytest.mark.parametrize("thickness", [1, 30])
def test_an_outline_is_red_around_the_region_and_leaves_it_as_it_is(thickness):
    region, before = line(thickness), IMAGE.copy()
    drawn = draw_region(IMAGE, region, "outline")
    changed = (drawn != IMAGE).any(axis=2)
    assert not changed[region].any(), "a line of one pixel stays visible"
    assert (drawn[changed] == (255, 0, 0)).all()
    rows, columns = np.nonzero(changed)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (98, 100 + thickness - 1 + 2, 48, 301)
    np.testing.assert_array_equal(IMAGE, before)


def test_a_crop_is_the_bounding_box_with_a_margin_within_the_image():
    region = line(20)
    margin = round(250 * 0.25)
    cut = IMAGE[100 - margin : 120 + margin, 0 : 300 + margin]  # 50 - margin would be outside
    np.testing.assert_array_equal(draw_region(IMAGE, region, "crop"), cut)
    tiny = np.zeros((400, 600), dtype=bool)
    tiny[399, 599] = True
    assert draw_region(IMAGE, tiny, "crop").shape == (9, 9, 3)


def test_a_region_that_is_the_whole_image_is_framed_and_an_unfit_one_refused():
    shown = draw_region(np.zeros((40, 60, 3), dtype=np.uint8), np.ones((40, 60), dtype=bool), "outline")
    red = (shown == RED).all(axis=2)
    assert red[[0, -1]].all()
    assert red[:, [0, -1]].all()
    assert not red[1:-1, 1:-1].any()
    for region, message in ((np.zeros((400, 600), bool), "has 0 pixels"), (np.ones((3, 3), bool), r"shape \(3, 3\)")):
        with pytest.raises(ValueError, match=message):
            draw_region(IMAGE, region, "crop")
