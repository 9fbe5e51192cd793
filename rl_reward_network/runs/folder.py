"""Run folders: their names, their config.json, and whether a run may be resumed."""

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import Timeout

from rl_reward_network import __version__
from rl_reward_network.artefacts import locked, read_json

REWARD_RUN, POLICY_RUN, GRPO_RUN = "reward_net", "sa2va_rl_finetune", "sa2va_grpo"  # how names of run folders begin
FINAL = "final_model"  # of step 2 and GRPO; written last: a run without it was cut off
COMPARE_RUN, POST_RUN = "compare", "sa2va_post_process"
AGREEMENT = "agreement.json"  # the same of step 1
BEST_REWARD_NET = "best_reward_net"  # of step 1: the trained network
REWARD_NET = "reward_net"  # of step 2 and GRPO: a copy of the reward network, so that the run can be moved
UNKNOWN = "0.6 or earlier"  # the version of a run without a version
LONGEST_VALUE = 15  # letters, in a message: longer values are lists and fingerprints
PACKAGES = ("torch", "transformers", "peft", "stable-baselines3", "gymnasium", "numpy")


def new_run_folder(output_dir: Path, kind: str) -> Path:
    """A path `<output_dir>/<kind>_<time>` that does not exist yet; `describe_run` makes it.

    To the microsecond: runs that a script starts together must not share a folder.
    """
    return output_dir / f"{kind}_{datetime.now():%Y%m%d_%H%M%S_%f}"


def check_new(run: Path) -> None:
    """Raise a ValueError if the folder holds a run."""
    if (run / "config.json").exists():
        raise ValueError(f"{run}: holds a run already; give a new folder, or go on with it by --resume")


def check_origin(run: Path, began: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Check that the run to resume began with the same settings.

    Raises:
        ValueError: settings differ; names them.
    """
    if differ := differences(began if isinstance(began, Mapping) else {}, wanted):
        raise ValueError(
            f"{run}: --resume: it began with other settings ({'; '.join(differ)}); give the same, or a new run"
        )


def check_version(run: Path, also: str = "") -> None:
    """Check that this version, apart from its last number, began the run to resume.

    Args:
        run: folder of an unfinished run.
        also: appended to the message: what else can be done with the run.

    Raises:
        ValueError: another version began it; names both.
    """
    if not _of_this_version(config := read_object(run / "config.json")):
        raise ValueError(
            f"{run}: --resume: version {config.get('version', UNKNOWN)} began this run, but this is {__version__}, "
            f"whose numbers may differ; finish it with the version that began it, or begin a new one without "
            f"--resume{also}"
        )


def began_with(config: Mapping[str, Any], began: Mapping[str, Any], wanted: Mapping[str, Any], finished: bool) -> bool:
    """Whether a run began with the settings of this run.

    Of an unfinished run of another version only the settings of both versions are compared: `check_version` refuses it.

    Args:
        config: config.json of the run.
        began: its settings, or those of its reward network.
        wanted: settings of this run.
        finished: whether the run is finished.
    """
    if finished or _of_this_version(config):
        return not differences(began, wanted)
    return bool(began) and _agree(began, wanted)


def _agree(left: Any, right: Any) -> bool:
    """Whether two values are equal in all keys that both of them have."""
    if isinstance(left, dict) and isinstance(right, dict):
        return all(_agree(left[name], right[name]) for name in left.keys() & right.keys())
    return bool(left == right)


def _of_this_version(config: Mapping[str, Any]) -> bool:
    return str(config.get("version")).split(".")[:2] == __version__.split(".")[:2]


def _without_new_off(began: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """`wanted` without settings that are off and unknown to the version of the run, nested ones included.

    Off are False and the share 0.0; a whole number 0, such as a seed, is a value.
    """
    kept = {name: now for name, now in wanted.items() if name in began or str(now) not in ("False", "0.0")}
    return {
        name: _without_new_off(began[name], now)
        if isinstance(now, Mapping) and isinstance(began.get(name), Mapping)
        else now
        for name, now in kept.items()
    }


def differences(began: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The settings of `wanted` that differ from those the run began with, nested ones by their dotted names.

    Short values are part of the text: "settings.learning_rate was 0.001, now 1e-05". A setting that the version of the
    run did not have yet equals one that is off.
    """
    lines = []
    for name, now in _without_new_off(began, wanted).items():
        before = began.get(name)
        if before == now:
            continue
        nested = isinstance(before, Mapping) and isinstance(now, Mapping)
        inner = differences(before, {**dict.fromkeys(before), **now}) if nested else []  # type: ignore[arg-type]
        long = nested or max(len(str(value)) for value in (before, now)) > LONGEST_VALUE
        lines += [f"{name}.{line}" for line in inner] or [name if long else f"{name} was {before}, now {now}"]
    return lines


@contextmanager
def only_here(run: Path) -> Iterator[None]:
    """Lock the run folder, which is made when missing, so that only one process works on the run.

    Raises:
        ValueError: another process holds the lock.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(run, wait=False))
        except Timeout:
            raise ValueError(f"{run}: another process is working on this run; wait for it, or stop it first") from None
        yield


@contextmanager
def clock(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the duration of the block to `seconds[name]`."""
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a run.

    Raises:
        ValueError: the file is damaged, or holds something else; names it.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds no JSON object, so it was not written by this project")
    return value


def read_run_config(run: Path) -> dict[str, Any]:
    """config.json of a run folder.

    Raises:
        ValueError: the folder is not a run.
    """
    remedy = "name a folder sa2va_rl_finetune_<time> that step 2 has written"
    try:
        config = read_object(run / "config.json")
    except ValueError as error:
        raise ValueError(f"{error}; {remedy}") from None
    if "world" not in config:
        raise ValueError(f"{run / 'config.json'}: field world is missing; {remedy}")
    return config


def provenance() -> dict[str, Any]:
    """Our `version`, the `versions` of Python and packages, and this tree's `commit` (None outside of git)."""
    versions = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    return {"version": __version__, "versions": versions, "commit": _commit()}


def portable(path: Path, run: Path) -> str:
    """A path as written into config.json: relative to the run folder inside the project, else absolute.

    The project is the folder that holds the output folder; it can be moved as a whole.
    """
    path, run = path.resolve(), run.resolve()
    project = run.parent.parent
    if not path.is_relative_to(project) or project == project.parent:  # all paths lie in /
        return str(path)
    relative = os.path.relpath(path, run)
    return relative if relative.startswith(".") else os.path.join(os.curdir, relative)  # a/b would be a hub id


def reward_run_files(run: Path, named: str | None) -> dict[str, Path]:
    """Name -> path of the run of a reward network and of its pictures, which may be gone.

    Args:
        run: folder of the run that used the network.
        named: path and time of the network as in config.json of that run; None for runs without one, or of 0.6.
    """
    path, _, _ = (named or "").rpartition(", of ")
    folder = (run / path).parent
    return {"run of the reward network": folder, "pictures of its errors": folder / "sheet.png"} if path else {}


def _commit() -> str | None:
    """The commit of a clone; None of an installed package, which may lie inside another project's repository."""
    clone = Path(__file__).resolve().parents[2]
    if not (clone / ".git").exists() or not shutil.which("git"):
        return None
    head = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], cwd=clone, capture_output=True, text=True)
    return head.stdout.strip() or None
