"""Progress bars of all libraries: they move on a terminal; a log gets a line every half a minute."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import TextIO

from tqdm import tqdm

SECONDS = 30.0
TERMINAL = "SA2VA_RL_TERMINAL"  # set by the shell files, whose output goes to the screen and into a log


class Lines:
    """A file for tqdm: of all that bars draw, one line every SECONDS reaches stderr."""

    encoding = "ascii"  # so that bars are drawn with #

    def __init__(self) -> None:
        """The first line is due after SECONDS."""
        self.due = time.monotonic() + SECONDS

    def write(self, text: str) -> None:
        """Write a bar, without the characters that move the cursor, if a line is due."""
        line = text.replace("\x1b[A", "").strip()
        if line and time.monotonic() >= self.due:
            print(line, file=sys.stderr, flush=True)
            self.due = time.monotonic() + SECONDS

    def flush(self) -> None:
        """Each line was flushed."""


@contextmanager
def calm_bars() -> Iterator[None]:
    """Fit the bars of tqdm, and so those of transformers, datasets and Hugging Face's hub, to what reads them."""
    if sys.stderr.isatty():
        yield
        return
    screen, before = _terminal(), tqdm.__init__
    settings: dict[str, object] = {"file": screen, "dynamic_ncols": True} if screen else {"file": Lines()}
    tqdm.__init__ = partialmethod(before, **settings)
    try:
        yield
    finally:
        tqdm.__init__ = before


def _terminal() -> TextIO | None:
    """The terminal on which a shell file was started, so that bars are in no log; None without one."""
    try:
        return open(os.environ[TERMINAL], "w", encoding="utf-8")
    except (KeyError, OSError):  # none is named, or it was closed since
        return None
