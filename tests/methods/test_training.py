"""What methods need to be trained: the settings of each run, reuse, split, cost."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_reward_network.atomic_io import read_json, weights_fingerprint, write_json
from rl_reward_network.grpo import final_model as grpo_final_model
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
from rl_reward_network.methods.training import MERGED, REWARD_NET, Job, merge, named_run
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.ppo import prompts
from rl_reward_network.run import GRPO_RUN, Run
from tests.conftest import write_tiny_data


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

    monkeypatch.setattr(grpo_final_model, "merge_run", merge_run)
    for steps in (1, 1, 2):
        write_json(tmp_path / "final_model" / "config.json", {"steps": steps})
        merge(tmp_path)
        assert read_json(tmp_path / MERGED / "config.json") == {"steps": steps}
    monkeypatch.setattr(grpo_final_model, "merge_run", None)
    merge(tmp_path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> RunInputs:
    """Tiny data with the embedded model, and images without masks."""
    folder = tmp_path_factory.mktemp("project")
    data = write_tiny_data(folder / "data", images=8, size=48)
    config = RunConfig(data_root=data, output_dir=folder / "out", gpu=-1, seed=5)
    (folder / "prompts.txt").write_text("Find the tubes.\nSegment.\n")
    inputs = open_inputs(config, PromptConfig(max_tiles=3, prompts=folder / "prompts.txt"))
    return replace(inputs, unlabelled="u")


def saved_model(folder: Path, change: bool = False) -> Path:
    """The embedded model in a folder, with another weight if wanted."""
    model, processor = load_sa2va_model("sa2va-nano")
    model.lm_head.weight.data[0, 0] += change
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of supervised training, as far as those after it need it."""
    return saved_model(tmp_path_factory.mktemp("runs") / SUPERVISED / MERGED).parent


@pytest.mark.parametrize("mode", ["quick", "full"])
@pytest.mark.parametrize("name", [name for name in TRAINED if name != REWARD_NET])
def test_each_run_is_trained_with_the_settings_of_its_method(
    name: str, mode: Any, small: RunInputs, supervised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, Any]] = []

    def stage(inputs: Any, plan: Any, *_: Any, **__: Any) -> None:
        calls.append((inputs, plan))

    monkeypatch.setattr(prompts, "run_policy_stage", stage)
    monkeypatch.setattr(grpo_stage, "run_grpo_stage", stage)
    monkeypatch.setattr(training.RewardNetwork, "from_pretrained", lambda folder: SimpleNamespace(fingerprint="net"))
    monkeypatch.setattr(training, "check_no_leak", lambda *_: None)
    inputs = replace(small, config=replace(small.config, output_dir=tmp_path))
    run, reused = TRAINED[name](Job(mode, inputs, None, {REWARD_NET: tmp_path / "net", SUPERVISED: supervised}))
    ((used, plan),) = calls
    assert not reused
    assert run.parent == tmp_path
    assert used.config.seed == 5
    learned = name in (PROMPTS_NET, "grpo_net", "gradient", AFTER, PREFERENCES)
    if name not in WEIGHTS:
        assert plan.reward == ("dice" if name in (PROMPTS_LABELS, POST) else "net")
        assert (used.unlabelled is not None) == learned
        return
    goes_on = name in (AFTER, TEACHER, PREFERENCES)
    assert (used.regions.segment_question, used.regions.max_dynamic_patch) == ("Find the tubes.", 3)
    assert used.config.model_path == (str(supervised / MERGED) if goes_on else "sa2va-nano")
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
    config = replace(small.config, output_dir=tmp_path)
    begun = open_grpo_inputs(config, RegionConfig(segment_question="Find the tubes.", max_dynamic_patch=3))
    settings = GRPOSettings(max_steps=training.STEPS["grpo"]["quick"])
    plan = training.grpo_plan(Job("quick", small, None, {}), begun, settings, None)
    run = Run(tmp_path / "sa2va_grpo_20260101_000000_00000000", GRPO_RUN)
    weights = weights_fingerprint(load_sa2va_model("sa2va-nano")[0])
    run.begin(grpo_stage.wanted_settings(begun, plan, weights), {})
    write_json(run / "final_model" / "config.json", {})
    run.finish()
    if change in ("copy", "other"):
        config = replace(config, model_path=str(saved_model(tmp_path / change, change == "other")))
    if change == "dtype":
        config = replace(config, dtype="bfloat16")
    limits = replace(small.prompt_config, max_tiles=2) if change == "tiles" else small.prompt_config
    questions = small.prompts[::-1] if change == "prompt" else small.prompts
    inputs = replace(open_inputs(config, limits), prompts=questions)
    monkeypatch.setattr(grpo_stage, "run_grpo_stage", lambda *_, **__: None)
    found, reused = TRAINED["grpo_labels"](Job("quick", inputs, None, {}))
    assert (found == run.path, reused) == (same, same)
