"""Losses on the mask of the mean action, the only ones that reach the mask decoder: a reward network, supervision."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_reward_network.grpo.loss.policy import Group
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.losses_sa2va import mask_losses
from rl_reward_network.models.sa2va.pixels_sa2va import upsample_mask_logits

Shown = Sequence[tuple[Group, Tensor]]
MAPS_BYTES = 2 * 2**30  # of main memory, for what the reward network makes of images
FINER = 2  # masks are compared on a grid so many times finer than the decoder's, or thin objects have no cell


class PathwiseReward:
    """The score of a reward network, differentiable in soft masks; each image is looked at once.

    Args:
        network: frozen by this.
        sam_image_size: side of the square between the decoder's grid and the image.
    """

    def __init__(self, network: RewardNetwork, sam_image_size: int) -> None:
        self.network, self.side = network.requires_grad_(False), sam_image_size
        self.maps: OrderedDict[str, Tensor] = OrderedDict()

    def scores(self, shown: Shown) -> Tensor:
        """float32 (N,): scores of the soft masks of N logits (h, w), in [0, 1] but for the share of the spread."""
        return torch.stack([self._score(group, logits) for group, logits in shown])

    def _score(self, group: Group, logits: Tensor) -> Tensor:
        assert group.image is not None
        mask = upsample_mask_logits(logits[None], group.image.shape[:2], self.side).sigmoid()[None]
        score: Tensor = self.network.mask_quality(mask, self._maps(group.image_id, group.image).to(mask.device)).score
        return score.mean()

    @torch.no_grad()
    def _maps(self, name: str, image: np.ndarray) -> Tensor:
        if name not in self.maps:
            device = next(self.network.parameters()).device
            picture = torch.tensor(image, device=device).permute(2, 0, 1)[None].float() / 255
            self.maps[name] = self.network.foreground_probs(picture).cpu()
            while sum(maps.nbytes for maps in self.maps.values()) > MAPS_BYTES and len(self.maps) > 1:
                self.maps.popitem(last=False)
        return self.maps[name]


def supervised_mask_losses(shown: Shown) -> Tensor:
    """float32 (N,): cross-entropy and Dice of Sa2VA's own training recipe, for N groups with a true mask."""
    own = [(group.truth, logits) for group, logits in shown if group.truth is not None]
    if not own:
        raise ValueError("supervised training needs true masks, and no item of this batch has one")
    losses = []
    for truth, logits in own:  # images differ in size
        size = [FINER * side for side in logits.shape]
        finer = F.interpolate(logits[None, None], size=size, mode="bilinear")[0]
        losses.append(sum(mask_losses(finer, torch.from_numpy(truth)[None]).values()))
    return torch.stack([torch.as_tensor(loss) for loss in losses])
