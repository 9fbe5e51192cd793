"""Training with a side network or SAM 2's encoder on annotated images: views, resume, evaluation and merge."""

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_reward_network.atomic_io import read_json, write_json
from rl_reward_network.grpo.evaluate import run_grpo_evaluation
from rl_reward_network.grpo.final_model import merge_run
from rl_reward_network.grpo.inputs import GRPOInputs, open_grpo_inputs
from rl_reward_network.grpo.plan import PlanArgs, RewardArgs, TrainablePartsArgs, make_plan
from rl_reward_network.grpo.settings import GRPOPlan, GRPOSettings, RewardWeights, with_images
from rl_reward_network.grpo.stage import captions_of
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.models.lora import WEIGHTS, load_trainable, read_trainable
from rl_reward_network.models.sa2va.checkpoint_sa2va import EMBEDDED
from rl_reward_network.models.sa2va.families import ENCODER
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from tests.conftest import write_tiny_data
from tests.grpo.nano import SETTINGS, train
from tests.models.test_reward_network import network_of

SETTINGS_OF_IMAGES = SETTINGS | {"objective": "supervised", "mask_to_caption_weight": 0.0, "augment": True}
SETTINGS_OF_IMAGES |= {"learning_rate": 1e-3, "side_learning_rate": 3e-3}
PARTS: dict[str, Any] = {"lora_r": 4, "lora_alpha": 8, "side_network": {"pixels": 128}}
PLAN = GRPOPlan("quick", RewardWeights(0.0, 0.0, 0.0, 1.0), settings=GRPOSettings(**SETTINGS_OF_IMAGES), **PARTS)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> GRPOInputs:
    folder = tmp_path_factory.mktemp("project")
    return open_grpo_inputs(RunConfig(data_root=write_tiny_data(folder / "data"), output_dir=folder / "out", gpu=-1))


@pytest.fixture(scope="module")
def run(images: GRPOInputs) -> Path:
    return train(images, PLAN, images.config.output_dir / "sa2va_grpo_1")


def question_masks(model: Any, processor: Any, inputs: GRPOInputs) -> np.ndarray:
    prompts = inputs.prompts[:2]
    found = model.segment([prompt.load()[0] for prompt in prompts], [prompts[0].question], processor)
    return np.stack([one.probabilities()[0] for (one,) in found])


def test_the_whole_side_network_trains(run: Path) -> None:
    config = read_json(run / "final_model" / "config.json")
    assert not [name for name in config["frozen_because_unreached"] if name.startswith("side_network.")]
    trained = read_trainable(run / "final_model" / "trainable")
    tensors = {name: tensor for name, tensor in trained.items() if name.startswith("side_network.")}
    assert tensors["side_network.head.weight"].any(), "it begins at 0"
    rows = {name: count for name, _, count in config["parameters"]}
    assert rows["side network"] == sum(tensor.numel() for tensor in tensors.values())


def test_a_resumed_run_sees_the_same_views(images: GRPOInputs, run: Path) -> None:
    again = images.config.output_dir / "sa2va_grpo_2"
    shutil.copytree(run, again, ignore=shutil.ignore_patterns("checkpoint-2", "final_model", "done.json", "eval*"))
    train(images, PLAN, again)
    first, second = ((path / "final_model" / "trainable" / WEIGHTS).read_bytes() for path in (run, again))
    assert first == second
    lines = ((path / "metrics.jsonl").read_text().splitlines() for path in (run, again))
    losses = [[line for line in of if "loss/mask" in line] for of in lines]
    assert losses[0] == losses[1]
    plain = replace(PLAN, settings=replace(PLAN.settings, augment=False))
    without = train(images, plain, images.config.output_dir / "sa2va_grpo_3")
    assert (without / "final_model" / "trainable" / WEIGHTS).read_bytes() != first


def test_masks_are_trained_in_reach_of_the_reward_gradient(images: GRPOInputs, tmp_path: Path) -> None:
    """GRPO on the sampled [SEG] embeddings alone does not reach the side network; bernoulli cells do."""
    settings = SETTINGS_OF_IMAGES | {"objective": "grpo", "augment": None, "max_steps": 1, "pathwise_weight": 0.0}
    for policy, reached in (("gaussian", False), ("bernoulli", True)):
        plan = replace(PLAN, settings=GRPOSettings(**settings | {"mask_policy": policy}))
        folder = train(images, plan, tmp_path / policy)
        names = read_json(folder / "config.json")["trainable"]
        assert any(name.startswith("side_network.") for name in names) == reached


LABELS = RewardArgs(loop2_iou_weight=1.0)


