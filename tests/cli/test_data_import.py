"""`sa2va-rl data import`: what it prints, what it writes, and what comes next."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from rl_reward_network.cli import data_import
from rl_reward_network.cli.data_import import Args
from rl_reward_network.cli.main import main
from tests.data_import.sources import write_pairs


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_pairs(Path("photos"))


def test_without_write_it_only_tells(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "import", "photos", "--to", "new", "--patients_csv", "none"])
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "layout: paired folders (images with masks)"
    assert last.startswith("nothing was written; next: the same command with --to new --write, or sa2va-rl improve")
    assert [path.name for path in Path().iterdir()] == ["photos"]


def test_with_write_it_writes_and_names_the_next_command(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "import", "photos", "--to", "new", "--patients_csv", "none", "--write"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "imported: new; next: sa2va-rl improve quick --data_root new"
    assert Path("new/annotations.json").is_file()


def test_what_is_open_comes_after_the_report(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["data", "import", "photos", "--to", "new", "--write", "--group_regex", "(?P<group>[ab])_"])
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert "images: 5, 5 with a mask" in said.out
    assert said.err.startswith("error: group_regex '(?P<group>[ab])_' finds no group in 5 of 5 images")
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("terminal", "answer", "flags", "groups"),
    [
        (False, None, [], "proposed from folder names"),
        (True, "", [], "folder names"),
        (True, None, ["--yes"], "folder names"),
        (False, None, ["--yes"], "folder names"),
        (True, "n", [], None),
    ],
)
def test_proposed_patients_are_asked_for_once_on_a_terminal(monkeypatch, source, terminal, answer, flags, groups):
    source = write_pairs(Path("clinic"), "Patient {}/a.png", "Patient {}/a_mask.png")
    answers = [] if answer is None else [answer]
    monkeypatch.setattr("sys.stdin.isatty", lambda: terminal)
    monkeypatch.setattr("builtins.input", lambda _: answers.pop())
    words = Args(source, to=Path("new"), write=True, yes="--yes" in flags)
    with nullcontext() if groups else pytest.raises(ValueError, match="not taken: name them by --patients_csv"):
        data_import.main(words)
    assert not answers
    assert Path("new").exists() == bool(groups)
    assert not groups or json.loads(Path("new/import.json").read_text())["groups"] == groups


def test_a_target_is_needed_to_write_and_checked_before_anything_is_read(source: Path) -> None:
    with pytest.raises(ValueError, match="write is True, but to is not given"):
        data_import.main(Args(source, write=True))
    with pytest.raises(ValueError, match="written to photos/new, which lies in photos"):
        data_import.main(Args(source, to=source / "new"))


def test_the_embedded_data_keep_their_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in ((["data"], "Render the embedded"), (["data", "import"], "Import images and masks")):
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        said = capsys.readouterr().out
        assert said.startswith(f"usage: sa2va-rl {' '.join(words)} ")
        assert text in said


def test_parts_that_share_pictures_are_refused_unless_they_are_left_out(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in ("train", "test"):
        write_pairs(Path("parts"), f"{part}/images/{{}}.png", f"{part}/masks/{{}}.png")
    words = ["data", "import", "parts", "--to", "new", "--patients_csv", "none", "--write"]
    with pytest.raises(SystemExit):
        main(words)
    assert "parts: 5 patient(s) or picture(s) are in two parts of its split" in capsys.readouterr().err
    main([*words, "--no_split"])
    assert '"split"' not in Path("new/annotations.json").read_text()
