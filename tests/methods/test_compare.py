"""A comparison as a whole on a tiny model: measure once, report, deploy, refuse what does not fit."""

import csv
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.atomic_io import read_json, write_json
from rl_reward_network.cli import segment
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import RunInputs, open_inputs
from rl_reward_network.methods import compare
from rl_reward_network.methods.compare import ComparePlan, Progress, load_deployed, measure_method, run_compare_stage
from rl_reward_network.methods.methods import METHODS, POST, PROMPTS_LABELS, PROMPTS_NET, TRAINED, Method
from rl_reward_network.methods.training import REWARD_NET, digest
from rl_reward_network.methods.view import BASE, FrozenModel, ImageView, Trained
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.ppo.prompts import policy_plan, post_plan, run_policy_stage
from rl_reward_network.ppo.settings import PPOSettings
from rl_reward_network.report.deployment import COST
from rl_reward_network.reward_training.stage import run_reward_stage
from rl_reward_network.rewards.learned import ImageScorer
from rl_reward_network.run import COMPARE_RUN, POLICY_RUN, POST_RUN, REWARD_RUN, Run
from tests.conftest import tiny_reward_plan, write_tiny_data

PLAN = ComparePlan("quick", ("prompts", "post", "fusion"), (0,))
pytestmark = pytest.mark.usefixtures("load_once")


