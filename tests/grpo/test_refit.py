"""Re-fits of the reward network: what is trusted, what a re-fit learns from, when it counts, and whole runs."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rl_reward_network.artefacts import read_json
from rl_reward_network.data.splits import select
from rl_reward_network.data.windows import LabelledImages
from rl_reward_network.grpo import ranks, refit
from rl_reward_network.grpo.checkpoint import REWARD_WEIGHTS
from rl_reward_network.grpo.inputs import GRPOInputs, open_grpo_inputs
from rl_reward_network.grpo.plan import PlanArgs, make_plan
from rl_reward_network.grpo.refit import (
    STEPS,
    TOLERANCE,
    RefitCallback,
    Round,
    fitted_again,
    pseudo_labelled,
    refit_prompts,
    trusted,
)
from rl_reward_network.grpo.settings import GRPOPlan, GRPOSettings, RewardWeights
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.models.lora import WEIGHTS
from rl_reward_network.models.reward_network import DiceInterval, RewardNetwork
from rl_reward_network.report.cost import RunCost
from rl_reward_network.reward_training.stage import check_no_leak
from rl_reward_network.reward_training.train import RewardTrainingConfig, own_scores
from rl_reward_network.rewards.learned import ForegroundMaps
from tests.conftest import tube_image, write_tiny_data
from tests.grpo.nano import SETTINGS, train
from tests.models.test_reward_network import SMALL, network_of

TRAINING = {"images": 2, "batch_size": 4, "learning_rate": 1e-2, "weight_decay": 0.01, "dice_weight": 0.5, "steps": 9}
CONFIG = RewardTrainingConfig(**TRAINING)
PLAN = GRPOPlan(
    "quick",
    RewardWeights(0.0, 0.0, 0.0, 0.0, learned=1.0),
    lora_r=4,
    lora_alpha=8,
    settings=GRPOSettings(
        **SETTINGS
        | {"mask_to_caption_weight": 0.0, "max_steps": 4, "save_steps": 2, "pathwise_weight": 1.0, "refit_steps": 1}
        | {"learning_rate": 1e-3, "num_mask_generations": 2, "per_device_train_batch_size": 4}
    ),
    eval_steps=10,
)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> GRPOInputs:
    folder = tmp_path_factory.mktemp("project")
    data = write_tiny_data(folder / "data", images=12, size=64)
    return open_grpo_inputs(RunConfig(data_root=data, output_dir=folder / "out", gpu=-1))


def network_for(inputs: GRPOInputs) -> RewardNetwork:
    """Random weights that say they were trained on two labelled images of the reward split."""
    network = network_of(replace(SMALL, intervals={"Sa2VA": DiceInterval(-1.0, 1.0, 0.1, 20)}))
    groups = {name: list(ids) for name, ids in inputs.split.groups.items()}
    info = {"settings": TRAINING, "seed": 0, "train_groups": groups["reward"], "val_groups": groups["val"]}
    network.training_info = info
    return network.requires_grad_(False)


@pytest.fixture(scope="module")
def run(images: GRPOInputs) -> Iterator[Path]:
    """A run whose re-fits, after its steps 1 to 3, all count."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refit, "TOLERANCE", 1.0)
        patch.setattr(refit, "STEPS", 2)
        yield train(images, PLAN, images.config.output_dir / "sa2va_grpo_1", network=network_for(images))


def test_masks_that_split_the_members_or_score_low_are_not_trusted() -> None:
    scores, spreads = np.array([0.9, 0.8, 0.7, 0.2]), np.array([0.1, 0.3, 0.05, 0.01])
    assert trusted(scores, spreads).tolist() == [False, False, False, False], "0.1 and 0.3 split them, 0.7 is too low"
    assert trusted(scores, np.array([0.04, 0.3, 0.05, 0.01])).tolist() == [True, False, False, False]
    assert trusted(scores, np.zeros(4)).tolist() == [True, True, False, False], "one member always agrees with itself"
    assert trusted(np.zeros(0), np.zeros(0)).tolist() == []


class Judged:
    """A reward network whose members' scores of an image's masks follow from the image's grey level."""

    def scorer(self, image: np.ndarray) -> Any:
        members = {10: [0.9, 0.9], 20: [0.8, 0.8], 30: [0.9, 0.5], 40: [0.1, 0.3], 50: [np.nan] * 2}[int(image.max())]

        def quality(masks: np.ndarray) -> dict[str, np.ndarray]:
            return {"score": np.array([np.mean(members)]), "member_scores": np.array([members])}

        return SimpleNamespace(quality=quality)


