"""The score of predicted masks of any tool, and of several tools their paired differences on the same images."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from rl_reward_network import __version__
from rl_reward_network.data.annotations import phrase_key
from rl_reward_network.data.items import Sample, first_names
from rl_reward_network.data.splits import select
from rl_reward_network.data_import.write import import_notes
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import images_summary, own_format, read_samples, split_samples
from rl_reward_network.report import page
from rl_reward_network.report.overlays import AFTER, BEFORE, TRUTH, draw_difference, legend, picture
from rl_reward_network.report.statistics import Estimate, few_patients_note
from rl_reward_network.report.table import (
    TITLES,
    Column,
    Results,
    Row,
    Table,
    Verdict,
    gain_verdict,
    make_row,
    table_of,
    word,
)
from rl_reward_network.rewards.metrics import empty_rules, mask_metrics
from rl_reward_network.segment.predictions import Predictions, read_predictions

ALL, TRAIN = "all", "train"
PICTURED, FOLDED = 3, 6  # images with the lowest Dice, and further ones that are folded
PER_IMAGE = "predictions_eval.csv"


@dataclass(frozen=True, eq=False)
class Scores:
    """What several predictions are worth on the same images; the first is the reference of the others."""

    results: Results  # a row for each, by its name
    notes: tuple[str, ...]

    @cached_property
    def p(self) -> dict[str, float]:
        """Row -> p-value of its difference in Dice to the first, adjusted for all rows."""
        return self.results.p(self.results.rows[0].name)

    def change(self, row: Row, metric: str) -> Estimate:
        """The row's difference to the first."""
        return row.differences[self.results.rows[0].name][metric]

    def word(self, row: Row) -> str:
        """better, worse or cannot tell: by Dice, than the first."""
        return word("dice", self.change(row, "dice").mean, self.p[row.name])

    @property
    def verdicts(self) -> list[Verdict]:
        """One for each further row; of a single row its Dice and its failures."""
        first, *others = self.results.rows
        of = f"{len(self.results.ids)} images of {self.results.patients} patients"
        missed = int(first.values["failure"].sum())
        alone = f"Dice {first.estimates['dice']} on {of}; {missed} of them below 0.1."
        return [
            gain_verdict("dice", self.change(row, "dice"), self.p[row.name], f"{row.name} - {first.name}, Dice")
            for row in others
        ] or [Verdict("scored", alone)]

    def table(self, narrow: bool = False) -> Table:
        """A line for each metric: the mean of each row, and the differences to the first with the verdict on Dice.

        For a terminal, `narrow` leaves the intervals of several means out.
        """
        first, *others = self.results.rows

        def means(row: Row) -> Column[str]:
            short = narrow and bool(others)
            return row.name, lambda metric: row.estimates[metric].point() if short else row.estimates[metric]

        def changes(row: Row) -> list[Column[str]]:
            title = f"{row.name} - {first.name}"
            return [
                (title, lambda metric: self.change(row, metric).signed),
                ("", lambda metric: self.word(row) if metric == "dice" else ""),
            ]

        columns: list[Column[str]] = [("metric", lambda metric: TITLES[metric]), *map(means, self.results.rows)]
        return table_of(first.estimates, [*columns, *(column for row in others for column in changes(row))])


