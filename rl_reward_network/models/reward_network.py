"""The reward network: looks at an image, says where the object truly is, and judges any mask by that.

An ensemble of small U-Nets predicts, from the image alone, how likely each pixel is object. Everything else follows
from this truth map and the mask in closed form. So a mask cannot talk the network round (what it says about the image
does not depend on the mask), numbers and error map come from one belief, the gradient reaches every pixel of the mask,
and a second mask of the same image costs next to nothing.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rl_reward_network.artefacts import read_json, whole_folder, write_json
from rl_reward_network.models.fingerprint import weights_fingerprint

VERSION = 2
CONFIG, WEIGHTS = "config.json", "model.safetensors"
TRAIN_ONE = "train one with `bash run_experiment3.sh quick`"
NUMBERS = ("dice", "iou", "precision", "recall")
ONE_PIXEL = 1.0  # keeps every ratio and its gradient finite when nothing is masked
RARE = -2.0  # before training a pixel is object with p = 0.12
FLOOR = 0.02  # of a truth map: summed over a large image, traces of doubt would outweigh a small object, or none
SPREAD_FLOOR = 0.002  # members that agree are still not beyond doubt
TILE = 512  # pixels; larger images are looked at tile by tile, so memory does not grow with them


@dataclass(frozen=True)
class RewardNetworkConfig:
    """Sizes of a reward network and what validation chose; written into its config.json."""

    version: int = VERSION
    """Format of the saved folder; other versions are refused."""
    channels: tuple[int, ...] = (16, 32, 64, 128)
    """Width of each level; the first works at half the image size, each further one at half of the last."""
    members: int = 3
    """U-Nets in the ensemble."""
    score_weights: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)
    """What the score is made of: weights of predicted Dice, IoU, precision and recall; their sum is 1."""
    caution: float = 1.0
    """k of the conservative score, mean - k * (standard deviation between members); chosen on validation."""
    interval: float = 2.0
    """Half width of the 90 % interval of the predicted Dice, in standard deviations between members (at least 0.002);
    chosen on validation."""
    ascent_step: float = 0.2
    """Most that one step of gradient ascent may change a pixel of the mask; chosen on validation."""

    def __post_init__(self) -> None:
        """Refuse sizes and weights no network can be built from."""
        if not self.channels or min(self.channels) < 1 or self.members < 1:
            raise ValueError(f"channels={self.channels}, members={self.members}: every one must be at least 1")
        if len(self.score_weights) != 4 or min(self.score_weights) < 0 or abs(sum(self.score_weights) - 1) > 1e-6:
            raise ValueError(f"score_weights={self.score_weights}: four weights >= 0 of {NUMBERS} that sum to 1")
        if not (self.caution >= 0 and self.interval > 0 and 0 < self.ascent_step <= 1):  # also refuses NaN
            raise ValueError(f"{self.caution=}, {self.interval=}, {self.ascent_step=}: must be >= 0, > 0 and in (0, 1]")


@dataclass(frozen=True)
class RewardOutput:
    """What the ensemble of K members says about B masks: numbers float (B,), maps float (B, 1, H, W) in [0, 1]."""

    dice: Tensor
    """Predicted Dice, the mean over members; `iou`, `precision` and `recall` likewise; all in [0, 1]."""
    iou: Tensor
    precision: Tensor
    recall: Tensor
    score: Tensor
    """The reward: weighted numbers, mean - k * spread. At most 1; it can fall a little below 0."""
    members: Tensor
    """The four numbers of each member, (4, K, B)."""
    spread: Tensor
    """Standard deviation between the members' weighted numbers."""
    truth_map: Tensor
    """Probability that the pixel is object, the mean over members."""
    error_map: Tensor
    """Probability that the mask is wrong at the pixel."""


