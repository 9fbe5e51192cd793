"""What a user chooses for a GRPO run, as flags or in Python; which of it acts; and the complete plan it gives.

Neither torch nor transformers is imported: `--help` must be fast.
"""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from rl_reward_network.flags import Rare, changed, check_at_least, check_range
from rl_reward_network.grpo.settings import (
    FLAGS,
    LORA_R,
    OF_DATA,
    OF_LABELS,
    SIDE_LEARNING_RATE,
    WITH_VIEWS,
    GRPOPlan,
    GRPOSettings,
    Mode,
    RewardWeights,
    check_settings,
    filled,
    of_masks,
    with_preset,
)
from rl_reward_network.inputs.config import DEFAULT_REGIONS, RegionConfig, RunConfig
from rl_reward_network.models.default import has_side_network, is_qwen_vl, is_small
from rl_reward_network.rewards.judge import JudgeConfig
from rl_reward_network.rewards.table import WeightedName, needs_truth

if TYPE_CHECKING:
    from rl_reward_network.grpo.inputs import GRPOInputs
    from rl_reward_network.models.reward_network import RewardNetwork

TEACHER, DPO, LOOPED = "mean_teacher", "dpo", ("grpo", "supervised")  # the last two learn captions and masks
VALIDATION_STEPS = {"quick": 35, "full": 100}  # optimisation steps between validations
ENCODER_LORA_R = 16  # its scale is twice the rank


@dataclass(frozen=True)
class TrainablePartsArgs:
    """LoRA on the language model, and what may adapt beside the parts that Sa2VA's own fine-tuning trains."""

    side_network: bool = False
    """Add a side network, a small U-Net that refines masks at a finer resolution: for thin objects
    (docs/how-to/train-weights.md)."""
    side_pixels: Rare[int] = 512
    """Side in pixels of the square that the side network sees, and of its masks; a multiple of 64."""
    encoder: Rare[Literal["frozen", "lora", "full"]] = "frozen"
    """What trains of SAM 2's image encoder: nothing, LoRA of rank 16 on its blocks, or all of it, at a tenth of the
    learning rate. Its features are then computed anew in every step."""
    lora_r: Rare[int | None] = None
    """Rank of LoRA: 16 on a model of the embedded one's size, else 128. Its scale, alpha, is twice the rank."""
    freeze_embeddings: Rare[bool] = False
    """Do not train the token embeddings and the head of a Qwen-VL, which its own recipe trains; saves many GiB."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "lora_r")
        if self.side_pixels < 64 or self.side_pixels % 64:
            raise ValueError(f"side_pixels is {self.side_pixels}, expected a multiple of 64")
        if not self.side_network and changed(self, "side_pixels"):
            raise ValueError("--side_pixels does nothing without --side_network; leave it out, or give both")


@dataclass(frozen=True)
class RewardArgs:
    """Rewards: their weights, the reward network, the LLM judge."""

    reward_net: Path | None = None
    """Folder of a reward network (REWARD_NET): its score of the sampled mask is a reward of loop 2, of weight 1, so
    that annotated images need no labels."""
    use_llm_judge: bool = False
    """Let a language model compare captions as well (loop 1)."""
    use_llm_judge_loop2: Rare[bool] = False
    """Let the judge compare captions in loop 2; given alone, in loop 2 alone."""
    caption_weight: Rare[float | None] = None
    """Loop 1: the caption against its reference (METEOR, or 0.25 METEOR + 0.75 judge with the LLM judge), beside the
    IoU of the mask drawn from it, whose weight is 1: 1, or 0 without captions. At 0 captions drift into words that only
    the EMA teacher understands (docs/log.md)."""
    loop2_caption_weight: Rare[float | None] = None
    """Loop 2: the caption of the sampled mask against the reference: 1, or 0 without captions or with a reward
    network."""
    loop2_iou_weight: Rare[float | None] = None
    """Loop 2: IoU of the sampled mask with the true one: 1, or 0 with a reward network, which needs no labels."""
    mask_rewards: Rare[dict[WeightedName, float] | None] = None
    """Loop 1: more rewards of the mask drawn from the caption, as names and weights, such as: cldice 0.5; also
    functions of the Python file that SA2VA_RL_REWARDS names."""
    loop2_mask_rewards: Rare[dict[WeightedName, float] | None] = None
    """Loop 2: more rewards of the sampled mask, likewise."""
    confidence_weight: Rare[float] = 0.0
    """Loop 2: how clear the edges of the sampled mask are."""
    llm_judge_base_url: Rare[str] = "http://127.0.0.1:8000/v1"
    """Address of an OpenAI-compatible server; the key is read from OPENAI_API_KEY."""
    llm_judge_model: Rare[str | None] = None
    """Model of the judge, by its name on the server; by default the only one that the server lists."""
    llm_judge_cache: Rare[Literal["off"] | Path | None] = None
    """Folder of the judge's replies, for later runs: <output_dir>/llm_judge; off keeps none on disk."""

    def __post_init__(self) -> None:
        check_range(self, *(field.name for field in fields(self) if field.name.endswith(("_weight", "mask_rewards"))))

    @property
    def judged_loops(self) -> list[str]:
        """The loops whose captions the LLM judge compares."""
        return ["loop1"] * self.use_llm_judge + ["loop2"] * self.use_llm_judge_loop2

    def judge_config(self, output_dir: Path) -> JudgeConfig | None:
        """The judge's settings; None without a judge."""
        if not self.judged_loops:
            return None
        cache = self.llm_judge_cache or output_dir / "llm_judge"
        cache_path = None if cache == "off" else Path(cache)
        return JudgeConfig(self.llm_judge_base_url, self.llm_judge_model, cache_path=cache_path)

    def judge_facts(self, model: str | None) -> dict[str, Any] | None:
        """The judge as the run's config.json names it, without its key; None without a judge."""
        facts = {"base_url": self.llm_judge_base_url, "model": model, "loops": self.judged_loops}
        return facts if self.judged_loops else None


