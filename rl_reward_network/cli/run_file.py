"""run.yaml: the settings of a run by the names of their flags, written into its folder and read by --config.

    # sa2va-rl grpo --config run.yaml
    mode: quick
    model_path: sa2va-nano
    learning_rate: 0.001

A value means what it means on the command line, whose flags win. Paths are relative to the working folder, as there.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import tyro
import yaml

from rl_reward_network.flags import Flag, flags_of, parse
from rl_reward_network.inputs.config import NOT_OF_A_RUN
from rl_reward_network.models.default import DEFAULT_MODEL

ALWAYS = ("model_path", "data_root", "output_dir", "seed")  # also where they are the default
MAYBE_PATHS = ("model_path", "dataset_name", "patients_csv", "deepspeed")  # texts that may be a path
SPELLINGS = {"true": "True", "false": "False", "null": "None", "~": "None", "": "None"}


class Given(NamedTuple):
    """What --config names: the mode, if it has one, and the other settings as words of the command line."""

    mode: str | None
    words: list[str]


def run_yaml(args: Any, command: str) -> str:
    """The text of run.yaml: mode, inputs, and all settings of a command's arguments that are not the default."""
    flags, values = flags_of(type(args)), dict[str, Any]()
    base = _by_default(type(args), getattr(args, "mode", None))
    for name, flag in flags.items():
        value = flag.value(args)
        if name not in NOT_OF_A_RUN and (_positional(flag) or name in ALWAYS or value != flag.value(base)):
            values[name] = _plain(name, value)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
    return f"# sa2va-rl {command} --config run.yaml\n{text}"


def read_config(file: Path, args_type: Any, prog: str, known_alone: bool = False) -> Given:
    """The settings in a file like run.yaml, whose keys are flags of the command; with `known_alone` others are ignored.

    Raises:
        ValueError: the file is no such file, a key is no flag, or a value is not of the type of its flag.
    """
    flags, content = flags_of(args_type), _mapping(file)
    names = {alias: name for name, flag in flags.items() if name != "config" for alias in (name, *flag.aliases)}
    given: dict[str, list[str]] = {}
    for key, value in content.items():
        name = names.get(str(key).replace("-", "_"))
        if name is None:
            if known_alone:
                continue
            meant = get_close_matches(str(key).replace("-", "_"), names, 1)
            hint = f" (is it {meant[0]}?)" if meant else ""
            raise ValueError(f"{file}: {key}: no setting of {prog}{hint}; {prog} --help-all lists them")
        given[name] = _words(value)
    (mode,) = given.pop("mode", [None])
    _check_types(file, args_type, prog, mode, given)
    return Given(mode, [word for name, words in given.items() for word in (f"--{name}", *words)])


def _mapping(file: Path) -> dict[Any, Any]:
    """The mapping in a YAML file, whose values stay texts, so that each means what it means on the command line."""
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--config {file}: cannot be read ({reason}); name the run.yaml of a run") from None
    if not isinstance(content, dict):
        raise ValueError(f"--config {file}: holds no settings; expected lines such as 'seed: 1', see a run's run.yaml")
    return content


def _words(value: Any) -> list[str]:
    """A value of YAML as words of the command line."""
    if isinstance(value, list | dict):
        parts = [part for pair in value.items() for part in pair] if isinstance(value, dict) else value
        return [str(part) for part in parts]
    return [SPELLINGS.get(value.lower(), value)]


def _check_types(file: Path, args_type: Any, prog: str, mode: str | None, given: dict[str, list[str]]) -> None:
    """Raise a ValueError that names the file and the key of a value that its flag does not take."""
    flags = flags_of(args_type)
    modes = getattr(flags["mode"].kind, "__args__", ()) if "mode" in flags else ()
    if mode is not None and mode not in modes:
        raise ValueError(f"{file}: mode is {mode}, expected {' or '.join(map(str, modes)) or 'none'}")
    start = mode or (modes[0] if modes else None)

    def taken(words: list[str]) -> bool:
        with silence():
            try:
                parse(args_type, words, start)
            except SystemExit:
                return False
            except ValueError:  # settings that do not go together, which flags may change
                return True
        return True

    if taken([word for name, words in given.items() for word in (f"--{name}", *words)]):
        return
    for name, words in given.items():
        if not taken([f"--{name}", *words]):
            kind = flags[name].kind.__name__ if isinstance(flags[name].kind, type) else flags[name].kind
            kind = str(kind).replace("typing.", "")
            raise ValueError(f"{file}: {name} is {' '.join(words)}, expected {kind}; see {prog} --help-all")


def _by_default(args_type: Any, mode: str | None) -> Any:
    """The arguments of a command without flags."""
    args = args_type() if mode is None else args_type(mode)
    return args.presets() if hasattr(args, "presets") else args


def _positional(flag: Flag) -> bool:
    return tyro.conf.Positional[int].__metadata__[0] in flag.marks  # type: ignore[attr-defined]


def _plain(name: str, value: Any) -> Any:
    """A setting as YAML has it; paths are absolute."""
    if isinstance(value, Path) or (name in MAYBE_PATHS and value not in (None, DEFAULT_MODEL) and Path(value).exists()):
        return os.path.abspath(value)
    if isinstance(value, tuple | list):
        return [_plain(name, part) for part in value]
    return dict(value) if isinstance(value, dict) else value


@contextmanager
def silence() -> Iterator[None]:
    """Drop what is printed."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield
