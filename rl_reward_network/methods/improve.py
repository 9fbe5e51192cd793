"""From images, some of them with masks, to a better model: the job of `sa2va-rl improve`.

    <run>/fold_1/ ...      trained without the patients of a fold, who then judge: segmenter/, side_network/, ...
    <run>/all/             the same on all patients; what is deployed
    <run>/improved/        the deployed model, with deployed.json; missing where nothing was better
    <run>/eval.json        what each candidate is worth, and what is deployed; report.html has it with images

Two different models learn the masks: a plain segmenter (the U-Nets of a reward network) and Sa2VA with a side network,
which a mean teacher then takes to the images without masks. The mean of their soft masks is a candidate, too. Every
candidate is measured on patients that it was not trained on, and the choice among them is judged on patients that did
not choose. With few patients these are the patients of folds, and the deployed model is trained on all of them; with
many, or where the user has named them, they are the `val` split.

No step of a training is chosen: schedules end at their last step, and the mean teacher's average is what is kept.

Two cases are of another place than the model or the masks. A model that has a side network has learned masks somewhere:
it is tuned, in fewer steps at a lower rate, and with few patients the best estimate is deployed. Images of
`--unlabelled_root` that a classifier tells from those with masks (`domain_auc`) are of a place where no mask can judge:
they are left out, since no criterion without masks was safe (benchmarks/choose.py, docs/log.md).
"""

import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rl_reward_network.atomic_io import read_json, state_fingerprint, write_json
from rl_reward_network.data.annotations import phrase_key
from rl_reward_network.data.identity import among, thumbnails
from rl_reward_network.data.items import Sample
from rl_reward_network.data.shift import ELSEWHERE, FEWEST_GROUPS, domain_auc
from rl_reward_network.data.splits import save_split, select, subsample
from rl_reward_network.data_import.write import import_notes
from rl_reward_network.flags import changed
from rl_reward_network.grpo.checkpoint import first_process, processes, wait_for_all
from rl_reward_network.grpo.final_model import merge_run
from rl_reward_network.grpo.inputs import GRPOInputs, check_foreground, open_grpo_inputs
from rl_reward_network.grpo.plan import PlanArgs, TrainablePartsArgs, make_plan
from rl_reward_network.grpo.prompts import segment_question
from rl_reward_network.grpo.settings import LATER_SIDE_LEARNING_RATE, GRPOSettings, Mode
from rl_reward_network.grpo.stage import run_grpo_stage
from rl_reward_network.inputs.config import RegionConfig, RunConfig
from rl_reward_network.inputs.loading import (
    FEW_IMAGES,
    check_model_apart,
    check_readable,
    images_summary,
    nameless_note,
    portable_settings,
)
from rl_reward_network.inputs.segmenter import load_segmenter
from rl_reward_network.methods.compare import Progress
from rl_reward_network.methods.improve_report import (
    FUSION,
    IMPROVED,
    SEGMENTER,
    SIDE,
    START,
    TEACHER,
    TITLES,
    Improvement,
    Judged,
    write_improve_report,
)
from rl_reward_network.methods.training import MERGED, free_memory
from rl_reward_network.models.default import has_side_network, is_small
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.models.sa2va.checkpoint_sa2va import open_checkpoint
from rl_reward_network.report.deployment import best_choice, best_out_of_fold
from rl_reward_network.report.statistics import MIN_PATIENTS, group_means, sign_of
from rl_reward_network.reward_training.calibration import with_own_domain
from rl_reward_network.reward_training.stage import sized
from rl_reward_network.reward_training.train import PRESETS, labelled_images, train_reward_network
from rl_reward_network.rewards.learned import foreground_prob
from rl_reward_network.rewards.metrics import mask_metrics
from rl_reward_network.run import BEST_REWARD_NET, DEPLOYED, FINAL, GRPO_RUN, Run

