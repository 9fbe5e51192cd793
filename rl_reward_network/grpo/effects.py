"""Which settings of a run act: one table, so that a flag that would do nothing is refused and not ignored.

Imports neither torch nor transformers: most flags are checked before anything is read.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from rl_reward_network.grpo.settings import OF_LABELS, GRPOSettings, default_mask_policy
from rl_reward_network.models.default import has_side_network, is_qwen_vl

if TYPE_CHECKING:
    from rl_reward_network.grpo.plan import PlanArgs

TEACHER, DPO, LOOPED = "mean_teacher", "dpo", ("grpo", "supervised")  # the last two learn captions and masks


@dataclass(frozen=True)
class Chosen:
    """A run as its flags and data describe it; what is not known yet may be.

    Args:
        args: flags.
        learned: whether there is a reward network.
        captions: whether the data are captioned regions; None before they are read.
        several: whether images are asked for more than one class; None as before.
        validated: whether validation items have true masks, by which weights are chosen; None as before.
    """

    args: "PlanArgs"
    learned: bool
    captions: bool | None = None
    several: bool | None = None
    validated: bool | None = None

    @property
    def grpo(self) -> GRPOSettings:
        """The hyperparameters, None where the preset counts."""
        return self.args.grpo

    @property
    def objective(self) -> str:
        """What is learned."""
        return self.grpo.objective

    @property
    def rewarded(self) -> bool:
        """Whether rewards are."""
        return self.objective == "grpo"

    @property
    def captioned(self) -> bool:
        """Whether there are captions to learn or to sample."""
        return self.objective in LOOPED and self.captions is not False

    @property
    def loop1(self) -> bool:
        """Whether the rewards of sampled captions count."""
        return self.rewarded and self.captioned and bool(self.grpo.mask_to_caption_weight)

    @property
    def loop2(self) -> bool:
        """Whether the rewards of sampled masks count."""
        return self.rewarded and bool(self.grpo.caption_to_mask_weight)

    @property
    def true_masks(self) -> bool:
        """Whether true masks are learned."""
        return self.objective in OF_LABELS and bool(self.grpo.caption_to_mask_weight)

    @property
    def pathwise(self) -> bool:
        """Whether the gradient of the reward network trains."""
        by_default = self.learned and self.captions is not True and not self.args.shuffle_rewards
        weight = self.grpo.pathwise_weight
        return self.rewarded and (by_default if weight is None else bool(weight))

    @property
    def reaches_masks(self) -> bool:
        """Whether a loss on masks, and not on the [SEG] embedding alone, has a gradient."""
        policy = self.grpo.mask_policy or default_mask_policy(self.captions is not False)
        cells = self.loop2 and policy == "bernoulli"
        return self.true_masks or self.objective == DPO or self.pathwise or cells

    @property
    def trains_side(self) -> bool:
        """Whether a side network trains: one that is added, or the model's own."""
        has = self.args.adapters.side_network or has_side_network(self.args.inputs.model_path)
        return has and self.reaches_masks


