"""The evaluation of experiment 2: the policy beside thresholds, fixed sequences, greedy choices and the oracle.

Written are eval.json, eval.csv (per image) and report.html.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_reward_network.env.operations import EditedImage, Operations
from rl_reward_network.inputs.loading import RunInputs
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.ppo.deploy import PostPolicy, load_policy_of_run
from rl_reward_network.ppo.evaluate import SPLIT, PathOverrides, check_images, open_as_trained
from rl_reward_network.ppo.operations import PostPlan, edited_images, post_samples, rewarded_by
from rl_reward_network.ppo.policy import choose_operations
from rl_reward_network.ppo.search import greedy, ridge_sequences, words
from rl_reward_network.ppo.settings import PPOSettings
from rl_reward_network.report import page
from rl_reward_network.report.deployment import Deployment, labels_sentence
from rl_reward_network.report.overlays import BLUE, GREEN, ORANGE, picture
from rl_reward_network.report.statistics import INTERVALS, few_patients_note, is_no_gap, sign_of
from rl_reward_network.report.table import (
    ORACLE,
    Column,
    Results,
    Row,
    Verdict,
    change_interval,
    make_row,
    metric_columns,
    p_words,
    percent,
    policy_verdict,
    table_of,
)
from rl_reward_network.reward_training.stage import check_no_leak
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.rewards.metrics import METRICS, mask_metrics
from rl_reward_network.run import REWARD_NET

AS_IS, THRESHOLD, SEQUENCE, NET = "mask as it is", "best threshold", "best fixed sequence", "argmax of the reward net"
RIDGE, POLICY, DEPLOYED = "ridge over sequences", "PPO", "deployed"


@dataclass(frozen=True, eq=False)
class PostResult:
    """The content of the report.

    Args:
        results: the rows; the criterion is Dice.
        verdict: on PPO against the best fixed sequence.
        config: of the run's final_model.
        images: test images.
        masks: row -> mask of each image, bool (H, W).
        operations: row -> operations of each image, in words; without the threshold, which has none.
        notes: limits of the data.
        minutes: of the evaluation.
    """

    results: Results
    verdict: Verdict
    config: dict[str, Any]
    images: tuple[EditedImage, ...]
    masks: Mapping[str, Sequence[np.ndarray]]
    operations: Mapping[str, Sequence[str]]
    notes: tuple[str, ...]
    minutes: float

    @property
    def deployment(self) -> Deployment:
        """What is deployed."""
        return Deployment.from_json(self.config["deployment"])

    def closed(self, row: Row) -> float | None:
        """Share of the oracle's gain over the best fixed sequence; None if that is negligible."""
        return self.results.gap_closed(row, SEQUENCE, ORACLE)


def run_post_evaluation(final_model: Path, where: PathOverrides, images: int | None = None) -> tuple[PostResult, Path]:
    """Measure the policy and everything beside it on test images, and write `<run>/evaluation/`.

    Args:
        final_model: folder of a policy, in its run folder.
        where: paths and devices that differ from training.
        images: at most so many test images, one per series before a second; the folder is then called
            `evaluation_<number>`. None is all.

    Returns:
        The result, and the path of report.html.

    Raises:
        ValueError: no labelled test image, or data or model differ from training.
    """
    result = evaluate_post(final_model, where, images)
    flags = {"model_path": final_model, "images": images, "data_root": where.data_root, "gpu": where.gpu}
    data, model = f"{result.config['images']} images", f"{Path(result.config['inputs']['model_path']).name}"
    run = final_model.parent
    origin = page.made_by("evaluate", flags, data, model, result.config["version"], run / "logs")
    folder = run / ("evaluation" if images is None else f"evaluation_{len(result.images)}")
    return result, _write_report(folder, result, origin)


def evaluate_post(final_model: Path, where: PathOverrides, images: int | None = None) -> PostResult:
    """The result of `run_post_evaluation`, which writes it."""
    check_images(images)
    start, run = time.perf_counter(), final_model.parent
    policy, deployed = load_policy_of_run(final_model)
    config = deployed.config
    inputs = open_as_trained(config, where, run)
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
    results = measured({name: masks[name] for name in order if name in masks}, test, plan.ppo.seed)
    verdict = verdict_of(results, over_usual(test, chosen[POLICY]))
    few = (*few_patients_note(results.patients), *Deployment.from_json(config["deployment"]).notes)
    notes = (*_notes(config, maps is not None), *few)
    in_words = {name: [words(operations) for operations in of] for name, of in chosen.items()}
    minutes = (time.perf_counter() - start) / 60
    return PostResult(results, verdict, config, tuple(test), masks, in_words, notes, minutes)


