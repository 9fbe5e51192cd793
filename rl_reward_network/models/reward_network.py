"""The reward network: it predicts the quality of a mask from the image, without the ground truth.

An ensemble of small U-Nets predicts the foreground probability of each pixel from the image alone. Dice, IoU,
precision, recall and the error map of a mask follow from this probability and the mask in closed form. Therefore

- the prediction for the image does not depend on the mask. Its errors remain, and a mask that shares them gets too
  high numbers, the network's own segmentation first of all;
- the score is differentiable in every pixel of the mask;
- further masks of the same image need no further pass of the U-Nets.
"""

import hashlib
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from scipy.special import expit
from torch import Tensor, nn
from torch.backends import cudnn

from rl_reward_network.atomic_io import (
    NAMES_ALONE,
    PICTURES,
    load_arrays,
    read_json,
    save_arrays,
    weights_fingerprint,
    whole_folder,
    write_json,
)
from rl_reward_network.models.domain import SURER, Domain, map_statistics
from rl_reward_network.models.weights import read_tensors

VERSION = 3
CONFIG, WEIGHTS = "config.json", "model.safetensors"
TRAIN_ONE = "train one with `sa2va-rl reward quick`"
UNKNOWN_DOMAIN = "its domain is unknown, so that it gives numbers for every image; train the reward network again"
NUMBERS = ("dice", "iou", "precision", "recall")
ONE_PIXEL = 1.0  # smoothing: keeps every ratio and its gradient finite for an empty mask
INITIAL_LOGIT = -2.0  # foreground probability 0.12 before training
FLOOR = 0.02  # probabilities below count as 0: summed over a large image they would outweigh a small object
TILE = 2048  # pixels; larger images are processed in tiles, so that memory does not grow with them

STEEPEST = 15.0  # a steeper curve is nearly a step, and its gradient vanishes at both ends
MIDPOINTS = (-0.5, 1.5)  # outside [0, 1] the curve has no turning point
SPREAD_OFFSET = 0.03  # Dice; members may agree and still be wrong
COVERAGE = 0.9
MIN_PATIENTS = 9  # validation patients that an interval needs: with n, at most n / (n + 1) can be claimed
MAX_HALF_WIDTH = 0.15  # Dice; a wider interval says too little

Array = TypeVar("Array", np.ndarray, Tensor)


@dataclass(frozen=True)
class LevelCurve:
    """An S-shaped map of [0, 1] onto itself: strictly increasing and smooth, with a finite slope above 0 everywhere.

    A network that is unsure where the object ends predicts too low numbers for good masks, in the right order. The map
    corrects the level and keeps the order. It is the logistic curve, scaled so that 0 and 1 stay where they are.
    """

    steepness: float
    """Slope of the logistic curve before scaling, in (0, 15]; a small one is nearly the identity."""
    midpoint: float
    """Where the curve is steepest, in [-0.5, 1.5]."""

    def __post_init__(self) -> None:
        if not (0 < self.steepness <= STEEPEST and MIDPOINTS[0] <= self.midpoint <= MIDPOINTS[1]):  # also refuses NaN
            raise ValueError(
                f"level has steepness {self.steepness}, midpoint {self.midpoint}: expected (0, {STEEPEST}], {MIDPOINTS}"
            )

    def __call__(self, numbers: Tensor) -> Tensor:
        """The map of each number in [0, 1], differentiable; in float64, as the differences are far smaller than 1."""
        low, high = (float(expit(self.steepness * (end - self.midpoint))) for end in (0, 1))
        curve = (self.steepness * (numbers.double() - self.midpoint)).sigmoid()
        return ((curve - low) / (high - low)).to(numbers.dtype)


