"""From a model, some labelled images and many without masks to a better model: the job of `sa2va-rl adapt`.

    <run>/supervised/       true masks, with a side network; left out where the model has a side network
    <run>/mean_teacher/     true masks, and the teacher's on images without
    <run>/adapted/          the model that is deployed, a whole checkpoint
    <run>/adapt.json        what each stage gained on validation patients, and what is deployed

Each stage is a run of `sa2va-rl grpo` with its own report. A stage is kept only if it is better than what it began with
on the validation patients, by `max_t`. They also choose which look at the training is kept, so that look is judged in
folds of patients: the one that is best on the other folds, see `decide`. The last of the kept stages is deployed;
without any it is the model as it was.
"""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from rl_reward_network.atomic_io import read_json, state_fingerprint, whole_file, write_json
from rl_reward_network.grpo.evaluate import run_grpo_evaluation
from rl_reward_network.grpo.final_model import merge_run, write_results
from rl_reward_network.grpo.image_context import FeatureCache
from rl_reward_network.grpo.inputs import GRPOInputs, open_grpo_inputs, within_budget
from rl_reward_network.grpo.measure import measure
from rl_reward_network.grpo.plan import PlanArgs, TrainablePartsArgs, make_plan
from rl_reward_network.grpo.prompts import TrainingItem
from rl_reward_network.grpo.settings import PATIENCE, SIDE_STEPS, GRPOSettings, Mode
from rl_reward_network.grpo.stage import run_grpo_stage
from rl_reward_network.grpo.validation import LOOKS
from rl_reward_network.inputs.loading import portable_settings
from rl_reward_network.methods.training import MERGED, STEPS, free_memory
from rl_reward_network.models.sa2va.checkpoint_sa2va import open_checkpoint
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.report.deployment import best_choice, best_out_of_fold
from rl_reward_network.report.statistics import MIN_PATIENTS, UNIT, Estimate, mean_interval, rare_loss, sign_of
from rl_reward_network.report.table import change_interval
from rl_reward_network.run import FINAL, GRPO_RUN, Run

SUPERVISED, TEACHER = "supervised", "mean_teacher"  # stages, and the objective of each
ADAPTED, RESULT = "adapted", "adapt.json"
STEPS_OF = {SUPERVISED: SIDE_STEPS, TEACHER: STEPS[TEACHER]}  # at most, with every model
VALIDATIONS = 8  # of a stage


@dataclass(frozen=True)
class AdaptPlan:
    """Settings of an adaptation."""

    mode: Mode
    stages: tuple[str, ...]  # those that the model needs, in their order
    model_fingerprint: str  # of its weights
    max_labelled: int | None = None  # most labelled images that train; None uses all


@dataclass(frozen=True)
class StageResult:
    """What a stage did."""

    stage: str
    gain: Estimate  # Dice on validation patients after it less before, of looks that other patients chose
    dice: Estimate  # after it, of the look that is deployed
    kept: bool  # whether the model that is deployed has passed it

    @property
    def line(self) -> str:
        """The result in words."""
        verdict = f"kept; {rare_loss(self.gain.groups)}" if self.kept else "left out: not better beyond chance"
        measured = f"Dice {self.dice} on {self.gain.groups} validation patients, {self.gain.signed} out of fold"
        return f"{self.stage}: {measured}; {verdict}"


@dataclass(frozen=True)
class AdaptResult:
    """What an adaptation did."""

    stages: tuple[StageResult, ...]
    test: Estimate | None = None  # gain in Dice on test patients; None if nothing is deployed or no test image labelled
    report: Path | None = None  # of the last kept stage; None where the model is deployed as it was

    @property
    def lines(self) -> list[str]:
        """The results in words."""
        return [*(stage.line for stage in self.stages), *([] if self.test is None else [_test_line(self.test)])]


def _test_line(gain: Estimate) -> str:
    return f"against the model before, on {gain.groups} test patients: Dice {gain.signed}"


