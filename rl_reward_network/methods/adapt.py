"""From a model, some labelled images and many without masks to a better model: the job of `sa2va-rl adapt`.

    <run>/supervised/       true masks, with a side network; left out where the model has a side network
    <run>/mean_teacher/     true masks, and the teacher's on images without
    <run>/adapted/          the model that is deployed, a whole checkpoint
    <run>/adapt.json        what each stage gained on validation patients, and what is deployed

Each stage is a run of `sa2va-rl grpo` with its own report. A stage is kept only if its gain over what it began with has
a lower bound above 0 on the validation patients, so that the last of the kept ones is deployed; without any it is the
model as it was.
"""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rl_reward_network.artefacts import write_json
from rl_reward_network.grpo.card import write_results
from rl_reward_network.grpo.evaluate import run_grpo_evaluation
from rl_reward_network.grpo.image_context import FeatureCache
from rl_reward_network.grpo.inputs import GRPOInputs, count_images, of_images, open_grpo_inputs
from rl_reward_network.grpo.measure import measure
from rl_reward_network.grpo.merge import merge_run
from rl_reward_network.grpo.plan import AdapterArgs, PlanArgs, make_plan
from rl_reward_network.grpo.prompts import GRPOPrompt
from rl_reward_network.grpo.settings import GRPOSettings, Mode
from rl_reward_network.grpo.stage import run_grpo_stage
from rl_reward_network.inputs.loading import portable_settings
from rl_reward_network.models.default import is_small
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.report.statistics import MIN_PATIENTS, Estimate, mean_interval
from rl_reward_network.run import FINAL, GRPO_RUN, Run

SUPERVISED, TEACHER = "supervised", "mean_teacher"  # stages, and the objective of each
MERGED, ADAPTED, RESULT = "merged", "adapted", "adapt.json"
STEPS = {  # of a model of the embedded one's size; others train for epochs
    "quick": {SUPERVISED: 200, TEACHER: 100},
    "full": {SUPERVISED: 700, TEACHER: 250},
}
VALIDATIONS, PATIENCE = 8, 3  # of a stage; without a better one in a row until it stops


@dataclass(frozen=True)
class AdaptPlan:
    """Settings of an adaptation.

    Args:
        mode: quick or full.
        side_network: whether a model without a side network gets one.
        max_labelled: most labelled images that train; None uses all.
    """

    mode: Mode
    side_network: bool = True
    max_labelled: int | None = None


@dataclass(frozen=True)
class StageResult:
    """What a stage did.

    Args:
        stage: its name.
        gain: Dice on validation patients after it less before.
        dice: after it.
        kept: whether the model that is deployed has passed it.
    """

    stage: str
    gain: Estimate
    dice: Estimate
    kept: bool

    @property
    def line(self) -> str:
        """The result in words."""
        verdict = "kept" if self.kept else "left out: its gain is not above 0 beyond chance"
        return (
            f"{self.stage}: Dice {self.dice} on {self.gain.groups} validation patients, {self.gain.signed}; {verdict}"
        )


def check_labels(inputs: GRPOInputs) -> None:
    """Check that labels can train and decide.

    Raises:
        ValueError: the images ask for several things or have captions, no labelled image trains, or too few validation
            patients are labelled for a decision; says what cannot be known.
    """
    root = inputs.config.data_root
    if inputs.kind != "images" or inputs.by_name:
        raise ValueError(f"{root}: adapt needs annotated images with one question, not captions or several classes")
    training = [prompt for prompt in inputs.pick("reward", "policy") if prompt.labelled]
    deciding = {prompt.group_id for prompt in inputs.pick("val") if prompt.labelled}
    if not training or len(deciding) < MIN_PATIENTS:
        raise ValueError(
            f"{root}: {len(training)} labelled training images and {len(deciding)} labelled validation patients; adapt "
            f"needs one and {MIN_PATIENTS}. Without masks it cannot be known whether a changed model is better or "
            "worse: agreement, confidence and a reward network's score can rise while masks get worse "
            "(docs/unlabelled.md). Annotate images of some patients, or use the model as it is"
        )


def settings_of(inputs: GRPOInputs, plan: AdaptPlan) -> dict[str, Any]:
    """The settings that an adaptation to resume must share."""
    return {
        **asdict(plan),
        "model": Path(inputs.config.model_path).name,  # the stages compare its weights
        "seed": inputs.config.seed,
        "data_fingerprint": inputs.split.fingerprint,
        "split_seed": inputs.split.seed,
        "question": inputs.regions.segment_question,
        "unlabelled": None if inputs.unlabelled is None else inputs.unlabelled.fingerprint,
    }


