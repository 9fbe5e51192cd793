"""Every line and name that the readers of the original specification type, from the shared copy of what it says."""

import re
import subprocess
from operator import attrgetter
from pathlib import Path

import pytest

from rl_reward_network import specification
from rl_reward_network.cli.main import main
from tests.test_shell_files import Called, called

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT.parent / "shared" / "reference" / "specification.md"
TEXT = SOURCE.read_text().partition("## As typed")[2] if SOURCE.exists() else ""
BULLETS, _, NAMES = TEXT.partition("Names their readers import")
PAGE = (ROOT / "docs/reference/specification.md").read_text()
pytestmark = pytest.mark.skipif(not TEXT, reason=f"no copy of the specification at {SOURCE}")
__all__ = ["called"]  # a fixture


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def rows(column: int) -> str:
    """A column of the page's tables."""
    return "\n".join(line.split("|")[column] for line in PAGE.splitlines() if line[:2] == "| ")


def lines(kind: str) -> list[str]:
    """The quoted lines that begin so; `... full` repeats the one before, REPO is this clone."""
    found: list[str] = []
    for text in quoted(BULLETS):
        whole = text.replace("...", found[-1].rpartition(" ")[0]) if text.startswith("... ") and found else text
        found.append(whole)
    return [text for text in found if re.match(kind, text)]


def grpo_lines() -> list[str]:
    """The line of GRPO with each of its knobs, `1 | 2 | 4` one by one."""
    (bullet,) = [line for line in BULLETS.splitlines() if "`python train_sa2va_rl.py" in line]
    first, *knobs = quoted(bullet)
    values = [(flag, rest.split(" | ")) for flag, _, rest in (k.partition(" ") for k in knobs if k.startswith("--"))]
    (torchrun,) = [knob for knob in knobs if knob.startswith("torchrun")]
    whole = torchrun.replace("...", first.partition(".py ")[2])
    return [first, whole, *(f"{first} {flag} {value}" for flag, several in values for value in several)]


def test_shell_lines_are_taken(called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell file calls a command once, and that takes its flags."""
    monkeypatch.setenv("SA2VA_RL_ONLY_CHECK", "1")
    typed = lines("bash run_")
    assert len(typed) >= 5
    for line in typed:
        done, calls = called(*line.split()[1:], SA2VA_RL_ONLY_CHECK="1")
        assert (done.returncode, len(calls)) == (0, 1), line
        main(calls[0]["words"].removeprefix("-m rl_reward_network.cli ").split())


def test_what_was_edited_in_the_shell_file_is_a_variable(called: Called) -> None:
    edited = dict(pair.split("=") for pair in quoted(BULLETS) if re.fullmatch("[A-Z_]+=[0-9]+", pair))
    assert edited == {"N_ENVS": "1", "GPU": "2"}
    _, calls = called("run_step2_finetune.sh", "quick", SA2VA_RL_ONLY_CHECK="1", **edited)
    for name, value in edited.items():
        assert f" --{name.lower()} {value}" in calls[0]["words"]


@pytest.mark.parametrize("line", grpo_lines() if TEXT else [])
def test_lines_of_grpo_are_taken_or_refused_in_one_sentence(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SA2VA_RL_ONLY_CHECK", "1")
    file, _, flags = line.rpartition(".py ")
    assert 'launch("grpo")' in (ROOT / f"{file.split()[-1]}.py").read_text()
    words = ["grpo", *flags.split()]
    if "llm_judge" not in line:
        main(words)
        return
    with pytest.raises(SystemExit) as stop:
        main([*words, "--llm_judge_base_url", "http://127.0.0.1:9/v1"])
    assert stop.value.code == 2
    assert re.fullmatch(r"error: LLM judge .*check that the server runs.*\n", capsys.readouterr().err)


def test_the_line_of_the_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That it runs is in test_end_to_end.py; here the run is missing."""
    (line,) = lines("python3? evaluate")
    file, _, flags = line.rpartition(".py ")
    assert 'launch("evaluate")' in (ROOT / f"{file.split()[-1]}.py").read_text()
    with pytest.raises(SystemExit):
        main(["evaluate", *flags.replace("REPO", str(tmp_path)).split()])
    assert re.fullmatch(r"error: model_path .*final_model: no such folder; train .*\n", capsys.readouterr().err)


def test_lines_of_other_programs_work_or_are_explained(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name in "ab":
        (tmp_path / "logs" / f"step2_finetune_{name}.log").write_text("x\n")
    typed = lines("tail")
    assert len(typed) == 2
    for line in typed:
        shell = f"timeout 0.5 {line.replace('REPO/', '')}"
        done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True)
        if done.returncode not in (0, 124):
            assert " ".join(line.split()[:2]) in rows(1), line
    assert len(lines("tensorboard")) == 1
    assert "tensorboard --logdir" in rows(1)


def test_every_name_is_there_or_explained() -> None:
    names = [name.split("(")[0] for name in quoted(NAMES.partition("Attributes")[0]) if " = " not in name]
    names = [name for name in names if re.fullmatch(r"\w+", name)]
    assert len(names) > 30
    missing = [name for name in names if not hasattr(specification, name)]
    assert [name for name in missing if not re.search(rf"`{name}\W", rows(1))] == []


def test_every_attribute_is_there() -> None:
    attributes = [name for name in quoted(NAMES.partition("Attributes")[2]) if "." in name]
    assert len(attributes) == 7
    model = specification.load_sa2va_model("sa2va-nano", "cpu", use_flash_attn=False)
    for name in attributes:
        whole = f"grounding_encoder{name}" if name.startswith(".") else name.removeprefix("model.")
        assert attrgetter(whole)(model) is not None
