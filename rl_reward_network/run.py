"""The folder of a run: its name, settings and state, and how a run is found, resumed, refused and locked.

    <output_dir>/<kind>_<time>_<name, or digest of the settings>/
        run.yaml        what starts it again
        config.json     written first: what is trained, with which settings, by which version
        ...             checkpoints, curves and results of the stage
        done.json       written last: a run without it was interrupted

A stage is given `Run.create` or `Run.resume` and works in `with run.working(...)`. Only `KINDS` knows how folders are
called.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from filelock import Timeout

from rl_reward_network import __version__
from rl_reward_network.atomic_io import locked, read_json, whole_file, write_json

CONFIG, DONE = "config.json", "done.json"  # the first and the last file of a run
AGAIN = "run.yaml"  # what starts it again, by --config
CHECKPOINT = "checkpoint.pt"  # of a training that is no Trainer's, which writes checkpoint-<step>/
FINAL = "final_model"  # of step 2 and GRPO
AGREEMENT = "agreement.json"  # of step 1: its test
BEST_REWARD_NET = "best_reward_net"  # of step 1: the trained network
DEPLOYED = "deployed.json"  # names the models whose masks are averaged, of `improve`
REWARD_NET = "reward_net"  # of step 2 and GRPO: a copy of the reward network, so that the run can be moved
RUN_FILE = "SA2VA_RL_RUN_FILE"  # names the file into which a command writes the folder of its run, for shell files
NONE_YET = "no checkpoint yet"
RENAMED_REWARDS = {"mix": "net_and_dice", "tree": "single_tree"}  # of the plan of a policy up to version 1.0.0rc1
RENAMED = {"world": "inputs", "origin": "settings"}  # fields of a final_model's config.json up to version 1.0.0rc1
MOST_RUNS, MOST_SETTINGS = 5, 6  # in a message
LONGEST_VALUE = 15  # letters, in a message: longer values are lists and fingerprints
PACKAGES = ("torch", "transformers", "peft", "stable-baselines3", "gymnasium", "numpy")
SKEW = timedelta(days=1)  # of the clocks and time zones of machines that share a folder, at most
PROBE_S = 1.0  # others look for a moment whether a run is locked, too
TIME = re.compile(r"_(\d{8}_\d{6})(?:_(\d{6}))?(?!\d)")  # in the name of a run
SPENT = "seconds.json"  # phase -> seconds so far, of an unfinished run
BEAT_S, PAUSE_S = 5.0, 60.0  # of the clock; a longer gap between two of its beats is a pause
STATUS = Path("/proc/self/status")  # of Linux; ru_maxrss there is at least that of the process that began this one

State = Literal["new", "interrupted", "finished", "damaged"]


@dataclass(frozen=True)
class Kind:
    """What is written by one stage."""

    prefix: str  # how the name of the folder begins
    stage: str  # in config.json
    end: str  # what is written last before done.json, an object of JSON


REWARD_RUN = Kind("reward_net", "reward network", AGREEMENT)
POLICY_RUN = Kind("sa2va_rl_finetune", "prompt policy", f"{FINAL}/config.json")
POST_RUN = Kind("sa2va_post_process", "post-processing policy", f"{FINAL}/config.json")
GRPO_RUN = Kind("sa2va_grpo", "grpo", f"{FINAL}/config.json")
COMPARE_RUN = Kind("compare", "comparison", "eval.json")
IMPROVE_RUN = Kind("improve", "improvement", "eval.json")
KINDS = (REWARD_RUN, POLICY_RUN, POST_RUN, GRPO_RUN, COMPARE_RUN, IMPROVE_RUN)


@dataclass(frozen=True)
class Run:
    """One run; `run / name` is the path of a file in its folder, which may not exist yet."""

    path: Path
    kind: Kind
    again: str = field(default="", compare=False, repr=False)  # the text of `AGAIN`, which `begin` writes

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __str__(self) -> str:
        return str(self.path)

    @classmethod
    def create(
        cls,
        kind: Kind,
        output_dir: Path,
        settings: Mapping[str, Any],
        folder: Path | None = None,
        name: str | None = None,
        again: str = "",
    ) -> "Run":
        """A new run for `begin`, in `folder`, which must hold none, or in `output_dir`.

        There it is `<kind>_<time>_<name>`, with the digest of the settings in place of a name. `again` is the text of
        run.yaml, which starts the run again.
        """
        # to the microsecond: runs that a script starts together must not share a folder
        called = f"{kind.prefix}_{datetime.now():%Y%m%d_%H%M%S_%f}_{name or digest(settings)}"
        run = cls(folder or output_dir / called, kind, again)
        run.check_new()
        return run

    @classmethod
    def open(cls, folder: Path) -> "Run":
        """The run of any kind in a folder; a ValueError if it holds none, or its config.json is damaged."""
        stage = read_object(folder / CONFIG).get("stage")
        for kind in KINDS:
            if kind.stage == stage:
                return cls(folder, kind)
        raise ValueError(f"{folder / CONFIG}: not of a run of this project (field stage is {stage!r})")

    @classmethod
    def find(
        cls,
        kind: Kind,
        output_dir: Path,
        settings: Mapping[str, Any],
        state: Literal["interrupted", "finished"] | None = None,
        also: Callable[["Run"], bool] = lambda run: True,
    ) -> "Run | None":
        """The newest run with these settings, some or all of `Run.settings`: finished, or interrupted by this version.

        Damaged and foreign folders, and those for which `also` raises a ValueError, are passed over with a warning that
        names them, and without one unfinished runs that another process works on.
        """
        for folder in run_folders(output_dir, kind.prefix):
            run = cls(folder, kind)
            try:
                found = run.read_state()
                usable = state in (None, found) and (found == "finished" or run._of_this_version())
                fits = usable and not differences(run.settings, settings) and also(run)
                if fits and (found == "finished" or not run.busy()):
                    return run
            except ValueError as error:
                warnings.warn(f"passed over: {error}", stacklevel=1)  # always this line, so that it is shown once
        return None

    @classmethod
    def resume(
        cls,
        kind: Kind,
        output_dir: Path,
        settings: Mapping[str, Any],
        folder: Path | None = None,
        state: Literal["interrupted", "finished"] | None = None,
        also: Callable[["Run"], bool] = lambda run: True,
        otherwise: str = "nothing",
    ) -> "Run":
        """The run that `--resume` continues: that in `folder`, whose settings are compared, or the newest, see `find`.

        A ValueError says why it cannot go on, or lists the newest runs with what differs: settings, or `otherwise`.
        """
        if folder is not None:
            run = cls(folder, kind)
            run.check_same(settings)
            return run
        if found := cls.find(kind, output_dir, settings, state, also):
            return found
        folders = run_folders(output_dir, kind.prefix)
        lines = [f"\n  {path}: {cls(path, kind)._difference(settings, otherwise)}" for path in folders[:MOST_RUNS]]
        older = f"\n  and {len(folders) - MOST_RUNS} older" if len(folders) > MOST_RUNS else ""
        there = f"give those of one that is there, or leave it out to begin anew:{''.join(lines)}{older}"
        raise ValueError(
            f"--resume: no {kind.prefix} run of these settings is there to go on with in {output_dir}; "
            + (there if folders else "there is none at all: leave it out to begin one")
        )

    def begin(self, settings: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
        """Make the folder with `settings` and `facts` in its config.json, which is returned; refuses one with a run."""
        self.check_new()
        config = {"stage": self.kind.stage, "settings": settings, **facts, **provenance()}
        if self.again:
            with whole_file(self / AGAIN) as temporary:
                temporary.write_text(self.again, encoding="utf-8")
        write_json(self / CONFIG, config)
        return config

    def finish(self) -> None:
        """Mark the run as finished; nothing is written into it by its stage after this."""
        (self / SPENT).unlink(missing_ok=True)
        write_json(self / DONE, {"finished": f"{datetime.now():%Y-%m-%d %H:%M:%S}"})

    @property
    def config(self) -> dict[str, Any]:
        """config.json; a ValueError that names it if it is missing, damaged, or of something else."""
        config = read_object(self / CONFIG)
        if config.get("stage") != self.kind.stage or not isinstance(config.get("settings"), dict):
            made = f"version {config.get('version')} made and reads it, this one does not" if "origin" in config else ""
            wanted = f"not of a run of this project (expected stage {self.kind.stage!r} and settings)"
            raise ValueError(f"{self / CONFIG}: {made or wanted}")
        return config

    @property
    def settings(self) -> dict[str, Any]:
        """What was given to `begin`, and seed and fingerprint of the reward network where recorded; see `config`."""
        config = self.config
        beside = {"seed": config.get("seed"), "reward_net": config.get("reward_net_fingerprint")}
        return {**beside, **config["settings"]}

    def seconds_before(self) -> dict[str, float]:
        """Phase -> seconds in which earlier processes worked on this unfinished run, for `clock`."""
        return dict(read_object(self / SPENT)) if (self / SPENT).exists() else {}

    def read_state(self) -> State:
        """Its state, read from its files alone; never "damaged", but a ValueError that names the damaged file."""
        if not (self / CONFIG).exists():
            return "new"
        _, last = self.config, self / self.kind.end
        written = last if last.parent == self.path else last.parent  # final_model/ is written whole or not at all
        if not (self / DONE).exists() or not written.exists():
            return "interrupted"
        read_object(last)
        return "finished"

    @property
    def state(self) -> State:
        """Its state; of a damaged run, `read_state` says why."""
        try:
            return self.read_state()
        except ValueError:
            return "damaged"

    @property
    def finished(self) -> bool:
        """Whether it is complete."""
        return self.state == "finished"

    def progress(self) -> str:
        """Its progress in words, e.g. "finished" or "step 50"; a ValueError if it is damaged."""
        if self.read_state() == "finished":
            return "finished"
        from transformers.trainer_utils import get_last_checkpoint  # takes seconds

        from rl_reward_network.curves import load_checkpoint

        if last := get_last_checkpoint(str(self)):
            return f"step {last.rpartition('-')[2]}"
        state = load_checkpoint(self / CHECKPOINT)
        return f"step {state.get('num_timesteps', state.get('step'))}" if state else NONE_YET

    def line(self) -> str:
        """The line on its folder at the start of a command."""
        state = "" if self.state == "new" else self.progress()
        if state == NONE_YET and self.kind in (COMPARE_RUN, IMPROVE_RUN):
            state = "the last checkpoint of each part"
        endings = {"": "", "finished": ", finished", NONE_YET: f", {NONE_YET}: it begins anew"}
        return f"run folder: {self}{endings.get(state, f', resumed from {state}')}"

    def announce(self, evaluate: bool = True) -> None:
        """Print `line`, and write the folder into the file that `RUN_FILE` names, for a shell file to `evaluate`."""
        print(self.line())
        if evaluate and (file := os.environ.get(RUN_FILE)):
            Path(file).write_text(f"{self}\n", encoding="utf-8")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder, made when missing, for this process; a ValueError if another one holds the lock."""
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path, wait=PROBE_S))
            except Timeout:
                remedy = "wait for it, or stop it first"
                raise ValueError(f"{self}: another process is working on this run; {remedy}") from None
            yield

    @contextmanager
    def working(self, settings: Mapping[str, Any], begin: Callable[[], object]) -> Iterator[None]:
        """Work in the locked folder: `begin` a new run or `check_same` settings, and `finish` it after the block."""
        with self.lock():
            if self.state == "new":
                begin()
            else:
                self.check_same(settings)
            yield
            self.finish()

    def busy(self) -> bool:
        """Whether another process holds the lock."""
        try:
            with locked(self.path, wait=PROBE_S):
                return False
        except Timeout:
            return True

    def check_new(self) -> None:
        """Raise a ValueError if the folder holds a run."""
        if (self / CONFIG).exists():
            raise ValueError(f"{self}: holds a run already; give a new folder, or go on with it by --resume")

    def check_same(self, settings: Mapping[str, Any]) -> None:
        """Raise a ValueError unless the run is there, with these settings, and if unfinished begun by this version."""
        if not (self / CONFIG).exists():
            raise ValueError(f"--resume: {self} holds no run; leave --resume out to begin one there")
        if self.read_state() != "finished" and not self._of_this_version():
            raise ValueError(
                f"{self}: --resume: version {self.config.get('version')} began this run, but this is {__version__}, "
                "whose numbers may differ; finish it with the version that began it, or begin a new one without "
                "--resume"
            )
        if differ := differences(self.settings, settings):
            raise ValueError(
                f"{self}: --resume: it began with other settings ({'; '.join(differ)}); give the same, or a new run"
            )

    def _of_this_version(self) -> bool:
        """Whether this version, apart from its last number, began the run."""
        return str(self.config.get("version")).split(".")[:2] == __version__.split(".")[:2]

    def _difference(self, settings: Mapping[str, Any], otherwise: str) -> str:
        """Progress and differing settings; of a damaged run, the error."""
        try:
            progress, differ = self.progress(), differences(self.settings, settings)
            if progress != "finished" and self.busy():
                return f"{progress}; another process is working on it"
            if progress != "finished" and not self._of_this_version():
                return f"{progress}; version {self.config.get('version')} began it: finish it with that"
        except ValueError as error:
            return str(error)
        more = [f"and {len(differ) - MOST_SETTINGS} more"] if len(differ) > MOST_SETTINGS else []
        return f"{progress}; differs in {'; '.join([*differ[:MOST_SETTINGS], *more]) or otherwise}"