def make_adapt_plan(
    inputs: GRPOInputs, mode: Mode, side_network: bool = True, max_labelled: int | None = None
) -> AdaptPlan:
    """The stages for a model: the mean teacher alone, where it has a side network or shall not get one."""
    folder = open_checkpoint(inputs.config.model_path)
    adds_side = side_network and folder.model_config().side_pixels is None
    stages = (SUPERVISED, TEACHER) if adds_side else (TEACHER,)
    return AdaptPlan(mode, stages, state_fingerprint(folder.tensors()), max_labelled)


def check_labels(inputs: GRPOInputs, max_labelled: int | None = None) -> None:
    """Raise a ValueError, which says what cannot be known, unless labels train and decide and other images remain."""
    root = inputs.config.data_root
    if inputs.kind != "images" or inputs.by_name:
        raise ValueError(f"{root}: adapt needs annotated images with one question, not captions or several classes")
    training = [prompt for prompt in inputs.pick("reward", "policy") if prompt.labelled]
    if max_labelled is not None:
        training = within_budget(inputs, training, max_labelled)
    deciding = {prompt.group_id for prompt in inputs.pick("val") if prompt.labelled}
    if not training or len(deciding) < MIN_PATIENTS:
        raise ValueError(
            f"{root}: {len(training)} labelled training images and {len(deciding)} labelled validation patients; adapt "
            f"needs one and {MIN_PATIENTS}. Without masks it cannot be known whether a changed model is better or "
            "worse: agreement, confidence and a reward network's score can rise while masks get worse "
            "(docs/how-to/images-without-masks.md). Annotate images of some patients, give validation a larger share "
            "by --fractions, or use sa2va-rl improve, which decides by cross-validation"
        )
    if len(training) == len(inputs.pick("reward", "policy")):
        raise ValueError(
            f"{root}: all {len(training)} training images train with their masks, so a mean teacher has none without: "
            "give --unlabelled_root or a smaller --max_labelled, or learn the masks alone: sa2va-rl grpo --objective "
            "supervised --side_network"
        )


def settings_of(inputs: GRPOInputs, plan: AdaptPlan) -> dict[str, Any]:
    """The settings that an adaptation to resume must share."""
    return {
        **asdict(plan),
        "stages": list(plan.stages),  # as in a file
        "seed": inputs.config.seed,
        "dtype": inputs.config.dtype,
        "data_fingerprint": inputs.split.fingerprint,
        **inputs.split.settings,
        "question": inputs.regions.segment_question,
        "max_dynamic_patch": inputs.regions.max_dynamic_patch,
        "image_resize": inputs.config.image_resize,
        "quantization": inputs.regions.quantization,
        "use_flash_attn": inputs.regions.use_flash_attn,
        "unlabelled": inputs.unlabelled,
    }


def run_adapt_stage(inputs: GRPOInputs, plan: AdaptPlan, run: Run) -> AdaptResult:
    """Train the stages in `run`, new or interrupted, decide, write the adapted model and the reports."""
    check_labels(inputs, plan.max_labelled)
    settings = settings_of(inputs, plan)
    facts = {"inputs": portable_settings(run.path, inputs.config, inputs.regions)}
    with run.working(settings, lambda: run.begin(settings, facts)):
        model, stages, deployed = inputs.config.model_path, list[StageResult](), None
        for stage in plan.stages:  # each from the last model that was kept
            folder = train_stage(inputs, plan, run / stage, model)
            stages.append(decide(stage, *looks_of(folder)))
            print(stages[-1].line, flush=True)
            if stages[-1].kept:
                model, deployed = str(folder / MERGED), folder
        shutil.rmtree(run / ADAPTED, ignore_errors=True)  # of an interrupted run
        report, gain = (None, None) if deployed is None else deploy(inputs, run, deployed)
        outcome = {
            "stages": [asdict(stage) for stage in stages],
            "deployed": None if deployed is None else ADAPTED,
            "test": None if gain is None else asdict(gain),
        }
        write_json(run / RESULT, outcome)
    return AdaptResult(tuple(stages), gain, report)