def judge(mask: Tensor, truth_map: Tensor) -> Tensor:
    """Soft Dice, IoU, precision and recall of masks, given how likely each pixel is object.

    Sums over pixels, each ratio smoothed by one pixel, so that two empty maps give 1 everywhere and an empty mask of a
    non-empty object goes to 0 (the rule of `rewards.masks`), all with a finite gradient.

    Args:
        mask: float (..., 1, H, W) in [0, 1]; binary masks give the ordinary numbers.
        truth_map: float (..., 1, H, W) in [0, 1], broadcast against `mask`; the true mask gives the true numbers.

    Returns:
        float32 or wider (4, ...) in [0, 1], in the order of `NUMBERS`.
    """
    dtype = torch.promote_types(mask.dtype, torch.float32)  # half precision cannot count pixels
    both, masked, true = (x.sum(dim=(-3, -2, -1), dtype=dtype) for x in (mask * truth_map, mask, truth_map))  # pixels
    nothing = ONE_PIXEL * ONE_PIXEL / (masked + true + ONE_PIXEL)  # one pixel where both are empty, else nearly none
    dice = (2 * both + ONE_PIXEL) / (masked + true + ONE_PIXEL)
    iou = (both + ONE_PIXEL) / (masked + true - both + ONE_PIXEL)
    precision = (both + nothing) / (masked + ONE_PIXEL)
    recall = (both + nothing) / (true + ONE_PIXEL)
    return torch.stack([dice, iou, precision, recall])


class UNet(nn.Module):
    """One member: from an image to the logits of its truth map.

    The finest level packs 2x2 pixels into channels: a quarter of the work, and one-pixel vessels lose nothing.
    """

    def __init__(self, channels: tuple[int, ...]) -> None:
        """Fresh weights from torch's global seed."""
        super().__init__()
        self.down = nn.ModuleList(_block(i, o) for i, o in zip((12, *channels), channels, strict=False))
        pairs = list(pairwise(channels))[::-1]  # (finer, coarser), from the coarsest up
        self.up = nn.ModuleList(_block(finer + coarser, finer) for finer, coarser in pairs)
        self.head = nn.Conv2d(channels[0], 4, 1)
        nn.init.constant_(self.head.bias, RARE)  # type: ignore[arg-type]

    def forward(self, image: Tensor) -> Tensor:
        """Logits (B, 1, H, W) of float images (B, 3, H, W) in [0, 1]; H and W multiples of 2 ** levels."""
        levels = [self.down[0](F.pixel_unshuffle(image * 4 - 2, 2))]
        for block in self.down[1:]:
            levels.append(block(F.avg_pool2d(levels[-1], 2)))
        x = levels.pop()
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), levels.pop()], dim=1))
        return F.pixel_shuffle(self.head(x), 2)


