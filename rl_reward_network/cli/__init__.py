"""The commands of `sa2va-rl`, one file for each."""

import os
import shlex
import sys
from types import TracebackType

TYPED = "SA2VA_RL_TYPED"  # set by the shell files: what the user typed, with the variables before it
STOPPED = "\nstopped; finished files are kept. "
RESUMED = ("reward", "prompts", "operations", "grpo", "compare", "improve")


def typed() -> str:
    """The command as the user typed it, with the variables that it reads, to be typed again."""
    rewards = os.environ.get("SA2VA_RL_REWARDS")
    variables = f"SA2VA_RL_REWARDS={shlex.quote(rewards)} " if rewards else ""
    return os.environ.get(TYPED) or f"{variables}sa2va-rl {shlex.join(sys.argv[1:])}"


def how_to_go_on() -> str:
    """How a command that was stopped is started again."""
    command = "".join(sys.argv[1:2])
    if TYPED not in os.environ and command not in RESUMED:
        return "Run the same command again, with --resume where it has that flag"
    begun = command in (*RESUMED, "evaluate")  # a shell file is in a command before its run, or in that after it
    return f"Go on by: {typed()}{' --resume' if begun and '--resume' not in typed() else ''}"


def _report_stop(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print one line for Ctrl-C, from the first import on (imports take seconds), and a traceback for other errors."""
    if issubclass(kind, KeyboardInterrupt):
        print(STOPPED + how_to_go_on(), file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _report_stop
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when huggingface_hub is imported
