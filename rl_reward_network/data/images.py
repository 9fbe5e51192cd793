"""Image files as uint8 RGB arrays, rotated by their EXIF orientation; the only reader of pixels but that of DICOM.

Grey of more than 8 bit becomes 8 bit here, by the window of its data set (`bit_depth.py`).
"""

import io
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from rl_reward_network.bit_depth import WHITEST, GreyWindow, common_window, grey_to_rgb, is_cut, is_deep, window_of_bits

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")  # of images in a folder
PROMPT_KEY = "sa2va_prompt"  # of the text in a PNG that `segment` has written: the prompt of the mask
SHEET = "contact_sheet.png"  # beside the masks that `segment` writes of several images
SEEN_KEY = "sa2va_seen"  # likewise: whether the model has seen the image in training
SMALLEST = 8  # pixels of a side; the observation of the prompt policy needs as many
MOST_PIXELS = 178_956_970  # Pillow refuses more
CHANNELS = (1, 3, 4)  # grey, RGB, RGB with alpha
QUARTER_TURNS = (5, 6, 7, 8)  # EXIF orientations that swap height and width
OTHER_COLOURS = ("CMYK", "YCbCr", "LAB", "RGBX")  # modes whose channels are neither RGB nor alpha
WHITE_IS_ZERO = 0  # of PhotometricInterpretation, TIFF 6.0
DICOM_MARK, GZIP_MARK = b"DICM", b"\x1f\x8b"  # the former after 128 bytes
MOST_DECODED = 2**29  # bytes; 1200 grey images of 512 pixels with their masks need 0.7 of it
_KEPT: OrderedDict[Hashable, tuple[np.ndarray, tuple[int, ...]]] = OrderedDict()  # grey as one channel, masks as bits
_used, _LOCK = 0, Lock()  # bytes of them
START = 200  # bytes that tell what a file is that is no image


def load_image(path: Path, grey: GreyWindow | None = None) -> np.ndarray:
    """The picture in an image file, upright and in RGB: uint8 (H, W, 3).

    Grey is repeated on the three channels. Alpha is dropped, not blended, as by `convert("RGB")` in Sa2VA. 8-bit images
    are not scaled; `grey` is the window of more than 8 bit, None: that of this image alone, so that frames differ.

    ValueError with file and remedy: missing, empty, truncated, not an image, too large, animated or multi-page, colour
    of 16 bit per channel, or grey that is not an integer in 0..65535 or whose 0 is white.
    """
    return _to_rgb(_read(path), path, grey)


def decoded_once(key: Hashable, decode: Callable[[], np.ndarray]) -> np.ndarray:
    """What `decode` returns, from memory where this process has it: checks, training and evaluation share one decoding.

    At most `MOST_DECODED` bytes are kept, so that memory does not grow with the data. `key` tells the content, e.g.
    path, time stamp and window; `decode` gives uint8 (H, W, 3), or bool (H, W). The array is the caller's own.
    """
    with _LOCK:
        if kept := _KEPT.get(key):
            _KEPT.move_to_end(key)
    if kept:
        packed, shape = kept
        if packed.ndim == 1:
            return np.unpackbits(packed, count=math.prod(shape)).reshape(shape).astype(bool)
        return np.broadcast_to(packed, shape).copy()
    found = decode()
    grey = found.ndim == 3 and bool((found == found[..., :1]).all())
    packed = np.packbits(found) if found.dtype == bool else found[..., :1].copy() if grey else found.copy()
    global _used
    with _LOCK:
        if key not in _KEPT and packed.nbytes <= MOST_DECODED:
            _KEPT[key] = packed, found.shape
            _used += packed.nbytes
        while _used > MOST_DECODED:
            _used -= _KEPT.popitem(last=False)[1][0].nbytes
    return found


def file_stamp(path: Path) -> Hashable:
    """Path, times, length and number of a file, for `decoded_once`; the path alone where it is missing."""
    try:
        stat = path.stat()
    except OSError:
        return str(path)
    return str(path), stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino


