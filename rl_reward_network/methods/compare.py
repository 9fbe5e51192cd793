"""The comparison as a whole: train or reuse what methods need, measure each, write the report and what is deployed."""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from tqdm import tqdm

from rl_reward_network import __version__
from rl_reward_network.atomic_io import read_json, whole_folder, write_json
from rl_reward_network.data.items import Sample
from rl_reward_network.env.mask_bank import NO_MASK_LOGIT, MaskBank
from rl_reward_network.inputs.loading import RunInputs, describe_run, located_model, segmenter_with
from rl_reward_network.inputs.segmenter import load_segmenter
from rl_reward_network.methods import Group
from rl_reward_network.methods.methods import FINE_TUNED, METHODS, TRAINED, WEIGHTS, Method, methods_of, runs_of
from rl_reward_network.methods.predict import deployment_of
from rl_reward_network.methods.table import (
    MethodResult,
    Picture,
    Report,
    TestImages,
    choose,
    deploy_lines,
    make_table,
    verdict_lines,
    write_compare_report,
)
from rl_reward_network.methods.training import MERGED, REWARD_NET, Job, check_split, digest, free_memory, merge
from rl_reward_network.methods.view import BASE, ImageView, Models, Trained
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.ppo.settings import Mode
from rl_reward_network.report.deployment import Cost, RunCost, total_cost
from rl_reward_network.report.metrics import SCORE
from rl_reward_network.report.statistics import group_means
from rl_reward_network.report.table import ECE, picks
from rl_reward_network.reward_training.stage import check_no_leak
from rl_reward_network.rewards.learned import ForegroundMaps, ImageScorer
from rl_reward_network.rewards.metrics import METRICS, calibration_error, dice, mask_metrics
from rl_reward_network.run import BEST_REWARD_NET, POLICY_RUN, POST_RUN, Run, portable

METHOD_FILE = "method.json"
BY_NAME = {method.name: method for method in METHODS}
RESULTS = "method_results"  # beside the run folders: each method is measured once, as masks are computed once
FIXED = {POLICY_RUN.stage: "best fixed prompt", POST_RUN.stage: "best fixed sequence"}  # of runs of a policy
VAL_IMAGES = {"quick": 48, "full": 100}
TEST_IMAGES: dict[str, int | None] = {"quick": 100, "full": None}  # None: all


@dataclass(frozen=True)
class ComparePlan:
    """Settings of a comparison."""

    mode: Mode  # of everything that is trained
    groups: tuple[Group, ...]  # of methods
    seeds: tuple[int, ...]  # of everything that is trained
    reward_net: str | None = None  # fingerprint of a reward network that is given; None finds or trains one
    side_network: bool | None = None  # whether supervised training adds one; None, as in earlier versions, adds none


def settings_of(inputs: RunInputs, plan: ComparePlan) -> dict[str, Any]:
    """The settings that a comparison to resume must share."""
    return {
        **asdict(plan),
        "groups": list(plan.groups),  # lists, as in a file
        "seeds": list(plan.seeds),
        "data_fingerprint": inputs.data_fingerprint,
        "model_fingerprint": inputs.segmenter.fingerprint,
        "prompts": list(inputs.prompts),
        "seed": inputs.config.seed,
        **inputs.split.settings,
        "unlabelled": inputs.unlabelled,
    }


def run_compare_stage(
    inputs: RunInputs, plan: ComparePlan, reward_net: Path | None, run: Run, command: str
) -> tuple[str, ...]:
    """Compare the methods in `run`, new or interrupted; what exists already is reused. Returns the verdict's sentences.

    Writes report.html, table.csv, table.tex, eval.json, eval.csv, and the folders best/ and cheapest/, which
    `sa2va-rl segment --model_path` reads. `command` is as the user typed it, and `reward_net` as in `Job`. A ValueError
    if no validation or test image is labelled, a run has another split, or `run` holds another comparison.
    """
    samples = {
        "val": inputs.pick("val", VAL_IMAGES[plan.mode], labelled=True),
        "test": inputs.pick("test", TEST_IMAGES[plan.mode] or len(inputs.samples), labelled=True),
    }
    settings = settings_of(inputs, plan)
    with run.working(settings, partial(describe_run, run, inputs, settings, {"command": command})):
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
        choice, first = choose(rows, images), seeds[0]
        for name, method in (("best", choice.best), ("cheapest", choice.cheapest)):
            chosen = results[method][0]
            save_deployed(run / name, inputs, chosen, first.runs_of(first.methods[method], chosen.weights), run.path)
        lines, deploy = verdict_lines(rows, choice, images), deploy_lines(choice, str(run))
        first.open()
        facts, pictures = _facts(inputs, plan, command), first.pictures(results)
        report = Report(rows, choice, images, lines, deploy, facts, first.runs, pictures)
        write_compare_report(run.path, report)
    return (*lines, *report.notes, *deploy)


