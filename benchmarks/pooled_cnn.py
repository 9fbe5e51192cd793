"""The pooled CNN: a small CNN that predicts the Dice from image and mask by global pooling, beside the reward network.

    python -m benchmarks.pooled_cnn full            # trains the reward network of this seed where it is missing

It is the design of the original specification: four input channels, about 140,000 parameters, images and masks resized
to 256 x 256, one mask per training image (the default prompt's), mean squared error of its Dice. Both predict the Dice
of the test masks of step 1; printed is the mean absolute error by source of masks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from rl_reward_network.cli.app import run
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import RunInputs, open_inputs
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.weights import mixed_precision
from rl_reward_network.reward_training.masks import RewardExample, reward_examples, source_masks, true_dice
from rl_reward_network.reward_training.stage import (
    DAMAGED_MASKS,
    TEST,
    find_reward_network,
    origin,
    reward_plan,
    run_reward_stage,
)
from rl_reward_network.rewards.learned import ImageScorer
from rl_reward_network.run import REWARD_RUN, Run

SIDE = 256
WIDTHS = (24, 48, 96, 96)
EPOCHS, BATCH_SIZE, LEARNING_RATE = 30, 16, 1e-3

Predictor = Callable[[np.ndarray, np.ndarray], np.ndarray]


class PooledCNN(nn.Module):
    """Strided convolutions, global average pooling and a sigmoid."""

    def __init__(self) -> None:
        """Initialise the weights from torch's global seed."""
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in zip((4, *WIDTHS), WIDTHS, strict=False):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTHS[-1], 1)

    def forward(self, image_and_mask: Tensor) -> Tensor:
        """Predicted Dice (B,) in (0, 1) of float (B, 4, 256, 256) in [0, 1]."""
        return self.head(self.features(image_and_mask).mean(dim=(2, 3)))[:, 0].sigmoid()


def train_pooled_cnn(examples: Iterable[RewardExample], seed: int) -> Predictor:
    """Train the baseline on the default prompt's mask of each example.

    Returns:
        A function from an image uint8 (H, W, 3) and masks bool (P, H, W) to predicted Dice (P,).
    """
    pairs = [(_stack(e.image, e.masks[:1]), true_dice(e.masks[:1], e.truth)) for e in examples if len(e.masks)]
    inputs = torch.cat([stack for stack, _ in pairs])
    targets = torch.from_numpy(np.concatenate([target for _, target in pairs])).float()
    torch.manual_seed(seed)
    network = PooledCNN().to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # faster convolutions
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(inputs)).split(BATCH_SIZE):
            with mixed_precision(torch.device("cpu")):
                predicted = network(_network_input(inputs[rows]))
            loss = F.mse_loss(predicted.float(), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    network.eval()

    def predict(image: np.ndarray, masks: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return np.concatenate(
                [network(_network_input(part)).numpy() for part in _stack(image, masks).split(BATCH_SIZE)]
            )

    return predict


def _network_input(stack: Tensor) -> Tensor:
    """float32 in [0, 1], in the layout of the weights."""
    return (stack.float() / 255).contiguous(memory_format=torch.channels_last)


def _stack(image: np.ndarray, masks: np.ndarray) -> Tensor:
    """uint8 (P, 4, 256, 256): the image and each of its masks, resized."""
    picture = torch.from_numpy(image.transpose(2, 0, 1)[None].copy()).float()
    picture = F.interpolate(picture, size=(SIDE, SIDE), mode="bilinear", antialias=True)
    stack = F.interpolate(torch.from_numpy(masks[:, None]).float() * 255, size=(SIDE, SIDE), mode="area")
    return torch.cat([picture.expand(len(masks), -1, -1, -1), stack], dim=1).round().byte()


@dataclass(frozen=True)
class Args:
    """Mean absolute error of the Dice predicted by the pooled CNN and by the reward network."""

    mode: tyro.conf.Positional[Literal["quick", "full"]]
    """Mode of the reward network; the pooled CNN learns from the same images."""
    config: Annotated[RunConfig, tyro.conf.arg(name="")]


def main(args: Args) -> None:
    """Train what is missing, and print a line for each source of masks."""
    inputs = open_inputs(args.config)
    network, config = reward_network(inputs, args.mode), reward_plan(inputs.config, args.mode).config
    samples = inputs.pick("reward", config.images, labelled=True)
    predict = train_pooled_cnn(reward_examples(inputs, samples, "pooled CNN"), config.seed)
    test = inputs.pick("test", config.test_images, labelled=True)
    errors: dict[str, list[np.ndarray]] = {}
    for index, example in enumerate(reward_examples(inputs, test, "test patients")):
        scorer, rng = ImageScorer(network, example.image), np.random.default_rng([config.seed, TEST, index])
        scorer.outside = None  # all images are compared
        for source, masks in source_masks(example, rng, DAMAGED_MASKS, own=scorer.own_mask).items():
            predicted = predict(example.image, masks), scorer.quality(masks.astype(np.float32))["dice"]
            errors.setdefault(source, []).append(np.abs(np.stack(predicted) - true_dice(masks, example.truth)))
    for source, parts in errors.items():
        pooled, of_network = np.concatenate(parts, axis=1).mean(axis=1)
        print(f"{source}: pooled CNN {pooled:.3f}, reward network {of_network:.3f}")


def reward_network(inputs: RunInputs, mode: str) -> RewardNetwork:
    """The reward network of the seed of these inputs, trained if it is missing."""
    plan = reward_plan(inputs.config, mode)
    folder = find_reward_network(inputs, plan, inputs.config.seed)
    if folder is None:
        run_folder = Run.create(REWARD_RUN, inputs.config.output_dir, origin(inputs, plan))
        return run_reward_stage(inputs, plan, run_folder).to(inputs.config.device)
    return RewardNetwork.from_pretrained(folder).to(inputs.config.device)


if __name__ == "__main__":
    run(main, Args)
