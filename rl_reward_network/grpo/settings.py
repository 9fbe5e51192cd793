"""Hyperparameters of GRPO, each written once: the flags of `sa2va-rl grpo` are fields of the Trainer's configuration.

Fields have the names of transformers and TRL where these have one; flags that the original specification names are
called as there. None is the value of a preset. Neither torch nor transformers is imported: `--help` must be fast.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

import tyro

from rl_reward_network.flags import RARE, Rare, Value, changed, check_at_least, check_range
from rl_reward_network.rewards.combine import Aggregation, Scale

Objective = Literal["grpo", "supervised", "mean_teacher", "dpo"]
OF_LABELS = ("supervised", "mean_teacher")  # objectives that learn true masks, and have no rewards
Level = Literal["token", "sequence"]
MaskPolicyName = Literal["gaussian", "bernoulli"]
Mode = Literal["quick", "full"]
Optimizer = Literal["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "adafactor", "sgd"]
InPython = Annotated[Value, tyro.conf.Fixed, tyro.conf.Suppress]  # a setting that is no flag


@dataclass
class GRPOSettings:
    """Hyperparameters of GRPO; fields of `Sa2VAGRPOConfig`. A field without a description is no flag; see there."""

    per_device_train_batch_size: Annotated[
        int | None, tyro.conf.arg(name="batch-size", aliases=["--per-device-batch-size"])
    ] = None
    """Captions, not regions, per process and forward pass, a multiple of num_generations: 64 on a model of
    the embedded one's size, else 8; 8 images where masks are learned, of other models in passes of 8. Fewer than
    num_generations are one group, accumulated in fewer passes."""
    num_generations: Rare[int] = 4
    """Captions per region, one group: rewards are compared within it."""
    num_mask_generations: Rare[int] = 8
    """Masks per phrase, one group; they share one pass of the language model."""
    gradient_accumulation_steps: Rare[int] = 1
    """Forward passes per optimisation step."""
    learning_rate: float | None = None
    """Peak learning rate of AdamW, falling to 0: 1e-3 on a model of the embedded one's size, else 1e-5."""
    side_learning_rate: Rare[float | None] = None
    """Peak learning rate of a side network, with every model: 3e-3 of a new one and on true masks (objective
    supervised), else 1e-3."""
    encoder_learning_rate: InPython[float | None] = None  # of SAM 2's image encoder, if all of it trains
    optim: Rare[Optimizer | None] = None
    """Optimiser, by transformers' name; those of 8 bit keep its moments in a quarter of the memory (pip
    install -e '.[quantization]')."""
    warmup_steps: Rare[float | None] = None
    """Optimisation steps in which the learning rate rises, or below 1 their share: 5, with a side network 0.15."""
    lr_scheduler_type: InPython[str] = "linear"
    max_grad_norm: Rare[float] = 1.0
    """Largest norm of the gradient; a larger one is scaled down to it."""
    num_train_epochs: Annotated[float | None, tyro.conf.arg(name="num-epochs")] = None
    """Passes over the training regions: 1, with another objective than grpo in full 3; a model of the embedded one's
    size trains for max_steps instead."""
    max_steps: int | None = None
    """Most optimisation steps, in place of num_epochs: quick 140, full 400 on a model of the embedded one's size
    or with a side network; of a side network on true masks 200 and 700, and full ends when 3 validations in a row were
    not better."""
    max_minutes: Rare[float | None] = None
    """Stop after so many minutes of training; the result then depends on the machine's speed."""
    early_stopping_patience: InPython[int | None] = None  # validations in a row without a better one
    beta: Annotated[float, tyro.conf.arg(name="kl-coef")] = 0.04
    """Weight of the KL divergence from the initial model, whatever the weights of the loops are."""
    mask_beta: InPython[float | None] = None  # of loop 2; as beta
    epsilon: Annotated[float, tyro.conf.arg(name="clip-range"), RARE] = 0.2
    """Clip range of the probability ratio of tokens (loop 1), which is 1 until rollouts are used again: it acts from
    num_iterations 2 on. Loop 2 has mask_epsilon, 0.001."""
    epsilon_high: InPython[float | None] = None  # upper clip range, if it differs
    num_iterations: Rare[int] = 1
    """Optimisation steps on the same rollouts."""
    mask_to_caption_weight: Rare[float] = 1.0
    """Weight of loop 1's rewards, in supervised training of the loss on captions; 0 leaves the loop out."""
    caption_to_mask_weight: Rare[float] = 1.0
    """Weight of loop 2's rewards, in supervised training of the losses on masks; 0 leaves them out."""
    objective: Objective = "grpo"
    """supervised: learn the reference captions and masks instead of rewards, the comparison for GRPO. mean_teacher:
    supervised, and on images without masks (unlabelled_root, beyond max_labelled) the masks of the EMA teacher.
    dpo: preferences between masks of an image."""
    bce_weight: Rare[float | None] = None
    """Supervised training: weight of the binary cross-entropy of masks: 2 on captioned regions, as in Sa2VA's recipe;
    0.25 on annotated images, whose objects are often thin, and 1 with a side network (docs/log.md)."""
    dice_weight: Rare[float | None] = None
    """Supervised training: weight of the Dice loss of masks: 0.5 on captioned regions and with a side network, 2 on
    annotated images."""
    cldice_weight: Rare[float] = 0.0
    """Weight of soft clDice, which punishes broken vessels: beside the losses of true masks, and beside the reward
    network's score in its gradient, with the network's map in place of the true mask."""
    augment: Rare[bool | None] = None
    """Supervised training on annotated images: in each step another random view of every image (rotation, scale,
    reflection, contrast), whose features are computed anew. By default with a side network alone."""
    loss_type: InPython[Literal["grpo", "dapo", "dr_grpo", "bnpo"]] = "dapo"  # see `losses.aggregate`
    importance_sampling_level: InPython[Level] = "token"  # whether each token has a ratio, or the whole caption
    scale_rewards: Rare[Scale | None] = None
    """Scale the sum of the rewards alone: by their standard deviation in the group, in the batch (all groups of an
    optimisation step, of all processes), or not at all (none). By default each reward is divided by its deviation in
    the group, so that METEOR counts beside IoU, and their sum by that of the optimisation step."""
    multi_objective_aggregation: InPython[Aggregation] = "normalize_then_sum"
    entropy_coef: Rare[float] = 0.0
    """Weight of the entropy bonus of tokens (loop 1); the masks of loop 2 have a spread controller of their own."""
    temperature: Rare[float] = 1.0
    """Sampling temperature."""
    max_completion_length: Rare[int | None] = None
    """Tokens of a caption: 24 on a model of the embedded one's size, else 128."""
    mask_policy: Rare[MaskPolicyName | None] = None
    """What loop 2 samples: gaussian, noise on the [SEG] embedding; bernoulli, cells of a 16 x 16 grid, which trains the
    mask decoder, too, but is coarse. By default bernoulli on captioned regions, gaussian on annotated images
    (docs/explanation/mask-policies.md)."""
    curriculum: Rare[bool] = False
    """Draw regions whose rewards have spread more often, and easy regions before hard ones."""
    adaptive_loop_weights: Rare[bool] = False
    """Set the weights of the two loops by the size of their gradients, measured every tenth step."""
    ema_decay: Rare[float] = 0.999
    """Decay of the EMA teacher, a moving average of the model; 0 uses the model itself."""
    pathwise_weight: Rare[float | None] = None
    """Weight of the reward network's own gradient through the soft mask, which trains the mask decoder, too: 1 on
    annotated images with a reward network, but for the controls; else 0 (docs/log.md compares)."""
    seg_text_weight: Rare[float] = 1.0
    """Weight of the cross-entropy of the answer with [SEG]: training on masks alone can change the text until the
    answer has no [SEG], and so no mask (docs/log.md)."""
    consistency_weight: Rare[float] = 1.0
    """Mean teacher: weight of the loss on the teacher's masks, once it has faded in
    (docs/how-to/images-without-masks.md)."""
    preferred_by: Rare[Literal["truth", "learned"]] = "learned"
    """DPO: which of two masks is preferred: by the truth, or by the reward network's score (learned)."""
    dpo_beta: InPython[float] = 1.0  # large values stay near the initial model
    dpo_gap: InPython[float] = 0.02  # least difference between two masks of a pair; a smaller one is taken for noise
    sft_weight: InPython[float] = 0.1  # of the supervised loss on the preferred masks
    contrast_weight: Rare[float] = 0.3
    """Supervised training by name: weight of the contrast between the [SEG] of different names, without which the
    language model learns new names slowly (docs/log.md)."""
    activation_checkpointing: Annotated[bool, tyro.conf.arg(name="gradient-checkpointing"), RARE] = False
    """Compute activations twice, to save memory."""
    logging_steps: InPython[int | None] = None
    save_strategy: InPython[str] = "steps"
    save_steps: Rare[int] = 50
    """Steps between checkpoints."""
    deepspeed: Rare[str | None] = None
    """A DeepSpeed configuration of ZeRO-1 or 2, as scripts/deepspeed_zero2.json, with dtype float32."""


