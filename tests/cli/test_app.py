"""How every command starts, as a module or as a file, with its flags checked first; and its progress bars."""

import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm
from tqdm.auto import tqdm as of_transformers

from rl_reward_network.cli import TYPED, how_to_go_on
from rl_reward_network.cli import app as cli
from rl_reward_network.cli.main import main
from rl_reward_network.flags import GROUPS

ROOT = Path(__file__).resolve().parents[2]
AS_FILES = ("train_sa2va_rl", "finetune_sa2va_with_rl", "train_reward_network", "evaluate_rl_finetuned_sa2va")


@dataclass(frozen=True)
class Args:
    """A command."""

    size: int = 1
    """Its only flag."""


def refused(args: Args) -> None:
    raise ValueError(f"size is {args.size}")


def called(*flags: str) -> list[Args]:
    main: list[Args] = []
    cli.run(main.append, Args, "sa2va-rl command", flags, refused)
    return main


def test_only_the_check_runs_where_the_shell_files_ask_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called("--size", "3") == [Args(3)]
    monkeypatch.setenv(cli.ONLY_CHECK, "1")
    with pytest.raises(SystemExit) as stop:
        called("--size", "3")
    assert (stop.value.code, capsys.readouterr().err) == (2, "error: size is 3\n")


def test_the_hint_names_what_can_be_typed_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for environment, hint in (("", "sa2va-rl command --help"), ("bash run_x.sh", "bash run_x.sh --help")):
        monkeypatch.setenv(cli.CALLED_AS, environment)
        with pytest.raises(SystemExit):
            called("--syze", "3")
        assert hint in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize("name", AS_FILES)