LOOP1 = "on sampled captions: --objective grpo on captioned regions, with --mask_to_caption_weight above 0"
LOOP2 = "on the rewards of sampled masks: --objective grpo with --caption_to_mask_weight above 0"
CAPTIONS = "on captioned regions with --objective grpo or supervised"
TRUTH = "on true masks: --objective supervised or mean_teacher"
MASKS = (
    "where a loss on masks has a gradient: --objective supervised, mean_teacher or dpo, --mask_policy bernoulli, or "
    "the gradient of a --reward_net"
)
# Flags -> when they act, as words behind "it acts" and as a condition.
WHEN: dict[str, tuple[str, Callable[[Chosen], Any]]] = {
    "temperature entropy_coef importance_sampling_level epsilon epsilon_high": (LOOP1, lambda run: run.loop1),
    "iou_weight caption_weight mask_rewards use_llm_judge": (LOOP1, lambda run: run.loop1),
    "loss_type": (
        f"{CAPTIONS}, and --mask_to_caption_weight above 0",
        lambda run: run.captioned and run.grpo.mask_to_caption_weight,
    ),
    "mask_to_caption_weight max_completion_length": (CAPTIONS, lambda run: run.captioned),
    "caption_to_mask_weight": ("with --objective grpo or supervised", lambda run: run.objective in LOOPED),
    "beta multi_objective_aggregation": ("with --objective grpo", lambda run: run.rewarded),
    "pathwise_weight shuffle_rewards log_completions": ("with --objective grpo", lambda run: run.rewarded),
    "scale_rewards": (
        "with --objective grpo and --multi_objective_aggregation sum_then_normalize",
        lambda run: run.rewarded and run.grpo.multi_objective_aggregation == "sum_then_normalize",
    ),
    "num_mask_generations mask_policy": (
        "on sampled masks: --objective grpo with --caption_to_mask_weight above 0, or dpo",
        lambda run: run.loop2 or run.pathwise or run.objective == DPO,
    ),
    "ema_decay no_ema": (
        "on the EMA teacher: --objective mean_teacher, dpo, or grpo on captioned regions",
        lambda run: run.objective in (TEACHER, DPO) or (run.rewarded and run.captioned),
    ),
    "loop2_iou_weight learned_weight confidence_weight loop2_mask_rewards": (LOOP2, lambda run: run.loop2),
    "loop2_caption_weight use_llm_judge_loop2": (
        f"{LOOP2}, on captioned regions",
        lambda run: run.loop2 and run.captioned,
    ),
    "llm_judge_base_url llm_judge_model llm_judge_timeout llm_judge_retries llm_judge_concurrency llm_judge_cache": (
        "with --use_llm_judge or --use_llm_judge_loop2",
        lambda run: run.args.rewards.judged_loops,
    ),
    "bce_weight dice_weight": (
        f"{TRUTH}, or dpo with --sft_weight above 0",
        lambda run: run.true_masks or (run.objective == DPO and run.grpo.sft_weight),
    ),
    "cldice_weight": (f"{TRUTH}, or with --pathwise_weight above 0", lambda run: run.true_masks or run.pathwise),
    "contrast_weight": (
        "with --objective supervised on images of several phrases",
        lambda run: run.objective == "supervised" and run.true_masks and run.several is not False,
    ),
    "max_labelled": ("with --objective supervised or mean_teacher", lambda run: run.objective in OF_LABELS),
    "consistency_weight": ("with --objective mean_teacher", lambda run: run.objective == TEACHER),
    "preferred_by dpo_beta dpo_gap sft_weight": ("with --objective dpo", lambda run: run.objective == DPO),
    "side_learning_rate": (f"on a side network, added or the model's own, {MASKS}", lambda run: run.trains_side),
    "encoder_learning_rate": ("with --encoder full", lambda run: run.args.adapters.encoder == "full"),
    "decoder_learning_rate": (MASKS, lambda run: run.reaches_masks),
    "seg_learning_rate": (f"on sampled masks, or {MASKS}", lambda run: run.reaches_masks or run.loop2),
    "freeze_embeddings": (
        "on a Qwen-VL, whose recipe trains them",
        lambda run: is_qwen_vl(run.args.inputs.model_path) is not False,
    ),
    "max_dynamic_patch": (
        "on an InternVL, which sees an image as tiles",
        lambda run: not is_qwen_vl(run.args.inputs.model_path),
    ),
    "early_stopping_patience": (
        "on validations, with true masks: --eval_steps above 0",
        lambda run: run.args.eval_steps != 0 and run.validated is not False,
    ),
}


def check_acts(run: Chosen) -> None:
    """Refuse a flag that was given and would do nothing; defaults never.

    Raises:
        ValueError: names the flag, its value, and when it acts.
    """
    args = run.args
    given = {
        field.name: getattr(part, field.name)
        for part in (args, args.grpo, args.rewards, args.lora, args.regions)
        for field in fields(part)
        if getattr(part, field.name) != field.default
    }
    for names, (words, acts) in WHEN.items():
        if idle := [name for name in names.split() if name in given and not acts(run)]:
            value = "" if given[idle[0]] is True else f" {given[idle[0]]}"
            raise ValueError(f"--{idle[0]}{value} does nothing in this run: it acts {words}; leave it out")
