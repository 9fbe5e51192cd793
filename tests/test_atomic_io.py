import stat
from pathlib import Path

import pytest

from rl_reward_network.atomic_io import check_writable, read_json, secret_key, whole_file, whole_folder, write_json


def fail_inside(context, write) -> None:
    """Enter the context, write half of something, and break."""
    with context as temporary:
        write(temporary)
        raise RuntimeError


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.txt"
    with whole_file(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    with pytest.raises(RuntimeError):
        fail_inside(whole_file(path), lambda temporary: temporary.write_text("half"))
    assert path.read_text() == "new"
    assert [entry.name for entry in path.parent.iterdir()] == ["a.txt"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_folder_replaces_the_old_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with whole_folder(path) as temporary:
        (temporary / "old.txt").write_text("1")
    with pytest.raises(RuntimeError):
        fail_inside(whole_folder(path), lambda temporary: (temporary / "new.txt").write_text("2"))
    assert [entry.name for entry in path.iterdir()] == ["old.txt"]
    with whole_folder(path) as temporary:
        (temporary / "new.txt").write_text("2")
    assert [entry.name for entry in path.iterdir()] == ["new.txt"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_json_is_read_back_and_nan_is_refused(tmp_path: Path) -> None:
    path, bad = tmp_path / "a.json", tmp_path / "bad.json"
    write_json(path, {"x": [1, 2.5, None]})
    with pytest.raises(ValueError, match="Out of range"):
        write_json(path, float("nan"))
    assert read_json(path) == {"x": [1, 2.5, None]}
    path.write_text('{"a": 1}', encoding="utf-8-sig")
    assert read_json(path) == {"a": 1}, "a byte order mark is no part of it"
    with pytest.raises(ValueError, match=r"bad\.json: file not found"):
        read_json(bad)
    bad.write_text("{")
    with pytest.raises(ValueError, match=r"bad\.json: not valid JSON"):
        read_json(bad)


def test_a_secret_key_is_drawn_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / ".group_key"
    key = secret_key(path)
    assert len(key) == 32
    assert (secret_key(path), path.read_text()) == (key, key.hex())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret_key(tmp_path / ".group_key") != key
    path.write_text("")
    with pytest.raises(ValueError, match=r"\.group_key: expected a key of 64 hex digits; restore it, or delete it"):
        secret_key(path)


def test_a_folder_that_cannot_be_written_into_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    check_writable(tmp_path / "some" / "folder")
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "loop" / "below", Path("/proc/none/x")):
        with pytest.raises(
            ValueError, match=rf"^{folder}/.*: cannot be written \(.+\); name a folder in which you may"
        ):
            check_writable(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]
