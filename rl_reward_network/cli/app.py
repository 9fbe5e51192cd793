"""Start and end of every command: flags by tyro, two levels of help, errors of the user or a full disk as one line."""

import gc
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import tyro

from rl_reward_network.atomic_io import FULL, REFUSED, check_writable, write_remedy
from rl_reward_network.cli.progress import calm_bars
from rl_reward_network.flags import check_finite, common_flags, parse

ONLY_CHECK = "SA2VA_RL_ONLY_CHECK"  # set by the shell files, which check all flags before they begin
CALLED_AS = "SA2VA_RL_CALLED_AS"  # the shell file that the user called, for the hint at --help
HELP, HELP_ALL = ("--help", "-h"), "--help-all"
WRITTEN = ("output", "target", "to", "folder")  # flags of a folder to write, or of a file
OLD_FLAGS = {"roads": "methods", "watch-every": "eval-steps"}  # names up to version 0.12; no help shows them


def run(
    main: Callable[[Any], object],
    args_type: Any,
    prog: str = "",
    words: Sequence[str] | None = None,
    check: Callable[[Any], object] | None = None,
    ignore_unknown: bool = False,
) -> None:
    """Parse the flags of a command and call it.

    If ONLY_CHECK is set in the environment, `check` is called in place of `main`; it raises errors of the flags before
    anything is read or written. `--help` shows the common flags, `--help-all` every flag.

    The message of a ValueError is printed without a traceback, and the exit status is 2. Any other error, except Ctrl-C
    (see `cli/__init__.py`), is a bug and keeps its traceback.

    Args:
        main: called with the parsed arguments.
        args_type: a dataclass.
        prog: the command as a user types it; by default the running module.
        words: the flags; by default those of the command line.
        check: called with the parsed arguments, in place of `main`.
        ignore_unknown: ignore flags that the command does not have.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for noisy in ("httpx", "huggingface_hub", "transformers", "matplotlib", "PIL"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    threading.excepthook = _thread_failed
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    call = main if check is None or not os.environ.get(ONLY_CHECK) else check
    with calm_bars():
        message = _outcome(lambda: call(_checked(_parsed(args_type, prog or _module(), words, ignore_unknown))))
    if message:
        gc.collect()  # closes open progress bars, so that the message is the last line
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def _parsed(args_type: Any, prog: str, words: Sequence[str] | None, ignore_unknown: bool) -> Any:
    """The parsed flags; `--help` and `--help-all` end the process."""
    settings: dict[str, Any] = {
        "prog": os.environ.get(CALLED_AS) or prog,
        "config": (tyro.conf.FlagCreatePairsOff,),  # no --no-no-ema beside --no-ema
    }
    quiet = ignore_unknown or bool(os.environ.get(ONLY_CHECK))  # the command itself warns
    words = [_renamed(word, quiet) for word in (sys.argv[1:] if words is None else words)]
    if gone := [index for index, word in enumerate(words) if word.split("=")[0] == "--adapter"]:
        named = [*words[gone[0]].split("=")[1:], *words[gone[0] + 1 :], "X"][0]
        raise ValueError(f"--adapter has gone: sa2va-rl merge {named} --output M, then --model_path M")
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


def _renamed(word: str, quiet: bool) -> str:
    """A flag under its present name, with a warning where it was another."""
    name, *value = word.split("=", 1)
    new = OLD_FLAGS.get(name.removeprefix("--").replace("_", "-")) if name.startswith("--") else None
    if new is None:
        return word
    if not quiet:
        warnings.warn(f"{name} is now --{new}; the old name will go in the next version", stacklevel=1)
    return "=".join([f"--{new}", *value])


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


def _module() -> str:
    """The running module as a command."""
    module = sys.modules["__main__"].__spec__
    return f"python -m {module.name.removesuffix('.__main__')}" if module else f"python {sys.argv[0]}"


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
