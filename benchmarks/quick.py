"""Where the time of the quick runs goes, phase by phase, and how much less it is than in another version.

    python -m benchmarks.quick                                  # all quick runs, each from nothing but the packages
    python -m benchmarks.quick --runs step2 --against COMMIT    # beside another commit, command by command, in turn

The commands are those of the shell files. CPU seconds, of a command with all its threads and processes, can be compared
on a machine with other work, too; seconds on the clock only where nothing else runs.
"""

import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

from rl_reward_network.cli.app import run

ROOT = Path(__file__).parents[1]
Run = Literal["step2", "grpo", "experiment2", "compare"]
COMMANDS: dict[Run, str] = {"step2": "prompts", "grpo": "grpo", "experiment2": "operations", "compare": "compare"}
MODELS = {"step2": "sa2va_rl_finetune", "grpo": "sa2va_grpo", "experiment2": "sa2va_post_process"}  # run folders


@dataclass(frozen=True)
class Args:
    """Time the quick runs."""

    runs: tuple[Run, ...] = tuple(COMMANDS)
    """Which: step 2 with its reward network, GRPO, experiment 2, the comparison of all roads."""
    against: str | None = None
    """Another commit of this repository to time beside this tree."""


class Spent(NamedTuple):
    """Seconds of a command or a phase; a phase has no CPU seconds of its own."""

    clock: float
    cpu: float = math.nan


@dataclass
class Tree:
    """A version of the project, and the folder of its data and runs."""

    code: Path
    work: Path
    seen: set[Path] = field(default_factory=set)

    def call(self, words: list[str]) -> dict[str, Spent]:
        """Run a command of `sa2va-rl`, and read the phases that it has written: name -> seconds."""
        environment = os.environ | {"PYTHONPATH": str(self.code), "PYTHONSAFEPATH": "1"}
        start, cpu = time.perf_counter(), children_cpu()
        command = [sys.executable, "-m", "rl_reward_network.cli", *words]
        subprocess.run(command, cwd=self.work, env=environment, stdout=subprocess.DEVNULL, check=True)
        return {words[0]: Spent(time.perf_counter() - start, children_cpu() - cpu)} | self._phases()

    def _phases(self) -> dict[str, Spent]:
        """The field `seconds` of every new result of a stage, below the run folder's kind."""
        found: dict[str, Spent] = {}
        paths = (*self.work.glob("outputs/*/agreement.json"), *self.work.glob("outputs/*/final_model/config.json"))
        for path in sorted(set(paths) - self.seen):
            kind = path.relative_to(self.work).parts[1].partition("_20")[0]
            seconds = json.loads(path.read_text(encoding="utf-8")).get("seconds", {})
            found |= {f"  {kind}: {name}": Spent(value) for name, value in seconds.items()}
            self.seen.add(path)
        return found


def main(args: Args) -> None:
    """Print a table for each run."""
    for name in args.runs:
        with ExitStack() as stack:
            codes = [ROOT] + ([stack.enter_context(checked_out(args.against))] if args.against else [])
            trees = [Tree(code, Path(stack.enter_context(TemporaryDirectory()))) for code in codes]
            print(f"\n| {name} | s | CPU s |" + (f" s of {args.against} | CPU s | ratio |" if args.against else ""))
            print("|---|---|---|" + "---|---|---|" * (len(trees) - 1), flush=True)
            called: list[list[Spent]] = []
            for words in commands(name):
                spent = [tree.call(words) for tree in trees]
                print_rows(spent)
                called.append([rows[words[0]] for rows in spent])
            print_rows([{"all": Spent(*map(sum, zip(*column, strict=True)))} for column in zip(*called, strict=True)])


def commands(name: Run) -> Iterator[list[str]]:
    """The commands of a shell file in quick mode, in an empty folder."""
    regions = name == "grpo"
    inputs = ["--data_root", f"data/{'regions_lamplight' if regions else 'angiograms'}", "--output_dir", "outputs"]
    yield ["data", "--folder", "data", *["--regions"] * regions]
    yield ["doctor", *inputs]
    yield [COMMANDS[name], "quick", *inputs]
    if name in MODELS:
        yield ["evaluate", "--model_path", f"outputs/{MODELS[name]}_*/final_model", "--split", "test"]


def print_rows(spent: list[dict[str, Spent]]) -> None:
    """One row for each command and phase, of this tree and of the other."""
    for name in dict.fromkeys(name for rows in spent for name in rows):
        values = [rows.get(name, Spent(math.nan)) for rows in spent]
        cells = [f"{seconds:.1f}" for value in values for seconds in value] + [_ratio(values[0], values[-1])] * (
            len(values) - 1
        )
        print(f"| {name} | {' | '.join(cells).replace('nan', '-')} |", flush=True)


def _ratio(ours: Spent, other: Spent) -> str:
    """This tree's CPU seconds by the other's; of a phase those on the clock."""
    cpu = ours.cpu / other.cpu
    return f"{ours.clock / other.clock if math.isnan(cpu) else cpu:.2f}"


def children_cpu() -> float:
    """CPU seconds of all finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """The tree of a commit in a folder of its own."""
    with TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


if __name__ == "__main__":
    run(main, Args)