def _facts(inputs: RunInputs, plan: ComparePlan, command: str) -> dict[str, str]:
    return {
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
        "version": __version__,
        "command": command,
        "mode": plan.mode,
        "seeds": ", ".join(map(str, plan.seeds)),
        "Sa2VA": Path(inputs.config.model_path).name,
        "model fingerprint": inputs.segmenter.fingerprint,
        "data": inputs.summary,
        "data fingerprint": inputs.data_fingerprint[:16],
    }


class _Seed:
    """The methods with one seed of everything trained."""

    def __init__(self, inputs: RunInputs, plan: ComparePlan, seed: int, samples: dict[str, list[Sample]]) -> None:
        self.inputs = replace(inputs, config=replace(inputs.config, seed=seed))
        self.plan, self.seed, self.samples = plan, seed, samples
        self.methods = {method.name: method for method in methods_of(plan.groups)}
        self.needed = runs_of(tuple(self.methods.values()))
        self.runs: dict[str, Path] = {}
        self.models: Models | None = None
        self.maps: ForegroundMaps | None = None

    def train(self, reward_net: Path | None, progress: "Progress") -> None:
        """Find the runs that the methods need, or train them, one after the other in this process."""
        for number, name in enumerate(self.needed, 1):
            bank = self.inputs.bank  # a new one counts its own masks
            inputs = replace(self.inputs, bank=MaskBank(bank.folder, bank.segment, bank.fingerprint, bank.prompts))
            job = Job(self.plan.mode, inputs, reward_net, self.runs, bool(self.plan.side_network))
            run, reused = TRAINED[name](job)
            check_split(name, run, self.inputs.split)
            self.runs[name] = run
            if name in WEIGHTS:
                merge(run)
            line = f"seed {self.seed}, run {number} of {len(self.needed)}: {name}: {'reused' if reused else 'trained'}"
            progress.done("run", f"{line}: {run}", reused)

    def measure(self, progress: "Progress") -> Iterator[MethodResult]:
        """Measure each method that was not measured before."""
        self.open()
        val_dice: dict[str, float] = {}  # of the fine-tuned weights
        groups = [sample.group_id for sample in self.samples["val"]]
        for number, method in enumerate(self.methods.values(), 1):
            weights = max(val_dice, key=lambda name: val_dice[name]) if method.weights == FINE_TUNED else method.weights
            path = self._result_path(method, weights)
            reused = path.exists()
            if not reused:
                words, view = self._chosen_words(method, weights), partial(self.view, weights=weights)
                save_result(path, measure_method(method, self.trained, self.samples, view, self.seed, weights, words))
            result = replace(load_result(path), cost=self._cost(method, weights))
            if method.name in WEIGHTS:
                val_dice[method.name] = float(group_means(np.array(result.val), groups).mean())
            state = "measured before" if reused else "measured"
            line = f"seed {self.seed}, method {number} of {len(self.methods)}: {method.title}: {state}"
            progress.done("method", line, reused)
            yield result

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

    def runs_of(self, method: Method, weights: str) -> dict[str, Path]:
        """The runs that a method needs, in the order of training."""
        needed = {*method.needs, *(self.methods[weights].needs if weights != BASE else ())}
        return {name: run for name, run in self.runs.items() if name in needed}

    def _chosen_words(self, method: Method, weights: str) -> str:
        """Which weights were chosen, and what trained policies deploy, in words."""
        words = []
        for run in () if method.searched else self.runs_of(method, weights).values():
            if fixed := FIXED.get(read_json(run / "config.json")["stage"]):
                words.append(deployment_of(run).words(fixed, "the model as it is"))
        chosen = [self.methods[weights].title] if method.weights == FINE_TUNED else []
        return ", ".join(filter(None, [*chosen, " and ".join(words)]))

    def _cost(self, method: Method, weights: str) -> Cost:
        costs = [RunCost.load(run).total(method.searched) for run in self.runs_of(method, weights).values()]
        if method.grid or method.weights == FINE_TUNED:
            costs.append(Cost(labels={"val": len(self.samples["val"])}))  # they choose the parameter or the weights
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
        for method in self.methods.values():
            result = results[method.name][0]
            for title, place in places.items():
                view = self.view(test[place].load_image(), result.weights)
                masks[title][method.name] = method.predict(view, self.trained, result.parameter) > 0.5
        return [(title, test[place], masks[title]) for title, place in places.items()]


