"""Masks and expected errors over images, and their legends; the only place that paints masks."""

import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from PIL import Image
from skimage.segmentation import find_boundaries

from rl_reward_network.report import page

PANEL = 400  # pixels of the longer side of a picture in a report
SHOWN, SHEET_SIDE = 4, 160  # images in a picture of TensorBoard, and the pixels of each side: logs stay small
TINT, OPAQUE = 0.3, 0.7  # opacity of a mask's inside, and of masks by class, which have no outline
COVERED = 64  # of 255: the share of a pixel that a shrunk mask must cover; nearest neighbour would lose thin vessels
GREY = 128  # of 255: brightness of the image below the colours of the scale
Colour = tuple[int, int, int]  # RGB, 0..255
TRUTH: Colour = (0, 190, 255)  # these three are far apart, too, for whoever does not see red, green or blue
BEFORE: Colour = (220, 50, 47)  # the mask of the model as it was
AFTER: Colour = (255, 160, 0)  # the mask in question: of what was trained, is deployed, or was asked
AGREE, MISSED, FALSE = (255, 255, 255), TRUTH, AFTER  # a mask against the truth: in both, in the truth alone, in itself


def picture(
    title: str,
    image: np.ndarray,
    masks: Sequence[tuple[str, np.ndarray | None, Colour]],
    errors: tuple[str, np.ndarray] | None = None,
    more: Sequence[tuple[str, bytes]] = (),
) -> str:
    """HTML of one test image, uint8 (H, W, 3) RGB, and of its masks: caption, bool (H, W) or None, and colour of each.

    `errors` are a caption and expected errors, float (H, W) in [0, 1]; `more` further JPEG pictures with their
    captions. `legend` says what the colours mean.
    """
    panels = [("image", draw_mask(image, None, TRUTH))]
    panels += [*((caption, draw_mask(image, mask, colour)) for caption, mask, colour in masks), *more]
    if errors is not None:
        panels.append((errors[0], draw_errors(image, errors[1])))
    return page.panels(title, panels)


def legend(colours: Mapping[str, Colour], errors: bool = False) -> str:
    """HTML: what the colours of masks mean, by name, and those of expected errors."""
    named = colours.items()
    squares = (f'<span><span style="color: rgb{of}">&#9632;</span> {page.text(name)}</span>' for name, of in named)
    words = f'<p class="legend">Masks: {", ".join(squares)}.</p>'
    if not errors:
        return words
    scale = page.figure(error_scale(), "Colour scale from 0 to 1")
    return f'{words}<p class="legend">Expected errors: probability that the mask is wrong at a pixel. {scale}</p>'


