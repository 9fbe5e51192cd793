"""The command of the comparison: flags, and the commands of its parts."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_reward_network.artefacts import weights_fingerprint, write_json
from rl_reward_network.cli import compare, grpo_flags, operations, prompts, reward
from rl_reward_network.cli.compare_parts import PartCommands, flags_of, parsed
from rl_reward_network.grpo.inputs import open_grpo_inputs
from rl_reward_network.grpo.stage import describe
from rl_reward_network.inputs.config import PromptConfig, RunConfig
from rl_reward_network.inputs.loading import open_inputs
from rl_reward_network.methods.methods import (
    AFTER,
    GRPO_LABELS,
    METHODS,
    POST,
    PROMPTS_LABELS,
    SUPERVISED,
    WEIGHTS,
    parts_of,
)
from rl_reward_network.methods.parts import PartCommand
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.run import REWARD_NET
from tests.conftest import write_tiny_data

CONFIG = RunConfig(data_root=Path("data/mine"), output_dir=Path("out"), split_seed=3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quick", "--roads", "combined"], "give weights as well"),
        (["quick", "--seeds", "1", "1"], r"seeds are \[1, 1\]"),
        (["quick", "--seeds", "-1"], r"seeds are \[-1\]"),
        (["quick", "--gpu", "1"], "gpu is 1, expected 0 or -1"),
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


@pytest.mark.parametrize("part", parts_of(METHODS))
@pytest.mark.parametrize("mode", ["quick", "full"])
def test_every_command_is_one_that_its_flags_allow(part: str, mode: str, tmp_path: Path) -> None:
    inputs: Any = SimpleNamespace(prompts=("Find the tubes.", "Segment."))
    commands = PartCommands(mode, CONFIG, PromptConfig(max_tiles=3), inputs, None)
    runs = {REWARD_NET: tmp_path / "net", SUPERVISED: tmp_path / "supervised"}
    command = commands(part, 5, runs)
    types: dict[str, Any] = {"reward": reward, "prompts": prompts, "operations": operations, "grpo": grpo_flags}
    args = parsed(types[command.words[0]].Args, command.words[1:])
    assert args.inputs.seed == 5
    assert args.inputs.split_seed == 3
    if part in WEIGHTS:
        assert args.regions.segment_question == "Find the tubes."
        assert args.regions.max_dynamic_patch == 3
        learned = args.rewards.reward_net is not None
        grpo_flags.check_together(args, learned)
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


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("project")
    data = write_tiny_data(folder / "data", images=8, size=48)
    return RunConfig(data_root=data, output_dir=folder / "out", gpu=-1)


@pytest.mark.parametrize(
    ("config", "prompting", "same"),
    [
        ({}, {}, True),
        ({"dtype": "bfloat16"}, {}, False),
        ({"model_path": "copy"}, {}, True),
        ({"model_path": "other"}, {}, False),
        ({}, {"max_tiles": 2}, False),
        ({}, {"prompts": "prompts.txt"}, False),
    ],
)
def test_weights_are_reused_only_with_the_same_model_dtype_and_prompt(
    small: RunConfig, config: dict[str, Any], prompting: dict[str, Any], same: bool
) -> None:
    folder = small.output_dir.parent
    if not (folder / "other").exists():
        model, processor = load_sa2va_model("sa2va-nano")
        for name in ("copy", "other"):
            model.save_pretrained(folder / name)
            processor.save_pretrained(folder / name)
            model.lm_head.weight.data[0, 0] += 1
        (folder / "prompts.txt").write_text("Find the tubes.\nSegment.\n")
    for settings, name in ((config, "model_path"), (prompting, "prompts")):
        if name in settings:
            settings[name] = str(folder / settings[name]) if name == "model_path" else folder / settings[name]
    first = grpo_command(small, PromptConfig())
    words = parsed(grpo_flags.Args, first.words[1:])
    run = small.output_dir / "sa2va_grpo_1"
    if not run.exists():
        grpo_inputs = open_grpo_inputs(words.inputs, words.regions)
        model, _ = load_sa2va_model("sa2va-nano")
        plan = grpo_flags.make_plan(words, grpo_inputs, None)
        origin = describe(grpo_inputs, plan, weights_fingerprint(model))
        write_json(run / "config.json", {"stage": "grpo", "origin": origin})
        (run / "final_model").mkdir()
        write_json(run / "final_model" / "config.json", {})
    assert first.find() == run
    again = grpo_command(replace(small, **config), PromptConfig(**prompting))
    assert again.find() == (run if same else None)


def grpo_command(config: RunConfig, prompting: PromptConfig) -> PartCommand:
    return PartCommands("quick", config, prompting, open_inputs(config, prompting), None)(GRPO_LABELS, 0, {})


def test_a_folder_without_a_comparison_is_not_gone_on_with(tmp_path: Path) -> None:
    args = replace(parsed(compare.Args, ["quick"]), resume=True, run_folder=tmp_path / "none")
    with pytest.raises(ValueError, match="none holds no run; leave --resume out"):
        compare.check(args)