class Progress:
    """Prints what was done, what is left (at first `totals`: kind -> number over all seeds), and about how long."""

    def __init__(self, totals: Mapping[str, int], now: Callable[[], float] = monotonic) -> None:
        self._left, self._now, self._start = dict(totals), now, now()
        self._seconds: dict[str, list[float]] = {kind: [] for kind in totals}

    def done(self, kind: str, line: str, reused: bool) -> None:
        """Print what was done since the last call and what is left, at the mean minutes of its kind so far."""
        begin, self._start = self._start, self._now()
        if not reused:
            self._seconds[kind].append(self._start - begin)
        self._left[kind] -= 1
        left = {kind: count for kind, count in self._left.items() if count}
        words = " and ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in left.items()) or "nothing"
        minutes = ""
        if left and all(self._seconds[kind] for kind in left):
            seconds = sum(count * float(np.mean(self._seconds[kind])) for kind, count in left.items())
            minutes = f", about {max(1, round(seconds / 60))} min"
        print(f"{line}; {words} left{minutes}", flush=True)


def measure_method(
    method: Method,
    trained: Trained,
    samples: dict[str, list[Sample]],
    make_view: Callable[[np.ndarray], ImageView],
    seed: int = 0,
    weights: str = BASE,
    chosen_on_validation: str = "",
) -> MethodResult:
    """Choose the parameter of a method on labelled images of `val`, then measure its masks on those of `test`."""
    rows = []  # Dice for each parameter of the grid, or for the only mask
    for view, truth in _seen(samples["val"], make_view, f"{method.name}: val"):
        masks = np.stack([method.predict(view, trained, value) > 0.5 for value in method.grid or (None,)])
        rows.append(dice(masks, np.broadcast_to(truth, masks.shape)))
    val, groups = np.stack(rows), [sample.group_id for sample in samples["val"]]
    best = int(np.argmax([group_means(column, groups).mean() for column in val.T]))
    parameter = method.grid[best] if method.grid else None
    measured, answers = [], []
    for view, truth in _seen(samples["test"], make_view, f"{method.name}: test"):
        soft = method.predict(view, trained, parameter)
        mask = soft > 0.5
        answers.append(len(view.answers))
        metrics = mask_metrics(mask, truth) | {ECE: float(calibration_error(soft[None].astype(float), truth[None])[0])}
        if view.has_scorer:
            metrics[SCORE] = float(view.scorer.quality(mask[None].astype(np.float32))["score"][0])
        measured.append(metrics)
    test = {name: tuple(metrics[name] for metrics in measured) for name in measured[0]}
    found = tuple(val[:, best].tolist()), test, float(np.mean(answers))
    return MethodResult(method.name, seed, weights, parameter, *found, chosen_on_validation=chosen_on_validation)


def _seen(
    samples: Sequence[Sample], make_view: Callable[[np.ndarray], ImageView], title: str
) -> Iterator[tuple[ImageView, np.ndarray]]:
    """The view and the true mask of each sample, with a progress bar."""
    for sample in tqdm(samples, title, unit="image", leave=False):
        truth = sample.load_mask()
        assert truth is not None
        yield make_view(sample.load_image()), truth


def save_result(path: Path, result: MethodResult) -> None:
    """Write a result as JSON, whole or not at all."""
    test = {name: [None if np.isnan(value) else value for value in values] for name, values in result.test.items()}
    write_json(path, {name: value for name, value in asdict(result).items() if name != "cost"} | {"test": test})


