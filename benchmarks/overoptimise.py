"""Over-optimisation of the reward network: does the true Dice fall while the score still rises?

    python -m benchmarks.overoptimise            # trains the reward networks of seeds 0 to 4 where they are missing

Two kinds of pressure, from Sa2VA's masks of test images: the best of up to 256 candidates (masks of random prompts,
damaged at random), and gradient ascent far beyond the ten steps of step 1. Three scorers: one member, the conservative
ensemble, and (best of n only) the pooled CNN (`pooled_cnn.py`), as an example of over-optimisation.
Written: <output_dir>/overoptimise/overoptimise.json and .png.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from matplotlib.figure import Figure

from benchmarks.common import show
from benchmarks.pooled_cnn import reward_network, train_pooled_cnn
from rl_reward_network.atomic_io import whole_file, write_json
from rl_reward_network.cli.app import run
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import RunInputs, open_inputs
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.reward_training.masks import RewardExample, damage, reward_examples, true_dice
from rl_reward_network.reward_training.stage import reward_plan
from rl_reward_network.rewards.learned import ImageScorer, score_masks

BEST_OF = tuple(2**n for n in range(9))  # 1 to 256
ASCENT = (0, 1, 2, 5, 10, 20, 50, 100)  # steps
MEMBER, ENSEMBLE, POOLED = "one member", "conservative ensemble", "pooled CNN"

Score = Callable[[np.ndarray, np.ndarray], np.ndarray]
Curve = np.ndarray  # float (2, points): mean score and mean true Dice


@dataclass(frozen=True)
class Args:
    """Optimise masks against the reward networks of several seeds and measure the true Dice."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    mode: Literal["quick", "full"] = "full"
    """Mode of the reward networks."""
    seeds: int = 5
    """Reward networks, of seeds 0, 1, 2 ...; each with different images and candidates."""
    images: int = 20
    """Test images for each seed, one frame per series before a second."""


def main(args: Args) -> None:
    """Train what is missing, push each network, draw and print."""
    curves: dict[str, list[Curve]] = {}
    cautions = []
    for seed in range(args.seeds):
        inputs = open_inputs(replace(args.config, seed=seed))
        network = reward_network(inputs, args.mode)
        cautions.append(network.config.caution)
        for name, curve in _push(inputs, network, args).items():
            curves.setdefault(name, []).append(curve)
    folder = args.config.output_dir / "overoptimise"
    rows = {name: _summary(np.stack(of_seeds)) for name, of_seeds in curves.items()}
    lists = {name: np.stack(of_seeds).tolist() for name, of_seeds in curves.items()}
    write_json(folder / "overoptimise.json", {"caution": cautions, "curves": lists, "rows": rows})
    _draw({name: np.stack(of_seeds) for name, of_seeds in curves.items()}, folder / "overoptimise.png")
    show(
        ("pushed from Sa2VA's mask of the default prompt, mean of the seeds", *next(iter(rows.values()))),
        [(name, *(f"{value:.3f}" for value in row.values())) for name, row in rows.items()],
    )
    print(f"the ensemble's k, by seed: {cautions}")
    print(f"\ncurves: {folder / 'overoptimise.png'}")


def _push(inputs: RunInputs, network: RewardNetwork, args: Args) -> dict[str, Curve]:
    """Mean curves over the test images, by pressure and scorer."""
    plan, seed = reward_plan(inputs.config, args.mode).config, inputs.config.seed
    samples = inputs.pick("reward", plan.images, labelled=True)
    pooled = train_pooled_cnn(reward_examples(inputs, samples, "pooled CNN"), seed)
    networks = {MEMBER: network.member(0), ENSEMBLE: network}
    scores: dict[str, Score] = {name: _score(scorer) for name, scorer in networks.items()} | {POOLED: pooled}
    curves: dict[str, list[Curve]] = {}
    examples = reward_examples(inputs, inputs.pick("test", args.images, labelled=True), f"seed {seed}")
    for index, example in enumerate(examples):
        candidates = _candidates(example, np.random.default_rng([seed, index]))
        for name, score in scores.items():
            curves.setdefault(f"best of n, {name}", []).append(_best_of_n(score, example, candidates))
        for name, scorer in networks.items():
            curves.setdefault(f"gradient ascent, {name}", []).append(np.array(list(_climb(scorer, example))).T)
    return {name: np.mean(of_images, axis=0) for name, of_images in curves.items()}