def run_adapt_stage(inputs: GRPOInputs, plan: AdaptPlan, run: Run) -> tuple[list[StageResult], Path | None]:
    """Train the stages in `run`, decide, write the adapted model and the reports.

    Args:
        inputs: data, split and model; see `check_labels`.
        plan: settings.
        run: new, or interrupted with the same settings.

    Returns:
        The stages, and the report of the last kept one; None where the model is deployed as it was.
    """
    check_labels(inputs)
    with run.lock():
        if run.state == "new":
            run.begin(settings_of(inputs, plan), {"world": portable_settings(run.path, inputs.config, inputs.regions)})
        else:
            run.check_same(settings_of(inputs, plan))
        prompts = deciding_prompts(inputs)
        model = inputs.config.model_path
        before = dice_of(inputs, model, prompts)
        results, deployed = list[StageResult](), None
        for stage in stages_of(inputs, plan):
            folder = train_stage(inputs, plan, run / stage, stage, model)
            after = dice_of(inputs, str(folder / MERGED), prompts)
            results.append(decide(stage, before, after, [prompt.group_id for prompt in prompts]))
            print(results[-1].line, flush=True)
            if results[-1].kept:
                model, before, deployed = str(folder / MERGED), after, folder
        report = None if deployed is None else deploy(run, deployed)
        facts = {"stages": [asdict(result) for result in results], "deployed": None if deployed is None else ADAPTED}
        write_json(run / RESULT, facts)
        run.finish()
    return results, report


def deciding_prompts(inputs: GRPOInputs) -> list[GRPOPrompt]:
    """All labelled validation prompts."""
    prompts = [prompt for prompt in inputs.pick("val") if prompt.labelled]
    return of_images(prompts, count_images(prompts))


def stages_of(inputs: GRPOInputs, plan: AdaptPlan) -> Sequence[str]:
    """The stages that this model needs."""
    model, _ = load_sa2va_model(inputs.config.model_path, "cpu", dtype=inputs.config.dtype)
    adds_side = plan.side_network and model.config.side_pixels is None
    return (SUPERVISED, TEACHER) if adds_side else (TEACHER,)


def train_stage(inputs: GRPOInputs, plan: AdaptPlan, folder: Path, stage: str, model: str) -> Path:
    """Train or resume a stage from a model, and merge it; returns its folder."""
    config = replace(inputs.config, model_path=model)
    if stage == SUPERVISED:
        config = replace(config, unlabelled_root=None)
    opened = open_grpo_inputs(config, inputs.regions)
    small = is_small(model)
    steps = STEPS[plan.mode][stage] if small else None
    settings = GRPOSettings(objective=stage, max_steps=steps, early_stopping_patience=PATIENCE)  # type: ignore[arg-type]
    args = PlanArgs(
        plan.mode,
        config,
        opened.regions,
        settings,
        adapters=AdapterArgs(side_network=stage == SUPERVISED),
        max_labelled=plan.max_labelled,
        eval_steps=None if steps is None else -(-steps // VALIDATIONS),
    )
    run = Run(folder, GRPO_RUN)
    if not run.finished:
        print(f"\n{stage}: {folder}", flush=True)
        run_grpo_stage(opened, make_plan(args, opened, None), run)
    if not (folder / MERGED).exists():
        merge_run(folder / FINAL, folder / MERGED)
    return folder


def dice_of(inputs: GRPOInputs, model_path: str, prompts: Sequence[GRPOPrompt]) -> np.ndarray:
    """float64 (N,): Dice of a model on labelled prompts."""
    model, processor = load_sa2va_model(model_path, inputs.device, dtype=inputs.config.dtype)
    inputs.set_up(processor)
    measured = measure(model, prompts, FeatureCache(model, processor), 1, desc="validation patients")
    return measured.values["dice"]


def decide(stage: str, before: np.ndarray, after: np.ndarray, groups: Sequence[str]) -> StageResult:
    """Whether a stage is kept: the interval of its gain, float64 (N,) each on images of patients, is above 0."""
    gain = mean_interval(after - before, groups)
    return StageResult(stage, gain, mean_interval(after, groups), gain.sign > 0)


def deploy(run: Run, stage: Path) -> Path:
    """Evaluate the last kept stage on test patients, write `adapted/`; returns the report."""
    _, report = run_grpo_evaluation(stage / FINAL)
    write_results(stage / FINAL, report.with_name("eval.json"))
    shutil.rmtree(run / ADAPTED, ignore_errors=True)
    merge_run(stage / FINAL, run / ADAPTED)  # again, for its card has the results now
    return report
