"""Flags of sa2va-rl grpo: how GRPO trains, and what it pays."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from rl_reward_network.grpo.loss.losses import Level, LossType
from rl_reward_network.grpo.loss.mask_policies import MaskPolicyName
from rl_reward_network.rewards.combine import Aggregation, Scale
from rl_reward_network.rewards.judge.config import JudgeConfig
from rl_reward_network.rewards.table import WeightedName


@dataclass(frozen=True)
class GRPOArgs:
    """Settings of GRPO; names are TRL's, with the original specification's beside them."""

    batch_size: Annotated[
        int | None, tyro.conf.arg(aliases=["--per-device-batch-size", "--per-device-train-batch-size"])
    ] = None
    """Captions, not regions, per process and forward pass, a multiple of num_generations: 64 on the embedded model,
    else 8."""
    num_generations: int = 4
    """Captions per region; the reward is compared among them."""
    num_mask_generations: int = 8
    """Masks per phrase; they share one language-model pass."""
    gradient_accumulation_steps: int = 1
    """Forward passes per optimisation step."""
    learning_rate: float | None = None
    """Of AdamW, falling to 0 in the end: 1e-3 on the embedded model, else 1e-5."""
    warmup_steps: int = 5
    """Optimisation steps in which the learning rate rises."""
    max_grad_norm: float = 1.0
    """Longest gradient; a longer one is scaled down to it."""
    num_epochs: Annotated[float | None, tyro.conf.arg(aliases=["--num-train-epochs"])] = None
    """Passes over the training regions: quick 1, full 3; on the embedded model max_steps counts instead."""
    max_steps: int | None = None
    """Optimisation steps, in place of num_epochs: quick 140, full 400 on the embedded model."""
    max_minutes: float | None = None
    """Stop after so many minutes of training; the result then depends on the machine's speed."""
    kl_coef: Annotated[float, tyro.conf.arg(aliases=["--beta"])] = 0.04
    """Weight of the KL to the model as it was."""
    clip_range: Annotated[float, tyro.conf.arg(aliases=["--epsilon"])] = 0.2
    """Clip of the ratio of new to old probability of words (loop 1); loop 2 has its own, 0.001."""
    epsilon_high: float | None = None
    """Upper clip, if another."""
    num_iterations: int = 1
    """Optimisation steps on the same rollouts."""
    mask_to_caption_weight: float = 1.0
    """Weight of loop 1; 0 leaves it out."""
    caption_to_mask_weight: float = 1.0
    """Weight of loop 2; 0 leaves it out."""
    loss_type: LossType = "dapo"
    """How token losses are averaged."""
    importance_sampling_level: Level = "token"
    """Whether each token or the whole caption has a ratio."""
    scale_rewards: Scale = "group"
    """What centred rewards are divided by: the deviation of the group, of the batch (all groups of one process and
    forward pass), or nothing."""
    multi_objective_aggregation: Aggregation = "normalize_then_sum"
    """Scale each reward by itself and then add, so that METEOR is heard beside IoU, or add first."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, of words (loop 1): masks of loop 2 have their spread steered by itself."""
    temperature: float = 1.0
    """Of sampling."""
    max_completion_length: int | None = None
    """Tokens of a caption: 24 on the embedded model, else 128."""
    mask_policy: MaskPolicyName | None = None
    """What loop 2 samples: gaussian, noise on the [SEG] embedding; bernoulli, cells of a 16 x 16 grid, which trains the
    mask decoder, too, but is coarse; candidates, SAM 2's, which must differ (those of the embedded model do not: it
    forgets how to draw). By default gaussian, on regions with the embedded model bernoulli (docs/log.md)."""
    ema_decay: float = 0.999
    """Decay of the partner, which is a moving average of the model."""
    no_ema: bool = False
    """The partner is the model itself."""
    lora_r: int | None = None
    """Rank of LoRA: 16 on the embedded model, else 128."""
    lora_alpha: int | None = None
    """Scale of LoRA: twice the rank."""
    lora_dropout: float = 0.0
    """Must be 0: with dropout log-probabilities differ by chance."""
    curriculum: bool = False
    """Draw regions whose captions or masks are paid differently more often, and easy ones before hard ones."""
    adaptive_loop_weights: bool = False
    """Let the weights of the two loops follow the size of their gradients, measured every tenth step."""
    gradient_checkpointing: bool = False
    """Compute activations twice, to save memory."""
    save_steps: int = 50
    """Steps between checkpoints."""
    watch_every: int | None = None
    """Steps between looks at validation items: quick 35, full 100; 0 never looks. With --reward_net also the stop: the
    score rises while Dice has fallen by more than 0.02 from its peak in three looks."""
    deepspeed: Path | None = None
    """A DeepSpeed configuration; scripts/deepspeed_zero2.json is one. No checkpoint to go on from is written then.
    Tried in float32 on CPUs only: what it does to the float32 weights of a bfloat16 model on a GPU is not known."""


@dataclass(frozen=True)
class RewardArgs:
    """What is paid."""

    iou_weight: float = 1.0
    """Loop 1: IoU of the mask drawn from the caption with the region."""
    caption_weight: float | None = None
    """Loop 1: the caption against its reference: METEOR, or 0.25 METEOR + 0.75 judge with --use_llm_judge. 1, or 0
    without captions; at 0 captions drift into words that only the partner understands (docs/log.md)."""
    loop2_caption_weight: float | None = None
    """Loop 2: the caption of the sampled mask against the reference: 1, or 0 without captions or with --reward_net."""
    loop2_iou_weight: float | None = None
    """Loop 2: IoU of the sampled mask with the true one: 1, or 0 with --reward_net, which needs no labels."""
    mask_rewards: dict[WeightedName, float] | None = None
    """Loop 1: more rewards of the mask drawn from the caption, as names and weights, such as: cldice 0.5."""
    loop2_mask_rewards: dict[WeightedName, float] | None = None
    """Loop 2: more rewards of the sampled mask, as --mask_rewards."""
    learned_weight: float | None = None
    """Loop 2: the reward network's score of the sampled mask: 1 with --reward_net, else 0."""
    confidence_weight: float = 0.0
    """Loop 2: how clear the edges of the sampled mask are."""
    pathwise_weight: float | None = None
    """Weight of the reward network's own gradient through the soft mask, which trains the mask decoder, too: 1 on
    annotated images with --reward_net, but for the controls; else 0 (docs/log.md compares)."""
    reward_net: Path | None = None
    """Folder of a reward network (REWARD_NET)."""
    use_llm_judge: bool = False
    """Let a language model compare captions, too (loop 1)."""
    llm_judge_base_url: str = "http://127.0.0.1:8000/v1"
    """Of an OpenAI-compatible server; the key is read from OPENAI_API_KEY."""
    llm_judge_model: str | None = None
    """Name of the judge's model, as the server calls it; by default the only one that the server lists."""
    llm_judge_timeout: float = JudgeConfig.timeout_s
    """Seconds that one attempt to ask the judge may take."""
    llm_judge_retries: int = JudgeConfig.max_retries
    """Attempts after the first."""
    llm_judge_concurrency: int = JudgeConfig.max_concurrency
    """Most requests to the judge under way at once, of each process."""
    llm_judge_cache: Literal["off"] | Path | None = None
    """File of the judge's replies, kept for later runs: <output_dir>/llm_judge.sqlite; off keeps none on disk."""
    use_llm_judge_loop2: bool = False
    """Let the judge compare in loop 2; without --use_llm_judge in loop 2 alone."""