OBJECTIVES = {SIDE: "supervised", TEACHER: "mean_teacher"}  # of the members that are Sa2VA
STEPS = {  # member -> mode -> optimisation steps, whatever the model
    SEGMENTER: {"quick": 150, "full": 700},
    SIDE: {"quick": 80, "full": 700},
    TEACHER: {"full": 1400},
}
TUNING_STEPS = 150  # of a side network that the model has: it has learned masks elsewhere
FOLDS = {"quick": 2, "full": 3}  # each is one more training
SIDE_PIXELS = 512  # at most: side of what a new side network sees; smaller images need less
MANY_PATIENTS = 40  # labelled; from here on the val split decides
MOST_IMAGES = 500  # of a segmenter, which keeps them in memory
FORMAT_VERSION = 1
CORE_SECONDS = {  # of a step on one CPU core, with the embedded model and images of 512 x 512 pixels
    (SEGMENTER, "quick"): 0.75,
    (SEGMENTER, "full"): 1.9,
    (SIDE, "quick"): 1.4,
    (SIDE, "full"): 1.4,
    (TEACHER, "full"): 2.4,
}
WORTH = {  # Dice on real angiograms, docs/results.md
    SEGMENTER: "on real angiograms Dice 0.725 with 195 masks",
    SIDE: "on real angiograms Dice 0.720 with 195 masks",
    TEACHER: "on real angiograms Dice 0.753 with 195 masks, from 0.726, and 0.723 with 20, from 0.676",
    FUSION: "on real angiograms +0.009 with 195 masks",
}
TUNING_WORTH = "on angiograms of another hospital Dice +0.06 with 4 masks, +0.11 with 22"  # docs/log.md
ELSEWHERE_LINE = (
    "  the images of --unlabelled_root look unlike those with masks: they are of another place, where no mask judges.\n"
    "  They are left out: a mean teacher has helped at some places and harmed at others, and nothing tells which. Six\n"
    "  labelled patients of that place decide, and help more:\n"
    "  sa2va-rl improve --data_root THERE --model_path outputs/improve_TIME"
)
TUNES_LINE = (
    "  the model has learned masks elsewhere, and is tuned: what is best on the patients of the folds is deployed,\n"
    "  also where so few cannot show that it is better"
)
UNTOLD_LINE = (
    f"  --unlabelled_root has fewer than {FEWEST_GROUPS} patients: whether its images are of another place is not"
    " known, and the labelled patients decide"
)
Row = TypeVar("Row")
Masks = dict[str, np.ndarray]  # row -> bool (H, W)


@dataclass(frozen=True)
class ImprovePlan:
    """Settings of an improvement."""

    mode: Mode
    members: tuple[str, ...]  # what is trained, in this order
    steps: Mapping[str, int]  # member -> optimisation steps
    folds: int  # of the labelled patients; 1: the val split decides
    model_fingerprint: str  # of the weights of the start
    elsewhere: bool = False  # whether the images of `--unlabelled_root` are of another place than those with masks
    tunes: bool = False  # whether a model that has learned masks elsewhere is tuned on those of few patients

    @property
    def last(self) -> str:
        """The Sa2VA of the fusion."""
        return self.members[-1]

    @property
    def rows(self) -> tuple[str, ...]:
        """The candidates, the start first."""
        return START, *self.members, FUSION


@dataclass(frozen=True)
class Part:
    """A training, and the images that judge it."""

    name: str  # of its folder
    inputs: GRPOInputs  # whose split has what trains in `reward` and `policy`
    judges: tuple[Sample, ...]  # labelled; none judge the training on all patients


# ---- the plan --------------------------------------------------------------------------------------------------------


