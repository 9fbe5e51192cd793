"""The side network: a small U-Net beside SAM 2 that sees the image at a finer resolution than SAM 2's decoder.

SAM 2's masks have a quarter of the resolution of its input, and its frozen encoder may never have seen objects as thin
as the user's. The side network reads the image itself, joins SAM 2's coarsest map at its bottom, and gives two things
for each pixel: a vector, whose product with a mask's weights is added to the mask's logits, and a gate, which scales
SAM 2's own logits. The weights come from the `[SEG]` embedding, through SAM 2's decoder and its hypernetwork or by a
layer of its own, so `[SEG]` still decides what is segmented, and all prompts of an image share one pass.

    logits = (1 + gate) * upsampled(SAM 2's logits) + weights @ vectors

The last layer starts at 0: the first masks are SAM 2's, bilinearly upsampled. Without the gate SAM 2's large wrong
logits would have to be cancelled pixel by pixel (docs/log.md). GroupNorm in place of BatchNorm: a mask must not depend
on the other images of its batch, or on whether the model trains.
"""

from contextlib import nullcontext
from dataclasses import dataclass, fields
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_reward_network.models.weights import mixed_precision

NORM_GROUPS = 8


@dataclass(frozen=True)
class SideNetworkConfig:
    """Sizes of a side network; `Sa2VAConfig.side_network` holds them as a dictionary."""

    pixels: int = 512
    """P: side of the square that the image is squashed to; masks have this resolution."""
    channels: tuple[int, ...] = (24, 48, 96, 128, 128)
    """Channels of each level, multiples of 8; each further level has half the size of the previous one."""
    packing: int = 4
    """Pixels along each axis that the first level packs into channels."""
    features: bool = True
    """Whether SAM 2's coarsest map joins at the bottom."""
    candidate: int | None = None
    """Which of SAM 2's masks, 1 to 3, is refined; None: that with the highest predicted IoU, which differs by image, so
    that each learns from a part of the images."""
    from_seg: bool = False
    """Whether a mask's weights are a norm and a linear layer of its `[SEG]`: names are learned sooner than through
    SAM 2's decoder (docs/log.md)."""

    @property
    def stride(self) -> int:
        """Pixels of the image per cell of the coarsest level."""
        return int(self.packing * 2 ** (len(self.channels) - 1))

    def __post_init__(self) -> None:
        if not self.channels or self.packing < 1 or any(width < 1 or width % NORM_GROUPS for width in self.channels):
            raise ValueError(
                f"side_network: channels are {self.channels} and packing is {self.packing}, expected multiples of "
                f"{NORM_GROUPS}, and 1 or more"
            )
        if self.candidate not in (None, 1, 2, 3):
            raise ValueError(f"side_network: candidate is {self.candidate}, expected 1, 2, 3 or null")
        if self.pixels < 1 or self.pixels % self.stride:
            raise ValueError(
                f"side_network: pixels is {self.pixels}, expected a multiple of {self.stride}; {self.stride * 16} fits"
            )


def side_network_config(values: dict[str, object], where: str = "config.json") -> SideNetworkConfig:
    """The sizes of a dictionary of `where`; a ValueError for an unknown field, or sizes that do not fit."""
    if unknown := values.keys() - {field.name for field in fields(SideNetworkConfig)}:
        raise ValueError(f"{where}: side_network has unknown fields {sorted(unknown)}; this version cannot build it")
    channels = values.get("channels", SideNetworkConfig.channels)
    return SideNetworkConfig(**{**values, "channels": tuple(channels)})  # type: ignore[arg-type]