def load_for_model(
    path: Path, grey: GreyWindow | None = None, most_pixels: int = MOST_PIXELS
) -> tuple[np.ndarray, str]:
    """`load_image`, and a line that states its window; "" for 8-bit images.

    A picture of more than `most_pixels` is refused before it is decoded.
    """
    image = _read(path, most_pixels=most_pixels)
    if not is_deep(image):
        return _to_rgb(image, path), ""
    used = grey or common_window([_grey(image, path)])
    source = "" if grey else ", beyond each are 0.1 % of its pixels; --bit_depth sets them"
    return _to_rgb(image, path, used), f"{path.name}: grey of more than 8 bit, {used}{source}"


def as_image(image: Any, window: GreyWindow | None = None) -> np.ndarray:
    """Whatever stands for one image as uint8 (H, W, 3) RGB: a path, a picture of Pillow, an array or a tensor.

    Arrays and tensors are grey (H, W), or have 1, 3 or 4 channels, last (H, W, C) or first (C, H, W); alpha is dropped.
    Floats are 0 to 1, whole numbers 0 to 255; grey of up to 65535 gets the `window`, None: its own, as in `load_image`.
    A picture of Pillow is turned by its EXIF orientation, as a file is. ValueError, in one sentence, for anything else.
    """
    if isinstance(image, str | Path):
        return load_image(Path(image), window)
    if isinstance(image, Image.Image):
        if fault := _fault(image, MOST_PIXELS):
            raise ValueError(f"the image: {fault}")
        return _to_rgb(ImageOps.exif_transpose(image), "the image", window)
    array = as_array(image)
    if array.ndim == 3 and array.shape[2] not in CHANNELS and array.shape[0] in CHANNELS:
        array = np.moveaxis(array, 0, 2)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in CHANNELS) or not array.size:
        raise ValueError(
            f"the image has shape {array.shape}, expected one image: (H, W), or (H, W, C) or (C, H, W) with 1, 3 or 4"
            " channels"
        )
    grey = array.ndim == 2 or array.shape[2] == 1
    array = array.reshape(array.shape[:2]) if grey else array[..., :3]
    floats, most = array.dtype.kind == "f", WHITEST if grey else 255
    if array.dtype.kind not in "iuf" or not 0 <= array.min() <= array.max() <= (1 if floats else most):  # also NaN
        raise ValueError(
            f"the image holds {array.dtype} in {array.min()}..{array.max()}, expected floats in 0..1, or whole numbers"
            f" in 0..{most}; scale it"
        )
    array = np.round(255 * array) if floats else array
    deep = array.dtype == np.uint16 or array.max() > 255
    return grey_to_rgb(array.astype(np.uint16), window if deep else None) if grey else array.astype(np.uint8)