def check_folder(folder: Path | None, kind: Kind, resume: bool) -> None:
    """Raise a ValueError for a folder of the user that holds a run, or with `resume` none that can be resumed."""
    if folder is not None:
        run = Run(folder, kind)
        run.check_same({}) if resume else run.check_new()


def run_folders(output_dir: Path, prefix: str = "") -> list[Path]:
    """The folders with a config.json whose names begin so, the newest first; some may be damaged or foreign."""
    paths = output_dir.glob(f"{prefix}_*/{CONFIG}" if prefix else f"*/{CONFIG}")
    return sorted((path.parent for path in paths), key=age, reverse=True)


def age(folder: Path) -> tuple[bool, datetime, str]:
    """The key that sorts runs, the newest last; one of the future, by a clock that was wrong, counts as the oldest."""
    time = began(folder)
    return time < datetime.now() + SKEW, time, folder.name


def began(folder: Path) -> datetime:
    """When a run began: by its name, since copied files have another time; else by its config.json, or its folder."""
    found = TIME.findall(folder.name)
    try:
        return datetime.strptime(f"{found[0][0]}_{found[0][1] or 0}", "%Y%m%d_%H%M%S_%f")
    except (IndexError, ValueError):
        dated = folder / CONFIG
        return datetime.fromtimestamp((dated if dated.exists() else folder).stat().st_mtime)