def score_predictions(
    sources: Sequence[Path], data: RunConfig, split: str, only_predicted: bool, output: Path, show_names: bool = False
) -> tuple[Scores, Path]:
    """Score folders of masks, or COCO files, on the labelled images of a split, and write the report into `output`.

    `split` is "train", "val", "test" or "all"; with `only_predicted` images that lack a prediction are left out, else
    they are an error. Returns the path of report.html, too. ValueError for data or predictions that cannot be read, or
    do not fit each other.
    """
    given, data = data.data_root, own_format(data)
    samples = read_samples(data.data_root, data.group_regex, data.bit_depth)
    _check_one_mask(samples, data.data_root)
    predictions = [read_predictions(source, samples, data.data_root, given) for source in sources]
    scored, notes = _scored(samples, predictions, split, only_predicted, data)
    names = _names_of(sources)
    values = {name: _measure(scored, one, name) for name, one in zip(names, predictions, strict=True)}
    first, groups = values[names[0]], [sample.group_id for sample in scored]
    rows = []
    for name, columns in values.items():
        changes = {metric: column - first[metric] for metric, column in columns.items()}
        rows.append(make_row(name, columns, {} if columns is first else {names[0]: changes}, groups))
    results = Results(tuple(rows), tuple((sample.sample_id, sample.group_id) for sample in scored), "dice")
    notes += [*few_patients_note(results.patients, "patients"), *import_notes(data.data_root, samples)]
    notes += [note for one in predictions for note in one.notes]
    scores = Scores(results, tuple(notes))
    flags = {"predictions": tuple(sources), "data_root": given, "split": split, "only_predicted": only_predicted}
    summary = f"{given.name}: {images_summary(samples, data.data_root)}, split {split}"
    origin = page.made_by("evaluate", flags, summary, ", ".join(names), __version__, output / "logs")
    named = {sample.sample_id: sample.image_path.name if show_names else sample.sample_id for sample in scored}
    return scores, _write(output, scores, predictions, scored, named, origin)


def _check_one_mask(samples: Sequence[Sample], root: Path) -> None:
    if len({sample.image_path for sample in samples}) < len(samples):
        phrases = sorted({phrase_key(sample.text) for sample in samples})
        raise ValueError(
            f"{root / 'annotations.json'}: text holds {len(phrases)} phrases ({', '.join(phrases[:3])}), but a folder "
            "has one mask an image; name data of one class (sa2va-rl data import --label CLASS)"
        )


def _scored(
    samples: Sequence[Sample], predictions: Sequence[Predictions], split: str, only_predicted: bool, data: RunConfig
) -> tuple[list[Sample], list[str]]:
    """The images to score, and what is to be said of those left out."""
    labelled = [sample for sample in samples if sample.labelled]
    if split != ALL:
        parts = split_samples(data, samples)
        apart = {group for part in ("val", "test") for group in parts.groups[part]}
        train = [sample for sample in labelled if sample.group_id not in apart]
        labelled = train if split == TRAIN else select(labelled, parts, split)
    if not labelled:
        raise ValueError(f"{data.data_root}: no image of the split {split} has a mask; annotate some, or --split all")
    notes, scored = [], labelled
    for one in predictions:
        if not (missing := [sample for sample in labelled if sample.sample_id not in one.masks]):
            continue
        names = first_names(sample.image_path.name for sample in missing)
        if not only_predicted:
            raise ValueError(
                f"--predictions {one.source}: {len(missing)} of {len(labelled)} images have no prediction ({names}); "
                "predict them, or score fewer: --split train, val or test, or --only_predicted"
            )
        notes.append(f"{one.source}: {len(missing)} of {len(labelled)} images have no prediction and are left out.")
        scored = [sample for sample in scored if sample.sample_id in one.masks]
    if not scored:
        raise ValueError(f"{data.data_root}: no image of the split {split} has a mask and predictions; --split all")
    return scored, notes


def _names_of(sources: Sequence[Path]) -> list[str]:
    """A name for each source: that of its folder, or as much of its path as tells it from the others."""
    for parts in range(1, max(len(source.resolve().parts) for source in sources)):
        wholes = [one.with_suffix("") if one.is_file() else one for one in map(Path.resolve, sources)]
        names = ["/".join(whole.parts[-parts:]) for whole in wholes]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"--predictions {' '.join(map(str, sources))}: a folder is given twice; name different ones")


def _measure(samples: Sequence[Sample], predictions: Predictions, name: str) -> dict[str, np.ndarray]:
    """Metric -> float64 (N,)."""

    def metrics(sample: Sample) -> dict[str, float]:
        return mask_metrics(predictions.masks[sample.sample_id](sample.size), _truth(sample))

    with ThreadPoolExecutor() as threads:
        measured = list(tqdm(threads.map(metrics, samples), f"scoring {name}", len(samples), unit="image", leave=False))
    return {metric: np.array([of_image[metric] for of_image in measured]) for metric in measured[0]}