def as_array(values: Any) -> np.ndarray:
    """An array of what is one, or a tensor of torch on any device; ValueError for anything else."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()  # NumPy has no bfloat16
    if not isinstance(values, np.ndarray):
        raise ValueError(f"got {type(values).__name__}, expected a path, a picture of Pillow, an array or a tensor")
    return values


def load_deep(path: Path) -> np.ndarray:
    """uint16 (H, W): the stored values of a grey image of more than 8 bit, upright. Raises as `load_image`."""
    return _grey(_read(path), path).astype(np.uint16)


def decode_image(data: bytes, name: str, bit_depth: int | None = None) -> np.ndarray:
    """As `load_image`, from the bytes of an image file; `name` stands for the path in messages.

    The window of grey of more than 8 bit is the range of `bit_depth`, or that of this image.
    """
    return _to_rgb(_still(io.BytesIO(data), name, data[:START]), name, window_of_bits(bit_depth))


def text_of(path: Path, name: str) -> str | None:
    """A text in a PNG file; None where there is none, or the file is unreadable."""
    try:
        with Image.open(path) as image:
            return image.info.get(name)
    except (OSError, Image.DecompressionBombError):
        return None


def image_size(path: Path) -> tuple[int, int]:
    """Size (H, W) in pixels after EXIF rotation, from the header alone (fast; damaged pixels go unnoticed)."""
    return _upright_size(_read(path, decode=False))


def image_header(path: Path) -> tuple[tuple[int, int], bool]:
    """`image_size` of an image to work on, whose sides are checked, and whether it is grey of more than 8 bit."""
    image = _read(path, decode=False)
    size = _upright_size(image)
    check_sides(size, path)
    return size, is_deep(image)


def check_sides(size: tuple[int, int], name: Path | str) -> None:
    """Refuse an image too small to work on: a side is shorter than `SMALLEST`."""
    if min(size) < SMALLEST:
        raise ValueError(
            f"{name}: the image has {size[1]} x {size[0]} pixels (width x height), expected at least {SMALLEST} x"
            f" {SMALLEST}; leave it out"
        )


def _upright_size(image: Image.Image) -> tuple[int, int]:
    orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation)
    turned = orientation in QUARTER_TURNS and image.format != "TIFF"  # Pillow has already turned the size of a TIFF
    return image.size if turned else (image.height, image.width)


def load_grid(path: Path, palette_colours: bool = False) -> np.ndarray:
    """The stored numbers of a mask file after EXIF rotation, (H, W) or (H, W, C). Raises as `load_image`.

    A palette gives its indices if its first colour is black, the background. It gives its colours if it is grey or
    begins with another colour, as PNG optimisers write them, in any order; with `palette_colours` always, since an
    index may have another meaning in another file. A colour that is declared transparent gives an alpha channel.
    """
    image = _read(path)
    if image.mode == "P":
        colours = np.asarray(image.convert("RGBA" if "transparency" in image.info else "RGB"))
        grey = (colours[..., :3] == colours[..., :1]).all()
        if palette_colours or grey or (image.getpalette() or [0, 0, 0])[:3] != [0, 0, 0]:
            return colours
    elif "transparency" in image.info:
        return np.asarray(image.convert("RGBA"))
    return np.asarray(image.convert("RGB") if image.mode in OTHER_COLOURS else image)


def decode_grid(data: bytes, name: str, most_pixels: int) -> np.ndarray:
    """The stored numbers in the bytes of an image file, (H, W) or (H, W, C). Arguments as in `load_for_model`."""
    return np.asarray(_still(io.BytesIO(data), name, data[:START], most_pixels=most_pixels))


def check_name(path: Path) -> None:
    """Refuse a name that is not UTF-8, as old archives write it: it can be neither printed nor stored."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = str(path).encode(errors="surrogateescape").decode(errors="replace")
        raise ValueError(
            f"{shown}: its name is not UTF-8; rename it, e.g. all of a folder by convmv -r -f latin1 -t utf8 --notest"
        ) from None


def missing_file(path: Path) -> str:
    """Why a path is no file, with the remedy."""
    if path.is_symlink():
        return f"{path}: a link whose target is missing; fetch it (git annex get, datalad get), or copy the file here"
    return f"{path}: image file not found; put it there, or delete its record"