@dataclass(frozen=True)
class PlanArgs:
    """The user's choices; None is the preset of mode, model and data."""

    mode: tyro.conf.Positional[Mode] = "full"
    """quick: minutes on two CPU cores with the embedded model, else one epoch. full: 400 steps, else one epoch of GRPO
    and three of another objective; with a side network on true masks until validation no longer rises, at most 700
    steps, whatever the model."""
    inputs: Annotated[RunConfig, tyro.conf.arg(name="")] = field(
        default_factory=lambda: RunConfig(data_root=DEFAULT_REGIONS)
    )
    regions: Annotated[RegionConfig, tyro.conf.arg(name="")] = field(default_factory=RegionConfig)
    grpo: Annotated[GRPOSettings, tyro.conf.arg(name="")] = field(default_factory=GRPOSettings)
    adapters: Annotated[TrainablePartsArgs, tyro.conf.arg(name="")] = field(default_factory=TrainablePartsArgs)
    rewards: Annotated[RewardArgs, tyro.conf.arg(name="")] = field(default_factory=RewardArgs)
    max_labelled: int | None = None
    """With the objective supervised or mean_teacher: use at most so many labelled images (regions), each with all of
    its phrases; those of the reward network's patients first, one per series before a second; a smaller number is a
    subset of a larger. A mean teacher uses the other images without their masks."""
    eval_steps: Rare[int | None] = None
    """Steps between validations: quick 35, full 100, in a run of epochs at most a quarter of them; 0 never validates.
    With a reward network also the stop rule: training ends when the score rises while Dice has been more than 0.02
    below its peak in three validations."""
    shuffle_rewards: Rare[bool] = False
    """The control: rewards are permuted at random, so nothing can be gained."""

    @property
    def small(self) -> bool:
        """Whether the model is of the embedded one's size."""
        return is_small(self.inputs.model_path)


# ---- which settings act ---------------------------------------------------------------------------------------------

OF_MASKS = "on sampled masks: --objective grpo with --caption_to_mask_weight above 0, or dpo"
OF_TEACHER = "on the EMA teacher: --objective mean_teacher, dpo, or grpo on captioned regions"
JUDGED = "with --use_llm_judge or --use_llm_judge_loop2"
OF_SIDE = "on a side network, added or the model's own, where a loss on masks has a gradient"
LOOP1 = "on sampled captions: --objective grpo on captioned regions, with --mask_to_caption_weight above 0"
LOOP2 = "on the rewards of sampled masks: --objective grpo with --caption_to_mask_weight above 0"
TRUTH = "on true masks: --objective supervised or mean_teacher"