def _notes(config: dict[str, Any], network: bool) -> tuple[str, ...]:
    """What rewarded PPO and which labels chose what; whether there is a reward network."""
    reward = config["plan"]["reward"]
    used = (labels_sentence(config["labels"]),) if "choice" in config["deployment"] else ()
    none = () if network else ("No reward network was given, so there is no row for its choice.",)
    return (rewarded_by(reward, network), *used, *none)


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
    check_no_leak(inputs.split, network, path, samples=inputs.samples)
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


def measured(masks: Mapping[str, Sequence[np.ndarray]], test: Sequence[EditedImage], seed: int) -> Results:
    """The rows of labelled test images, from the masks of each row."""
    groups = [image.group_id for image in test]
    values: dict[str, dict[str, np.ndarray]] = {}
    for name, of in masks.items():
        pairs = [(mask, image.truth) for mask, image in zip(of, test, strict=True) if image.truth is not None]
        columns = [mask_metrics(*pair) for pair in pairs]
        values[name] = {metric: np.array([column[metric] for column in columns]) for metric in METRICS}
    rows = []
    for name, of_row in values.items():
        less = {other: {"dice": of_row["dice"] - values[other]["dice"]} for other in (AS_IS, SEQUENCE)}
        rows.append(make_row(name, of_row, less, groups, seed))
    return Results(tuple(rows), tuple((image.sample_id, image.group_id) for image in test), "dice")


def over_usual(test: Sequence[EditedImage], chosen: Sequence[Operations]) -> np.ndarray:
    """float64 (N,): Dice of a policy's sequences less that of the one that it chooses most often, for all images."""
    usual = Counter(chosen).most_common(1)[0][0]
    return np.array([image.dice(each) - image.dice(usual) for image, each in zip(test, chosen, strict=True)])


def verdict_of(results: Results, over_usual: np.ndarray) -> Verdict:
    """The verdict on PPO against the best fixed sequence and the mask as it is; "no gap" where a sequence is enough.

    Args:
        results: all rows.
        over_usual: float (N,), Dice of PPO less that of its most frequent sequence for all images. Without a gain over
            it PPO does not choose by the image, whatever its reward and however bad the sequence is that the same
            reward has found.
    """
    policy, groups = results.row(POLICY), [group for _, group in results.ids]
    gain = results.difference(policy, SEQUENCE)
    gap, closed = results.difference(results.row(ORACLE), SEQUENCE), results.gap_closed(policy, SEQUENCE, ORACLE)
    enough = f"a fixed sequence is enough, the oracle gains {gap.signed} over it" if is_no_gap(gap) else ""
    rival = ""
    if sign_of(policy.values["dice"] - results.row(AS_IS).values["dice"], groups) <= 0:
        rival = f"the mask as it is (PPO minus it: {results.difference(policy, AS_IS).signed} Dice)"
    elif sign_of(over_usual, groups) <= 0:
        rival = f"its most frequent sequence for all images ({change_interval('dice', over_usual, groups).signed} Dice)"
    measured = f"PPO minus best fixed sequence on {gain.groups} test patients: {gain.signed} Dice."
    more = "" if closed is None else f" It closes {closed:.0%} of the oracle's gain."
    return policy_verdict(gain, results.p(SEQUENCE)[POLICY], "sequence", "operations", measured, enough, rival, more)


def _write_report(folder: Path, result: PostResult, origin: page.Origin) -> Path:
    """Write the files, each whole or not at all; returns the path of report.html, written last."""

    def cells(row: Row, number: int) -> list[object]:
        operations = result.operations.get(row.name)
        return [row.name, f"{row.values['dice'][number]:.6f}", operations[number] if operations else ""]

    head: list[object] = ["sample_id", "group_id", "row", "dice", "operations"]
    lines = [head, *result.results.per_image(cells)]
    return page.write_report(folder, _page(result, origin), _summary(result), {"eval.csv": page.csv_text(lines)})