FLAGS = {"beta": "kl_coef", "epsilon": "clip_range"}  # fields -> flags, where a refused one has another name

SIDE_LEARNING_RATE = 3e-3  # on true masks, as the reward network's, a U-Net of the same kind
LATER_SIDE_LEARNING_RATE = 1e-3  # of one that has learned true masks, in other objectives (docs/log.md)
SIDE_STEPS = {"quick": 200, "full": 700}  # at most, on true masks: 7 and 25 minutes on one CPU core
IMAGES = 8  # of a step in which masks are learned
PATIENCE = 3  # validations without a better one, until `full` stops
ROWS_AT_ONCE = 128  # most answers of one batch
SMALL = {"learning_rate": 1e-3, "per_device_train_batch_size": 64, "max_completion_length": 24}  # see docs/log.md
LARGE = {"learning_rate": 1e-5, "per_device_train_batch_size": 8, "max_completion_length": 128}
MODES = {
    "quick": {"num_train_epochs": 1.0, "max_steps": 140, "logging_steps": 1},  # max_steps is a small model's:
    "full": {"num_train_epochs": 3.0, "max_steps": 400, "logging_steps": 5},  # 5 and 14 minutes on two CPU cores
}
WITH_VIEWS = {"warmup_steps": 0.15, "augment": True, "bce_weight": 1.0, "dice_weight": 0.5}  # as the reward network's
OF_DATA: dict[str, dict[str, Any]] = {  # presets by kind of data; docs/log.md, docs/explanation/mask-policies.md
    "regions": {"bce_weight": 2.0, "dice_weight": 0.5, "mask_policy": "bernoulli"},
    "images": {"bce_weight": 0.25, "dice_weight": 2.0, "mask_policy": "gaussian"},
}
LORA_R = {"small": 16, "large": 128}