@dataclass(frozen=True)
class DiceInterval:
    """The 90 % interval of the Dice of one source of masks, as fitted on validation masks of this source.

    A random mask of a new patient lies inside with a probability of 90 %. It reaches from dice + low * unit to dice +
    high * unit, limited to [0, 1]; see `interval_unit`.
    """

    low: float
    """In units below the predicted Dice, or above it if positive."""
    high: float
    """The other end."""
    half_width: float
    """Median half width of the intervals of the validation masks, in [0, 0.5]."""
    patients: int
    """Distinct validation patients."""
    conformal: bool = field(default=True, repr=False)
    """False before version 0.12, where it was a quantile over masks; not part of a network's fingerprint."""

    def __post_init__(self) -> None:
        if not (self.low <= self.high and 0 <= self.half_width <= 0.5 and self.patients >= 1):  # also refuses NaN
            raise ValueError(f"{self}: expected low <= high, half_width in [0, 0.5], patients >= 1")

    @property
    def refusal(self) -> str | None:
        """Why no interval can be given, or None if one can."""
        if not self.conformal:
            return "it was fitted to masks, not to patients, before version 0.12; train the reward network again"
        if self.patients < MIN_PATIENTS:
            return f"it needs {MIN_PATIENTS} validation patients, got {self.patients}"
        if self.half_width > MAX_HALF_WIDTH:
            return f"its half width would be {self.half_width:.3f}, more than {MAX_HALF_WIDTH} says too little"
        return None

    def around(self, dice: np.ndarray) -> np.ndarray:
        """Limits float (n, 2) in [0, 1] of the intervals of n masks, from the Dice (n, K) predicted by each member."""
        offsets = np.array([self.low, self.high]) * interval_unit(dice)[:, None]
        return np.clip(dice.mean(axis=1)[:, None] + offsets, 0, 1)


def interval_unit(dice: np.ndarray) -> np.ndarray:
    """The unit (n,) of an interval: the standard deviation between the Dice (n, K) of members, plus 0.03."""
    return dice.std(axis=1) + SPREAD_OFFSET


@dataclass(frozen=True)
class RewardNetworkConfig:
    """Sizes of a reward network and the values chosen on validation images; saved as its config.json."""

    version: int = VERSION
    """Format of the saved folder; other versions raise a ValueError."""
    channels: tuple[int, ...] = (24, 48, 96, 128, 128)
    """Channels of each level; each further level has half the size of the previous one."""
    packing: int = 4
    """Pixels along each axis that the first level packs into channels; 2 where all training images are small."""
    members: int = 3
    """Number of U-Nets in the ensemble."""
    score_weights: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)
    """Weights of predicted Dice, IoU, precision and recall in the score; their sum is 1."""
    caution: float = 1.0
    """k of the conservative score, mean - k * (standard deviation between members); chosen on validation images."""
    ascent_step: float = 0.2
    """Largest change of a pixel in one step of gradient ascent; chosen on validation images."""
    level: tuple[LevelCurve, ...] = ()
    """Corrects the level of predicted Dice, IoU, precision and recall; fitted on validation images."""
    intervals: dict[str, DiceInterval] = field(default_factory=dict)
    """The 90 % interval of the Dice by source of masks; fitted on validation images."""
    domain: Domain | None = field(default=None, repr=False)
    """The images that it can judge; None before version 1.0.0, where it is unknown."""

    @property
    def stride(self) -> int:
        """Pixels of the image per cell of the coarsest level."""
        return int(self.packing * 2 ** (len(self.channels) - 1))

    def __post_init__(self) -> None:
        if not self.channels or min(*self.channels, self.packing, self.members) < 1:
            raise ValueError(f"{self.channels=}, {self.packing=}, {self.members=}: expected 1 or more")
        total = sum(self.score_weights)
        if len(self.score_weights) != 4 or min(self.score_weights) < 0 or not abs(total - 1) <= 1e-6:  # also NaN
            raise ValueError(f"score_weights={self.score_weights}: expected four weights >= 0 of {NUMBERS}, sum 1")
        if not (self.caution >= 0 and 0 < self.ascent_step <= 1):  # also refuses NaN
            raise ValueError(f"{self.caution=}, {self.ascent_step=}: expected >= 0, (0, 1]")
        if len(self.level) not in (0, len(NUMBERS)):
            raise ValueError(f"level has {len(self.level)} curves, expected one for each of {NUMBERS}, or none")


@dataclass(frozen=True)
class RewardOutput:
    """Predictions of K members for B masks: numbers are float (B,), maps float (B, 1, H, W) in [0, 1]."""

    dice: Tensor
    """Predicted Dice, mean over members, in [0, 1]; `iou`, `precision` and `recall` likewise."""
    iou: Tensor
    precision: Tensor
    recall: Tensor
    score: Tensor
    """The reward: mean over members of the weighted numbers - k * std; at most 1, possibly slightly below 0."""
    members: Tensor
    """float (4, K, B): the four numbers of each member, in the order of `NUMBERS`."""
    member_scores: Tensor
    """float (K, B): the weighted numbers of each member; `std` (B,) is their standard deviation between members."""
    std: Tensor
    mask: Tensor
    foreground_probs: Tensor
    """float (K, B or 1, 1, H, W): predicted probability, by each member, that a pixel belongs to the object."""

    @property
    def foreground_prob(self) -> Tensor:
        """Predicted probability that a pixel belongs to the object, mean over members; computed on access."""
        return self.foreground_probs.mean(dim=0).expand_as(self.mask)

    @property
    def error_map(self) -> Tensor:
        """Predicted probability that the mask is wrong at a pixel; computed on access."""
        return error_map(self.mask, self.foreground_prob)


