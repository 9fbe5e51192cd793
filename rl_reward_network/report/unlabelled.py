"""The section "Unlabelled images" of both reports: reward and ensemble spread on them, and gold where masks exist.

The labelled test images are the reference. Axes: N images; 2 columns, before and after.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rl_reward_network.report import page
from rl_reward_network.report.bootstrap import Estimate, few_patients_note, mean_interval
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.rewards.metrics import dice
from rl_reward_network.rewards.out_of_distribution import OODCheck, own_segmentation, within

IMAGES = 100  # unlabelled images that are evaluated at most, one per series before a second
LESS_SURE = 2.0  # ratio of median spreads from which a note warns
TEST, USED, LEFT_OUT = "labelled test images", "unlabelled, within the limits", "unlabelled, left out"
GOLD = "labels read by the evaluation only"


@dataclass(frozen=True, eq=False)
class JudgedImages:
    """Masks of N images before and after training, judged by the reward network and, where labelled, by the truth.

    Args:
        groups: patient of each image.
        scores, spreads: float64 (N, 2).
        own_scores, own_spreads: float64 (N,), of the network's own segmentation.
        dices: float64 (N, 2), NaN without a true mask.
    """

    groups: tuple[str, ...]
    scores: np.ndarray
    spreads: np.ndarray
    own_scores: np.ndarray
    own_spreads: np.ndarray
    dices: np.ndarray

    def pick(self, chosen: np.ndarray) -> "JudgedImages":
        """The images for which `chosen`, bool (N,), is true."""
        groups = tuple(group for group, is_chosen in zip(self.groups, chosen, strict=True) if is_chosen)
        return JudgedImages(groups, *(getattr(self, name)[chosen] for name in COLUMNS))


COLUMNS = ("scores", "spreads", "own_scores", "own_spreads", "dices")
Row = tuple[str, tuple[np.ndarray, ...]]


def judged_row(
    maps: ForegroundMaps,
    group: str,
    image: np.ndarray,
    masks: tuple[np.ndarray | None, np.ndarray | None],
    truth: np.ndarray | None,
) -> Row:
    """One image of `JudgedImages`.

    Args:
        maps: of the reward network.
        group: patient.
        image: uint8 (H, W, 3).
        masks: before and after, bool (H, W); None, where the model gave none, is an empty mask with score 0.
        truth: bool (H, W), or None.
    """
    drawn = np.stack([np.zeros(image.shape[:2], bool) if mask is None else mask for mask in masks])
    quality = maps.scorer(image).quality(drawn.astype(np.float32))
    scores = np.where([mask is None for mask in masks], 0.0, quality["score"])
    gold = (
        np.full(2, np.nan) if truth is None else np.array([float(dice(mask[None], truth[None])[0]) for mask in drawn])
    )
    own_score, own_spread = own_segmentation(maps, image)
    return group, (scores, quality["spread"], np.array(own_score), np.array(own_spread), gold)


def judged_images(rows: Sequence[Row]) -> JudgedImages:
    """The images of `judged_row`, at least one."""
    groups, columns = zip(*rows, strict=True)
    stacked = (np.stack(column).astype(float) for column in zip(*columns, strict=True))
    return JudgedImages(tuple(groups), *stacked)


@dataclass(frozen=True)
class UnlabelledRow:
    """Means over the patients of some images; numbers are in [0, 1].

    Args:
        name: which images.
        images: their number.
        score, spread, dice: before, after, and after - before; `dice` is None without true masks.
        labelled: images with a true mask.
        own_score: mean score of the network's own segmentation.
        own_spread: median of its spread.
    """

    name: str
    images: int
    score: tuple[Estimate, Estimate, Estimate]
    spread: tuple[Estimate, Estimate, Estimate]
    dice: tuple[Estimate, Estimate, Estimate] | None
    labelled: int
    own_score: Estimate
    own_spread: float


@dataclass(frozen=True)
class UnlabelledSection:
    """The content of the section."""

    rows: tuple[UnlabelledRow, ...]
    notes: tuple[str, ...]

    @property
    def summary(self) -> dict[str, Any]:
        """The entry "unlabelled" of eval.json."""
        return asdict(self) | {"gold": GOLD}


def unlabelled_section(
    tests: JudgedImages, unlabelled: JudgedImages, facts: dict[str, Any], seed: int = 0
) -> UnlabelledSection:
    """The section of a report.

    Args:
        tests: test images of the data.
        unlabelled: images of the unlabelled folder.
        facts: `OODCheck.facts` of the training.
        seed: of the bootstrap.
    """
    limits = facts["smallest_score"], facts["largest_spread"]
    joins = within(unlabelled.own_scores, unlabelled.own_spreads, *limits)
    parts = {TEST: tests, USED: unlabelled.pick(joins), LEFT_OUT: unlabelled.pick(~joins)}
    rows = tuple(_row(name, part, seed) for name, part in parts.items() if part.groups)
    few = (note for name, part in parts.items() if part.groups for note in _few(name, part))
    return UnlabelledSection(rows, (OODCheck(**facts).sentence, *less_sure_note(tests, unlabelled), *few))


def _few(name: str, part: JudgedImages) -> tuple[str, ...]:
    return few_patients_note(len(set(part.groups)), f"patients of the {name}")


def less_sure_note(tests: JudgedImages, unlabelled: JudgedImages) -> tuple[str, ...]:
    """A note where the network's members disagree more on the unlabelled images than on the test images."""
    known, new = (float(np.median(part.own_spreads)) for part in (tests, unlabelled))
    if new <= LESS_SURE * known:
        return ()
    ratio = f"{new / known:.1f} times" if known else "above"
    return (
        f"The network is less sure on the unlabelled images: the spread of its own segmentation is {new:.4f} in the "
        f"median, {ratio} that on the labelled test images ({known:.4f}). Training on its score there may follow its "
        "errors.",
    )