def open_improve_inputs(config: RunConfig, regions: RegionConfig | None = None) -> GRPOInputs:
    """The inputs of an improvement; unless a question is given, the data's own phrase is asked for.

    `--unlabelled_root` may have any patients: a training leaves out the further images of those who judge it.
    """
    inputs = open_grpo_inputs(config, regions, apart=())
    phrases = {phrase_key(sample.text) for sample in inputs.samples}
    if changed(inputs.regions, "segment_question") or len(phrases) != 1:
        return inputs
    phrase = max(sample.text for sample in inputs.samples)  # of several spellings one without capitals
    question = segment_question(phrase if phrase.lower().startswith(("the ", "a ", "an ")) else f"the {phrase}")
    prompts = [replace(prompt, question=question) for prompt in inputs.prompts]
    return replace(inputs, regions=replace(inputs.regions, segment_question=question), prompts=prompts)


def make_improve_plan(inputs: GRPOInputs, mode: Mode, steps: int | None = None) -> ImprovePlan:
    """What is trained, and who decides; `steps` of each training replace those of the mode.

    ValueError where too few patients are labelled, or the data have captions or several classes, a file is damaged, all
    masks that train are empty, or the model has seen images that judge.
    """
    root = inputs.config.data_root
    if inputs.kind != "images" or inputs.by_name:
        raise ValueError(
            f"{root}: improve needs annotated images with one question, not captions or several classes: sa2va-rl grpo"
        )
    labelled = [sample for sample in inputs.samples if sample.labelled and sample.group_id not in _own_test(inputs)]
    patients = {sample.group_id for sample in labelled}
    if len(patients) < MIN_PATIENTS:
        outside = " outside the test split" * bool(_own_test(inputs))
        raise ValueError(
            f"{root}: {len(labelled)} images of {len(patients)} patients{outside} have a mask; improve needs"
            f" {MIN_PATIENTS} patients, since without masks it cannot be known whether a changed model is better or"
            " worse (docs/how-to/images-without-masks.md). Annotate an image of each of some more patients; until"
            f" then: sa2va-rl segment {root}"
        )
    enough = len({sample.group_id for sample in _labelled(inputs, ["val"])}) >= MIN_PATIENTS
    held_out = enough and ("val" in inputs.own_splits or len(patients) >= MANY_PATIENTS)
    folds = 1 if held_out else FOLDS[mode]
    judging, final = parts_of(inputs, folds)
    _check_parts(inputs, judging, final)
    elsewhere = mode == "full" and _elsewhere(inputs)
    if elsewhere:
        judging, final = parts_of(inputs, folds, elsewhere)
    bare = _fewest_bare(judging, final)
    members = (SEGMENTER, SIDE, *([TEACHER] if mode == "full" and bare >= FEW_IMAGES else []))
    weights = state_fingerprint(open_checkpoint(inputs.config.model_path).tensors())
    of_member = {member: steps or STEPS[member][mode] for member in members}
    learned = has_side_network(inputs.config.model_path)
    if steps is None and learned:
        of_member[SIDE] = TUNING_STEPS
    return ImprovePlan(mode, members, of_member, folds, weights, elsewhere, learned and folds > 1)


def settings_of(inputs: GRPOInputs, plan: ImprovePlan) -> dict[str, Any]:
    """The settings that an improvement to resume must share."""
    return {
        **asdict(plan),
        "members": list(plan.members),  # as in a file
        "steps": dict(plan.steps),
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
        "processes": processes(),  # a step takes the images of all
    }


def parts_of(inputs: GRPOInputs, folds: int, elsewhere: bool = False) -> tuple[list[Part], Part]:
    """The trainings that judges measure, and the one whose models are deployed.

    Where the images of `--unlabelled_root` are of another place, none of them trains.
    """
    if elsewhere:
        inputs = _without_joined(inputs)
    if folds == 1:
        split = inputs.split
        apart = _without_further_images(inputs, {*split.groups["val"], *split.groups["test"]})
        part = Part("trained", apart, tuple(_labelled(inputs, ["val"])))
        return [part], part
    test = _own_test(inputs)
    labelled = [sample for sample in inputs.samples if sample.labelled and sample.group_id not in test]
    patients = sorted({sample.group_id for sample in labelled})
    random.Random(inputs.config.seed).shuffle(patients)
    drawn = _with_object(labelled)
    patients.sort(key=lambda patient: patient not in drawn)  # each fold gets as many of both
    parts = []
    for number in range(folds):
        held = set(patients[number::folds])
        judges = tuple(sample for sample in labelled if sample.group_id in held)
        parts.append(Part(f"fold_{number + 1}", _with_split(inputs, patients, held, test), judges))
    return parts, Part("all", _with_split(inputs, patients, set(), test), ())


