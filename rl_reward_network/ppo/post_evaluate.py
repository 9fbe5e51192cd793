"""The evaluation of experiment 2: the policy beside thresholds, fixed sequences, greedy choices and the oracle."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rl_reward_network.env.operations import EditedImage, Operations
from rl_reward_network.inputs.loading import RunInputs, open_inputs, saved_config
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.ppo.deploy import PostPolicy, load_policy_of_run
from rl_reward_network.ppo.operations import PostPlan, edited_images, post_samples, rewarded_by
from rl_reward_network.ppo.policy import choose_operations
from rl_reward_network.ppo.search import greedy, ridge_sequences, words
from rl_reward_network.ppo.settings import PPOSettings
from rl_reward_network.report.bootstrap import (
    MIN_PATIENTS,
    NO_GAP,
    Estimate,
    Verdict,
    few_patients_note,
    group_means,
    mean_interval,
)
from rl_reward_network.report.deployment import Deployment, labels_sentence
from rl_reward_network.reward_training.stage import check_no_leak
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.rewards.metrics import METRICS, mask_metrics
from rl_reward_network.run import REWARD_NET

SPLIT = "test"
AS_IS, THRESHOLD, SEQUENCE, NET = "mask as it is", "best threshold", "best fixed sequence", "argmax of the reward net"
RIDGE, POLICY, DEPLOYED, ORACLE = "ridge over sequences", "PPO", "deployed", "oracle"


@dataclass(frozen=True)
class PostRow:
    """One way to edit the masks of the test images.

    Args:
        name: of the row.
        means: metric of `METRICS` -> mean over patients.
        dice: of each image.
        to_as_is: Dice less that of the unchanged mask, paired.
        to_sequence: Dice less that of the best fixed sequence, paired.
        gap_closed: share of the oracle's gain over that sequence; None below `NO_GAP`.
        operations: of each image, in words; empty for a threshold.
    """

    name: str
    means: dict[str, Estimate]
    dice: tuple[float, ...]
    to_as_is: Estimate
    to_sequence: Estimate
    gap_closed: float | None
    operations: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class PostResult:
    """The content of the report.

    Args:
        rows: of the table.
        verdict: on PPO against the best fixed sequence.
        config: of the run's final_model.
        images: test images.
        masks: row -> mask of each image, bool (H, W).
        notes: limits of the data.
        minutes: of the evaluation.
    """

    rows: tuple[PostRow, ...]
    verdict: Verdict
    config: dict[str, Any]
    images: tuple[EditedImage, ...]
    masks: dict[str, list[np.ndarray]]
    notes: tuple[str, ...]
    minutes: float

    def row(self, name: str) -> PostRow:
        """The row of that name."""
        return next(row for row in self.rows if row.name == name)


def evaluate_post(
    final_model: Path,
    data_root: Path | None = None,
    base_model: str | None = None,
    gpu: int | None = None,
    images: int | None = None,
) -> PostResult:
    """Measure the policy and everything beside it on test images.

    Args:
        final_model: folder of a policy, in its run folder.
        data_root, base_model: where data and Sa2VA are now, if they were moved since training.
        gpu: index; -1 is the CPU; None is as in training.
        images: at most so many test images, one per series before a second; None is all.

    Raises:
        ValueError: no labelled test image, or data or model differ from training.
    """
    if images is not None and images < 1:
        raise ValueError(f"--images: got {images}; give 1 or more, or leave it out for all")
    start, run = time.perf_counter(), final_model.parent
    policy, deployed = load_policy_of_run(final_model)
    config = deployed.config
    inputs = _open(run, config, data_root, base_model, gpu)
    plan = _plan(config)
    samples = inputs.pick(SPLIT, images or len(inputs.samples), labelled=True)
    maps = _maps(run, inputs)
    test = edited_images(inputs, plan, samples, maps, SPLIT)
    train = edited_images(
        inputs, plan, post_samples(inputs, plan)["train"], maps if plan.reward == "net" else None, "train"
    )
    chosen = _chosen(policy, deployed, train, test, plan)
    masks = {
        name: [image.mask(operations) for image, operations in zip(test, of, strict=True)]
        for name, of in chosen.items()
    }
    masks[THRESHOLD] = [image.soft > config["best_threshold"] for image in test]
    order = (AS_IS, THRESHOLD, SEQUENCE, NET, RIDGE, POLICY, DEPLOYED, ORACLE)
    rows = _rows({name: masks[name] for name in order if name in masks}, chosen, test, plan.ppo.seed)
    ppo, oracle = (next(row for row in rows if row.name == name) for name in (POLICY, ORACLE))
    verdict = verdict_of(ppo, oracle, _over_its_usual(test, chosen[POLICY]))
    few = (*few_patients_note(rows[0].to_as_is.groups), *Deployment.from_json(config["deployment"]).notes)
    notes = (*_notes(config, maps is not None), *few)
    return PostResult(rows, verdict, config, tuple(test), masks, notes, (time.perf_counter() - start) / 60)


def _notes(config: dict[str, Any], network: bool) -> tuple[str, ...]:
    """What rewarded PPO and which labels chose what; whether there is a reward network."""
    reward = config["plan"]["reward"]
    used = (labels_sentence(config["labels"]),) if "choice" in config["deployment"] else ()
    none = () if network else ("No reward network was given, so there is no row for its choice.",)
    return (rewarded_by(reward, network), *used, *none)


def _open(
    run: Path, config: dict[str, Any], data_root: Path | None, base_model: str | None, gpu: int | None
) -> RunInputs:
    settings, limits = saved_config(run, config, data_root, base_model)
    device = gpu if gpu is not None else -1 if config["device"] == "cpu" else settings.gpu
    inputs = open_inputs(replace(settings, gpu=device), limits, run / "split.json", config["prompts"])
    if config["model_fingerprint"] != (now := inputs.segmenter.fingerprint):
        raise ValueError(
            f"{run / 'config.json'}: model_fingerprint is {config['model_fingerprint']}, now it is {now}; name the "
            "model of the run by --base_model and evaluate on the kind of device that trained it, or train again"
        )
    return inputs


def _plan(config: dict[str, Any]) -> PostPlan:
    """The plan of a run, from its config.json."""
    saved = dict(config["plan"])
    return PostPlan(**saved | {"ppo": PPOSettings.from_json(saved["ppo"])})


def _maps(run: Path, inputs: RunInputs) -> ForegroundMaps | None:
    """The maps of the run's reward network, if it has one."""
    path = run / REWARD_NET
    if not path.exists():
        return None
    network = RewardNetwork.from_pretrained(path)
    check_no_leak(inputs.split, network, path)
    return ForegroundMaps.beside(run, network.to(inputs.config.device))


