"""Trains a reward network on many masks per image: the segmenter's own, and the true mask damaged in known ways.

Each step draws windows at native resolution (thin vessels are never resized away) and several masks for each. The loss
is the weighted cross-entropy of the truth map plus the L1 error of the four numbers inside the window. The weights with
the lowest Dice error on validation windows are kept; those windows and their masks are fixed before the first step.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig, RewardOutput, judge
from rl_reward_network.rewards import masks as true_numbers
from rl_reward_network.training.damage import damage

NUMBERS = ("dice", "iou", "precision", "recall")
INTACT = 0.1  # share of masks that are right: without them the network never sees a Dice near 1
FROM_SEGMENTER = 0.45  # share drawn from the segmenter's masks, where an image has any; the rest is damaged truth
ON_OBJECT = 0.75  # share of windows centred on the object: an empty window teaches only the empty-mask rule
VALIDATION_SEED = 1  # a stream of its own: the validation windows do not move when the training draws more


class RewardExample(NamedTuple):
    """One labelled image and the masks a segmenter gave for it."""

    image: np.ndarray
    """uint8 (H, W, 3), RGB."""
    truth: np.ndarray
    """bool (H, W)."""
    masks: Sequence[np.ndarray]
    """float (H, W) each, probabilities in [0, 1], one per prompt; may be empty."""
    group_id: str
    """Hash of the patient or group."""


@dataclass(frozen=True)
class RewardTrainingConfig:
    """Settings of step 1; the presets `quick` and `full` are two of these."""

    images: int = 50
    """Training images to use, one frame per series before a second."""
    steps: int = 200
    """Optimiser steps."""
    batch_size: int = 6
    """Windows (images) per step."""
    masks_per_image: int = 2
    """Masks judged in each window."""
    crop: int = 192
    """Side of a window in pixels of the original image; smaller images are mirrored up to it."""
    learning_rate: float = 3e-3
    """Peak of the one-cycle schedule of AdamW."""
    truth_map_weight: float = 4.0
    """Weight of the cross-entropy of the truth map beside the L1 error of the four numbers."""
    weight_decay: float = 0.01
    """Weight decay of AdamW."""
    eval_every: int = 25
    """Steps between validations; the last step always validates."""
    val_images: int = 12
    """At most this many validation images, one window each."""
    val_masks: int = 8
    """Masks judged in each validation window."""
    seed: int = 0
    """Seed of the weights, the windows and the damage."""
    device: str = "auto"
    """Where to train: cpu, cuda, cuda:1 ...; auto takes a GPU when there is one."""

    def __post_init__(self) -> None:
        """Refuse counts and rates nothing can be trained with."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("seed", "device", "weight_decay") and not value > 0:
                raise ValueError(f"{field.name}={value!r}: must be greater than 0")


PRESETS = {
    "quick": RewardTrainingConfig(),
    "full": RewardTrainingConfig(images=200, steps=800, batch_size=8, eval_every=50, val_images=24),
}


class _Windows(NamedTuple):
    """A batch of N masks in windows of side S: float32 image (N, 3, S, S), truth and mask (N, 1, S, S)."""

    image: Tensor
    truth: Tensor
    mask: Tensor


def train_reward_network(
    train: Sequence[RewardExample],
    val: Sequence[RewardExample],
    config: RewardTrainingConfig,
    run: Path,
    info: dict[str, Any] | None = None,
    network_config: RewardNetworkConfig | None = None,
) -> RewardNetwork:
    """Train, keep the best by validation, and return it (on the CPU, in evaluation mode).

    Args:
        train: examples to learn from.
        val: examples of other groups, to choose the best weights by.
        config: settings.
        run: folder that receives best_reward_net/, logs/ (TensorBoard) and metrics.jsonl.
        info: what to write beside the weights besides our own: mode, data fingerprint, names of the splits used.
        network_config: sizes of the network.

    Raises:
        ValueError: no examples, a group in both lists, or arrays of a wrong dtype or shape.
        FloatingPointError: the loss is no longer finite; the message names the step and the remedy.
    """
    _check_examples(train, val)
    device = _device(config.device)
    torch.manual_seed(config.seed)
    rng = np.random.default_rng(config.seed)
    network = RewardNetwork(network_config).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.learning_rate, total_steps=config.steps + 1)
    windows = _validation_windows(val, config)
    provenance = _provenance(train, val, config) | (info or {})

    run.mkdir(parents=True, exist_ok=True)
    best = float("inf")
    with SummaryWriter(str(run / "logs")) as writer, (run / "metrics.jsonl").open("w", encoding="utf-8") as metrics:
        for step in tqdm(range(1, config.steps + 1), desc="reward network", unit="step"):
            losses = _step(network, optimizer, _draw_batch(train, config, rng), config.truth_map_weight, step)
            schedule.step()
            _log(writer, "train", losses, step)
            if step % config.eval_every and step != config.steps:
                continue
            errors = _validate(network, windows)
            _require_finite(errors["dice_mae"], step)
            _log(writer, "val", errors, step)
            metrics.write(json.dumps({"step": step, "train": losses, "val": errors}) + "\n")
            metrics.flush()
            if errors["dice_mae"] < best:
                best = errors["dice_mae"]
                network.training_info = {**provenance, "best_step": step, "val": errors}
                network.save_pretrained(run / "best_reward_net")
    return RewardNetwork.from_pretrained(run / "best_reward_net")


