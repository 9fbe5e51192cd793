"""Image files as uint8 RGB arrays, rotated by their EXIF orientation.

Grey of more than 8 bit (X-ray detectors give 10 to 16) needs a white level: the value that is mapped to 255. It is the
same for all images of a data set or series, see `grey_levels`.
"""

import io
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")  # of images in a folder
QUARTER_TURNS = (5, 6, 7, 8)  # EXIF orientations that swap height and width
WHITEST = 2**16 - 1
WHITE_IS_ZERO = 0  # of PhotometricInterpretation, TIFF 6.0
WHITE_PERCENTILE = 99.9  # of the pixels, so that hot pixels or bright letters do not darken the image


def load_image(path: Path, white_level: int | None = None) -> np.ndarray:
    """The picture in an image file, upright and in RGB.

    EXIF rotation is applied. Grey is repeated on the three channels. Alpha is dropped, not blended, as
    by `convert("RGB")` in Sa2VA. 8-bit images are not scaled.

    Args:
        path: the file.
        white_level: grey of more than 8 bit is mapped to value * 255 / white_level, at most 255. None: the
            `robust_white` of this image; frames of one series then differ.

    Returns:
        uint8 (H, W, 3) RGB, 0..255.

    Raises:
        ValueError: missing, empty, truncated, not an image, animated or multi-page, or grey that is not an integer in
            0..65535 or whose 0 is white; the message names the file and the remedy.
    """
    return _to_rgb(_read(path, decode=True), path, white_level)


def load_for_model(path: Path, white_level: int | None = None) -> tuple[np.ndarray, str]:
    """`load_image` for a single picture, and a line that states its white level; "" for 8-bit images.

    Raises:
        ValueError: as `load_image`.
    """
    image = _read(path, decode=True)
    if not _is_deep(image):
        return _to_rgb(image, path, None), ""
    level = white_level or robust_white(np.bincount(_grey(image, path).ravel()))
    source = "" if white_level else f", the {WHITE_PERCENTILE} % point of its pixels; --bit_depth sets it"
    return _to_rgb(image, path, level), f"{path.name}: grey of more than 8 bit, white is {level}{source}"


def grey_histogram(path: Path) -> np.ndarray:
    """int64 (n,), n at most 65536: number of pixels with each value in a grey image of more than 8 bit.

    Raises:
        ValueError: as `load_image`.
    """
    return np.bincount(_grey(_read(path, decode=True), path).ravel())


def load_deep(path: Path) -> np.ndarray:
    """uint16 (H, W): the stored values of a grey image of more than 8 bit, upright.

    Raises:
        ValueError: as `load_image`.
    """
    return _grey(_read(path, decode=True), path).astype(np.uint16)


def robust_white(histogram: np.ndarray) -> int:
    """The value that `WHITE_PERCENTILE` of the pixels do not exceed.

    At least 255, so that an 8-bit picture in a 16-bit file stays as it is.

    >>> robust_white(np.bincount([100] * 9999 + [65535]))
    255
    >>> robust_white(np.bincount([1000] * 9999 + [65535]))
    1000
    """
    up_to = np.cumsum(histogram)  # pixels at or below each value
    return max(255, int(np.searchsorted(up_to, WHITE_PERCENTILE / 100 * up_to[-1])))


def white_of(bit_depth: int | None) -> int | None:
    """The white level of a number of bits, 4095 of 12; None of None.

    Raises:
        ValueError: not 8 to 16.
    """
    if bit_depth is not None and not 8 <= bit_depth <= 16:
        raise ValueError(f"bit_depth: got {bit_depth}; give 8 to 16, the bits that the detector wrote")
    return None if bit_depth is None else 2**bit_depth - 1


def decode_image(data: bytes, name: str, white_level: int | None = None) -> np.ndarray:
    """The picture in the bytes of an image file; otherwise as `load_image`, `name` standing for the path in messages.

    Returns:
        uint8 (H, W, 3) RGB, 0..255.

    Raises:
        ValueError: as `load_image`.
    """
    return _to_rgb(_still(io.BytesIO(data), name, not data, decode=True), name, white_level)


def image_size(path: Path) -> tuple[int, int]:
    """Size (H, W) in pixels after EXIF rotation, from the header alone (fast; damaged pixels go unnoticed).

    Raises:
        ValueError: as `load_image`, for faults of the header.
    """
    return image_header(path)[0]