@pytest.mark.parametrize("adapters", [TrainablePartsArgs(True), TrainablePartsArgs(encoder="lora")])
def test_adapters_out_of_reach_of_every_gradient_are_refused(images: GRPOInputs, adapters: TrainablePartsArgs) -> None:
    flag = "--side_network" if adapters.side_network else "--encoder"
    with pytest.raises(ValueError, match=f"{flag} would not train, for --mask_policy gaussian .* give --objective"):
        make_plan(PlanArgs("quick", rewards=LABELS, adapters=adapters), images, None)
    with pytest.raises(ValueError, match=f"{flag} would not train, .* without --shuffle_rewards"):
        make_plan(PlanArgs("quick", adapters=adapters, shuffle_rewards=True), images, network_of())
    cells = GRPOSettings(mask_policy="bernoulli")
    assert make_plan(PlanArgs("quick", grpo=cells, rewards=LABELS, adapters=adapters), images, None)
    assert make_plan(PlanArgs("quick", adapters=adapters), images, network_of()).settings.pathwise_weight == 1


def test_presets_of_a_side_network_leave_the_users_values(images: GRPOInputs) -> None:
    def settings(**values: Any) -> GRPOSettings:
        grpo = GRPOSettings(objective="supervised", **values)
        return make_plan(PlanArgs("quick", grpo=grpo, adapters=TrainablePartsArgs(True)), images, None).settings

    preset = settings()
    assert (preset.augment, preset.bce_weight, preset.dice_weight, preset.warmup_steps) == (True, 1.0, 0.5, 0.15)
    assert (preset.side_learning_rate, preset.per_device_train_batch_size) == (3e-3, 32)
    own = settings(augment=False, dice_weight=2.0, side_learning_rate=1e-4)
    assert (own.augment, own.bce_weight, own.dice_weight, own.side_learning_rate) == (False, 1.0, 2.0, 1e-4)
    later = make_plan(PlanArgs("quick", grpo=GRPOSettings(objective="supervised")), images, None).settings
    assert later.side_learning_rate == later.learning_rate


RECIPES = {  # objective -> steps, images of a step, rate, warm-up, views, losses, patience, steps between validations
    "supervised": (700, 8, 3e-3, 0.15, True, 1.0, 0.5, 3, 100),
    "mean_teacher": (400, 8, 1e-3, 0.15, True, 1.0, 0.5, None, 100),
    "dpo": (400, 8, 1e-3, 0.15, None, 1.0, 0.5, None, 100),
}