def _row(name: str, part: JudgedImages, seed: int) -> UnlabelledRow:
    labelled = np.isfinite(part.dices).all(axis=1)
    gold = part.pick(labelled)
    return UnlabelledRow(
        name,
        len(part.groups),
        _before_after(part.scores, part.groups, seed),
        _before_after(part.spreads, part.groups, seed),
        _before_after(gold.dices, gold.groups, seed) if gold.groups else None,
        len(gold.groups),
        mean_interval(part.own_scores, part.groups, seed),
        float(np.median(part.own_spreads)),
    )


def _before_after(values: np.ndarray, groups: Sequence[str], seed: int) -> tuple[Estimate, Estimate, Estimate]:
    before, after = values.T
    estimates = [mean_interval(column, groups, seed) for column in (before, after, after - before)]
    return estimates[0], estimates[1], estimates[2]


def section_html(section: UnlabelledSection | None) -> list[str]:
    """HTML of the section; [] without one."""
    if section is None:
        return []
    gold = [row for row in section.rows if row.dice is not None]
    return [
        "<h2>Unlabelled images</h2>",
        "".join(f"<p>Note: {page.text(note)}</p>" for note in section.notes),
        "<p>The reward network's score of the masks before and after training, and the spread of its members: means "
        f"over patients with 95 % intervals. At most {IMAGES} unlabelled images are evaluated.</p>",
        page.table(
            ["images", "number", "score before", "after", "after - before", "spread before", "after"],
            [
                [row.name, row.images, *row.score[:2], row.score[2].signed, *(f"{s.mean:.4f}" for s in row.spread[:2])]
                for row in section.rows
            ],
        ),
        "<p>The network's own segmentation of these images: its score, and the median of its members' spread.</p>",
        page.table(
            ["images", "score", "spread (median)"],
            [[row.name, row.own_score, f"{row.own_spread:.4f}"] for row in section.rows],
        ),
        *_gold(gold),
    ]


def _gold(rows: Sequence[UnlabelledRow]) -> list[str]:
    """HTML: Dice, where there are true masks of unlabelled images."""
    if not any(row.name != TEST for row in rows):
        return ["<p>No unlabelled image has a true mask, so no Dice is known on them.</p>"]
    return [
        f"<p>Gold, Dice with the true masks: {GOLD}.</p>",
        page.table(
            ["images", "with a mask", "Dice before", "after", "after - before"],
            [[row.name, row.labelled, *row.dice[:2], row.dice[2].signed] for row in rows if row.dice],
        ),
    ]
