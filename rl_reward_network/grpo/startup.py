"""The output of a GRPO run before its first step: the meaning of flags, the size of a step, the trained parts."""

from typing import Any

from rl_reward_network.flags import changed
from rl_reward_network.grpo.settings import GRPOSettings
from rl_reward_network.models.lora import parameter_table
from rl_reward_network.models.sa2va.loading_sa2va import Dtype, load_sa2va_model
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor

FLASH = "flash_attention_2"
AS_SUPERVISED = "frozen, as in Sa2VA's supervised fine-tuning"
BEHIND_SEG = (
    "no loss of this run goes past the [SEG] embedding; --mask_policy bernoulli, the gradient of a reward network "
    "(--pathwise_weight) and --objective supervised do"
)
WHY_FROZEN = {
    "language model": "LoRA trains in its place",
    "SAM 2 prompt encoder": BEHIND_SEG,
    "SAM 2 mask decoder": BEHIND_SEG,
    "SAM 2 memory": "for video alone",
}


def load_model(
    model_path: str, device: str, use_flash_attn: bool = False, dtype: Dtype = "auto"
) -> tuple[Sa2VAForConditionalGeneration, Sa2VAProcessor]:
    """Model and processor of a run.

    Args:
        model_path: folder, hub id or name of an embedded model.
        device: of the model.
        use_flash_attn: FlashAttention in the vision tower alone: the language model is trained on packed rows, whose
            mask FlashAttention does not take.
        dtype: see `load_sa2va_model`.
    """
    model, processor = load_sa2va_model(model_path, device, dtype=dtype)
    if use_flash_attn:
        model.model.vision_encoder.set_attn_implementation(FLASH)
    return model, processor


def meanings(flags: GRPOSettings, settings: GRPOSettings) -> list[str]:
    """One line for each changed setting with a meaning other than in the original specification.

    Args:
        flags: the user's settings.
        settings: those of the plan.
    """
    lines = {
        "per_device_train_batch_size": _batch_meaning(flags, settings),
        "num_train_epochs": f"num_epochs {flags.num_train_epochs} counts passes over the training regions, not over "
        "all regions: others are for validation and test",
        "beta": f"kl_coef {flags.beta} is the weight of exp(d) - d - 1 with d = log p(reference) - log p(model), "
        "which is never negative, not of d itself",
        "epsilon": f"clip_range {flags.epsilon} clips the ratio to the model that sampled, not to the reference"
        + _clip_range_effect(settings),
        "epsilon_high": f"epsilon_high {flags.epsilon_high} clips it from above" + _clip_range_effect(settings),
        "scale_rewards": _scale_effect(flags),
    }
    return [line for name, line in lines.items() if line and changed(flags, name)]


def _batch_meaning(flags: GRPOSettings, settings: GRPOSettings) -> str:
    given, group = flags.per_device_train_batch_size or 0, settings.num_generations
    regions, passes = (settings.per_device_train_batch_size or 0) // group, settings.gradient_accumulation_steps
    line = f"batch_size {given} counts captions, not regions: {regions} x {group} captions per process and forward pass"
    if given >= group:
        return line
    return f"{line}, since a group stays whole, and {passes} {'pass' if passes == 1 else 'passes'} per step"


def _scale_effect(flags: GRPOSettings) -> str:
    if flags.multi_objective_aggregation == "sum_then_normalize":
        return ""
    how = "divides each reward by its deviation in the group and the sum by that of the step"
    acts = "acts with --multi_objective_aggregation sum_then_normalize alone"
    return f"scale_rewards {flags.scale_rewards} {acts}: {flags.multi_objective_aggregation} {how}, as in TRL"


def _clip_range_effect(settings: GRPOSettings) -> str:
    """When the clipping of tokens has no effect in this run."""
    if not settings.mask_to_caption_weight:
        return "; it acts on captions (loop 1), which this run leaves out"
    if settings.num_iterations == 1:
        return "; it acts from --num_iterations 2 on: on fresh rollouts the ratio is 1"
    return ""


def startup_lines(trainer: Any) -> list[str]:
    """Size of an optimisation step, number of trained parameters, frozen parts, unlabelled images left out.

    Args:
        trainer: Sa2VAGRPOTrainer, after `freeze_unreached`.
    """
    table = parameter_table(trainer.sa2va)
    total, trained = sum(row[1] for row in table), sum(row[2] for row in table)
    frozen = [part for part, count, training in table if count and not training]
    reasons = {part: WHY_FROZEN.get(part, AS_SUPERVISED) for part in frozen}
    return [
        f"each step: {_step(trainer.args)}",
        f"parameters: {total:,}, of which {trained:,} train ({trained / total:.1%})",
        *(
            f"not trained: {', '.join(part for part in frozen if reasons[part] == reason)} ({reason})"
            for reason in dict.fromkeys(reasons.values())
        ),
        *([trainer.familiarity.sentence] if trainer.familiarity else []),
    ]


def _step(args: Any) -> str:
    """Regions x captions and masks of one optimisation step."""
    regions = args.prompts_per_step * args.gradient_accumulation_steps * args.world_size
    each = []
    if args.mask_to_caption_weight:
        each.append(f"{args.num_generations} captions")
    if args.caption_to_mask_weight:
        each.append(f"{args.num_mask_generations} masks")
    weights = {"captions": args.mask_to_caption_weight, "masks": args.caption_to_mask_weight}
    true = f"true {' and '.join(name for name, weight in weights.items() if weight)}"
    made = true if args.objective == "supervised" else " and ".join(each) or "their masks"
    shares = (
        f"{args.world_size} processes x {args.gradient_accumulation_steps} forward passes x {args.prompts_per_step}"
    )
    return f"{regions} regions x {made} ({shares})"
