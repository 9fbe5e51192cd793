"""Pixels: tiles, SAM 2's square and the region grid from an image, and masks back at its size.

Coordinates live here and nowhere else. Source: bytedance/Sa2VA@9832e1a, whose constants (1 to 12 tiles of 448 px plus a
thumbnail, bicubic resizing by Pillow, SAM 2's image squashed to its square) are kept. One thing differs on purpose: a
region that leaves no cell of the 16x16 grid gets its nearest one.
"""

import os
import warnings
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ImageLike = Image.Image | np.ndarray


def cut_tiles(image: ImageLike, max_tiles: int, side: int) -> list[Image.Image]:
    """RGB tiles of `side` pixels, row by row, at most `max_tiles`; more than one tile adds the thumbnail at the end."""
    picture = to_rgb(image)
    cols, rows = tile_grid(*picture.size, max_tiles, side)
    resized = picture.resize((side * cols, side * rows))
    boxes = [(c * side, r * side, (c + 1) * side, (r + 1) * side) for r in range(rows) for c in range(cols)]
    tiles = [resized.crop(box) for box in boxes]
    return tiles if len(tiles) == 1 else [*tiles, picture.resize((side, side))]


def tile_pixels(tiles: Sequence[Image.Image]) -> torch.Tensor:
    """float32 (tiles, 3, S, S), ImageNet-normalised."""
    pixels = torch.stack([_to_tensor(tile) for tile in tiles]).float() / 255
    return _normalise(pixels, torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD))


def sam_pixels(image: ImageLike, side: int) -> torch.Tensor:
    """float32 (1, 3, side, side): the image squashed to SAM 2's square.

    Mean and standard deviation are rounded to bfloat16 first, as the reference does at prediction: checkpoints are
    scored with that, and un-rounded constants move mask logits visibly.
    """
    squashed = to_rgb(image).resize((side, side))
    mean, std = (torch.tensor(c).bfloat16().float() for c in (IMAGENET_MEAN, IMAGENET_STD))
    return _normalise(_to_tensor(squashed)[None].float() / 255, mean, std)


def region_cells(regions: np.ndarray, grid: int) -> torch.Tensor:
    """bool (N, g, g) from region masks (N, H, W): the cells of the token grid each region owns.

    A cell belongs to a region when the region covers its sample point (nearest interpolation). A thin region may cover
    none; it then gets the cell nearest to one of its pixels, and a warning says so.

    Raises:
        ValueError: the array is not (N, H, W), or a region has no pixel at all.
    """
    masks = torch.as_tensor(np.asarray(regions)).bool()
    if masks.ndim != 3 or not len(masks):
        raise ValueError(f"mask_prompts must be (N, H, W) with N >= 1 for each image, got shape {tuple(masks.shape)}")
    cells = F.interpolate(masks[None].float(), size=(grid, grid), mode="nearest")[0].bool()
    for number, (mask, cell) in enumerate(zip(masks, cells, strict=True), start=1):
        if not mask.any():
            raise ValueError(f"mask_prompts: region {number} has no pixel; drop it or draw it")
        if not cell.any():
            warnings.warn(
                f"region {number} ({int(mask.sum())} px) misses every cell of the {grid}x{grid} grid; "
                "its nearest cell is used, so the model sees it only roughly",
                stacklevel=3,
            )
            cell[_nearest_cell(mask, grid)] = True
    return cells


def tile_grid(width: int, height: int, max_tiles: int = 12, tile_size: int = 448) -> tuple[int, int]:
    """(columns, rows) whose shape is nearest to the image's; on a tie the larger grid wins if the image fills it.

    >>> tile_grid(700, 640), tile_grid(420, 380), tile_grid(1280, 720, max_tiles=1)
    ((2, 2), (1, 1), (1, 1))
    """
    grids = [(c, r) for c in range(1, max_tiles + 1) for r in range(1, max_tiles // c + 1)]
    best, best_gap = (1, 1), float("inf")
    for cols, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        gap = abs(width / height - cols / rows)
        fills = width * height > 0.5 * tile_size**2 * cols * rows
        if gap < best_gap or (gap == best_gap and fills):
            best, best_gap = (cols, rows), gap
    return best


def to_rgb(image: ImageLike) -> Image.Image:
    """The image as PIL RGB.

    Raises:
        ValueError: an array that is not uint8 (H, W, 3), or no image at all.
    """
    if not isinstance(image, ImageLike):
        open_it = f"; open it: PIL.Image.open({str(image)!r})" if isinstance(image, str | os.PathLike) else ""
        raise ValueError(f"image is {image!r:.100}, expected a PIL image or a uint8 array (H, W, 3){open_it}")
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise ValueError(f"an image array must be uint8 (H, W, 3), got {image.dtype} {image.shape}")
        image = Image.fromarray(image)
    return image.convert("RGB")


def upsample_mask_logits(mask_logits: torch.Tensor, size: tuple[int, int], sam_image_size: int = 1024) -> torch.Tensor:
    """float32 (K, H, W) logits at image size from the decoder's (K, h, w).

    In two steps, over SAM 2's square, as the reference does: going straight to the image moves 0.5 % of the pixels.
    """
    square = F.interpolate(mask_logits[:, None].float(), size=(sam_image_size,) * 2, mode="bilinear")
    return F.interpolate(square, size=tuple(size), mode="bilinear")[:, 0]


def _to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)  # uint8 (3, H, W)


def _normalise(pixels: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    return (pixels - mean[:, None, None]) / std[:, None, None]


def _nearest_cell(mask: torch.Tensor, grid: int) -> tuple[int, int]:
    """Cell whose sample point lies nearest to a pixel of the region."""
    pixels = mask.nonzero().double() * grid / torch.tensor(mask.shape).double()  # (n, 2) in cells
    cells = pixels.round().clamp(max=grid - 1)
    row, col = cells[(pixels - cells).pow(2).sum(dim=1).argmin()].long().tolist()
    return row, col
