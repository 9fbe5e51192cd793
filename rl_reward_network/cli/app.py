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
from contextlib import contextmanager, suppress
from functools import partialmethod
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import tyro
from tqdm import tqdm

from rl_reward_network.atomic_io import FULL, REFUSED, check_writable, write_remedy
from rl_reward_network.cli.run_file import Given, read_config, run_yaml, silence
from rl_reward_network.flags import check_finite, flags_of, help_rules, main_names, parse
from rl_reward_network.run import Kind, Run

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
    """The parsed flags and settings of --config; `--help` and `--help-all` end the process."""
    prog, words = os.environ.get(CALLED_AS) or prog, list(sys.argv[1:] if words is None else words)
    if asked := {*HELP, HELP_ALL} & set(words):
        return _help(args_type, [word for word in words if word not in asked], prog, whole=HELP_ALL in asked)
    given = Given(None, [])
    if ignore_unknown or "config" in flags_of(args_type):
        words, files = _without_config(words)
        for file in files[-1:]:
            given = read_config(Path(file), args_type, prog, ignore_unknown)
    words = [*given.words, *words]
    if ignore_unknown:
        words = list(main_names(args_type, words))
        return tyro.cli(args_type, args=words, prog=prog, return_unknown_args=True, use_underscores=True)[0]
    return parse(args_type, words, given.mode, prog=prog)


def _without_config(words: list[str]) -> tuple[list[str], list[str]]:
    """The words without the flag --config, and the files that it names."""
    others, files, rest = list[str](), list[str](), iter(words)
    for word in rest:
        if word.startswith("--config="):
            files.append(word.partition("=")[2])
        elif word == "--config":
            files.append(next(rest, ""))
        else:
            others.append(word)
    if "" in files:
        raise ValueError("--config: no file is named; give the run.yaml of a run, or leave it out")
    return others, files


def _help(args_type: Any, words: list[str], prog: str, whole: bool) -> None:
    """Print the common flags and the number of the others, or all, with the defaults of the mode; end the process."""
    hidden: set[str] | None = None if whole else set()
    defaults = dict[str, Any]()
    if hasattr(args_type, "presets"):
        with silence(), suppress(SystemExit, ValueError):  # words that name no mode, or cannot be parsed
            defaults = {"default": parse(args_type, words).presets()}
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)  # no --no_no_gap beside --no_gap
    rules, about = help_rules(args_type, hidden), " ".join((args_type.__doc__ or "").split())
    settings: dict[str, Any] = {
        "prog": prog,
        "description": about,
        "config": config,
        "registry": rules,
        "use_underscores": True,
    }
    try:
        tyro.cli(args_type, args=HELP[:1], **settings, **defaults)
    finally:
        if hidden:
            print(f"{len(hidden)} more flag{'s' * (len(hidden) > 1)}: {prog} {HELP_ALL}")


def _checked(args: Any) -> Any:
    """The parsed flags, whose numbers are finite and whose folders can be written into."""
    if args is not None:  # after --help
        check_finite(args)
        _check_inputs(getattr(args, "inputs", None), getattr(args, "run_folder", None))
        folders = [getattr(getattr(args, "inputs", None), "output_dir", None), getattr(args, "run_folder", None)]
        for path in filter(None, (getattr(args, name, None) for name in WRITTEN)):
            folders.append(path if path.is_dir() else path.parent)
        for folder in filter(None, folders):
            check_writable(folder)
    return args


def _check_inputs(inputs: Any, run_folder: Path | None) -> None:
    """Raise a ValueError for two names of one run, or for a tracker that is not installed."""
    if getattr(inputs, "name", None) is not None and run_folder is not None:
        raise ValueError("--name and --run_folder both name the run's folder; leave one of them out")
    if getattr(inputs, "report_to", None) == "wandb" and find_spec("wandb") is None:
        raise ValueError(
            "--report_to wandb: the package is not installed; pip install -e '.[tracking]', or leave the flag out"
        )


def open_run(kind: Kind, args: Any, settings: Mapping[str, Any], **find: Any) -> Run:
    """The run of a command: that which --resume continues, see `Run.resume`, or a new one, which gets run.yaml.

    `args` are those of the command, with the fields `inputs`, `resume` and, if it has the flag, `run_folder`.
    """
    folder, output_dir = getattr(args, "run_folder", None), args.inputs.output_dir
    if args.resume:
        return Run.resume(kind, output_dir, settings, folder, **find)
    command = type(args).__module__.rpartition(".")[2]
    return Run.create(kind, output_dir, settings, folder, args.inputs.name, run_yaml(args, command))


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


def show_ending(
    made: Mapping[str, object], output_dir: Path, model: Path | None = None, frozen: bool = False, note: str = ""
) -> None:
    """Print the last lines of a run: that Sa2VA is as it was if `frozen`, how to look at it, what was `made`, its use.

    `made` is name -> path, `note` a sentence of results, `model` what `sa2va-rl segment --model_path` takes, if any.
    """
    tensorboard = shlex.join([sys.executable, "-m", "tensorboard.main", "--logdir", str(output_dir), "--port", "6009"])
    lines = [*filter(None, [note]), *([UNCHANGED] if frozen else []), f"curves of all runs: {tensorboard}"]
    lines += [f"{name}: {path}" for name, path in made.items()]
    if model is not None:
        lines.append(f"segment new images: sa2va-rl segment IMAGES --model_path {shlex.quote(str(model))}")
    print("\n" + "\n".join(lines))


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
