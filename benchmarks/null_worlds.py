"""Simulated worlds in which nothing is better than the model as it is: how often is something called better?

    python -m benchmarks.null_worlds

Comparison: methods less the model as it is, on test patients; headline and choice are those of `run_compare.sh`. False
best: the report names a best road. Deployment: fixed prompts and a policy on labelled patients outside the test split,
by the decision of step 2. False deployment: of anything but the model as it is.

Differences have mean 0, a standard deviation over patients of 0.05 Dice, and the kind of real tables: tails are heavy
(Student's t of 3 degrees), rows have half of their variance in common, some change few images or none, and images of a
patient are similar. The last lines are the largest counts among these worlds. Skewed worlds show a limit of the test,
which assumes that a patient's difference is as likely its negative: rows there win a little on most patients and lose
much on few. Power: how often a single row that truly gains 0.02 is found.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rl_reward_network.cli.app import run
from rl_reward_network.methods.measure import MethodResult
from rl_reward_network.methods.methods import METHODS
from rl_reward_network.methods.table import TestImages, choose, make_table, verdict_lines
from rl_reward_network.methods.view import BASE
from rl_reward_network.report.cost import Cost
from rl_reward_network.report.deployment import decide, out_of_fold

VAL_PATIENTS = 24
PROMPTS = 11
SPREAD = 0.05  # Dice, standard deviation over patients of a row's difference
GAIN = 0.02  # Dice, of the row that is to be found
COMMON = 0.5  # share of the variance that all rows have in common
TOUCHED = (1.0, 1.0, 0.2, 0.0)  # share of the images that a row changes; the rows take turns

SKEWED = "skewed"
Noise = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
NOISES: dict[str, Noise] = {
    "heavy tails": lambda rng, shape: rng.standard_t(3, shape) / np.sqrt(3),
    SKEWED: lambda rng, shape: 1 - rng.exponential(1, shape),
}
WORLDS = (*(("heavy tails", patients) for patients in (5, 8, 12, 36, 100)), (SKEWED, 12), (SKEWED, 36))


@dataclass(frozen=True)
class Args:
    """Count false verdicts in simulated worlds without a difference."""

    worlds: int = 1000
    """Of each kind; a tenth as many for the power."""
    seed: int = 0


def main() -> None:
    """Run on the flags of the command line."""
    run(simulate, Args)


def simulate(args: Args) -> None:
    """Print false verdicts and power by kind of world, and the largest counts."""
    table = Table("differences", "patients", "false best", "power", "false deployment", "power")
    largest = [0, 0]
    for noise, patients in track(WORLDS, "worlds"):
        cells = []
        for place, found in enumerate((has_best, deploys)):
            false, true = (
                sum(found(np.random.default_rng([args.seed, world]), NOISES[noise], patients, gain) for world in worlds)
                for gain, worlds in ((0.0, range(args.worlds)), (GAIN, range(args.worlds // 10)))
            )
            cells += [str(false), f"{true / max(args.worlds // 10, 1):.0%}"]
            largest[place] = max(largest[place], false * (noise != SKEWED))
        table.add_row(noise, str(patients), *cells)
    Console().print(table)
    print(f"power: a row that gains {GAIN} among {len(METHODS) - 1} methods or {PROMPTS} prompts")
    print(f"false best: {largest[0]} of {args.worlds}")
    print(f"deployed against the model as it is: {largest[1]} of {args.worlds}")


def differences(rng: np.random.Generator, noise: Noise, rows: int, patients: int) -> tuple[np.ndarray, list[str]]:
    """Differences of mean 0, float64 (rows, images), and the patient of each image."""
    images = rng.integers(1, 7, patients)
    groups = np.repeat(np.arange(patients), images)
    of_patient = np.sqrt(COMMON) * noise(rng, (1, patients)) + np.sqrt(1 - COMMON) * noise(rng, (rows, patients))
    values = SPREAD * (of_patient[:, groups] + 0.5 * noise(rng, (rows, len(groups))))
    touched = np.resize(TOUCHED, rows)[:, None] > rng.random((rows, len(groups)))
    return values * touched, [f"p{group:03d}" for group in groups]


def has_best(rng: np.random.Generator, noise: Noise, patients: int, gain: float) -> bool:
    """Whether a comparison names a best road; with a gain, whether it finds the first road to be better."""
    test, groups = differences(rng, noise, len(METHODS) - 1, patients)
    val, val_groups = differences(rng, noise, len(METHODS) - 1, VAL_PATIENTS)
    test[0] += gain
    val[0] += gain
    images = TestImages(tuple(val_groups), tuple(map(str, range(len(groups)))), tuple(groups))
    base_test, base_val = rng.normal(0.7, 0.1, len(groups)), rng.normal(0.7, 0.1, len(val_groups))
    results = {BASE: [_result(BASE, base_val, base_test)]}
    for method, on_val, on_test in zip(METHODS[1:], val, test, strict=True):
        results[method.name] = [_result(method.name, base_val + on_val, base_test + on_test)]
    rows = make_table(results, images)
    choice = choose(rows, images)
    says = verdict_lines(rows, choice, images, "compare")[0].startswith("Best: ")
    return METHODS[1].name in choice.better if gain else says


def _result(method: str, val: np.ndarray, test: np.ndarray) -> MethodResult:
    return MethodResult(method, 0, BASE, None, tuple(val.tolist()), {"dice": tuple(test.tolist())}, 1.0, Cost())


def deploys(rng: np.random.Generator, noise: Noise, patients: int, gain: float) -> bool:
    """Whether step 2 deploys anything but the default prompt, index 0.

    Its policy chooses, per image, one of the three prompts that are best on the patients it has seen.
    """
    gains, groups = differences(rng, noise, PROMPTS, patients)
    gains[0] = 0
    gains[1] += gain
    values = gains + rng.normal(0.7, 0.1, len(groups))
    names = np.array(groups)

    def policy(held_out: frozenset[str], indices: np.ndarray) -> np.ndarray:
        seen = ~np.isin(names, list(held_out))
        best = np.argsort(-values[:, seen].mean(axis=1))[:3]
        return np.asarray(values[rng.choice(best, len(indices)), indices])

    return decide(values, out_of_fold(groups, policy), groups).choice != "as it is"


if __name__ == "__main__":
    main()
