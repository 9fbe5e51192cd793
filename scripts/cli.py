"""How every command starts and ends: arguments by tyro, a user's mistake as one line, ctrl-C as a clean stop."""

import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import tyro


def run(main: Callable[[Any], None], args_type: Any, ignore_unknown: bool = False) -> None:
    """Parse `args_type` and call `main`; `ignore_unknown` lets flags of a later command pass by.

    A ValueError is a message for the user: it is printed alone and the exit status is 2. Anything else is our bug and
    keeps its traceback.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for noisy in ("httpx", "huggingface_hub", "transformers", "matplotlib", "PIL"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    try:
        main(tyro.cli(args_type, return_unknown_args=True)[0] if ignore_unknown else tyro.cli(args_type))
    except ValueError as error:
        sys.exit(_fail(str(error)))
    except KeyboardInterrupt:
        print(
            "\nstopped; finished files are kept. Run the same command again, with --resume where it has that flag",
            file=sys.stderr,
        )
        sys.exit(130)


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2
