"""The learned reward: the quality of masks predicted by a reward network, without labels.

The U-Nets of a reward network see the image alone, and the quality of any mask follows from their foreground maps in
closed form. `ForegroundMaps` computes them once per image: rewards, pathwise gradient, validation and evaluation need
one pass for each image, not one for each mask or epoch.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rl_reward_network.atomic_io import load_arrays, pixels_digest, save_arrays

PIXELS_AT_ONCE = 2**20  # bounds the memory: one mask of 999x960, sixteen of 256x256
FOLDER = "foreground_maps"  # beside the run folders, with one folder for each network
MEMORY_BYTES = 2 * 2**30  # of maps in main memory
DISK_BYTES = 4 * 2**30  # of files of one network; further maps are kept in memory only
MAPS = "foreground_probs"  # name in a file


class MaskQualityModel(Protocol):
    """The interface of a reward network: one pass per image, then any number of masks; see `RewardNetwork`."""

    @property
    def fingerprint(self) -> str:
        """A hash of everything that the maps depend on."""

    def foreground_probs(self, image: Tensor) -> Tensor:
        """Maps (K, 1, 1, H, W) of float images (1, 3, H, W) in [0, 1]."""

    def mask_quality(self, mask: Tensor, foreground_probs: Tensor) -> Any:
        """The RewardOutput of float masks (B, 1, H, W) in [0, 1]."""


class ImageScorer:
    """A reward network, or any object with its interface, applied to one image uint8 (H, W, 3), or a ValueError.

    The U-Nets run once, in the constructor, unless `probs`, the maps (K, 1, 1, H, W) of the image, are known. In
    `reasons`, digest of an image -> `outside`, what is found is added.
    """

    def __init__(
        self,
        network: MaskQualityModel,
        image: np.ndarray,
        probs: Tensor | None = None,
        reasons: dict[str, str | None] | None = None,
    ) -> None:
        check_image(image)
        self.network, self.image, self.size = network, image, image.shape[:2]
        self._reasons = {} if reasons is None else reasons
        with torch.no_grad():
            self.probs = network.foreground_probs(_tensor(network, image)) if probs is None else probs

    @property
    def foreground_prob(self) -> np.ndarray:
        """float32 (H, W) in [0, 1]: probability that each pixel belongs to the object, mean over members."""
        return self.probs.mean(dim=0)[0, 0].float().cpu().numpy()

    @property
    def own_mask(self) -> np.ndarray:
        """bool (H, W): the network's own segmentation."""
        return np.asarray(self.foreground_prob > 0.5)

    @cached_property
    def outside(self) -> str | None:
        """Why no number can be given for masks of this image, in one sentence; None where numbers can be given."""
        ask = getattr(self.network, "outside", None)  # an object with this interface may know no domain
        if (key := pixels_digest(self.image)) not in self._reasons:
            self._reasons[key] = None if ask is None else ask(self.image, self.probs)
        return self._reasons[key]

    def quality(self, masks: np.ndarray) -> dict[str, np.ndarray]:
        """The predicted quality of each mask, float32 (P, H, W) in [0, 1], binary or soft.

        Returns:
            float32 arrays: `score` (P,), the reward, clipped to [0, 1]; `dice` and `std` (P,); `members` (P, K, 4),
            Dice, IoU, precision and recall by each member; `member_scores` (P, K), the weighted numbers of each. All
            are NaN where the image is outside the network's domain.

        Raises:
            ValueError: another dtype, shape or range, or a prediction that is not finite.
        """
        _check_masks(masks, self.size)
        at_once = max(1, PIXELS_AT_ONCE // (self.size[0] * self.size[1]))
        starts = range(0, max(1, len(masks)), at_once)
        parts = [self._quality(masks[start : start + at_once]) for start in starts]
        result = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        if not all(np.isfinite(column).all() for column in result.values()):
            raise ValueError("the reward network returned a score that is not finite; its weights are damaged")
        return {name: np.full_like(column, np.nan) for name, column in result.items()} if self.outside else result

    @torch.no_grad()
    def _quality(self, masks: np.ndarray) -> dict[str, np.ndarray]:
        """The numbers of a RewardOutput; its maps are dropped, so that many large masks need little memory."""
        output = self.network.mask_quality(self._like_probs(masks), self.probs)
        numbers = {"score": output.score.clamp(0, 1), "dice": output.dice, "std": output.std}
        numbers |= {"members": output.members.permute(2, 1, 0), "member_scores": output.member_scores.T}
        return {name: values.float().cpu().numpy() for name, values in numbers.items()}

    def _like_probs(self, masks: np.ndarray) -> Tensor:
        """Masks (P, H, W) as (P, 1, H, W) with dtype and device of the probabilities."""
        return torch.tensor(masks, dtype=self.probs.dtype, device=self.probs.device)[:, None]

    def ascend(self, masks: np.ndarray, step_size: float, steps: int) -> Iterator[np.ndarray]:
        """Gradient ascent on the score, each mask by itself: m <- clip(m + step_size * g / max |g|, 0, 1).

        From masks float32 (P, H, W) in [0, 1]; `step_size` in (0, 1]. Yields the soft masks after each step.
        """
        _check_masks(masks, self.size)
        mask = self._like_probs(masks)
        for _ in range(steps):
            mask.requires_grad_()
            (gradient,) = torch.autograd.grad(self.network.mask_quality(mask, self.probs).score.sum(), mask)
            largest = gradient.abs().amax(dim=(1, 2, 3), keepdim=True).clamp_min(torch.finfo(mask.dtype).tiny)
            mask = (mask.detach() + step_size * gradient / largest).clamp(0, 1)
            yield mask[:, 0].cpu().numpy()


class ForegroundMaps:
    """The maps of a reward network: from memory, else from disk, else computed.

    Maps are rounded to float16 (6 bytes per pixel with three members), whether they are computed or read, so a resumed
    run gets the same numbers. The error of a map is at most 2**-11 of its value; that of a score was below 5e-5. The
    maps used last stay in memory, within `memory_bytes`; the files in `folder` (None: no files) within `disk_bytes`.
    Several processes may share a folder; a damaged file is computed again, with a warning.
    """

    def __init__(
        self,
        network: MaskQualityModel,
        folder: Path | None = None,
        memory_bytes: int = MEMORY_BYTES,
        disk_bytes: int = DISK_BYTES,
    ) -> None:
        self.network, self.folder = network, folder
        self.memory_bytes, self.disk_bytes = memory_bytes, disk_bytes
        self.entries: OrderedDict[str, np.ndarray] = OrderedDict()
        self.reasons: dict[str, str | None] = {}  # why images are outside the domain
        self.computed = self.nbytes = 0  # passes of the U-Nets; size of the maps in memory
        files = folder.glob("[!.]*.safetensors") if folder is not None and folder.is_dir() else ()
        self.disk_used = sum(path.stat().st_size for path in files)  # unfinished files, .*, may vanish meanwhile

    @classmethod
    def beside(cls, run: Path, network: MaskQualityModel) -> "ForegroundMaps":
        """The maps of a network in `foreground_maps/<fingerprint>/` beside a run folder, which all runs there share."""
        return cls(network, run.parent / FOLDER / network.fingerprint)

    def scorer(self, image: np.ndarray) -> ImageScorer:
        """The network applied to an image, uint8 (H, W, 3); a ValueError for another form, or if the disk is full."""
        return ImageScorer(self.network, image, self.probs(image), self.reasons)

    def probs(self, image: np.ndarray) -> Tensor:
        """Foreground probability by each of K members, float32 (K, 1, 1, H, W) on the network's device."""
        check_image(image)
        key = pixels_digest(image)
        if key not in self.entries:
            self.entries[key] = self._load_or_compute(key, image)
            self.nbytes += self.entries[key].nbytes
        self.entries.move_to_end(key)
        while self.nbytes > self.memory_bytes and len(self.entries) > 1:
            self.nbytes -= self.entries.popitem(last=False)[1].nbytes
        return torch.from_numpy(self.entries[key]).to(_device_of(self.network), torch.float32)

    @torch.no_grad()
    def _load_or_compute(self, key: str, image: np.ndarray) -> np.ndarray:
        """float16 (K, 1, 1, H, W), from the file if there is one."""
        path = None if self.folder is None else self.folder / f"{key}.safetensors"
        stored = {} if path is None else load_arrays(path, "its maps are computed again")
        if MAPS not in stored:
            self.computed += 1
            stored = {MAPS: self.network.foreground_probs(_tensor(self.network, image)).half().cpu().numpy()}
            if path is not None and self.disk_used < self.disk_bytes:
                save_arrays(path, stored)
                self.disk_used += stored[MAPS].nbytes
        return stored[MAPS]


@dataclass(frozen=True)
class DomainCheck:
    """How many images a training uses, how many of them the reward network cannot judge, and why the first of these."""

    images: int
    outside: int
    reason: str | None

    @property
    def sentence(self) -> str:
        """What was left out and why, for the screen."""
        return (
            f"{self.outside} of {self.images} images have no learned reward and are left out; the first: {self.reason}"
        )


def in_domain(maps: ForegroundMaps, images: Iterable[np.ndarray]) -> tuple[np.ndarray, DomainCheck]:
    """Which of N images, uint8 (H, W, 3), the reward network can judge: bool (N,), and how many it cannot."""
    reasons = [maps.scorer(image).outside for image in images]
    inside = np.array([reason is None for reason in reasons], dtype=bool)
    first = next((reason for reason in reasons if reason), None)
    return inside, DomainCheck(len(reasons), int((~inside).sum()), first)


def predict_mask_quality(network: MaskQualityModel, image: np.ndarray, masks: np.ndarray) -> dict[str, np.ndarray]:
    """The predicted quality of masks float32 (P, H, W) of one image uint8 (H, W, 3); see `ImageScorer.quality`."""
    return ImageScorer(network, image).quality(masks)


def score_masks(network: MaskQualityModel, image: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """The reward of each mask, float32 (P,) in [0, 1]; arguments and errors as `predict_mask_quality`."""
    return predict_mask_quality(network, image, masks)["score"]


def foreground_prob(network: MaskQualityModel, image: np.ndarray) -> np.ndarray:
    """Probability that each pixel of an image uint8 (H, W, 3) belongs to the object, float32 (H, W)."""
    return ImageScorer(network, image).foreground_prob


def _tensor(network: MaskQualityModel, image: np.ndarray) -> Tensor:
    """An image uint8 (H, W, 3) as float32 (1, 3, H, W) in [0, 1] on the network's device."""
    return torch.tensor(image, device=_device_of(network)).permute(2, 0, 1)[None].float() / 255


def _device_of(network: MaskQualityModel) -> torch.device:
    """The device of the network's parameters; the CPU if it has none."""
    parameter = next(network.parameters(), None) if isinstance(network, torch.nn.Module) else None
    return torch.device("cpu") if parameter is None else parameter.device


def check_image(image: np.ndarray) -> None:
    """Raise a ValueError for an image that is not uint8 (H, W, 3)."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
        raise ValueError(f"image must be uint8 (H, W, 3), got {image.dtype} {image.shape}")


def _check_masks(masks: np.ndarray, size: tuple[int, ...]) -> None:
    if masks.ndim != 3 or masks.shape[1:] != size or not np.issubdtype(masks.dtype, np.floating):
        raise ValueError(f"masks must be float (P, H, W) of {size}, got {masks.dtype} {masks.shape}")
    if masks.size and not (masks.min() >= 0 and masks.max() <= 1):  # also refuses NaN
        raise ValueError(f"masks must be probabilities in [0, 1], got [{masks.min()}, {masks.max()}]; apply a sigmoid")
