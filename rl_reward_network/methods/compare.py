"""The comparison as a whole: train or reuse what the methods need, measure each method, write the report."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from rl_reward_network import __version__
from rl_reward_network.atomic_io import read_json
from rl_reward_network.data.items import Sample
from rl_reward_network.env.mask_bank import MaskBank
from rl_reward_network.inputs.loading import RunInputs, describe_run, segmenter_with
from rl_reward_network.methods import Group
from rl_reward_network.methods.deployed import save_deployed
from rl_reward_network.methods.measure import MethodResult, load_result, measure_method, save_result
from rl_reward_network.methods.methods import FINE_TUNED, TRAINED, WEIGHTS, Method, methods_of, runs_of
from rl_reward_network.methods.prompts import deployment_of
from rl_reward_network.methods.report import Picture, Report, write_compare_report
from rl_reward_network.methods.table import TestImages, choose, make_table, verdict_lines
from rl_reward_network.methods.training import (
    MERGED,
    REWARD_NET,
    Job,
    check_split,
    cost_of,
    digest,
    free_memory,
    merge,
)
from rl_reward_network.methods.view import BASE, ImageView, Models, Trained
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.ppo.settings import Mode
from rl_reward_network.report.cost import Cost, total_cost
from rl_reward_network.report.statistics import group_means
from rl_reward_network.report.table import picks
from rl_reward_network.reward_training.stage import check_no_leak
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.run import BEST_REWARD_NET, Run

RESULTS = "road_results"  # beside the run folders: each method is measured once, as masks are computed once
VAL_IMAGES = {"quick": 48, "full": 100}
TEST_IMAGES: dict[str, int | None] = {"quick": 100, "full": None}  # None: all


@dataclass(frozen=True)
class ComparePlan:
    """Settings of a comparison.

    Args:
        mode: quick or full, of everything that is trained.
        groups: of methods.
        seeds: of everything that is trained.
        reward_net: fingerprint of a reward network that is given; None finds or trains one.
        side_network: whether supervised training adds one; None, as in earlier versions, adds none.
    """

    mode: Mode
    groups: tuple[Group, ...]
    seeds: tuple[int, ...]
    reward_net: str | None = None
    side_network: bool | None = None


def origin_of(inputs: RunInputs, plan: ComparePlan) -> dict[str, Any]:
    """The settings that a comparison to resume must share."""
    return {
        **json.loads(json.dumps(asdict(plan))),
        "data_fingerprint": inputs.data_fingerprint,
        "model_fingerprint": inputs.segmenter.fingerprint,
        "prompts": list(inputs.prompts),
        "seed": inputs.config.seed,
        "split_seed": inputs.split.seed,
        "unlabelled": inputs.unlabelled,
    }


def run_compare_stage(
    inputs: RunInputs, plan: ComparePlan, reward_net: Path | None, run: Run, command: str
) -> tuple[str, ...]:
    """Compare the methods in `run`; what exists already is reused.

    Writes report.html, table.csv, table.tex, eval.json, eval.csv, and the folders best/ and cheapest/, which
    `sa2va-rl segment --run` reads.

    Args:
        inputs: data, split, frozen model and its masks.
        plan: settings.
        reward_net: as in `Job`.
        run: a new comparison, or an interrupted one of the same settings.
        command: as the user typed it, for the report.

    Returns:
        The verdict, in sentences.

    Raises:
        ValueError: there are no labelled validation or test images, a training fails or has another split, or `run`
            holds another comparison.
    """
    samples = {
        "val": inputs.pick("val", VAL_IMAGES[plan.mode], labelled=True),
        "test": inputs.pick("test", TEST_IMAGES[plan.mode] or len(inputs.samples), labelled=True),
    }
    with run.lock():
        if run.state == "new":
            describe_run(run, inputs, origin_of(inputs, plan), {"command": command})
        else:
            run.check_same(origin_of(inputs, plan))
        seeds = [_Seed(inputs, plan, seed, samples) for seed in plan.seeds]
        results: dict[str, list[MethodResult]] = {}
        progress = Progress({"run": len(seeds) * len(seeds[0].needed), "method": len(seeds) * len(seeds[0].methods)})
        for seed in seeds:
            seed.train(reward_net, progress)
            for result in seed.measure(progress):
                results.setdefault(result.method, []).append(result)
            seed.close()
        images = TestImages(
            tuple(sample.group_id for sample in samples["val"]),
            tuple(sample.sample_id for sample in samples["test"]),
            tuple(sample.group_id for sample in samples["test"]),
        )
        rows = make_table(results, images)
        choice = choose(rows, images)
        first = seeds[0]
        for name, method in (("best", choice.best), ("cheapest", choice.cheapest)):
            chosen = results[method][0]
            runs = first.runs_of(first.method(chosen.method), chosen.weights)
            save_deployed(run / name, inputs, chosen, runs, run.path)
        lines = verdict_lines(rows, choice, images, str(run))
        first.open()
        report = Report(rows, choice, images, lines, first.facts(command), first.runs, first.pictures(results))
        write_compare_report(run.path, report)
        run.finish()
    return lines


class _Seed:
    """The methods with one seed of everything trained."""

    def __init__(self, inputs: RunInputs, plan: ComparePlan, seed: int, samples: dict[str, list[Sample]]) -> None:
        self.inputs = replace(inputs, config=replace(inputs.config, seed=seed))
        self.plan, self.seed, self.samples = plan, seed, samples
        self.methods = methods_of(plan.groups)
        self.needed = runs_of(self.methods)
        self.runs: dict[str, Path] = {}
        self.models: Models | None = None
        self.maps: ForegroundMaps | None = None

    def train(self, reward_net: Path | None, progress: "Progress") -> None:
        """Find the runs that the methods need, or train them, one after the other in this process."""
        for number, name in enumerate(self.needed, 1):
            bank = self.inputs.bank
            own_counts = MaskBank(bank.folder, bank.segment, bank.fingerprint, bank.prompts)
            inputs = replace(self.inputs, bank=own_counts)
            run, reused = TRAINED[name](
                Job(self.plan.mode, inputs, reward_net, self.runs, bool(self.plan.side_network))
            )
            check_split(name, run, self.inputs.split)
            self.runs[name] = run
            if name in WEIGHTS:
                merge(run)
            line = f"seed {self.seed}, run {number} of {len(self.needed)}: {name}: {'reused' if reused else 'trained'}"
            progress.done("run", f"{line}: {run}", reused)

    def measure(self, progress: "Progress") -> list[MethodResult]:
        """Measure each method that was not measured before."""
        self.open()
        results: dict[str, MethodResult] = {}
        groups = [sample.group_id for sample in self.samples["val"]]
        for number, method in enumerate(self.methods, 1):
            weights = best_weights(results, groups) if method.weights == FINE_TUNED else method.weights
            path = self._result_path(method, weights)
            reused = path.exists()
            if not reused:
                words = self._deploys(method, weights)
                view = partial(self.view, weights=weights)
                save_result(path, measure_method(method, self.trained, self.samples, view, self.seed, weights, words))
            results[method.name] = replace(load_result(path), cost=self._cost(method, weights))
            state = "measured before" if reused else "measured"
            line = f"seed {self.seed}, method {number} of {len(self.methods)}: {method.title}: {state}"
            progress.done("method", line, reused)
        return list(results.values())

    def open(self) -> None:
        """Load the models, the trained policies and the reward network."""
        folders = {name: run / MERGED for name, run in self.runs.items() if name in WEIGHTS}
        load = partial(segmenter_with, config=self.inputs.config, limits=self.inputs.prompt_config)
        self.models = Models(self.inputs.segmenter, folders, load, self.inputs.bank.folder)
        self.trained = Trained(self.inputs.prompts, self.runs)
        if REWARD_NET in self.runs:
            folder = self.runs[REWARD_NET] / BEST_REWARD_NET
            network = RewardNetwork.from_pretrained(folder)
            check_no_leak(self.inputs.split, network, folder, samples=self.inputs.samples)
            self.maps = ForegroundMaps.beside(self.runs[REWARD_NET], network.to(self.inputs.config.device))

    def close(self) -> None:
        """Free the memory of fine-tuned models and the reward network for the training with the next seed."""
        self.models, self.maps = None, None
        free_memory(self.inputs.config.device)

    def view(self, image: np.ndarray, weights: str) -> ImageView:
        """An image, uint8 (H, W, 3), as a method sees it that uses these weights."""
        assert self.models is not None
        return ImageView(image, self.models(weights), None if self.maps is None else self.maps.scorer)

    def method(self, name: str) -> Method:
        """The method of a name."""
        return next(method for method in self.methods if method.name == name)

    def runs_of(self, method: Method, weights: str) -> dict[str, Path]:
        """The runs that a method needs, in the order of training."""
        needed = {*method.needs, *(self.method(weights).needs if weights != BASE else ())}
        return {name: run for name, run in self.runs.items() if name in needed}

    def _deploys(self, method: Method, weights: str) -> str:
        """Which weights were chosen, and what trained policies deploy, in words."""
        words = [] if method.searched else [deploys(run) for run in self.runs_of(method, weights).values()]
        chosen = [self.method(weights).title] if method.weights == FINE_TUNED else []
        return ", ".join(filter(None, [*chosen, " and ".join(filter(None, words))]))

    def _cost(self, method: Method, weights: str) -> Cost:
        runs = self.runs_of(method, weights).values()
        costs = [cost_of(run, self.inputs, method.searched) for run in runs]
        if method.grid or method.weights == FINE_TUNED:
            costs.append(Cost(labels=(("val", len(self.samples["val"])),)))  # they choose the parameter or the weights
        return total_cost(costs)

    def _result_path(self, method: Method, weights: str) -> Path:
        """The file of a method's result, named by everything that it depends on."""
        used = self.runs_of(method, weights)
        if self.maps is not None:
            used[REWARD_NET] = self.runs[REWARD_NET]  # its score is part of every result
        facts = {
            "version": __version__,
            "method": method.name,
            "grid": method.grid,
            "weights": weights,
            "seed": self.seed,
            "trained": {name: digest(run) for name, run in used.items()},
            "model": self.inputs.segmenter.fingerprint,
            "data": self.inputs.data_fingerprint,
            "prompts": list(self.inputs.prompts),
            "images": {name: [sample.sample_id for sample in part] for name, part in self.samples.items()},
        }
        name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]
        return self.inputs.config.output_dir / RESULTS / f"{method.name}_{name}.json"

    def pictures(self, results: Mapping[str, list[MethodResult]]) -> list[Picture]:
        """Best, median and worst test image of the base model, with the mask of every method."""
        test = self.samples["test"]
        places = picks(np.array(results[BASE][0].test["dice"]))
        masks: dict[str, dict[str, np.ndarray]] = {title: {} for title in places}
        for method in self.methods:
            result = results[method.name][0]
            for title, place in places.items():
                view = self.view(test[place].load_image(), result.weights)
                masks[title][method.name] = method.predict(view, self.trained, result.parameter) > 0.5
        return [(title, test[place], masks[title]) for title, place in places.items()]

    def facts(self, command: str) -> dict[str, str]:
        """The header of the report."""
        return {
            "date": f"{datetime.now():%Y-%m-%d %H:%M}",
            "version": __version__,
            "command": command,
            "mode": self.plan.mode,
            "seeds": ", ".join(map(str, self.plan.seeds)),
            "Sa2VA": Path(self.inputs.config.model_path).name,
            "model fingerprint": self.inputs.segmenter.fingerprint,
            "data": self.inputs.summary,
            "data fingerprint": self.inputs.data_fingerprint[:16],
        }


