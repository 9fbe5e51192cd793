"""What trains: LoRA and what the enabled losses reach, in float32; all else is frozen, and proved to stay so."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rl_reward_network.grpo.losses import PathwiseReward
from rl_reward_network.grpo.policy import (
    CANDIDATE_HEADS,
    check_movement,
    digests,
    prepare_model,
    unmoved_reasons,
)
from rl_reward_network.grpo.trainer import Sa2VAGRPOTrainer
from rl_reward_network.models.sa2va.checkpoint_sa2va import EMBEDDED
from rl_reward_network.models.sa2va.configuration_sa2va import Sa2VAConfig
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.rewards.learned import ForegroundMaps
from tests.grpo.nano import config, nano, prompts_by_candidate, regions, rewards

DECODER, PROMPTS = "grounding_encoder.mask_decoder.", "grounding_encoder.prompt_encoder."


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def frozen_by(folder: Path, **changed: Any) -> tuple[set[str], set[str]]:
    """What trains in a new trainer once the unreached is frozen, and what was frozen as unreached."""
    model, processor = nano()
    trainer = Sa2VAGRPOTrainer(model, processor, config(folder, **changed), regions(), rewards())
    before = trained(model)
    unreached = set(trainer.freeze_unreached(regions()[:2]))
    assert trained(model) == before - unreached
    assert unreached < before
    assert all(parameter.grad is None for parameter in model.parameters()), "the trial leaves no gradient behind"
    return trained(model), unreached


def test_lora_is_put_on_and_what_trains_is_float32() -> None:
    model, _ = load_sa2va_model("sa2va-nano")
    model.to(torch.bfloat16)
    prepare_model(model, 4, 8)
    names = trained(model)
    assert {model.get_parameter(name).dtype for name in names} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    lora = {name for name in names if "lora_" in name}
    layers = model.config.text_config.num_hidden_layers
    assert len(lora) == layers * 7 * 2
    assert {min(model.get_parameter(name).shape) for name in lora} == {4}
    rest = {name.split(".")[0] + "." + name.split(".")[1] for name in names - lora}
    assert rest == {"model.multi_modal_projector", "text_hidden_fcs.0", "text_hidden_fcs.2", DECODER[:-1], PROMPTS[:-1]}


def test_dropout_of_a_checkpoint_is_turned_off_in_every_part() -> None:
    """The modes of training and prediction then agree bit by bit, whatever its configuration says."""
    config = Sa2VAConfig.from_pretrained(EMBEDDED["sa2va-nano"])
    config.text_config.attention_dropout = config.vision_config.attention_dropout = 0.5
    config.vision_config.hidden_dropout_prob = 0.5
    model = Sa2VAForConditionalGeneration(config).train()
    ids, pixels = torch.arange(20)[None], torch.rand(1, 3, 256, 256)

    def outputs() -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(input_ids=ids).logits, model.model.get_vision_features(pixels)]

    assert not any(map(torch.equal, outputs(), outputs()))
    prepare_model(model, 4, 8)
    assert all(map(torch.equal, outputs(), outputs()))
    trained, model = outputs(), model.eval()
    assert all(map(torch.equal, outputs(), trained))


def test_the_mask_decoder_is_out_of_reach_of_sampled_rewards(tmp_path: Path) -> None:
    names, unreached = frozen_by(tmp_path)
    assert not any(name.startswith((DECODER, PROMPTS)) for name in names)
    assert all(name.startswith((DECODER, PROMPTS)) for name in unreached)
    assert any(name.startswith("text_hidden_fcs") for name in names)
    assert any(name.startswith("model.multi_modal_projector") for name in names)
    assert len([name for name in names if "lora_" in name]) == len(
        [name for name in trained(nano()[0]) if "lora_" in name]
    )


def test_losses_on_the_mask_itself_reach_it(tmp_path: Path) -> None:
    names, unreached = frozen_by(tmp_path, objective="supervised")
    reached = {name for name in names if name.startswith(DECODER)}
    assert any("conv_s0" in name for name in reached)
    assert any("transformer" in name for name in reached)
    assert f"{PROMPTS}not_a_point_embed.weight" in names
    assert f"{PROMPTS}point_embed.weight" in unreached, "no point is ever clicked"
    assert not any("iou_prediction_head" in name for name in unreached), "it selects among what is trained"


def test_a_loop_that_is_off_leaves_its_part_frozen(tmp_path: Path) -> None:
    captions, _ = frozen_by(tmp_path, caption_to_mask_weight=0.0)
    assert not any(name.startswith("text_hidden_fcs") for name in captions)
    masks, _ = frozen_by(tmp_path, mask_to_caption_weight=0.0)
    assert any(name.startswith("text_hidden_fcs") for name in masks)


def test_the_gradient_of_a_reward_network_reaches_the_decoder(tmp_path: Path) -> None:
    model, processor = nano()
    pathwise = PathwiseReward(ForegroundMaps(nn.Identity()), processor.sam_image_size)  # type: ignore[arg-type]
    trainer = Sa2VAGRPOTrainer(model, processor, config(tmp_path, pathwise_weight=1.0), regions(), rewards(), pathwise)
    trainer.freeze_unreached(regions()[:2])
    assert any(name.startswith(DECODER) for name in trained(model))


def digested(trains: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1).bfloat16(), nn.Linear(1, 1)).requires_grad_(trains)


@pytest.mark.parametrize("trains", [True, False])
def test_digests_change_with_one_bit(trains: bool) -> None:
    before = digests(digested(trains))
    assert set(before) == {f"{layer}.{name}" for layer in range(3) for name in ("weight", "bias")}
    assert digests(digested(trains)) == before
    for name in ("0.weight", "1.weight"):
        changed = digested(trains)
        bits = changed.get_parameter(name).data.view(torch.uint8)
        bits[0, -1] ^= 1
        assert {key for key, digest in digests(changed).items() if digest != before[key]} == {name}


def test_frozen_tensors_that_changed_are_a_bug_and_still_ones_are_named() -> None:
    names = ["q.lora_A", "q.lora_B", "fcs"]
    before = {"tower.a": "1", "tower.b": "2"} | dict.fromkeys(names, "3")
    after = before | dict.fromkeys(names, "4")
    assert check_movement(before, after, names) == []
    assert check_movement(before, after | {"fcs": "3", "q.lora_A": "3"}, names) == ["q.lora_A", "fcs"]
    with pytest.raises(ValueError, match=r"1 frozen tensors changed.*\['tower\.b'\]"):
        check_movement(before, after | {"tower.b": "5"}, names)


@pytest.mark.parametrize(
    ("with_gradient", "steps", "rate", "reasons"),
    [
        ([], 9, 0.0, {"learning_rate is 0": ["q.lora_A", "q.lora_B", "head"]}),
        (
            ["head"],
            1,
            0.1,
            {
                "its gradient passes lora_B, which began at 0; train for more than one step": ["q.lora_A"],
                "no loss reached it in 1 steps": ["q.lora_B"],
                "its steps were too small for float32: raise the learning rate": ["head"],
            },
        ),
        ([], 2, 0.1, {"no loss reached it in 2 steps": ["q.lora_A", "q.lora_B", "head"]}),
    ],
)
def test_what_did_not_move_has_a_reason(
    with_gradient: list[str], steps: int, rate: float, reasons: dict[str, list[str]]
) -> None:
    assert unmoved_reasons(["q.lora_A", "q.lora_B", "head"], with_gradient, steps, rate) == reasons


def test_every_head_that_may_be_chosen_trains_whatever_items_are_tried(tmp_path: Path) -> None:
    """One prompt shows only one of the candidates."""
    result = []
    for number, item in enumerate(prompts_by_candidate()):
        model, processor = nano()
        trainer = Sa2VAGRPOTrainer(
            model, processor, config(tmp_path / str(number), mask_policy="bernoulli"), regions(), rewards()
        )
        result.append(trainer.freeze_unreached([item]))
    assert len(result) == 3, "items for which each of the three candidates is chosen"
    assert result[0] == result[1] == result[2]
    heads = {name for name in trained(model) if CANDIDATE_HEADS in name}
    assert {name.split(CANDIDATE_HEADS)[1][0] for name in heads} == {"1", "2", "3"}