def with_preset(settings: GRPOSettings, mode: Mode, small: bool, side: bool = False) -> GRPOSettings:
    """Settings of a mode and a kind of model, with the user's changes.

    `mask_policy`, `pathwise_weight` and the weights of the mask losses may still be None: they depend on the data. A
    side network that trains (`side`) takes the steps, images and rate of a small model on every model.
    """
    preset: dict[str, Any] = MODES[mode] | (SMALL if small else LARGE) | {"mask_beta": settings.beta}
    preset |= {"warmup_steps": 5, "side_learning_rate": LATER_SIDE_LEARNING_RATE}
    if settings.objective == "grpo":
        preset["num_train_epochs"] = 1.0  # each pass samples anew, so it may be short; labels are the same in each
    if settings.num_train_epochs is not None or not (small or side):
        preset["max_steps"] = -1
    if settings.scale_rewards is not None:
        settings = replace(settings, multi_objective_aggregation="sum_then_normalize")
    if side:
        images = max(1, int(SMALL["per_device_train_batch_size"]) // max(1, settings.num_generations))
        settings = with_images(settings, images, small)
    whole = with_whole_groups(filled(settings, preset))
    return filled(whole, {"encoder_learning_rate": (whole.learning_rate or 0.0) / 10})


def of_masks(settings: GRPOSettings, mode: Mode, small: bool) -> GRPOSettings:
    """Settings of a run on masks of annotated images, with the user's changes; `with_preset` follows."""
    preset = {name: value for name, value in WITH_VIEWS.items() if name != "augment" or settings.objective != "dpo"}
    if settings.objective == "supervised":
        preset |= {"early_stopping_patience": PATIENCE} if mode == "full" else {}
        preset |= {"max_steps": SIDE_STEPS[mode]} if settings.num_train_epochs is None else {}
    return with_images(filled(settings, preset), IMAGES, small)


def with_images(settings: GRPOSettings, images: int, small: bool) -> GRPOSettings:
    """The settings with so many images in a step, which a large model takes in several passes; what is set stays."""
    if settings.per_device_train_batch_size is not None:
        return settings
    group, most = settings.num_generations, LARGE["per_device_train_batch_size"]
    fitting = (count for count in range(1, images + 1) if images % count == 0 and count * group <= most)
    at_once = images if small else max(fitting, default=1)
    passes = images // at_once if settings.gradient_accumulation_steps == 1 else settings.gradient_accumulation_steps
    return replace(settings, per_device_train_batch_size=at_once * group, gradient_accumulation_steps=passes)


def filled(settings: GRPOSettings, preset: Mapping[str, Any]) -> GRPOSettings:
    """The settings, with those of a preset where they are None."""
    return replace(settings, **{name: value for name, value in preset.items() if getattr(settings, name) is None})


def with_whole_groups(settings: GRPOSettings) -> GRPOSettings:
    """A batch smaller than a group becomes a whole one; a step of several passes keeps its number of captions."""
    batch, group = settings.per_device_train_batch_size, settings.num_generations
    passes = settings.gradient_accumulation_steps
    if batch is None or not 1 <= batch < group:
        return settings
    passes = math.ceil(batch * passes / group) if passes >= 1 else passes  # others are refused by `check_settings`
    return replace(settings, per_device_train_batch_size=group, gradient_accumulation_steps=passes)


def check_settings(settings: Any) -> None:
    """Raise a ValueError for `GRPOSettings`, or a `Sa2VAGRPOConfig`, that cannot be trained with; None passes."""
    _check_counts(settings)
    _check_objective(settings)
    above = ("temperature", "epsilon", "epsilon_high", "max_minutes", "num_train_epochs", "dpo_beta")
    check_range(settings, *above, above=True)
    numbers = [one.name for one in fields(GRPOSettings) if one.name.endswith(("_weight", "learning_rate"))]
    check_range(settings, *numbers, "beta", "mask_beta", "entropy_coef", "dpo_gap", "max_grad_norm")
    if settings.save_strategy == "steps" and int(settings.save_steps) % settings.num_iterations:
        raise ValueError(
            f"save_steps is {settings.save_steps}, not a multiple of num_iterations {settings.num_iterations}: a "
            "checkpoint holds no half-used rollouts"
        )
    if not 0 <= settings.ema_decay < 1:
        raise ValueError(f"ema_decay is {settings.ema_decay}, expected 0 or more and less than 1")
    loops = (settings.mask_to_caption_weight, settings.caption_to_mask_weight)
    if not any(loops) and settings.pathwise_weight == 0:
        raise ValueError("mask_to_caption_weight and caption_to_mask_weight are both 0: nothing would be trained")


def _check_counts(settings: Any) -> None:
    group, batch = settings.num_generations, settings.per_device_train_batch_size
    if group < 2:
        raise ValueError(f"num_generations is {group}, expected 2 or more: one alone has no advantage")
    check_at_least(settings, 2, "num_mask_generations")
    if batch is not None and (batch < 1 or batch % group):
        raise ValueError(
            f"per_device_train_batch_size is {batch} generations, not divisible by num_generations {group}: whole "
            "groups stay together; give a multiple of it"
        )
    counts = ("num_iterations", "max_completion_length", "gradient_accumulation_steps", "save_steps")
    check_at_least(settings, 1, *counts, "early_stopping_patience")
    check_at_least(settings, 0, "warmup_steps")
    if settings.max_steps is not None and settings.max_steps < 1 and settings.max_steps != -1:  # left to the epochs
        raise ValueError(f"max_steps is {settings.max_steps}, expected 1 or more")


def _check_objective(settings: Any) -> None:
    objective, of_labels = settings.objective, settings.objective in OF_LABELS
    if settings.augment and not of_labels:
        raise ValueError("augment is True, but rewards are of whole images as they are; leave it out")
    if objective == "mean_teacher" and settings.augment is False:
        raise ValueError("augment is False, but a mean teacher needs different views of an image; leave it out")
    if objective == "mean_teacher" and not settings.ema_decay:
        raise ValueError("ema_decay is 0, but the teacher is a moving average; leave it out")
    if objective != "grpo" and (times := settings.num_iterations) > 1:
        raise ValueError(
            f"num_iterations is {times}, expected 1 with {objective} training: it uses no rollouts again; raise "
            "num_epochs"
        )
    if objective != "grpo" and settings.curriculum:
        raise ValueError(
            f"curriculum is True, but {objective} training has no rewards to order prompts by; leave it out"
        )
    if of_labels and settings.bce_weight == settings.dice_weight == 0:
        raise ValueError("bce_weight and dice_weight are both 0: masks would not be trained; raise one of them")
    loops = settings.mask_to_caption_weight and settings.caption_to_mask_weight
    if settings.adaptive_loop_weights and (of_labels or not loops):
        raise ValueError("adaptive_loop_weights is True, but only one loop is trained; leave it out")


@dataclass(frozen=True)
class RewardWeights:
    """Weight of each reward term; a term of weight 0 is logged where it can be computed."""

    iou: float = 1.0  # loop 1: of mask' with the region
    caption: float = 1.0  # loop 1: the caption reward of the sampled caption
    loop2_caption: float = 1.0  # of caption'
    loop2_iou: float = 1.0  # of the sampled mask with the true one
    learned: float = 0.0  # loop 2: the reward network's score of the sampled mask
    confidence: float = 0.0  # loop 2: how clear the sampled mask's edges are


@dataclass(frozen=True)
class GRPOPlan:
    """The settings of a GRPO run besides its inputs."""

    mode: str
    weights: RewardWeights = field(default_factory=RewardWeights)
    lora_r: int = 128
    lora_alpha: int = 256
    settings: GRPOSettings = field(default_factory=GRPOSettings)  # None is the Trainer's default
    judge: dict[str, Any] | None = None  # of captions: base_url, model, loops ("loop1", "loop2"), no key
    reward_net: str | None = None  # fingerprint
    shuffle_rewards: bool = False  # the control: the rewards of each step are permuted at random
    eval_steps: int = 0  # optimisation steps between validations; 0 never validates
    mask_rewards: dict[str, dict[str, float]] | None = None  # loop -> name in `MASK_REWARDS` -> weight
    max_labelled: int | None = None  # most prompts with a true mask that supervised training uses; None uses all
    freeze_embeddings: bool | None = None  # True does not train the token embeddings and the head of a Qwen-VL
    side_network: dict[str, Any] | None = None  # fields of `SideNetworkConfig` of the one that is added
    encoder: dict[str, Any] | None = None  # of SAM 2: {"train": "full"}, or {"train": "lora", "lora_r": rank}
    own_batch: bool | None = None  # True keeps the batch also where it is larger than the data; None lowers it


def meanings(flags: GRPOSettings, settings: GRPOSettings) -> list[str]:
    """One line for each changed setting (`flags`) with a meaning other than in the original specification."""
    given, group = flags.per_device_train_batch_size or 0, settings.num_generations
    regions, passes = (settings.per_device_train_batch_size or 0) // group, settings.gradient_accumulation_steps
    acts = "; it acts from --num_iterations 2 on: on fresh rollouts the ratio is 1" * (settings.num_iterations < 2)
    lines = {
        "per_device_train_batch_size": f"batch_size {given} counts captions, not regions: {regions} x {group} captions "
        "per process and forward pass"
        + f", since a group stays whole, and {passes} pass{'es' * (passes > 1)} per step"
        * (given < group),
        "num_train_epochs": f"num_epochs {flags.num_train_epochs} counts passes over the training regions, not over "
        "all regions: others are for validation and test",
        "beta": f"kl_coef {flags.beta} is the weight of exp(d) - d - 1 with d = log p(reference) - log p(model), "
        "which is never negative, not of d itself",
        "epsilon": f"clip_range {flags.epsilon} clips the ratio to the model that sampled, not to the reference{acts}",
    }
    return [line for name, line in lines.items() if changed(flags, name)]