def compare_masks(mask: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """uint8 (H, W, 3): where a mask and the truth, bool (H, W), agree, what is missed and what is false, on black."""
    painted = np.zeros((*mask.shape, 3), np.uint8)
    for where, colour in ((mask & truth, AGREE), (truth & ~mask, MISSED), (mask & ~truth, FALSE)):
        painted[where] = colour
    return painted


def paint_mask(image: np.ndarray, mask: np.ndarray, colour: Colour, opacity: float = TINT) -> np.ndarray:
    """The image, uint8 (h, w, 3) RGB, with a mask in one colour: the inside tinted, and a line 1 pixel wide around it.

    The mask, bool (H, W), may be larger; it is resized to the image so that thin structures remain. Opacity 0 draws the
    line alone.
    """
    painted, mask = image.astype(np.float32), _shrunk(mask, image)
    painted[mask] += opacity * (np.array(colour) - painted[mask])
    painted[find_boundaries(mask, mode="outer")] = colour
    return painted.round().astype(np.uint8)


def draw_classes(image: np.ndarray, masks: Mapping[str, np.ndarray | None], colours: Mapping[str, Colour]) -> bytes:
    """JPEG of a uint8 (H, W, 3) image with masks by class, bool (H, W) or None, later ones over earlier ones."""
    return _jpeg(paint_classes(np.asarray(_panel(image)), masks, colours))


def paint_classes(
    image: np.ndarray, masks: Mapping[str, np.ndarray | None], colours: Mapping[str, Colour]
) -> np.ndarray:
    """The image, uint8 (h, w, 3), with masks by class painted over it, later ones on top; masks may be larger."""
    painted = image.copy()
    for name, mask in masks.items():
        if mask is not None:
            inside = _shrunk(mask, image)
            painted[inside] = ((1 - OPAQUE) * image[inside] + OPAQUE * np.array(colours[name])).round()
    return painted


def class_colours(names: Sequence[str]) -> dict[str, Colour]:
    """A colour for each class, in the order of the names; after twenty they begin again."""
    palette = colormaps["tab20"].colors  # type: ignore[attr-defined]
    ordered = (*palette[::2], *palette[1::2])
    rgb = [tuple(round(255 * part) for part in ordered[number % len(ordered)]) for number in range(len(names))]
    return dict(zip(names, rgb, strict=True))


def _shrunk(mask: np.ndarray, image: np.ndarray) -> np.ndarray:
    """A mask, bool (H, W), at the size of an image, uint8 (h, w, 3)."""
    if mask.shape == image.shape[:2]:
        return mask
    grey = Image.fromarray(np.where(mask, np.uint8(255), np.uint8(0)))
    return np.asarray(grey.resize(image.shape[1::-1], Image.Resampling.BOX)) > COVERED


def mask_sheet(rows: Sequence[tuple[np.ndarray, np.ndarray | None, np.ndarray | None]]) -> np.ndarray | None:
    """uint8 (n * side, 3 * side, 3): image, true mask and mask now of n rows, for TensorBoard; None without rows.

    A row is an image, uint8 (H, W, 3), the true mask and another, bool (H, W) or None.
    """
    lines = []
    for image, truth, mask in rows:
        small = np.asarray(Image.fromarray(image).resize((SHEET_SIDE, SHEET_SIDE)))
        masks = ((truth, TRUTH), (mask, AFTER))
        lines.append([small, *(small if one is None else paint_mask(small, one, colour) for one, colour in masks)])
    return np.concatenate([np.concatenate(line, axis=1) for line in lines]) if lines else None


def draw_mask(image: np.ndarray, mask: np.ndarray | None, colour: Colour) -> bytes:
    """JPEG of a uint8 (H, W, 3) image, at most `PANEL` pixels wide or high, with a bool (H, W) mask painted."""
    pixels = np.asarray(_panel(image))
    return _jpeg(pixels if mask is None else paint_mask(pixels, mask, colour))


def draw_difference(image: np.ndarray, truth: np.ndarray, mask: np.ndarray) -> bytes:
    """JPEG of the image, darkened, with what is `MISSED` and what is `FALSE` in a mask, bool (H, W)."""
    pixels = (0.6 * np.asarray(_panel(image))).astype(np.uint8)
    for only, of in ((truth & ~mask, MISSED), (mask & ~truth, FALSE)):
        pixels[_shrunk(only, pixels)] = of
    return _jpeg(pixels)


def draw_errors(image: np.ndarray, error_map: np.ndarray) -> bytes:
    """JPEG of the image in grey, with the expected errors (float (H, W) in [0, 1]) in red and yellow over it."""
    picture = _panel(image)
    errors = Image.fromarray((error_map * 255).astype(np.uint8)).resize(picture.size, Image.Resampling.BOX)
    return _jpeg(paint_errors(np.asarray(picture.convert("L")), np.asarray(errors) / 255))


def paint_errors(grey: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """uint8 (h, w, 3): expected errors, float (h, w) in [0, 1], in colour over a darkened uint8 (h, w) image."""
    heat = colormaps["hot"](np.sqrt(errors) * 0.8)[..., :3] * 255
    opacity = np.minimum(1, 3 * errors[..., None])
    return (opacity * heat + (1 - opacity) * 0.6 * grey[..., None]).astype(np.uint8)


def _panel(image: np.ndarray) -> Image.Image:
    """The picture of a uint8 (H, W, 3) image, shrunk to at most `PANEL` pixels on its longer side."""
    picture = Image.fromarray(image)
    picture.thumbnail((PANEL, PANEL))
    return picture


def _jpeg(pixels: np.ndarray) -> bytes:
    """JPEG bytes with full colour resolution; chroma subsampling would wash out lines 1 pixel wide."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="JPEG", quality=90, subsampling=0)
    return file.getvalue()


def error_scale() -> Figure:
    """A colour bar from 0 to 1, as over a grey image."""
    figure = Figure(figsize=(3.2, 0.55), layout="constrained")
    axes = figure.subplots()
    shares = np.linspace(0, 1, 256)[None]
    axes.imshow(paint_errors(np.full_like(shares, GREY), shares), aspect="auto", extent=(0, 1, 0, 1))
    ticks = (0, 0.25, 0.5, 0.75, 1)
    axes.set(yticks=[], xticks=ticks, xticklabels=[f"{tick:g}" for tick in ticks])
    axes.tick_params(labelsize=8)
    return figure
