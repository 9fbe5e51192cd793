"""The foreground probability maps of a frozen reward network, computed once per image and shared by all its users.

The U-Nets of a reward network see the image alone, and the quality of any mask follows from their maps in closed form.
So rewards, pathwise gradient, validation and evaluation need one pass for each image, not one for each mask or epoch.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rl_reward_network.artefacts import load_arrays, pixels_digest, save_arrays
from rl_reward_network.rewards.learned import ImageScorer, MaskQualityModel, check_image, device_of, image_tensor

FOLDER = "foreground_maps"  # beside the run folders, with one folder for each network
MEMORY_BYTES = 2 * 2**30  # of maps in main memory
DISK_BYTES = 4 * 2**30  # of files of one network; further maps are kept in memory only
MAPS = "foreground_probs"  # name in a file


class SavedNetwork(MaskQualityModel, Protocol):
    """A reward network whose maps can be kept on disk."""

    @property
    def fingerprint(self) -> str:
        """A hash of everything that the maps depend on."""


class ForegroundMaps:
    """The maps of a reward network: from memory, else from disk, else computed.

    Maps are rounded to float16 (6 bytes per pixel with three members), whether they are computed or read, so a resumed
    run gets the same numbers. The error of a map is at most 2**-11 of its value; that of a score was below 5e-5. The
    maps used last stay in memory. Files are written atomically, so several processes may share a folder; a damaged file
    is computed again, with a warning.

    Args:
        network: a RewardNetwork, or any object with its interface; frozen.
        folder: of this network's files, made with the first one; None keeps maps in memory only.
        memory_bytes: limit of the maps in memory; the maps used last are always kept.
        disk_bytes: limit of the files in `folder`.

    Attributes:
        computed: number of passes of the U-Nets.
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
        self.computed = self.nbytes = 0
        files = folder.glob("[!.]*.safetensors") if folder is not None and folder.is_dir() else ()
        self.disk_used = sum(path.stat().st_size for path in files)  # unfinished files, .*, may vanish meanwhile

    @classmethod
    def beside(cls, run: Path, network: SavedNetwork) -> "ForegroundMaps":
        """The maps of a network in `foreground_maps/<fingerprint>/` beside a run folder, which all runs there share."""
        return cls(network, run.parent / FOLDER / network.fingerprint)

    def scorer(self, image: np.ndarray) -> ImageScorer:
        """The network applied to an image, uint8 (H, W, 3).

        Raises:
            ValueError: another dtype or shape, or the disk is full.
        """
        return ImageScorer(self.network, image, self.probs(image))

    def probs(self, image: np.ndarray) -> Tensor:
        """Foreground probability by each of K members, float32 (K, 1, 1, H, W) on the network's device."""
        check_image(image)
        key = pixels_digest(image)
        if key in self.entries:
            self.entries.move_to_end(key)
        else:
            self._keep(key, self._load_or_compute(key, image))
        return torch.from_numpy(self.entries[key]).to(device_of(self.network), torch.float32)

    def _keep(self, key: str, maps: np.ndarray) -> None:
        """Put maps into memory, and drop those used longest ago beyond the limit."""
        self.entries[key] = maps
        self.nbytes += maps.nbytes
        while self.nbytes > self.memory_bytes and len(self.entries) > 1:
            self.nbytes -= self.entries.popitem(last=False)[1].nbytes

    def _load_or_compute(self, key: str, image: np.ndarray) -> np.ndarray:
        """float16 (K, 1, 1, H, W), from the file if there is one."""
        path = None if self.folder is None else self.folder / f"{key}.safetensors"
        stored = {} if path is None else load_arrays(path, "its maps are computed again")
        if MAPS not in stored:
            stored = {MAPS: self._compute(image)}
            if path is not None and self.disk_used < self.disk_bytes:
                save_arrays(path, stored)
                self.disk_used += stored[MAPS].nbytes
        return stored[MAPS]

    @torch.no_grad()
    def _compute(self, image: np.ndarray) -> np.ndarray:
        self.computed += 1
        return self.network.foreground_probs(image_tensor(self.network, image)).half().cpu().numpy()
