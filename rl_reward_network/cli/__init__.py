"""The commands of `sa2va-rl`, one file for each."""

import os
import sys
from types import TracebackType

STOPPED = "\nstopped; finished files are kept. Run the same command again, with --resume where it has that flag"


def _report_stop(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print one line for Ctrl-C, from the first import on (imports take seconds), and a traceback for other errors."""
    if issubclass(kind, KeyboardInterrupt):
        print(STOPPED, file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _report_stop
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when huggingface_hub is imported