@pytest.fixture(scope="module")
def inputs(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> RunInputs:
    folder = tmp_path_factory.mktemp("world")
    data = write_tiny_data(folder / "data", images=14, size=64)
    return open_inputs(RunConfig(str(tiny_checkpoint), data, folder / "outputs", gpu=-1))


@pytest.fixture(scope="module")
def runs(inputs: RunInputs) -> dict[str, Path]:
    """A tiny run of each kind."""
    output = inputs.config.output_dir
    found = {REWARD_NET: output / "reward_net_1", POST: output / "sa2va_post_process_1"}
    found |= {PROMPTS_LABELS: output / "sa2va_rl_finetune_1", PROMPTS_NET: output / "sa2va_rl_finetune_3"}
    run_reward_stage(inputs, tiny_reward_plan(inputs), Run(found[REWARD_NET], REWARD_RUN))
    network = found[REWARD_NET] / "best_reward_net"
    few = PPOSettings(total_timesteps=64)
    of_labels = policy_plan("quick", reward="dice", ppo=few)
    run_policy_stage(inputs, policy_plan("quick", ppo=few), network, Run(found[PROMPTS_NET], POLICY_RUN))
    run_policy_stage(inputs, of_labels, network, Run(found[PROMPTS_LABELS], POLICY_RUN))
    settings = PPOSettings(128, n_envs=2, n_steps=8, batch_size=16, gamma=0.5)
    run_policy_stage(inputs, post_plan("quick", ppo=settings), None, Run(found[POST], POST_RUN))
    return found


def compared(inputs: RunInputs, runs: Mapping[str, Path], name: str, plan: ComparePlan = PLAN) -> Path:
    run = inputs.config.output_dir / name
    with pytest.MonkeyPatch.context() as patch:
        for needed, path in runs.items():
            patch.setitem(TRAINED, needed, lambda job, path=path: (path, True))
        run_compare_stage(inputs, plan, None, Run(run, COMPARE_RUN), "typed")  # type: ignore[arg-type]
    return run


@pytest.fixture(scope="module")
def run(inputs: RunInputs, runs: dict[str, Path]) -> Path:
    return compared(inputs, runs, "compare_1")


def table(run: Path, name: str = "table.csv") -> list[dict[str, str]]:
    with (run / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_method_stands_in_the_table_with_its_cost(run: Path) -> None:
    rows = table(run)
    minutes, masks, labels, parameters = (
        {row["method"]: float(row[column]) for row in rows}
        for column in ("minutes", "masks_per_image", "labelled_images", "trained_parameters")
    )
    assert len(rows) == len(minutes) == 14
    assert next(row["dice_minus_base_mean"] for row in rows if row["method"] == "base") == "0"
    assert (masks["best_of_prompts"], masks["reward_net_segmentation"]) == (11, 0)
    assert masks["experiment3"] <= 2
    assert labels["fusion"] > 0 == minutes["base"]
    assert minutes["experiment2"] > minutes["sequence"] > 0
    assert parameters["sequence"] == 0 < parameters["experiment2"]
    assert minutes["fixed_prompt"] < minutes["experiment1"] < minutes["experiment3"], "which needs the network"


def test_the_report_is_one_file_with_every_method_on_the_same_images(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert len(re.findall("<figure>", page)) == 3 * (2 + 14 + 1), "the untouched image above and below"
    assert page.index("Best, median and worst test image") < page.index("<h2>Results") < page.index("<details>")
    assert "typed" in page
    assert page.count('<p class="verdict">') == 1
    assert page.count("(chosen)</td>") == 3, "in each table"
    assert 'src="http' not in page
    assert r"\toprule" in (run / "table.tex").read_text()
    images = read_json(run / "eval.json")["images"]
    assert len((run / "eval.csv").read_text().splitlines()) == 1 + 14 * images


def test_what_was_measured_is_not_measured_again(
    inputs: RunInputs, runs: dict[str, Path], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "measure_method", None)
    again = compared(inputs, runs, "compare_2")
    assert (again / "table.csv").read_text() == (run / "table.csv").read_text()


class Killed(BaseException):
    pass


def test_killed_between_two_methods_it_ends_in_the_same_table(
    inputs: RunInputs, runs: dict[str, Path], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fusion", "ascent"):
        for path in (inputs.config.output_dir / compare.RESULTS).glob(f"{name}_*"):
            path.unlink()

    def killed(method, *args):  # type: ignore[no-untyped-def]
        if method.name == "ascent":
            raise Killed
        return measure_method(method, *args)

    with monkeypatch.context() as patch:
        patch.setattr(compare, "measure_method", killed)
        with pytest.raises(Killed):
            compared(inputs, runs, "compare_3")
    assert not (inputs.config.output_dir / "compare_3" / "report.html").exists()
    resumed = compared(inputs, runs, "compare_3")
    assert (resumed / "table.csv").read_text() == (run / "table.csv").read_text()


def test_a_run_of_another_split_is_refused(inputs: RunInputs, runs: dict[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "reward_net_2"
    other.mkdir()
    for path in runs[REWARD_NET].iterdir():
        (other / path.name).symlink_to(path)
    (other / "split.json").unlink()
    split = read_json(runs[REWARD_NET] / "split.json")
    split["groups"]["val"], split["groups"]["test"] = split["groups"]["test"], split["groups"]["val"]
    write_json(other / "split.json", split)
    with pytest.raises(ValueError, match="another split"):
        compared(inputs, {**runs, REWARD_NET: other}, "compare_4")


def test_another_comparison_in_the_folder_is_refused(inputs: RunInputs, runs: dict[str, Path], run: Path) -> None:
    with pytest.raises(ValueError, match="began with other settings"):
        compared(inputs, runs, run.name, replace(PLAN, groups=("fusion",)))


def test_best_and_cheapest_segment_new_images(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.fromarray(np.full((50, 70, 3), 120, np.uint8)).save(tmp_path / "new.png")
    segment.main(segment.Args((tmp_path / "new.png",), str(run / "best"), device="cpu"))
    assert Image.open(tmp_path / "new_mask.png").size == (70, 50)
    assert "masks of: " in capsys.readouterr().out
    with pytest.raises(ValueError, match="prompt 'x': the masks of this model do not depend on a prompt"):
        segment.main(segment.Args((tmp_path / "new.png",), str(run), prompt="x"))
    with pytest.raises(ValueError, match=r"holds no method\.json"):
        load_deployed(tmp_path, "cpu")


def deployed(run: Path, name: str, **changed: Any) -> Path:
    """A folder beside best/ that deploys another method of the comparison."""
    saved, evaluation = read_json(run / "best" / "method.json"), read_json(run / "eval.json")
    row = next(row for row in evaluation["rows"] if row["method"] == name)
    parameter = float(row["chosen_on_validation"]) if name == "fusion" else None
    runs = evaluation["config"]["runs"]
    trained = {part: digest(run / path) for part, path in runs.items()}
    saved |= {"method": name, "parameter": parameter, "runs": runs, "trained": trained, "weights": "base"} | changed
    write_json(run / "other" / "method.json", saved)
    return run / "other"


def test_what_was_trained_again_is_not_deployed(run: Path) -> None:
    runs = read_json(run / "eval.json")["config"]["runs"]
    with pytest.raises(ValueError, match="was trained again since"):
        load_deployed(deployed(run, POST, trained=dict.fromkeys(runs, "of before")), "cpu")
    with pytest.raises(ValueError, match=r"the run .*gone is missing; put it back"):
        load_deployed(deployed(run, POST, runs={POST: "gone"}), "cpu")
    with pytest.raises(ValueError, match="'magic' is unknown in this version"):
        load_deployed(deployed(run, BASE, method="magic"), "cpu")
    with pytest.warns(UserWarning, match="measured with other weights"):
        load_deployed(deployed(run, POST, model_fingerprint="of another model"), "cpu")


@pytest.mark.parametrize(
    "method",
    ["base", "experiment1", "experiment3", "experiment2", "fusion", "reward_net_segmentation", "weighted_mean"],
)
def test_a_deployed_method_gives_the_mask_that_was_measured(inputs: RunInputs, run: Path, method: str) -> None:
    line = next(line for line in table(run, "eval.csv") if line["method"] == method)
    sample = next(sample for sample in inputs.samples if sample.sample_id == line["sample_id"])
    soft, truth = load_deployed(deployed(run, method), "cpu").soft(sample.load_image()), sample.load_mask()
    assert soft is not None
    assert truth is not None
    mask = soft > 0.5
    overlap = 2 * (mask & truth).sum() / max(1, mask.sum() + truth.sum())
    assert overlap == pytest.approx(float(line["dice"]), abs=2e-3)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_method_makes_one_mask_of_an_image_alone(method: Method, inputs: RunInputs, runs: dict[str, Path]) -> None:
    """Of the image's size, the same twice, from a folder without true masks; each value of the grid gives one."""
    model = FrozenModel(inputs.segmenter.segment, inputs.segmenter.upsample)
    scorer = partial(ImageScorer, RewardNetwork.from_pretrained(runs[REWARD_NET] / "best_reward_net"))
    image = np.random.default_rng(3).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    trained = Trained(inputs.prompts, runs)
    for parameter in method.grid or (None,):
        once, again = (method.predict(ImageView(image.copy(), model, scorer), trained, parameter) for _ in range(2))
        assert once.shape == (40, 56)
        assert np.issubdtype(once.dtype, np.floating)
        assert np.isfinite(once).all()
        assert (once == again).all()


def test_every_run_has_written_its_cost(runs: dict[str, Path]) -> None:
    for run in runs.values():
        cost: dict[str, Any] = read_json(run / COST)
        assert min(cost["seconds"].values()) > 0
        assert cost["parameters"] > 0
        assert cost["peak_memory_gib"] > 0
        assert not cost["resumed"]
    assert read_json(runs[REWARD_NET] / COST)["labels"]["reward"].keys() == {"reward", "val"}
    assert "PPO" in read_json(runs[POST] / COST)["seconds"]


def test_minutes_left_are_the_means_of_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 600.0, 601.0, 661.0, 841.0, 842.0])
    progress = Progress({"run": 2, "method": 3}, lambda: next(times))
    progress.done("run", "reward_net: trained", reused=False)  # 10 minutes
    progress.done("run", "experiment1: reused", reused=True)  # no example of how long training takes
    progress.done("method", "base: measured", reused=False)  # 1 minute
    progress.done("method", "own: measured", reused=False)  # 3 minutes
    progress.done("method", "fusion: measured before", reused=True)
    assert capsys.readouterr().out.splitlines() == [
        "reward_net: trained; 1 run and 3 methods left",
        "experiment1: reused; 3 methods left",
        "base: measured; 2 methods left, about 2 min",
        "own: measured; 1 method left, about 2 min",
        "fusion: measured before; nothing left",
    ]
