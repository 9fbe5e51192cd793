"""Compare what was trained with its baselines on test patients, or score masks of any tool, and write the report.

    sa2va-rl evaluate --model_path outputs/sa2va_rl_finetune_*/final_model --split test
    sa2va-rl evaluate --model_path outputs/sa2va_grpo_*/final_model --general refcoco
    sa2va-rl evaluate --predictions FOLDER --data_root DATA

For a model fine-tuned by GRPO (outputs/sa2va_grpo_*/final_model) it is the model before; without --images the results
are added to its model card, too. Model, data, prompts and reward network are those of the run's config.json.

--general says what fine-tuning cost elsewhere: base and fine-tuned model on RefCOCO, RefCOCO+, RefCOCOg or gRefCOCO
(instances.json beside refs(*).p or grefs(*).json), ReasonSeg (a folder of X.jpg and X.json), or questions of your own
(a JSON list of {image, question, mask}; those without a mask are answered in words, which are compared).

--predictions are folders of masks named like their images (PNG, npy, npz), or COCO files; of several the first is the
reference of the others. All labelled images of the data are scored, by default; a missing prediction is an error.
"""

import glob
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from rl_reward_network.cli.app import show_ending
from rl_reward_network.flags import Rare, changed, check_at_least
from rl_reward_network.run import (
    COMPARE_RUN,
    CONFIG,
    FINAL,
    IMPROVE_RUN,
    POST_RUN,
    REWARD_RUN,
    age,
    read_object,
)

REPORTED = tuple(kind.stage for kind in (REWARD_RUN, COMPARE_RUN, IMPROVE_RUN))
OF_RUNS = ("model_path", "general", "images", "base_model", "gpu", "segment_batch")
NOT_GENERAL = ("data_root", "segment_batch", "show_names", "split")
OF_PREDICTIONS = ("only_predicted", "output", "group_regex", "patients_csv", "label")


@dataclass(frozen=True)
class Args:
    """Compare what was trained with its baselines on test patients; or score masks."""

    model_path: tuple[str, ...] = ()
    """The run's final_model folder, or the run; several (a pattern) mean the newest of them."""
    predictions: tuple[Path, ...] = ()
    """Folders of predicted masks, of any tool, or COCO files, to be scored on data_root; of several the first is the
    reference of the others."""
    general: tuple[Path, ...] = ()
    """Sets of referring expressions or questions, which the GRPO run did not train, in place of its test patients."""
    split: Literal["train", "val", "test", "all"] | None = None
    """Patients to evaluate on: of a run test, since those of val decide what is deployed and results on them would be
    biased; predictions are by default scored on all."""
    images: int | None = None
    """At most this many images (of a GRPO run regions), one per series before a second; without it all, but in quick
    mode 80 images of a prompt policy and 120 regions."""
    data_root: Path | None = None
    """Where the data are now, if not where they were in training; the data of the predictions."""
    base_model: str | None = None
    """Where Sa2VA is now, if not where it was in training."""
    gpu: int | None = None
    """Index of the GPU; -1 is the CPU; without it as in training."""
    segment_batch: int | None = None
    """Prompts decoded at once (SEGMENT_BATCH); without it as in training."""
    show_names: bool = False
    """Put the names of images into the report of predictions, those of patients, too, into a policy's, in place of
    their hashes."""
    only_predicted: bool = False
    """Score the images that have predictions, and leave out the others, which are an error otherwise."""
    output: Path | None = None
    """Folder for the report of predictions; by default outputs/predictions_<time>."""
    group_regex: Rare[str | None] = None
    """As in trainings, for the data of the predictions; so are the next two."""
    patients_csv: Rare[str | None] = None
    """A CSV table with the columns image and group, or none."""
    label: Rare[str | None] = None
    """The class that is the mask."""


