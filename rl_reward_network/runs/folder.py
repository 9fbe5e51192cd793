"""Run folders: where a run writes, and what it says about itself."""

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rl_reward_network import __version__
from rl_reward_network.artefacts import locked, read_json, write_json
from rl_reward_network.data.splits import save_split
from rl_reward_network.inputs.loading import World, WorldConfig

UNSAID = "0.6 or earlier"  # the version of a run that does not say it
SHOWN_LETTERS = 15  # of a value, in a message: longer ones are lists and fingerprints
PACKAGES = ("torch", "transformers", "peft", "stable-baselines3", "gymnasium", "numpy")


def new_run_folder(output_dir: Path, kind: str) -> Path:
    """A path `<output_dir>/<kind>_<time>` that does not exist yet; `describe_run` makes it.

    To the microsecond: runs that a script starts together must not share a folder.
    """
    return output_dir / f"{kind}_{datetime.now():%Y%m%d_%H%M%S_%f}"


def describe_run(run: Path, world: World, stage: dict[str, Any]) -> dict[str, Any]:
    """Make the run folder with its config.json and split.json, and return the former; paths as `portable` gives them.

    Args:
        run: run folder.
        world: what the run works on.
        stage: what is particular to it (mode, preset, reward network ...).

    Raises:
        ValueError: the folder holds a run already.
    """
    check_new(run)
    config = {
        **stage,
        "world": portable_world(world.config, run),
        "device": world.config.device,
        "data_fingerprint": world.data_fingerprint,
        "model_fingerprint": world.segmenter.fingerprint,
        "prompts": list(world.prompts),
        "patients": {name: len(ids) for name, ids in world.split.groups.items()},
        "images": len(world.samples),
        **provenance(),
    }
    save_split(world.split, run / "split.json")
    write_json(run / "config.json", config)  # last: a folder with a config.json is a whole one
    return config


def check_new(run: Path) -> None:
    """Raise a ValueError where a run has begun already."""
    if (run / "config.json").exists():
        raise ValueError(f"{run}: holds a run already; give a new folder, or go on with it by --resume")


