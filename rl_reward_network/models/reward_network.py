"""The reward network: a small U-Net that looks at an image and a mask and says how good the mask is, and where wrong.

It predicts one map, the probability that a pixel truly is object. Everything else follows from that map and the mask in
closed form, so that the score always agrees with the error map and its gradient reaches every pixel of the mask.
"""

from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rl_reward_network.artefacts import read_json, whole_folder, write_json

VERSION = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
TRAIN_ONE = "train one with `bash run_experiment3.sh quick`"
TRUST, SPARSE = 1.5, -1.0  # before training a masked pixel is object with p = 0.62, any other with p = 0.08
ONE_PIXEL = 1.0  # keeps every ratio and its gradient finite when nothing is masked


@dataclass(frozen=True)
class RewardNetworkConfig:
    """Sizes of a reward network; written into its config.json."""

    version: int = VERSION
    """Format of the saved folder; other versions are refused."""
    channels: tuple[int, ...] = (16, 32, 64, 96)
    """Width of each level; the first works at half the image size, each further one at half of the last."""
    norm_groups: int = 8
    """Groups of each GroupNorm; divides every width."""

    def __post_init__(self) -> None:
        """Refuse sizes no network can be built from."""
        if not self.channels or self.norm_groups < 1 or any(c < 1 or c % self.norm_groups for c in self.channels):
            raise ValueError(
                f"channels={self.channels}: every width must be a positive multiple of norm_groups={self.norm_groups}"
            )


@dataclass(frozen=True)
class RewardOutput:
    """What the network says about B masks: numbers float (B,) in [0, 1], maps float (B, 1, H, W) in [0, 1]."""

    dice: Tensor
    iou: Tensor
    precision: Tensor
    recall: Tensor
    score: Tensor
    """The reward: the predicted Dice."""
    truth_map: Tensor
    """Probability that the pixel is object."""
    error_map: Tensor
    """Probability that the mask is wrong at the pixel."""


def judge(mask: Tensor, truth_map: Tensor) -> RewardOutput:
    """Soft Dice, IoU, precision, recall and error map of masks, given how likely each pixel is object.

    Sums over pixels, each ratio smoothed by one pixel, so that two empty maps give 1 everywhere and an empty mask of a
    non-empty object goes to 0 (the rule of `rewards.masks`), all with a finite gradient.

    Args:
        mask: float (B, 1, H, W) in [0, 1]; binary masks give the ordinary numbers.
        truth_map: float (B, 1, H, W) in [0, 1]; the true mask gives the true numbers.
    """
    dtype = torch.promote_types(mask.dtype, torch.float32)  # half precision cannot count pixels
    both, masked, true = (x.sum(dim=(1, 2, 3), dtype=dtype) for x in (mask * truth_map, mask, truth_map))  # (B,) pixels
    nothing = ONE_PIXEL * ONE_PIXEL / (masked + true + ONE_PIXEL)  # one pixel where both are empty, else nearly none
    dice = (2 * both + ONE_PIXEL) / (masked + true + ONE_PIXEL)
    iou = (both + ONE_PIXEL) / (masked + true - both + ONE_PIXEL)
    precision = (both + nothing) / (masked + ONE_PIXEL)
    recall = (both + nothing) / (true + ONE_PIXEL)
    error_map = mask * (1 - truth_map) + (1 - mask) * truth_map
    return RewardOutput(dice, iou, precision, recall, dice, truth_map, error_map)


