"""run.yaml: what a command writes starts it again, and what does not belong into the file is refused."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rl_reward_network.cli import app
from rl_reward_network.cli.run_file import run_yaml

TRAINED = {  # command -> flags with values of every kind
    "reward": "full --score_weights 0.5 0 0 0.5 --name try.1",
    "prompts": "full --preset published --reward dice --vision_features --prompts mine.txt",
    "operations": "quick --shuffle_rewards --gamma 0.5 --gpu -1",
    "grpo": "quick --mask_rewards dice 0.5 cldice 1 --side_network --llm_judge_cache off --kl_coef 0",
    "compare": "quick --methods prompts post --seeds 1 2 --report_to none",
    "improve": "quick --steps 5 --resume --run_folder here",
}


def parsed(command: str, *words: str) -> Any:
    got: list[Any] = []
    args = import_module(f"rl_reward_network.cli.{command}").Args
    app.run(got.append, args, f"sa2va-rl {command}", words)
    return got[0]


@pytest.mark.parametrize("command", TRAINED)
def test_what_is_written_starts_the_run_again_from_anywhere(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, (mode, *flags) = tmp_path / "run.yaml", TRAINED[command].split()
    monkeypatch.chdir(tmp_path)
    written = run_yaml(parsed(command, mode, *flags), command)
    file.write_text(written)
    assert f"mode: {mode}\n" in written
    assert f"data_root: {tmp_path / 'data'}" in written
    assert "resume" not in written
    monkeypatch.chdir("/")
    again = parsed(command, "--config", str(file), "--output_dir", str(tmp_path / "outputs"))
    assert run_yaml(again, command) == written
    given = [word for word in flags if word.startswith("--") and word not in ("--resume", "--run_folder")]
    assert [flag for flag in given if f"\n{flag[2:]}:" not in written] == []


def test_flags_win_and_values_mean_what_they_mean_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("mode: quick\nlearning-rate: 1e-4\nside_network: true\naugment: null\ndata_dir: d\nseed: 3\n")
    args = parsed("grpo", f"--config={file}", "--seed", "4", "full", "--side_network", "False")
    assert (args.mode, args.grpo.learning_rate, args.inputs.seed) == ("full", 1e-4, 4)
    assert (args.adapters.side_network, args.grpo.augment, args.inputs.data_root) == (False, None, Path("d"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "learning_ratee: 3",
            "learning_ratee: no setting of sa2va-rl grpo (is it learning_rate?); sa2va-rl grpo --help-all",
        ),
        ("optim: adam", "optim is adam, expected "),
        ("learning_rate: fast", "learning_rate is fast, expected float | None; see sa2va-rl grpo --help-all"),
        ("seed: 1.5", "seed is 1.5, expected int"),
        ("side_network: yes", "side_network is yes, expected bool"),
        ("mask_rewards: {dize: 1}", "mask_rewards is dize 1, expected "),
        ("mode: slow", "mode is slow, expected quick or full"),
        ("config: other.yaml", "config: no setting of sa2va-rl grpo; "),
        ("- 3", "holds no settings"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_file_with_a_fault_is_refused_by_name(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        parsed("grpo", "--config", str(file))
    said = capsys.readouterr().err
    assert message in said
    assert str(file) in said
    assert said.count("\n") == 1
