"""The commands of `sa2va-rl`, one file for each."""

import os
import sys
from types import TracebackType

STOPPED = "\nstopped; finished files are kept. Run the same command again, with --resume where it has that flag"


def _print_stopped(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """One message for Ctrl-C, from the first import on; other exceptions keep their traceback."""
    if issubclass(kind, KeyboardInterrupt):
        print(STOPPED, file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _print_stopped
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when huggingface_hub is imported