def image_header(path: Path) -> tuple[tuple[int, int], bool]:
    """`image_size`, and whether the file holds grey of more than 8 bit.

    Raises:
        ValueError: as `image_size`.
    """
    image = _read(path, decode=False)
    orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation)
    turned = orientation in QUARTER_TURNS and image.format != "TIFF"  # Pillow has already turned the size of a TIFF
    size = image.size if turned else (image.height, image.width)
    return size, _is_deep(image)


def is_turned(path: Path) -> bool:
    """Whether EXIF says that the picture is to be turned or mirrored.

    Raises:
        ValueError: as `image_size`.
    """
    return Image.Image.getexif(_read(path, decode=False)).get(ExifTags.Base.Orientation, 1) != 1


def load_grid(path: Path, palette_colours: bool = False) -> np.ndarray:
    """The stored numbers of a mask file after EXIF rotation, (H, W) or (H, W, C).

    A palette gives its indices if its first colour is black, the background. It gives its colours if it is grey or
    begins with another colour, as PNG optimisers write them, in any order. A colour that is declared transparent gives
    an alpha channel.

    Args:
        path: the file.
        palette_colours: give the colours of every palette; an index may have another meaning in another file.

    Raises:
        ValueError: as `load_image`.
    """
    image = _read(path, decode=True)
    if image.mode == "P":
        colours = np.asarray(image.convert("RGBA" if "transparency" in image.info else "RGB"))
        grey = (colours[..., :3] == colours[..., :1]).all()
        if palette_colours or grey or (image.getpalette() or [0, 0, 0])[:3] != [0, 0, 0]:
            return colours
    elif "transparency" in image.info:
        return np.asarray(image.convert("RGBA"))
    return np.asarray(image)


def _read(path: Path, decode: bool) -> Image.Image:
    """The still image in a file, decoded and upright, or only its header (with the file closed again)."""
    if not path.is_file():
        raise ValueError(f"{path}: image file not found; put it there, or delete its record")
    return _still(path, path, path.stat().st_size == 0, decode)


def _still(source: Path | io.BytesIO, name: Path | str, empty: bool, decode: bool) -> Image.Image:
    """The still image in a file or in memory; see `_read`. Pillow turns 0 into black for 8 bit, not for more."""
    try:
        with Image.open(source) as image:
            frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)  # MPO: a phone's JPEG with a preview
            tags = getattr(image, "tag_v2", {})  # of TIFF
            inverted = _is_deep(image) and tags.get(ExifTags.Base.PhotometricInterpretation) == WHITE_IS_ZERO
            if decode and frames == 1 and not inverted:
                return ImageOps.exif_transpose(image)
            Image.Image.getexif(image)  # while the file is open; PNG's own getexif would decode all pixels
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, EOFError, struct.error, ...
        reason = "the file is empty" if empty else f"{type(error).__name__}: {error}"
        remedy = "check its permissions" if isinstance(error, PermissionError) else "save it again as PNG or JPEG"
        raise ValueError(f"{name}: not a readable image ({reason}); {remedy}") from error
    if inverted:
        raise ValueError(f"{name}: grey of more than 8 bit in which 0 is white; save it as PNG, with 0 as black")
    if frames != 1:
        raise ValueError(f"{name}: holds {frames} frames, expected one; save each frame as its own PNG or JPEG")
    return image


def _is_deep(image: Image.Image) -> bool:
    """Whether it is grey of more than 8 bit."""
    return image.mode.startswith(("I", "F"))


def _to_rgb(image: Image.Image, name: Path | str, white_level: int | None) -> np.ndarray:
    """uint8 (H, W, 3) RGB of a decoded image, by the rule in `load_image`."""
    if not _is_deep(image):
        return np.array(image.convert("RGB"))
    grey = _grey(image, name)
    return grey_to_rgb(grey, white_level or robust_white(np.bincount(grey.ravel())))


def grey_to_rgb(grey: np.ndarray, white_level: int) -> np.ndarray:
    """uint8 (H, W, 3) of unsigned grey (H, W) of any depth: value * 255 / white_level, at most 255."""
    scaled = np.round(np.minimum(grey, white_level) * (255 / white_level)).astype(np.uint8)
    return np.repeat(scaled[:, :, None], 3, axis=2)


def _grey(image: Image.Image, name: Path | str) -> np.ndarray:
    """(H, W) integers in 0..65535: the values of a grey image of more than 8 bit; ValueError for other values."""
    grey = np.asarray(image)
    if grey.dtype.kind not in "iu" or grey.min() < 0 or grey.max() > WHITEST:
        raise ValueError(
            f"{name}: grey values are {grey.dtype} in {grey.min()}..{grey.max()}, expected integers in 0..65535;"
            " convert it to 8-bit PNG"
        )
    return grey
