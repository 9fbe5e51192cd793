"""From an image to the patches of a Qwen-VL.

Source: bytedance/Sa2VA@06912e2. Its prediction resizes twice: by Pillow to multiples of 28 pixels, then, by the kernel
that torchvision uses, to multiples of two patches within limits of the area. Its training resized once, by the second.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from rl_reward_network.models.sa2va.pixels_sa2va import ImageLike, to_rgb

ImageResize = Literal["prediction", "training"]
FIRST_CELL = 28  # pixels, for both families
FIRST_PIXELS = (4 * FIRST_CELL**2, 16384 * FIRST_CELL**2)
PIXELS = (512 * FIRST_CELL**2, 2048 * FIRST_CELL**2)  # limits of the area of one image


def resized_image(image: ImageLike, cell: int, how: ImageResize) -> Tensor:
    """uint8 (3, h, w), with h and w multiples of `cell`, the side in pixels of an image token.

    Args:
        image: PIL image or uint8 (H, W, 3).
        cell: pixels.
        how: "prediction" resizes twice, "training" once.

    Raises:
        ValueError: one side is more than 200 times as long as the other.
    """
    rgb = to_rgb(image)
    if how == "prediction":
        height, width = _size(rgb, FIRST_CELL, FIRST_PIXELS)
        rgb = rgb.resize((width, height), Image.Resampling.BICUBIC)
    size = _size(rgb, cell, PIXELS)
    pixels = torch.from_numpy(np.array(rgb)).permute(2, 0, 1)
    if size == tuple(pixels.shape[1:]):
        return pixels
    # On uint8, as in the reference: the same on float, or by Pillow, gives other values.
    return F.interpolate(pixels[None], size=size, mode="bicubic", antialias=True)[0]


def _size(image: Image.Image, cell: int, limits: tuple[int, int]) -> tuple[int, int]:
    width, height = image.size
    try:
        rows, columns = smart_resize(height, width, cell, *limits)
    except ValueError as error:
        raise ValueError(f"the image has {width} x {height} pixels ({error}); crop it") from None
    return rows, columns


def patch_inputs(
    images: Sequence[ImageLike], processor: Qwen2VLImageProcessorPil, how: ImageResize
) -> dict[str, Tensor]:
    """`pixel_values` float32 (patches of all images, 2*3*p*p) and `image_grid_thw` int64 (images, 3).

    A row of the grid is (1, rows, columns) of patches.
    """
    cell = processor.patch_size * processor.merge_size
    resized = [resized_image(image, cell, how).numpy() for image in images]
    inputs = processor(resized, do_resize=False, input_data_format="channels_first", return_tensors="pt")
    return {"pixel_values": inputs["pixel_values"], "image_grid_thw": inputs["image_grid_thw"]}