def _without_joined(inputs: GRPOInputs) -> GRPOInputs:
    """The inputs without the images of `--unlabelled_root`."""
    samples = [sample for sample in inputs.samples if not sample.joined]
    own = {sample.sample_id for sample in samples}
    prompts = [prompt for prompt in inputs.prompts if prompt.sample_id in own]
    split, config = replace(inputs.split, joined=()), replace(inputs.config, unlabelled_root=None)
    return replace(inputs, config=config, samples=samples, prompts=prompts, split=split, unlabelled=None)


def _elsewhere(inputs: GRPOInputs) -> bool:
    """Whether the images of `--unlabelled_root` differ from the data's own in greys, sharpness or colour."""
    joined = [sample for sample in inputs.samples if sample.joined]
    return domain_auc([one for one in inputs.samples if not one.joined], joined, inputs.config.seed) >= ELSEWHERE


def _own_test(inputs: GRPOInputs) -> tuple[str, ...]:
    """The test patients that the user has named; others judge and train where patients are few."""
    return inputs.split.groups["test"] if "test" in inputs.own_splits else ()


def _with_object(labelled: Sequence[Sample]) -> set[str]:
    """The patients with a mask that is not empty."""
    found = set[str]()
    for sample in labelled:
        if sample.group_id not in found and (mask := sample.load_mask()) is not None and mask.any():
            found.add(sample.group_id)
    return found


def _check_parts(inputs: GRPOInputs, judging: Sequence[Part], final: Part) -> None:
    """Refuse now what would end the run hours later, or make its numbers too good."""
    check_readable([load for sample in inputs.samples for load in (sample.load_image, sample.load_mask)])
    for part in (*judging, final):
        check_foreground(part.inputs.pick("reward", "policy"), "improve")
    if (fewest := min(len(_labelled(part.inputs, ["reward", "policy"])) for part in judging)) < processes():
        raise ValueError(
            f"{inputs.config.data_root}: a training has {fewest} images with masks, and each of {processes()} processes"
            " takes its own; give torchrun a smaller --nproc_per_node"
        )
    if final in judging:  # of a val split this is known
        return
    judges = {"the labelled patients": [sample for part in judging for sample in part.judges]}
    remedy = "begin with the model that was not trained on these images (--model_path)"
    check_model_apart(inputs.config.model_path, judges, remedy)


def _with_split(inputs: GRPOInputs, patients: Sequence[str], held: set[str], test: Sequence[str]) -> GRPOInputs:
    """The inputs with a split that trains on all but the held-out patients and those of the test split."""
    inputs = _without_further_images(inputs, held | {*test})
    train = [patient for patient in patients if patient not in held]
    bare = {sample.group_id for sample in inputs.samples if not sample.joined} - {*patients, *test}
    groups = {"reward": train[::2], "policy": [*train[1::2], *sorted(bare)], "val": sorted(held), "test": list(test)}
    joined = tuple(sorted({sample.group_id for sample in inputs.samples if sample.joined} - {*groups["reward"]}))
    split = replace(inputs.split, groups={name: tuple(sorted(ids)) for name, ids in groups.items()}, joined=joined)
    return replace(inputs, split=split)


def _without_further_images(inputs: GRPOInputs, held: set[str]) -> GRPOInputs:
    """The inputs without the images of `--unlabelled_root` of some patients, known by their group or their picture."""
    joined = [sample for sample in inputs.samples if sample.joined]
    if not (joined and held):
        return inputs
    of_held = thumbnails([sample for sample in inputs.samples if sample.group_id in held and not sample.joined])
    same = among(thumbnails(joined), of_held)
    gone = {one.sample_id for one, seen in zip(joined, same, strict=True) if seen or one.group_id in held}
    samples = [sample for sample in inputs.samples if sample.sample_id not in gone]
    return replace(inputs, samples=samples, prompts=[one for one in inputs.prompts if one.sample_id not in gone])


