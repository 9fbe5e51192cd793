"""Features of images from the frozen encoders, computed once and cached: vision tower and SAM 2 image encoder."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device

from rl_reward_network.artefacts import pixels_digest
from rl_reward_network.models.sa2va.generation_sa2va import evaluating
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features
from rl_reward_network.models.sa2va.pixels_sa2va import draw_region
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor

GIBIBYTE = 2**30
Encode = Callable[[Any, Sa2VAProcessor, np.ndarray], "ImageFeatures"]


@dataclass(frozen=True)
class ImageFeatures:
    """Features of one image, before any part that is trained.

    Args:
        vision: of the body's `get_vision_features`; (tiles, patches, V), input of `mlp1`, in an InternVL.
        sam: SAM 2's feature maps, input of conv_s0 / conv_s1, batch axis 1; none for a drawn region, which is described
            and never segmented.
    """

    vision: Any
    sam: Sam2Features

    def to(self, device: torch.device | str) -> "ImageFeatures":
        """The same features on another device."""
        maps = tuple(level.to(device) for level in self.sam.maps)
        return ImageFeatures(self.vision.to(device), Sam2Features(maps))  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(self.vision.nbytes + sum(level.nbytes for level in self.sam.maps))


class FeatureCache:
    """Least-recently-used cache of image features, in main memory, by the digest of the decoded pixels.

    Names and bytes of files do not tell images apart: uncompressed files of one size may share both of their ends.

    Args:
        model: Sa2VA with frozen encoders.
        processor: of the model.
        limit_gib: size limit in GiB.
    """

    def __init__(self, model: Any, processor: Sa2VAProcessor, limit_gib: float = 4.0) -> None:
        self.model, self.processor, self.limit = model, processor, int(limit_gib * GIBIBYTE)
        self.entries: OrderedDict[str, ImageFeatures] = OrderedDict()
        self.hits = self.misses = self.nbytes = 0

    def get(self, images: Sequence[np.ndarray]) -> tuple[list[str], dict[str, ImageFeatures]]:
        """The digest of each image, uint8 (H, W, 3), and digest -> features on the model's device."""
        digests = [pixels_digest(image) for image in images]
        different = dict(zip(digests, images, strict=True))
        return digests, {digest: self._get_one(digest, image) for digest, image in different.items()}

    def get_region(self, image: np.ndarray, region: np.ndarray, repeated: bool) -> ImageFeatures:
        """Features of an image, uint8 (H, W, 3), with the region, bool (H, W), drawn into it.

        Args:
            image, region: see `draw_region`.
            repeated: the region will be asked for again, as a true one is; others are not kept.
        """
        drawn = draw_region(image, region, self.processor.region_prompt)
        if not repeated:
            return encode_region(self.model, self.processor, drawn)
        return self._get_one(pixels_digest(drawn, "region"), drawn, encode_region)

    def clear(self) -> None:
        """Drop all features; the counts of hits and misses stay."""
        self.entries.clear()
        self.nbytes = 0

    def _get_one(self, key: str, image: np.ndarray, encode: Encode | None = None) -> ImageFeatures:
        if key in self.entries:
            self.hits += 1
            self.entries.move_to_end(key)
            return self.entries[key].to(self.model.device)
        self.misses += 1
        features = (encode or encode_image)(self.model, self.processor, image)
        self.entries[key] = features.to("cpu")
        self.nbytes += features.nbytes
        while self.nbytes > self.limit and len(self.entries) > 1:
            self.nbytes -= self.entries.popitem(last=False)[1].nbytes
        return features


@torch.no_grad()
def encode_image(model: Any, processor: Sa2VAProcessor, image: np.ndarray) -> ImageFeatures:
    """Output of both encoders for one uint8 (H, W, 3) image."""
    with evaluating(model):
        sam_pixels = processor.sam_pixel_values(image).to(model.device)
        return ImageFeatures(vision_features(model, processor, image), model.get_sam_features(sam_pixels))


def encode_region(model: Any, processor: Sa2VAProcessor, image: np.ndarray) -> ImageFeatures:
    """Output of the vision tower alone for one uint8 (H, W, 3) image with a region drawn into it."""
    with evaluating(model):
        return ImageFeatures(vision_features(model, processor, image), Sam2Features(()))  # type: ignore[arg-type]


@torch.no_grad()
def vision_features(model: Any, processor: Sa2VAProcessor, image: np.ndarray) -> Any:
    """Output of the vision tower for one uint8 (H, W, 3) image."""
    pixels, _ = processor.vision_inputs([image])
    return model.model.get_vision_features(**send_to_device(pixels, model.device))
