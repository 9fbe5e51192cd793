"""Image files as uint8 RGB arrays, turned the way the EXIF orientation asks."""

import io
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")  # of what is an image in a folder
QUARTER_TURNS = (5, 6, 7, 8)  # EXIF orientations that swap height and width
INTEGER_RANGES = (2**8 - 1, 2**12 - 1, 2**16 - 1)  # 8 bit, 12 bit (X-ray detectors, DICOM exports), 16 bit


def load_image(path: Path) -> np.ndarray:
    """The picture in an image file, as a person would see it.

    EXIF rotation is applied. Grey is repeated on the three channels. Alpha is dropped, not blended: the stored colours
    are what Sa2VA's own `convert("RGB")` sees. Grey of more than 8 bit is divided by the full range of the smallest of
    8, 12 and 16 bit that holds its largest value, never by the value itself, so that frames of one series stay
    comparable; always dividing by 16 bit would turn a 12-bit angiogram black.

    Returns:
        uint8 (H, W, 3) RGB, 0..255.

    Raises:
        ValueError: missing, empty, truncated, not an image, animated or multi-page, or grey that is not an integer in
            0..65535; the message names the file and the remedy.
    """
    return _to_rgb(_read(path, decode=True), path)


def decode_image(data: bytes, name: str) -> np.ndarray:
    """The picture in the bytes of an image file; otherwise as `load_image`, `name` standing for the path in messages.

    Returns:
        uint8 (H, W, 3) RGB, 0..255.

    Raises:
        ValueError: as `load_image`.
    """
    return _to_rgb(_still(io.BytesIO(data), name, not data, decode=True), name)


def image_size(path: Path) -> tuple[int, int]:
    """Size (H, W) in pixels after EXIF rotation, from the header alone (fast; damaged pixels go unnoticed).

    Raises:
        ValueError: as `load_image`, as far as the header tells.
    """
    image = _read(path, decode=False)
    orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation)
    turned = orientation in QUARTER_TURNS and image.format != "TIFF"  # Pillow has already turned the size of a TIFF
    return image.size if turned else (image.height, image.width)


def load_grid(path: Path) -> np.ndarray:
    """The stored numbers of a mask file after EXIF rotation, (H, W) or (H, W, C).

    A palette that is grey (some PNG optimisers write one, in any order) gives its colours, another one its indices.

    Raises:
        ValueError: as `load_image`.
    """
    image = _read(path, decode=True)
    if image.mode == "P":
        colours = np.asarray(image.convert("RGB"))
        if (colours == colours[:, :, :1]).all():
            return colours
    return np.asarray(image)


def _read(path: Path, decode: bool) -> Image.Image:
    """The still image in a file, decoded and upright, or only its header (with the file closed again)."""
    if not path.is_file():
        raise ValueError(f"{path}: image file not found; put it there, or delete its record")
    return _still(path, path, path.stat().st_size == 0, decode)


def _still(source: Path | io.BytesIO, name: Path | str, empty: bool, decode: bool) -> Image.Image:
    """The still image in a file or in memory; see `_read`."""
    try:
        with Image.open(source) as image:
            frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)  # MPO: a phone's JPEG with a preview
            if decode and frames == 1:
                return ImageOps.exif_transpose(image)
            Image.Image.getexif(image)  # while the file is open; PNG's own getexif would decode all pixels
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, EOFError, struct.error, ...
        reason = "the file is empty" if empty else f"{type(error).__name__}: {error}"
        remedy = "check its permissions" if isinstance(error, PermissionError) else "save it again as PNG or JPEG"
        raise ValueError(f"{name}: not a readable image ({reason}); {remedy}") from error
    if frames != 1:
        raise ValueError(f"{name}: holds {frames} frames, expected one; save each frame as its own PNG or JPEG")
    return image


def _to_rgb(image: Image.Image, name: Path | str) -> np.ndarray:
    """uint8 (H, W, 3) RGB of a decoded image, by the rule in `load_image`."""
    if image.mode.startswith(("I", "F")):
        return np.repeat(_to_8_bit(np.asarray(image), name)[:, :, None], 3, axis=2)
    return np.array(image.convert("RGB"))


def _to_8_bit(grey: np.ndarray, name: Path | str) -> np.ndarray:
    """uint8 (H, W) from grey values of more than 8 bit, by the rule in `load_image`."""
    if grey.dtype.kind not in "iu" or grey.min() < 0 or grey.max() > INTEGER_RANGES[-1]:
        raise ValueError(
            f"{name}: grey values are {grey.dtype} in {grey.min()}..{grey.max()}, expected integers in 0..65535;"
            " convert it to 8-bit PNG"
        )
    full = next(limit for limit in INTEGER_RANGES if grey.max() <= limit)
    return np.round(grey * (255 / full)).astype(np.uint8)