def _labelled(inputs: GRPOInputs, splits: Sequence[str]) -> list[Sample]:
    return [one for name in splits for one in select(inputs.samples, inputs.split, name) if one.labelled]


def _bare(inputs: GRPOInputs) -> list[Sample]:
    """The images without masks that may train."""
    return [
        one for name in ("reward", "policy") for one in select(inputs.samples, inputs.split, name) if not one.labelled
    ]


def _fewest_bare(judging: Sequence[Part], final: Part) -> int:
    """The number of images without masks of the training that has the fewest."""
    return min(len(_bare(part.inputs)) for part in (*judging, final))


def data_words(inputs: GRPOInputs, plan: ImprovePlan) -> str:
    """One line on the data; their split is named where it decides."""
    return inputs.summary if plan.folds == 1 else images_summary(inputs.samples, inputs.config.data_root)


def notes_of(inputs: GRPOInputs, plan: ImprovePlan) -> tuple[str, ...]:
    """What the report says of the data: how patients are known, also those of images without masks that train."""
    joined = [one for one in inputs.samples if one.joined and TEACHER in plan.members and not plan.elsewhere]
    return (*import_notes(inputs.config.data_root, inputs.samples), *filter(None, [nameless_note(joined)]))


def plan_lines(inputs: GRPOInputs, plan: ImprovePlan) -> list[str]:
    """The plan in words: who decides, what is trained, how long, and what that was worth where it was measured."""
    patients = len({sample.group_id for sample in inputs.samples if sample.labelled} - set(_own_test(inputs)))
    decides = "the patients of the val split decide, and those of the test split are measured once"
    if plan.folds > 1:
        whose = f"{patients} labelled patients{' outside the test split' * bool(_own_test(inputs))}"
        decides = f"{plan.folds} folds of all {whose} decide; what is deployed is trained on all of them"
    times = plan.folds + 1 if plan.folds > 1 else 1
    lines = [f"plan: {decides}", *([ELSEWHERE_LINE] * plan.elsewhere), *([TUNES_LINE] * plan.tunes)]
    if TEACHER in plan.members and 0 < len({one.group_id for one in inputs.samples if one.joined}) < FEWEST_GROUPS:
        lines.append(UNTOLD_LINE)
    worth = WORTH | ({SIDE: TUNING_WORTH} if has_side_network(inputs.config.model_path) else {})
    for member in plan.members:
        lines.append(f"  {TITLES[member]}: {times} x {plan.steps[member]} steps; {worth[member]}")
    lines.append(f"  {TITLES[FUSION]}: no training; {WORTH[FUSION]}")
    if TEACHER not in plan.members:
        bare = sum(not sample.labelled for sample in inputs.samples)
        why = f"it takes longer; full trains it{f', and uses the {bare} images without masks' * bool(bare)}"
        if plan.mode == "full":
            bare = _fewest_bare(*parts_of(inputs, plan.folds, plan.elsewhere))
            of_here = " of this place" * plan.elsewhere
            why = f"a training has {bare} images without masks{of_here}, and it needs {FEW_IMAGES}"
        lines.append(f"  {TITLES[TEACHER]}: left out: {why}")
    if is_small(inputs.config.model_path) and inputs.device == "cpu":
        seconds = sum(times * plan.steps[member] * CORE_SECONDS[member, plan.mode] for member in plan.members)
        lines.append(f"  about {seconds / 60:.0f} minutes of one CPU core, two share them")
    else:
        lines.append("  how long it takes is known after the first training")
    return lines


# ---- training --------------------------------------------------------------------------------------------------------


