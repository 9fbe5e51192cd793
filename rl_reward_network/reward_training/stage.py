"""Step 1 as a whole: training of a reward network on the patients of the `reward` split, and its test."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rl_reward_network.atomic_io import NAMES_ALONE, write_json
from rl_reward_network.data.identity import TRAIN_ANEW, check_apart, judged_parts, thumbnails
from rl_reward_network.data.items import Sample
from rl_reward_network.data.splits import Split, select
from rl_reward_network.data.windows import LabelledImages
from rl_reward_network.data_import.write import import_notes
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import RunInputs, describe_run
from rl_reward_network.inputs.unlabelled import Unlabelled
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.report.deployment import RunCost
from rl_reward_network.reward_training.agreement import measure_agreement, sheet_rows, write_sheet
from rl_reward_network.reward_training.baseline import train_pooled_cnn
from rl_reward_network.reward_training.calibration import calibrated
from rl_reward_network.reward_training.masks import DAMAGED, SEGMENTER, RewardExamples, source_masks, true_dice
from rl_reward_network.reward_training.train import (
    PRESETS,
    RewardTrainingConfig,
    images_without_masks,
    labelled_images,
    train_reward_network,
)
from rl_reward_network.run import (
    AGREEMENT,
    BEST_REWARD_NET,
    CHECKPOINT,
    REWARD_RUN,
    Run,
    clock,
    differences,
    peak_memory_gib,
    portable,
)

DAMAGED_MASKS = 8  # of each kind, per validation or test image
SHEET_ROWS = 8
SMALL_IMAGE = 256  # pixels; up to here the U-Nets pack 2x2 pixels in place of 4x4, since objects are thinner, too
TRAINING, CALIBRATION, TEST = range(3)  # seeds of the masks of each part: no part changes another


class RewardPlan(NamedTuple):
    """Settings of step 1."""

    mode: str
    config: RewardTrainingConfig
    network: RewardNetworkConfig
    mean_teacher: bool = False
    """Whether images without masks train, too. Not by default: a network must not judge images that it learned from."""


def reward_plan(
    run: RunConfig,
    mode: str,
    steps: int | None = None,
    members: int = RewardNetworkConfig.members,
    score_weights: tuple[float, float, float, float] = RewardNetworkConfig.score_weights,
    max_labelled: int | None = None,
    mean_teacher: bool = False,
) -> RewardPlan:
    """The preset of the mode.

    `steps` replaces its steps, `max_labelled` its training images; `mean_teacher` as in `RewardPlan`.

    Raises:
        ValueError: `max_labelled` is below 1.
    """
    if max_labelled is not None and max_labelled < 1:
        raise ValueError(f"max_labelled is {max_labelled}, expected 1 or more")
    config = replace(PRESETS[mode], seed=run.seed, device=run.device)
    config = config if max_labelled is None else replace(config, images=max_labelled)
    config = config if steps is None else replace(config, steps=steps)
    return RewardPlan(mode, config, RewardNetworkConfig(members=members, score_weights=score_weights), mean_teacher)


def run_reward_stage(inputs: RunInputs, plan: RewardPlan, run: Run) -> RewardNetwork:
    """Train a reward network in `run`, test it on test patients, and return it.

    Writes best_reward_net/, sheet.png, agreement.json, cost.json, config.json, split.json, metrics.jsonl and logs/. An
    interrupted run is resumed from its last checkpoint.

    Args:
        inputs: data, split and frozen model.
        plan: settings.
        run: new, or interrupted.

    Raises:
        ValueError: a split has no labelled image, `run` is of another version, or another process works in it.
    """
    if run.state != "new":
        run.check_same({})
    config = plan.config
    counts = {"reward": config.images, "val": config.val_images, "test": config.test_images}
    picked = {name: inputs.pick(name, count, labelled=True) for name, count in counts.items()}
    with run.lock():
        if run.state == "new":
            describe_run(run, inputs, origin(inputs, plan), {"seed": config.seed})
        seconds: dict[str, float] = {}
        resumed = (run / CHECKPOINT).exists()
        with clock(seconds, "making masks"):
            images = (sample.load_image() for samples in picked.values() for sample in samples)
            inputs.bank.build(images, sum(map(len, picked.values())))
        with clock(seconds, "training"):
            train, val = (labelled_images(picked[name]) for name in ("reward", "val"))
            others = without_masks(inputs, picked["reward"]) if plan.mean_teacher else []
            unlabelled = images_without_masks(others) if others else None
            sizes = sized(plan.network, train)
            network = train_reward_network(train, val, config, run.path, sizes, unlabelled).to(config.device)
        with clock(seconds, "calibrating"):
            groups = {name: [sample.group_id for sample in samples] for name, samples in picked.items()}
            examples = RewardExamples(inputs, picked["val"], "calibrating on val patients")
            stream = [config.seed, CALIBRATION]
            network = calibrated(network, examples, groups["val"], DAMAGED_MASKS, stream, train.images)
            patients = {"train_groups": sorted(set(groups["reward"])), "val_groups": sorted(set(groups["val"]))}
            if others:
                patients["unlabelled_groups"] = sorted({sample.group_id for sample in others})
            network.training_info = run_settings(inputs, plan) | patients
            seen = {"train": picked["reward"], "val": picked["val"], "unlabelled": others}
            network.pictures = {use: thumbnails(samples) for use, samples in seen.items() if samples}
            network.save_pretrained(run / BEST_REWARD_NET)
        with clock(seconds, "comparing"):
            pooled = train_pooled_cnn(RewardExamples(inputs, picked["reward"], "the design to beat"), config.seed)
            mean = _mean_dice(RewardExamples(inputs, picked["reward"], "their mean"), [config.seed, TRAINING])
            examples, stream = RewardExamples(inputs, picked["test"], "test patients"), [config.seed, TEST]
            result = measure_agreement(network, examples, pooled, mean, DAMAGED_MASKS, stream)
            shown = RewardExamples(inputs, picked["test"][:SHEET_ROWS], "pictures")
            write_sheet(run / "sheet.png", sheet_rows(network, shown, stream))
        used, peak = {name: _count(samples) for name, samples in picked.items()}, peak_memory_gib(config.device)
        of_network = {name: value for name, value in seconds.items() if name != "comparing"}
        labels = {"reward": {name: used[name]["images"] for name in ("reward", "val")}}
        parameters = sum(tensor.numel() for tensor in network.parameters())
        RunCost(of_network, labels, parameters, peak, resumed).save(run.path)
        about = {
            "used": used,
            **({"unlabelled": _count(others)} if others else {}),
            "bank": {"computed": inputs.bank.computed, "reused": inputs.bank.reused},
            "notes": import_notes(inputs.config.data_root),
            "seconds": seconds,
            "resumed": resumed,
            "peak_memory_gib": peak,
        }
        write_json(run / AGREEMENT, {**about, **result})
        run.finish()
    return network.to("cpu")


def without_masks(inputs: RunInputs, labelled: Sequence[Sample]) -> list[Sample]:
    """The images of a mean teacher: those of `--unlabelled_root`, and of the `reward` split beyond the label budget.

    Images of the `policy` split are left out: the network is to judge them.
    """
    assert inputs.unlabelled is not None, "a mean teacher has images without masks"
    used = {sample.sample_id for sample in labelled}
    rest = [sample for sample in select(inputs.samples, inputs.split, "reward") if sample.sample_id not in used]
    return [replace(sample, mask_parts=None) for sample in rest] + inputs.unlabelled.for_training


def sized(network: RewardNetworkConfig, train: LabelledImages) -> RewardNetworkConfig:
    """The sizes of the network with the packing that suits the training images."""
    largest = max(max(image.shape[:2]) for image in train.images)
    return replace(network, packing=2) if largest <= SMALL_IMAGE else network


def origin(inputs: RunInputs, plan: RewardPlan) -> dict[str, Any]:
    """The settings that a reward network and a later run must share for its use by default."""
    settings = {name: value for name, value in asdict(plan.config).items() if name not in ("seed", "device")}
    return {
        "mode": plan.mode,
        "settings": settings,
        "members": plan.network.members,
        "score_weights": list(plan.network.score_weights),
        "data_fingerprint": inputs.data_fingerprint,
        "model_fingerprint": inputs.segmenter.fingerprint,
        "prompts": list(inputs.prompts),
        "split_seed": inputs.split.seed,
        "unlabelled": inputs.unlabelled.fingerprint if plan.mean_teacher and inputs.unlabelled else None,
    }


def run_settings(inputs: RunInputs, plan: RewardPlan) -> dict[str, Any]:
    """The settings that a run to resume must share."""
    return origin(inputs, plan) | {"seed": plan.config.seed}


def named(network: RewardNetwork, run: Path | None = None) -> str:
    """Folder and time of writing of a reward network.

    Args:
        network: from `from_pretrained`.
        run: a run folder; the path is then relative to it if both are in one project.
    """
    folder = network.source
    if folder is None:
        return "not from a folder"
    written = datetime.fromtimestamp((folder / "config.json").stat().st_mtime)
    return f"{folder if run is None else portable(folder, run)}, of {written:%Y-%m-%d %H:%M}"


def find_reward_network(inputs: RunInputs, plan: RewardPlan, seed: int | None = None) -> Path | None:
    """The newest finished reward network under the output folder with the settings of this step 1.

    Its seed is only compared if `seed` is given.
    """
    wanted = origin(inputs, plan) | ({} if seed is None else {"seed": seed})

    def trained_alike(run: Run) -> bool:
        return not differences(RewardNetwork.from_pretrained(run / BEST_REWARD_NET).training_info, wanted)

    run = Run.find(REWARD_RUN, inputs.config.output_dir, {}, "finished", trained_alike)
    return None if run is None else run / BEST_REWARD_NET


def find_unfinished(inputs: RunInputs, plan: RewardPlan) -> Run | None:
    """The newest interrupted run with these settings."""
    return Run.find(REWARD_RUN, inputs.config.output_dir, run_settings(inputs, plan), "interrupted")


def check_no_leak(
    split: Split,
    network: RewardNetwork,
    where: Path,
    unlabelled: Unlabelled | None = None,
    samples: Sequence[Sample] = (),
) -> None:
    """Refuse a reward network that was trained or chosen on patients whose masks it will score.

    Patients are compared by name, and the images of `samples` and `unlabelled` with those it has seen, under any name.

    Raises:
        ValueError: its weights were trained on patients of the policy, val or test split or on unlabelled ones, or
            chosen on patients of policy or test or on unlabelled ones, or its config.json does not list its patients.
    """
    new = {sample.group_id for sample in unlabelled.samples} if unlabelled else set()
    for groups, use, splits in (
        ("train_groups", "trained", ("policy", "val", "test")),
        ("val_groups", "chosen", ("policy", "test")),
        ("unlabelled_groups", "trained without masks", ("policy", "val", "test")),
    ):
        if groups not in network.training_info:
            if groups == "unlabelled_groups":  # most networks learn from labelled images alone
                continue
            raise ValueError(f"{where}: {groups} is missing, the patients the network was {use} on; {TRAIN_ANEW}")
        known = set(network.training_info[groups])
        for name in splits:
            if shared := known & set(split.groups[name]):
                raise ValueError(
                    f"{where}: the reward network was {use} on {len(shared)} patients of the {name} split; {TRAIN_ANEW}"
                )
        if shared := known & new:
            raise ValueError(
                f"{where}: the reward network was {use} on {len(shared)} patients of --unlabelled_root; leave them out"
            )
    if samples and not network.pictures:
        warnings.warn(f"{where}: the network does not record its images, as of before 1.0; {NAMES_ALONE}", stacklevel=2)
    further = {"--unlabelled_root": list(unlabelled.samples)} if unlabelled else {}
    parts = judged_parts(samples, split) | further
    check_apart(network.pictures, parts, f"{where}: the reward network", TRAIN_ANEW)


def _mean_dice(examples: RewardExamples, seed: Sequence[int]) -> float:
    """Mean true Dice of the segmenter's and of damaged masks: what a predictor without an image would say."""
    dice = []
    for index, example in enumerate(examples):
        stacks = source_masks(example, np.random.default_rng([*seed, index]), DAMAGED_MASKS, (SEGMENTER, DAMAGED))
        dice += [true_dice(masks, example.truth) for masks in stacks.values()]
    return float(np.concatenate(dice).mean())


def _count(samples: list[Sample]) -> dict[str, int]:
    """Images, patients and series: frames of one series are nearly identical."""
    return {
        "images": len(samples),
        "patients": len({sample.group_id for sample in samples}),
        "series": len({sample.series_id for sample in samples}),
    }