def _step(
    network: RewardNetwork, optimizer: torch.optim.Optimizer, batch: _Windows, truth_map_weight: float, step: int
) -> dict[str, float]:
    """One update of the weights; returns the parts of the loss."""
    image, truth, mask = (x.to(network.head.weight.device) for x in batch)
    network.train()
    logits = network.truth_logits(image, mask)
    cross_entropy = F.binary_cross_entropy_with_logits(logits, truth)
    distance = (_stack(judge(mask, logits.sigmoid())) - _stack(judge(mask, truth))).abs().mean()
    loss = truth_map_weight * cross_entropy + distance
    _require_finite(loss.item(), step)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    return {"loss": loss.item(), "truth_map_loss": cross_entropy.item(), "numbers_loss": distance.item()}


def _require_finite(value: float, step: int) -> None:
    """Stop at the first number that training cannot come back from."""
    if not np.isfinite(value):
        raise FloatingPointError(f"step {step}: loss or validation error is {value}; lower learning_rate")


def _stack(output: RewardOutput) -> Tensor:
    """The four numbers, float (4, N)."""
    return torch.stack([getattr(output, name) for name in NUMBERS])


def _validate(network: RewardNetwork, windows: list[_Windows]) -> dict[str, float]:
    """Mean absolute error of each number on binary masks, and of predicting the mean Dice instead."""
    network.eval()
    device = network.head.weight.device
    with torch.no_grad():
        predicted = [_stack(network(w.image.to(device), w.mask.to(device))).cpu().numpy() for w in windows]
    true = np.concatenate([_exact(w) for w in windows], axis=1)  # (4, N)
    errors = np.abs(np.concatenate(predicted, axis=1) - true).mean(axis=1)
    values = {f"{name}_mae": float(error) for name, error in zip(NUMBERS, errors, strict=True)}
    return {**values, "predict_the_mean_mae": float(np.abs(true[0] - true[0].mean()).mean())}


def _exact(windows: _Windows) -> np.ndarray:
    """The four true numbers of binary masks, float64 (4, N)."""
    mask, truth = (x[:, 0].numpy() > 0.5 for x in (windows.mask, windows.truth))
    return np.stack([getattr(true_numbers, name)(mask, truth) for name in NUMBERS])


def _validation_windows(val: Sequence[RewardExample], config: RewardTrainingConfig) -> list[_Windows]:
    """One fixed window per validation image with `val_masks` binary masks."""
    rng = np.random.default_rng([config.seed, VALIDATION_SEED])
    chosen = sorted(rng.permutation(len(val))[: config.val_images])
    windows = [_draw_window(val[index], config.crop, config.val_masks, rng) for index in chosen]
    return [w._replace(mask=(w.mask > 0.5).float()) for w in windows]


def _draw_batch(examples: Sequence[RewardExample], config: RewardTrainingConfig, rng: np.random.Generator) -> _Windows:
    """Windows of `batch_size` random images with `masks_per_image` masks each."""
    picks = rng.choice(len(examples), config.batch_size, replace=len(examples) < config.batch_size)
    drawn = [_draw_window(examples[pick], config.crop, config.masks_per_image, rng) for pick in picks]
    return _Windows(*(torch.cat(parts) for parts in zip(*drawn, strict=True)))