def _truth(sample: Sample) -> np.ndarray:
    truth = sample.load_mask()
    assert truth is not None
    return truth


# ---- report ---------------------------------------------------------------------------------------------------------


def worst(scores: Scores) -> list[int]:
    """Numbers of the images with the lowest Dice of the last row, the worst first."""
    return [
        int(number) for number in np.argsort(scores.results.rows[-1].values["dice"], kind="stable")[: PICTURED + FOLDED]
    ]


def _write(
    output: Path,
    scores: Scores,
    predictions: Sequence[Predictions],
    samples: Sequence[Sample],
    named: Mapping[str, str],
    origin: page.Origin,
) -> Path:
    results, metrics = scores.results, list(scores.results.rows[0].values)
    names = [row.name for row in results.rows]
    pictures = [_picture(scores, predictions, samples[number], number, named) for number in worst(scores)]
    sources = {row.name: one.source for row, one in zip(results.rows, predictions, strict=True)}
    sentence = " ".join(verdict.sentence for verdict in scores.verdicts)
    whose = f"{len(results.ids)} images of {results.patients} patients"
    report = page.Page(
        "Scores of predicted masks",
        "How good are these masks?",
        f"Scored: {' and '.join(sources)}, on {whose}.",
        sentence,
        f"The images with the lowest Dice of {results.rows[-1].name}. Errors: blue is missed, orange is false.",
        pictures[:PICTURED],
        f"<p>Means over patients, with 95 % intervals over patients. {page.text(empty_rules())}"
        + " The verdict is on Dice alone." * (len(results.rows) > 1)
        + f"</p>{scores.table().html()}",
        scores.notes,
        {"More images with a low Dice": "".join(pictures[PICTURED:])},
        settings={name: os.path.relpath(source, output) for name, source in sources.items()},
        origin=origin,
        legend=legend({"truth": TRUTH, **dict.fromkeys(names[:-1], BEFORE), names[-1]: AFTER}),
        banner="".join(few_patients_note(results.patients, "patients")),
    )
    lines = results.per_image(lambda row, n: [row.name, *page.digits(row.values[metric][n] for metric in metrics)])
    lines = [[named[str(sample)], *rest] for sample, *rest in lines]
    table = page.csv_text([["sample_id", "group_id", "predictions", *metrics], *lines])
    return page.write_report(output, report, _summary(scores), {PER_IMAGE: table})


def _summary(scores: Scores) -> dict[str, Any]:
    """The content of eval.json."""
    results = scores.results
    rows = [
        {
            "name": row.name,
            "means": row.means(),
            "differences": {
                metric: asdict(change) for changes in row.differences.values() for metric, change in changes.items()
            },
            **({"p": scores.p[row.name], "verdict": scores.word(row)} if row.differences else {}),
        }
        for row in results.rows
    ]
    return {
        "verdict": [asdict(verdict) for verdict in scores.verdicts],
        "criterion": results.criterion,
        "images": len(results.ids),
        "patients": results.patients,
        "rows": rows,
        "notes": list(scores.notes),
    }


def _picture(
    scores: Scores, predictions: Sequence[Predictions], sample: Sample, number: int, named: Mapping[str, str]
) -> str:
    """HTML of one image: untouched, the true mask, that of each prediction, and the errors of the last."""
    rows, image, truth = scores.results.rows, sample.load_image(), _truth(sample)
    colours = [BEFORE] * (len(rows) - 1) + [AFTER]
    masks = [("truth", truth, TRUTH)]
    for row, one, colour in zip(rows, predictions, colours, strict=True):
        caption = f"{row.name}: Dice {row.values['dice'][number]:.3f}"
        masks.append((caption, one.masks[sample.sample_id](sample.size), colour))
    difference = draw_difference(image, truth, masks[-1][1])
    title = f"{named[sample.sample_id]}: Dice {rows[-1].values['dice'][number]:.3f}"
    return picture(title, image, masks, more=[(f"errors of {rows[-1].name}", difference)])
