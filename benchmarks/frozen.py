"""Check that a change of the code changes no result: run the main commands of two versions, and compare the folders.

    python -m benchmarks.frozen run OLD                  # in the old checkout: the quick runs, about half an hour
    python -m benchmarks.frozen run NEW                  # in the new one
    python -m benchmarks.frozen compare OLD NEW          # last line: 0 differences in N values of M files
    python -m benchmarks.frozen run OLD --size small     # minutes: tiny trainings, without the comparison of methods

Compared are the splits, tables, metrics, scores and trained weights of all finished runs, each number to its last
digit. What names the moment or the machine is left out: dates, seconds, memory, versions, paths. A file or field that
is new is no difference, one that is missing is. Both versions need the same machine and the same OMP_NUM_THREADS: the
last digits depend on them.
"""

import csv
import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

ROOT = Path(__file__).parents[1]
Name = Literal["step2", "operations", "grpo", "compare"]
QUICK: dict[Name, tuple[tuple[str, ...], ...]] = {
    "step2": (("prompts", "quick"),),
    "operations": (("operations", "quick"),),
    "grpo": (("grpo", "quick"),),
    "compare": (("compare", "quick"),),
}
SMALL: dict[Name, tuple[tuple[str, ...], ...]] = {
    "step2": (("prompts", "quick", "--total_timesteps", "64", "--reward_steps", "4"),),
    "operations": (("operations", "quick", "--total_timesteps", "320"),),
    "grpo": (
        ("grpo", "quick", "--max_steps", "3"),
        ("grpo", "quick", "--max_steps", "3", "--objective", "supervised"),
    ),
}
MODELS = ("sa2va_rl_finetune", "sa2va_post_process", "sa2va_grpo")  # kinds of runs that `sa2va-rl evaluate` measures
FILES = (
    *("split.json", "tables.json", "agreement.json", "metrics.jsonl", "checkpoint.safetensors"),
    *("final_model/**/*.safetensors", "final_model/policy.zip", "final_model/config.json", "best_reward_net/*"),
    *("evaluation*/*.json", "evaluation*/*.csv", "eval.json", "eval.csv", "table.csv", "table.tex"),
    *("best/*.json", "cheapest/*.json"),
)
VOLATILE = re.compile(
    r"seconds|second|minutes|time|date|peak_memory_gib|finished|end|version|versions|commit|command|device|bank|resumed|named|runtime"
    r"|steps_per_second|samples_per_second|path|folder|run|runs|reward_net|origin|digest|train_.*_per_second|config"
)
"""Names of fields of the moment or the machine; `origin` and `config` repeat settings that the results depend on."""
RENAMED = {
    "world": "inputs",
    "tree": "single_tree",
    "mix": "net_and_dice",
    "road": "method",
    "word": "verdict",
    "deploys": "chosen_on_validation",
} | {
    f"{before}iou_of_drawn{after}": f"{before}cycle_iou{after}"
    for before in ("", "expected_", "val/")
    for after in ("", "_by_base")
}  # names of fields up to version 1.0.0rc1


@dataclass(frozen=True)
class RunArgs:
    """Run the four commands of this checkout, each with its evaluation."""

    folder: Annotated[Path, tyro.conf.Positional]
    """A new folder for data and runs."""
    size: Literal["quick", "small"] = "quick"
    """quick: as users run them. small: tiny trainings, and no comparison of methods."""
    only: tuple[Name, ...] = ()
    """Which commands; all by default."""


@dataclass(frozen=True)
class CompareArgs:
    """Compare the runs below two folders, or two run folders."""

    old: Annotated[Path, tyro.conf.Positional]
    """Folder of the old version."""
    new: Annotated[Path, tyro.conf.Positional]
    """Folder of the new version."""


def run(args: RunArgs) -> None:
    """Run the commands, each with its evaluation, in a folder of its own below `args.folder`."""
    args.folder.mkdir(parents=True, exist_ok=True)
    commands, images = (QUICK, ()) if args.size == "quick" else (SMALL, ("--images", "8"))
    for name in args.only or tuple(commands):
        for number, words in enumerate(commands[name]):
            runs = f"{name}_{number}"
            print(f"{runs}: sa2va-rl {' '.join(words)}", flush=True)
            call(args.folder, runs, (*words, "--output_dir", runs))
            models = [path.parent for kind in MODELS for path in args.folder.glob(f"{runs}/{kind}_*/final_model")]
            for model in models if name != "compare" else ():
                where = str(model.relative_to(args.folder))
                call(args.folder, runs, ("evaluate", "--model_path", where, "--split", "test", *images))