def _draw_window(example: RewardExample, side: int, count: int, rng: np.random.Generator) -> _Windows:
    """One window, randomly turned, mirrored and relit, with `count` masks."""
    top, left = _corner(example.truth, side, rng)
    truth = _cut(example.truth, top, left, side)
    masks = np.stack([_draw_mask(example, truth, top, left, rng) for _ in range(count)])
    quarter_turns, mirrored = int(rng.integers(4)), bool(rng.integers(2))

    def pose(array: np.ndarray) -> Tensor:  # (N, C, S, S) float32
        turned = np.rot90(array, quarter_turns, axes=(2, 3))
        return torch.from_numpy(np.ascontiguousarray(turned[..., ::-1] if mirrored else turned)).float()

    image = _cut(example.image, top, left, side).transpose(2, 0, 1) / 255
    image = np.clip((image - 0.5) * rng.uniform(0.8, 1.25) + 0.5 + rng.uniform(-0.1, 0.1), 0, 1)
    return _Windows(
        pose(image[None]).expand(count, -1, -1, -1),
        pose(truth[None, None]).expand(count, -1, -1, -1),
        pose(masks[:, None]),
    )


def _draw_mask(example: RewardExample, truth: np.ndarray, top: int, left: int, rng: np.random.Generator) -> np.ndarray:
    """One mask to judge, float32 (S, S): the truth, the segmenter's (as often soft as binary), or damaged truth."""
    luck = rng.random()
    if luck < INTACT:
        return truth.astype(np.float32)
    if luck < INTACT + FROM_SEGMENTER and len(example.masks):
        mask = _cut(example.masks[int(rng.integers(len(example.masks)))], top, left, len(truth))
        return (mask if rng.integers(2) else mask > 0.5).astype(np.float32)
    return damage(truth, rng).astype(np.float32)


def _corner(truth: np.ndarray, side: int, rng: np.random.Generator) -> tuple[int, int]:
    """Top left corner of a window inside the image, most often with a pixel of the object at its centre."""
    last = np.maximum(np.array(truth.shape) - side, 0)
    pixels = np.flatnonzero(truth)
    if len(pixels) and rng.random() < ON_OBJECT:
        centre = np.array(np.unravel_index(pixels[rng.integers(len(pixels))], truth.shape))
        top, left = np.clip(centre - side // 2, 0, last)
    else:
        top, left = rng.integers(0, last + 1)
    return int(top), int(left)


def _cut(array: np.ndarray, top: int, left: int, side: int) -> np.ndarray:
    """The side x side window of an (H, W) or (H, W, C) array, mirrored where the image ends."""
    window = array[top : top + side, left : left + side]
    margins = [(0, side - window.shape[0]), (0, side - window.shape[1]), (0, 0)]
    return np.pad(window, margins[: array.ndim], mode="symmetric")


def _log(writer: SummaryWriter, split: str, values: dict[str, float], step: int) -> None:
    """Scalars to TensorBoard as `<split>/<name>`."""
    for name, value in values.items():
        writer.add_scalar(f"{split}/{name}", value, step)


def _provenance(
    train: Sequence[RewardExample], val: Sequence[RewardExample], config: RewardTrainingConfig
) -> dict[str, Any]:
    """What the weights came from, for later reports."""
    return {
        "seed": config.seed,
        "steps": config.steps,
        "train_images": len(train),
        "train_groups": sorted({example.group_id for example in train}),
        "val_images": len(val),
        "val_groups": sorted({example.group_id for example in val}),
    }


def _device(name: str) -> torch.device:
    """The device of that name; `auto` is a GPU where there is one."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def _check_examples(train: Sequence[RewardExample], val: Sequence[RewardExample]) -> None:
    """Refuse leaks and arrays that would be misread."""
    if not train or not val:
        raise ValueError(f"need training and validation examples, got {len(train)} and {len(val)}")
    shared = {example.group_id for example in train} & {example.group_id for example in val}
    if shared:
        raise ValueError(f"group_id {sorted(shared)} in both train and val; split by group")
    for name, examples in (("train", train), ("val", val)):
        for index, example in enumerate(examples):
            _check_example(example, f"{name}[{index}]")


def _check_example(example: RewardExample, where: str) -> None:
    """Refuse one example, naming the field."""
    image, truth = example.image, example.truth
    if truth.dtype != bool or truth.ndim != 2 or truth.size == 0:
        raise ValueError(f"{where}.truth must be bool (H, W), got {truth.dtype} {truth.shape}")
    if image.dtype != np.uint8 or image.shape != (*truth.shape, 3):
        raise ValueError(f"{where}.image must be uint8 {(*truth.shape, 3)}, got {image.dtype} {image.shape}")
    for number, mask in enumerate(example.masks):
        if mask.shape != truth.shape or not np.issubdtype(mask.dtype, np.floating):
            raise ValueError(f"{where}.masks[{number}] must be float {truth.shape}, got {mask.dtype} {mask.shape}")
        if not (mask.min() >= 0 and mask.max() <= 1):
            raise ValueError(f"{where}.masks[{number}] must be in [0, 1], got [{mask.min()}, {mask.max()}]")