def _summary(result: PostResult) -> dict[str, Any]:
    """The content of eval.json."""
    results = result.results
    p = {other: results.p(other) for other in (AS_IS, SEQUENCE)}
    return {
        "verdict": asdict(result.verdict),
        "deployment": asdict(result.deployment),
        "reward": result.config["plan"]["reward"],
        "labels": result.config.get("labels"),
        "images": len(result.images),
        "patients": results.patients,
        "rows": [
            {
                "name": row.name,
                "means": row.means(),
                "dice_minus_as_is": asdict(results.difference(row, AS_IS)),
                "p_minus_as_is": p[AS_IS].get(row.name),
                "dice_minus_best_sequence": asdict(results.difference(row, SEQUENCE)),
                "p_minus_best_sequence": p[SEQUENCE].get(row.name),
                "gap_closed": result.closed(row),
            }
            for row in results.rows
        ],
        "notes": list(result.notes),
        "fixed_sequence": words(tuple(result.config["fixed_sequence"])),
        "best_threshold": result.config["best_threshold"],
        "data_fingerprint": result.config["data_fingerprint"],
        "minutes": result.minutes,
    }


def _page(result: PostResult, origin: page.Origin) -> page.Page:
    results, deployment = result.results, result.deployment
    deployed = f"Deployed: {deployment.words(SEQUENCE, f'the {AS_IS}')}, because {deployment.reason}."
    fixed = f"Best fixed sequence: {deployment.fixed_by}. Best threshold: {result.config['best_threshold']:g}."
    name: Column[Row] = ("row", lambda row: row.name)
    of_as_is, of_sequence = results.p(AS_IS), results.p(SEQUENCE)
    short: list[Column[Row]] = [
        name,
        ("Dice", results.value),
        ("less mask as it is", lambda row: results.difference(row, AS_IS).signed),
        ("p", lambda row: p_words(of_as_is.get(row.name))),
        ("less best fixed sequence", lambda row: results.difference(row, SEQUENCE).signed),
        ("p", lambda row: p_words(of_sequence.get(row.name))),
        ("gap closed", lambda row: percent(result.closed(row))),
    ]
    counts = {name: Counter(result.operations[name]) for name in (DEPLOYED, ORACLE)}
    most = (counts[DEPLOYED] + counts[ORACLE]).most_common(15)
    return page.Page(
        f"Post-processing: {result.verdict.label}",
        "Which operations suit which mask?",
        f"{deployed} {fixed}",
        result.verdict.sentence,
        "Best, median and worst of the deployed choice, by Dice.",
        [_picture(result, title, number) for title, number in results.picks(DEPLOYED).items()],
        f"<p>{len(results.ids)} test images; means over {results.patients} patients with {INTERVALS}. p: adjusted for "
        "all rows. Oracle: greedy by the true mask, with the same operations and steps. Gap closed: share of the "
        f"oracle's gain over the best fixed sequence.</p>{table_of(results.rows, short).html()}",
        result.notes,
        {
            "All metrics": table_of(results.rows, [name, *metric_columns(METRICS, lambda row: row)]).html(),
            "Operations": page.table(
                ["operations", *counts], [[one, *(count[one] for count in counts.values())] for one, _ in most], "wrap"
            ),
        },
        origin=origin,
    )


def _picture(result: PostResult, title: str, number: int) -> str:
    """HTML of one test image: untouched, with the truth, the mask as it is, the deployed one and the oracle's."""
    edited = result.images[number]
    masks = [("true mask", edited.truth, GREEN)]
    for name, colour in ((AS_IS, ORANGE), (DEPLOYED, BLUE), (ORACLE, GREEN)):
        dice = result.results.row(name).values["dice"][number]
        caption = f"{name}: Dice {dice:.3f}; {result.operations[name][number]}"
        masks.append((caption, result.masks[name][number], colour))
    colours = {"true mask and oracle": GREEN, AS_IS: ORANGE, DEPLOYED: BLUE}
    return picture(f"{title}: {edited.sample_id}", edited.guide.image, masks, colours)


def show_operations(result: PostResult) -> None:
    """Print the rows of experiment 2, and the verdict."""
    results = result.results
    columns: list[Column[Row]] = [
        ("", lambda row: row.name),
        ("Dice [95 %]", results.value),
        ("-sequence", lambda row: results.difference(row, SEQUENCE).point("+")),
        ("closed", lambda row: percent(result.closed(row))),
    ]
    table_of(results.rows, columns).show("mean Dice over patients, less best fixed sequence")
    print("\n".join((result.verdict.sentence, *result.notes)))
