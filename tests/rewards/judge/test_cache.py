"""The judge's replies on disk."""

import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rl_reward_network.artefacts import locked
from rl_reward_network.rewards.judge.cache import ReplyCache, cache_key

ROOT = Path(__file__).resolve().parents[3]


def test_a_reply_is_found_again_by_the_next_run(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "cache.sqlite"
    before = datetime.now(UTC).replace(microsecond=0)
    ReplyCache(file).put("k1", 'A. "grün" 😀', {"index": 0}, "served-model")
    again = ReplyCache(file)
    assert again.get("k1") == 'A. "grün" 😀'
    assert again.get("k2") is None
    ((key, reply, parsed, model, time),) = sqlite3.connect(file).execute("SELECT * FROM replies").fetchall()
    assert (key, reply, parsed, model) == ("k1", 'A. "grün" 😀', '{"index": 0}', "served-model")
    assert before <= datetime.fromisoformat(time) <= datetime.now(UTC)
    assert sqlite3.connect(file).execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_the_newest_reply_stays(tmp_path: Path) -> None:
    cache = ReplyCache(tmp_path / "cache.sqlite")
    cache.put("k", "A", 0, "m")
    cache.put("k", "B", 1, "m")
    assert cache.get("k") == "B"


def test_without_a_file_replies_are_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cache = ReplyCache(None)
    cache.put("k", "A", 0, "m")
    assert cache.get("k") == "A"
    assert ReplyCache(None).get("k") is None
    assert list(tmp_path.iterdir()) == []


def test_threads_and_processes_share_a_file(tmp_path: Path) -> None:
    file = tmp_path / "cache.sqlite"
    cache = ReplyCache(file)
    code = (
        "import sys; from pathlib import Path; from rl_reward_network.rewards.judge.cache import ReplyCache\n"
        "cache = ReplyCache(Path(sys.argv[1]))\n"
        "for number in range(100): cache.put(f'other {number}', 'B', 1, 'm')"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(file)], cwd=ROOT)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: cache.put(f"own {number}", "A", 0, "m"), range(100)))
    assert other.wait(timeout=30) == 0
    assert [cache.get(f"own {number}") for number in range(100)] == ["A"] * 100
    assert [cache.get(f"other {number}") for number in range(100)] == ["B"] * 100


def test_processes_open_a_new_file_one_after_the_other(tmp_path: Path) -> None:
    """SQLite switches a file to its log without waiting: several ranks that did so at once failed."""
    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path):
            opening = pool.submit(ReplyCache, tmp_path / "cache.sqlite")
            assert not wait([opening], timeout=0.3).done
        assert opening.result(timeout=10).get("k") is None


def test_a_key_depends_on_every_value_and_not_on_the_order() -> None:
    asked = {"model": "m", "messages": [{"content": "ü"}], "temperature": 0}
    assert cache_key(asked) == cache_key(dict(reversed(asked.items())))
    assert len(cache_key(asked)) == 64
    changed = [asked | {"model": "n"}, asked | {"messages": [{"content": "u"}]}, asked | {"temperature": 0.1}]
    assert len({cache_key(value) for value in [asked, *changed]}) == 4


def test_a_file_that_is_not_a_cache(tmp_path: Path) -> None:
    foreign = tmp_path / "notes.txt"
    foreign.write_text("my notes, which nobody may overwrite\n" * 100)
    with pytest.raises(ValueError, match=r"notes\.txt: .*judge's cache \(file is not a database\)"):
        ReplyCache(foreign)
    assert foreign.read_text().startswith("my notes")
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as base:
        base.execute("CREATE TABLE replies (question TEXT)")
    with pytest.raises(ValueError, match=r"other\.sqlite: .*delete"):
        ReplyCache(other).get("k")


def test_a_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cache\.sqlite: .*write"):
        ReplyCache(tmp_path / "file" / "cache.sqlite")
    with pytest.raises(ValueError, match=r"unable to open database file"):
        ReplyCache(tmp_path)
