"""A plain segmenter with one output per class: the rival of a model that is asked by name.

It learns from the same images and questions: where a class is not asked for in an image, its output there has no loss.
Axes: C classes, S side of the images in pixels.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_reward_network.grpo.competition import Classes, contested, rivals, ruled_out
from rl_reward_network.grpo.prompts import TrainingItem
from rl_reward_network.grpo.validation import mean_over_classes
from rl_reward_network.models.reward_network import INITIAL_LOGIT, RewardNetworkConfig, UNet, soft_overlap
from rl_reward_network.rewards.metrics import dice

BATCH, PEAK, WEIGHT_DECAY, DICE_WEIGHT = 8, 3e-3, 0.01, 0.5  # as in the training of a reward network
WARM_UP, COARSE, VALIDATIONS = 0.15, 0.6, 6  # shares of the time, and their number
ROTATION, ZOOM, CONTRAST, BRIGHTNESS = 20.0, 1.3, (0.8, 1.25), (-0.1, 0.1)


@dataclass(frozen=True, eq=False)
class NamedImage:
    """An image and what is known of its classes.

    Args:
        image: uint8 (S, S, 3).
        truths: bool (C, S, S).
        known: float32 (C,), 1 where the class is asked for in this image.
    """

    image: np.ndarray
    truths: np.ndarray
    known: np.ndarray


def named_images(prompts: Sequence[TrainingItem], names: Sequence[str]) -> dict[str, NamedImage]:
    """`image_key` -> image, of labelled prompts."""
    images: dict[str, NamedImage] = {}
    for prompt in prompts:
        image, truth = prompt.load()
        assert truth is not None
        one = images.get(prompt.image_key)
        if one is None:
            one = NamedImage(image, np.zeros((len(names), *truth.shape), bool), np.zeros(len(names), np.float32))
            images[prompt.image_key] = one
        one.truths[names.index(prompt.name)], one.known[names.index(prompt.name)] = truth, 1
    return images


def train_unet(
    train: Sequence[NamedImage],
    val: Sequence[NamedImage],
    classes: Classes,
    minutes: float,
    seed: int,
) -> UNet:
    """The weights with the best Dice over the questions of the validation images.

    Args:
        train, val: images of one size.
        classes: of the outputs; they compete as the names of Sa2VA do.
        minutes: of training, validations not counted.
        seed: of weights and windows.
    """
    net, rival = make_unet(len(classes), seed), rivals(classes)
    optimizer = torch.optim.AdamW(net.parameters(), lr=PEAK, weight_decay=WEIGHT_DECAY)
    rng, spent, step, validated, best = np.random.default_rng(seed), 0.0, 0, 0, (-1.0, net.state_dict())
    while validated < VALIDATIONS:
        start = time.monotonic()
        progress = spent / (60 * minutes)
        for group in optimizer.param_groups:
            rise, fall = min(1.0, (progress + 0.002) / WARM_UP), max(0.0, (progress - WARM_UP) / (1 - WARM_UP))
            group["lr"] = PEAK * (rise * (1 + math.cos(math.pi * min(fall, 1.0))) / 2 + 1e-3)
        picks = rng.choice(len(train), min(BATCH, len(train)), replace=False)
        take_step(net, optimizer, draw([train[pick] for pick in picks], rng), rival, coarse=progress < COARSE)
        spent, step = spent + time.monotonic() - start, step + 1
        if spent >= 60 * minutes * (validated + 1) / VALIDATIONS:
            validated += 1
            score = _validate(net, val, classes)
            print(
                f"U-Net: {step} steps, {spent / 60:.1f} minutes, mean Dice of classes on validation {score:.3f}",
                flush=True,
            )
            if score > best[0]:
                best = score, {name: tensor.clone() for name, tensor in net.state_dict().items()}
    net.load_state_dict(best[1])
    return net.eval()


def make_unet(classes: int, seed: int) -> UNet:
    """A member of a reward network with an output per class."""
    torch.manual_seed(seed)
    config = RewardNetworkConfig()
    net = UNet(config.channels, config.packing)
    net.head = nn.Conv2d(config.channels[0], classes * config.packing**2, 1)
    nn.init.constant_(net.head.bias, INITIAL_LOGIT)  # type: ignore[arg-type]
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return net


def take_step(
    net: UNet, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor, Tensor], rival: np.ndarray, coarse: bool
) -> float:
    """One optimiser step, on half of the resolution while `coarse`; the loss."""
    image, truth, known = batch
    if coarse:
        image, truth = F.avg_pool2d(image, 2), F.avg_pool2d(truth, 2)
    net.train()
    logits = net(image).float()
    asked = known.numpy() > 0
    against = torch.stack([contested(of, rival & own) for of, own in zip(logits, asked, strict=True)])
    loss = (_loss(logits, truth, known) + _loss(against, truth, known)) / 2
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def _loss(logits: Tensor, truth: Tensor, known: Tensor) -> Tensor:
    cross_entropy = F.binary_cross_entropy_with_logits(logits, truth, reduction="none").mean(dim=(2, 3))
    overlap = soft_overlap(logits.sigmoid().unsqueeze(2), truth.unsqueeze(2))[0]  # (B, C)
    there = known * (truth.sum(dim=(2, 3)) > 0)  # an empty mask has no overlap to learn
    overlaps = ((1 - overlap) * there).sum() / there.sum().clamp(min=1)
    return (cross_entropy * known).sum() / known.sum() + DICE_WEIGHT * overlaps


def draw(images: Sequence[NamedImage], rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Images float32 (B, 3, S, S) in [0, 1] in random poses, truths float32 (B, C, S, S), and `known` (B, C).

    As in the training of a reward network, but not mirrored: left and right matter.
    """
    views = torch.cat([_view(one, rng) for one in images])
    limits = ((len(images), 1, 1, 1),)
    contrast, brightness = (torch.from_numpy(rng.uniform(*ends, *limits)).float() for ends in (CONTRAST, BRIGHTNESS))
    pixels = views[:, :3] / 255 * contrast + 0.5 - 0.5 * contrast + brightness
    known = torch.from_numpy(np.stack([one.known for one in images]))
    return pixels.clamp(0, 1), (views[:, 3:] > 0.5).float(), known


