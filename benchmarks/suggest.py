"""Which images to annotate: does a rule of `sa2va-rl suggest` choose better training images than chance?

    python -m benchmarks.suggest ARCADE --number 20
    python -m benchmarks.suggest DCA1 --number 6

The folder holds annotations.json and images/. Where names of images begin with "train" and "test", the pool are the
former, and 60 of the latter are kept apart; else half of the images are kept apart. A draw is a random half of the
pool, from which each rule chooses; a small segmenter of one U-Net learns from the chosen images alone. Printed are the
Dice on the images kept apart, and the difference to the random choice, paired over draws. Its interval is Student's
over draws: it holds for this pool, these images kept apart and this segmenter. The pools of the draws overlap, so that
the true interval is wider.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import tyro
from scipy import stats
from tqdm import tqdm

from benchmarks.common import show
from rl_reward_network.atomic_io import read_json, write_json
from rl_reward_network.cli.app import run
from rl_reward_network.data.annotations import read_annotations
from rl_reward_network.data.items import Sample
from rl_reward_network.data.windows import LabelledImages
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.reward_network import RewardNetworkConfig
from rl_reward_network.reward_training.stage import sized
from rl_reward_network.reward_training.train import (
    RewardTrainingConfig,
    labelled_images,
    own_scores,
    train_reward_network,
)
from rl_reward_network.segment.maker import load_maker
from rl_reward_network.segment.suggest import Rule, choose, describe

RULES: tuple[Rule, ...] = get_args(Rule)
RANDOM: Rule = "random"
BATCH, COARSE = 4, 0.8  # half of the windows, and more of the steps at half the resolution: 20 seconds a training
APART = 60  # images kept apart, where there is a test part
Dice = dict[Rule, list[float]]  # rule -> mean Dice of each draw


@dataclass(frozen=True)
class Args:
    """Compare the rules of `sa2va-rl suggest` on annotated images."""

    data_root: tyro.conf.Positional[Path]
    """Folder with annotations.json and images/, all with masks."""
    number: int = 6
    """Images to choose."""
    draws: int = 5
    """Random halves of the pool."""
    steps: int = 100
    """Optimiser steps of each segmenter."""
    model_path: str = DEFAULT_MODEL
    """The model that describes the images."""
    output_dir: Path = Path("outputs/suggest")
    """Folder of the trainings and of dice.json, from which an interrupted benchmark goes on."""


def main(args: Args) -> None:
    """Train on each choice that is missing, and print the table."""
    pool, apart = parts(read_annotations(args.data_root))
    named = args.data_root.resolve().name, args.number, args.steps, Path(args.model_path).name
    place = args.output_dir / "_".join(map(str, named))
    values = describe_all(args, place, [sample.image_path for sample in pool])
    kept_apart, dice = labelled_images(apart), Dice()
    for number, half in enumerate(halves(len(pool), args.draws)):
        for rule in RULES:
            groups = [pool[one].group for one in half]
            chosen = [half[one.index] for one in choose(rule, values[rule][half], groups, args.number, number)]
            folder = place / f"{rule}_{number}"
            dice.setdefault(rule, []).append(
                trained_dice([pool[one] for one in chosen], kept_apart, args.steps, number, folder)
            )
    print(f"{len(pool)} images in the pool, {len(apart)} kept apart, {args.number} chosen from each half of the pool")
    show_all(dice)


def parts(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """The pool and the images kept apart."""
    order = np.random.default_rng(0).permutation(len(samples))
    mixed = [samples[one] for one in order if samples[one].labelled]
    train, test = ([one for one in mixed if one.image_path.name.startswith(name)] for name in ("train", "test"))
    if train and test:
        groups = {one.group for one in train}
        return train, [one for one in test if one.group not in groups][:APART]
    return mixed[len(mixed) // 2 :], mixed[: len(mixed) // 2]


def halves(count: int, draws: int) -> Iterator[np.ndarray]:
    """int64 (count // 2,): the numbers of each half of a pool."""
    for number in range(draws):
        yield np.sort(np.random.default_rng([1, number]).permutation(count)[: count // 2])


def describe_all(args: Args, place: Path, images: Sequence[Path]) -> dict[Rule, np.ndarray]:
    """What each rule needs of the images of the pool, computed once."""
    file = place / "values.npz"
    if not file.exists():
        place.mkdir(parents=True, exist_ok=True)
        maker = load_maker(args.model_path)
        found = {rule: describe(rule, maker, images, partial(tqdm, desc=rule)) for rule in RULES}
        np.savez(file, **found)  # type: ignore[arg-type]
    with np.load(file) as saved:
        return {rule: saved[rule] for rule in RULES}


def trained_dice(chosen: Sequence[Sample], apart: LabelledImages, steps: int, seed: int, folder: Path) -> float:
    """Mean Dice on the images kept apart of one U-Net that has learnt from the chosen ones."""
    file = folder / "dice.json"
    if not file.exists():
        train = labelled_images(chosen)
        config = RewardTrainingConfig(steps=steps, eval_every=steps, seed=seed, batch_size=BATCH, coarse=COARSE)
        sizes = sized(RewardNetworkConfig(members=1), train)
        network = train_reward_network(train, None, config, folder, sizes)
        write_json(file, own_scores(network, apart)["dice"])
    return float(read_json(file))


def difference(values: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """The mean of paired differences, and Student's 95 % interval of it; infinite bounds of a single pair."""
    gains = np.subtract(values, base)
    if len(gains) < 2:
        return float(gains.mean()), -np.inf, np.inf
    half = float(stats.t.ppf(0.975, len(gains) - 1) * gains.std(ddof=1) / np.sqrt(len(gains)))
    return float(gains.mean()), float(gains.mean()) - half, float(gains.mean()) + half


def show_all(dice: Dice) -> None:
    """Print the table, and which rules have a lower bound above 0."""
    rows, better = [], []
    for rule, values in dice.items():
        mean, low, high = difference(values, dice[RANDOM])
        gain = "" if rule == RANDOM else f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"
        rows.append((rule, f"{np.mean(values):.3f}", gain, " ".join(f"{value:.3f}" for value in values)))
        better += [rule] if rule != RANDOM and low > 0 else []
    show(("rule", "Dice", "less random, 95 % over draws", "Dice of each draw"), rows)
    found = f"{' and '.join(better)} beat" + "s" * (len(better) == 1) if better else "Nothing beats"
    print(f"{found} the random choice with the lower bound above 0.")


if __name__ == "__main__":
    run(main, Args)
