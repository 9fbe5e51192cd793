"""Which settings of a run act: one table, so that a flag that would do nothing is refused and not ignored.

Imports neither torch nor transformers: most flags are checked before anything is read.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

from rl_reward_network.grpo.settings import OF_LABELS, GRPOSettings, default_mask_policy
from rl_reward_network.models.default import has_side_network, is_qwen_vl

if TYPE_CHECKING:
    from rl_reward_network.grpo.plan import PlanArgs

TEACHER, DPO = "mean_teacher", "dpo"


@dataclass(frozen=True)
class Chosen:
    """A run as its flags and data describe it.

    Args:
        args: flags.
        learned: whether there is a reward network.
        captions: whether the data are captioned regions; None before they are read, where both is possible.
        by_name: whether images are asked for several classes; None as before.
    """

    args: "PlanArgs"
    learned: bool
    captions: bool | None = None
    by_name: bool | None = None

    @property
    def grpo(self) -> GRPOSettings:
        """The hyperparameters, None where the preset counts."""
        return self.args.grpo

    @property
    def rewarded(self) -> bool:
        """Whether rewards train."""
        return self.grpo.objective == "grpo"

    @property
    def has_loops(self) -> bool:
        """Whether the objective has captions and masks, and not masks alone."""
        return self.grpo.objective in ("grpo", "supervised")

    @property
    def captioned(self) -> bool:
        """Whether captions train."""
        return self.has_loops and self.captions is not False and bool(self.grpo.mask_to_caption_weight)

    @property
    def true_masks(self) -> bool:
        """Whether true masks are learned."""
        objective = self.grpo.objective
        return objective == TEACHER or bool(objective == "supervised" and self.grpo.caption_to_mask_weight)

    @property
    def sampled_masks(self) -> bool:
        """Whether the rewards of sampled masks count."""
        return self.rewarded and bool(self.grpo.caption_to_mask_weight)

    @property
    def pathwise(self) -> bool:
        """Whether the gradient of the reward network trains."""
        by_default = self.learned and self.captions is not True and not self.args.shuffle_rewards
        weight = self.grpo.pathwise_weight
        return self.rewarded and (by_default if weight is None else bool(weight))

    @property
    def asks_network(self) -> bool:
        """Whether the reward network gives rewards or preferences."""
        return self.learned and (self.rewarded or (self.grpo.objective == DPO and self.grpo.preferred_by != "truth"))

    @property
    def reaches_masks(self) -> bool:
        """Whether a loss on masks, and not on the [SEG] embedding alone, has a gradient."""
        policy = self.grpo.mask_policy or default_mask_policy(self.args.small, self.captions is not False)
        cells = self.sampled_masks and policy == "bernoulli"
        return self.true_masks or self.grpo.objective == DPO or self.pathwise or cells

    @property
    def trains_side(self) -> bool:
        """Whether a side network trains: one that is added, or the model's own."""
        has = self.args.adapters.side_network or has_side_network(self.args.inputs.model_path)
        return has and self.reaches_masks

    @property
    def qwen_vl(self) -> bool | None:
        """Whether the model is a Qwen-VL; None of a hub id, which is not downloaded yet."""
        return is_qwen_vl(self.args.inputs.model_path)


class Acts(NamedTuple):
    """Names of flags, when they act, as words behind "it acts", and as a condition."""

    flags: str
    words: str
    when: Callable[[Chosen], bool]


