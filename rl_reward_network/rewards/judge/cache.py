"""Replies of a judge on disk, so that the same question is paid for once.

One SQLite file (write-ahead log, so several processes may share it; on a disk of the machine, not on a network drive).
A reply is filed under a hash of everything that was asked. The file holds replies, never a question or a key.
"""

import hashlib
import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

TABLE = "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT, parsed TEXT, model TEXT, time TEXT)"
WAIT_S = 30.0  # for another process that is writing


def cache_key(asked: dict[str, Any]) -> str:
    """SHA-256, 64 hex digits, of `asked` as canonical JSON: the order of its keys does not matter."""
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


class ReplyCache:
    """Replies by key; may be used from several threads.

    Args:
        path: the file, made when missing with its folder; None keeps the replies in memory.

    Raises:
        ValueError: here and in every method, where the file cannot be used; the message names it and the remedy.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        with self._explained():
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._base = sqlite3.connect(
                ":memory:" if path is None else path, timeout=WAIT_S, isolation_level=None, check_same_thread=False
            )
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=NORMAL")  # a power cut may lose the last replies, never the file
            self._base.execute(TABLE)

    def get(self, key: str) -> str | None:
        """The raw reply filed under `key`."""
        with self._lock, self._explained():
            row = self._base.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, reply: str, parsed: Any, model: str) -> None:
        """File a raw reply, what was read from it (JSON or a dataclass) and the model that the server says it is."""
        row = (key, reply, json.dumps(parsed, default=asdict), model, datetime.now(UTC).isoformat(timespec="seconds"))
        with self._lock, self._explained():
            self._base.execute("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?)", row)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """What SQLite or the system says of the file, as a message for the user."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise ValueError(
                f"{self.path}: cannot be used as the judge's cache ({error}); name a file that you may write, on a "
                "disk with free space; if it is damaged, delete it"
            ) from error
