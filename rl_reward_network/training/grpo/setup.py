"""Which tensors GRPO trains: LoRA and what the enabled losses reach; all else is frozen, and proved to stay so."""

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_reward_network.models.lora import freeze_parameters, setup_lora, unreached_parameters
from rl_reward_network.training.grpo.items import GRPOItem
from rl_reward_network.training.grpo.measure import mixed_precision


def prepare_model(model: Any, r: int, lora_alpha: int, lora_dropout: float = 0.0) -> None:
    """Put LoRA on a loaded Sa2VA, freeze the rest but `lora.TRAINABLE`, and make float32 what trains.

    Raises:
        ValueError: dropout is not 0, or `setup_lora` refuses.
    """
    if lora_dropout:
        raise ValueError(
            f"lora_dropout is {lora_dropout}, expected 0: with dropout, old, reference and new log-probabilities of "
            "one caption differ by chance; supervised training may use it, GRPO may not"
        )
    setup_lora(model, r, lora_alpha, 0.0)
    freeze_parameters(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # steps of RL size round away in bfloat16


def freeze_unreached(trainer: Any, items: Sequence[GRPOItem]) -> list[str]:
    """Freeze what no enabled loss gives a gradient to, found by one backward pass per prompt; returns the names.

    Args:
        trainer: Sa2VAGRPOTrainer, before its first step.
        items: a few prompts to try, one after the other: a trial must not take more memory than training.
    """
    trainer.sa2va.train()
    if trainer.args.activation_checkpointing:  # the Trainer turns it on when training begins
        trainer.model.activation_checkpointing_enable()
    unreached = unreached_parameters(trainer.sa2va, (_trial_loss(trainer, item) for item in items))
    for name in unreached:
        trainer.sa2va.get_parameter(name).requires_grad_(False)
    return unreached


def _trial_loss(trainer: Any, item: GRPOItem) -> Tensor:
    """A sum of everything that the enabled losses look at."""
    with mixed_precision(trainer.sa2va):
        outputs, anchor = trainer._policy(trainer.probe([item]), trainer.needs_masks)
    parts = [part for output in outputs for part in output.differentiable(trainer.samples_masks)]
    total: Tensor = anchor + sum(part.float().sum() for part in parts)
    return total


def digests(model: nn.Module) -> dict[str, str]:
    """SHA-256 of the bytes of each parameter."""
    return {
        name: hashlib.sha256(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, parameter in model.named_parameters()
    }


def check_movement(before: dict[str, str], after: dict[str, str], training: Collection[str], steps: int) -> None:
    """Raise unless every frozen tensor is what it was, to the bit, and every trainable one is not.

    Args:
        before, after: digests.
        training: names of what trains.
        steps: how many there were with a learning rate; with none nothing need have moved. Up to the second lora_A
            has not: its gradient passes lora_B, which begins at 0, and the first step of a warm-up has no rate.

    Raises:
        ValueError: names the tensors.
    """
    same = {name for name, digest in before.items() if after.get(name) == digest}
    if changed := [name for name in before if name not in same and name not in training]:
        raise ValueError(f"{len(changed)} frozen tensors changed in training, first {changed[:3]}; this is a bug")
    moving = [name for name in training if steps > 2 or (steps and "lora_A" not in name)]
    if still := [name for name in moving if name in same]:
        raise ValueError(
            f"{len(still)} of {len(moving)} trainable tensors did not move, first {still[:3]}; train longer, raise "
            "the learning rate, or look whether frac_zero_std was 1 all the time"
        )