class SideNetwork(nn.Module):
    """See the description of this file; weights are made from torch's global seed, those of the last layer are 0.

    While `coarse`, it sees images in half the resolution in training, and its masks have that, too.
    """

    coarse = False

    def __init__(self, config: SideNetworkConfig, sam_width: int) -> None:
        super().__init__()
        self.config, channels = config, config.channels
        inputs = (3 * config.packing**2, *channels)
        self.down = nn.ModuleList(_block(i, o) for i, o in zip(inputs, channels, strict=False))
        if config.features:
            self.join = nn.Sequential(nn.Conv2d(sam_width, channels[-1], 1), nn.GroupNorm(NORM_GROUPS, channels[-1]))
        pairs = list(pairwise(channels))[::-1]  # (finer, coarser), from the coarsest up
        self.up = nn.ModuleList(_block(finer + coarser, finer) for finer, coarser in pairs)
        self.head = nn.Conv2d(channels[0], (sam_width // 8 + 1) * config.packing**2, 1)
        of_seg = (nn.LayerNorm(sam_width), nn.Linear(sam_width, sam_width // 8))
        self.of_seg = nn.Sequential(*of_seg) if config.from_seg else None
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)  # type: ignore[arg-type]

    def forward(self, image: Tensor, coarse: Tensor) -> Tensor:
        """What the masks of B images are made of, (B, channels of the first level, P / packing, P / packing).

        From RGB, uint8 (B, 3, P, P), and SAM 2's coarsest map (B, C, S/16, S/16); in training in bfloat16 where the
        hardware has it.
        """
        if self.training and self.coarse:
            image = F.avg_pool2d(image.float(), 2)
        with mixed_precision(image.device) if self.training else nullcontext():
            return self._features(image, coarse)

    def _features(self, image: Tensor, coarse: Tensor) -> Tensor:
        pixels = image.to(self.head.weight.dtype) / 255
        levels = [self.down[0](F.pixel_unshuffle(pixels * 4 - 2, self.config.packing))]
        for block in self.down[1:]:
            levels.append(block(F.avg_pool2d(levels[-1], 2)))
        x = levels.pop()
        if self.config.features:
            x = x + self.join(F.interpolate(coarse.to(pixels.dtype), size=x.shape[-2:], mode="bilinear"))
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), levels.pop()], dim=1))
        return x

    def refine(self, x: Tensor, mask_logits: Tensor, weights: Tensor, seg_embeddings: Tensor) -> Tensor:
        """Refined logits float32 (N, P, P) of the masks of one image, P pixels of `forward`'s image a side.

        From `forward`'s output, without batch axis, SAM 2's logits (N, h, w), the hypernetworks' weights (N, C/8), and
        the `[SEG]` embeddings (N, C), which the weights come from with `from_seg`.
        """
        if self.of_seg is not None:
            weights = self.of_seg(seg_embeddings.to(self.head.weight.dtype))
        size = [side * self.config.packing for side in x.shape[-2:]]
        upsampled = F.interpolate(mask_logits[:, None], size=size, mode="bilinear")[:, 0]
        x, weights = x.to(self.head.weight.dtype), weights.to(self.head.weight.dtype)
        # The last layer is linear: contracting its weights first spares maps of C/8 channels at full resolution.
        rows = F.pad(weights, (0, 1, 0, 1))  # of the vectors for each mask, and of the gate, the last channel
        rows[-1, -1] = 1
        channels = rows.shape[1]
        kernel = (rows @ self.head.weight.view(channels, -1)).view(len(rows), -1, len(x))
        bias = rows @ self.head.bias.view(channels, -1)  # type: ignore[union-attr]
        packed = torch.einsum("npd,dhw->nphw", kernel, x) + bias[..., None, None]
        logits = F.pixel_shuffle(packed, self.config.packing)[:, 0].float()
        return upsampled * (1 + logits[-1:]) + logits[:-1]


def _block(inputs: int, outputs: int) -> nn.Sequential:
    """Two layers of 3x3 convolution, GroupNorm and SiLU."""
    return nn.Sequential(
        *(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(NORM_GROUPS, outputs), nn.SiLU()),
        *(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(NORM_GROUPS, outputs), nn.SiLU()),
    )
