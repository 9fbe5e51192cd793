"""Atomic writes (files and folders are written beside their place, then renamed into it), and digests of contents."""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

if TYPE_CHECKING:
    import torch

UMASK = os.umask(0)  # there is no other way to read it
os.umask(UMASK)
PICTURES = "trained_on/pictures.safetensors"  # beside weights, in a folder of its own: it would be taken for weights
NAMES_ALONE = "patients are compared by name alone"
LOCK_FILE = ".lock"  # in a folder that is locked
FINGERPRINT_SAMPLES = 65536  # per tensor; of a smaller tensor, all values are read
FULL = (errno.ENOSPC, errno.EDQUOT)
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG)


@contextmanager
def whole_file(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """A temporary path in the same folder; renamed to `path` when the block ends without an error.

    Its permissions are `mode` less those that the umask takes away. A ValueError that names `path` and the remedy if
    the disk is full or `path` is not writable; so for all that writes here.
    """
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}_", suffix=path.suffix)
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            os.chmod(temporary, mode & ~UMASK)  # mkstemp restricts it to the owner
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
    """Append a line to a text file (UTF-8), which is made when missing."""
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`; it replaces `path` when the block ends without an error."""
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}_"))
        aside = temporary.with_name(temporary.name + "_old")
        try:
            yield temporary
            for part in (temporary, *temporary.rglob("*")):  # mkdtemp and safetensors restrict them to the owner
                os.chmod(part, (0o777 if part.is_dir() else 0o666) & ~UMASK)
            if path.exists():
                os.replace(path, aside)  # if the process is killed here, the old folder is kept under this name
            os.replace(temporary, path)
            shutil.rmtree(aside, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def locked(folder: Path, wait: bool | float = True) -> Iterator[None]:
    """Lock `folder`, made when missing, for the block; waits endlessly, not at all or so long (filelock.Timeout)."""
    lock = FileLock(folder / LOCK_FILE, timeout=-1 if wait is True else float(wait))
    with _explained(folder / LOCK_FILE):
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def check_writable(folder: Path) -> None:
    """Raise a ValueError with the remedy if a folder, there or not, cannot be written into; nothing is left behind."""
    there = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    try:
        os.rmdir(tempfile.mkdtemp(dir=there))
    except OSError as error:
        remedy = write_remedy(error) or "name a folder in which you may write (OUTPUT_DIR)"
        raise ValueError(f"{folder}{os.sep}: cannot be written ({error.strerror}); {remedy}") from error


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an error of the system while writing `path` into a message with a remedy."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        name = getattr(error, "filename", None) or path  # the block may also read other files
        if Path(name).is_relative_to(path.parent) and (remedy := write_remedy(error)):
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"{path}: cannot be written ({reason}); {remedy}") from error
        raise


def write_remedy(error: Exception) -> str | None:
    """The remedy for a full disk or a missing permission; None for other errors."""
    # safetensors' errors have a message, but no error number
    number = error.errno if isinstance(error, OSError) else None
    if number in FULL or (isinstance(error, SafetensorError) and os.strerror(errno.ENOSPC) in str(error)):
        return "the disk is full: free some space, or write to another disk (OUTPUT_DIR)"
    if number in REFUSED:
        return "name a folder in which you may write (OUTPUT_DIR)"
    return None


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically; NaN raises a ValueError."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: Path) -> Any:
    """The JSON value in `path`; a ValueError that names it if it is missing, not readable or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))  # some editors write a byte order mark
    except FileNotFoundError:
        raise ValueError(f"{path}: file not found") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}); correct it there, or write it again") from None


def secret_key(path: Path) -> bytes:
    """The 32 random bytes that `path` holds in hex (else ValueError); made where it is missing, for its owner alone."""
    if not path.exists():
        with whole_file(path, 0o600) as temporary:
            temporary.write_text(secrets.token_hex(32), encoding="utf-8")
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); ask its owner, or use another folder") from None
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise ValueError(f"{path}: expected a key of 64 hex digits; restore it, or delete it to generate a new key")
    return bytes.fromhex(text)


def pixels_digest(image: np.ndarray, *context: str) -> str:
    """64 hex digits that identify the pixels of an image, any shape and dtype, and the texts of `context`."""
    digest = hashlib.sha256("".join(f"{part}\n" for part in (*context, image.shape, image.dtype)).encode())
    digest.update(np.ascontiguousarray(image).data)
    return digest.hexdigest()


def weights_fingerprint(model: "torch.nn.Module") -> str:
    """As `state_fingerprint`, of a model; of a quantized one that of the weights before they were quantized."""
    return getattr(model, "unquantized_fingerprint", None) or state_fingerprint(model.state_dict())


def state_fingerprint(state: "Mapping[str, torch.Tensor]", dtype: "torch.dtype | None" = None) -> str:
    """16 hex digits of names, shapes, dtypes (floats as if of `dtype`) and up to 65,536 even samples of each tensor."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, -(-flat.numel() // FINGERPRINT_SAMPLES))]
        sample = sample.to(dtype) if dtype is not None and sample.is_floating_point() else sample
        digest.update(f"{name} {tuple(tensor.shape)} {sample.dtype}".encode())
        digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def save_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write named arrays to a safetensors file, atomically."""
    with whole_file(path) as temporary:
        save_file(arrays, temporary)


def load_arrays(path: Path, remedy: str) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file; none if it is missing, or damaged, with a warning that ends in `remedy`."""
    if not path.exists():
        return {}
    try:
        return load_file(path)
    except SafetensorError as error:
        warnings.warn(f"{path}: damaged ({error}); {remedy}", stacklevel=3)
        return {}