def test_commands_run_as_files_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python scripts/x.py`: the path holds the folder of the file, not that of the project."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "__init__.py").write_text("raise SystemExit('a stranger')")
    monkeypatch.chdir(tmp_path)
    file = ROOT / "scripts" / f"{name}.py"
    path = [str(ROOT / "scripts"), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.setattr(sys, "argv", [str(file), "--help"])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(file), run_name="__main__")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python {file} ")
    assert "--model_path" in text
    assert sys.path[0] == str(ROOT)


HEAVY = ("torch", "transformers", "stable_baselines3", "datasets", "accelerate", "skimage")
SEEN = f"""
import sys
from rl_reward_network.cli.main import main
from rl_reward_network.flags import GROUPS
try:
    main(sys.argv[1:])
except SystemExit as stop:
    print("loaded:", stop.code, [name for name in {HEAVY} if name in sys.modules])
"""


def typed(*words: str) -> str:
    """What a fresh process prints, and which slow libraries it imported."""
    done = subprocess.run([sys.executable, "-c", SEEN, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize("command", ["reward", "prompts", "grpo"])
def test_help_shows_the_common_flags_at_once_and_help_all_every_flag(command: str) -> None:
    short, whole = typed(command, "--help"), typed(command, "--help-all")
    assert short.rstrip().endswith("loaded: 0 []")
    assert whole.rstrip().endswith("loaded: 0 []")
    assert f"sa2va-rl {command} --help-all" in short
    assert str(import_module(f"rl_reward_network.cli.{command}").Args.__doc__) in short
    common, every = (
        set(re.findall(r"(?<=\W)--[a-z][\w-]+", text)) - {"--help", "--help-all"} for text in (short, whole)
    )
    assert common < every
    assert not any("-" in flag[2:] for flag in every), "as the documents spell them"
    assert len(common) <= 27
    assert {"--model_path", "--data_root", "--resume", "--seed", "--config", "--name", "--report_to"} <= common
    assert "--split_seed" in every - common
    titles = re.findall(r"─ (\w+) options ─", short)
    assert titles == [name for name in GROUPS if name in titles]
    assert {"data", "model", "training", "output", "hardware"} <= set(titles)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("grpo", "--clip_range", "-1"), "error: epsilon is -1.0"),
        (("grpo", "--kl_coef", "-1"), "error: beta is -1.0"),
        (("grpo", "--syze", "3"), "--syze"),
        (("prompts", "quick", "--n_envs", "0"), "error: n_envs is 0"),
        (("reward", "--seed", "-1", "quick"), "seed is -1"),
        (("reward",), "quick"),
        (("reward", "quick", "--name", "a/b"), "error: --name is 'a/b', expected"),
        (("grpo", "--name", "a", "--run_folder", "b"), "error: --name and --run_folder both"),
        (("operations", "quick", "--report_to", "wandb"), r"error: --report_to wandb: the package is not installed"),
        (("improve", "--config", "none.yaml"), "error: --config none.yaml: cannot be read"),
    ],
)
def test_wrong_flags_are_refused_at_once(words: tuple[str, ...], message: str) -> None:
    output = typed(*words)
    assert message in output
    assert "loaded: 2 []" in output


@pytest.mark.parametrize(
    "words",
    [
        *(
            f"{command} quick --output_dir"
            for command in ("grpo", "prompts", "reward", "operations", "improve", "compare")
        ),
        *("grpo quick --run_folder", "segment a.png --output", "merge --model_path a --output"),
        *("convert a", "data --folder", "data_import a --to"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_read(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *flags = words.split()
    called: list[Any] = []
    args = import_module(f"rl_reward_network.cli.{command}").Args
    with pytest.raises(SystemExit, match="2"):
        cli.run(called.append, args, f"sa2va-rl {command}", [*flags, "/proc/none/here"])
    assert capsys.readouterr().err.startswith("error: /proc/none/")
    assert not called


@pytest.mark.parametrize(
    ("words", "steps", "rate"),
    [
        (["prompts", "--help"], 2000, 0.001),
        (["prompts", "full", "--help"], 10000, 0.0003),
        (["prompts", "quick", "--preset", "published", "--help"], 2000, 0.0003),
        (["operations", "full", "--help-all"], 60000, 0.001),
    ],
)
def test_help_shows_the_defaults_of_the_mode(words, steps, rate, capsys):
    with pytest.raises(SystemExit):
        main(words)
    shown = capsys.readouterr().out
    assert f"(default: {steps})" in shown
    assert f"(default: {rate})" in shown


@pytest.mark.parametrize("kind", [tqdm, of_transformers])
def test_a_log_gets_a_line_every_half_minute(
    kind: type, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(cli.time, "monotonic", lambda: now[0])
    with cli.calm_bars():
        bar = kind(total=1000, desc="PPO", mininterval=0)
        for _ in range(1000):  # 100 seconds; a postfix draws at once, whatever the interval is
            now[0] += 0.1
            bar.set_postfix(reward=0.5)
            bar.update()
        list(kind(range(1000), desc="inner", leave=False, mininterval=0))
        bar.close()
    written = capsys.readouterr().err
    lines = written.splitlines()
    assert [line.split("|")[0].strip() for line in lines] == ["PPO:  30%", "PPO:  60%", "PPO:  90%"]
    assert written.isascii()
    assert "\r" not in written
    list(kind(range(3), mininterval=0))
    assert "\r" in capsys.readouterr().err, "outside of a command, bars are the caller's"


def test_bars_move_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with cli.calm_bars():
        list(tqdm(range(3), desc="PPO", mininterval=0))
    assert capsys.readouterr().err.count("\r") >= 4


def test_bars_of_a_shell_file_move_on_its_terminal_and_are_in_no_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("SA2VA_RL_TERMINAL", str(tmp_path / "tty"))
    with cli.calm_bars():
        list(tqdm(range(3), desc="PPO", mininterval=0))
    assert "100%" in (tmp_path / "tty").read_text()
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("SA2VA_RL_TERMINAL", str(tmp_path / "gone" / "tty"))
    with cli.calm_bars():
        list(tqdm(range(3), desc="PPO", mininterval=0))
    assert capsys.readouterr().err == "", "seconds need no line in a log"


def test_every_command_calms_them(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "rl_reward_network.cli", "data", "--folder", str(tmp_path), "--regions"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stderr
    assert "%|" not in done.stderr


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        ("grpo quick", {}, "Go on by: sa2va-rl grpo quick --resume"),
        ("grpo --resume", {"SA2VA_RL_REWARDS": "a b.py"}, "by: SA2VA_RL_REWARDS='a b.py' sa2va-rl grpo --resume"),
        ("reward full", {TYPED: "SEED=3 bash run_x.sh full"}, "Go on by: SEED=3 bash run_x.sh full --resume"),
        ("data --folder d", {TYPED: "SEED=3 bash run_x.sh full"}, "Go on by: SEED=3 bash run_x.sh full"),
        ("segment a.png", {}, "Run the same command again, with --resume where it has that flag"),
    ],
)
def test_what_is_stopped_says_how_it_goes_on(
    words: str, variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["sa2va-rl", *words.split()])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert how_to_go_on().endswith(said)