def train_stage(inputs: GRPOInputs, plan: AdaptPlan, folder: Path, model: str) -> Path:
    """Train or resume the stage of a folder from a model, and merge it; returns the folder."""
    stage = folder.name
    config = replace(inputs.config, model_path=model)
    if stage == SUPERVISED:
        config = replace(config, unlabelled_root=None)
    opened = open_grpo_inputs(config, inputs.regions)
    steps = STEPS_OF[stage][plan.mode]
    args = PlanArgs(
        plan.mode,
        config,
        opened.regions,
        stage_settings(plan, stage),
        adapters=TrainablePartsArgs(side_network=stage == SUPERVISED),
        max_labelled=plan.max_labelled,
        eval_steps=-(-steps // VALIDATIONS),
    )
    run = Run(folder, GRPO_RUN)
    if not run.finished:
        print(f"\n{stage}: {folder}", flush=True)
        run_grpo_stage(opened, make_plan(args, opened, None), run)
        free_memory(inputs.device)
    if not (folder / MERGED).exists():
        merge_run(folder / FINAL, folder / MERGED)
    return folder


def stage_settings(plan: AdaptPlan, stage: str) -> GRPOSettings:
    """Hyperparameters of a stage."""
    steps = STEPS_OF[stage][plan.mode]
    return GRPOSettings(objective=stage, early_stopping_patience=PATIENCE, max_steps=steps)  # type: ignore[arg-type]


def looks_of(folder: Path) -> tuple[np.ndarray, list[str]]:
    """Dice of labelled validation images at every look of a run, float64 (L, N), the first before it; and patients."""
    saved = read_json(folder / LOOKS)
    dice = np.array(saved["dice"], dtype=float)
    labelled = ~np.isnan(dice[0])
    return dice[:, labelled], list(compress(saved["groups"], labelled))


def decide(stage: str, dice: np.ndarray, groups: Sequence[str]) -> StageResult:
    """Whether a stage is kept: better than its start, each patient judged by the look that is best on other folds.

    `dice` of N images is float64 (L, N), at L looks, the first before training.
    """
    gain = best_out_of_fold(dice, groups) - dice[0]
    after = mean_interval(dice[best_choice(dice, groups)], groups, bounds=UNIT)
    return StageResult(stage, change_interval("dice", gain, groups), after, sign_of(gain, groups) > 0)


def deploy(inputs: GRPOInputs, run: Run, stage: Path) -> tuple[Path, Estimate | None]:
    """Write `adapted/` of the last kept stage; returns its report and the gain in Dice on labelled test patients."""
    _, report = run_grpo_evaluation(stage / FINAL)
    write_results(stage / FINAL, report.with_name("eval.json"))
    prompts, gain = [prompt for prompt in inputs.pick("test") if prompt.labelled], None
    if prompts:
        before, after = (dice_of(inputs, path, prompts) for path in (inputs.config.model_path, str(stage / MERGED)))
        gain = change_interval("dice", after - before, [prompt.group_id for prompt in prompts])
    merge_run(stage / FINAL, run / ADAPTED)  # again, for its card has the results now
    if gain is not None:
        card = run / ADAPTED / "README.md"
        text = f"{card.read_text(encoding='utf-8')}\n## Adaptation\n\nThis model, {_test_line(gain)}.\n"
        with whole_file(card) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return report, gain


def dice_of(inputs: GRPOInputs, model_path: str, prompts: Sequence[TrainingItem]) -> np.ndarray:
    """float64 (N,): Dice of a model on labelled prompts."""
    model, processor = load_sa2va_model(model_path, inputs.device, dtype=inputs.config.dtype)
    inputs.set_up(processor)
    values = measure(model, prompts, FeatureCache(model, processor), 1, desc="patients").values["dice"]
    del model, processor
    free_memory(inputs.device)
    return values
