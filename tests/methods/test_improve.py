"""Adaptation: what it trains and deploys, when it deploys nothing, resume, and what it refuses to claim."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_reward_network.atomic_io import read_json, weights_fingerprint
from rl_reward_network.cli.adapt import Args, check
from rl_reward_network.grpo.inputs import GRPOInputs, open_grpo_inputs
from rl_reward_network.grpo.plan import PlanArgs, TrainablePartsArgs, make_plan
from rl_reward_network.grpo.settings import GRPOPlan
from rl_reward_network.grpo.stage import captions_of, wanted_settings
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.methods import adapt
from rl_reward_network.methods.adapt import (
    AdaptPlan,
    AdaptResult,
    StageResult,
    check_labels,
    decide,
    looks_of,
    make_adapt_plan,
    run_adapt_stage,
    settings_of,
    stage_settings,
)
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.run import ADAPT_RUN, Run, differences
from tests.conftest import write_tiny_data

LABELLED = 8
SIDE = 128  # pixels of the side network, in place of 512: the same code in a sixteenth of the time
STAGES = ("supervised", "mean_teacher")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> GRPOInputs:
    """Forty images of a patient each, eight of them for validation."""
    folder = tmp_path_factory.mktemp("project")
    data = write_tiny_data(folder / "data", images=40, size=64)
    return open_grpo_inputs(RunConfig(data_root=data, output_dir=folder / "out", gpu=-1))


@pytest.fixture(scope="module")
def plan(images: GRPOInputs) -> AdaptPlan:
    return make_adapt_plan(images, "quick", max_labelled=LABELLED)


@pytest.fixture(scope="module", autouse=True)
def two_steps() -> Iterator[None]:
    def parts(side_network: bool) -> TrainablePartsArgs:
        return TrainablePartsArgs(side_network, SIDE if side_network else 512)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapt, "STEPS_OF", {stage: {"quick": 2} for stage in STAGES})
        patch.setattr(adapt, "TrainablePartsArgs", parts)
        yield


def adapted(images: GRPOInputs, plan: AdaptPlan, run: Run, *gains: float, test: tuple[float, float]) -> AdaptResult:
    """Adapt as if each stage, in its order, were that much better at its only look; and on test patients."""
    stages, models = iter(gains), iter(test)

    def looks(folder: Path) -> tuple[np.ndarray, list[str]]:
        assert looks_of(folder)[0].shape[1] == 6, "the run wrote the looks at its validation patients"
        return np.array([[0.5] * 8, [0.5 + next(stages)] * 8]), [str(number) for number in range(8)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapt, "looks_of", looks)
        patch.setattr(adapt, "dice_of", lambda inputs, model, prompts: np.full(len(prompts), 0.5 + next(models)))
        return run_adapt_stage(images, plan, run)


@pytest.fixture(scope="module")
def both(images: GRPOInputs, plan: AdaptPlan, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, AdaptResult]:
    """A run of which both stages are kept."""
    run = Run(tmp_path_factory.mktemp("both") / "adapt", ADAPT_RUN)
    return run, adapted(images, plan, run, 0.1, 0.2, test=(0.0, 0.15))


@pytest.fixture
def again(both: tuple[Run, AdaptResult], tmp_path: Path) -> Run:
    """The same run, interrupted after the first stage."""
    left = shutil.ignore_patterns("mean_teacher", "adapted", "adapt.json", "done.json")
    shutil.copytree(both[0].path, tmp_path / "again", ignore=left)
    return Run(tmp_path / "again", ADAPT_RUN)


def fingerprint(folder: Path) -> str:
    return weights_fingerprint(load_sa2va_model(str(folder))[0])


def test_a_stage_is_kept_only_if_it_is_better_on_the_validation_patients() -> None:
    groups, noise = [str(number) for number in range(8)], np.random.default_rng(0).normal(0, 0.002, 8)

    def decided(*gains: np.ndarray | float) -> StageResult:
        return decide("s", np.array([np.full(8, 0.5), *(0.5 + gain + noise for gain in gains)]), groups)

    assert decided(0.0, 0.02, 0.01).kept
    assert decided(0.0, 0.02, 0.01).dice.mean == pytest.approx(0.52, abs=0.002), "the best look is deployed"
    assert "kept; a loss larger than any seen, in up to 3/8 of the patients" in decided(0.02).line
    assert not decided(0.0).kept
    assert not decided(-0.01).kept
    mixed = decided(np.array([0.3, -0.2, 0.1, -0.1, 0.2, -0.1, 0.0, -0.1]))
    assert not mixed.kept
    assert "left out: not better beyond chance" in mixed.line
    assert not decide("s", np.array([[0.5] * 5, [0.51] * 5]), groups[:5]).kept, "five patients decide nothing"


def test_looks_without_a_gain_are_not_kept() -> None:
    """The best of eight looks has an interval above 0 in 5 to 15 % of such stages; judged out of fold it has not."""
    rng, groups = np.random.default_rng(0), [str(number) for number in range(12)]
    stages = [np.vstack([np.zeros(12), rng.normal(size=(1, 12)) + rng.normal(size=(8, 12))]) for _ in range(200)]
    assert np.mean([decide("s", 0.05 * stage, groups).kept for stage in stages]) <= 0.05


def test_both_stages_train_and_the_last_kept_one_is_deployed_with_its_report(
    images: GRPOInputs, plan: AdaptPlan, both: tuple[Run, AdaptResult]
) -> None:
    run, result = both
    assert plan.stages == STAGES
    assert [(stage.stage, stage.kept) for stage in result.stages] == [(stage, True) for stage in STAGES]
    assert result.report == run / "mean_teacher" / "evaluation" / "report.html"
    assert result.report.exists()
    assert result.test is not None
    assert result.test.mean == read_json(run / "adapt.json")["test"]["mean"] == pytest.approx(0.15)
    assert result.lines[-1].startswith("against the model before, on ")
    card = (run / "adapted" / "README.md").read_text()
    assert result.lines[-1] in card
    assert "Before and after" in card
    assert fingerprint(run / "adapted") == fingerprint(run / "mean_teacher" / "merged")
    assert read_json(run / "mean_teacher" / "config.json")["labels"] == 8
    configs = [read_json(run / stage / "config.json") for stage in STAGES]
    assert [config["settings"]["training"]["objective"] for config in configs] == list(STAGES)
    config = RunConfig(data_root=images.config.data_root, model_path=str(run / "adapted"), gpu=-1)
    after = make_adapt_plan(open_grpo_inputs(config, images.regions), "quick", max_labelled=LABELLED)
    assert after.stages == ("mean_teacher",), "a side network that is there stays"
    assert after.model_fingerprint == fingerprint(run / "adapted")
    assert load_sa2va_model(str(run / "adapted"))[0].config.side_pixels == SIDE
    assert make_adapt_plan(images, "quick", side_network=False).stages == ("mean_teacher",)


@pytest.mark.slow
def test_resumed_after_the_first_stage_it_ends_in_the_same_weights(
    images: GRPOInputs, plan: AdaptPlan, both: tuple[Run, AdaptResult], again: Run
) -> None:
    adapted(images, plan, again, 0.1, 0.2, test=(0.0, 0.15))
    assert fingerprint(again / "adapted") == fingerprint(both[0] / "adapted")


def test_nothing_is_deployed_where_no_stage_is_better(images: GRPOInputs, plan: AdaptPlan, again: Run) -> None:
    result = adapted(images, plan, again, -0.1, 0.0, test=(0.0, 0.0))
    assert (result.report, result.test) == (None, None)
    assert not any(stage.kept for stage in result.stages)
    assert not (again / "adapted").exists()
    assert read_json(again / "adapt.json")["deployed"] is None
    assert read_json(again / "mean_teacher" / "config.json")["inputs"]["model_path"].endswith("sa2va-nano")


@pytest.mark.parametrize(
    ("part", "setting", "value"),
    [
        ("plan", "max_labelled", 4),
        ("plan", "model_fingerprint", "other"),
        ("regions", "quantization", "4bit"),
        ("regions", "use_flash_attn", True),
        ("regions", "max_dynamic_patch", 4),
        ("config", "image_resize", "training"),
        ("config", "dtype", "bfloat16"),
    ],
)
def test_an_adaptation_is_not_resumed_with_settings_that_shape_its_result(
    images: GRPOInputs, plan: AdaptPlan, part: str, setting: str, value: Any
) -> None:
    other, changed = images, {setting: value}
    if part != "plan":
        other, changed = replace(images, **{part: replace(getattr(images, part), **changed)}), {}
    (difference,) = differences(settings_of(images, plan), settings_of(other, replace(plan, **changed)))
    assert difference.startswith(setting)
    if part != "plan" and setting != "dtype":  # which changes the weights' fingerprint
        stage = GRPOPlan("quick")
        (difference,) = differences(wanted_settings(images, stage), wanted_settings(other, stage))
        assert difference.startswith(setting)


def test_without_masks_it_says_what_cannot_be_known(images: GRPOInputs, tmp_path: Path) -> None:
    data = write_tiny_data(tmp_path / "data", images=40, size=64)
    records: list[dict[str, Any]] = json.loads((data / "annotations.json").read_text())
    bare = [{name: value for name, value in record.items() if name != "mask_png"} for record in records]
    (data / "annotations.json").write_text(json.dumps(bare))
    inputs = open_grpo_inputs(RunConfig(data_root=data, output_dir=tmp_path / "out", gpu=-1))
    with pytest.raises(ValueError, match="Without masks it cannot be known whether a changed model is better or worse"):
        check_labels(inputs)
    with pytest.raises(ValueError, match=r"all \d+ training images .* --unlabelled_root or a smaller --max_labelled"):
        check_labels(images)
    check_labels(images, LABELLED)


@pytest.mark.parametrize("small", [True, False])
def test_every_model_takes_the_same_steps_of_as_many_images(images: GRPOInputs, plan: AdaptPlan, small: bool) -> None:
    for stage in plan.stages:
        inputs = replace(images.config, model_path="sa2va-nano" if small else "owner/Sa2VA-4B")
        parts = TrainablePartsArgs(stage == "supervised")
        of_stage = make_plan(PlanArgs("quick", inputs, grpo=stage_settings(plan, stage), adapters=parts), images, None)
        assert of_stage.settings.max_steps == 2
        assert captions_of(of_stage.settings) // of_stage.settings.num_generations == 8
        assert not of_stage.own_batch, "so that fewer labelled images are taken as they are"


def test_the_plan_reads_files_and_loads_no_model(images: GRPOInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model of billions of parameters would take its memory twice")

    monkeypatch.setattr("rl_reward_network.models.sa2va.modeling_sa2va.Sa2VAForConditionalGeneration.__init__", refuse)
    assert make_adapt_plan(images, "full").stages == STAGES


@pytest.mark.parametrize(
    ("inputs", "processes", "message"),
    [
        ({"model_path": "."}, "1", "no data are named for it"),
        ({"data_root": Path()}, "2", "adapt runs in one process; on several GPUs call its stages"),
    ],
)
def test_what_can_be_refused_is_refused_before_anything_is_read(
    inputs: dict[str, Any], processes: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", processes)
    with pytest.raises(ValueError, match=message):
        check(Args(inputs=RunConfig(**inputs, gpu=-1)))
