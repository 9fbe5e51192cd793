"""Training of the members of a reward network, one after the other, on windows of labelled images.

A member learns to segment: the loss is the sum of the cross-entropy and the Dice loss of its foreground probability.
The weights with the best Dice on validation images are kept. A batch depends only on seed, member and step, so a
resumed run ends with the same weights as an uninterrupted one.
"""

import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig, UNet, soft_overlap
from rl_reward_network.reward_training.masks import true_dice
from rl_reward_network.reward_training.windows import LabelledImages, draw_batch, window_side
from rl_reward_network.rewards.learned import foreground_prob
from rl_reward_network.runs.checkpoints import CHECKPOINT, load_checkpoint, save_checkpoint
from rl_reward_network.runs.curves import Curves

WARM_UP = 0.15  # share of the steps in which the learning rate rises
WINDOW = 512  # largest side of a window in pixels of the original image


@dataclass(frozen=True)
class RewardTrainingConfig:
    """Settings of step 1; see `PRESETS` for `quick` and `full`."""

    images: int = 50
    """Training images; every series contributes one frame before any contributes a second."""
    val_images: int = 12
    """Validation images, used to choose weights, caution, interval and step size of the ascent."""
    test_images: int = 20
    """Test images, used for the reported numbers only."""
    steps: int = 150
    """Optimiser steps per member."""
    batch_size: int = 8
    """Windows per step."""
    learning_rate: float = 3e-3
    """Peak of the schedule of AdamW: up in the first 15 % of the steps, then down along a cosine."""
    weight_decay: float = 0.01
    """Weight decay of AdamW."""
    dice_weight: float = 0.5
    """Weight of the Dice loss; that of the cross-entropy is 1."""
    eval_every: int = 50
    """Steps between validations; each writes a checkpoint. The last step is always validated."""
    seed: int = 0
    """Seed of the weights, the windows and the damage."""
    device: str = "cpu"
    """Device for training: cpu, cuda:0, ..."""

    def __post_init__(self) -> None:
        """Raise a ValueError for values out of range."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("seed", "device", "weight_decay", "dice_weight") and not value > 0:
                raise ValueError(f"{field.name}={value!r}: expected more than 0")


PRESETS = {
    "quick": RewardTrainingConfig(),
    "full": RewardTrainingConfig(images=200, val_images=48, test_images=80, steps=700, eval_every=100),
}


def train_reward_network(
    train: LabelledImages,
    val: LabelledImages,
    config: RewardTrainingConfig,
    run: Path,
    network_config: RewardNetworkConfig | None = None,
) -> RewardNetwork:
    """Train every member, keep its weights with the best validation Dice, and return the ensemble on the CPU.

    Args:
        train: training images.
        val: images of other patients, for the choice of weights.
        config: settings.
        run: folder for checkpoint.pt, logs/ (TensorBoard) and metrics.jsonl; training resumes from an existing
            checkpoint.
        network_config: sizes of the network.

    Raises:
        ValueError: the loss is not finite; the message has the step and the remedy.
    """
    torch.manual_seed(config.seed)
    network = RewardNetwork(network_config)
    run.mkdir(parents=True, exist_ok=True)
    state = load_checkpoint(run / CHECKPOINT) or _fresh(0)
    if "network" in state:
        network.load_state_dict(state.pop("network"))
    done = {name: state[name] for name in ("member", "step")}
    with closing(Curves(run, done, board_step=state["member"] * config.steps + state["step"])) as curves:
        for member in range(state["member"], len(network.members)):
            state = _fresh(member) if member > state["member"] else state
            _train_member(network, train, val, config, run, state, curves)
    return network.to("cpu").eval().requires_grad_(False)


def _train_member(
    network: RewardNetwork,
    train: LabelledImages,
    val: LabelledImages,
    config: RewardTrainingConfig,
    run: Path,
    state: dict[str, Any],
    curves: Curves,
) -> None:
    """Train one member from `state` on and load its best weights; `state` is updated and saved."""
    index = state["member"]
    member = network.members[index].to(config.device)
    optimizer = torch.optim.AdamW(member.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    if state["optimizer"]:
        optimizer.load_state_dict(state["optimizer"])
    done, side = index * config.steps, window_side(train.images, WINDOW, network.config.stride)
    progress = range(state["step"] + 1, config.steps + 1)
    title = f"member {index + 1} of {len(network.members)}"
    for step in tqdm(progress, desc=title, unit="step", initial=state["step"], total=config.steps):
        _set_learning_rate(optimizer, config, step)
        batch = draw_batch(train, config.batch_size, side, np.random.default_rng([config.seed, index, step]))
        losses = _step(member, optimizer, batch, config, step)
        curves.add_scalars({f"train/{name}": loss for name, loss in losses.items()}, done + step)
        if step % config.eval_every and step != config.steps:
            continue
        scores = _validate(network.member(index), val)
        _require_finite(scores["soft_dice"], step)
        curves.add_scalars({f"val/{name}": score for name, score in scores.items()}, done + step)
        # The soft Dice decides while every mask is still empty, as those of small objects are at first.
        if state["best"] is None or _rank(scores) > _rank(state["best"]):
            weights = {name: tensor.detach().cpu().clone() for name, tensor in member.state_dict().items()}
            state["best"] = {**scores, "step": step, "weights": weights}
        curves.add_row({"member": index, "step": step, "train": losses, "val": scores})
        state |= {"step": step, "optimizer": optimizer.state_dict()}
        # The checkpoint has no random state, because each batch has a seed.
        save_checkpoint(run / CHECKPOINT, {**state, "network": network.state_dict()})
    member.load_state_dict(state["best"]["weights"])


def _step(
    member: UNet,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    config: RewardTrainingConfig,
    step: int,
) -> dict[str, float]:
    """One optimiser step; returns the terms of the loss."""
    image, truth = (x.to(config.device) for x in batch)
    member.train()
    with mixed_precision(torch.device(config.device)):
        logits = member(image).float()  # (B, 1, S, S)
    cross_entropy = F.binary_cross_entropy_with_logits(logits, truth)
    dice_loss = 1 - soft_overlap(logits.sigmoid(), truth)[0].mean()
    loss = cross_entropy + config.dice_weight * dice_loss
    _require_finite(loss.item(), step)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(member.parameters(), 1.0)
    optimizer.step()
    return {"loss": loss.item(), "cross_entropy": cross_entropy.item(), "dice_loss": dice_loss.item()}


def mixed_precision(device: torch.device) -> torch.autocast:
    """Autocast to bfloat16 where the hardware multiplies matrices in it; elsewhere it would be slower, so disabled."""
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = bool(torch.cpu.get_capabilities().get("amx_bf16"))
    return torch.autocast(device.type, torch.bfloat16, enabled=fast)


def _set_learning_rate(optimizer: torch.optim.Optimizer, config: RewardTrainingConfig, step: int) -> None:
    """Set the learning rate, which depends on the step only and therefore needs no state."""
    progress = step / config.steps
    rise, fall = min(1.0, progress / WARM_UP), max(0.0, (progress - WARM_UP) / (1 - WARM_UP))
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * (rise * (1 + math.cos(math.pi * fall)) / 2 + 1e-3)


def _validate(member: RewardNetwork, data: LabelledImages) -> dict[str, float]:
    """Mean over images: Dice of the foreground probability thresholded at 0.5, and its soft Dice."""
    member.eval()
    dice, soft_dice = [], []
    for image, truth in zip(data.images, data.truths, strict=True):
        probs = foreground_prob(member, image)
        dice.append(true_dice(probs[None] > 0.5, truth)[0])
        soft_dice.append(soft_overlap(*(torch.from_numpy(x[None]).float() for x in (probs, truth)))[0].item())
    return {"dice": float(np.mean(dice)), "soft_dice": float(np.mean(soft_dice))}


def _rank(scores: Mapping[str, Any]) -> tuple[float, float]:
    return scores["dice"], scores["soft_dice"]


def _require_finite(value: float, step: int) -> None:
    """Raise a ValueError if a loss or an error is not finite."""
    if not np.isfinite(value):
        raise ValueError(f"step {step}: loss or validation error is {value}: training diverged; try another seed")


def _fresh(member: int) -> dict[str, Any]:
    """The state of a member before its first step."""
    return {"member": member, "step": 0, "optimizer": None, "best": None}
