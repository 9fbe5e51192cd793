"""How every command starts and ends: arguments by tyro, a user's mistake or a full disk as one line."""

import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import tyro

from rl_reward_network.artefacts import write_remedy


def run(main: Callable[[Any], None], args_type: Any, ignore_unknown: bool = False) -> None:
    """Parse `args_type` and call `main`; `ignore_unknown` lets flags of a later command pass by.

    A ValueError is a message for the user: it is printed alone and the exit status is 2. Anything else is our bug and
    keeps its traceback, but for ctrl-C (see `scripts/__init__.py`).
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
    except OSError as error:  # where a library writes by itself
        if (remedy := write_remedy(error)) is None:
            raise
        sys.exit(_fail(f"{error}; {remedy}"))


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2