@dataclass(frozen=True)
class Chosen:
    """A run as its flags and data describe it; None is not known before the data are read, and may be."""

    args: PlanArgs
    learned: bool  # whether there is a reward network
    captions: bool | None = None  # whether the data are captioned regions
    several: bool | None = None  # whether images are asked for more than one class

    @property
    def pathwise(self) -> bool:
        """Whether the gradient of the reward network trains."""
        by_default = self.learned and self.captions is not True and not self.args.shuffle_rewards
        weight = self.args.grpo.pathwise_weight
        return self.args.grpo.objective == "grpo" and (by_default if weight is None else bool(weight))

    @property
    def reaches_masks(self) -> bool:
        """Whether a loss on masks, and not on the [SEG] embedding alone, has a gradient."""
        grpo = self.args.grpo
        policy = grpo.mask_policy or OF_DATA["images" if self.captions is False else "regions"]["mask_policy"]
        direct = grpo.objective in OF_LABELS or (grpo.objective == "grpo" and policy == "bernoulli")
        return grpo.objective == DPO or self.pathwise or (direct and bool(grpo.caption_to_mask_weight))

    @property
    def trains_side(self) -> bool:
        """Whether a side network trains: one that is added, or the model's own."""
        has = self.args.adapters.side_network or has_side_network(self.args.inputs.model_path)
        return has and self.reaches_masks

    def acting(self) -> dict[str, tuple[Any, str]]:
        """Settings -> whether they act in this run, and the words behind "it acts"."""
        grpo, objective = self.args.grpo, self.args.grpo.objective
        rewarded, of_labels, masks = objective == "grpo", objective in OF_LABELS, grpo.caption_to_mask_weight
        looped, either = objective in LOOPED, "with --objective grpo or supervised"
        captioned = looped and self.captions is not False
        loop1, loop2 = rewarded and captioned and grpo.mask_to_caption_weight, rewarded and masks
        sampled, teaches = loop2 or self.pathwise or objective == DPO, objective in (TEACHER, DPO)
        contrasts = objective == "supervised" and masks and self.several is not False
        judged, qwen = self.args.rewards.judged_loops, is_qwen_vl(self.args.inputs.model_path)
        return {
            "temperature entropy_coef epsilon caption_weight mask_rewards use_llm_judge": (loop1, LOOP1),
            "mask_to_caption_weight max_completion_length": (captioned, f"on captioned regions {either}"),
            "caption_to_mask_weight": (looped, either),
            "beta scale_rewards pathwise_weight shuffle_rewards log_completions": (rewarded, "with --objective grpo"),
            "num_mask_generations mask_policy": (sampled, OF_MASKS),
            "ema_decay": (teaches or (rewarded and captioned), OF_TEACHER),
            "loop2_iou_weight confidence_weight loop2_mask_rewards": (loop2, LOOP2),
            "loop2_caption_weight use_llm_judge_loop2": (loop2 and captioned, f"{LOOP2}, on captioned regions"),
            "llm_judge_base_url llm_judge_model llm_judge_cache": (judged, JUDGED),
            "bce_weight dice_weight": ((of_labels and masks) or objective == DPO, f"{TRUTH}, or dpo"),
            "cldice_weight": ((of_labels and masks) or self.pathwise, f"{TRUTH}, or with --pathwise_weight above 0"),
            "contrast_weight": (contrasts, "with --objective supervised on images of several phrases"),
            "side_learning_rate": (self.trains_side, OF_SIDE),
            "max_labelled": (of_labels, "with --objective supervised or mean_teacher"),
            "consistency_weight": (objective == TEACHER, "with --objective mean_teacher"),
            "preferred_by": (objective == DPO, "with --objective dpo"),
            "freeze_embeddings": (qwen is not False, "on a Qwen-VL, whose recipe trains them"),
            "max_dynamic_patch": (not qwen, "on an InternVL, which sees an image as tiles"),
        }


