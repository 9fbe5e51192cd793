"""The command of the comparison: flags, and the commands of its parts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_reward_network.artefacts import write_json
from rl_reward_network.cli import compare, grpo_flags, operations, prompts, reward
from rl_reward_network.cli.compare_parts import PartCommands, flags_of, parsed
from rl_reward_network.compare.roads import (
    AFTER,
    POST,
    PROMPTS_LABELS,
    REWARD_NET,
    ROADS,
    SUPERVISED,
    WEIGHTS,
    parts_of,
)
from rl_reward_network.grpo.settings import check_settings
from rl_reward_network.inputs.config import PromptConfig, RunConfig

CONFIG = RunConfig(data_root=Path("data/mine"), output_dir=Path("out"), split_seed=3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quick", "--roads", "combined"], "give weights as well"),
        (["quick", "--seeds", "1", "1"], r"seeds are \[1, 1\]"),
        (["quick", "--seeds", "-1"], r"seeds are \[-1\]"),
    ],
)
def test_flags_that_cannot_be_are_refused_early(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare.check(parsed(compare.Args, words))


def test_roads_keep_their_order_and_seeds_follow_seed() -> None:
    plan = compare.check(parsed(compare.Args, ["quick", "--roads", "fusion", "prompts", "--seed", "4"]))
    assert plan.groups == ("prompts", "fusion")
    assert plan.seeds == (4,)


def test_settings_become_flags_that_give_the_same_settings() -> None:
    words = ["quick", *flags_of(CONFIG), *flags_of(PromptConfig(max_tiles=2))]
    args = parsed(reward.Args, words)
    assert args.inputs == CONFIG
    assert args.prompting == PromptConfig(max_tiles=2)
    assert flags_of(RunConfig()) == ["--data_root", str(RunConfig().data_root)]


@pytest.mark.parametrize("part", parts_of(ROADS))
@pytest.mark.parametrize("mode", ["quick", "full"])
def test_every_command_is_one_that_its_flags_allow(part: str, mode: str, tmp_path: Path) -> None:
    commands = PartCommands(mode, CONFIG, PromptConfig(), None, None)  # type: ignore[arg-type]
    runs = {REWARD_NET: tmp_path / "net", SUPERVISED: tmp_path / "supervised"}
    command = commands(part, 5, runs)
    types: dict[str, Any] = {"reward": reward, "prompts": prompts, "operations": operations, "grpo": grpo_flags}
    args = parsed(types[command.words[0]].Args, command.words[1:])
    assert args.inputs.seed == 5
    assert args.inputs.split_seed == 3
    if part in WEIGHTS:
        learned = args.rewards.reward_net is not None
        grpo_flags.check_together(args, "images", learned)
        check_settings(args.grpo)
        assert args.inputs.model_path == (str(tmp_path / "supervised" / "merged") if part == AFTER else "sa2va-nano")
    if part == PROMPTS_LABELS:
        assert args.ppo.stop
        assert args.reward == "dice"
    if part == POST:
        assert args.reward == "dice"


def test_a_reward_network_that_is_named_is_used_if_it_is_of_a_finished_run(tmp_path: Path) -> None:
    commands = PartCommands("quick", CONFIG, PromptConfig(), None, tmp_path / "best_reward_net")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="finished run reward_net_<time>"):
        commands(REWARD_NET, 0, {}).find()
    for name in ("agreement.json", "split.json"):
        write_json(tmp_path / name, {})
    assert commands(REWARD_NET, 0, {}).find() == tmp_path.resolve()


def test_two_grpo_runs_of_different_models_are_told_apart(tmp_path: Path) -> None:
    from rl_reward_network.cli.compare_parts import _trains

    write_json(tmp_path / "run" / "config.json", {"world": {"model_path": "../merged"}})
    assert _trains(tmp_path / "run", str(tmp_path / "merged"))
    assert not _trains(tmp_path / "run", "sa2va-nano")


def test_resume_without_a_comparison_lists_what_there_is(tmp_path: Path) -> None:
    args = replace(parsed(compare.Args, ["quick"]), resume=True, run_folder=tmp_path / "none")
    assert compare._to_resume(args, None, None) == tmp_path / "none"  # type: ignore[arg-type]
