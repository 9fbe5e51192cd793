"""From an image to a model's inputs (tiles, patches, SAM 2's square, regions), and from mask logits to its size.

All conversions of coordinates are in this file.

Source: bytedance/Sa2VA@9832e1a, with its constants (1 to 12 tiles of 448 px plus a thumbnail, bicubic resizing by
Pillow, SAM 2's input squashed to a square). One deliberate difference: a region that covers no cell of the grid gets
the nearest one. The prediction of a Qwen-VL (bytedance/Sa2VA@06912e2) resizes twice: by Pillow to multiples of 28
pixels, then, by the kernel that torchvision uses, to multiples of two patches within limits of the area. Its training
resized once, by the second.
"""

import math
import os
import warnings
from collections.abc import Sequence
from typing import Literal

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from rl_reward_network.bit_depth import is_cut, is_deep

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SCALE_IT = "; scale it to 0..255, all images of a data set alike, e.g. by load_image of rl_reward_network.data.images"
ImageLike = Image.Image | np.ndarray

ImageResize = Literal["prediction", "training"]
FIRST_CELL = 28  # pixels, for both Qwen-VL families
FIRST_PIXELS = (4 * FIRST_CELL**2, 16384 * FIRST_CELL**2)
PIXELS = (512 * FIRST_CELL**2, 2048 * FIRST_CELL**2)  # limits of the area of one image

RegionPrompt = Literal["outline", "crop"]
QUESTIONS: dict[RegionPrompt, str] = {
    "outline": "Please describe the object that is outlined in red.",
    "crop": "Please describe the object in the middle of this picture.",
}
RED = (255, 0, 0)
WIDTH = 1 / 200  # of the outline, as a share of the image's shorter side
MARGIN = 0.25  # of a crop, on each side, as a share of the region's longer side
LEAST_MARGIN = 8  # pixels


def cut_tiles(image: ImageLike, max_tiles: int, side: int) -> list[Image.Image]:
    """At most `max_tiles` RGB tiles of `side` pixels, row by row; if there are several, a thumbnail is the last."""
    rgb = to_rgb(image)
    cols, rows = tile_grid(*rgb.size, max_tiles, side)
    resized = rgb.resize((side * cols, side * rows))
    boxes = [(c * side, r * side, (c + 1) * side, (r + 1) * side) for r in range(rows) for c in range(cols)]
    tiles = [resized.crop(box) for box in boxes]
    return tiles if len(tiles) == 1 else [*tiles, rgb.resize((side, side))]


def tile_pixels(tiles: Sequence[Image.Image]) -> torch.Tensor:
    """float32 (tiles, 3, S, S), ImageNet-normalised."""
    mean, std = (torch.tensor(constants) for constants in (IMAGENET_MEAN, IMAGENET_STD))
    return _normalise(torch.stack([_to_tensor(tile) for tile in tiles]).float() / 255, mean, std)


def sam_pixels(image: ImageLike, side: int) -> torch.Tensor:
    """float32 (1, 3, side, side): the image squashed to SAM 2's square."""
    # Rounded as in the reference's prediction; other constants change the mask logits.
    mean, std = (torch.tensor(c).bfloat16().float() for c in (IMAGENET_MEAN, IMAGENET_STD))
    return _normalise(square_pixels(image, side)[None].float() / 255, mean, std)


def square_pixels(image: ImageLike, side: int) -> torch.Tensor:
    """uint8 (3, side, side): the image squashed to a square, RGB; an image of this size stays as it is."""
    return _to_tensor(to_rgb(image).resize((side, side)))


def region_cells(regions: np.ndarray, grid: int, image: ImageLike | None = None) -> torch.Tensor:
    """bool (N, g, g) from region masks (N, H, W): the cells of the token grid that belong to each region.

    A cell belongs to a region that covers its sample point (nearest interpolation). A thin region may cover none; it
    gets the cell nearest to one of its pixels, with a warning. A ValueError for regions that are not (N, H, W) of bool
    or 0 and 1, not of the size of `image` (if given), or have no pixel.
    """
    given, size = np.asarray(regions), None if image is None else to_rgb(image).size[::-1]
    binary = given.dtype == bool or (given.dtype.kind in "iu" and np.isin(given, (0, 1)).all())
    if not binary or (size is not None and given.shape[1:] != size):
        of_size = f", (H, W) = {size}" if size else ""
        raise ValueError(
            f"mask_prompts: regions must be bool (N, H, W) of the size of their image{of_size}, got {given.dtype} "
            f"{given.shape}; threshold probabilities, and resize to the image"
        )
    masks = torch.as_tensor(given).bool()
    if masks.ndim != 3 or not len(masks):
        raise ValueError(f"mask_prompts must be (N, H, W) with N >= 1 for each image, got shape {tuple(masks.shape)}")
    cells = F.interpolate(masks[None].float(), size=(grid, grid), mode="nearest")[0].bool()
    for number, (mask, cell) in enumerate(zip(masks, cells, strict=True), start=1):
        if not mask.any():
            raise ValueError(f"mask_prompts: region {number} has no pixel; drop it or draw it")
        if not cell.any():
            warnings.warn(
                f"region {number} ({int(mask.sum())} px) misses every cell of the {grid}x{grid} grid; "
                "its nearest cell is used, so its position is only approximate",
                stacklevel=3,
            )
            cell[_nearest_cell(mask, grid)] = True
    return cells