def soft_overlap(mask: Tensor, foreground_prob: Tensor) -> Tensor:
    """Soft Dice, IoU, precision and recall of masks for a foreground probability: (4, ...), float32 or wider.

    Each ratio of sums over pixels is smoothed by one pixel. Two empty maps give 1, an empty mask of a non-empty object
    approaches 0 (the rule of `rewards.metrics`), and all gradients are finite. Both arguments are float (..., 1, H, W)
    in [0, 1], and broadcast; binary masks and the true mask give the usual numbers.
    """
    dtype = torch.promote_types(mask.dtype, torch.float32)  # half precision cannot represent the sums
    mask, foreground_prob = mask.to(dtype), foreground_prob.to(dtype)
    both = torch.einsum("...chw,...chw->...", mask, foreground_prob)  # pixels; without a map for each pair
    masked, true = (x.sum(dim=(-3, -2, -1)) for x in (mask, foreground_prob))
    empty = ONE_PIXEL * ONE_PIXEL / (masked + true + ONE_PIXEL)  # one pixel if both are empty, else nearly 0
    dice = (2 * both + ONE_PIXEL) / (masked + true + ONE_PIXEL)
    iou = (both + ONE_PIXEL) / (masked + true - both + ONE_PIXEL)
    precision = (both + empty) / (masked + ONE_PIXEL)
    recall = (both + empty) / (true + ONE_PIXEL)
    return torch.stack([dice, iou, precision, recall])


def error_map(mask: Array, foreground_prob: Array) -> Array:
    """Probability in [0, 1] that a mask is wrong at each pixel; both arguments float in [0, 1], of one shape."""
    return mask * (1 - foreground_prob) + (1 - mask) * foreground_prob


class UNet(nn.Module):
    """One member of the ensemble: a U-Net from an image to foreground logits.

    The finest level packs 4x4 pixels into channels: most of the work is saved, no pixel is lost, and the coarsest of
    five levels overlooks the whole image, which decides what belongs to the object.
    """

    def __init__(self, channels: tuple[int, ...], packing: int) -> None:
        """Initialise the weights from torch's global seed."""
        super().__init__()
        self.packing = packing
        inputs = (3 * packing**2, *channels)
        self.down = nn.ModuleList(_block(i, o) for i, o in zip(inputs, channels, strict=False))
        pairs = list(pairwise(channels))[::-1]  # (finer, coarser), from the coarsest up
        self.up = nn.ModuleList(_block(finer + coarser, finer) for finer, coarser in pairs)
        self.head = nn.Conv2d(channels[0], packing**2, 1)
        nn.init.constant_(self.head.bias, INITIAL_LOGIT)  # type: ignore[arg-type]

    def forward(self, image: Tensor) -> Tensor:
        """Logits (B, 1, H, W) of float images (B, 3, H, W) in [0, 1]; H and W multiples of `stride`."""
        levels = [self.down[0](F.pixel_unshuffle(image * 4 - 2, self.packing))]
        for block in self.down[1:]:
            levels.append(block(F.avg_pool2d(levels[-1], 2)))
        x = levels.pop()
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), levels.pop()], dim=1))
        return F.pixel_shuffle(self.head(x), self.packing)


