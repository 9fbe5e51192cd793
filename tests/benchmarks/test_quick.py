"""The benchmark of the quick runs calls what the shell files call, and sets seconds beside seconds."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest

from benchmarks.quick import Run, Spent, Tree, commands, print_rows

ROOT = Path(__file__).parents[2]
SHELL_FILES = {
    "step2": "run_step2_finetune.sh",
    "grpo": "run_rl_train.sh",
    "experiment2": "run_experiment2.sh",
    "compare": "run_compare.sh",
}


@pytest.mark.parametrize("name", get_args(Run))
def test_the_commands_are_those_of_the_shell_file(name: Run) -> None:
    text = (ROOT / SHELL_FILES[name]).read_text(encoding="utf-8")
    body = text[text.index("  embedded_data") :].replace("embedded_data", "run_command data")
    called = re.findall(
        r'^ .*?\b(?:run_command (\w+)|run_module "\$\{command\[@\]\}"|(evaluate)_run\b)', body, re.MULTILINE
    )
    assert [words[0] for words in commands(name)] == [first or second or "grpo" for first, second in called]
    assert ("--regions" in text) == (["data", "--folder", "data", "--regions"] in list(commands(name)))


def test_a_command_is_compared_by_cpu_and_a_phase_by_the_clock(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows([{"train": Spent(9.0, 2.0), "  masks": Spent(3.0)}, {"train": Spent(1.0, 4.0), "  masks": Spent(12.0)}])
    print_rows([{"train": Spent(9.0, 2.0)}])
    assert capsys.readouterr().out.splitlines() == [
        "| train | 9.0 | 2.0 | 1.0 | 4.0 | 0.50 |",
        "|   masks | 3.0 | - | 12.0 | - | 0.25 |",
        "| train | 9.0 | 2.0 |",
    ]


def test_a_phase_is_named_by_the_kind_of_its_run_at_any_time_of_day(tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "reward_net_20261125_205208_201000"
    run.mkdir(parents=True)
    (run / "agreement.json").write_text(json.dumps({"seconds": {"training": 3.0}}))
    tree = Tree(ROOT, tmp_path)
    assert list(tree._phases()) == ["  reward_net: training"]
    assert tree._phases() == {}, "each once"