def test_empty_and_missing_masks_and_those_without_a_score_never_become_labels() -> None:
    levels = [np.full((4, 4, 3), level, np.uint8) for level in (10, 20, 30, 40, 10, 10, 50)]
    mask, empty = np.eye(4, dtype=bool), np.zeros((4, 4), dtype=bool)
    maps: Any = Judged()
    found = pseudo_labelled(maps, levels, [mask, ~mask, mask, mask, empty, None, mask])
    assert [int(image.max()) for image in found.images] == [10, 20]
    assert np.array_equal(found.truths, [mask, ~mask])
    assert pseudo_labelled(maps, levels[:1], [empty]).images == []


def flat(level: int, count: int) -> LabelledImages:
    return LabelledImages([np.full((32, 32, 3), level, np.uint8)] * count, [np.ones((32, 32), dtype=bool)] * count)


def test_half_of_each_batch_is_labelled_at_a_tenth_of_the_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def noted(member: Any, optimizer: Any, batch: Any, config: Any, step: int) -> None:
        group = optimizer.param_groups[0]
        seen.append((batch[0].mean(dim=(1, 2, 3)) > 0.5, group["lr"], group["weight_decay"], member.training))

    monkeypatch.setattr(refit, "train_step", noted)
    network = network_of()
    fitted_again(network, flat(0, 3), flat(255, 5), CONFIG, [0, 1])
    assert len(seen) == STEPS * len(network.members)
    for bright, rate, decay, _ in seen:
        assert bright.tolist() == [False, False, True, True], "labelled images are black, the others white"
        assert (rate, decay) == (pytest.approx(1e-3), 0.01)


