"""The plan of a GRPO run: hyperparameters, LoRA, reward weights, judge; without torch."""

from dataclasses import dataclass, field
from typing import Any

from rl_reward_network.grpo.settings import GRPOSettings


@dataclass(frozen=True)
class RewardWeights:
    """Weight of each reward term; a term of weight 0 is logged where it can be computed.

    Args:
        iou, caption: of loop 1: IoU of mask' with the region; the caption reward of the sampled caption.
        loop2_caption, loop2_iou: of loop 2: the caption reward of caption'; IoU of the sampled mask with the true one.
        learned: of loop 2: the reward network's score of the sampled mask.
        confidence: of loop 2: how clear the sampled mask's edges are.
    """

    iou: float = 1.0
    caption: float = 1.0
    loop2_caption: float = 1.0
    loop2_iou: float = 1.0
    learned: float = 0.0
    confidence: float = 0.0


@dataclass(frozen=True)
class GRPOPlan:
    """The settings of a GRPO run besides its inputs.

    Args:
        mode: quick or full.
        weights: of the rewards.
        lora_r, lora_alpha, lora_dropout: of LoRA; dropout must be 0.
        settings: hyperparameters; None is the Trainer's default.
        judge: the LLM judge of captions: base_url, model, loops ("loop1", "loop2"), no key; None without a judge.
        reward_net: fingerprint of the reward network; None without one.
        shuffle_rewards: the control: the rewards of each step are permuted at random.
        watch_every: optimisation steps between validations; 0 never validates.
        mask_rewards: loop -> name in `rewards.table.MASK_REWARDS` -> weight, beside those of `weights`; None without.
        freeze_embeddings: True leaves the token embeddings and the head of a Qwen-VL as they are; None trains them.
        max_labelled: most prompts with a true mask that supervised training uses; None uses all.
    """

    mode: str
    weights: RewardWeights = field(default_factory=RewardWeights)
    lora_r: int = 128
    lora_alpha: int = 256
    lora_dropout: float = 0.0
    settings: GRPOSettings = field(default_factory=GRPOSettings)
    judge: dict[str, Any] | None = None
    reward_net: str | None = None
    shuffle_rewards: bool = False
    watch_every: int = 0
    mask_rewards: dict[str, dict[str, float]] | None = None
    max_labelled: int | None = None
    freeze_embeddings: bool | None = None
