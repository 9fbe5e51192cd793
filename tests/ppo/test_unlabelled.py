"""Unlabelled images in step 2: half of the training images, never their masks; the report; resuming."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rl_reward_network.artefacts import read_json
from rl_reward_network.cli import prompts as command
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import RunInputs, open_inputs
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.ppo.config import PPOSettings
from rl_reward_network.ppo.evaluate import MovedInputs, run_evaluation_stage
from rl_reward_network.ppo.stage import PolicyPlan, check_settings, policy_plan, run_policy_stage
from rl_reward_network.ppo.unlabelled import with_unlabelled
from rl_reward_network.report.unlabelled import LEFT_OUT, TEST, USED
from rl_reward_network.reward_training.stage import run_reward_stage
from rl_reward_network.rewards import out_of_distribution
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.run import REWARD_RUN, Run
from tests.conftest import tube_image, write_tiny_data
from tests.reward_training.test_stage import plan_of

PLAN = policy_plan("quick", ppo=PPOSettings(total_timesteps=64))


@pytest.fixture(scope="module", autouse=True)
def load_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl_reward_network.inputs.segmenter.load_sa2va_model", cache(load_sa2va_model))
        yield


def write_new_patients(folder: Path, count: int = 6) -> Path:
    """A data folder of other patients, all with masks."""
    write_tiny_data(folder, images=count, size=64)
    records = json.loads((folder / "annotations.json").read_text())
    for number, record in enumerate(records):
        Image.fromarray(tube_image(64, 500 + number)[0]).save(folder / "images" / record["image"])
        record["group"] = f"new {number}"
    (folder / "annotations.json").write_text(json.dumps(records))
    return folder


@pytest.fixture(scope="module")
def inputs(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> RunInputs:
    folder = tmp_path_factory.mktemp("world")
    data, new = write_tiny_data(folder / "data", images=12, size=64), write_new_patients(folder / "new")
    return open_inputs(RunConfig(str(tiny_checkpoint), data, folder / "outputs", gpu=-1, unlabelled_root=new))


@pytest.fixture(scope="module")
def run(inputs: RunInputs) -> Path:
    reward_run, run = inputs.config.output_dir / "reward_net_1", inputs.config.output_dir / "sa2va_rl_finetune_1"
    run_reward_stage(inputs, plan_of(inputs), Run(reward_run, REWARD_RUN))
    masks = list((inputs.config.unlabelled_root or Path()).glob("masks/*.png"))
    assert len(masks) == 6
    stored = {mask: mask.read_bytes() for mask in masks}
    for mask in masks:
        mask.write_bytes(b"no picture")  # training never reads them
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(out_of_distribution, "within", lambda scores, *_: np.ones(len(scores), bool))
        run_policy_stage(inputs, PLAN, reward_run / "best_reward_net", run)
    for mask, content in stored.items():
        mask.write_bytes(content)
    return run


def test_half_of_the_training_images_are_unlabelled(inputs: RunInputs, run: Path) -> None:
    assert inputs.unlabelled is not None
    new = {sample.sample_id for sample in inputs.unlabelled.samples}
    tables = read_json(run / "tables.json")
    used = [entry for entry in tables["policy"] if entry["sample_id"] in new]
    assert len(used) == 6
    assert len(tables["policy"]) - len(used) == len(inputs.pick("policy", 100))
    assert all(entry["metrics"] is None for entry in used)
    assert not new & {entry["sample_id"] for entry in tables["val"]}
    facts = read_json(run / "final_model" / "config.json")["unlabelled"]
    assert (facts["looked_at"], facts["left_out"]) == (6, 0)
    assert "6 unlabelled images of 6 groups, 6 of them with a mask" in inputs.summary


def test_the_report_shows_reward_spread_and_gold(run: Path) -> None:
    _, page = run_evaluation_stage(run / "final_model", MovedInputs())
    section = read_json(page.parent / "eval.json")["unlabelled"]
    names, rows = zip(*((row["name"], row) for row in section["rows"]), strict=True)
    assert names[0] == TEST
    assert set(names[1:]) <= {USED, LEFT_OUT}
    assert sum(row["images"] for row in rows[1:]) == sum(row["labelled"] for row in rows[1:]) == 6
    assert section["notes"][0].startswith("None of 6 unlabelled images was left out")
    text = page.read_text()
    assert "<h2>Unlabelled images</h2>" in text
    assert "labels read by the evaluation only" in text


def test_without_the_folder_the_report_has_no_section(inputs: RunInputs, run: Path) -> None:
    root = inputs.config.unlabelled_root
    assert root is not None
    root.rename(root.with_name("gone"))
    _, page = run_evaluation_stage(run / "final_model", MovedInputs(), images=2)
    root.with_name("gone").rename(root)
    assert "unlabelled" not in read_json(page.parent / "eval.json")


def test_a_folder_that_changed_since_training_has_no_section(inputs: RunInputs, run: Path) -> None:
    records = (inputs.config.unlabelled_root or Path()) / "annotations.json"
    stored = records.read_text()
    records.write_text(json.dumps(json.loads(stored)[:4]))
    with pytest.warns(UserWarning, match="other images than in training"):
        _, page = run_evaluation_stage(run / "final_model", MovedInputs(), images=2)
    assert "unlabelled" not in read_json(page.parent / "eval.json")
    records.write_text("[]")
    with pytest.warns(UserWarning, match="left out of the evaluation"):
        run_evaluation_stage(run / "final_model", MovedInputs(), images=2)
    records.write_text(stored)


def test_a_resumed_run_has_the_same_unlabelled_images(inputs: RunInputs, run: Path) -> None:
    assert check_settings(run, inputs, PLAN)["origin"]["unlabelled"]
    with pytest.raises(ValueError, match=r"--resume: it began with other settings .*unlabelled"):
        check_settings(run, replace(inputs, unlabelled=None), PLAN)
    config = read_json(run / "config.json")
    old = {**config, "origin": {name: value for name, value in config["origin"].items() if name != "unlabelled"}}
    (run / "config.json").write_text(json.dumps(old))
    assert check_settings(run, replace(inputs, unlabelled=None), PLAN), "of a version without the field"
    with pytest.raises(ValueError, match="unlabelled"):
        check_settings(run, inputs, PLAN)
    (run / "config.json").write_text(json.dumps(config))


def picked(inputs: RunInputs, images: int, maps: ForegroundMaps) -> tuple[int, int]:
    """Training images of the data, and unlabelled ones."""
    samples = {"policy": inputs.pick("policy", images), "val": inputs.pick("val", 9)}
    joined, _ = with_unlabelled(inputs, images, samples, maps)
    assert joined["val"] == samples["val"]
    assert inputs.unlabelled is not None
    new = {sample.sample_id for sample in inputs.unlabelled.samples}
    count = sum(sample.sample_id in new for sample in joined["policy"])
    return len(joined["policy"]) - count, count


def test_images_of_the_data_take_the_place_of_those_left_out(
    inputs: RunInputs, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = ForegroundMaps(RewardNetwork.from_pretrained(run / "reward_net"))
    with monkeypatch.context() as patch:
        patch.setattr(out_of_distribution, "within", lambda scores, *_: np.ones(len(scores), bool))
        assert picked(inputs, 3, maps) == (2, 1)
    monkeypatch.setattr(out_of_distribution, "FACTOR", 0.0)  # of the largest spread
    assert picked(inputs, 3, maps) == (3, 0)


def test_a_reward_that_needs_masks_is_refused(inputs: RunInputs, tmp_path: Path) -> None:
    config = RunConfig(unlabelled_root=tmp_path)
    with pytest.raises(ValueError, match="--unlabelled_root has no masks, but --reward dice"):
        command.check(command.Args("quick", config, reward="dice"))
    plan: PolicyPlan = replace(PLAN, reward="mix")
    with pytest.raises(ValueError, match="--unlabelled_root has no masks, but --reward mix"):
        run_policy_stage(inputs, plan, tmp_path / "none", tmp_path / "run")
