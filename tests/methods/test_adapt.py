"""Adaptation: what it trains and deploys, when it deploys nothing, resume, and what it refuses to claim."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_reward_network.atomic_io import read_json, weights_fingerprint
from rl_reward_network.grpo.inputs import GRPOInputs, open_grpo_inputs
from rl_reward_network.grpo.plan import PlanArgs, TrainablePartsArgs, make_plan
from rl_reward_network.grpo.settings import GRPOPlan
from rl_reward_network.grpo.stage import captions_of, wanted_settings
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.methods import adapt
from rl_reward_network.methods.adapt import (
    AdaptPlan,
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


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> GRPOInputs:
    """Forty images of a patient each, eight of them for validation."""
    folder = tmp_path_factory.mktemp("project")
    data = write_tiny_data(folder / "data", images=40, size=64)
    return open_grpo_inputs(RunConfig(data_root=data, output_dir=folder / "out", gpu=-1))


@pytest.fixture(scope="module")
def plan(images: GRPOInputs) -> AdaptPlan:
    return make_adapt_plan(images, "quick", max_labelled=LABELLED)


@pytest.fixture(autouse=True)
def two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {"quick": 2}
    monkeypatch.setattr(adapt, "STEPS_OF", {adapt.SUPERVISED: steps, adapt.TEACHER: steps})
    monkeypatch.setattr(
        adapt,
        "TrainablePartsArgs",
        lambda side_network: TrainablePartsArgs(side_network, SIDE if side_network else 512),
    )


def answers(monkeypatch: pytest.MonkeyPatch, *gains: float, test: tuple[float, float] = (0.0, 0.0)) -> None:
    """Make each stage, in its order, that much better at its only look; and on test patients, before and after."""
    stages, models = iter(gains), iter(test)
    names = [str(number) for number in range(8)]

    def looks(folder: Path) -> tuple[np.ndarray, list[str]]:
        assert looks_of(folder)[0].shape[1] == 6, "the run wrote the looks at its validation patients"
        return np.array([[0.5] * 8, [0.5 + next(stages)] * 8]), names

    monkeypatch.setattr(adapt, "looks_of", looks)
    monkeypatch.setattr(adapt, "dice_of", lambda inputs, model, prompts: np.full(len(prompts), 0.5 + next(models)))


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
    images: GRPOInputs, plan: AdaptPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan.stages == ("supervised", "mean_teacher")
    answers(monkeypatch, 0.1, 0.2, test=(0.0, 0.15))
    run = Run(tmp_path / "adapt", ADAPT_RUN)
    result = run_adapt_stage(images, plan, run)
    report = result.report
    assert [(stage.stage, stage.kept) for stage in result.stages] == [("supervised", True), ("mean_teacher", True)]
    assert report == tmp_path / "adapt" / "mean_teacher" / "evaluation" / "report.html"
    assert report.exists()
    assert result.test is not None
    assert result.test.mean == pytest.approx(0.15)
    assert read_json(run / "adapt.json")["test"]["mean"] == pytest.approx(0.15)
    assert result.lines[-1].startswith("against the model before, on ")
    assert result.lines[-1] in (run / "adapted" / "README.md").read_text()
    assert fingerprint(run / "adapted") == fingerprint(run / "mean_teacher" / "merged")
    assert "Before and after" in (run / "adapted" / "README.md").read_text()
    assert read_json(run / "mean_teacher" / "config.json")["labels"] == 8
    objectives = [
        read_json(run / stage / "config.json")["settings"]["training"]["objective"]
        for stage in ("supervised", "mean_teacher")
    ]
    assert objectives == ["supervised", "mean_teacher"]
    model, _ = load_sa2va_model(str(run / "adapted"))
    assert model.config.side_pixels == SIDE
    adapted = open_grpo_inputs(
        RunConfig(data_root=images.config.data_root, model_path=str(run / "adapted"), gpu=-1), images.regions
    )
    after = make_adapt_plan(adapted, "quick", max_labelled=LABELLED)
    assert after.stages == ("mean_teacher",), "a side network that is there stays"
    assert after.model_fingerprint == fingerprint(run / "adapted")
    assert make_adapt_plan(images, "quick", side_network=False).stages == ("mean_teacher",)


@pytest.mark.slow
def test_resumed_after_the_first_stage_it_ends_in_the_same_weights(
    images: GRPOInputs, plan: AdaptPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, 0.1, 0.2, test=(0.0, 0.15))
    run = Run(tmp_path / "adapt", ADAPT_RUN)
    run_adapt_stage(images, plan, run)
    again = Run(tmp_path / "again", ADAPT_RUN)
    shutil.copytree(
        run.path, again.path, ignore=shutil.ignore_patterns("mean_teacher", "adapted", "adapt.json", "done.json")
    )
    answers(monkeypatch, 0.1, 0.2, test=(0.0, 0.15))
    run_adapt_stage(images, plan, again)
    assert fingerprint(again / "adapted") == fingerprint(run / "adapted")
    with pytest.raises(ValueError, match="max_labelled"):
        again.check_same(settings_of(images, replace(plan, max_labelled=4)))
    with pytest.raises(ValueError, match="model_fingerprint"):
        again.check_same(settings_of(images, replace(plan, model_fingerprint="other")))


@pytest.mark.parametrize(
    ("part", "setting", "value"),
    [
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
    other = replace(images, **{part: replace(getattr(images, part), **{setting: value})})
    (difference,) = differences(settings_of(images, plan), settings_of(other, plan))
    assert difference.startswith(setting)
    if setting != "dtype":  # which changes the weights' fingerprint
        stage = GRPOPlan("quick")
        (difference,) = differences(wanted_settings(images, stage), wanted_settings(other, stage))
        assert difference.startswith(setting)


def test_nothing_is_deployed_where_no_stage_is_better(
    images: GRPOInputs, plan: AdaptPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, -0.1, 0.0)
    run = Run(tmp_path / "adapt", ADAPT_RUN)
    result = run_adapt_stage(images, plan, run)
    assert result.report is None
    assert result.test is None
    assert not any(stage.kept for stage in result.stages)
    assert not (run / "adapted").exists()
    assert read_json(run / "adapt.json")["deployed"] is None
    assert read_json(run / "mean_teacher" / "config.json")["inputs"]["model_path"].endswith("sa2va-nano")


def test_without_masks_it_says_what_cannot_be_known(tmp_path: Path) -> None:
    import json

    data = write_tiny_data(tmp_path / "data", images=40, size=64)
    records: list[dict[str, Any]] = json.loads((data / "annotations.json").read_text())
    (data / "annotations.json").write_text(
        json.dumps([{name: value for name, value in record.items() if name != "mask_png"} for record in records])
    )
    inputs = open_grpo_inputs(RunConfig(data_root=data, output_dir=tmp_path / "out", gpu=-1))
    with pytest.raises(ValueError, match="Without masks it cannot be known whether a changed model is better or worse"):
        check_labels(inputs)


def test_images_that_all_train_with_their_masks_are_refused(images: GRPOInputs) -> None:
    with pytest.raises(ValueError, match=r"all \d+ training images .* --unlabelled_root or a smaller --max_labelled"):
        check_labels(images)
    check_labels(images, LABELLED)


@pytest.mark.parametrize("small", [True, False])
def test_every_model_takes_the_same_steps_of_as_many_images(images: GRPOInputs, plan: AdaptPlan, small: bool) -> None:
    for stage in plan.stages:
        inputs = replace(images.config, model_path="sa2va-nano" if small else "owner/Sa2VA-4B")
        args = PlanArgs(
            "quick", inputs, grpo=stage_settings(plan, stage), adapters=TrainablePartsArgs(stage == "supervised")
        )
        of_stage = make_plan(args, images, None)
        assert of_stage.settings.max_steps == 2
        assert captions_of(of_stage.settings) // of_stage.settings.num_generations == 8
        assert not of_stage.own_batch, "so that fewer labelled images are taken as they are"


def test_the_plan_reads_files_and_loads_no_model(images: GRPOInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model of billions of parameters would take its memory twice")

    monkeypatch.setattr("rl_reward_network.models.sa2va.modeling_sa2va.Sa2VAForConditionalGeneration.__init__", refuse)
    assert make_adapt_plan(images, "full").stages == ("supervised", "mean_teacher")


def test_real_models_are_not_adapted_to_rendered_data_that_nobody_named(tmp_path: Path) -> None:
    from rl_reward_network.cli.adapt import Args, check

    with pytest.raises(ValueError, match="no data are named for it"):
        check(Args(inputs=RunConfig(model_path=str(tmp_path), gpu=-1)))


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_reward_network.cli.adapt import Args, check

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="adapt runs in one process; on several GPUs call its stages"):
        check(Args(inputs=RunConfig(data_root=tmp_path, gpu=-1)))