def _chosen(
    policy: Any, deployed: PostPolicy, train: Sequence[EditedImage], test: Sequence[EditedImage], plan: PostPlan
) -> dict[str, list[Operations]]:
    """Row -> operations of each test image."""
    steps, fixed = plan.ppo.max_steps, tuple(deployed.config["fixed_sequence"])
    sequences = [tuple(operations) for operations in deployed.config["sequences"]]
    by_policy = choose_operations(policy, test, steps)
    chosen: dict[str, list[Operations]] = {
        AS_IS: [()] * len(test),
        SEQUENCE: [fixed] * len(test),
        RIDGE: ridge_sequences(train, test, sequences),
        POLICY: by_policy,
        DEPLOYED: by_policy if deployed.policy is not None else [deployed.fixed] * len(test),
        ORACLE: [greedy(image.dice, steps) for image in test],
    }
    if test[0].scorer is not None:
        chosen[NET] = [greedy(image.score, steps) for image in test]
    return chosen


def _rows(
    masks: dict[str, list[np.ndarray]], chosen: dict[str, list[Operations]], test: Sequence[EditedImage], seed: int
) -> tuple[PostRow, ...]:
    groups = [image.group_id for image in test]
    truths = [image.truth for image in test]
    measured = {
        name: [mask_metrics(mask, truth) for mask, truth in zip(of, truths, strict=True) if truth is not None]
        for name, of in masks.items()
    }
    dices = {name: np.array([one["dice"] for one in values]) for name, values in measured.items()}
    gap = float(group_means(dices[ORACLE] - dices[SEQUENCE], groups).mean())
    rows = []
    for name, values in measured.items():
        means = {metric: mean_interval(np.array([one[metric] for one in values]), groups, seed) for metric in METRICS}
        to_as_is, to_sequence = (mean_interval(dices[name] - dices[other], groups, seed) for other in (AS_IS, SEQUENCE))
        closed = to_sequence.mean / gap if gap >= NO_GAP else None
        in_words = tuple(words(operations) for operations in chosen.get(name, ()))
        rows.append(PostRow(name, means, tuple(dices[name].tolist()), to_as_is, to_sequence, closed, in_words))
    return tuple(rows)


