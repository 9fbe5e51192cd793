"""Finding a run among others, some of them damaged or not ours."""

import json
import warnings
from pathlib import Path

import pytest

from rl_reward_network import __version__
from rl_reward_network.runs.find import KINDS, began_alike, runs_that_fit

FINISHED = {kind: end for kind, (_, end) in KINDS.items()}


def write_run(folder: Path, kind: str, origin: dict[str, object], finished: bool = False) -> Path:
    """A run folder with nothing but what finding reads."""
    folder.mkdir()
    config = {"stage": KINDS[kind][0], "origin": origin, "version": __version__}
    (folder / "config.json").write_text(json.dumps(config))
    if finished:
        (folder / FINISHED[kind]).parent.mkdir(exist_ok=True)
        (folder / FINISHED[kind]).write_text("{}")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_the_newest_run_of_equal_settings_is_found(tmp_path: Path, kind: str) -> None:
    wanted = {"mode": "quick"}
    first, second = (write_run(tmp_path / f"{kind}_{number}", kind, wanted, number == 1) for number in (1, 2))
    write_run(tmp_path / f"{kind}_3", kind, {"mode": "full"})
    (tmp_path / f"{kind}_4").mkdir()  # cut off before its config.json
    (tmp_path / f"other_{kind}_5").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(runs_that_fit(tmp_path, kind, began_alike(wanted))) == [second, first]
        found = runs_that_fit(tmp_path, kind, lambda run, config, finished: finished)
        assert list(found) == [first]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"architectures": ["Sa2VA"]}',
        b'{"stage": "x", "origin": {}}',
    ],
    ids=["empty", "cut off", "a list", "null", "a string", "bytes", "of a model", "another stage"],
)
def test_a_damaged_or_foreign_run_is_passed_over_with_one_warning(tmp_path: Path, kind: str, content: bytes) -> None:
    good = write_run(tmp_path / f"{kind}_1", kind, {"mode": "quick"})
    bad = write_run(tmp_path / f"{kind}_2", kind, {"mode": "quick"}) / "config.json"
    bad.write_bytes(content)
    with pytest.warns(UserWarning, match="passed over") as shown:
        assert list(runs_that_fit(tmp_path, kind, began_alike({"mode": "quick"}))) == [good]
    assert [str(bad) in str(warning.message) for warning in shown] == [True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", ["origin", "folder", "end", "no end"])
def test_so_is_one_whose_parts_are_damaged(tmp_path: Path, kind: str, damage: str) -> None:
    run = write_run(tmp_path / f"{kind}_2", kind, {"mode": "quick"}, finished=True)
    last = run / FINISHED[kind]
    if damage == "origin":
        (run / "config.json").write_text(json.dumps({"stage": KINDS[kind][0], "origin": ["mode"]}))
    elif damage == "folder":
        (run / "config.json").unlink()
        (run / "config.json").mkdir()
    elif damage == "end":
        last.write_text("{")
    elif last.parent != run:
        last.unlink()  # final_model without its config.json
    else:
        pytest.skip("the run is unfinished then")
    with pytest.warns(UserWarning, match=f"passed over: .*{kind}_2") as shown:
        assert not list(runs_that_fit(tmp_path, kind, began_alike({"mode": "quick"})))
    assert len(shown) == 1


def test_many_searches_warn_once(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    warnings.simplefilter("default")
    (write_run(tmp_path / "sa2va_post_process_1", "sa2va_post_process", {}) / "config.json").write_text("{")
    for _ in range(3):
        assert not list(runs_that_fit(tmp_path, "sa2va_post_process", began_alike({})))
    assert len(recwarn) == 1
