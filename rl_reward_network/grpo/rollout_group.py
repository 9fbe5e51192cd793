"""The rollouts of one prompt with the inputs of the loss, and the policy's outputs for them.

Written by `rollouts/`, read by `loss/`; neither package imports the other.
Axes: G completions or masks of one prompt, T tokens, A numbers of a mask action, D parameters of a mask policy.
"""

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from rl_reward_network.grpo.image_features import ImageFeatures


@dataclass
class GroupOutput:
    """The policy's outputs for a group.

    Args:
        log_probs, entropies: float32 (G, T), 0 behind the end of each completion; None without loop 1, and entropies
            also where no gradient is computed, as of the reference.
        parameters: float32 (D,) of the mask policy; None without loop 2.
        mask_logits: float32 (h, w) of the mean action; None unless requested.
        answer_log_probs: float32 (T,), of the answer's tokens of loop 2, `[SEG]` included; None without loop 2.
    """

    log_probs: Tensor | None = None
    entropies: Tensor | None = None
    parameters: Tensor | None = None
    mask_logits: Tensor | None = None
    answer_log_probs: Tensor | None = None

    def detached(self) -> "GroupOutput":
        """The same tensors without gradients."""
        parts = (self.log_probs, self.entropies, self.parameters, self.mask_logits, self.answer_log_probs)
        return GroupOutput(*(None if part is None else part.detach() for part in parts))

    def differentiable(self, samples_masks: bool, answers: bool = True) -> list[Tensor]:
        """The tensors that a loss depends on.

        Args:
            samples_masks: masks are sampled, so that a loss depends on the parameters of their policy.
            answers: the answers' text has a weight.
        """
        parameters, text = self.parameters if samples_masks else None, self.answer_log_probs if answers else None
        parts = (self.log_probs, parameters, self.mask_logits, text)
        return [part for part in parts if part is not None]


@dataclass
class RolloutGroup:
    """All rollouts of one prompt, in both loops.

    Args:
        image_id: digest of the image's pixels; groups of one image share its prefix.
        features: of the image.
        prefix_ids: token ids up to and including the end of the image.
        describe_ids: the question of loop 1, after the prefix; empty if the group takes no part in that loop.
        region_cells: bool (1, g, g), the region that the question of loop 1 refers to.
        drawn, drawn_prefix_ids: in place of it, the image with the region drawn into it: features and token ids up to
            its end, in place of `features` and `prefix_ids` in loop 1.
        completion_ids: G lists of token ids, the stop token included.
        counted: bool (G,), completions that enter the loss (not truncated).
        caption_advantages: float32 (G,).
        segment_ids: question and answer of loop 2, up to and including `[SEG]`; empty if neither masks nor answers are
            trained. The answer is the model's, or without `[SEG]` in that the reference answer.
        answer_length: tokens of that answer.
        actions: (G, A) of the mask policy; None if no mask was sampled.
        action_width: scalar, width of the mask policy when the actions were sampled.
        mask_advantages: float32 (G,).
        old_output: of the policy that sampled the group; None makes the importance ratio exactly 1.
        ref_output: of the reference model; needed where a KL has a weight.
        image: uint8 (H, W, 3), and truth: bool (H, W) or None; for losses on the mask itself.
    """

    image_id: str
    features: ImageFeatures
    prefix_ids: list[int]
    describe_ids: list[int] = field(default_factory=list)
    region_cells: Tensor | None = None
    drawn: ImageFeatures | None = None
    drawn_prefix_ids: list[int] = field(default_factory=list)
    completion_ids: list[list[int]] = field(default_factory=list)
    counted: Tensor | None = None
    caption_advantages: Tensor | None = None
    segment_ids: list[int] = field(default_factory=list)
    answer_length: int = 0
    actions: Tensor | None = None
    action_width: Tensor | None = None
    mask_advantages: Tensor | None = None
    old_output: GroupOutput | None = None
    ref_output: GroupOutput | None = None
    image: np.ndarray | None = None
    truth: np.ndarray | None = None