def digest(settings: Mapping[str, Any]) -> str:
    """Eight hex digits that runs of equal settings share."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The settings of `now` that differ from those a run began with, nested ones by their dotted names.

    Short values are part of the text: "settings.learning_rate was 0.001, now 1e-05". A setting that one of the versions
    does not have equals one that is off: None, False or the share 0.0, but not a whole number 0, such as a seed.
    """
    lines = []
    for name, value in now.items():
        old = before.get(name)
        if old == value or (name not in before and _off(value)):
            continue
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            gone = {key: None for key, of in old.items() if key not in value and not _off(of)}
            lines += [f"{name}.{line}" for line in differences(old, {**gone, **value})]
        else:
            long = max(len(str(one)) for one in (old, value)) > LONGEST_VALUE
            lines.append(name if long else f"{name} was {old}, now {value}")
    return lines


def _off(value: Any) -> bool:
    return str(value) in ("None", "False", "0.0")


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a run; a ValueError that names the file if it is missing, damaged, or no object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds no JSON object, so it was not written by this project")
    return value


def read_model_config(path: Path) -> dict[str, Any]:
    """The config.json of a `final_model`, with the names of today. Raises as `read_object`."""
    config = {RENAMED.get(name, name): value for name, value in read_object(path).items()}
    if (plan := config.get("plan")) and plan.get("reward") in RENAMED_REWARDS:
        config["plan"] = {**plan, "reward": RENAMED_REWARDS[plan["reward"]]}
    if "training" not in (settings := config.get("settings") or {}) and "settings" in settings:
        config["settings"] = {**settings, "training": settings["settings"]}
    return config


