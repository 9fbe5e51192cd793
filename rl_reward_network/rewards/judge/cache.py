"""Cache of a judge's replies on disk, so that equal requests are sent once.

One SQLite file with a write-ahead log: several processes may share it on a local disk, but not on a network drive. The
key is a hash of the whole request. The file contains replies, but no questions and no API key.
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

from rl_reward_network.artefacts import locked

TABLE = "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT, parsed TEXT, model TEXT, time TEXT)"
WAIT_S = 30.0  # for another process that holds the lock


def cache_key(request: dict[str, Any]) -> str:
    """SHA-256, 64 hex digits, of `request` as canonical JSON: the order of its keys does not matter."""
    text = json.dumps(request, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


class ReplyCache:
    """Replies by key; thread-safe.

    Args:
        path: the file, created with its folder if missing; None keeps the replies in memory.

    Raises:
        ValueError: here and in every method, if the file cannot be used; the message has the file and the remedy.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        with self._with_remedy(), self._alone():
            self._base = sqlite3.connect(
                ":memory:" if path is None else path, timeout=WAIT_S, isolation_level=None, check_same_thread=False
            )
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=NORMAL")  # a power cut may lose the last replies, never the file
            self._base.execute(TABLE)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the file's folder, for switching a new file to its log waits for no other process that does the same."""
        if self.path is None:
            yield
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path.parent):
            yield

    def get(self, key: str) -> str | None:
        """The raw reply of `key`, None if it is not cached."""
        with self._lock, self._with_remedy():
            row = self._base.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, reply: str, parsed: Any, model: str) -> None:
        """Store a raw reply, its parsed value (JSON or a dataclass) and the model reported by the server."""
        row = (key, reply, json.dumps(parsed, default=asdict), model, datetime.now(UTC).isoformat(timespec="seconds"))
        with self._lock, self._with_remedy():
            self._base.execute("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?)", row)

    @contextmanager
    def _with_remedy(self) -> Iterator[None]:
        """Turn errors of SQLite and the file system into a ValueError with a remedy."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise ValueError(
                f"{self.path}: cannot be used as the judge's cache ({error}); name a file that you may write, on a "
                "disk with free space; if it is damaged, delete it"
            ) from error