def best_weights(results: Mapping[str, MethodResult], groups: Sequence[str]) -> str:
    """The fine-tuned weights with the highest mean Dice on validation patients."""

    def value(name: str) -> float:
        return float(group_means(np.array(results[name].val), groups).mean())

    return max((name for name in results if name in WEIGHTS), key=value)


def deploys(run: Path) -> str:
    """What the policy of a run deploys, in words; empty for runs without a policy."""
    config = read_json(run / "config.json")
    fixed = {"prompt policy": "best fixed prompt", "post-processing policy": "best fixed sequence"}.get(config["stage"])
    return "" if fixed is None else deployment_of(run).words(fixed, "the model as it is")


class Progress:
    """Prints what was done, what is left, and about how long that takes.

    Args:
        totals: kind, such as "method" -> number over all seeds.
        now: clock, in seconds.
    """

    def __init__(self, totals: Mapping[str, int], now: Callable[[], float] = monotonic) -> None:
        self._left, self._now, self._start = dict(totals), now, now()
        self._seconds: dict[str, list[float]] = {kind: [] for kind in totals}

    def done(self, kind: str, line: str, reused: bool) -> None:
        """Print a line about what was done since the last call, with what is left."""
        begin, self._start = self._start, self._now()
        if not reused:
            self._seconds[kind].append(self._start - begin)
        self._left[kind] -= 1
        print(f"{line}; {self._what_is_left()}", flush=True)

    def _what_is_left(self) -> str:
        """What is left; minutes as if everything to come took the mean time of its kind so far."""
        left = {kind: count for kind, count in self._left.items() if count}
        if not left:
            return "nothing left"
        counts = " and ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in left.items())
        if not all(self._seconds[kind] for kind in left):
            return f"{counts} left"
        seconds = sum(count * float(np.mean(self._seconds[kind])) for kind, count in left.items())
        return f"{counts} left, about {max(1, round(seconds / 60))} min"
