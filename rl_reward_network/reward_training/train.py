"""Training of the members of a reward network, one after the other, on image windows at native resolution.

Each window has many masks. The loss is the sum of the cross-entropy of the foreground probability, the L1 error of the
four numbers of every mask, and a ranking loss among the masks of a window. The weights with the lowest Dice error on
validation windows are kept. A batch depends only on seed, member and step, so a resumed run ends with the same weights
as an uninterrupted one.
"""

import math
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from rl_reward_network.models.reward_network import NUMBERS, RewardNetwork, RewardNetworkConfig, UNet, soft_overlap
from rl_reward_network.reward_training.masks import Windows, balance, unpack
from rl_reward_network.runs.checkpoints import CHECKPOINT, load_checkpoint, save_checkpoint
from rl_reward_network.runs.curves import Curves

WARM_UP = 0.15  # share of the steps in which the learning rate rises
RANK_SCALE = 0.05  # Dice; differences well below this hardly contribute to the ranking loss


@dataclass(frozen=True)
class RewardTrainingConfig:
    """Settings of step 1; see `PRESETS` for `quick` and `full`."""

    images: int = 50
    """Training images; every series contributes one frame before any contributes a second."""
    val_images: int = 12
    """Validation images, used to choose weights, caution, interval and step size of the ascent."""
    test_images: int = 20
    """Test images, used for the reported numbers only."""
    windows: int = 150
    """Windows cut from the training images, the same number from each."""
    masks: int = 16
    """Masks of each window: the true mask, the segmenter's, and damaged ones."""
    steps: int = 150
    """Optimiser steps per member."""
    batch_size: int = 12
    """Windows per step."""
    masks_per_window: int = 8
    """Masks drawn from each window of a batch."""
    window: int = 192
    """Side of a window in pixels of the original image, a multiple of 16; smaller images are mirrored up to it."""
    learning_rate: float = 3e-3
    """Peak of the schedule of AdamW: up in the first 15 % of the steps, then down along a cosine."""
    weight_decay: float = 0.01
    """Weight decay of AdamW."""
    truth_map_weight: float = 4.0
    """Weight of the cross-entropy of the foreground probability; the L1 error of the four numbers has weight 1."""
    ranking_weight: float = 2.0
    """Weight of the ranking loss among the masks of a window."""
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
            if field.name not in ("seed", "device", "weight_decay", "ranking_weight") and not value > 0:
                raise ValueError(f"{field.name}={value!r}: expected more than 0")
        if self.window % 16:
            raise ValueError(f"window={self.window}: expected a multiple of 16")


PRESETS = {
    "quick": RewardTrainingConfig(),
    "full": RewardTrainingConfig(images=200, val_images=48, test_images=80, windows=800, steps=500),
}


