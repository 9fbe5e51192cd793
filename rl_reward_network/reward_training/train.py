"""Training of the members of a reward network, side by side, on windows of labelled images.

A member learns to segment: the loss is the sum of the cross-entropy and the Dice loss of its foreground probability.
The weights with the best Dice on validation images are kept. A batch depends only on seed, member and step, so a
resumed run ends with the same weights as an uninterrupted one.

With images without masks each member is a mean teacher (`models/ema.py`): its moving average segments windows
of them, and the member learns these masks on the same windows, strongly perturbed. Of member and average the one with
the better Dice on validation images is kept.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from rl_reward_network.curves import Best, Curves, load_checkpoint, save_checkpoint
from rl_reward_network.data.items import Sample
from rl_reward_network.data.windows import WINDOW, LabelledImages, draw_batch, perturbed, window_side
from rl_reward_network.models.ema import EMA, consistency_losses, fade_in, swapped
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig, UNet, soft_overlap
from rl_reward_network.models.weights import mixed_precision
from rl_reward_network.report.overlays import SHOWN, mask_sheet
from rl_reward_network.report.statistics import group_means
from rl_reward_network.reward_training.masks import true_dice
from rl_reward_network.rewards.learned import foreground_prob
from rl_reward_network.run import CHECKPOINT

WARM_UP = 0.15  # share of the steps in which the learning rate rises
TEACHER_DECAY = 0.99

Taught = tuple[Tensor, Tensor, float]  # perturbed windows (B, 3, S, S), a teacher's masks of them (B, 1, S, S), weight


@dataclass(frozen=True)
class RewardTrainingConfig:
    """Settings of step 1; see `PRESETS` for `quick` and `full`."""

    images: int = 50
    """Training images; every series contributes one frame before any contributes a second."""
    val_images: int = 12
    """Validation images, used to choose weights, k, interval and step size of the ascent."""
    test_images: int = 20
    """Test images, used for the reported numbers only."""
    steps: int = 200
    """Optimiser steps per member."""
    coarse: float = 0.6
    """Share of the steps, the first ones, that see windows of half the resolution: a quarter of the work."""
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
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("seed", "device", "weight_decay", "dice_weight", "coarse") and not value > 0:
                raise ValueError(f"{field.name}={value!r}: expected more than 0")
        if not 0 <= self.coarse <= 1:
            raise ValueError(f"coarse={self.coarse!r}: expected 0 to 1")


PRESETS = {
    "quick": RewardTrainingConfig(),
    "full": RewardTrainingConfig(images=200, val_images=48, test_images=80, steps=700, coarse=0.0, eval_every=100),
}


def train_reward_network(
    train: LabelledImages,
    val: LabelledImages | None,
    config: RewardTrainingConfig,
    run: Path,
    network_config: RewardNetworkConfig | None = None,
    unlabelled: LabelledImages | None = None,
) -> RewardNetwork:
    """Train every member, keep its weights with the best validation Dice, and return the ensemble on the CPU.

    `val` are images of other patients, for the choice of weights; None keeps those of the last step, of a mean teacher
    its average. Training resumes from checkpoint.pt in `run`, which gets logs/ (TensorBoard) and metrics.jsonl, too.
    The masks of `unlabelled` images are not read.

    Raises:
        ValueError: the loss is not finite; the message has the step and the remedy.
    """
    torch.manual_seed(config.seed)
    network = RewardNetwork(network_config).to(config.device)
    members = [_Member(network, index, config, unlabelled) for index in range(len(network.members))]
    run.mkdir(parents=True, exist_ok=True)
    state = load_checkpoint(run / CHECKPOINT)
    for member, saved in zip(members, state.get("members", ()), strict=bool(state)):
        member.load_state(saved)
    side, done = window_side(train.images, WINDOW, 2 * network.config.stride), state.get("step", 0)
    steps = tqdm(range(done + 1, config.steps + 1), f"{len(members)} members", config.steps, unit="step", initial=done)
    with closing(Curves(run, {"step": done}, board_step=done)) as curves, _side_by_side(members, config.device) as each:
        for step in steps:
            losses = each(lambda member, step=step: member.train(train, side, step))
            curves.add_scalars(_means("train", losses), step)
            if step % config.eval_every and step != config.steps:
                continue
            scores = [] if val is None else each(lambda member, step=step: member.validate(val, step))
            if val is not None:
                curves.add_scalars(_means("val", scores), step)
                if curves.board is not None:
                    curves.add_picture("val/masks", own_masks(network, val), step)
            for index, (loss, score) in enumerate(zip_longest(losses, scores)):
                curves.add_row({"member": index, "step": step, "train": loss, "val": score})
            # The checkpoint has no random state, because each batch has a seed.
            save_checkpoint(run / CHECKPOINT, {"step": step, "members": [member.state() for member in members]})
    for member in members:
        member.unet.load_state_dict(member.last_weights() if val is None else member.best.weights)
    return network.to("cpu").eval().requires_grad_(False)


class _Member:
    """One member of a network in training: its optimiser, its mean teacher if it has one, and its best weights."""

    def __init__(
        self, network: RewardNetwork, index: int, config: RewardTrainingConfig, unlabelled: LabelledImages | None = None
    ) -> None:
        self.index, self.config, self.unlabelled = index, config, unlabelled
        self.network = network.member(index)  # shares the weights
        self.unet: UNet = self.network.members[0]  # type: ignore[assignment]
        self.optimizer = torch.optim.AdamW(
            self.unet.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        self.teacher = None if unlabelled is None else EMA(self.unet, TEACHER_DECAY, buffers=True)
        self.best = Best((-math.inf, -math.inf))

    def train(self, data: LabelledImages, side: int, step: int) -> dict[str, float]:
        """One optimiser step; returns the terms of the loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, step)
        batch = self._windows(data, self.config.batch_size, side, step, self._rng(step))
        taught = None if self.teacher is None else self._taught(len(batch[0]), side, step)
        terms = train_step(self.unet, self.optimizer, batch, self.config, step, taught)
        if self.teacher is not None:
            self.teacher.update(self.unet)
        return terms

    def _rng(self, step: int, *further: int) -> np.random.Generator:
        return np.random.default_rng([self.config.seed, self.index, step, *further])

    def _windows(
        self, data: LabelledImages, count: int, side: int, step: int, rng: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """Windows and their truth, at half the resolution in the first steps."""
        image, truth = draw_batch(data, count, side, rng)
        if step > self.config.coarse * self.config.steps:
            return image, truth
        return F.avg_pool2d(image, 2), F.avg_pool2d(truth, 2)  # the truth is then a share of each pixel

    def _taught(self, count: int, side: int, step: int) -> Taught:
        """Strong views of windows without masks, the teacher's masks of the windows as they are, and their weight."""
        assert self.unlabelled is not None
        assert self.teacher is not None
        rng = self._rng(step, 1)
        weak, _ = self._windows(self.unlabelled, count, side, step, rng)
        with torch.no_grad(), swapped(self.unet.eval(), self.teacher.weights):
            probs = self.unet(weak.to(self.config.device)).float().sigmoid()
        return perturbed(weak, rng), probs, fade_in(step, self.config.steps)

    def validate(self, data: LabelledImages, step: int) -> dict[str, float]:
        """Scores on the validation images, of the mean teacher, too; the weights of the better one may be the best."""
        scores = self._scores(data, step)
        if self.teacher is None:
            return scores
        with swapped(self.unet, self.teacher.weights):
            of_teacher = self._scores(data, step)
        return scores | {f"teacher_{name}": value for name, value in of_teacher.items()}

    def _scores(self, data: LabelledImages, step: int) -> dict[str, float]:
        scores = own_scores(self.network, data)
        _require_finite(scores["soft_dice"], step)
        # The soft Dice decides while every mask is still empty, as those of small objects are at first.
        self.best.offer((scores["dice"], scores["soft_dice"]), step, self.unet.state_dict())
        return scores

    def last_weights(self) -> dict[str, Tensor]:
        """Those of the mean teacher, or else of the member."""
        return self.unet.state_dict() if self.teacher is None else dict(self.teacher.weights)

    def state(self) -> dict[str, Any]:
        """All that training goes on from."""
        dice, soft_dice = self.best.score
        best = {"dice": dice, "soft_dice": soft_dice, "step": self.best.step, "weights": self.best.weights}
        state = {"weights": self.unet.state_dict(), "optimizer": self.optimizer.state_dict(), "best": best}
        if self.teacher is not None:
            state["teacher"] = {"weights": self.teacher.weights, "steps": self.teacher.steps}
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""
        self.unet.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        best = state["best"]
        self.best = Best((best["dice"], best["soft_dice"]), best["step"], best["weights"])
        if self.teacher is not None:
            self.teacher.load(**state["teacher"])


@contextmanager
def _side_by_side(members: list[_Member], device: str) -> Iterator[Callable[..., list[dict[str, float]]]]:
    """A function that calls another for every member and returns the results.

    On a CPU each member has its own thread, and they share torch's threads: layers this small gain little from a second
    thread, and lose much where another process needs the core. Three members keep two cores busy to the end. A GPU, or
    one thread, gets one member after the other. The weights do not depend on it.
    """
    threads = torch.get_num_threads()
    if threads == 1 or torch.device(device).type != "cpu":
        yield lambda call: [call(member) for member in members]
        return
    torch.set_num_threads(max(1, threads // len(members)))
    try:
        with ThreadPoolExecutor(len(members)) as pool:
            yield lambda call: list(pool.map(call, members))
    finally:
        torch.set_num_threads(threads)


def train_step(
    member: UNet,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    config: RewardTrainingConfig,
    step: int,
    taught: Taught | None = None,
) -> dict[str, float]:
    """One optimiser step on windows float32 (B, 3, S, S) with truth (B, 1, S, S) in [0, 1]; returns the loss's terms.

    `taught` are windows without masks, for a mean teacher. A loss that is not finite is a ValueError.
    """
    image, truth = (x.to(config.device) for x in batch)
    member.train()
    images = image if taught is None else torch.cat([image, taught[0].to(config.device)])
    with mixed_precision(torch.device(config.device)):
        both = member(images).float()  # (B or 2 B, 1, S, S)
    logits = both[: len(image)]
    cross_entropy = F.binary_cross_entropy_with_logits(logits, truth)
    dice_loss = 1 - soft_overlap(logits.sigmoid(), truth)[0].mean()
    loss, terms = cross_entropy + config.dice_weight * dice_loss, {}
    if taught is not None:
        _, probs, weight = taught
        of_pixels, of_overlap = consistency_losses(both[len(image) :, 0], probs[:, 0])
        loss = loss + weight * (of_pixels + config.dice_weight * of_overlap)
        terms = {"taught": of_pixels.item(), "taught_dice_loss": of_overlap.item()}
    _require_finite(loss.item(), step)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(member.parameters(), 1.0)
    optimizer.step()
    return {"loss": loss.item(), "cross_entropy": cross_entropy.item(), "dice_loss": dice_loss.item(), **terms}


def learning_rate(config: RewardTrainingConfig, step: int) -> float:
    """The learning rate depends on the step only and therefore needs no state."""
    progress = step / config.steps
    rise, fall = min(1.0, progress / WARM_UP), max(0.0, (progress - WARM_UP) / (1 - WARM_UP))
    return config.learning_rate * (rise * (1 + math.cos(math.pi * fall)) / 2 + 1e-3)


def own_scores(network: RewardNetwork, data: LabelledImages) -> dict[str, float]:
    """Mean over patients: Dice of the network's own segmentation, foreground probability above 0.5, and soft Dice."""
    network.eval()
    dice, soft_dice = [], []
    for image, truth in zip(data.images, data.truths, strict=True):
        probs = foreground_prob(network, image)
        dice.append(true_dice(probs[None] > 0.5, truth)[0])
        soft_dice.append(soft_overlap(*(torch.from_numpy(x[None]).float() for x in (probs, truth)))[0].item())
    groups = data.groups or [str(number) for number in range(len(dice))]
    means = group_means(np.array([dice, soft_dice]), groups).mean(axis=1)
    return {"dice": float(means[0]), "soft_dice": float(means[1])}


def own_masks(network: RewardNetwork, data: LabelledImages) -> np.ndarray | None:
    """A picture of the network's own segmentation of the first images, see `mask_sheet`."""
    network.eval()
    rows = zip(data.images[:SHOWN], data.truths[:SHOWN], strict=True)
    return mask_sheet([(image, truth, foreground_prob(network, image) > 0.5) for image, truth in rows])


def _require_finite(value: float, step: int) -> None:
    if not np.isfinite(value):
        raise ValueError(f"step {step}: loss or validation error is {value}: training diverged; try another seed")


def _means(kind: str, rows: list[dict[str, float]]) -> dict[str, float]:
    return {f"{kind}/{name}": float(np.mean([row[name] for row in rows])) for name in rows[0]}


def labelled_images(samples: Iterable[Sample]) -> LabelledImages:
    """Samples in memory; the mask of an unlabelled one is empty."""
    parts = [(sample.load_image(), sample.load_mask(), sample.group_id) for sample in samples]
    truths = [np.zeros(image.shape[:2], dtype=bool) if truth is None else truth for image, truth, _ in parts]
    return LabelledImages([image for image, _, _ in parts], truths, [group for _, _, group in parts])