def check_acts(run: Chosen) -> None:
    """Raise a ValueError for a flag that was given and would do nothing, which names when it acts; defaults never."""
    args = run.args
    given = {
        one.name: getattr(part, one.name)
        for part in (args, args.grpo, args.rewards, args.adapters, args.regions)
        for one in fields(part)
        if getattr(part, one.name) != one.default
    }
    for names, (acts, words) in run.acting().items():
        if not acts and (idle := [name for name in names.split() if name in given]):
            flag, value = FLAGS.get(idle[0], idle[0]), "" if given[idle[0]] is True else f" {given[idle[0]]}"
            raise ValueError(f"--{flag}{value} does nothing in this run: it acts {words}; leave it out")


# ---- the plan -------------------------------------------------------------------------------------------------------


def make_plan(args: PlanArgs, inputs: "GRPOInputs", network: "RewardNetwork | None") -> GRPOPlan:
    """The preset of mode, model and data, with the user's changes; a ValueError if these do not go together."""
    check_together(args, network is not None)
    captions, learned = inputs.kind == "regions", network is not None
    run = Chosen(args, learned, captions, len({prompt.name for prompt in inputs.prompts}) > 1)
    check_acts(run)
    labels = args.rewards.loop2_iou_weight is not None or args.rewards.loop2_mask_rewards
    objective, loop2 = args.grpo.objective, args.grpo.caption_to_mask_weight
    if objective == "grpo" and not (captions or learned or labels):
        raise ValueError("annotated images have no captions to close a loop: give --reward_net or --loop2_iou_weight")
    if objective in (TEACHER, DPO) and (inputs.by_name or captions):
        raise ValueError(
            f"--objective {objective} is for annotated images with one question, but these data have "
            "captions or several classes; give --objective supervised"
        )
    if inputs.by_name and learned:
        raise ValueError(
            "--reward_net judges one kind of object, but these images are asked for several classes: give labels "
            "(--objective supervised, --loop2_iou_weight), or a data folder of that one phrase"
        )
    settings, parts, rewards = _hyperparameters(run), args.adapters, args.rewards
    check_settings(settings)
    added = ["--side_network"] * parts.side_network + ["--encoder"] * (parts.encoder != "frozen")
    if added and not run.reaches_masks:
        gaussian = "--mask_policy gaussian samples the [SEG] embedding, and its gradient ends there"
        raise ValueError(
            f"{added[0]} would not train, for {gaussian if loop2 else '--caption_to_mask_weight is 0'}: give "
            "--objective supervised, --mask_policy bernoulli or, without --shuffle_rewards, --reward_net, whose "
            "gradient passes the masks"
        )
    r = _or(parts.lora_r, LORA_R["small" if args.small else "large"])
    encoder = {"train": parts.encoder, **({"lora_r": ENCODER_LORA_R} if parts.encoder == "lora" else {})}
    more = {"loop1": rewards.mask_rewards, "loop2": rewards.loop2_mask_rewards}
    return GRPOPlan(
        args.mode,
        _weights(rewards, captions, learned),
        lora_r=r,
        lora_alpha=2 * r,
        settings=settings,
        judge=rewards.judge_facts(rewards.llm_judge_model),
        reward_net=None if network is None else network.fingerprint,
        shuffle_rewards=args.shuffle_rewards,
        eval_steps=_or(args.eval_steps, VALIDATION_STEPS[args.mode]),
        mask_rewards={loop: dict(weights) for loop, weights in more.items() if weights} or None,
        max_labelled=args.max_labelled,
        freeze_embeddings=parts.freeze_embeddings or None,
        side_network=_side_network(parts, inputs.by_name),
        encoder=None if parts.encoder == "frozen" else encoder,
        own_batch=args.grpo.per_device_train_batch_size is not None or None,
    )


def _side_network(parts: TrainablePartsArgs, by_name: bool) -> dict[str, Any] | None:
    """The fields of the `SideNetworkConfig` of a new side network; None where none is added.

    By name it refines one candidate, since which one SAM 2's head selects differs by name, too, and its weights come
    from `[SEG]` itself (docs/log.md).
    """
    if not parts.side_network:
        return None
    return {"pixels": parts.side_pixels} | ({"candidate": 1, "from_seg": True} if by_name else {})


