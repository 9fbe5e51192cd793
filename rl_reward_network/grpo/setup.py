"""Which tensors GRPO trains: LoRA and what the enabled losses reach; all else is frozen, and proved to stay so."""

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rl_reward_network.grpo.items import GRPOItem
from rl_reward_network.grpo.measure import mixed_precision
from rl_reward_network.grpo.ranks import by_first
from rl_reward_network.models.ema import trainable_tensors
from rl_reward_network.models.lora import freeze_parameters, setup_lora, unreached_parameters

CANDIDATE_HEADS = "grounding_encoder.mask_decoder.output_hypernetworks_mlps."
SELECTABLE = ("1", "2", "3")  # 0 is the head of the single mask, which Sa2VA never uses


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

    The first process looks, and tells the others. A mask shows only the candidate that SAM 2 chose for it, so where one
    candidate's head is reached all that may be chosen on some other prompt train.

    Args:
        trainer: Sa2VAGRPOTrainer, before its first step.
        items: a few prompts to try, one after the other: a trial must not take more memory than training.
    """
    trainer.sa2va.train()
    if trainer.args.activation_checkpointing:  # the Trainer turns it on when training begins
        trainer.model.activation_checkpointing_enable()
    losses = (_trial_loss(trainer, item) for item in items)
    unreached = by_first(trainer.accelerator, lambda: unreached_parameters(trainer.sa2va, losses))
    reached = trainable_tensors(trainer.sa2va).keys() - set(unreached)
    unreached = [name for name in unreached if not _twins(name) & reached]
    for name in unreached:
        trainer.sa2va.get_parameter(name).requires_grad_(False)
    return unreached


def _twins(name: str) -> set[str]:
    """The same tensor of every candidate's head, where the name is of a head that may be chosen; else nothing."""
    before, heads, behind = name.partition(CANDIDATE_HEADS)
    number, _, rest = behind.partition(".")
    if not heads or number not in SELECTABLE:
        return set()
    return {f"{before}{heads}{other}.{rest}" for other in SELECTABLE}


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


def check_movement(before: dict[str, str], after: dict[str, str], training: Collection[str]) -> list[str]:
    """Names of what trained and did not move, in the model's order.

    Args:
        before, after: digests.
        training: names of what trains.

    Raises:
        ValueError: a frozen tensor is not what it was, to the bit; names the tensors.
    """
    same = {name for name, digest in before.items() if after.get(name) == digest}
    if changed := [name for name in before if name not in same and name not in training]:
        raise ValueError(f"{len(changed)} frozen tensors changed in training, first {changed[:3]}; this is a bug")
    return [name for name in before if name in same and name in training]


def why_still(
    still: Sequence[str], reached: Collection[str], any_spread: bool, steps: int, learning_rate: float
) -> dict[str, str]:
    """Why tensors did not move, by name.

    Args:
        still: what `check_movement` found.
        reached: names of what had a gradient at some step.
        any_spread: whether the rewards of some group differed, or no rewards were needed.
        steps, learning_rate: optimisation steps, and the largest rate of one.
    """
    if not learning_rate:
        return dict.fromkeys(still, "learning_rate is 0")
    never = f"no loss reached it in {steps} steps" if any_spread else "the rewards of every group were all alike"
    late = "its gradient passes lora_B, which began at 0; train for more than one step"
    reasons = {}
    for name in still:
        if name in reached:
            reasons[name] = "its steps were too small for float32: raise the learning rate"
        else:
            reasons[name] = late if "lora_A" in name and any_spread and steps == 1 else never
    return reasons
