"""What methods need to be trained: the settings of each run, reuse, split, cost."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_reward_network.atomic_io import read_json, weights_fingerprint, write_json
from rl_reward_network.data.splits import Split
from rl_reward_network.grpo import merge as grpo_merge
from rl_reward_network.grpo import stage as grpo_stage
from rl_reward_network.grpo.inputs import open_grpo_inputs
from rl_reward_network.grpo.settings import GRPOSettings
from rl_reward_network.inputs.config import PromptConfig, RegionConfig, RunConfig
from rl_reward_network.inputs.loading import RunInputs, open_inputs
from rl_reward_network.methods import training
from rl_reward_network.methods.methods import (
    AFTER,
    POST,
    PREFERENCES,
    PROMPTS_LABELS,
    PROMPTS_NET,
    SUPERVISED,
    TEACHER,
    TRAINED,
    WEIGHTS,
)
from rl_reward_network.methods.training import MERGED, REWARD_NET, Job, check_split, cost_of, merge, named_run
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.ppo import prompts
from rl_reward_network.report.cost import Cost, RunCost, cost_from_json, cost_json, total_cost
from rl_reward_network.run import GRPO_RUN, Run
from tests.conftest import write_tiny_data

SPLIT = Split({"reward": ("a",), "policy": ("b",), "val": ("c",), "test": ("d",)}, 0, "f")


def test_runs_that_learn_from_one_split_share_its_labels() -> None:
    both = total_cost([Cost(2, (("reward", 50),), 10, 1.5), Cost(3, (("policy", 20), ("reward", 40)), 5, None)])
    assert both == Cost(5, (("policy", 20), ("reward", 50)), 15, 1.5)
    assert both.labelled_images == 70
    assert total_cost([]) == Cost()
    assert cost_from_json(cost_json(both)) == both


def test_the_cost_of_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    seconds = {"masks and scores": 30, "PPO": 50, "decision": 10}
    labels = {"reward": {}, "weights": {"val": 48}, "deployment": {"policy": 20, "val": 40}}
    RunCost(seconds, labels, 7, None, resumed=True).save(tmp_path)
    inputs: Any = None
    assert cost_of(tmp_path, inputs) == Cost(1.5, (("policy", 20), ("val", 48)), 7, None, resumed=True)
    searched = Cost(0.5, (("policy", 20), ("val", 40)), 0, None, resumed=True)
    assert cost_of(tmp_path, inputs, searched=True) == searched


def test_runs_of_0_12_have_no_cost_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [SimpleNamespace(group_id=name, labelled=True) for name in "a" * 50 + "b" * 70]
    inputs: Any = SimpleNamespace(samples=samples, split=SPLIT)
    config: dict[str, Any] = {"minutes": 4.5, "labels": 60, "parameters": [["LoRA", 100, 30], ["mlp1", 10, 10]]}
    config |= {"seconds": {}, "peak_memory_gib": 2.0, "validation": {"labelled": 48}}
    path = tmp_path / "final_model" / "config.json"
    write_json(path, config)
    assert cost_of(tmp_path, inputs) == Cost(4.5, (("policy", 10), ("reward", 50), ("val", 48)), 40, 2.0)
    monkeypatch.setattr(training, "load_policy", lambda folder: None)
    monkeypatch.setattr(training, "_count", lambda module: 7)
    config = {"seconds": {"PPO": 50, "search": 10}, "labels": {"reward": {"policy": 5}}, "deployment": {"choice": "x"}}
    write_json(path, config)
    assert cost_of(tmp_path, inputs) == Cost(1.0, (("policy", 5),), 7)
    write_json(path, config | {"labels": {"policy": 5}, "deployment": {}})
    assert cost_of(tmp_path, inputs, searched=True) == Cost(1 / 6, (("policy", 5),)), "of 0.11"


def test_a_run_of_another_split_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "split.json", {"groups": {name: list(ids) for name, ids in SPLIT.groups.items()}})
    check_split(SUPERVISED, tmp_path, SPLIT)
    other = Split({**SPLIT.groups, "val": ("d",), "test": ("c",)}, 1, "f")
    with pytest.raises(ValueError, match="supervised was trained with another split"):
        check_split(SUPERVISED, tmp_path, other)


def test_a_reward_network_that_is_named_is_used_if_it_is_of_a_finished_run(tmp_path: Path) -> None:
    job: Any = SimpleNamespace(reward_net=tmp_path / "best_reward_net")
    with pytest.raises(ValueError, match="finished run reward_net_<time>"):
        TRAINED[REWARD_NET](job)
    for name in ("agreement.json", "split.json"):
        write_json(tmp_path / name, {})
    assert TRAINED[REWARD_NET](job) == (tmp_path.resolve(), True) == (named_run(job.reward_net), True)


def test_weights_are_merged_again_where_they_were_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def merge_run(final_model: Path, output: Path) -> None:
        assert not output.exists(), "merge_run would refuse it"
        write_json(output / "config.json", read_json(final_model / "config.json"))

    monkeypatch.setattr(grpo_merge, "merge_run", merge_run)
    for steps in (1, 1, 2):
        write_json(tmp_path / "final_model" / "config.json", {"steps": steps})
        merge(tmp_path)
        assert read_json(tmp_path / MERGED / "config.json") == {"steps": steps}
    monkeypatch.setattr(grpo_merge, "merge_run", None)
    merge(tmp_path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> RunInputs:
    """Tiny data with the embedded model, and images without masks."""
    folder = tmp_path_factory.mktemp("project")
    data = write_tiny_data(folder / "data", images=8, size=48)
    config = RunConfig(data_root=data, output_dir=folder / "out", gpu=-1, seed=5)
    (folder / "prompts.txt").write_text("Find the tubes.\nSegment.\n")
    inputs = open_inputs(config, PromptConfig(max_tiles=3, prompts=folder / "prompts.txt"))
    unlabelled: Any = SimpleNamespace(fingerprint="u", samples=[], for_training=[])
    return replace(inputs, unlabelled=unlabelled)


@pytest.mark.parametrize("mode", ["quick", "full"])
@pytest.mark.parametrize("name", [name for name in TRAINED if name != REWARD_NET])
def test_each_run_is_trained_with_the_settings_of_its_method(
    name: str, mode: Any, small: RunInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, Any]] = []

    def stage(inputs: Any, plan: Any, *_: Any, **__: Any) -> None:
        calls.append((inputs, plan))

    monkeypatch.setattr(prompts, "run_policy_stage", stage)
    monkeypatch.setattr(grpo_stage, "run_grpo_stage", stage)
    monkeypatch.setattr(training.RewardNetwork, "from_pretrained", lambda folder: SimpleNamespace(fingerprint="net"))
    monkeypatch.setattr(training, "check_no_leak", lambda *_: None)
    base, processor = load_sa2va_model("sa2va-nano")
    goes_on = name in (AFTER, TEACHER, PREFERENCES)
    if goes_on:
        base.save_pretrained(tmp_path / SUPERVISED / MERGED)
        processor.save_pretrained(tmp_path / SUPERVISED / MERGED)
    inputs = replace(small, config=replace(small.config, output_dir=tmp_path))
    runs = {REWARD_NET: tmp_path / "net", SUPERVISED: tmp_path / SUPERVISED}
    run, reused = TRAINED[name](Job(mode, inputs, None, runs))
    ((used, plan),) = calls
    assert not reused
    assert run.parent == tmp_path
    assert used.config.seed == 5
    learned = name in (PROMPTS_NET, "grpo_net", "gradient", AFTER, PREFERENCES)
    if name not in WEIGHTS:
        assert plan.reward == ("dice" if name in (PROMPTS_LABELS, POST) else "net")
        assert (used.unlabelled is not None) == learned
        return
    assert used.regions.segment_question == "Find the tubes."
    assert used.regions.max_dynamic_patch == 3
    assert used.config.model_path == (str(tmp_path / SUPERVISED / MERGED) if goes_on else "sa2va-nano")
    assert plan.reward_net == ("net" if learned else None)
    assert plan.weights.loop2_iou == (0.0 if learned else 1.0)
    objective = {SUPERVISED: "supervised", TEACHER: "mean_teacher", PREFERENCES: "dpo"}.get(name, "grpo")
    assert plan.settings.objective == objective
    first = sum(sample.labelled for sample in small.pick("reward", 99))
    budgets = {SUPERVISED: {"quick": 50, "full": 200}[mode], TEACHER: first}  # the teacher's leaves images without
    assert plan.max_labelled == budgets.get(name)
    assert plan.settings.caption_to_mask_weight == (0.0 if name == "gradient" else 1.0)
    assert plan.settings.max_steps == training.STEPS[objective][mode]


@pytest.mark.parametrize(
    ("change", "same"),
    [("none", True), ("dtype", False), ("copy", True), ("other", False), ("tiles", False), ("prompt", False)],
)
def test_weights_are_reused_only_with_the_same_model_dtype_and_prompt(
    change: str, same: bool, small: RunInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = load_sa2va_model("sa2va-nano")
    config = replace(small.config, output_dir=tmp_path)
    regions = RegionConfig(segment_question="Find the tubes.", max_dynamic_patch=3)
    begun = open_grpo_inputs(config, regions)
    settings = GRPOSettings(max_steps=training.GRPO_STEPS["quick"])
    plan = training.grpo_plan(Job("quick", small, None, {}), begun, settings, None)
    folder = tmp_path / "sa2va_grpo_20260101_000000_00000000"
    Run(folder, GRPO_RUN).begin(grpo_stage.describe(begun, plan, weights_fingerprint(model)), {})
    write_json(folder / "final_model" / "config.json", {})
    Run(folder, GRPO_RUN).finish()
    limits, questions = small.prompt_config, small.prompts
    if change in ("copy", "other"):
        model.lm_head.weight.data[0, 0] += change == "other"
        model.save_pretrained(tmp_path / change)
        processor.save_pretrained(tmp_path / change)
        config = replace(config, model_path=str(tmp_path / change))
    elif change == "dtype":
        config = replace(config, dtype="bfloat16")
    elif change == "tiles":
        limits = replace(limits, max_tiles=2)
    elif change == "prompt":
        questions = questions[::-1]
    opened = open_inputs(config, limits)
    inputs = replace(opened, prompts=questions)
    monkeypatch.setattr(grpo_stage, "run_grpo_stage", lambda *_, **__: None)
    found, reused = TRAINED["grpo_labels"](Job("quick", inputs, None, {}))
    assert (found == folder, reused) == (same, same)
