"""Step 1 as a whole: training of a reward network on the patients of the `reward` split, and its test.

The test compares predicted with true Dice on test patients, in numbers and as a sheet of masks with their error maps.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure

from rl_reward_network.atomic_io import NAMES_ALONE, whole_file, write_json
from rl_reward_network.data.identity import TRAIN_ANEW, check_apart, judged_parts, thumbnails
from rl_reward_network.data.items import Sample
from rl_reward_network.data.splits import Split, select
from rl_reward_network.data.windows import LabelledImages
from rl_reward_network.data_import.write import import_notes
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import RunInputs, describe_run
from rl_reward_network.models.reward_network import DiceInterval, RewardNetwork, RewardNetworkConfig, error_map
from rl_reward_network.report.deployment import RunCost
from rl_reward_network.report.metrics import AgreementRow, agreement, coverage
from rl_reward_network.report.overlays import compare_masks
from rl_reward_network.reward_training.calibration import (
    CLIMBERS,
    calibrated,
    dice_after_ascent,
    given_interval,
    true_numbers_of,
)
from rl_reward_network.reward_training.masks import (
    DAMAGED,
    SEGMENTER,
    SHIFTED,
    SOURCES,
    RewardExample,
    reward_examples,
    source_masks,
    true_dice,
)
from rl_reward_network.reward_training.report import write_network_report
from rl_reward_network.reward_training.train import (
    PRESETS,
    RewardTrainingConfig,
    labelled_images,
    train_reward_network,
)
from rl_reward_network.rewards.learned import ImageScorer
from rl_reward_network.run import (
    AGREEMENT,
    BEST_REWARD_NET,
    CHECKPOINT,
    REWARD_RUN,
    SPENT,
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

NETWORK, MEMBER, CAUTIOUS = "network", "one member", "conservative"
MEAN, SOURCE_MEAN = "the mean", "mean of the source"
COLUMNS = ("image", "mask (white)", "predicted error map", "truth: missed blue, false orange")
INCHES = 2.6  # of one picture
SCALE = 0.7  # inches of the colour bar
ERRORS = ScalarMappable(cmap="inferno")
ERRORS.set_clim(0, 1)


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
    """The preset of the mode; `steps` replaces its steps, `max_labelled` (at least 1) its training images."""
    if max_labelled is not None and max_labelled < 1:
        raise ValueError(f"max_labelled is {max_labelled}, expected 1 or more")
    given = {name: value for name, value in {"images": max_labelled, "steps": steps}.items() if value is not None}
    config = replace(PRESETS[mode], seed=run.seed, device=run.device, **given)
    return RewardPlan(mode, config, RewardNetworkConfig(members=members, score_weights=score_weights), mean_teacher)


def run_reward_stage(inputs: RunInputs, plan: RewardPlan, run: Run) -> RewardNetwork:
    """Train a reward network in `run`, test it on test patients, and return it.

    Writes best_reward_net/, sheet.png, report.html, agreement.json, cost.json, config.json, split.json, metrics.jsonl
    and logs/. An interrupted run is resumed from its last checkpoint.

    Raises:
        ValueError: a split has no labelled image, `run` is of another version, or another process works in it.
    """
    config = plan.config
    counts = {"reward": config.images, "val": config.val_images, "test": config.test_images}
    picked = {name: inputs.pick(name, count, labelled=True) for name, count in counts.items()}
    others = without_masks(inputs, picked["reward"]) if plan.mean_teacher else []
    with run.working({}, lambda: describe_run(run, inputs, origin(inputs, plan), {"seed": config.seed})):
        resumed, seconds, spent = (run / CHECKPOINT).exists(), run.seconds_before(), run / SPENT
        with clock(seconds, "making masks", spent):
            images = (sample.load_image() for samples in picked.values() for sample in samples)
            inputs.bank.build(images, sum(map(len, picked.values())))
        with clock(seconds, "training", spent):
            train, val = (labelled_images(picked[name]) for name in ("reward", "val"))
            unlabelled = labelled_images(others) if others else None
            sizes = sized(plan.network, train)
            network = train_reward_network(train, val, config, run.path, sizes, unlabelled).to(config.device)
        with clock(seconds, "calibrating", spent):
            patients = [sample.group_id for sample in picked["val"]]
            examples = reward_examples(inputs, picked["val"], "calibrating on val patients")
            stream = [config.seed, CALIBRATION]
            network = calibrated(network, examples, patients, DAMAGED_MASKS, stream, train.images)
            seen = {"train": picked["reward"], "val": picked["val"], **({"unlabelled": others} if others else {})}
            groups = {f"{use}_groups": sorted({one.group_id for one in samples}) for use, samples in seen.items()}
            network.training_info = run_settings(inputs, plan) | groups
            network.pictures = {use: thumbnails(samples) for use, samples in seen.items()}
            network.save_pretrained(run / BEST_REWARD_NET)
        with clock(seconds, "comparing", spent):
            mean = _mean_dice(reward_examples(inputs, picked["reward"], "their mean"), [config.seed, TRAINING])
            stream = [config.seed, TEST]
            test = reward_examples(inputs, picked["test"], "test patients")
            result = measure_agreement(network, test, mean, DAMAGED_MASKS, stream)
            shown = reward_examples(inputs, picked["test"][:SHEET_ROWS], "pictures")
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
            "notes": import_notes(inputs.config.data_root, inputs.samples),
            "seconds": seconds,
            "resumed": resumed,
            "peak_memory_gib": peak,
        }
        write_network_report(run, {**about, **result}, run / "sheet.png")
        write_json(run / AGREEMENT, {**about, **result})
    return network.to("cpu")


def without_masks(inputs: RunInputs, labelled: Sequence[Sample]) -> list[Sample]:
    """The images of a mean teacher: those of `--unlabelled_root`, and of the `reward` split beyond the label budget.

    Images of the `policy` split are left out: the network is to judge them.
    """
    used = {sample.sample_id for sample in labelled}
    rest = [sample for sample in select(inputs.samples, inputs.split, "reward") if sample.sample_id not in used]
    return [replace(sample, mask_parts=None) for sample in rest] + [one for one in inputs.samples if one.joined]


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
        **inputs.split.settings,
        "unlabelled": inputs.unlabelled if plan.mean_teacher else None,
    }


def run_settings(inputs: RunInputs, plan: RewardPlan) -> dict[str, Any]:
    """The settings that a run to resume must share."""
    return origin(inputs, plan) | {"seed": plan.config.seed}


def named(network: RewardNetwork, run: Path | None = None) -> str:
    """Folder, relative to a run folder of the same project, and time of writing of a network from `from_pretrained`."""
    folder = network.source
    if folder is None:
        return "not from a folder"
    written = datetime.fromtimestamp((folder / "config.json").stat().st_mtime)
    return f"{folder if run is None else portable(folder, run)}, of {written:%Y-%m-%d %H:%M}"


def find_reward_network(inputs: RunInputs, plan: RewardPlan, seed: int | None = None) -> Path | None:
    """The newest finished reward network under the output folder with these settings, and this seed where given."""
    wanted = origin(inputs, plan) | ({} if seed is None else {"seed": seed})

    def trained_alike(run: Run) -> bool:
        return not differences(RewardNetwork.from_pretrained(run / BEST_REWARD_NET).training_info, wanted)

    run = Run.find(REWARD_RUN, inputs.config.output_dir, {}, "finished", trained_alike)
    return None if run is None else run / BEST_REWARD_NET


def find_unfinished(inputs: RunInputs, plan: RewardPlan) -> Run | None:
    """The newest interrupted run with these settings."""
    return Run.find(REWARD_RUN, inputs.config.output_dir, run_settings(inputs, plan), "interrupted")


def check_no_leak(split: Split, network: RewardNetwork, where: Path, samples: Sequence[Sample] = ()) -> None:
    """Refuse a reward network that was trained or chosen on patients whose masks it will score.

    Patients are compared by name, and the images of `samples` with those it has seen, under any name.

    Raises:
        ValueError: its weights were trained on patients of the policy, val or test split, or chosen on patients of
            policy or test, or its config.json does not list its patients.
    """
    info = {"unlabelled_groups": [], **network.training_info}  # most networks learn from labelled images alone
    for groups, use, splits in (
        ("train_groups", "trained", ("policy", "val", "test")),
        ("val_groups", "chosen", ("policy", "test")),
        ("unlabelled_groups", "trained without masks", ("policy", "val", "test")),
    ):
        if groups not in info:
            raise ValueError(f"{where}: {groups} is missing, the patients the network was {use} on; {TRAIN_ANEW}")
        known = set(info[groups])
        for name in splits:
            if shared := known & split.ids(name):
                raise ValueError(
                    f"{where}: the reward network was {use} on {len(shared)} patients of the {name} split; {TRAIN_ANEW}"
                )
    if samples and not network.pictures:
        warnings.warn(f"{where}: the network does not record its images, as of before 1.0; {NAMES_ALONE}", stacklevel=2)
    check_apart(network.pictures, judged_parts(samples, split), f"{where}: the reward network", TRAIN_ANEW)


def _mean_dice(examples: Iterable[RewardExample], seed: Sequence[int]) -> float:
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


# ---- the test on test patients ---------------------------------------------------------------------------------------


def measure_agreement(
    network: RewardNetwork, examples: Iterable[RewardExample], mean: float, masks: int, seed: Sequence[int]
) -> dict[str, Any]:
    """Agreement and intervals by source of masks, gradient ascent, and the network as a segmenter, on test images.

    `mean` is the Dice predicted by the baseline "the mean"; `masks` the damaged masks of each kind per image. Returns
    fields of agreement.json; docs/reference/tensorboard.md explains each.
    """
    measured, climbs, own_dice, favoured, outside = [], [], [], [], []
    for index, example in enumerate(examples):
        scorer, truth = ImageScorer(network, example.image), example.truth
        own_dice += [true_dice(scorer.own_mask[None], truth)] * bool(truth.any())
        outside.append(scorer.outside is not None)
        scorer.outside = None  # numbers of all images are compared, so that the domain cannot flatter them
        stacks = source_masks(example, np.random.default_rng([*seed, index]), masks, own=scorer.own_mask)
        favoured.append(scorer.quality(np.stack([scorer.own_mask, truth]).astype(np.float32))["dice"])
        stack = np.concatenate(list(stacks.values()))
        quality, true = scorer.quality(stack.astype(np.float32)), true_numbers_of(stack, truth)
        columns = {
            "true": true[:, 0],
            "true score": true @ network.config.score_weights,
            "members": quality["members"][..., 0],  # (n, K)
            "score": quality["score"],
            "image": np.full(len(stack), index),
            "source": np.repeat(list(stacks), [len(part) for part in stacks.values()]),
        }
        measured.append(columns)
        damaged = stacks[SHIFTED][:CLIMBERS]
        after = dice_after_ascent(scorer, truth, damaged, network.config.ascent_step)
        climbs.append(np.stack([true_dice(damaged, truth), after]))
    table = {name: np.concatenate([columns[name] for columns in measured]) for name in measured[0]}
    parts = {source: {k: v[table["source"] == source] for k, v in table.items()} for source in SOURCES}
    predicted = np.array(favoured, dtype=float)
    return {
        "tables": {source: _rows(part, mean) for source, part in parts.items()},
        "intervals": {
            source: interval_row(network.config.intervals.get(source), part["members"], part["true"])
            for source, part in parts.items()
        },
        "masks": {source: len(part["true"]) for source, part in parts.items()},
        "ascent": _ascent(*np.concatenate(climbs, axis=1)),
        "own_dice": _mean_or_none(own_dice),
        "without_foreground": len(measured) - len(own_dice),
        "own_above_truth": float((predicted[:, 0] > predicted[:, 1]).mean()),
        "predicted_own": float(predicted[:, 0].mean()),
        "predicted_truth": float(predicted[:, 1].mean()),
        "outside": sum(outside),
    }


def _ascent(before: np.ndarray, after: np.ndarray) -> dict[str, float | None]:
    """Effect of the ascent on the masks that were not perfect before."""
    before, after = before[before < 1], after[before < 1]
    means = {"raised": after > before, "dice_before": before, "dice_after": after}
    return {name: _mean_or_none(values) for name, values in means.items()}


def _mean_or_none(values: Sequence[Any] | np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _rows(part: dict[str, np.ndarray], mean: float) -> dict[str, AgreementRow]:
    """One row per predictor, against the true Dice; the conservative score against the true score."""
    true, members = part["true"], part["members"]
    pairs = {
        NETWORK: (members.mean(axis=1), true),
        MEMBER: (members[:, 0], true),
        CAUTIOUS: (part["score"], part["true score"]),
        MEAN: (np.full(len(true), mean), true),
        SOURCE_MEAN: (np.full_like(true, true.mean()), true),  # of the very masks: the best constant
    }
    return {name: agreement(*pair, part["image"]) for name, pair in pairs.items()}


def interval_row(interval: DiceInterval | None, dice: np.ndarray, true: np.ndarray) -> dict[str, Any]:
    """Result of the intervals of one source, for members' Dice (n, K) and true Dice (n,).

    `coverage` is the share of true Dice inside, `half_width` the median; both are None where `refusal` says why no
    interval can be given.
    """
    refusal = "not fitted on validation masks" if interval is None else interval.refusal
    if interval is None or refusal or not len(true):
        return {"refusal": refusal, "coverage": None, "half_width": None}
    low, high = interval.around(dice).T
    return {"refusal": None, "coverage": coverage(low, high, true), "half_width": float(np.median(high - low) / 2)}


class SheetRow(NamedTuple):
    """One mask of the sheet: image, mask, predicted errors and truth, each (H, W) or (H, W, 3), and titles of three."""

    pictures: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
    titles: tuple[str, str, str]


def sheet_rows(network: RewardNetwork, examples: Iterable[RewardExample], seed: Sequence[int]) -> list[SheetRow]:
    """One mask of each example with its predicted and true errors; the sources take turns."""
    rows = []
    for index, example in enumerate(examples):
        source, scorer = SOURCES[index % len(SOURCES)], ImageScorer(network, example.image)
        masks = source_masks(example, np.random.default_rng([*seed, index]), 1, (source,), scorer.own_mask)[source]
        mask = masks[index // len(SOURCES) % len(masks)]
        interval = given_interval(network.config, scorer, mask, source)
        limits = "no interval" if isinstance(interval, str) else "[{:.2f}, {:.2f}]".format(*interval)
        predicted = float(scorer.quality(mask[None].astype(np.float32))["dice"][0])
        told = "outside the network's domain" if scorer.outside else f"predicted Dice {predicted:.2f}, {limits}"
        errors = error_map(mask.astype(np.float32), scorer.foreground_prob)
        dice = f"true Dice {true_dice(mask[None], example.truth)[0]:.2f}"
        rows.append(SheetRow((example.image, mask, errors, compare_masks(mask, example.truth)), (source, told, dice)))
    return rows


def write_sheet(path: Path, rows: Sequence[SheetRow]) -> None:
    """Draw the rows into a PNG, which is written atomically."""
    figure = Figure(figsize=(INCHES * len(COLUMNS), (INCHES + 0.35) * len(rows) + SCALE), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), len(COLUMNS), squeeze=False)
    for row, line in zip(rows, axes, strict=True):
        for number, (axis, picture) in enumerate(zip(line, row.pictures, strict=True)):
            axis.imshow(picture, cmap="gray" if number == 1 else "inferno", vmin=0, vmax=1, interpolation="nearest")
            axis.set_axis_off()
        for axis, title in zip(line[1:], row.titles, strict=True):
            axis.set_title(title, fontsize=9)
    for axis, name in zip(axes[0], COLUMNS, strict=True):
        axis.set_title(f"{name}\n{axis.get_title()}".strip(), fontsize=9)
    words = "predicted error map: probability that the mask is wrong at a pixel"
    place: dict[str, Any] = {"location": "bottom", "shrink": 0.4, "aspect": 40}
    figure.colorbar(ERRORS, ax=axes, label=words, pad=0.03 / len(rows), fraction=0.08 / len(rows), **place)
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=90)