class RewardNetwork(nn.Module):
    """An ensemble of U-Nets from image to truth map, and from there to the numbers of `judge`.

    `training_info` says what the weights were trained on (mode, data fingerprint, groups); it is saved with them.
    """

    def __init__(self, config: RewardNetworkConfig | None = None, training_info: dict[str, Any] | None = None) -> None:
        """Fresh weights from torch's global seed."""
        super().__init__()
        self.config = config or RewardNetworkConfig()
        self.training_info = dict(training_info or {})
        self.source: Path | None = None  # the folder it was read from
        self.members = nn.ModuleList(UNet(self.config.channels) for _ in range(self.config.members))

    def forward(self, image: Tensor, mask: Tensor) -> RewardOutput:
        """The predicted quality of each mask; differentiable in `mask`.

        Args:
            image: float (B, 3, H, W), RGB in [0, 1], any H and W; or (1, 3, H, W), the image of all B masks, which is
                then looked at once.
            mask: float (B, 1, H, W) in [0, 1]; soft masks allowed.

        Raises:
            ValueError: a shape or dtype other than these.
        """
        _check(image, mask)
        return self.judge(mask, self.truth_maps(image))

    def truth_maps(self, image: Tensor) -> Tensor:
        """Each member's probability that a pixel is object, float (K, B, 1, H, W); `image` as in `forward`.

        Images larger than a tile are looked at in tiles with margins, which gives the same map in bounded memory.
        In float32 under autocast, too: half precision would move every score.
        """
        with torch.autocast(image.device.type, enabled=False):
            return self._truth_maps(image)

    def _truth_maps(self, image: Tensor) -> Tensor:
        step = 2 ** len(self.config.channels)
        margin = 8 * step  # more than the receptive field reaches
        height, width = image.shape[-2:]
        padded = F.pad(image, (0, -width % step, 0, -height % step), mode="replicate")
        tile = max(step, TILE // step * step)
        rows = [
            torch.cat(
                [self._tile(padded, top, left, tile, margin) for left in range(0, padded.shape[-1], tile)], dim=-1
            )
            for top in range(0, padded.shape[-2], tile)
        ]
        return torch.cat(rows, dim=-2)[..., :height, :width]

    def _tile(self, image: Tensor, top: int, left: int, tile: int, margin: int) -> Tensor:
        """Truth maps (K, B, 1, h, w) of one tile, seen with a margin around it."""
        row, column = max(0, top - margin), max(0, left - margin)
        window = image[..., row : top + tile + margin, column : left + tile + margin]
        maps = torch.stack([member(window).sigmoid() for member in self.members])
        maps = (maps - FLOOR).clamp_min(0) / (1 - FLOOR)
        return maps[..., top - row : top - row + tile, left - column : left - column + tile]

    def judge(self, mask: Tensor, truth_maps: Tensor) -> RewardOutput:
        """The quality of masks (B, 1, H, W), given truth maps (K, B or 1, 1, H, W) of their images.

        In float32 under autocast, too.
        """
        with torch.autocast(mask.device.type, enabled=False):
            return self._judge(mask, truth_maps)

    def _judge(self, mask: Tensor, truth_maps: Tensor) -> RewardOutput:
        members = judge(mask, truth_maps)  # (4, K, B)
        weights = torch.tensor(self.config.score_weights, dtype=members.dtype, device=members.device)
        weighted = torch.einsum("n,nkb->kb", weights, members)
        mean = weighted.mean(dim=0)
        spread = ((weighted - mean).square().mean(dim=0) + 1e-12).sqrt()  # the bare root has no slope at 0
        score = mean - self.config.caution * spread
        truth_map = truth_maps.mean(dim=0).expand_as(mask)
        error_map = mask * (1 - truth_map) + (1 - mask) * truth_map
        dice, iou, precision, recall = members.mean(dim=1)
        return RewardOutput(dice, iou, precision, recall, score, members, spread, truth_map, error_map)

    def alone(self, index: int) -> "RewardNetwork":
        """One member as a network of its own (weights shared), without caution."""
        single = RewardNetwork(replace(self.config, members=1, caution=0.0), self.training_info)
        single.members[0] = self.members[index]
        return single.train(self.training)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change when a score may: weights and config."""
        return hashlib.sha256(f"{weights_fingerprint(self)}{self.config}".encode()).hexdigest()[:16]

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
        """The network saved in `folder`: on the CPU, in evaluation mode, its weights frozen.

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
        network.source = folder
        return network.eval().requires_grad_(False)


def _block(inputs: int, outputs: int) -> nn.Sequential:
    """Twice 3x3 convolution, BatchNorm (a constant scale once trained, so that tiles agree), SiLU."""

    def layers(width: int) -> Iterator[nn.Module]:
        yield from (nn.Conv2d(width, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.SiLU())

    return nn.Sequential(*layers(inputs), *layers(outputs))


def _check(image: Tensor, mask: Tensor) -> None:
    """Refuse what would broadcast silently."""
    height, width = mask.shape[-2:]
    if image.ndim != 4 or image.shape[0] not in (1, mask.shape[0]) or image.shape[1:] != (3, height, width):
        raise ValueError(f"image must be (B or 1, 3, H, W) for masks {tuple(mask.shape)}, got {tuple(image.shape)}")
    if mask.ndim != 4 or mask.shape[1] != 1:
        raise ValueError(f"mask must be (B, 1, H, W), got {tuple(mask.shape)}")
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
    try:
        values |= {name: tuple(values[name]) for name in ("channels", "score_weights")}
        return RewardNetworkConfig(**values), training_info
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}; {TRAIN_ONE}") from None
