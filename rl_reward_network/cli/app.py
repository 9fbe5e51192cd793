"""Start and end of every command: flags by tyro, two levels of help, errors as one line, bars, and the last lines."""

import gc
import logging
import os
import shlex
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partialmethod
from pathlib import Path
from typing import Any, TextIO

import tyro
from tqdm import tqdm

from rl_reward_network.atomic_io import FULL, REFUSED, check_writable, write_remedy
from rl_reward_network.flags import check_finite, common_flags, parse

ONLY_CHECK = "SA2VA_RL_ONLY_CHECK"  # set by the shell files, which check all flags before they begin
CALLED_AS = "SA2VA_RL_CALLED_AS"  # the shell file that the user called, for the hint at --help
HELP, HELP_ALL = ("--help", "-h"), "--help-all"
WRITTEN = ("output", "target", "to", "folder")  # flags of a folder to write, or of a file
SECONDS = 30.0
TERMINAL = "SA2VA_RL_TERMINAL"  # set by the shell files, whose output goes to the screen and into a log
UNCHANGED = "No weight of Sa2VA was changed. Where some images have masks, this trains what pays: sa2va-rl improve"


def run(
    main: Callable[[Any], object],
    args_type: Any,
    prog: str = "",
    words: Sequence[str] | None = None,
    check: Callable[[Any], object] | None = None,
    ignore_unknown: bool = False,
) -> None:
    """Parse the flags of a command, `words` or those of the command line, and call it.

    If ONLY_CHECK is set in the environment, `check` is called in place of `main`; it raises errors of the flags before
    anything is read or written. `--help` shows the common flags, `--help-all` every flag. The message of a ValueError
    is printed without a traceback, and the exit status is 2. Any other error, except Ctrl-C (see `cli/__init__.py`), is
    a bug and keeps its traceback.

    `main` or `check` is called with an `args_type`, a dataclass. `prog` is the command as a user types it, by default
    the running module.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for noisy in ("httpx", "huggingface_hub", "transformers", "torch", "matplotlib", "PIL"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    threading.excepthook = _thread_failed
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    call = main if check is None or not os.environ.get(ONLY_CHECK) else check
    spec = sys.modules["__main__"].__spec__
    module = f"python -m {spec.name.removesuffix('.__main__')}" if spec else f"python {sys.argv[0]}"
    with calm_bars():
        message = _outcome(lambda: call(_checked(_parsed(args_type, prog or module, words, ignore_unknown))))
    if message:
        gc.collect()  # closes open progress bars, so that the message is the last line
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def _parsed(args_type: Any, prog: str, words: Sequence[str] | None, ignore_unknown: bool) -> Any:
    """The parsed flags; `--help` and `--help-all` end the process."""
    settings: dict[str, Any] = {
        "prog": os.environ.get(CALLED_AS) or prog,
        "config": (tyro.conf.FlagCreatePairsOff,),  # no --no-no-gap beside --no-gap
    }
    words = sys.argv[1:] if words is None else words
    if asked := {*HELP, HELP_ALL} & set(words):
        settings |= _defaults(args_type, [word for word in words if word not in asked], settings)
        if HELP_ALL in asked:
            return tyro.cli(args_type, args=HELP[:1], **settings)
        return _short_help(args_type, settings)
    if ignore_unknown:
        return tyro.cli(args_type, args=words, return_unknown_args=True, **settings)[0]
    return parse(args_type, words, **settings)


def _defaults(args_type: Any, words: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """For the help: the defaults of the mode that the words name, where there are such and the words can be parsed."""
    if not hasattr(args_type, "presets"):
        return {}
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            return {"default": tyro.cli(args_type, args=words, **settings).presets()}
        except (SystemExit, ValueError):
            return {}


def _checked(args: Any) -> Any:
    """The parsed flags, whose numbers are finite and whose folders can be written into."""
    if args is not None:  # after --help
        check_finite(args)
        folders = [getattr(getattr(args, "inputs", None), "output_dir", None), getattr(args, "run_folder", None)]
        for path in filter(None, (getattr(args, name, None) for name in WRITTEN)):
            folders.append(path if path.is_dir() else path.parent)
        for folder in filter(None, folders):
            check_writable(folder)
    return args


def _short_help(args_type: Any, settings: dict[str, Any]) -> None:
    """Print the common flags and the number of the others, and end the process."""
    hidden: set[tuple[type, str]] = set()
    try:
        tyro.cli(args_type, args=HELP[:1], registry=common_flags(hidden), **settings)
    finally:
        if hidden:
            print(f"{len(hidden)} more flags: {settings['prog']} {HELP_ALL}")


def _outcome(call: Callable[[], object]) -> str | None:
    """The message of an error of the user or of the disk; None without such an error."""
    try:
        call()
    except ValueError as error:
        return str(error)
    except OSError as error:  # raised inside a library
        if error.errno not in (*FULL, *REFUSED):
            raise
        name = f"{error.filename}: " if error.filename else ""
        remedy = write_remedy(error) if error.errno in FULL else "check the path and its permissions"
        return f"{name}{error.strerror}; {remedy}"
    return None


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    """Drop the error of a full disk in TensorBoard's thread: the run's next write reports it in one line."""
    if not (isinstance(failed.exc_value, OSError) and failed.exc_value.errno in FULL):
        threading.__excepthook__(failed)


def show_ending(line: str, output_dir: Path, frozen: bool = False) -> None:
    """Print that Sa2VA is as it was if `frozen`, how to see the curves of all runs, and `line`: what was made where."""
    tensorboard = shlex.join([sys.executable, "-m", "tensorboard.main", "--logdir", str(output_dir), "--port", "6009"])
    print("\n" + "\n".join([*([UNCHANGED] if frozen else []), f"curves of all runs: {tensorboard}", line]))


class Lines:
    """A file for tqdm: of all that bars draw, one line every SECONDS reaches stderr."""

    encoding = "ascii"  # so that bars are drawn with #

    def __init__(self) -> None:
        self.due = time.monotonic() + SECONDS

    def write(self, text: str) -> None:
        """Write a bar, without the characters that move the cursor, if a line is due."""
        line = text.replace("\x1b[A", "").strip()
        if line and time.monotonic() >= self.due:
            print(line, file=sys.stderr, flush=True)
            self.due = time.monotonic() + SECONDS

    def flush(self) -> None:
        """Each line was flushed."""


@contextmanager
def calm_bars() -> Iterator[None]:
    """Let bars of tqdm, and so of transformers, datasets and the hub, move on a terminal; a log gets lines at times."""
    if sys.stderr.isatty():
        yield
        return
    screen, before = _terminal(), tqdm.__init__
    settings: dict[str, object] = {"file": screen, "dynamic_ncols": True} if screen else {"file": Lines()}
    tqdm.__init__ = partialmethod(before, **settings)
    try:
        yield
    finally:
        tqdm.__init__ = before


def _terminal() -> TextIO | None:
    """The terminal on which a shell file was started, so that bars are in no log; None without one."""
    try:
        return open(os.environ[TERMINAL], "w", encoding="utf-8")
    except (KeyError, OSError):  # none is named, or it was closed since
        return None