@pytest.mark.parametrize("objective", RECIPES)
def test_what_trains_decides_the_recipe_and_neither_the_flag_nor_the_width(
    images: GRPOInputs, tmp_path: Path, objective: Any
) -> None:
    """The same side network, of the embedded model and of one of the width of 8 billion parameters, added or there."""
    grpo = GRPOSettings(objective=objective, preferred_by="truth" if objective == "dpo" else "learned")
    for (width, rest), own in product(((128, 1e-3), (4096, 1e-5)), (True, False)):
        config = read_json(EMBEDDED["sa2va-nano"] / "config.json")
        config["text_config"]["hidden_size"] = width
        write_json(tmp_path / "config.json", config | {"side_network": {"pixels": 512} if own else None})
        world = RunConfig(model_path=str(tmp_path), gpu=-1)
        plan = make_plan(PlanArgs("full", world, grpo=grpo, adapters=TrainablePartsArgs(not own)), images, None)
        found = plan.settings
        recipe = (found.max_steps, captions_of(found) // found.num_generations, found.side_learning_rate)
        recipe += (found.warmup_steps, found.augment, found.bce_weight, found.dice_weight)
        recipe += (found.early_stopping_patience, plan.eval_steps)
        rate = RECIPES[objective][2:3] if own else (3e-3,)
        assert recipe == RECIPES[objective][:2] + rate + RECIPES[objective][3:]
        assert found.learning_rate == rest, "of the other parts"


def test_a_run_of_epochs_is_validated_during_and_not_only_after_them(images: GRPOInputs, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2.0, "learning_rate": 0.0, "augment": False}
    changes["per_device_train_batch_size"] = 4
    plan = replace(PLAN, settings=replace(PLAN.settings, **changes), side_network=None, eval_steps=100)
    with pytest.warns(UserWarning, match="did not move"):
        run = train(images, plan, tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "val/gt_dice" in line]
    last = read_json(run / "final_model" / "config.json")["steps"]
    assert last > 4
    assert steps == sorted({*range(0, last, -(-last // 4)), last})


def test_steps_of_a_large_model_are_whole_images(images: GRPOInputs) -> None:
    for group, passes in ((2, (8, 2)), (3, (6, 4)), (8, (8, 8)), (12, (12, 8))):
        settings = with_images(GRPOSettings(num_generations=group), 8, small=False)
        assert (settings.per_device_train_batch_size, settings.gradient_accumulation_steps) == passes
    assert with_images(GRPOSettings(per_device_train_batch_size=4), 8, small=False).gradient_accumulation_steps == 1


ENCODERS: dict[str, dict[str, Any]] = {"lora": {"train": "lora", "lora_r": 2}, "full": {"train": "full"}}


@pytest.fixture(scope="module")
def encoder_runs(images: GRPOInputs) -> dict[str, Path]:
    """Finished runs of two large steps that train SAM 2's encoder."""
    settings, parent = replace(PLAN.settings, augment=False, encoder_learning_rate=1e-2), images.config.output_dir
    plans = {how: replace(PLAN, settings=settings, side_network=None, encoder=of) for how, of in ENCODERS.items()}
    return {how: train(images, plan, parent / f"encoder_{how}") for how, plan in plans.items()}


def test_the_encoder_trains(encoder_runs: dict[str, Path]) -> None:
    base = dict(load_sa2va_model("sa2va-nano")[0].named_parameters())
    trained = (read_trainable(run / "final_model" / "trainable").items() for run in encoder_runs.values())
    lora, full = ({name: tensor for name, tensor in of if name.startswith(ENCODER)} for of in trained)
    assert all("lora_" in name for name in lora)
    assert any(tensor.any() for name, tensor in lora.items() if "lora_B" in name)
    assert {min(tensor.shape) for tensor in lora.values()} == {2}, "the rank of the encoder, not of the language model"
    assert sum(not torch.equal(tensor, base[name]) for name, tensor in full.items()) > 50


@pytest.mark.parametrize("how", ["side", "lora", "full"])
def test_what_was_trained_is_evaluated_and_merging_changes_nothing(
    how: str, images: GRPOInputs, run: Path, encoder_runs: dict[str, Path], tmp_path: Path
) -> None:
    """Evaluation begins with the masks of the base model, and ends with those of the parts as they are now."""
    of = encoder_runs.get(how, run)
    result, _ = run_grpo_evaluation(of / "final_model")
    merge_run(of / "final_model", tmp_path / "merged")
    base, processor = load_sa2va_model("sa2va-nano")
    merged, own = load_sa2va_model(str(tmp_path / "merged"))
    for number, prompt in enumerate(images.pick("test")):
        image, truth = prompt.load()
        after = (merged, own, result.after.values, 0.02 if how == "side" else 5e-3)
        for model, reader, values, near in ((base, processor, result.before.values, 0.02), after):
            ((found,),) = model.segment([image], [prompt.question], reader)
            mask = found.masks()[0]
            dice = 2 * (mask & truth).sum() / max(1, mask.sum() + truth.sum())
            assert values["dice"][number] == pytest.approx(dice, abs=near), "upsampled in one step, not two"
    assert (result.after.values["dice"] != result.before.values["dice"]).any()
    load_trainable(base, of / "final_model" / "trainable")
    one, other = question_masks(base, processor, images), question_masks(merged, own, images)
    np.testing.assert_allclose(one, other, atol=1e-5 if how == "side" else 1e-3)
    assert merged.config.side_pixels == (128 if how == "side" else None)


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ({"lora_r": 0}, "lora_r is 0"),
        ({"side_network": True, "side_pixels": 100}, "side_pixels is 100, expected a multiple of 64"),
        ({"side_pixels": 256}, "--side_pixels does nothing without --side_network"),
    ],
)
def test_sizes_are_refused_early(adapters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainablePartsArgs(**adapters)


def test_its_learning_rate_is_its_own(images: GRPOInputs, tmp_path: Path) -> None:
    """At rate 0 it stays as it began, while the other tensors move."""
    still = replace(PLAN, settings=replace(PLAN.settings, side_learning_rate=0.0, max_steps=1))
    with pytest.warns(UserWarning, match="did not move"):
        folder = train(images, still, tmp_path / "still")
    trained = read_trainable(folder / "final_model" / "trainable")
    assert not trained["side_network.head.weight"].any()
    base = dict(load_sa2va_model("sa2va-nano")[0].named_parameters())
    moved = [name for name, tensor in trained.items() if name in base and not torch.equal(tensor, base[name])]
    assert any(name.startswith("grounding_encoder.mask_decoder.") for name in moved)
