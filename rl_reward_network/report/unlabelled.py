"""The section "Unlabelled images" of both reports: reward and ensemble spread on them, and gold where masks exist.

The labelled test images are the reference. Axes: N images; 2 columns, before and after.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rl_reward_network.report import page
from rl_reward_network.report.statistics import UNIT, Estimate, few_patients_note, mean_interval
from rl_reward_network.report.table import Column, Row, paired_rows, table_of
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
Judged = tuple[str, tuple[np.ndarray, ...]]


def judged_row(
    maps: ForegroundMaps,
    group: str,
    image: np.ndarray,
    masks: tuple[np.ndarray | None, np.ndarray | None],
    truth: np.ndarray | None,
) -> Judged:
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


def judged_images(rows: Sequence[Judged]) -> JudgedImages:
    """The images of `judged_row`, at least one."""
    groups, columns = zip(*rows, strict=True)
    stacked = (np.stack(column).astype(float) for column in zip(*columns, strict=True))
    return JudgedImages(tuple(groups), *stacked)


@dataclass(frozen=True, eq=False)
class UnlabelledRow:
    """Some images; numbers are in [0, 1].

    Args:
        name: which images.
        images: their number.
        before, after: rows with `score`, `spread` and, of the images with a true mask, `dice`.
        labelled: images with a true mask.
        own_score: mean score of the network's own segmentation.
        own_spread: median of its spread.
    """

    name: str
    images: int
    before: Row
    after: Row
    labelled: int
    own_score: Estimate
    own_spread: float

    def change(self, metric: str) -> tuple[Estimate, Estimate, Estimate]:
        """Before, after, and after - before."""
        rows = self.before.estimates, self.after.estimates, self.after.differences["before"]
        before, after, gain = (estimates[metric] for estimates in rows)
        return before, after, gain

    @property
    def summary(self) -> dict[str, Any]:
        """Its entry in eval.json; `dice` is None without true masks."""
        changes = {
            metric: [asdict(estimate) for estimate in self.change(metric)] if metric in self.after.estimates else None
            for metric in ("score", "spread", "dice")
        }
        own = {"labelled": self.labelled, "own_score": asdict(self.own_score), "own_spread": self.own_spread}
        return {"name": self.name, "images": self.images, **changes, **own}


@dataclass(frozen=True)
class UnlabelledSection:
    """The content of the section."""

    rows: tuple[UnlabelledRow, ...]
    notes: tuple[str, ...]

    @property
    def summary(self) -> dict[str, Any]:
        """The entry "unlabelled" of eval.json."""
        return {"rows": [row.summary for row in self.rows], "notes": list(self.notes), "gold": GOLD}


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
    before, after = (
        {"score": part.scores[:, column], "spread": part.spreads[:, column], "dice": part.dices[:, column]}
        for column in (0, 1)
    )
    return UnlabelledRow(
        name,
        len(part.groups),
        *paired_rows(before, after, part.groups, seed),
        int(np.isfinite(part.dices).all(axis=1).sum()),
        mean_interval(part.own_scores, part.groups, seed, bounds=UNIT),
        float(np.median(part.own_spreads)),
    )


def section_html(section: UnlabelledSection | None) -> list[str]:
    """HTML of the section; [] without one."""
    if section is None:
        return []
    name: Column[UnlabelledRow] = ("images", lambda row: row.name)
    judged: list[Column[UnlabelledRow]] = [
        name,
        ("number", lambda row: row.images),
        ("score before", lambda row: row.change("score")[0]),
        ("after", lambda row: row.change("score")[1]),
        ("after - before", lambda row: row.change("score")[2].signed),
        ("spread before", lambda row: f"{row.change('spread')[0].mean:.4f}"),
        ("after", lambda row: f"{row.change('spread')[1].mean:.4f}"),
    ]
    own: list[Column[UnlabelledRow]] = [
        name,
        ("score", lambda row: row.own_score),
        ("spread (median)", lambda row: f"{row.own_spread:.4f}"),
    ]
    return [
        "<h2>Unlabelled images</h2>",
        "".join(f"<p>Note: {page.text(note)}</p>" for note in section.notes),
        "<p>The reward network's score of the masks before and after training, and the spread of its members: means "
        f"over patients with 95 % intervals. At most {IMAGES} unlabelled images are evaluated.</p>",
        table_of(section.rows, judged).html(),
        "<p>The network's own segmentation of these images: its score, and the median of its members' spread.</p>",
        table_of(section.rows, own).html(),
        *_gold([row for row in section.rows if row.labelled]),
    ]


def _gold(rows: Sequence[UnlabelledRow]) -> list[str]:
    """HTML: Dice, where there are true masks of unlabelled images."""
    if all(row.name == TEST for row in rows):
        return ["<p>No unlabelled image has a true mask, so no Dice is known on them.</p>"]
    columns: list[Column[UnlabelledRow]] = [
        ("images", lambda row: row.name),
        ("with a mask", lambda row: row.labelled),
        ("Dice before", lambda row: row.change("dice")[0]),
        ("after", lambda row: row.change("dice")[1]),
        ("after - before", lambda row: row.change("dice")[2].signed),
    ]
    return [f"<p>Gold, Dice with the true masks: {GOLD}.</p>", table_of(rows, columns).html()]
