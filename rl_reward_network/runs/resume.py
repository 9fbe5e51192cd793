"""The progress of a run, and the error of `--resume` if no run has the settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

from rl_reward_network.runs.checkpoints import CHECKPOINT, load_checkpoint
from rl_reward_network.runs.folder import AGREEMENT, FINAL, differences, read_object

MOST_RUNS, MOST_SETTINGS = 5, 6  # in a message
NONE_YET = "no checkpoint yet"


def progress(run: Path) -> str:
    """The progress of a run of any stage, e.g. "finished" or "step 50".

    Raises:
        ValueError: its checkpoint is damaged.
    """
    if (run / FINAL).exists() or (run / AGREEMENT).exists():
        return "finished"
    if last := get_last_checkpoint(str(run)):
        return f"step {last.rpartition('-')[2]}"
    state = load_checkpoint(run / CHECKPOINT)
    return f"step {state.get('num_timesteps', state.get('step'))}" if state else NONE_YET


def run_line(run: Path, resumed: bool) -> str:
    """The line on the run folder at the start of a command."""
    state = progress(run) if resumed else ""
    endings = {"": "", "finished": ", finished", NONE_YET: f", {NONE_YET}: it begins anew"}
    return f"run folder: {run}{endings.get(state, f', resumed from {state}')}"


def nothing_to_resume(output_dir: Path, kind: str, wanted: Mapping[str, Any], otherwise: str = "nothing") -> ValueError:
    """The error of `--resume` if no run can be resumed; it lists the existing runs, the newest first.

    Args:
        output_dir: parent of the run folders.
        kind: prefix of their names.
        wanted: the settings, as in a run's `origin`.
        otherwise: the difference to name if all settings are equal.
    """
    runs = [path.parent for path in sorted(output_dir.glob(f"{kind}_*/config.json"), reverse=True)]
    lines = [f"\n  {run}: {_line(run, wanted, otherwise)}" for run in runs[:MOST_RUNS]]
    older = len(runs) - MOST_RUNS
    more = f"\n  and {older} older" if older > 0 else ""
    there = f"give those of one that is there, or leave it out to begin anew:{''.join(lines)}{more}"
    return ValueError(
        f"--resume: no {kind} run of these settings is there to go on with in {output_dir}; "
        + (there if runs else "there is none at all: leave it out to begin one")
    )


def _line(run: Path, wanted: Mapping[str, Any], otherwise: str) -> str:
    """Progress and differing settings of a run; of a damaged run, the error."""
    try:
        config, state = read_object(run / "config.json"), progress(run)
    except ValueError as error:
        return str(error)
    origin = config.get("origin")
    if not isinstance(origin, dict):
        return f"{state}; not of a run of this project"
    differ = differences({"seed": config.get("seed"), **origin}, wanted)
    more = [f"and {len(differ) - MOST_SETTINGS} more"] if len(differ) > MOST_SETTINGS else []
    return f"{state}; differs in {'; '.join([*differ[:MOST_SETTINGS], *more]) or otherwise}"
