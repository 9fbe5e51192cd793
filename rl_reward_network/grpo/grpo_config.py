"""Configuration of the GRPO Trainer: transformers' TrainingArguments and the hyperparameters of GRPO."""

import math
from dataclasses import dataclass, field

from transformers import TrainingArguments

from rl_reward_network.flags import check_at_least, check_range
from rl_reward_network.grpo.checkpoint import LONGEST_WAIT
from rl_reward_network.grpo.settings import (
    OF_LABELS,
    ROWS_AT_ONCE,
    SIDE_LEARNING_RATE,
    GRPOSettings,
    MaskPolicyName,
    check_settings,
)
from rl_reward_network.rewards.combine import Scale


@dataclass
class Sa2VAGRPOConfig(TrainingArguments, GRPOSettings):  # type: ignore[misc]  # None of the latter means a preset
    """Configuration of `Sa2VAGRPOTrainer`.

    The fields are those of `TrainingArguments`, with its defaults except the learning rate, those of `GRPOSettings`
    (TRL explains `epsilon_high`, `loss_type` and `importance_sampling_level`), and:

    Args:
        seg_learning_rate, decoder_learning_rate: of `text_hidden_fcs` and SAM 2's mask decoder; None is learning_rate.
        reward_floor: see `group_advantages`.
        mask_truncated_completions: captions cut off by the limit do not count.
        mask_epsilon: clip range of loop 2's ratio, whose log-probability is a mean over dimensions.
        feature_cache_gib: main memory for image features, in GiB.
        rows_at_once: most sequences decoded at once.
    """

    learning_rate: float = 1e-5
    side_learning_rate: float = SIDE_LEARNING_RATE
    encoder_learning_rate: float = 1e-6
    seg_learning_rate: float | None = None
    decoder_learning_rate: float | None = None
    mask_beta: float = 0.04
    scale_rewards: Scale = "group"
    max_completion_length: int = 64
    mask_policy: MaskPolicyName = "gaussian"
    pathwise_weight: float = 0.0
    bce_weight: float = 2.0
    dice_weight: float = 0.5
    reward_floor: float = 0.05
    mask_truncated_completions: bool = True
    mask_epsilon: float = 1e-3
    feature_cache_gib: float = 4.0
    rows_at_once: int = ROWS_AT_ONCE
    remove_unused_columns: bool = field(default=False)
    ddp_find_unused_parameters: bool | None = field(default=False)  # every step reaches every trainable tensor
    average_tokens_across_devices: bool = field(default=False)
    logging_nan_inf_filter: bool = field(default=False)
    ddp_timeout: int = field(default=int(LONGEST_WAIT.total_seconds()))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self)
        check_at_least(self, 1, "rows_at_once")
        check_range(self, "mask_epsilon", "reward_floor", above=True)

    @property
    def n_gpu(self) -> int:
        """At most 1: several GPUs are used by torchrun, never by copies of the model in a process."""
        return min(1, super().n_gpu)

    @property
    def prompts_per_step(self) -> int:
        """Prompts of one process in one forward pass."""
        return self.per_device_train_batch_size // self.num_generations

    def planned_steps(self, rollouts_per_epoch: int) -> int:
        """Optimisation steps of the whole run, unless it is stopped early."""
        epochs = math.ceil(self.num_train_epochs * rollouts_per_epoch * self.num_iterations)
        return self.max_steps if self.max_steps > 0 else epochs

    @property
    def needs_masks(self) -> bool:
        """Whether a loss depends on the mask of the mean action."""
        return bool(self.pathwise_weight or (self.objective in (*OF_LABELS, "dpo") and self.caption_to_mask_weight))

    @property
    def samples_masks(self) -> bool:
        """Whether a loss, be it the KL alone, depends on the parameters of the mask policy."""
        sampled = self.caption_to_mask_weight or (self.pathwise_weight and self.mask_beta)
        return self.objective == "grpo" and bool(sampled)