def start_of(path: Path) -> bytes:
    """The first bytes of a file, for `not_fetched`; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(START)
    except OSError:  # the decoder meets it again, and tells
        return b""


def not_fetched(start: bytes) -> tuple[str, str] | None:
    """What a file is that stands in the place of an image or DICOM file, and the remedy; None for anything else."""
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself", "fetch the files: git lfs pull"
    if b"annex/objects/" in start:
        return "a git-annex pointer, not the file itself", "fetch the files: git annex get (or datalad get)"
    if start.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"<"):
        return "a web page (HTML or XML)", "download it again; opened as text, it may say why (a login, a moved file)"
    return None


def _read(path: Path, decode: bool = True, most_pixels: int = MOST_PIXELS) -> Image.Image:
    """The still image in a file, decoded and upright, or only its header (with the file closed again)."""
    check_name(path)
    if not path.is_file():
        raise ValueError(missing_file(path))
    return _still(path, path, start_of(path), decode, most_pixels)


def _still(
    source: Path | io.BytesIO, name: Path | str, start: bytes, decode: bool = True, most_pixels: int = MOST_PIXELS
) -> Image.Image:
    """The still image in a file or in memory; see `_read`."""
    try:
        with Image.open(source) as image:
            fault = _fault(image, most_pixels)
            if decode and not fault:
                return ImageOps.exif_transpose(image)
            Image.Image.getexif(image)  # while the file is open; PNG's own getexif would decode all pixels
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, EOFError, struct.error, ...
        reason, remedy = _unreadable(error, start)
        raise ValueError(f"{name}: not a readable image ({reason}); {remedy}") from error
    if fault:
        raise ValueError(f"{name}: {fault}")
    return image


def _fault(image: Image.Image, most_pixels: int) -> str:
    """Why an image that Pillow can open is not read, with the remedy; "" for one that is."""
    if image.width * image.height > most_pixels:
        million = most_pixels / 1e6
        return f"{image.width} x {image.height} pixels, expected at most {million:.0f} million; make it smaller"
    if is_cut(image):
        return "16 bit per channel, of which only 8 would be read; save it as 16-bit grey, or scale it to 8-bit colour"
    tags = getattr(image, "tag_v2", {})  # of TIFF; Pillow turns 0 into black for 8 bit, not for more
    if is_deep(image) and tags.get(ExifTags.Base.PhotometricInterpretation) == WHITE_IS_ZERO:
        return "grey of more than 8 bit in which 0 is white; save it as PNG, with 0 as black"
    frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)  # MPO: a phone's JPEG with a preview
    return f"holds {frames} frames, expected one; save each frame as its own PNG or JPEG" if frames != 1 else ""


def _unreadable(error: Exception, start: bytes) -> tuple[str, str]:
    if found := not_fetched(start):
        return found
    if start[128:132] == DICOM_MARK:
        return "a DICOM file", "import its folder by sa2va-rl data import"
    if start.startswith(GZIP_MARK):
        return "a gzip file, perhaps a volume", "write each slice as PNG"
    if isinstance(error, PermissionError):
        return str(error), "check its permissions"
    if not start:
        return "the file is empty", "copy or download it again"
    if isinstance(error, Image.DecompressionBombError | MemoryError):
        return str(error).split(",")[0], f"make it smaller, at most {MOST_PIXELS // 10**6} million pixels"
    again = "" if isinstance(error, UnidentifiedImageError) else "copy or download it again, or "
    return f"{type(error).__name__}: {error}", f"{again}save it again as PNG or JPEG"


def _to_rgb(image: Image.Image, name: Path | str, grey: GreyWindow | None = None) -> np.ndarray:
    return grey_to_rgb(_grey(image, name), grey) if is_deep(image) else np.array(image.convert("RGB"))


def _grey(image: Image.Image, name: Path | str) -> np.ndarray:
    """(H, W) integers in 0..65535: the values of a grey image of more than 8 bit; ValueError for other values."""
    grey = np.asarray(image)
    if grey.dtype.kind not in "iu" or grey.min() < 0 or grey.max() > WHITEST:
        raise ValueError(
            f"{name}: grey values are {grey.dtype} in {grey.min()}..{grey.max()}, expected integers in 0..65535;"
            " convert it to 8-bit PNG"
        )
    return grey


def ridge_strength(grey: np.ndarray, sigmas: Sequence[float]) -> np.ndarray:
    """Sato's tubeness of float (H, W): float (2, H, W), at least 0, of dark tubes, then of bright ones.

    Equal to two calls of `skimage.filters.sato`, which would compute the second derivatives twice. `sigmas` are the
    radii of the tubes, in pixels.
    """
    from skimage import feature  # takes long to import

    strongest = np.zeros((2, *grey.shape))
    for sigma in sigmas:
        hessian = feature.hessian_matrix(grey, sigma, mode="reflect", use_gaussian_derivatives=True)
        largest, smallest = feature.hessian_matrix_eigvals(hessian)
        np.maximum(strongest, sigma**2 * np.stack([largest, -smallest]), out=strongest)
    return strongest
