"""Losses on the mask of the mean action, which reach the mask decoder: the reward network's score, supervision."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_reward_network.grpo.config import Sa2VAGRPOConfig
from rl_reward_network.grpo.loss.objective import Pairs, StepCounts
from rl_reward_network.grpo.rollout_group import RolloutGroup
from rl_reward_network.models.sa2va.grounding_sa2va import mask_losses
from rl_reward_network.models.sa2va.pixels_sa2va import upsample_mask_logits
from rl_reward_network.rewards.foreground_maps import ForegroundMaps

GroupMasks = Sequence[tuple[RolloutGroup, Tensor]]  # with logits (h, w)
FINER = 2  # the grid of mask losses over the decoder's; SAM 2's square (4) is no better (docs/log.md)


class PathwiseReward:
    """The score of a reward network, differentiable in soft masks.

    Args:
        maps: of the frozen reward network.
        sam_image_size: side of SAM 2's square input, in pixels.
    """

    def __init__(self, maps: ForegroundMaps, sam_image_size: int) -> None:
        self.maps, self.side = maps, sam_image_size

    def scores(self, masks: GroupMasks) -> Tensor:
        """float32 (N,): scores of the soft masks of N groups, in [0, 1] up to the ensemble's penalty for its spread."""
        return torch.stack([self._score(group, logits) for group, logits in masks])

    def _score(self, group: RolloutGroup, logits: Tensor) -> Tensor:
        assert group.image is not None
        mask = upsample_mask_logits(logits[None], group.image.shape[:2], self.side).sigmoid()[None]
        score: Tensor = self.maps.network.mask_quality(mask, self.maps.probs(group.image).to(mask.device)).score
        return score.mean()


def direct_mask_loss(
    pairs: Pairs, config: Sa2VAGRPOConfig, counts: StepCounts, pathwise: PathwiseReward | None
) -> tuple[Tensor, dict[str, float]]:
    """Sum of the weighted losses on the masks of the mean actions, and the values to log by tag; 0 without masks."""
    total, values = torch.zeros((), device=config.device), {}
    masks = [(group, output.mask_logits) for group, output in pairs if output.mask_logits is not None]
    labelled = [(group, logits) for group, logits in masks if group.truth is not None]
    if labelled and config.objective == "supervised" and config.caption_to_mask_weight:
        losses = supervised_mask_losses(labelled, config.bce_weight, config.dice_weight)
        values["loss/mask"] = float(losses.detach().mean())
        total = total + config.supervised_mask_weight * losses.sum() / counts.true_masks
    if masks and config.pathwise_weight and pathwise is not None:
        scores = pathwise.scores(masks)
        values["loop2/pathwise_score"] = float(scores.detach().mean())
        total = total - config.pathwise_weight * scores.sum() / counts.masks
    return total, values


def supervised_mask_losses(masks: GroupMasks, bce_weight: float, dice_weight: float) -> Tensor:
    """float32 (N,): weighted sum of cross-entropy and Dice loss, for N groups with a true mask.

    Raises:
        ValueError: no group has a true mask.
    """
    labelled = [(group.truth, logits) for group, logits in masks if group.truth is not None]
    if not labelled:
        raise ValueError("supervised training needs true masks, and no prompt of this batch has one")
    losses = []
    for truth, logits in labelled:  # images differ in size
        size = [FINER * side for side in logits.shape]
        finer = F.interpolate(logits[None, None], size=size, mode="bilinear")[0]
        losses.append(sum(mask_losses(finer, torch.from_numpy(truth)[None], bce_weight, dice_weight).values()))
    return torch.stack([torch.as_tensor(loss) for loss in losses])