class RewardNetwork(nn.Module):
    """A U-Net from image and mask to a truth map, and from there to the numbers of `judge`.

    The finest level packs 2x2 pixels into channels: a quarter of the work, and one-pixel vessels lose nothing.
    `training_info` says what the weights were trained on (mode, data fingerprint, groups); it is saved with them.
    """

    def __init__(self, config: RewardNetworkConfig | None = None, training_info: dict[str, Any] | None = None) -> None:
        """Fresh weights from torch's global seed."""
        super().__init__()
        self.config = config or RewardNetworkConfig()
        self.training_info = dict(training_info or {})
        widths, groups = self.config.channels, self.config.norm_groups
        self.down = nn.ModuleList(_block(i, o, groups) for i, o in zip((16, *widths), widths, strict=False))
        pairs = list(pairwise(widths))[::-1]  # (finer, coarser), from the coarsest up
        self.up = nn.ModuleList(_block(finer + coarser, finer, groups) for finer, coarser in pairs)
        self.head = nn.Conv2d(widths[0], 4, 1)

    def forward(self, image: Tensor, mask: Tensor) -> RewardOutput:
        """The predicted quality of each mask; differentiable in `mask`.

        Args:
            image: float (B, 3, H, W), RGB in [0, 1]; any H and W.
            mask: float (B, 1, H, W) in [0, 1]; soft masks allowed.

        Raises:
            ValueError: a shape or dtype other than these.
        """
        return judge(mask, self.truth_logits(image, mask).sigmoid())

    def truth_logits(self, image: Tensor, mask: Tensor) -> Tensor:
        """Logits of the truth map, float (B, 1, H, W); arguments as `forward`."""
        _check(image, mask)
        height, width = mask.shape[-2:]
        step = 2 ** len(self.config.channels)
        x = torch.cat([image, mask], dim=1) * 4 - 2
        x = F.pad(x, (0, -width % step, 0, -height % step), mode="replicate")
        correction = self._unet(F.pixel_unshuffle(x, 2))[..., :height, :width]
        return correction + TRUST * (2 * mask - 1) + SPARSE  # learning where a mask is wrong takes half the steps

    def _unet(self, x: Tensor) -> Tensor:
        """From packed input (B, 16, h, w) to logits (B, 1, 2h, 2w)."""
        levels = [self.down[0](x)]
        for block in self.down[1:]:
            levels.append(block(F.avg_pool2d(levels[-1], 2)))
        x = levels.pop()
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), levels.pop()], dim=1))
        return F.pixel_shuffle(self.head(x), 2)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors; the folder appears, or is replaced, whole.

        Raises:
            ValueError: the folder holds files that are not a reward network's (they would be lost).
        """
        folder = Path(folder)
        foreign = {path.name for path in folder.glob("*")} - {CONFIG, WEIGHTS}
        if foreign:
            raise ValueError(f"{folder}: holds {len(foreign)} other files; name a new folder for the reward network")
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        with whole_folder(folder) as temporary:
            write_json(temporary / CONFIG, {**asdict(self.config), "training": self.training_info})
            save_file(weights, temporary / WEIGHTS)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "RewardNetwork":
        """The network saved in `folder`, on the CPU, in evaluation mode.

        Raises:
            ValueError: no network there, another version, or weights that are damaged or do not fit; the message names
                the file and the remedy.
        """
        folder = Path(folder)
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise ValueError(f"{folder}: no reward network here ({name} not found); {TRAIN_ONE}")
        config, training_info = _read_config(folder / CONFIG)
        network = cls(config, training_info)
        try:
            network.load_state_dict(load_file(folder / WEIGHTS))
        except (SafetensorError, RuntimeError) as error:  # load_state_dict reports keys and shapes as RuntimeError
            reason = " ".join(str(error).split())
            raise ValueError(f"{folder / WEIGHTS}: damaged or of another network ({reason}); {TRAIN_ONE}") from None
        return network.eval()


def _block(inputs: int, outputs: int, groups: int) -> nn.Sequential:
    """Twice 3x3 convolution, GroupNorm, SiLU."""
    return nn.Sequential(
        *(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(groups, outputs), nn.SiLU()),
        *(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(groups, outputs), nn.SiLU()),
    )


def _check(image: Tensor, mask: Tensor) -> None:
    """Refuse what would broadcast silently."""
    batch, height, width = mask.shape[0], *mask.shape[-2:]
    if image.shape != (batch, 3, height, width) or mask.shape != (batch, 1, height, width):
        raise ValueError(
            f"expected image (B, 3, H, W) and mask (B, 1, H, W), got {tuple(image.shape)} and {tuple(mask.shape)}"
        )
    if not image.is_floating_point() or not mask.is_floating_point():
        raise ValueError(f"image and mask must be float in [0, 1], got {image.dtype} and {mask.dtype}")


def _read_config(path: Path) -> tuple[RewardNetworkConfig, dict[str, Any]]:
    """Sizes and training info of a config.json, after the version check."""
    values = read_json(path)
    if not isinstance(values, dict) or values.get("version") != VERSION:
        found = values.get("version") if isinstance(values, dict) else None
        raise ValueError(f"{path}: field version is {found!r}, this code reads {VERSION}; {TRAIN_ONE}")
    missing = {"training", *(field.name for field in fields(RewardNetworkConfig))} ^ set(values)
    if missing:
        raise ValueError(f"{path}: missing or unknown fields {sorted(missing)}; {TRAIN_ONE}")
    training_info = values.pop("training")
    return RewardNetworkConfig(**{**values, "channels": tuple(values["channels"])}), training_info