def _over_its_usual(test: Sequence[EditedImage], chosen: Sequence[Operations]) -> Estimate:
    """Dice of a policy's sequences less that of the one that it chooses most often, for all images."""
    usual = Counter(chosen).most_common(1)[0][0]
    gains = [image.dice(operations) - image.dice(usual) for image, operations in zip(test, chosen, strict=True)]
    return mean_interval(np.array(gains), [image.group_id for image in test])


def verdict_of(policy: PostRow, oracle: PostRow, over_usual: Estimate) -> Verdict:
    """The verdict on PPO against the best fixed sequence and the mask as it is; "no gap" where a sequence is enough.

    Args:
        policy, oracle: their rows.
        over_usual: Dice of PPO less that of its most frequent sequence for all images. Without a gain over it PPO does
            not choose by the image, whatever its reward and however bad the sequence is that the same reward has found.
    """
    gain, gap = policy.to_sequence, oracle.to_sequence
    measured = f"PPO minus best fixed sequence on {gain.groups} test patients: {gain.signed} Dice."
    if gap.groups >= MIN_PATIENTS and gap.high is not None and gap.high < NO_GAP:
        return Verdict(
            "no gap", f"No gap: a fixed sequence is enough, the oracle gains {gap.signed} over it. {measured}"
        )
    if gain.groups < MIN_PATIENTS:
        return Verdict("cannot tell", f"Cannot tell: fewer than {MIN_PATIENTS} test patients. {measured}")
    label = {1: "better", -1: "worse"}.get(gain.sign, "cannot tell")
    if label == "better" and policy.to_as_is.sign <= 0:
        worse = f"it does not beat the mask as it is (PPO minus it: {policy.to_as_is.signed} Dice)"
        return Verdict("cannot tell", f"Cannot tell: {worse}. {measured}")
    if label == "better" and over_usual.sign <= 0:
        usual = f"it does not beat its most frequent sequence for all images ({over_usual.signed} Dice)"
        return Verdict("cannot tell", f"Cannot tell: {usual}. {measured}")
    what = {
        "better": "Better: choosing operations per image helps.",
        "worse": "Worse: one sequence for all images is better than this policy.",
        "cannot tell": "Cannot tell: the interval contains 0.",
    }[label]
    closed = "" if policy.gap_closed is None else f" It closes {policy.gap_closed:.0%} of the oracle's gain."
    return Verdict(label, f"{what} {measured}{closed}")


def summary(result: PostResult) -> dict[str, Any]:
    """The content of eval.json."""
    return {
        "verdict": asdict(result.verdict),
        "deployment": asdict(Deployment.from_json(result.config["deployment"])),
        "reward": result.config["plan"]["reward"],
        "labels": result.config.get("labels"),
        "images": len(result.images),
        "patients": result.rows[0].to_as_is.groups,
        "rows": [
            {
                "name": row.name,
                "means": {metric: asdict(mean) for metric, mean in row.means.items()},
                "dice_minus_as_is": asdict(row.to_as_is),
                "dice_minus_best_sequence": asdict(row.to_sequence),
                "gap_closed": row.gap_closed,
            }
            for row in result.rows
        ],
        "notes": list(result.notes),
        "fixed_sequence": words(tuple(result.config["fixed_sequence"])),
        "best_threshold": result.config["best_threshold"],
        "data_fingerprint": result.config["data_fingerprint"],
        "minutes": result.minutes,
    }