def portable(path: Path, run: Path) -> str:
    """A path for config.json: relative to the run inside the project, which holds the output folder, else absolute."""
    path, run = path.resolve(), run.resolve()
    project = run.parent.parent
    if not path.is_relative_to(project) or project == project.parent:  # all paths lie in /
        return str(path)
    relative = os.path.relpath(path, run)
    return relative if relative.startswith(".") else os.path.join(os.curdir, relative)  # a/b would be a hub id


def reward_run_files(run: Path, named: str | None) -> dict[str, Path]:
    """Name -> path, maybe gone: run and report of the reward network, `named` as in the config.json of `run`."""
    path, _, _ = (named or "").rpartition(", of ")
    folder = (run / path).parent
    return {"run of the reward network": folder, "report of the reward network": folder / "report.html"} if path else {}


def provenance() -> dict[str, Any]:
    """Our `version`, the `versions` of Python and packages, and this tree's `commit` (None outside of git)."""
    versions = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    clone, commit = Path(__file__).resolve().parents[1], None  # an installed package may lie in another's repository
    if (clone / ".git").exists() and shutil.which("git"):
        head = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], cwd=clone, capture_output=True, text=True)
        commit = head.stdout.strip() or None
    return {"version": __version__, "versions": versions, "commit": commit}