def train_reward_network(
    train: Windows,
    val: Windows,
    config: RewardTrainingConfig,
    run: Path,
    network_config: RewardNetworkConfig | None = None,
) -> RewardNetwork:
    """Train every member, keep its weights with the best validation error, and return the ensemble on the CPU.

    Args:
        train: training windows.
        val: windows of other patients, for the choice of weights.
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
    train: Windows,
    val: Windows,
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
    done, mask_probs = index * config.steps, balance(train.dice)
    progress = range(state["step"] + 1, config.steps + 1)
    title = f"member {index + 1} of {len(network.members)}"
    for step in tqdm(progress, desc=title, unit="step", initial=state["step"], total=config.steps):
        _set_learning_rate(optimizer, config, step)
        batch = _draw_batch(train, mask_probs, config, np.random.default_rng([config.seed, index, step]))
        losses = _step(member, optimizer, batch, config, step)
        curves.add_scalars({f"train/{name}": loss for name, loss in losses.items()}, done + step)
        if step % config.eval_every and step != config.steps:
            continue
        errors = _validate(member, val, config.window)
        _require_finite(errors["dice_mae"], step)
        curves.add_scalars({f"val/{name}": error for name, error in errors.items()}, done + step)
        if state["best"] is None or errors["dice_mae"] < state["best"]["dice_mae"]:
            weights = {name: tensor.detach().cpu().clone() for name, tensor in member.state_dict().items()}
            state["best"] = {"dice_mae": errors["dice_mae"], "step": step, "weights": weights}
        curves.add_row({"member": index, "step": step, "train": losses, "val": errors})
        state |= {"step": step, "optimizer": optimizer.state_dict()}
        # The checkpoint has no random state, because each batch has a seed.
        save_checkpoint(run / CHECKPOINT, {**state, "network": network.state_dict()})
    member.load_state_dict(state["best"]["weights"])


def _step(
    member: UNet,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor, Tensor],
    config: RewardTrainingConfig,
    step: int,
) -> dict[str, float]:
    """One optimiser step; returns the terms of the loss."""
    image, truth, masks = (x.to(config.device) for x in batch)
    member.train()
    logits = member(image)  # (B, 1, S, S)
    cross_entropy = F.binary_cross_entropy_with_logits(logits, truth)
    predicted, true = (soft_overlap(masks[:, :, None], x[:, None]) for x in (logits.sigmoid(), truth))  # (4, B, M)
    distance = (predicted - true).abs().mean()
    ranking = ranking_loss(predicted[0], true[0])
    loss = config.truth_map_weight * cross_entropy + distance + config.ranking_weight * ranking
    _require_finite(loss.item(), step)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(member.parameters(), 1.0)
    optimizer.step()
    return {
        "loss": loss.item(),
        "truth_map_loss": cross_entropy.item(),
        "numbers_loss": distance.item(),
        "ranking_loss": ranking.item(),
    }


def ranking_loss(predicted: Tensor, true: Tensor) -> Tensor:
    """Pairwise ranking loss among the masks of a window.

    Mean over pairs of RANK_SCALE * softplus(-d / RANK_SCALE), where d is the difference of the predictions in the true
    order; pairs are weighted by the difference of their true Dice.

    Args:
        predicted: float (B, M), predicted Dice.
        true: float (B, M), true Dice.

    Returns:
        float (), at least 0.
    """
    apart = true[:, :, None] - true[:, None]
    difference = (predicted[:, :, None] - predicted[:, None]) * apart.sign()
    cost = RANK_SCALE * F.softplus(-difference / RANK_SCALE)
    return (cost * apart.abs()).sum() / apart.abs().sum().clamp_min(1e-6)


def _set_learning_rate(optimizer: torch.optim.Optimizer, config: RewardTrainingConfig, step: int) -> None:
    """Set the learning rate, which depends on the step only and therefore needs no state."""
    progress = step / config.steps
    rise, fall = min(1.0, progress / WARM_UP), max(0.0, (progress - WARM_UP) / (1 - WARM_UP))
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * (rise * (1 + math.cos(math.pi * fall)) / 2 + 1e-3)


def _draw_batch(
    windows: Windows, mask_probs: np.ndarray, config: RewardTrainingConfig, rng: np.random.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Image (B, 3, S, S), truth (B, 1, S, S) and masks (B, M, S, S), float32, with augmentation."""
    count = len(windows.image)
    picks = rng.choice(count, config.batch_size, replace=count < config.batch_size)
    drawn = [_draw_window(windows, mask_probs, pick, config, rng) for pick in picks]
    image, truth, masks = (torch.from_numpy(np.stack(column)).float() for column in zip(*drawn, strict=True))
    contrast, brightness = (
        torch.from_numpy(rng.uniform(*limits, (len(picks), 1, 1, 1))) for limits in ((0.8, 1.25), (-0.1, 0.1))
    )
    return ((image / 255 - 0.5) * contrast + 0.5 + brightness).clamp(0, 1).float(), truth, masks


def _draw_window(
    windows: Windows, mask_probs: np.ndarray, pick: int, config: RewardTrainingConfig, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Image (3, S, S), truth (1, S, S) and masks (M, S, S) of one window, randomly rotated and mirrored."""
    chosen = rng.choice(windows.masks.shape[1], config.masks_per_window, p=mask_probs[pick])
    quarter_turns, mirrored = int(rng.integers(4)), bool(rng.integers(2))

    def pose(array: np.ndarray) -> np.ndarray:
        turned = np.rot90(array, quarter_turns, axes=(1, 2))
        return turned[..., ::-1] if mirrored else turned

    image = windows.image[pick].transpose(2, 0, 1)
    return pose(image), pose(windows.truth[pick][None]), pose(unpack(windows.masks[pick, chosen], config.window))


def _validate(member: UNet, windows: Windows, side: int) -> dict[str, float]:
    """Mean absolute error of each number over all masks, and that of the mean Dice as prediction."""
    member.eval()
    device = member.head.weight.device
    predicted, true = [], []
    for image, truth, packed in zip(windows.image, windows.truth, windows.masks, strict=True):
        masks = torch.from_numpy(unpack(packed, side)[:, None]).float()
        with torch.no_grad():
            inputs = torch.from_numpy(image.transpose(2, 0, 1)[None]).to(device).float() / 255
            foreground_prob = member(inputs).sigmoid().cpu()
        predicted.append(soft_overlap(masks, foreground_prob).numpy())
        true.append(soft_overlap(masks, torch.from_numpy(truth[None]).float()).numpy())
    errors = np.abs(np.concatenate(predicted, axis=1) - np.concatenate(true, axis=1)).mean(axis=1)
    dice = np.concatenate(true, axis=1)[0]
    values = {f"{name}_mae": float(error) for name, error in zip(NUMBERS, errors, strict=True)}
    return {**values, "predict_the_mean_mae": float(np.abs(dice - dice.mean()).mean())}


def _require_finite(value: float, step: int) -> None:
    """Raise a ValueError if a loss or an error is not finite."""
    if not np.isfinite(value):
        raise ValueError(f"step {step}: loss or validation error is {value}: training diverged; try another seed")


def _fresh(member: int) -> dict[str, Any]:
    """The state of a member before its first step."""
    return {"member": member, "step": 0, "optimizer": None, "best": None}