def _hyperparameters(run: Chosen) -> GRPOSettings:
    """Hyperparameters with the presets of mode, of what trains, and of the data."""
    args, captions, chosen = run.args, bool(run.captions), run.args.grpo
    if captions and chosen.augment:
        raise ValueError("--augment turns images, but captions may say where a region is; leave it out")
    of_true = run.trains_side and chosen.objective == "supervised"
    if args.adapters.side_network or of_true:
        chosen = filled(chosen, {"side_learning_rate": SIDE_LEARNING_RATE, "warmup_steps": WITH_VIEWS["warmup_steps"]})
    if chosen.objective in (TEACHER, DPO) or (of_true and not captions):
        chosen = of_masks(chosen, args.mode, args.small)
    of_data = OF_DATA["regions" if captions else "images"] | {"pathwise_weight": 1.0 if run.pathwise else 0.0}
    settings = filled(with_preset(chosen, args.mode, args.small, run.trains_side), of_data)
    return settings if captions else replace(settings, mask_to_caption_weight=0.0)


def _weights(rewards: RewardArgs, captions: bool, learned: bool) -> RewardWeights:
    """Weights of the rewards; by default 1 for what the data and the reward network allow."""
    weights = RewardWeights(
        1.0,
        _or(rewards.caption_weight, 1.0 if captions else 0.0),
        _or(rewards.loop2_caption_weight, 1.0 if captions and not learned else 0.0),
        _or(rewards.loop2_iou_weight, 0.0 if learned else 1.0),
        1.0 if learned else 0.0,
        rewards.confidence_weight,
    )
    for loop, name in (("loop1", "caption"), ("loop2", "loop2_caption")):
        if loop in rewards.judged_loops and not getattr(weights, name):
            raise ValueError(f"--{name}_weight is 0, but the judge compares captions in {loop}; give it a weight")
    return weights


def _check_unlabelled(args: PlanArgs) -> None:
    """Check that nothing needs the masks of unlabelled images."""
    if args.inputs.unlabelled_root is None:
        return
    rewards = args.rewards
    needed = ["--objective supervised"] if args.grpo.objective == "supervised" else []
    needed += ["--loop2_iou_weight"] if rewards.loop2_iou_weight else []
    needed += ["--preferred_by truth"] if (args.grpo.objective, args.grpo.preferred_by) == (DPO, "truth") else []
    needed += ["--loop2_mask_rewards"] if any(map(needs_truth, rewards.loop2_mask_rewards or ())) else []
    if needed:
        raise ValueError(f"--unlabelled_root has no masks, but {needed[0]} needs them; leave one of them out")
    without = args.grpo.objective == TEACHER or (rewards.loop2_iou_weight == 0 and bool(rewards.loop2_mask_rewards))
    if rewards.reward_net is None and not without:
        raise ValueError(
            "--unlabelled_root needs something that judges without masks: give --reward_net, --objective mean_teacher, "
            "or --loop2_iou_weight 0 with --loop2_mask_rewards; or leave it out"
        )


def check_together(args: PlanArgs, learned: bool) -> None:
    """Raise a ValueError for flags that exclude each other or do nothing, with any data; `learned`: by a network."""
    check_at_least(args, 0, "eval_steps")
    check_at_least(args, 1, "max_labelled")
    settings = with_preset(args.grpo, args.mode, args.small)
    alone = settings.pathwise_weight is None and not learned  # the preset needs the data only with a reward network
    check_settings(replace(settings, pathwise_weight=0.0) if alone else settings)
    _check_unlabelled(args)
    check_acts(Chosen(args, learned))
    if args.shuffle_rewards and args.grpo.pathwise_weight:
        raise ValueError("--shuffle_rewards cannot permute the gradient of --pathwise_weight; leave one of them out")
    if (weight := args.grpo.pathwise_weight) and not learned:
        raise ValueError(f"pathwise_weight is {weight}, but there is no reward network; give --reward_net")
    if args.grpo.num_train_epochs is not None and args.grpo.max_steps is not None:
        raise ValueError("--num_epochs and --max_steps both end the training; give one of them")
    objective = args.grpo.objective
    if args.rewards.judge_config(args.inputs.output_dir):
        _weights(args.rewards, True, learned)
    if objective == TEACHER and args.rewards.reward_net is not None:
        raise ValueError("--objective mean_teacher has no rewards, so --reward_net does nothing; leave it out")
    if objective == DPO and args.grpo.preferred_by == "learned" and not learned:
        raise ValueError("--preferred_by learned asks the reward network: give --reward_net, or --preferred_by truth")


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