def run_improve_stage(inputs: GRPOInputs, plan: ImprovePlan, run: Run, command: str = "") -> Improvement:
    """Train the candidates in `run`, new or interrupted, judge them, write the model that is deployed and the report.

    `command` is as the user typed it. Of several processes the first one calls this, and the others `train_along`.
    """
    settings = settings_of(inputs, plan)
    facts = {"inputs": portable_settings(run.path, inputs.config, inputs.regions)}
    judging, final = parts_of(inputs, plan.folds, plan.elsewhere)
    trained = trained_parts(judging, final)
    with run.working(settings, lambda: _begin(inputs, settings, facts, run)):
        progress = Progress({"training": len(trained) * len(plan.members)})
        for part, member in product(trained, plan.members):
            reused = train_member(part.inputs, plan, run / part.name, member)
            progress.done("training", f"{part.name}: {TITLES[member]}", reused)
            if plan.folds > 1 and member == plan.last:
                drop_merged(run / part.name)
        judged = judge(inputs, plan, run, judging)
        collapsed = tuple(part.name for part in trained if has_collapsed(run / part.name))
        rows = [row for row in plan.rows if not (collapsed and row in (TEACHER, FUSION))]
        chosen, gain = decide(judged.dice(rows), judged.groups, rows, plan.tunes)
        test = tuple(_labelled(final.inputs, ["test"]))
        tested = judge(inputs, plan, run, [replace(final, judges=test)]) if test else None
        shutil.rmtree(run / IMPROVED, ignore_errors=True)  # of an interrupted run
        if chosen != START:
            deploy(inputs, plan, chosen, run / final.name, run / IMPROVED)
        improvement = Improvement(plan.folds, judged, chosen, gain, tested, plan.elsewhere, plan.tunes, collapsed)
        about = {"data": data_words(inputs, plan), "model": Path(inputs.config.model_path).name, "command": command}
        write_improve_report(run, improvement, about, (*improvement.notes, *notes_of(inputs, plan)))
        for part in trained:
            drop_merged(run / part.name)
    return improvement


def train_along(inputs: GRPOInputs, plan: ImprovePlan, run: Run) -> None:
    """Train Sa2VA beside the first process of torchrun, which does all else by `run_improve_stage`."""
    for part, member in product(trained_parts(*parts_of(inputs, plan.folds, plan.elsewhere)), plan.members):
        train_member(part.inputs, plan, run / part.name, member)


def trained_parts(judging: list[Part], final: Part) -> list[Part]:
    """All trainings, each once."""
    return judging if final in judging else [*judging, final]


def _begin(inputs: GRPOInputs, settings: dict[str, Any], facts: dict[str, Any], run: Run) -> None:
    save_split(inputs.split, run / "split.json")
    run.begin(settings, facts)


def train_member(inputs: GRPOInputs, plan: ImprovePlan, folder: Path, member: str) -> bool:
    """Train or resume one member in `<folder>/<member>`; returns whether it was finished."""
    if member == SEGMENTER:  # of the first process alone, for which the others wait below
        return first_process() and train_segmenter(inputs, plan, folder / member)
    run = Run(folder / member, GRPO_RUN)
    if run.finished:
        return True
    if first_process():
        print(f"\n{TITLES[member]}: {run}", flush=True)
        if member == TEACHER:
            merged(folder / SIDE)
    wait_for_all()
    base = inputs.config.model_path if member == SIDE else str(folder / SIDE / MERGED)
    opened = inputs_of(inputs, member, base)
    run_grpo_stage(opened, make_plan(sa2va_args(opened, plan, member), opened, None), run)
    free_memory(inputs.device)
    return False


def inputs_of(inputs: GRPOInputs, member: str, model: str) -> GRPOInputs:
    """The inputs of the training of a member from a model; true masks alone need no images of `--unlabelled_root`."""
    if member != TEACHER:
        inputs = _without_joined(inputs)
    return replace(inputs, config=replace(inputs.config, model_path=model))