class _Work:
    """Counts the seconds in which this process works: not those while it is stopped (Ctrl-Z), or the machine sleeps."""

    def __init__(self) -> None:
        self._lock, self._last, self._seconds = threading.RLock(), time.monotonic(), 0.0
        self.saves: list[Callable[[], object]] = []  # called at each beat
        threading.Thread(target=self._beat, daemon=True).start()

    def seconds(self) -> float:
        with self._lock:
            gap, self._last = time.monotonic() - self._last, time.monotonic()
            self._seconds += gap if gap < PAUSE_S else 0.0
            return self._seconds

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            self.seconds()
            with self._lock, suppress(OSError, ValueError):  # a full disk: the run's next write reports it
                for save in self.saves:
                    save()

    @contextmanager
    def saving(self, save: Callable[[], object]) -> Iterator[None]:
        with self._lock:
            self.saves.append(save)
        try:
            yield
        finally:
            with self._lock:
                self.saves.remove(save)


@lru_cache(maxsize=1)
def _work() -> _Work:
    return _Work()


def work_seconds() -> float:
    """Seconds in which this process has worked, from any start; a pause of a minute or more does not count."""
    return _work().seconds()


@contextmanager
def clock(seconds: dict[str, float], name: str, file: Path | None = None) -> Iterator[None]:
    """Add the working time of the block to `seconds[name]`; `file` keeps all of them, should the process be killed."""
    earlier, begin = seconds.get(name, 0.0), work_seconds()

    def spent() -> dict[str, float]:
        return seconds | {name: earlier + work_seconds() - begin}

    with _work().saving(lambda: write_json(file, spent())) if file else nullcontext():
        yield
    seconds[name] = spent()[name]


def peak_memory_gib(device: str = "cpu") -> float:
    """The largest memory of this process so far, in GiB; with a GPU as device, what torch has reserved there."""
    if device.startswith("cuda"):
        import torch  # here, so that this module stays light

        return torch.cuda.max_memory_reserved(device) / 2**30
    if STATUS.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())):
        return int(found.group(1)) / 2**20
    if sys.platform == "win32":
        import psutil

        return float(psutil.Process().memory_info().peak_wset) / 2**30
    import resource  # which Windows lacks

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


def reset_peak_memory(device: str = "cpu") -> None:
    """Let `peak_memory_gib` measure from here on, where the system can: on a GPU, and on Linux."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):  # Linux alone has this file
        Path("/proc/self/clear_refs").write_text("5")