def check_origin(run: Path, began: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise unless a run that is to go on began with the settings wanted now.

    Raises:
        ValueError: names what differs.
    """
    if differ := differences(began, wanted):
        raise ValueError(
            f"{run}: --resume: it began with other settings ({'; '.join(differ)}); give the same, or a new run"
        )


def check_version(run: Path, also: str = "") -> None:
    """Raise where another version began a run that is to go on; the last number of a version does not count.

    Args:
        run: a run folder that is not finished.
        also: what this version can do with it nevertheless.

    Raises:
        ValueError: names both versions, and what to do.
    """
    if not _of_this_version(config := read_json(run / "config.json")):
        raise ValueError(
            f"{run}: --resume: version {_version(config)} began this run, but this is {__version__}, whose numbers may "
            f"differ; finish it with the version that began it, or begin a new one without --resume{also}"
        )


def began_with(config: Mapping[str, Any], began: Mapping[str, Any], wanted: Mapping[str, Any], finished: bool) -> bool:
    """Whether a run began with what is wanted now.

    Of a cut-off run of another version only what both versions know is compared: it must be found to be refused.

    Args:
        config: config.json of the run.
        began: its settings, or its reward network's.
        wanted: settings now.
        finished: whether it is.
    """
    if finished or _of_this_version(config):
        return all(began.get(name) == value for name, value in wanted.items())
    return bool(began) and _agree(began, wanted)


def _agree(one: Any, other: Any) -> bool:
    """Whether two values are equal in all that both of them name."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_agree(one[name], other[name]) for name in one.keys() & other.keys())
    return bool(one == other)


def _of_this_version(config: Mapping[str, Any]) -> bool:
    return _version(config).split(".")[:2] == __version__.split(".")[:2]


def _version(config: Mapping[str, Any]) -> str:
    return str(config.get("version", UNSAID))


def differences(began: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The settings of `wanted` that a run did not begin with, nested ones by their dotted names.

    With both values where they are short: "settings.learning_rate was 0.001, now 1e-05".
    """
    lines = []
    for name, now in wanted.items():
        before = began.get(name)
        if before == now:
            continue
        nested = isinstance(before, Mapping) and isinstance(now, Mapping)
        inner = differences(before, {**dict.fromkeys(before), **now}) if nested else []  # type: ignore[arg-type]
        long = nested or max(len(str(value)) for value in (before, now)) > SHOWN_LETTERS
        lines += [f"{name}.{line}" for line in inner] or [name if long else f"{name} was {before}, now {now}"]
    return lines


@contextmanager
def only_here(run: Path) -> Iterator[None]:
    """Hold the run folder (made when missing), so that no second process resumes a run that is still going.

    Raises:
        ValueError: another process holds it.
    """
    with ExitStack() as held:
        try:
            held.enter_context(locked(run, wait=False))
        except BlockingIOError:
            raise ValueError(f"{run}: another process is working on this run; wait for it, or stop it first") from None
        yield


@contextmanager
def clock(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Note how long the block takes."""
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


def read_run_config(run: Path) -> dict[str, Any]:
    """config.json of a run folder.

    Raises:
        ValueError: the folder is not a run.
    """
    remedy = "name a folder sa2va_rl_finetune_<time> that step 2 has written"
    try:
        config = read_json(run / "config.json")
    except ValueError as error:
        raise ValueError(f"{error}; {remedy}") from None
    if not isinstance(config, dict) or "world" not in config:
        raise ValueError(f"{run / 'config.json'}: field world is missing; {remedy}")
    return config


def provenance() -> dict[str, Any]:
    """Our `version`, the `versions` of Python and packages, and this tree's `commit` (None outside of git)."""
    versions = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    return {"version": __version__, "versions": versions, "commit": _commit()}


def portable(path: Path, run: Path) -> str:
    """How a run names a path: from the run folder where both lie in one project, which can then be moved as a whole.

    The project is the folder that holds the output folder; a path outside of it stays absolute.
    """
    path, run = path.resolve(), run.resolve()
    project = run.parent.parent
    if not path.is_relative_to(project) or project == project.parent:  # all paths lie in /
        return str(path)
    relative = os.path.relpath(path, run)
    return relative if relative.startswith(".") else os.path.join(os.curdir, relative)  # a/b would be a hub id


def portable_world(config: Any, run: Path) -> dict[str, Any]:
    """The settings of a world, its paths as `portable` gives them; names and hub ids stay as they are.

    Args:
        config: a dataclass with fields model_path and data_root.
        run: run folder.
    """
    values = {
        name: portable(value, run) if isinstance(value, Path) else value for name, value in asdict(config).items()
    }
    named = {"model_path": Path(config.model_path), "data_root": config.data_root}
    return values | {name: portable(path, run) if path.exists() else str(path) for name, path in named.items()}


def world_config(
    run: Path, config: dict[str, Any], data_root: Path | None = None, model_path: str | None = None
) -> WorldConfig:
    """The world of a run, wherever its folder is now; the prompts are in `config` itself.

    Args:
        run: run folder.
        config: its config.json.
        data_root, model_path: where data and model are now, if not where they were.

    Raises:
        ValueError: they are not there; names the flag that says where they are.
    """
    saved = config["world"]
    data_root = data_root or located_data(run, config)
    model_path = model_path or located_model(run, config, "--base_model")
    kept = (run / saved["output_dir"]).resolve()
    output_dir = kept if kept.is_dir() else run.parent.resolve()
    return WorldConfig(
        **{**saved, "data_root": data_root, "model_path": model_path, "output_dir": output_dir, "prompts": None}
    )


def located_data(run: Path, config: dict[str, Any]) -> Path:
    """The data of a run: a folder that is here, or a hub id.

    Raises:
        ValueError: it was a folder and is not here; names the flag that says where it is.
    """
    return Path(_located(run, config, "data_root", "--data_root, the folder where the same data are now"))


def located_model(run: Path, config: dict[str, Any], flag: str) -> str:
    """The model of a run: a folder that is here, an embedded one's name, or a hub id.

    Raises:
        ValueError: it was a folder and is not here; names `flag`, which says where it is.
    """
    return _located(run, config, "model_path", f"{flag}, the folder where the same model is now")


def _located(run: Path, config: dict[str, Any], name: str, remedy: str) -> str:
    saved = str(config["world"][name])
    if not saved.startswith((".", os.sep)):
        return saved
    folder = (run / saved).resolve()
    if not folder.is_dir():
        raise ValueError(f"{run / 'config.json'}: field world.{name} is {saved}, no folder here; give {remedy}")
    return str(folder)


def _commit() -> str | None:
    """The commit of a clone; None of an installed package, which may lie inside another project's repository."""
    clone = Path(__file__).resolve().parents[2]
    if not (clone / ".git").exists() or not shutil.which("git"):
        return None
    head = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], cwd=clone, capture_output=True, text=True)
    return head.stdout.strip() or None