class RewardNetwork(nn.Module):
    """An ensemble of U-Nets that predicts foreground probabilities, and the quality of masks computed from them.

    `training_info` describes the training data (mode, data fingerprint, groups) and `pictures` holds the thumbnails of
    its images (`data.identity`); both are saved with the weights.
    """

    def __init__(self, config: RewardNetworkConfig | None = None, training_info: dict[str, Any] | None = None) -> None:
        """Initialise the weights from torch's global seed."""
        super().__init__()
        self.config = config or RewardNetworkConfig()
        self.training_info = dict(training_info or {})
        self.pictures: dict[str, np.ndarray] = {}
        self.source: Path | None = None  # the folder that it was loaded from
        self.members = nn.ModuleList(
            UNet(self.config.channels, self.config.packing) for _ in range(self.config.members)
        )
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # faster convolutions

    def forward(self, image: Tensor, mask: Tensor) -> RewardOutput:
        """Predict the quality of each mask; differentiable in `mask`.

        Args:
            image: float (B, 3, H, W), RGB in [0, 1], any H and W; or (1, 3, H, W), one image of all B masks.
            mask: float (B, 1, H, W) in [0, 1], binary or soft.

        Raises:
            ValueError: another shape or dtype.
        """
        height, width = mask.shape[-2:]
        if image.ndim != 4 or image.shape[0] not in (1, mask.shape[0]) or image.shape[1:] != (3, height, width):
            raise ValueError(f"image must be (B or 1, 3, H, W) for masks {tuple(mask.shape)}, got {tuple(image.shape)}")
        if mask.ndim != 4 or mask.shape[1] != 1:
            raise ValueError(f"mask must be (B, 1, H, W), got {tuple(mask.shape)}")
        if not image.is_floating_point() or not mask.is_floating_point():
            raise ValueError(f"image and mask must be float in [0, 1], got {image.dtype} and {mask.dtype}")
        return self.mask_quality(mask, self.foreground_probs(image))

    def foreground_probs(self, image: Tensor) -> Tensor:
        """Foreground probability by each of K members, float (K, B, 1, H, W); `image` as in `forward`.

        Images of another size than those of training are seen at the size that `Domain.seen_size` says. Images larger
        than a tile are processed in tiles with margins: the same result in bounded memory. Computed in float32, also
        under autocast and without the TF32 of GPUs, because fewer digits would change every score.
        """
        size, domain = image.shape[-2:], self.config.domain
        seen = size if domain is None else domain.seen_size(*size)
        if tuple(seen) == tuple(size):
            return self._probs_of(image)
        maps = self._probs_of(F.interpolate(image, size=seen, mode="bilinear", antialias=True))
        resized = F.interpolate(maps.flatten(0, 1), size=size, mode="bilinear", antialias=True)
        return resized.unflatten(0, maps.shape[:2])

    def _probs_of(self, image: Tensor) -> Tensor:
        """`foreground_probs` of images as they are."""
        step = self.config.stride
        margin, tile = 8 * step, max(step, TILE // step * step)  # the margin is more than the receptive field reaches
        height, width = image.shape[-2:]
        exact = cudnn.flags(enabled=True, allow_tf32=False) if image.is_cuda else nullcontext()  # not safe in threads
        with torch.autocast(image.device.type, enabled=False), exact:
            padded = F.pad(image, (0, -width % step, 0, -height % step), mode="replicate")
            tops, lefts = range(0, padded.shape[-2], tile), range(0, padded.shape[-1], tile)
            rows = [torch.cat([self._tile(padded, top, left, tile, margin) for left in lefts], dim=-1) for top in tops]
            return torch.cat(rows, dim=-2)[..., :height, :width]

    def _tile(self, image: Tensor, top: int, left: int, tile: int, margin: int) -> Tensor:
        """Foreground probabilities (K, B, 1, h, w) of one tile, computed with a margin around it."""
        row, column = max(0, top - margin), max(0, left - margin)
        window = image[..., row : top + tile + margin, column : left + tile + margin]
        maps = torch.stack([member(window).sigmoid() for member in self.members])
        maps = (maps - FLOOR).clamp_min(0) / (1 - FLOOR)
        return maps[..., top - row : top - row + tile, left - column : left - column + tile]

    def mask_quality(self, mask: Tensor, foreground_probs: Tensor) -> RewardOutput:
        """Quality of masks (B, 1, H, W) from foreground probabilities (K, B or 1, 1, H, W); in float32."""
        with torch.autocast(mask.device.type, enabled=False):
            members = soft_overlap(mask, foreground_probs)  # (4, K, B)
            if level := self.config.level:
                members = torch.stack([curve(number) for curve, number in zip(level, members, strict=True)])
            weights = torch.tensor(self.config.score_weights, dtype=members.dtype, device=members.device)
            weighted = torch.einsum("n,nkb->kb", weights, members)
            mean = weighted.mean(dim=0)
            std = ((weighted - mean).square().mean(dim=0) + 1e-12).sqrt()  # sqrt has no finite gradient at 0
            score = mean - self.config.caution * std
            dice, iou, precision, recall = members.mean(dim=1)
            numbers = (dice, iou, precision, recall, score, members, weighted, std)
            return RewardOutput(*numbers, mask, foreground_probs)

    def outside(self, image: np.ndarray, foreground_probs: Tensor) -> str | None:
        """Why no number can be given for masks of an image uint8 (H, W, 3) with these maps; None where it can."""
        if self.config.domain is not None:
            negative = partial(self.surer_of_negative, image, foreground_probs)
            return self.config.domain.outside(image, foreground_probs, negative)
        if self.source is not None:  # shown once: warnings are not repeated
            warnings.warn(f"{self.source}: {UNKNOWN_DOMAIN}", stacklevel=2)
        return None

    @torch.no_grad()
    def surer_of_negative(self, image: np.ndarray, foreground_probs: Tensor) -> bool:
        """Whether it is surer of what it sees in the negative; see `Domain.knows_negatives` and `outside`."""
        pixels = torch.tensor(255 - image, device=foreground_probs.device)
        negative = self.foreground_probs(pixels.permute(2, 0, 1)[None].float() / 255)
        return map_statistics(negative)["decided"] > map_statistics(foreground_probs)["decided"] + SURER

    def member(self, index: int) -> "RewardNetwork":
        """One member as a network with one member and caution 0; the weights are shared."""
        single = RewardNetwork(replace(self.config, members=1, caution=0.0), self.training_info)
        single.members[0] = self.members[index]
        return single.train(self.training)

    @property
    def fingerprint(self) -> str:
        """16 hex digits: a hash of weights and config."""
        config = f"{self.config}"[:-1] + ", interval=None)"  # a field until 0.12: runs know networks by this hash
        config += "" if self.config.domain is None else f"{self.config.domain}"  # maps depend on the size that is seen
        return hashlib.sha256(f"{weights_fingerprint(self)}{config}".encode()).hexdigest()[:16]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json, model.safetensors and the pictures; the folder is created or replaced atomically.

        Raises:
            ValueError: the folder contains other files, which would be lost.
        """
        folder = Path(folder)
        if foreign := {path.name for path in folder.glob("*")} - {CONFIG, WEIGHTS, Path(PICTURES).parts[0]}:
            raise ValueError(f"{folder}: contains {len(foreign)} other files; name a new folder for the reward network")
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        with whole_folder(folder) as temporary:
            write_json(temporary / CONFIG, {**asdict(self.config), "training": self.training_info})
            save_file(weights, temporary / WEIGHTS)
            if self.pictures:
                save_arrays(temporary / PICTURES, self.pictures)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "RewardNetwork":
        """Load the network saved in `folder`: on the CPU, in evaluation mode, with frozen weights.

        Raises:
            ValueError: the folder has no network, another version, or weights that are damaged or do not fit; the
                message has the file and the remedy.
        """
        folder = Path(folder)
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise ValueError(f"{folder}: no reward network here ({name} not found); {TRAIN_ONE}")
        config, training_info = _read_config(folder / CONFIG)
        network = cls(config, training_info)
        try:
            network.load_state_dict(read_tensors(folder / WEIGHTS))
        except (ValueError, RuntimeError) as error:  # load_state_dict reports keys and shapes as RuntimeError
            reason = " ".join(str(error).removeprefix(f"{folder / WEIGHTS}: ").split())
            raise ValueError(f"{folder / WEIGHTS}: damaged or of another network ({reason}); {TRAIN_ONE}") from None
        network.pictures, network.source = load_arrays(folder / PICTURES, NAMES_ALONE), folder
        return network.eval().requires_grad_(False)


def _block(inputs: int, outputs: int) -> nn.Sequential:
    """Two layers of 3x3 convolution, BatchNorm (constant in evaluation mode, so that tiles agree) and SiLU."""
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [nn.Conv2d(width, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.SiLU()]
    return nn.Sequential(*layers)


def _read_config(path: Path) -> tuple[RewardNetworkConfig, dict[str, Any]]:
    """Read and check the config and the training info of a config.json."""
    values = read_json(path)
    version = values.get("version") if isinstance(values, dict) else None
    if version != VERSION:
        raise ValueError(f"{path}: field version is {version!r}, this code reads {VERSION}; {TRAIN_ONE}")
    values = {"domain": None} | values  # not in networks before version 1.0.0
    if wrong := {"training", *asdict(RewardNetworkConfig())} ^ set(values):
        raise ValueError(f"{path}: missing or unknown fields {sorted(wrong)}; {TRAIN_ONE}")
    training_info, intervals = values.pop("training"), values["intervals"]
    try:
        values |= {name: tuple(values[name]) for name in ("channels", "score_weights")}
        values["level"] = tuple(LevelCurve(**curve) for curve in values["level"])
        values["intervals"] = {name: DiceInterval(**{"conformal": False, **of}) for name, of in intervals.items()}
        values["domain"] = values["domain"] and Domain.from_json(values["domain"])
        return RewardNetworkConfig(**values), training_info
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}; {TRAIN_ONE}") from None