def tile_grid(width: int, height: int, max_tiles: int = 12, tile_size: int = 448) -> tuple[int, int]:
    """(columns, rows) with the aspect ratio nearest to the image's; on a tie, the larger grid if the image fills it.

    >>> tile_grid(700, 640), tile_grid(420, 380), tile_grid(1280, 720, max_tiles=1)
    ((2, 2), (1, 1), (1, 1))
    """
    if max_tiles < 1:
        raise ValueError(f"max_tiles is {max_tiles}, expected 1 or more")
    grids = [(c, r) for c in range(1, max_tiles + 1) for r in range(1, max_tiles // c + 1)]
    best, best_gap = (1, 1), float("inf")
    for cols, rows in sorted(grids, key=math.prod):
        gap = abs(width / height - cols / rows)
        fills = width * height > 0.5 * tile_size**2 * cols * rows
        if gap < best_gap or (gap == best_gap and fills):
            best, best_gap = (cols, rows), gap
    return best


def to_rgb(image: ImageLike) -> Image.Image:
    """The image as PIL RGB; a ValueError for an array that is not uint8 (H, W, 3), more than 8 bit, or no pixels."""
    if not isinstance(image, ImageLike):
        open_it = f"; open it: PIL.Image.open({str(image)!r})" if isinstance(image, str | os.PathLike) else ""
        raise ValueError(f"image is {image!r:.100}, expected a PIL image or a uint8 array (H, W, 3){open_it}")
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise ValueError(f"an image array must be uint8 (H, W, 3), got {image.dtype} {image.shape}{SCALE_IT}")
        image = Image.fromarray(image)
    if not min(image.size):
        raise ValueError(f"an image must have pixels, got {image.width} x {image.height} (width x height)")
    if is_deep(image) or is_cut(image):
        raise ValueError(f"a PIL image must have 8 bit per channel, got mode {image.mode} of 16 or 32{SCALE_IT}")
    return image.convert("RGB")


def upsample_mask_logits(mask_logits: torch.Tensor, size: tuple[int, int], sam_image_size: int = 1024) -> torch.Tensor:
    """float32 (K, H, W) logits at image size (H, W) from those of the masks' grid (K, h, w).

    Two steps, with SAM 2's square in between, as in the reference: a single step would change 0.5 % of the pixels. The
    masks of a side network may be finer than this square, and need one.
    """
    square = mask_logits[:, None].float()
    if max(square.shape[-2:]) < sam_image_size:
        square = F.interpolate(square, size=(sam_image_size,) * 2, mode="bilinear")
    return F.interpolate(square, size=tuple(size), mode="bilinear")[:, 0]


def resized_image(image: ImageLike, cell: int, how: ImageResize) -> Tensor:
    """uint8 (3, h, w), with h and w multiples of `cell`, the side in pixels of an image token.

    "prediction" resizes twice, "training" once; a ValueError if one side is more than 200 times as long as the other.
    """
    rgb = to_rgb(image)
    if how == "prediction":
        height, width = _size(rgb, FIRST_CELL, FIRST_PIXELS)
        rgb = rgb.resize((width, height), Image.Resampling.BICUBIC)
    size, pixels = _size(rgb, cell, PIXELS), _to_tensor(rgb)
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
    """`pixel_values` float32 (patches, 2*3*p*p) and `image_grid_thw` int64 (images, 3): (1, rows, columns)."""
    cell = processor.patch_size * processor.merge_size
    resized = [resized_image(image, cell, how).numpy() for image in images]
    inputs = processor(resized, do_resize=False, input_data_format="channels_first", return_tensors="pt")
    return {"pixel_values": inputs["pixel_values"], "image_grid_thw": inputs["image_grid_thw"]}


def draw_region(image: np.ndarray, region: np.ndarray, how: RegionPrompt) -> np.ndarray:
    """A copy of the image, uint8 (H, W, 3), that shows a region, bool (H, W), not empty; smaller if it is a crop.

    "outline" draws a red line around the region, outside of it (inside only if it is the whole image), so that thin
    objects stay visible; "crop" cuts out its bounding box with a margin.
    """
    if region.dtype != bool or region.shape != image.shape[:2] or not region.any():
        raise ValueError(
            f"the region has {int(region.sum())} pixels, type {region.dtype} and shape {region.shape}, expected 1 or"
            f" more, bool, and the image's shape {image.shape[:2]}"
        )
    if how == "crop":
        rows, columns = (np.flatnonzero(region.any(axis=axis)) for axis in (1, 0))
        longer = max(np.ptp(rows), np.ptp(columns)) + 1
        margin = max(LEAST_MARGIN, round(longer * MARGIN))
        top, left = max(0, rows[0] - margin), max(0, columns[0] - margin)
        return image[top : rows[-1] + 1 + margin, left : columns[-1] + 1 + margin].copy()
    width = max(1, round(min(image.shape[:2]) * WIDTH))
    disc = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (2 * width + 1, 2 * width + 1))
    outline = cv2.dilate(region.astype(np.uint8), disc).astype(bool) & ~region
    if not outline.any():  # the region is the whole image
        outline = cv2.erode(region.astype(np.uint8), disc, borderType=cv2.BORDER_CONSTANT, borderValue=0) == 0
    result = image.copy()
    result[outline] = RED
    return result


def _to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)  # uint8 (3, H, W)


def _normalise(pixels: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    return (pixels - mean[:, None, None]) / std[:, None, None]


def _nearest_cell(mask: torch.Tensor, grid: int) -> tuple[int, int]:
    """(row, column) of the cell whose sample point is nearest to a pixel of the region."""
    pixels = mask.nonzero().double() * grid / torch.tensor(mask.shape).double()  # (n, 2) in cells
    cells = pixels.round().clamp(max=grid - 1)
    row, col = cells[(pixels - cells).pow(2).sum(dim=1).argmin()].long().tolist()
    return row, col