OF_CAPTIONS = "on sampled captions: --objective grpo on captioned regions, with --mask_to_caption_weight above 0"
OF_MASKS = "on the rewards of sampled masks: --objective grpo with --caption_to_mask_weight above 0"
ON_MASKS = (
    "where a loss on masks has a gradient: --objective supervised, mean_teacher or dpo, --mask_policy bernoulli, or "
    "the gradient of a --reward_net"
)
WHEN = (
    Acts(
        "temperature entropy_coef importance_sampling_level epsilon epsilon_high iou_weight caption_weight "
        "mask_rewards use_llm_judge",
        OF_CAPTIONS,
        lambda run: run.rewarded and run.captioned,
    ),
    Acts(
        "loss_type",
        "on captions: --objective grpo or supervised on captioned regions, with --mask_to_caption_weight above 0",
        lambda run: run.captioned,
    ),
    Acts(
        "mask_to_caption_weight max_completion_length",
        "on captions: --objective grpo or supervised on captioned regions",
        lambda run: run.has_loops and run.captions is not False,
    ),
    Acts("caption_to_mask_weight", "with --objective grpo or supervised", lambda run: run.has_loops),
    Acts(
        "beta multi_objective_aggregation shuffle_rewards pathwise_weight",
        "on rewards: --objective grpo",
        lambda run: run.rewarded,
    ),
    Acts(
        "scale_rewards",
        "on rewards with --multi_objective_aggregation sum_then_normalize",
        lambda run: run.rewarded and run.grpo.multi_objective_aggregation == "sum_then_normalize",
    ),
    Acts(
        "num_mask_generations mask_policy",
        "on sampled masks: --objective grpo with --caption_to_mask_weight above 0, or dpo",
        lambda run: run.sampled_masks or run.pathwise or run.grpo.objective == DPO,
    ),
    Acts(
        "ema_decay no_ema",
        "on the EMA teacher: --objective mean_teacher, dpo, or grpo on captioned regions",
        lambda run: run.grpo.objective in (TEACHER, DPO) or (run.rewarded and run.captions is not False),
    ),
    Acts(
        "loop2_iou_weight learned_weight confidence_weight loop2_mask_rewards", OF_MASKS, lambda run: run.sampled_masks
    ),
    Acts(
        "loop2_caption_weight use_llm_judge_loop2",
        f"{OF_MASKS}, on captioned regions",
        lambda run: run.sampled_masks and run.captions is not False,
    ),
    Acts(
        "llm_judge_base_url llm_judge_model llm_judge_timeout llm_judge_retries llm_judge_concurrency llm_judge_cache",
        "with --use_llm_judge or --use_llm_judge_loop2",
        lambda run: bool(run.args.rewards.judged_loops),
    ),
    Acts(
        "bce_weight dice_weight",
        "on true masks: --objective supervised or mean_teacher, or dpo with --sft_weight above 0",
        lambda run: run.true_masks or bool(run.grpo.objective == DPO and run.grpo.sft_weight),
    ),
    Acts(
        "cldice_weight",
        "on true masks (--objective supervised or mean_teacher) and in the gradient of a reward network "
        "(--pathwise_weight)",
        lambda run: run.true_masks or run.pathwise,
    ),
    Acts(
        "contrast_weight",
        "with --objective supervised on images of several phrases",
        lambda run: run.grpo.objective == "supervised" and run.true_masks and run.by_name is not False,
    ),
    Acts("max_labelled", "with --objective supervised or mean_teacher", lambda run: run.grpo.objective in OF_LABELS),
    Acts("taught_weight", "with --objective mean_teacher", lambda run: run.grpo.objective == TEACHER),
    Acts("preferred_by dpo_beta sft_weight", "with --objective dpo", lambda run: run.grpo.objective == DPO),
    Acts(
        "dpo_gap",
        "with --objective dpo, unless --preferred_by is betti",
        lambda run: run.grpo.objective == DPO and run.grpo.preferred_by != "betti",
    ),
    Acts(
        "refit_steps",
        "with --reward_net on annotated images, and --objective grpo or dpo, unless --preferred_by is truth",
        lambda run: run.asks_network and run.captions is not True,
    ),
    Acts(
        "side_learning_rate",
        f"on a side network (--side_network, or a model that has one) {ON_MASKS}",
        lambda run: run.trains_side,
    ),
    Acts("encoder_learning_rate", "with --encoder full", lambda run: run.args.adapters.encoder == "full"),
    Acts("decoder_learning_rate", ON_MASKS, lambda run: run.reaches_masks),
    Acts(
        "seg_learning_rate",
        "where masks are sampled (--caption_to_mask_weight above 0), or " + ON_MASKS,
        lambda run: run.reaches_masks or run.sampled_masks,
    ),
    Acts("freeze_embeddings", "on a Qwen-VL, whose recipe trains them", lambda run: run.qwen_vl is not False),
    Acts("max_dynamic_patch", "on an InternVL, which sees images as tiles", lambda run: run.qwen_vl is not True),
    Acts("early_stopping_patience", "on validations: --eval_steps above 0", lambda run: run.args.eval_steps != 0),
)


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
    for row in WHEN:
        for name in row.flags.split():
            if name in given and not row.when(run):
                value = "" if given[name] is True else f" {given[name]}"
                raise ValueError(f"--{name}{value} does nothing in this run: it acts {row.words}; leave it out")
