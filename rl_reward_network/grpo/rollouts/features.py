"""What the frozen encoders make of an image, computed once and kept: the vision tower's output and SAM 2's maps."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_reward_network.models.sa2va.generation_sa2va import evaluating
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor

GIBIBYTE = 2**30


@dataclass(frozen=True)
class ImageFeatures:
    """Features of one image, before every part that trains.

    Args:
        vision: (tiles, patches, V), before `mlp1`.
        sam: SAM 2's maps before conv_s0 / conv_s1, batch axis 1.
    """

    vision: Tensor
    sam: Sam2Features

    def to(self, device: torch.device | str) -> "ImageFeatures":
        """The same on another device."""
        fine, middle, coarse = (level.to(device) for level in self.sam.maps)
        return ImageFeatures(self.vision.to(device), Sam2Features((fine, middle, coarse)))

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(tensor.nbytes for tensor in (self.vision, *self.sam.maps))


class FeatureCache:
    """The features of the images seen last, in main memory.

    Args:
        model: a frozen-encoder Sa2VA.
        processor: its processor.
        limit_gib: memory for features; the images seen longest ago are let go.
    """

    def __init__(self, model: Any, processor: Sa2VAProcessor, limit_gib: float = 4.0) -> None:
        self.model, self.processor, self.limit = model, processor, int(limit_gib * GIBIBYTE)
        self.kept: OrderedDict[str, ImageFeatures] = OrderedDict()
        self.hits = self.misses = self.nbytes = 0

    def get(self, image_ids: Sequence[str], images: Sequence[np.ndarray]) -> list[ImageFeatures]:
        """Features on the model's device, of uint8 (H, W, 3) images named by `image_ids`."""
        return [self._one(name, image) for name, image in zip(image_ids, images, strict=True)]

    def _one(self, name: str, image: np.ndarray) -> ImageFeatures:
        if name in self.kept:
            self.hits += 1
            self.kept.move_to_end(name)
            return self.kept[name].to(self.model.device)
        self.misses += 1
        features = encode_image(self.model, self.processor, image)
        self.kept[name] = features.to("cpu")
        self.nbytes += features.nbytes
        while self.nbytes > self.limit and len(self.kept) > 1:
            self.nbytes -= self.kept.popitem(last=False)[1].nbytes
        return features


@torch.no_grad()
def encode_image(model: Any, processor: Sa2VAProcessor, image: np.ndarray) -> ImageFeatures:
    """Both encoders on one uint8 (H, W, 3) image."""
    with evaluating(model):
        pixels = processor.pixel_values(processor.tiles(image)).to(model.device)
        sam_pixels = processor.sam_pixel_values(image).to(model.device)
        return ImageFeatures(model.model.get_vision_features(pixels), model.get_sam_features(sam_pixels))