def _score(network: RewardNetwork) -> Score:
    """The score of masks bool (n, H, W)."""
    return lambda image, masks: score_masks(network, image, masks.astype(np.float32))


def _candidates(example: RewardExample, rng: np.random.Generator) -> np.ndarray:
    """bool (256, H, W): Sa2VA's mask of the default prompt, then masks of random prompts damaged at random."""
    picks = rng.integers(len(example.masks), size=BEST_OF[-1] - 1)
    return np.stack([example.masks[0], *(damage(example.masks[pick], rng) for pick in picks)])


def _best_of_n(score: Score, example: RewardExample, candidates: np.ndarray) -> Curve:
    """Score and true Dice of the mask with the best score among the first n."""
    scores, gold = score(example.image, candidates), true_dice(candidates, example.truth)
    best = [int(scores[:n].argmax()) for n in BEST_OF]
    return np.stack([scores[best], gold[best]])


def _climb(network: RewardNetwork, example: RewardExample) -> Iterator[tuple[float, float]]:
    """Score of the soft mask, and true Dice of it cut at 0.5, after each number of steps in `ASCENT`."""
    mask = example.masks[:1].astype(np.float32)
    scorer = ImageScorer(network, example.image)
    path = scorer.ascend(mask, network.config.ascent_step, ASCENT[-1])
    for step, soft in enumerate([mask, *path]):
        if step in ASCENT:
            yield float(scorer.quality(soft)["score"][0]), float(true_dice(soft > 0.5, example.truth)[0])


def _summary(curves: np.ndarray) -> dict[str, float]:
    """Summary of curves (seeds, 2, points): means over seeds, and the smallest ratio of end to peak."""
    score, gold = curves[:, 0], curves[:, 1]
    end_over_peak = gold[:, -1] / gold.max(axis=1)
    return {
        "score_start": float(score[:, 0].mean()),
        "score_end": float(score[:, -1].mean()),
        "gold_start": float(gold[:, 0].mean()),
        "gold_peak": float(gold.max(axis=1).mean()),
        "gold_end": float(gold[:, -1].mean()),
        "end_over_peak": float(end_over_peak.mean()),
        "end_over_peak_worst_seed": float(end_over_peak.min()),
    }


def _draw(curves: dict[str, np.ndarray], path: Path) -> None:
    """One picture per pressure: scores dashed, true Dice solid, the range of the seeds shaded."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axis, pressure, points in zip(
        figure.subplots(1, 2), ("best of n", "gradient ascent"), (BEST_OF, ASCENT), strict=True
    ):
        names = [name for name in curves if name.startswith(pressure)]
        for colour, name in zip(("tab:orange", "tab:blue", "tab:gray"), names, strict=False):
            for kind, style, values in zip(
                ("score", "true Dice"), ("--", "-"), curves[name].swapaxes(0, 1), strict=True
            ):
                label = f"{name.removeprefix(pressure + ', ')}, {kind}"
                axis.plot(points, values.mean(axis=0), style, color=colour, label=label)
                axis.fill_between(points, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.12, linewidth=0)
        axis.set_xscale("log", base=2) if pressure == "best of n" else axis.set_xscale("symlog", linthresh=1)
        axis.set(title=pressure, xlabel="n" if pressure == "best of n" else "steps", ylim=(0, 1))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=110)


if __name__ == "__main__":
    run(main, Args)
