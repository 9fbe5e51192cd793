"""Simulated worlds in which nothing is better than the model as it is: how often is something called better?

    python -m benchmarks.null_worlds --worlds 100     # as in the documents: two minutes on a free core

Rows: 11 rows against one base, by `max_t` alone; false: any p <= 0.05. Comparison: methods less the model as it is, on
test patients; headline and choice are those of `run_compare.sh`; false: the report names a best method. Deployment:
fixed prompts and a policy on labelled patients outside the test split, by the decision of step 2; false: anything but
the model as it is is deployed. Power: how often a single row that truly gains 0.02 is found.

Differences have mean 0 and a standard deviation over patients of 0.05 Dice; half of the variance is common to all rows.
In comparison and deployment some rows change few images or none, and images of a patient are similar. The kinds:
heavy tails (Student's t of 3 degrees); most patients gain a little and few lose much, exponential or lognormal; a loss
in 20 % of the patients; one in 5 %, of each row by itself or of the patient in all rows. No rule holds the last one
where the loss is not among the patients: reports say so by the rule of three.

The second table is on `sa2va-rl improve`: eight candidates, each like a row, and whether any is deployed. Old: the one
that is best on all patients, by Student's interval above 0 on the same ones. Halves: the best of one half, tested on
the other. Folds: `decide`, each patient by the candidate that is best on the other folds. Power: gains that grow from
candidate to candidate to 0.04.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy import stats

from rl_reward_network.cli.app import run
from rl_reward_network.methods.improve import decide as decide_improvement
from rl_reward_network.methods.methods import METHODS
from rl_reward_network.methods.table import MethodResult, TestImages, choose, make_table, verdict_lines
from rl_reward_network.methods.view import BASE
from rl_reward_network.report.deployment import Cost, decide, out_of_fold
from rl_reward_network.report.statistics import LEVEL, max_t, sign_of

VAL_PATIENTS = 24
ROWS = 11  # also prompts of step 2
LOOKS = 8
SPREAD = 0.05  # Dice, standard deviation over patients of a row's difference
GAIN, STAGE_GAIN = 0.02, 0.04  # Dice, of the row that is to be found, of a training at its end
COMMON = 0.5  # share of the variance that all rows have in common
TOUCHED = (1.0, 1.0, 0.2, 0.0)  # share of the images that a row changes; the rows take turns

Noise = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def losses(share: float, size: Noise) -> Noise:
    """Noise of mean 0 and variance 1: a share of the patients loses as much as `size`, the others gain alike."""

    def noise(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.where(rng.random(shape) < share, -size(rng, shape), 0.0)

    sample = noise(np.random.default_rng(0), (10**6,))
    mean, std = sample.mean(), sample.std()
    return lambda rng, shape: (noise(rng, shape) - mean) / std


def exponential(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Sizes of losses, of mean 1."""
    return rng.exponential(1, shape)


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal noise."""
    return rng.normal(size=shape)


HEAVY = losses(1, lambda rng, shape: rng.standard_t(3, shape))
RARE = losses(0.05, lambda rng, shape: rng.normal(1, 0.1, shape))
KINDS: dict[str, tuple[Noise, Noise]] = {  # noise that all rows have in common, and that of each row
    "normal": (normal, normal),
    "heavy tails": (HEAVY, HEAVY),
    "exponential losses": (losses(1, exponential),) * 2,
    "lognormal losses": (losses(1, lambda rng, shape: rng.lognormal(size=shape)),) * 2,
    "20 % lose": (losses(0.2, exponential),) * 2,
    "5 % lose, each row": (normal, RARE),
    "5 % lose, in all rows": (RARE, normal),
}
PATIENTS = (8, 12, 36, 100)


@dataclass(frozen=True)
class Args:
    """Count false verdicts in simulated worlds without a difference."""

    worlds: int = 1000
    """Of each kind; a third as many of comparisons and deployments, a fifth of these for the power."""
    seed: int = 0


def simulate(args: Args) -> None:
    """Print false verdicts and power by kind of world, and the worst of them."""
    questions = {"rows": finds, "comparison": has_best, "deployment": deploys}
    rules = {"old": keeps_by_interval, "halves": keeps_by_halves, "folds": keeps}
    worst: dict[str, list[tuple[float, str]]] = {"error": [], "power": []}
    for asked in (questions, rules):
        columns = [f"{name}: {what}" for name in asked for what in ("false", "power")]
        table = Table("differences", "patients", *columns, box=box.MARKDOWN)
        for kind, patients in track([(kind, patients) for kind in KINDS for patients in PATIENTS], "worlds"):
            cells = []
            for name, found in asked.items():
                worlds = max(args.worlds // 3, 1) if found in (has_best, deploys) else args.worlds
                false, true = (
                    np.mean([found(np.random.default_rng([args.seed, one]), kind, patients, gain) for one in range(of)])
                    for gain, of in ((False, worlds), (True, max(worlds // 5, 1)))
                )
                cells += [f"{false:.1%}", f"{true:.0%}"]
                if name not in ("old", "halves"):
                    worst["error"].append((float(false), f"{name}, {kind}, {patients} patients"))
                    worst["power"].append((float(true), f"{name}, {kind}, {patients} patients"))
            table.add_row(kind, str(patients), *cells)
        Console(width=160).print(table)
    print(f"power: {GAIN} among {ROWS} rows, {len(METHODS) - 1} methods or {ROWS} prompts; {STAGE_GAIN} of a stage")
    wrong = sorted(worst["error"], reverse=True)
    held = sum(share <= LEVEL for share, _ in wrong)
    three = "; ".join(f"{share:.1%} ({where})" for share, where in wrong[:3])
    print(f"worst error: {three}; {held} of {len(wrong)} are at most 5 %")
    least, most = (f"{share:.0%} ({where})" for share, where in (min(worst["power"]), max(worst["power"])))
    print(f"power: {least} to {most}")


def differences(rng: np.random.Generator, kind: str, rows: int, patients: int) -> np.ndarray:
    """Differences of mean 0, float64 (rows, patients)."""
    common, own = KINDS[kind]
    return SPREAD * (np.sqrt(COMMON) * common(rng, (1, patients)) + np.sqrt(1 - COMMON) * own(rng, (rows, patients)))


def of_images(rng: np.random.Generator, of_patients: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """The differences of one to six images per patient, float64 (rows, images), some without any; and the patients."""
    groups = np.repeat(np.arange(of_patients.shape[1]), rng.integers(1, 7, of_patients.shape[1]))
    values = of_patients[:, groups] + 0.5 * SPREAD * rng.normal(size=(len(of_patients), len(groups)))
    touched = np.resize(TOUCHED, len(values))[:, None] > rng.random(values.shape)
    return values * touched, [f"p{group:03d}" for group in groups]


def finds(rng: np.random.Generator, kind: str, patients: int, gain: bool) -> bool:
    """Whether `max_t` calls any of `ROWS` rows different; with a gain, whether it finds the first."""
    rows = differences(rng, kind, ROWS, patients)
    rows[0] += GAIN * gain
    signs = max_t(rows, [f"p{number:03d}" for number in range(patients)]).signs
    return bool(signs[0] > 0 if gain else signs.any())


def has_best(rng: np.random.Generator, kind: str, patients: int, gain: bool) -> bool:
    """Whether a comparison names a best method; with a gain, whether it finds the first to be better."""
    (test, groups), (val, val_groups) = (
        of_images(rng, differences(rng, kind, len(METHODS) - 1, count)) for count in (patients, VAL_PATIENTS)
    )
    test[0] += GAIN * gain
    val[0] += GAIN * gain
    images = TestImages(tuple(val_groups), tuple(map(str, range(len(groups)))), tuple(groups))
    base_test, base_val = rng.normal(0.7, 0.1, len(groups)), rng.normal(0.7, 0.1, len(val_groups))
    results = {BASE: [_result(BASE, base_val, base_test)]}
    for method, on_val, on_test in zip(METHODS[1:], val, test, strict=True):
        results[method.name] = [_result(method.name, base_val + on_val, base_test + on_test)]
    rows = make_table(results, images)
    choice = choose(rows, images)
    says = verdict_lines(rows, choice, images)[0].startswith("Chosen ")
    return METHODS[1].name in choice.better if gain else says


def _result(method: str, val: np.ndarray, test: np.ndarray) -> MethodResult:
    return MethodResult(method, 0, BASE, None, tuple(val.tolist()), {"dice": tuple(test.tolist())}, 1.0, Cost())


def deploys(rng: np.random.Generator, kind: str, patients: int, gain: bool) -> bool:
    """Whether step 2 deploys anything but the default prompt, index 0.

    Its policy chooses, per image, one of the three prompts that are best on the patients it has seen.
    """
    gains, groups = of_images(rng, differences(rng, kind, ROWS, patients))
    gains[0] = 0
    gains[1] += GAIN * gain
    values = gains + rng.normal(0.7, 0.1, len(groups))
    names = np.array(groups)

    def policy(held_out: frozenset[str], indices: np.ndarray) -> np.ndarray:
        seen = ~np.isin(names, list(held_out))
        best = np.argsort(-values[:, seen].mean(axis=1))[:3]
        return np.asarray(values[rng.choice(best, len(indices)), indices])

    return decide(values, out_of_fold(groups, policy), groups).choice != "as it is"


def looks(rng: np.random.Generator, kind: str, patients: int, gain: bool) -> tuple[np.ndarray, list[str]]:
    """Gains at the looks of a training, float64 (1 + LOOKS, patients), the first of which is 0; and the patients."""
    gains = differences(rng, kind, LOOKS, patients) + gain * STAGE_GAIN * np.linspace(0, 1, LOOKS)[:, None]
    return np.vstack([np.zeros((1, patients)), gains]), [f"p{number:03d}" for number in range(patients)]


def keeps(rng: np.random.Generator, kind: str, patients: int, gain: bool) -> bool:
    """Whether `improve` deploys a candidate."""
    gains, names = looks(rng, kind, patients, gain)
    return decide_improvement(gains, names, range(len(gains)))[0] != 0


def keeps_by_halves(rng: np.random.Generator, kind: str, patients: int, gain: bool) -> bool:
    """Whether the look that is best on one half of the patients is better on the other."""
    gains, names = looks(rng, kind, patients, gain)
    half = patients // 2
    return sign_of(gains[gains[:, :half].mean(axis=1).argmax(), half:], names[half:]) > 0


def keeps_by_interval(rng: np.random.Generator, kind: str, patients: int, gain: bool) -> bool:
    """The rule until 1.0.0rc1: the best look has an interval above 0 on the patients that chose it."""
    gains, _ = looks(rng, kind, patients, gain)
    best = gains[gains.mean(axis=1).argmax()]
    return bool(best.any() and stats.ttest_1samp(best, 0).confidence_interval().low > 0)


if __name__ == "__main__":
    run(simulate, Args)