def call(folder: Path, name: str, words: tuple[str, ...]) -> None:
    """A command of `sa2va-rl` in `folder`, with its output in <name>.log; a failing one ends the program."""
    log_file = folder / f"{name}.log"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "rl_reward_network.cli", *words]
    with log_file.open("a", encoding="utf-8") as log:
        done = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{log_file}: sa2va-rl {words[0]} ended with status {done.returncode}")


def compare(args: CompareArgs) -> None:
    """Print each value that differs, and the number of them; status 1 if there are any."""
    old, new = (dict(values_of(folder)) for folder in (args.old, args.new))
    if not old:
        sys.exit(f"{args.old}: holds no run")
    lines = [
        f"{where}: {value} -> {new.get(where, 'missing')}"
        for where, value in old.items()
        if where not in new or new[where] != value
    ]
    print("\n".join(lines[:200]))
    files = {file for file, _ in old}
    print(f"{len(lines)} differences in {len(old)} values of {len(files)} files")
    sys.exit(bool(lines))


def values_of(folder: Path) -> Iterator[tuple[tuple[str, str], Any]]:
    """((file, field), value) of every result below a folder; run folders go by their kind and their number."""
    for name, run_folder in run_folders(folder):
        for pattern in FILES:
            for path in sorted(path for path in run_folder.glob(pattern) if path.is_file()):
                for where, value in file_values(path):
                    yield (f"{name}/{path.relative_to(run_folder)}", where), value


def run_folders(folder: Path) -> Iterator[tuple[str, Path]]:
    """(name without the time, folder) of the runs below a folder, or of the folder itself."""
    if (folder / "config.json").exists():
        yield "run", folder
        return
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("config.json")):
        kind = re.fullmatch(r"(.+)_\d{8}_\d{6}(_\d{6})?(_[0-9a-f]+)?", path.parent.name)
        if kind:
            found.setdefault(str(path.parent.parent.relative_to(folder) / kind[1]), []).append(path.parent)
    for name, paths in found.items():
        by_time = sorted(paths, key=lambda path: re.findall(r"\d{8}_\d{6}(?:_\d{6})?", path.name)[0])
        for number, path in enumerate(by_time):
            yield f"{name}_{number}", path


def file_values(path: Path) -> Iterator[tuple[str, Any]]:
    """(field, value) of a file."""
    if path.suffix == ".json":
        yield from leaves(json.loads(path.read_text(encoding="utf-8")))
    elif path.suffix == ".jsonl":
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            yield from leaves(json.loads(line), str(number))
    elif path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            for number, row in enumerate(csv.DictReader(file)):
                yield from leaves({RENAMED.get(name, name): value for name, value in row.items()}, str(number))
    elif path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                if member.endswith((".pth", ".safetensors")):
                    yield member, hashlib.sha256(tensors_of(archive.read(member))).hexdigest()
    else:
        yield "bytes", hashlib.sha256(path.read_bytes()).hexdigest()


def tensors_of(data: bytes) -> bytes:
    """The numbers of a state dict that torch has saved, in the order of their names."""
    import io

    import torch

    try:
        state = torch.load(io.BytesIO(data), weights_only=True)
    except Exception:  # no state dict of torch: its own bytes
        return data
    return b"".join(f"{name}".encode() + tensor.numpy().tobytes() for name, tensor in sorted(flat(state)))


def flat(state: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, tensor) of nested dicts and lists."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for name, value in items:
        if hasattr(value, "numpy"):
            yield f"{prefix}{name}", value
        else:
            yield from flat(value, f"{prefix}{name}.")


def leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted field, value) of nested JSON, without volatile fields."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not VOLATILE.fullmatch(str(name)):
                yield from leaves(inner, f"{where}.{RENAMED.get(name, name)}".lstrip("."))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{where}[{number}]")
    else:
        yield where, value


Args = (
    Annotated[RunArgs, tyro.conf.subcommand("run")] | Annotated[CompareArgs, tyro.conf.subcommand("compare")]
)  # of the command

if __name__ == "__main__":
    chosen = tyro.cli(Args)
    run(chosen) if isinstance(chosen, RunArgs) else compare(chosen)
