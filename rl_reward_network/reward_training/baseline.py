"""The baseline of step 1: a small CNN that predicts the Dice from image and mask by global pooling.

Same design as in the previous version of this project: four input channels, about 140,000 parameters, images and masks
resized to 256 x 256, one mask per training image (the default prompt's), mean squared error of its Dice.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_reward_network.models.precision import mixed_precision
from rl_reward_network.reward_training.masks import RewardExample, true_dice

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
