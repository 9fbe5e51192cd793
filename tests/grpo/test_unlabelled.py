"""Unlabelled images in GRPO: training prompts without masks; the report; resuming; what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_reward_network.artefacts import read_json
from rl_reward_network.cli import grpo, grpo_flags, reward
from rl_reward_network.grpo.evaluate import run_grpo_evaluation
from rl_reward_network.grpo.inputs import GRPOInputs, open_grpo_inputs, with_unlabelled
from rl_reward_network.grpo.settings import GRPOPlan, GRPOSettings, RewardWeights
from rl_reward_network.grpo.stage import describe, run_grpo_stage
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.report.unlabelled import LEFT_OUT, TEST, USED
from rl_reward_network.rewards import out_of_distribution
from rl_reward_network.rewards.learned import ForegroundMaps
from rl_reward_network.run import GRPO_RUN, Run
from tests.conftest import write_tiny_data
from tests.grpo.test_stage import ONE_STEP, PLAN, changed
from tests.models.test_reward_network import network_of
from tests.ppo.test_prompts import write_new_patients


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> GRPOInputs:
    folder = tmp_path_factory.mktemp("world")
    data, new = write_tiny_data(folder / "data", images=6, size=64), write_new_patients(folder / "new")
    return open_grpo_inputs(RunConfig(data_root=data, unlabelled_root=new, output_dir=folder / "out", gpu=-1))


@pytest.fixture(scope="module")
def network() -> RewardNetwork:
    return network_of(RewardNetworkConfig(channels=(4, 8), members=2, packing=2))


@pytest.fixture(scope="module")
def plan(network: RewardNetwork) -> GRPOPlan:
    plan = replace(PLAN, weights=RewardWeights(0.0, 0.0, 0.0, 0.0, 1.0), reward_net=network.fingerprint)
    return changed(plan, mask_to_caption_weight=0.0, pathwise_weight=1.0, **ONE_STEP)


@pytest.fixture(scope="module")
def run(inputs: GRPOInputs, network: RewardNetwork, plan: GRPOPlan) -> Path:
    run = inputs.config.output_dir / "sa2va_grpo_1"
    masks = {mask: mask.read_bytes() for mask in (inputs.config.unlabelled_root or Path()).glob("masks/*.png")}
    for mask in masks:
        mask.write_bytes(b"no picture")  # training never reads them
    run_grpo_stage(inputs, plan, run, network=network)
    for mask, content in masks.items():
        mask.write_bytes(content)
    return run


def test_they_join_the_training_prompts_without_masks(
    inputs: GRPOInputs, network: RewardNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, maps = inputs.pick("policy"), ForegroundMaps(network)
    with monkeypatch.context() as patch:
        patch.setattr(out_of_distribution, "within", lambda scores, *_: np.ones(len(scores), bool))
        prompts, ood_check = with_unlabelled(inputs, own, maps)
    assert prompts[: len(own)] == own
    assert len(prompts) == len(own) + 6
    assert ood_check is not None
    assert (ood_check.looked_at, ood_check.left_out) == (6, 0)
    for prompt in prompts[len(own) :]:
        image, truth = prompt.load()
        assert (image.shape, truth, prompt.labelled) == ((64, 64, 3), None, False)
    assert len({prompt.sample_id for prompt in prompts}) == len(prompts)
    monkeypatch.setattr(out_of_distribution, "FACTOR", 0.0)  # of the largest spread
    prompts, ood_check = with_unlabelled(inputs, own, maps)
    assert (prompts, ood_check and ood_check.left_out) == (own, 6)
    assert with_unlabelled(replace(inputs, unlabelled=None), own, maps) == (own, None)
    assert with_unlabelled(inputs, own, None) == (own, None)


def test_the_report_shows_them_before_and_after(inputs: GRPOInputs, run: Path) -> None:
    result, page = run_grpo_evaluation(run / "final_model")
    section = read_json(page.parent / "eval.json")["unlabelled"]
    by_name = {row["name"]: row for row in section["rows"]}
    assert set(by_name) <= {TEST, USED, LEFT_OUT}
    assert sum(row["images"] for name, row in by_name.items() if name != TEST) == 6
    tests = by_name[TEST]
    for when, estimate in zip(("before", "after"), tests["score"], strict=False):
        assert estimate["mean"] == pytest.approx(np.mean(getattr(result, when).values["learned"]), abs=1e-6)
    for when, estimate in zip(("before", "after"), tests["dice"], strict=False):
        assert estimate["mean"] == pytest.approx(np.mean(getattr(result, when).values["dice"]), abs=1e-6)
    facts = read_json(run / "final_model" / "config.json")["unlabelled"]
    assert sum(row["images"] for name, row in by_name.items() if name == LEFT_OUT) == facts["left_out"]
    assert "<h2>Unlabelled images</h2>" in page.read_text()
    assert "labels read by the evaluation only" in page.read_text()


def test_a_resumed_run_has_the_same_unlabelled_images(inputs: GRPOInputs, run: Path, plan: GRPOPlan) -> None:
    config = read_json(run / "config.json")
    fingerprint = config["origin"]["model_fingerprint"]
    Run(run, GRPO_RUN).check_same(describe(inputs, plan, fingerprint))
    without = describe(replace(inputs, unlabelled=None), plan, fingerprint)
    with pytest.raises(ValueError, match=r"--resume: it began with other settings .*unlabelled"):
        Run(run, GRPO_RUN).check_same(without)
    old = {**config, "origin": {name: value for name, value in config["origin"].items() if name != "unlabelled"}}
    (run / "config.json").write_text(json.dumps(old))
    Run(run, GRPO_RUN).check_same(without)
    (run / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grpo": GRPOSettings(objective="supervised")}, "--unlabelled_root .*--objective supervised"),
        ({"rewards": {"loop2_iou_weight": 1.0, "reward_net": Path("n")}}, "--unlabelled_root .*--loop2_iou_weight"),
        ({"rewards": {"loop2_mask_rewards": {"dice": 1.0}}}, "--unlabelled_root .*--loop2_mask_rewards"),
        ({}, "--unlabelled_root needs .*--reward_net"),
    ],
)
def test_what_needs_masks_is_refused_early(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    config = RunConfig(data_root=tmp_path, unlabelled_root=tmp_path, gpu=-1)
    rewards = grpo_flags.RewardArgs(**change.pop("rewards", {}))
    with pytest.raises(ValueError, match=message):
        grpo.check(grpo.Args("quick", config, rewards=rewards, **change))
    with pytest.raises(ValueError, match="--unlabelled_root does nothing here"):
        reward.check(reward.Args("quick", config))
