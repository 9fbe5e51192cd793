"""The command of experiment 2 refuses what cannot be before anything is read."""

from pathlib import Path

import pytest

from rl_reward_network.cli import operations
from rl_reward_network.cli.compare_parts import parsed
from tests.conftest import write_tiny_data


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quick", "--reward", "net"], "give --reward_net"),
        (["quick", "--max_steps", "0"], "max_steps is 0"),
        (["quick", "--unlabelled_root", "images"], "--unlabelled_root does nothing here"),
        (["quick", "--model_path", "other"], "no data are named for it"),
    ],
)
def test_flags_that_cannot_be_are_refused_early(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        operations.check(parsed(operations.Args, words))


def test_a_folder_with_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a run already"):
        operations.check(parsed(operations.Args, ["quick", "--run_folder", str(tmp_path)]))


def test_the_plan_follows_the_flags() -> None:
    plan = operations.check(parsed(operations.Args, ["full", "--seed", "3", "--max_steps", "4"]))
    assert (plan.mode, plan.ppo.seed, plan.ppo.max_steps, plan.reward) == ("full", 3, 4, "dice")


def test_a_folder_without_a_run_is_not_gone_on_with(tiny_checkpoint: Path, tmp_path: Path) -> None:
    data = write_tiny_data(tmp_path / "data", images=8, size=48)
    words = f"quick --model_path {tiny_checkpoint} --data_root {data} --gpu -1 --output_dir {tmp_path} --resume"
    with pytest.raises(ValueError, match="--resume"):
        operations.main(parsed(operations.Args, words.split()))
    with pytest.raises(ValueError, match="nowhere holds no run; leave --resume out"):
        operations.main(parsed(operations.Args, [*words.split(), "--run_folder", str(tmp_path / "nowhere")]))