def _view(one: NamedImage, rng: np.random.Generator) -> Tensor:
    """float32 (1, 3 + C, S, S): rotated, scaled and shifted, reflected beyond the border."""
    zoom, angle = ZOOM ** rng.uniform(-1, 1), np.radians(rng.uniform(-ROTATION, ROTATION))
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) / zoom
    shift = rng.uniform(-1, 1, 2) * max(0.0, 1 - 1 / zoom)
    pose = torch.from_numpy(np.column_stack([turn, shift])[None]).float()
    grid = F.affine_grid(pose, [1, 1, *one.image.shape[:2]], align_corners=False)
    pixels = torch.cat([torch.from_numpy(one.image).permute(2, 0, 1).float(), torch.from_numpy(one.truths).float()])
    return F.grid_sample(pixels[None], grid, padding_mode="reflection", align_corners=False)


@torch.no_grad()
def segment(net: UNet, image: np.ndarray) -> np.ndarray:
    """Probabilities float32 (C, S, S) of a uint8 (S, S, 3) image."""
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
    return np.asarray(net.eval()(pixels)[0].sigmoid())


def _validate(net: UNet, images: Sequence[NamedImage], of: Classes) -> float:
    """Mean over classes of the mean Dice over the questions, as of Sa2VA; two empty masks have 1."""
    values, classes, rows = list[float](), list[str](), list[str]()
    for row, one in enumerate(images):
        own = np.flatnonzero(one.known).tolist()
        soft = segment(net, one.image)[own]
        masks = (soft > 0.5) & ~ruled_out(list(soft), [of[number] for number in own])[:, None, None]
        values += dice(masks, one.truths[own]).tolist()
        classes, rows = classes + [str(number) for number in own], rows + [str(row)] * len(own)
    return mean_over_classes(np.array(values), rows, classes) or 0.0