def load_result(path: Path) -> MethodResult:
    """Read what `save_result` wrote; a ValueError with the remedy if the file is not of this form."""
    try:
        value: dict[str, Any] = dict(read_json(path))
        test = {name: tuple(np.array(numbers, dtype=float).tolist()) for name, numbers in value["test"].items()}
        assert {*METRICS, ECE} <= test.keys()
        return MethodResult(**value | {"val": tuple(value["val"]), "test": test})
    except (KeyError, TypeError, AssertionError) as error:
        remedy = "delete it, and --resume measures it"
        raise ValueError(f"{path}: not the result of a method ({error!r}); {remedy}") from None


@dataclass(frozen=True)
class DeployedMethod:
    """A method that is ready for new images."""

    method: Method
    weights: str  # of Sa2VA
    parameter: float | None
    trained: Trained  # the runs that it uses
    models: Models
    network: RewardNetwork | None  # None where the method has none
    saved: dict[str, Any]  # the content of its file

    def soft(self, image: np.ndarray) -> np.ndarray | None:
        """float (H, W): the soft mask of an image, uint8 (H, W, 3); None where Sa2VA was asked, and no answer has one.

        Above 0.5 is the mask.
        """
        scorer = None if self.network is None else partial(ImageScorer, self.network)
        view = ImageView(image, self.models(self.weights), scorer)
        soft = self.method.predict(view, self.trained, self.parameter)
        answers = [answer.mask_logits for answer in view.answers.values()]
        return None if answers and all((logits == NO_MASK_LOGIT).all() for logits in answers) else soft


def save_deployed(folder: Path, inputs: RunInputs, result: MethodResult, runs: Mapping[str, Path], run: Path) -> None:
    """Write a method into best/ or cheapest/ of the comparison `run`; what it needs has relative paths and no copy."""
    config, limits, model = inputs.config, inputs.prompt_config, Path(inputs.config.model_path)
    of_model = [limits.segment_batch, limits.max_new_tokens, limits.max_tiles, config.dtype, config.image_resize]
    description = {
        "method": result.method,
        "title": BY_NAME[result.method].title,
        "weights": result.weights,
        "parameter": result.parameter,
        "runs": {name: portable(path, run) for name, path in runs.items()},
        "trained": {name: digest(path) for name, path in runs.items()},
        "model_fingerprint": inputs.segmenter.fingerprint,
        "inputs": {"model_path": portable(model, run) if model.exists() else config.model_path},
        "limits": of_model,
        "prompts": list(inputs.prompts),
        "grey_levels": inputs.grey_levels,
    }
    with whole_folder(folder) as temporary:
        write_json(temporary / METHOD_FILE, description)


def load_deployed(folder: Path, device: str) -> DeployedMethod:
    """Load the method of `best/` or `cheapest/`; a ValueError if it, a run or the model is missing or trained again."""
    path, comparison = folder / METHOD_FILE, folder.resolve().parent
    if not path.exists():
        raise ValueError(
            f"{folder}: holds no {METHOD_FILE}; name the folder best or cheapest of a compare_<time> folder"
        )
    saved: dict[str, Any] = read_json(path)
    if saved.get("method") not in BY_NAME:
        raise ValueError(f"{path}: method {saved.get('method')!r} is unknown in this version; run the comparison again")
    runs = {name: (comparison / saved_path).resolve() for name, saved_path in saved["runs"].items()}
    if missing := [str(run) for run in runs.values() if not run.is_dir()]:
        raise ValueError(f"{path}: the run {missing[0]} is missing; put it back, or run the comparison again")
    if changed := [str(run) for name, run in runs.items() if saved["trained"][name] != digest(run)]:
        raise ValueError(f"{path}: {changed[0]} was trained again since; run the comparison again")
    limits = saved["limits"]
    base = load_segmenter(located_model(comparison, saved, "the model"), device, *limits)
    if base.fingerprint != saved["model_fingerprint"]:
        warnings.warn(f"{path}: measured with other weights, or on another kind of device, than these", stacklevel=2)
    merged = {name: run / MERGED for name, run in runs.items() if name in WEIGHTS}
    models = Models(base, merged, lambda weights: load_segmenter(weights, device, *limits), None)
    network = None
    if REWARD_NET in runs:
        network = RewardNetwork.from_pretrained(runs[REWARD_NET] / BEST_REWARD_NET).to(device)
    trained, method = Trained(saved["prompts"], runs), BY_NAME[saved["method"]]
    return DeployedMethod(method, saved["weights"], saved["parameter"], trained, models, network, saved)