def main(args: Args) -> None:
    """Evaluate the newest of the named runs, or score predictions, and show the table."""
    check_at_least(args, 1, "images", "segment_batch")
    check_at_least(args, -1, "gpu")
    if bool(args.model_path) == bool(args.predictions):
        raise ValueError("give either --model_path, a run to evaluate, or --predictions, masks to score on --data_root")
    if wrong := changed(args, *(OF_RUNS if args.predictions else OF_PREDICTIONS)):
        other = "--predictions" if args.predictions else "--model_path"
        raise ValueError(f"{wrong[0]} is not for {other}; leave it out")
    if args.predictions:
        return _score(args)
    if args.general and (wrong := changed(args, *NOT_GENERAL)):
        raise ValueError(f"{wrong[0]} is not for --general, which asks about other data; leave it out")
    if args.split not in (None, "test"):
        raise ValueError(f"--split {args.split}: a run is evaluated on test; the other patients trained it or chose it")
    from rl_reward_network.grpo.final_model import grpo_model

    folder = newest(args.model_path)
    final_model = grpo_model(folder)
    stage = None if final_model else _stage(folder)
    if stage in REPORTED:
        raise ValueError(
            f"--model_path {folder}: of a run ({stage}) that has a report of its own, report.html; of new images, score"
            " the masks of sa2va-rl segment by --predictions"
        )
    if args.general:
        return _evaluate_general(final_model, folder, args)
    edits = stage == POST_RUN.stage
    report = _evaluate_grpo(final_model, args) if final_model else _evaluate_policy(folder, args, edits)
    output_dir = report.resolve().parents[2]  # <output_dir>/<run>/evaluation/report.html
    model = None if edits else report.parents[1]  # operations are applied to new images by a comparison's method
    show_ending({"report": report}, output_dir, model, frozen=not final_model)


def _score(args: Args) -> None:
    from rl_reward_network.inputs.config import RunConfig
    from rl_reward_network.segment.score import score_predictions

    if args.data_root is None:
        raise ValueError("--predictions: give --data_root, the data with the true masks")
    data = RunConfig(
        data_root=args.data_root, group_regex=args.group_regex, patients_csv=args.patients_csv, label=args.label
    )
    output = args.output or data.output_dir / f"predictions_{datetime.now():%Y%m%d_%H%M%S}"
    scores, report = score_predictions(
        args.predictions, data, args.split or "all", args.only_predicted, output, args.show_names
    )
    scores.table(narrow=True).show(f"means over {scores.results.patients} patients, {len(scores.results.ids)} images")
    print("\n".join((*(verdict.sentence for verdict in scores.verdicts), *scores.notes)))
    print(f"\nreport: {report}")


def _evaluate_grpo(final_model: Path, args: Args) -> Path:
    from rl_reward_network.grpo.evaluate import run_grpo_evaluation
    from rl_reward_network.grpo.final_model import write_results
    from rl_reward_network.report.before_after import show_changes

    if args.show_names:
        raise ValueError("--show_names: the report of a GRPO run shows no names; leave it out")
    changes, report = run_grpo_evaluation(final_model, args.data_root, args.base_model, args.gpu, args.images)
    if args.images is None and final_model.name == FINAL:
        write_results(final_model, report.with_name("eval.json"))
    show_changes(changes)
    return report


def _evaluate_general(final_model: Path | None, folder: Path, args: Args) -> None:
    from rl_reward_network.grpo.general import run_general_evaluation
    from rl_reward_network.report.before_after import show_changes

    if final_model is None:
        raise ValueError(f"--general {folder}: no run of GRPO, whose weights may forget; leave --general out")
    changes, report = run_general_evaluation(final_model, args.general, args.base_model, args.gpu, args.images)
    show_changes(changes)
    print(f"\nreport: {report}")


def _stage(folder: Path) -> str | None:
    """The stage of a run, given its folder or one in it."""
    configs = [read_object(path) for path in (folder / CONFIG, folder.parent / CONFIG) if path.exists()]
    return next((config["stage"] for config in configs if config.get("stage")), None)


def _evaluate_policy(folder: Path, args: Args, edits: bool) -> Path:
    from rl_reward_network.ppo.evaluate import FROZEN_CALLS, PathOverrides, run_evaluation_stage
    from rl_reward_network.ppo.policy import policy_folder
    from rl_reward_network.ppo.prompt_report import show_comparison

    moved = PathOverrides(args.data_root, args.base_model, args.gpu, args.segment_batch)
    result, report = run_evaluation_stage(policy_folder(folder), moved, args.images, args.show_names, edits)
    show_comparison(result)
    print(f"{FROZEN_CALLS}: {result.config[FROZEN_CALLS]}")
    return report


def newest(paths: tuple[str, ...]) -> Path:
    """The newest of the folders that the paths or patterns name; a ValueError if none does."""
    matches = {Path(match) for path in paths for match in ([path] if Path(path).exists() else glob.glob(path))}
    folders = sorted(matches, key=lambda match: (age(_run_of(match)), match.stat().st_mtime))
    if not folders:
        raise ValueError(f"model_path {' '.join(paths)}: no such folder; train a policy: sa2va-rl prompts quick")
    if len(folders) > 1:
        print(f"{len(folders)} folders match, the newest is evaluated: {folders[-1]}")
    return folders[-1]


def _run_of(match: Path) -> Path:
    """The folder of the run that a model or a checkpoint is of."""
    return match.parent if match.name.startswith((FINAL, "checkpoint-")) else match