def sa2va_args(inputs: GRPOInputs, plan: ImprovePlan, member: str) -> PlanArgs:
    """The choices of the training of a member; nothing is chosen within it, so it is not validated."""
    settings = GRPOSettings(objective=OBJECTIVES[member], max_steps=plan.steps[member])  # type: ignore[arg-type]
    side, parts = min(SIDE_PIXELS, max(max(sample.size) for sample in inputs.samples)), TrainablePartsArgs()
    if member == SIDE and has_side_network(inputs.config.model_path):
        settings = replace(settings, side_learning_rate=LATER_SIDE_LEARNING_RATE)
    elif member == SIDE:
        parts = TrainablePartsArgs(side_network=True, side_pixels=-(-side // 64) * 64)
    return PlanArgs(plan.mode, inputs.config, inputs.regions, settings, adapters=parts, eval_steps=0)


def train_segmenter(inputs: GRPOInputs, plan: ImprovePlan, folder: Path) -> bool:
    """Train the U-Nets of a reward network on all images with masks, beside a mean teacher on the others, too."""
    if (folder / BEST_REWARD_NET).exists():
        return True
    print(f"\n{TITLES[SEGMENTER]}: {folder}", flush=True)
    picked = subsample(_labelled(inputs, ["reward", "policy"]), MOST_IMAGES, inputs.config.seed)
    others = subsample(_bare(inputs), MOST_IMAGES, inputs.config.seed) if TEACHER in plan.members else []
    train = labelled_images(picked)
    config = replace(PRESETS[plan.mode], steps=plan.steps[SEGMENTER], seed=inputs.config.seed, device=inputs.device)
    unlabelled = labelled_images(replace(sample, mask_parts=None) for sample in others) if others else None
    sizes = sized(RewardNetworkConfig(), train)
    network = train_reward_network(train, None, config, folder, sizes, unlabelled)
    if plan.folds == 1 or not inputs.split.groups["val"]:  # that of a fold is never deployed
        network = with_own_domain(network, train)
    seen = {"train": picked, **({"unlabelled": others} if others else {})}
    network.training_info = {f"{use}_groups": sorted({one.group_id for one in of}) for use, of in seen.items()}
    network.training_info |= {"val_groups": [], "data_fingerprint": inputs.split.fingerprint}
    network.pictures = {use: thumbnails(of) for use, of in seen.items()}
    network.save_pretrained(folder / BEST_REWARD_NET)
    free_memory(inputs.device)
    return False


def has_collapsed(trained: Path) -> bool:
    """Whether the mean teacher of a part has ended with its initial weights, which are those of the side network."""
    config = trained / TEACHER / FINAL / "config.json"
    return config.exists() and bool(read_json(config).get("collapse"))


def merged(folder: Path) -> Path:
    """The whole checkpoint of a Sa2VA member, written where it is missing."""
    if not (folder / MERGED).exists():
        merge_run(folder / FINAL, folder / MERGED)
    return folder / MERGED


def drop_merged(trained: Path) -> None:
    """Remove the whole checkpoints of a part: they can be made again, and the parts of a large model fill a disk."""
    for member in OBJECTIVES:
        aside = trained / member / f".{MERGED}_old"  # a folder of the true name is whole, whenever the process ends
        if (trained / member / MERGED).exists():
            shutil.rmtree(aside, ignore_errors=True)
            (trained / member / MERGED).rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


# ---- judging and deploying -------------------------------------------------------------------------------------------


def judge(inputs: GRPOInputs, plan: ImprovePlan, run: Run, parts: Sequence[Part]) -> Judged:
    """Every row on the images that judge a part."""
    values: dict[str, list[dict[str, float]]] = {row: [] for row in plan.rows}
    packed: dict[str, list[np.ndarray]] = {row: [] for row in plan.rows}
    for part in parts:
        for number, masks in masks_of(inputs, plan, run / part.name, part.judges):
            truth = part.judges[number].load_mask()
            assert truth is not None, "judges are labelled"
            for row, mask in masks.items():  # of each row the images come in order
                values[row].append(mask_metrics(mask, truth))
                packed[row].append(np.packbits(mask))
        if plan.folds > 1:
            drop_merged(run / part.name)
    columns = {row: {name: np.array([one[name] for one in of]) for name in of[0]} for row, of in values.items()}
    return Judged([sample for part in parts for sample in part.judges], columns, packed)


def masks_of(
    inputs: GRPOInputs, plan: ImprovePlan, folder: Path, samples: Sequence[Sample]
) -> Iterator[tuple[int, Masks]]:
    """(number of an image, masks of some rows) by the models of a part; one Sa2VA is in memory at a time."""
    network = RewardNetwork.from_pretrained(folder / SEGMENTER / BEST_REWARD_NET).to(inputs.device)
    models = {START: inputs.config.model_path}
    models |= {member: str(merged(folder / member)) for member in plan.members if member in OBJECTIVES}
    for row, path in models.items():
        of_model = _soft_masks(inputs, path)
        for number, sample in enumerate(samples):
            image = sample.load_image()
            soft, masks = of_model(image), Masks()
            masks[row] = soft > 0.5
            if row == plan.last:
                of_network = foreground_prob(network, image)
                masks |= {SEGMENTER: of_network > 0.5, FUSION: soft + of_network > 1}
            yield number, masks
        del of_model
        free_memory(inputs.device)


def _soft_masks(inputs: GRPOInputs, path: str) -> Callable[[np.ndarray], np.ndarray]:
    """Image uint8 (H, W, 3) -> soft mask float32 (H, W) of a Sa2VA, asked and tiled as in its training."""
    limits = {"max_tiles": inputs.regions.max_dynamic_patch, "image_resize": inputs.config.image_resize}
    model = load_segmenter(path, inputs.device, dtype=inputs.config.dtype, **limits)  # type: ignore[arg-type]

    def soft(image: np.ndarray) -> np.ndarray:
        answer = model.segment(image, [inputs.regions.segment_question])
        return model.upsample(answer.mask_logits, image.shape[:2])[0]

    return soft


def decide(dice: np.ndarray, groups: Sequence[str], rows: Sequence[Row], tunes: bool = False) -> tuple[Row, np.ndarray]:
    """The row that is deployed, and the gain of this choice over the start on each image, float64 (N,).

    `dice` is float64 (R, N), that of the start first. The row with the highest mean is deployed if the choice is better
    than the start by `max_t`, each patient judged by the row that is best on other patients. Where a model `tunes`, it
    is enough that the choice has a higher mean: masks of the place have helped in every draw (docs/log.md), and six
    patients cannot show a gain of 0.05.
    """
    gain = best_out_of_fold(dice, groups) - dice[0]
    better = group_means(gain, groups).mean() > 0 if tunes else sign_of(gain, groups) > 0
    return rows[best_choice(dice, groups) if better else 0], gain


def deploy(inputs: GRPOInputs, plan: ImprovePlan, chosen: str, trained: Path, folder: Path) -> None:
    """Write the model of a row: a whole Sa2VA, the folder of a reward network, or both; deployed.json is the last."""
    members = {FUSION: (SEGMENTER, plan.last)}.get(chosen, (chosen,))
    places = [folder / member if len(members) > 1 else folder for member in members]
    for member, place in zip(members, places, strict=True):
        if member == SEGMENTER:
            RewardNetwork.from_pretrained(trained / SEGMENTER / BEST_REWARD_NET).save_pretrained(place)
            continue
        if member == TEACHER:
            merged(trained / SIDE)  # its base
        merge_run(trained / member / FINAL, place)
    deployed = {
        "format_version": FORMAT_VERSION,
        "prompt": inputs.regions.segment_question,
        "members": [place.relative_to(folder).as_posix() for place in places],
        "reward_net": None,
        "grey_levels": inputs.grey_levels,  # for new images of the same device
    }
    write_json(folder / DEPLOYED, deployed)