def test_a_refit_learns_both_kinds_and_follows_its_seed() -> None:
    """Images of tubes; the network begins with random weights."""
    pairs = [tube_image(64, number) for number in range(4)]
    labelled = LabelledImages([image for image, _ in pairs[:2]], [mask for _, mask in pairs[:2]])
    pseudo = LabelledImages([image for image, _ in pairs[2:]], [mask for _, mask in pairs[2:]])
    network = network_of().requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    fitted, again, other = (fitted_again(network, labelled, pseudo, CONFIG, [0, seed]) for seed in (1, 1, 2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in fitted.state_dict().items())
    assert not torch.equal(fitted.members[0].head.weight, other.members[0].head.weight)  # type: ignore[union-attr]
    assert not any(parameter.requires_grad for parameter in fitted.parameters())
    assert not fitted.training
    for data in (labelled, pseudo):
        assert own_scores(fitted, data)["soft_dice"] > own_scores(network, data)["soft_dice"] + 0.05


class FakeTrainer:
    """What a re-fit needs of a trainer."""

    def __init__(self, prompts: Any, main: bool = True, processes: int = 1) -> None:
        self.args = SimpleNamespace(seed=0, refit_steps=2)
        self.prompts, self.phases, self.logged = prompts, {}, []  # type: ignore[var-annotated]
        self.accelerator = SimpleNamespace(is_main_process=main, num_processes=processes)

    def log_now(self, values: dict[str, float]) -> None:
        self.logged.append(values)


def stepped(callback: RefitCallback, step: int, stops: bool = False) -> None:
    """The end of a step of a run of eight."""
    control = SimpleNamespace(should_training_stop=stops)
    callback.on_step_end(callback.trainer.args, SimpleNamespace(global_step=step, max_steps=8), control)


@pytest.fixture
def callback(images: GRPOInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RefitCallback:
    """Of a model whose masks are the true ones."""
    network, prompts = network_for(images), images.pick("policy")

    def masks(trainer: Any, prompts: Any) -> Any:
        loaded = [prompt.load() for prompt in prompts]
        return [image for image, _ in loaded], [mask for _, mask in loaded]

    monkeypatch.setattr(refit, "student_masks", masks)
    monkeypatch.setattr(refit, "STEPS", 2)
    maps = ForegroundMaps(network, tmp_path / "maps")
    trainer: Any = FakeTrainer(prompts)
    return RefitCallback(trainer, maps, refit_prompts(images, network))


@pytest.mark.parametrize(("after", "accepted"), [(0.6, True), (0.4951, True), (0.4949, False)])
def test_a_network_that_segments_worse_does_not_count(
    callback: RefitCallback, monkeypatch: pytest.MonkeyPatch, after: float, accepted: bool
) -> None:
    assert TOLERANCE == 0.005
    callback.initial = 0.5
    dice = iter([0.499, after])  # an earlier re-fit has lost a little: the limit stays where it was
    monkeypatch.setattr(refit, "own_scores", lambda *_: {"dice": next(dice)})
    image = callback.trainer.prompts[0].load()[0]
    maps, network = callback.maps, callback.network
    before, folder, fingerprint = maps.probs(image), maps.folder, network.fingerprint
    stepped(callback, 2)
    logged: Any = callback.trainer
    (line,) = logged.logged
    assert 0 < line.pop("refit/pseudo_labels") <= len(callback.trainer.prompts)
    assert line == {
        "refit/val_dice_before": 0.499,
        "refit/val_dice_after": after,
        "refit/accepted": float(accepted),
    }
    assert (network.fingerprint != fingerprint) == accepted
    assert torch.equal(maps.probs(image), before) != accepted
    assert maps.folder == (None if accepted else folder)
    exact = network.foreground_probs(torch.from_numpy(image).permute(2, 0, 1)[None] / 255)
    torch.testing.assert_close(maps.probs(image), exact, atol=1e-3, rtol=0)
    assert maps.network is network, "the rewards hold this network"
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_it_is_due_every_few_steps_while_training_goes_on(
    callback: RefitCallback, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits: list[int] = []

    def noted(step: int) -> Round:
        fits.append(step)
        return Round(0.5, 0.5, 0, None)

    monkeypatch.setattr(callback, "_fit", noted)
    for step in range(1, 9):
        stepped(callback, step, stops=step == 6)
    assert fits == [2, 4], "not when it stops at 6, nor after its last step, 8"


def test_without_a_trusted_mask_there_is_no_refit(callback: RefitCallback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refit, "student_masks", lambda trainer, prompts: ([], []))
    monkeypatch.setattr(refit, "fitted_again", lambda *_: pytest.fail("there is nothing to fit to"))
    found = callback._fit(2)
    assert (found.before, found.pseudo_labels, found.weights) == (found.after, 0, None)


def test_other_processes_take_the_weights_of_the_first(
    callback: RefitCallback, images: GRPOInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {name: tensor + 1 for name, tensor in callback.state_dict().items()}

    def broadcast(values: list[Any]) -> None:
        assert values == [None], "this process fits nothing"
        values[0] = Round(0.5, 0.6, 3, weights)

    monkeypatch.setattr(ranks, "broadcast_object_list", broadcast)
    monkeypatch.setattr(callback, "trainer", FakeTrainer(callback.trainer.prompts, main=False, processes=2))
    stepped(callback, 2)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in callback.network.state_dict().items())
    assert callback.maps.folder is None


def test_it_learns_from_the_labels_of_the_network_alone(images: GRPOInputs) -> None:
    network = network_for(images)
    found = refit_prompts(images, network)
    assert len(found.labelled) == 2, "its budget"
    assert {prompt.group_id for prompt in found.labelled} <= set(images.split.groups["reward"])
    assert len(found.val) == len(select(images.prompts, images.split, "val"))
    one = found.labelled[1].group_id
    network.training_info["train_groups"] = [one]
    assert [prompt.group_id for prompt in refit_prompts(images, network).labelled] == [one]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_groups": []}, "knows no labelled image of the reward split"),
        ({"settings": None}, "has no settings in its config.json"),
    ],
)
def test_a_network_of_unknown_labels_is_refused(images: GRPOInputs, change: dict[str, Any], message: str) -> None:
    network = network_for(images)
    info = {**network.training_info, **change}
    network.training_info = {name: value for name, value in info.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        refit_prompts(images, network)


def test_labels_of_the_validation_must_decide(images: GRPOInputs) -> None:
    groups = set(images.split.groups["val"])
    prompts = [replace(prompt, labelled=prompt.group_id not in groups) for prompt in images.prompts]
    with pytest.raises(ValueError, match="knows no labelled image of the val split"):
        refit_prompts(replace(images, prompts=prompts), network_for(images))


def lines_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_replaces_its_network_and_keeps_the_original(run: Path, images: GRPOInputs) -> None:
    lines = [line for line in lines_of(run) if "refit/accepted" in line]
    assert [(line["step"], line["refit/accepted"]) for line in lines] == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert all(line["refit/pseudo_labels"] >= 1 for line in lines)
    assert lines[1]["refit/val_dice_before"] == lines[0]["refit/val_dice_after"]
    original, fitted = (RewardNetwork.from_pretrained(run / name) for name in ("reward_net", "refitted_reward_net"))
    assert original.fingerprint == network_for(images).fingerprint
    in_checkpoint = load_file(run / "checkpoint-4" / REWARD_WEIGHTS)
    assert all(torch.equal(tensor, in_checkpoint[name]) for name, tensor in fitted.state_dict().items())
    assert not torch.equal(fitted.state_dict()["members.0.head.weight"], original.state_dict()["members.0.head.weight"])
    assert (fitted.config.intervals, original.config.intervals.keys()) == ({}, {"Sa2VA"})
    with pytest.raises(ValueError, match=r"trained on \d+ patients of the policy split"):
        check_no_leak(images.split, fitted, run)
    assert read_json(run / "final_model" / "config.json")["labels"] == 2
    cost = RunCost.load(run)
    assert cost.labels == {"reward": {"reward": 2}, "weights": {"val": len(images.pick("val"))}}
    assert read_json(run / "final_model" / "config.json")["seconds"]["refit"] > 0
    explained = (Path(__file__).parents[2] / "docs" / "reference" / "tensorboard.md").read_text()
    assert [tag for tag in lines[0] if tag.startswith("refit/") and f"`{tag}`" not in explained] == []


def test_a_resumed_run_ends_in_the_same_weights(run: Path, images: GRPOInputs, tmp_path: Path) -> None:
    """It was killed between two re-fits, in a line of its third step."""
    again = tmp_path / "sa2va_grpo_2"
    gone = shutil.ignore_patterns("checkpoint-4", "final_model", "done.json", "refitted*")
    shutil.copytree(run, again, ignore=gone)
    train(images, PLAN, again, network=network_for(images))
    weights = Path("final_model") / "trainable" / WEIGHTS
    for file in (weights, Path("refitted_reward_net") / "model.safetensors", Path("metrics.jsonl")):
        assert (run / file).read_bytes() == (again / file).read_bytes(), file


def test_a_checkpoint_without_the_network_is_refused(run: Path, images: GRPOInputs, tmp_path: Path) -> None:
    again = tmp_path / "sa2va_grpo_2"
    shutil.copytree(run, again, ignore=shutil.ignore_patterns("final_model", "done.json", "refitted*", REWARD_WEIGHTS))
    with pytest.raises(ValueError, match=f"{REWARD_WEIGHTS} is missing; delete this checkpoint"):
        train(images, PLAN, again, network=network_for(images))


def test_a_rejected_refit_changes_nothing_in_a_run(
    images: GRPOInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights as without re-fits, and no second network."""
    monkeypatch.setattr(refit, "TOLERANCE", -1.0)
    monkeypatch.setattr(refit, "STEPS", 1)
    settings = replace(PLAN.settings, max_steps=2, save_steps=2)
    plans = {"with": settings, "without": replace(settings, refit_steps=None)}
    folders = {
        name: train(images, replace(PLAN, settings=own), tmp_path / name, network=network_for(images))
        for name, own in plans.items()
    }
    weights = [folder / "final_model" / "trainable" / WEIGHTS for folder in folders.values()]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert [line["refit/accepted"] for line in lines_of(folders["with"]) if "refit/accepted" in line] == [0.0]
    assert not any((folder / "refitted_reward_net").exists() for folder in folders.values())
    assert not (folders["without"] / "checkpoint-2" / REWARD_WEIGHTS).exists()
    assert read_json(folders["without"] / "final_model" / "config.json")["labels"] == 0


@pytest.mark.parametrize(
    ("settings", "learned", "message"),
    [
        ({}, False, "--refit_steps 4 does nothing in this run: it acts with --reward_net"),
        ({"objective": "mean_teacher"}, True, "--refit_steps 4 does nothing in this run: it acts with --reward_net"),
        ({"refit_steps": 0}, True, "refit_steps is 0, expected 1 or more"),
        ({"num_iterations": 3, "save_steps": 3}, True, "refit_steps is 4, not a multiple of num_iterations 3"),
    ],
)
def test_what_cannot_be_fitted_again_is_refused(
    images: GRPOInputs, settings: dict[str, Any], learned: bool, message: str
) -> None:
    args = PlanArgs("quick", images.config, grpo=GRPOSettings(**{"refit_steps": 4, **settings}))
    with pytest.raises(ValueError, match=message):
        make_plan(args, images, network_for(images) if learned else None)


def test_captioned_regions_have_no_such_network(images: GRPOInputs, grpo_inputs: GRPOInputs) -> None:
    args = PlanArgs("quick", grpo_inputs.config, grpo=GRPOSettings(refit_steps=4))
    with pytest.raises(
        ValueError, match="--refit_steps 4 does nothing in this run: it acts with --reward_net on annotated"
    ):
        make_plan(args, grpo_inputs, network_for(images))
    assert make_plan(PlanArgs("quick", images.config, grpo=args.grpo), images, network_for(images))
