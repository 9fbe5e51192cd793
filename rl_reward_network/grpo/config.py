"""Settings of GRPO: transformers' TrainingArguments and what GRPO adds, under TRL's names where TRL has one."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import TrainingArguments

from rl_reward_network.grpo.loss.losses import Level, LossSettings, LossType
from rl_reward_network.grpo.mask_policies import MaskPolicyName
from rl_reward_network.rewards.combine import Aggregation, Scale

Objective = Literal["grpo", "supervised"]


@dataclass
class Sa2VAGRPOConfig(TrainingArguments):
    """What a run of `Sa2VAGRPOTrainer` is asked for.

    Args:
        objective: grpo, or supervised: reference captions and masks are learned instead of rewards (the comparison).
        num_generations: captions per prompt, in a whole group on one process.
        num_mask_generations: masks per prompt; they cost little, since one language-model pass serves all.
        max_completion_length: tokens of a caption.
        temperature: of sampling.
        num_iterations: optimisation steps on the same rollouts.
        loss_type, importance_sampling_level, epsilon, epsilon_high, beta, entropy_coef: see `LossSettings`;
            epsilon_high None is epsilon.
        scale_rewards, multi_objective_aggregation, reward_floor: see `group_advantages`.
        mask_truncated_completions: captions cut off by the limit do not count.
        mask_to_caption_weight, caption_to_mask_weight: of the two loops; 0 leaves a loop out.
        mask_policy: what loop 2 samples.
        mask_epsilon: clip of loop 2's ratio, whose log-probability is a mean over dimensions.
        mask_beta: weight of loop 2's KL.
        ema_decay: of the partner; 0 uses the model itself (`--no_ema`).
        pathwise_weight: of the learned reward's gradient through the soft mask.
        supervised_mask_weight: of the mask losses of supervised training.
        curriculum: prompts whose groups have spread are drawn more often, easy ones before hard ones.
        adaptive_loop_weights: the two loops' weights follow the size of their gradients.
        feature_cache_gib: main memory for image features.
        rows_at_once: most sequences decoded at once.
        max_minutes: stop after so many minutes of training, whatever the steps; None is never.
    """

    objective: Objective = "grpo"
    num_generations: int = 4
    num_mask_generations: int = 8
    max_completion_length: int = 64
    temperature: float = 1.0
    num_iterations: int = 1
    loss_type: LossType = "dapo"
    importance_sampling_level: Level = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.04
    entropy_coef: float = 0.0
    scale_rewards: Scale = "group"
    multi_objective_aggregation: Aggregation = "normalize_then_sum"
    reward_floor: float = 0.05
    mask_truncated_completions: bool = True
    mask_to_caption_weight: float = 1.0
    caption_to_mask_weight: float = 1.0
    mask_policy: MaskPolicyName = "gaussian"
    mask_epsilon: float = 1e-3
    mask_beta: float = 0.04
    ema_decay: float = 0.999
    pathwise_weight: float = 0.0
    supervised_mask_weight: float = 1.0
    curriculum: bool = False
    adaptive_loop_weights: bool = False
    feature_cache_gib: float = 4.0
    rows_at_once: int = 128
    max_minutes: float | None = None
    remove_unused_columns: bool = field(default=False)
    ddp_find_unused_parameters: bool | None = field(default=False)  # every step reaches every trainable tensor
    average_tokens_across_devices: bool = field(default=False)
    logging_nan_inf_filter: bool = field(default=False)

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        super().__post_init__()
        check_settings(self)

    @property
    def n_gpu(self) -> int:
        """One process takes one GPU; several are used by torchrun, never by copying the model inside a process."""
        return min(1, super().n_gpu)

    @property
    def prompts_per_step(self) -> int:
        """Prompts of one process in one forward pass."""
        return self.per_device_train_batch_size // self.num_generations

    def planned_steps(self, rollouts_per_epoch: int) -> int:
        """Optimisation steps of the whole run, unless something ends it before."""
        epochs = math.ceil(self.num_train_epochs * rollouts_per_epoch * self.num_iterations)
        return self.max_steps if self.max_steps > 0 else epochs

    @property
    def loss_settings(self) -> LossSettings:
        """Of the caption loop."""
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        supervised = self.objective == "supervised"
        return LossSettings(
            self.loss_type,
            self.importance_sampling_level,
            self.epsilon,
            high,
            0.0 if supervised else self.beta,
            0.0 if supervised else self.entropy_coef,
            self.max_completion_length,
        )


def check_settings(config: Any) -> None:
    """Raise a ValueError that names the field, its value and the remedy."""
    if config.num_generations < 2:
        raise ValueError(f"num_generations is {config.num_generations}, expected 2 or more: one alone has no advantage")
    if config.num_mask_generations < 2:
        raise ValueError(f"num_mask_generations is {config.num_mask_generations}, expected 2 or more")
    if config.per_device_train_batch_size < 1 or config.per_device_train_batch_size % config.num_generations:
        raise ValueError(
            f"batch_size is {config.per_device_train_batch_size} generations, not divisible by num_generations "
            f"{config.num_generations}: whole groups stay together; give a multiple of it"
        )
    for name in ("num_iterations", "max_completion_length", "rows_at_once"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}, expected 1 or more")
    if config.objective == "supervised" and config.num_iterations > 1:
        raise ValueError(
            f"num_iterations is {config.num_iterations}, expected 1 with supervised training: it has no rollouts "
            "to use again; raise num_epochs"
        )
    if config.curriculum and config.objective == "supervised":
        raise ValueError("curriculum goes by rewards, and supervised training pays none; leave it out")
    loops = config.mask_to_caption_weight and config.caption_to_mask_weight
    if config.adaptive_loop_weights and (config.objective == "supervised" or not loops):
        raise ValueError(
            "adaptive_loop_weights weighs two loops against each other, and only one is trained; leave it out"
        )
    if config.max_steps == 0:  # -1 leaves it to the epochs
        raise ValueError("max_steps is 0, expected 1 or more")
    for name in (
        "temperature",
        "epsilon",
        "epsilon_high",
        "mask_epsilon",
        "reward_floor",
        "max_minutes",
        "num_train_epochs",
    ):
        value = getattr(config, name)
        if value is not None and not value > 0:  # NaN as well
            raise ValueError(f"{name} is {value}, expected more than 0")
    weights = ("mask_to_caption_weight", "caption_to_mask_weight", "pathwise_weight", "supervised_mask_weight")
    for name in ("learning_rate", "beta", "mask_beta", "entropy_coef", *weights):
        if not 0 <= getattr(config, name) < math.inf:
            raise ValueError(f"{name} is {getattr(config, name)}, expected 0 or more")
    if config.save_strategy == "steps" and int(config.save_steps) % config.num_iterations:
        raise ValueError(
            f"save_steps is {config.save_steps}, not a multiple of num_iterations {config.num_iterations}: a "
            "checkpoint holds no half-used rollouts"
        )
    if not (config.mask_to_caption_weight or config.caption_to_mask_weight or config.pathwise_weight):
        raise ValueError("mask_to_caption_weight and caption_to_mask_weight are both 0: nothing would be trained")
