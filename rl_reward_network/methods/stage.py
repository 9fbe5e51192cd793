"""The comparison as a whole: train or reuse what the roads need, measure each road, write the report."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from rl_reward_network import __version__
from rl_reward_network.artefacts import read_json, write_json
from rl_reward_network.data.items import Sample
from rl_reward_network.data.splits import select
from rl_reward_network.grpo.merge import merge_run
from rl_reward_network.inputs.loading import RunInputs, describe_run
from rl_reward_network.inputs.segmenter import Sa2VASegmenter, load_segmenter
from rl_reward_network.methods.deployed import save_deployed
from rl_reward_network.methods.masks import method_mask
from rl_reward_network.methods.measure import MethodResult, load_result, measure_method, save_result
from rl_reward_network.methods.methods import (
    BASE,
    FINE_TUNED,
    POST,
    REWARD_NET,
    WEIGHTS,
    Group,
    Method,
    methods_of,
    parts_of,
)
from rl_reward_network.methods.parts import PartCommand, check_split, cost_of, make_part, part_digest
from rl_reward_network.methods.progress import Progress
from rl_reward_network.methods.report import Report, write_compare_report
from rl_reward_network.methods.table import TestImages, choose, make_table, verdict_lines
from rl_reward_network.methods.tools import Models, deploys, load_tools
from rl_reward_network.methods.views import ImageView
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.report.bootstrap import group_means
from rl_reward_network.report.cost import Cost, total_cost
from rl_reward_network.reward_training.stage import check_no_leak
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.run import BEST_REWARD_NET, COMPARE_RUN, FINAL, Run

RESULTS = "road_results"  # beside the run folders: each road is measured once, as masks are computed once
MERGED_FROM = "merged_from.json"  # in `MERGED`: the digest of the final model
MERGED = "merged"  # in the folder of a GRPO run: the checkpoint that the comparison segments with
VAL_IMAGES = {"quick": 48, "full": 100}
TEST_IMAGES: dict[str, int | None] = {"quick": 100, "full": None}  # None: all


@dataclass(frozen=True)
class ComparePlan:
    """Settings of a comparison.

    Args:
        mode: quick or full, of everything that is trained.
        groups: of roads.
        seeds: of everything that is trained.
        reward_net: fingerprint of a reward network that is given; None finds or trains one.
    """

    mode: str
    groups: tuple[Group, ...]
    seeds: tuple[int, ...]
    reward_net: str | None = None


MakeCommand = Callable[[str, int, Mapping[str, Path]], PartCommand]
"""(part, seed, runs of the parts before) -> its command."""


def origin_of(inputs: RunInputs, plan: ComparePlan) -> dict[str, Any]:
    """The settings that a comparison to resume must share."""
    return {
        **json.loads(json.dumps(asdict(plan))),
        "data_fingerprint": inputs.data_fingerprint,
        "model_fingerprint": inputs.segmenter.fingerprint,
        "prompts": list(inputs.prompts),
        "seed": inputs.config.seed,
        "split_seed": inputs.split.seed,
        "unlabelled": None if inputs.unlabelled is None else inputs.unlabelled.fingerprint,
    }


def run_compare_stage(
    inputs: RunInputs, plan: ComparePlan, make_command: MakeCommand, run: Path, command: str
) -> tuple[str, ...]:
    """Compare the roads in `run`; what exists already is reused.

    Writes report.html, table.csv, table.tex, eval.json, eval.csv, and the folders best/ and cheapest/, which
    `sa2va-rl segment --run` reads.

    Args:
        inputs: data, split, frozen model and its masks.
        plan: settings.
        make_command: how the parts are trained.
        run: a new folder, or that of an interrupted comparison of the same settings.
        command: as the user typed it, for the report.

    Returns:
        The verdict, in sentences.

    Raises:
        ValueError: there are no labelled validation or test images, a part fails or has another split, or `run` holds
            another comparison.
    """
    samples = {
        "val": inputs.pick("val", VAL_IMAGES[plan.mode], labelled=True),
        "test": inputs.pick("test", TEST_IMAGES[plan.mode] or len(inputs.samples), labelled=True),
    }
    begun = Run(run, COMPARE_RUN)
    with begun.lock():
        if begun.state == "new":
            describe_run(begun, inputs, origin_of(inputs, plan), {"command": command})
        else:
            begun.check_same(origin_of(inputs, plan))
        seeds = [_Seed(inputs, plan, seed, samples) for seed in plan.seeds]
        results: dict[str, list[MethodResult]] = {}
        progress = Progress({kind: count * len(seeds) for kind, count in seeds[0].counts().items()})
        for seed in seeds:
            for result in seed.measure(make_command, progress):
                results.setdefault(result.method, []).append(result)
            seed.close()
        images = TestImages(
            tuple(sample.group_id for sample in samples["val"]),
            tuple(sample.sample_id for sample in samples["test"]),
            tuple(sample.group_id for sample in samples["test"]),
        )
        rows = make_table(results, images)
        choice = choose(rows, images)
        for name, method in (("best", choice.best), ("cheapest", choice.cheapest)):
            save_deployed(run / name, inputs, seeds[0].deployed(results[method][0]), run)
        lines = verdict_lines(rows, choice, images, str(run))
        seeds[0].open()
        pictures = seeds[0].pictures(results, samples["test"])
        report = Report(rows, choice, images, lines, seeds[0].facts(command), seeds[0].runs, pictures)
        write_compare_report(run, report)
        begun.finish()
    return lines


class _Seed:
    """The roads with one seed of everything trained."""

    def __init__(self, inputs: RunInputs, plan: ComparePlan, seed: int, samples: dict[str, list[Sample]]) -> None:
        self.inputs = replace(inputs, config=replace(inputs.config, seed=seed))
        self.plan, self.seed, self.samples = plan, seed, samples
        self.methods = methods_of(plan.groups)
        self.runs: dict[str, Path] = {}
        self.models: Models | None = None
        self.maps: ForegroundMaps | None = None

    def counts(self) -> dict[str, int]:
        """Kind of work -> how much of it there is."""
        return {"part": len(parts_of(self.methods)), "road": len(self.methods)}

    def measure(self, make_command: MakeCommand, progress: Progress) -> list[MethodResult]:
        """Train what is missing, and measure each road that was not measured before."""
        self._make_parts(make_command, progress)
        self.open()
        results: dict[str, MethodResult] = {}
        for number, method in enumerate(self.methods, 1):
            groups = [sample.group_id for sample in self.samples["val"]]
            weights = best_weights(results, groups) if method.weights == FINE_TUNED else method.weights
            path = self._result_path(method, weights)
            reused = path.exists()
            if not reused:
                save_result(path, self._measure(method, weights))
            results[method.name] = replace(load_result(path), cost=self._cost(method, weights))
            state = "measured before" if reused else "measured"
            line = f"seed {self.seed}, road {number} of {len(self.methods)}: {method.title}: {state}"
            progress.done("road", line, reused)
        return list(results.values())

    def _make_parts(self, make_command: MakeCommand, progress: Progress) -> None:
        parts = parts_of(self.methods)
        for number, part in enumerate(parts, 1):
            run, reused = make_part(make_command(part, self.seed, self.runs))
            check_split(part, run, self.inputs.split)
            self.runs[part] = run
            if part in WEIGHTS:
                merge_part(part, run)
            what = "reused" if reused else "trained"
            progress.done("part", f"seed {self.seed}, part {number} of {len(parts)}: {part}: {what}: {run}", reused)

    def open(self) -> None:
        """Load the models, the trained policies and the reward network."""
        folders = {part: run / MERGED for part, run in self.runs.items() if part in WEIGHTS}
        bank = self.inputs.config.output_dir / "mask_bank"
        self.models = Models(self.inputs.segmenter, folders, self._load, bank)
        self.tools = load_tools(self.inputs.prompts, self.runs)
        if REWARD_NET in self.runs:
            folder = self.runs[REWARD_NET] / BEST_REWARD_NET
            network = RewardNetwork.from_pretrained(folder)
            check_no_leak(self.inputs.split, network, folder)
            self.maps = ForegroundMaps.beside(self.runs[REWARD_NET], network.to(self.inputs.config.device))

    def close(self) -> None:
        """Free the memory of fine-tuned models and the reward network: the next seed trains in other processes."""
        self.models, self.maps = None, None

    def _load(self, folder: Path) -> Sa2VASegmenter:
        limits, config = self.inputs.prompt_config, self.inputs.config
        sizes = limits.segment_batch, limits.max_new_tokens, limits.max_tiles
        return load_segmenter(folder, config.device, *sizes, config.dtype, config.image_resize)

    def view(self, image: np.ndarray) -> ImageView:
        """An image, uint8 (H, W, 3), as the roads see it."""
        assert self.models is not None
        return ImageView(image, self.models, None if self.maps is None else self.maps.scorer)

    def _measure(self, method: Method, weights: str) -> MethodResult:
        words = ""
        if method.policy in self.runs and method.source == "policy":
            words = deploys(method.policy, self.runs[method.policy])
        if method.refinement == "policy":
            words = " and ".join(filter(None, [words, deploys(POST, self.runs[POST])]))
        if method.weights == FINE_TUNED:
            title = next(other.title for other in self.methods if other.name == weights)
            words = ", ".join(filter(None, [title, words]))
        return measure_method(
            method, self.tools, weights, self.samples, self.view, self._cost(method, weights), self.seed, words
        )

    def _parts(self, method: Method, weights: str) -> tuple[str, ...]:
        """What was trained for a road, in the order of training."""
        needed = {part for part in method.parts if part != FINE_TUNED}
        if weights != BASE:
            needed |= {part for other in self.methods if other.name == weights for part in other.parts}
        return tuple(part for part in self.runs if part in needed)

    def _cost(self, method: Method, weights: str) -> Cost:
        labelled = {
            name: sum(sample.labelled for sample in select(self.inputs.samples, self.inputs.split, name))
            for name in ("reward", "policy")
        }
        costs = [cost_of(part, self.runs[part], labelled, method.searched) for part in self._parts(method, weights)]
        if method.grid or method.weights == FINE_TUNED:
            costs.append(Cost(labels=(("val", len(self.samples["val"])),)))  # they choose the parameter or the weights
        return total_cost(costs)

    def _result_path(self, method: Method, weights: str) -> Path:
        """The file of a road's result, named by everything that it depends on."""
        trained = [part_digest(part, self.runs[part]) for part in self._parts(method, weights)]
        if self.maps is not None and REWARD_NET not in self._parts(method, weights):
            trained.append(part_digest(REWARD_NET, self.runs[REWARD_NET]))  # its score is part of every result
        facts = {
            "version": __version__,
            "road": asdict(method),
            "weights": weights,
            "seed": self.seed,
            "trained": trained,
            "model": self.inputs.segmenter.fingerprint,
            "data": self.inputs.data_fingerprint,
            "prompts": list(self.inputs.prompts),
            "images": {name: [sample.sample_id for sample in part] for name, part in self.samples.items()},
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]
        return self.inputs.config.output_dir / RESULTS / f"{method.name}_{digest}.json"

    def deployed(self, result: MethodResult) -> tuple[Method, MethodResult, dict[str, Path]]:
        """A road, its result, and the runs that it needs."""
        method = next(method for method in self.methods if method.name == result.method)
        return method, result, {part: self.runs[part] for part in self._parts(method, result.weights)}

    def pictures(
        self, results: Mapping[str, list[MethodResult]], test: list[Sample]
    ) -> list[tuple[str, Sample, dict[str, np.ndarray]]]:
        """Best, median and worst test image of the model as it is, with the mask of every road."""
        order = np.argsort(results[BASE][0].test["dice"], kind="stable")
        shown = []
        for title, place in (("best", order[-1]), ("median", order[len(order) // 2]), ("worst", order[0])):
            view = self.view(test[place].load_image())
            masks = {
                method.name: method_mask(method, view, self.tools, of.weights, of.parameter)
                for method in self.methods
                for of in results[method.name][:1]
            }
            shown.append((title, test[place], masks))
        return shown

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


def merge_part(part: str, run: Path) -> None:
    """Merge the run's final model into `MERGED`, unless the merged one is of these weights."""
    note, digest = run / MERGED / MERGED_FROM, {"final_model": part_digest(part, run)}
    if not note.exists() or read_json(note) != digest:
        shutil.rmtree(run / MERGED, ignore_errors=True)
        merge_run(run / FINAL, run / MERGED)
        write_json(note, digest)
