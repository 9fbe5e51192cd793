"""What a user chooses for a GRPO run, as flags or in Python, and the complete plan it gives.

Nothing here imports torch or transformers, so that `--help` is fast.
"""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from rl_reward_network.flags import Rare, changed, check_at_least, check_range
from rl_reward_network.grpo.effects import DPO, TEACHER, Chosen, check_acts
from rl_reward_network.grpo.settings import (
    LORA_R,
    MASK_LOSSES,
    GRPOPlan,
    GRPOSettings,
    Mode,
    RewardWeights,
    check_lora_dropout,
    check_settings,
    default_mask_policy,
    of_masks,
    with_preset,
    with_side_network,
)
from rl_reward_network.inputs.config import DEFAULT_REGIONS, RegionConfig, RunConfig
from rl_reward_network.models.default import is_small
from rl_reward_network.rewards.judge import JudgeConfig
from rl_reward_network.rewards.table import WeightedName, needs_truth

if TYPE_CHECKING:
    from rl_reward_network.grpo.inputs import GRPOInputs
    from rl_reward_network.models.reward_network import RewardNetwork

VALIDATION_STEPS = {"quick": 35, "full": 100}  # optimisation steps between validations


@dataclass(frozen=True)
class LoRAArgs:
    """LoRA on the language model."""

    lora_r: Rare[int | None] = None
    """Rank of LoRA: 16 on a model of the embedded one's size, else 128."""
    lora_alpha: Rare[int | None] = None
    """Scale of LoRA: twice the rank."""
    lora_dropout: Rare[float] = 0.0
    """Must be 0: dropout would change log-probabilities at random."""
    freeze_embeddings: Rare[bool] = False
    """Do not train the token embeddings and the head of a Qwen-VL, which its own recipe trains; saves many GiB."""

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        check_at_least(self, 1, "lora_r", "lora_alpha")
        check_lora_dropout(self.lora_dropout)


@dataclass(frozen=True)
class TrainablePartsArgs:
    """What may adapt beside the parts that Sa2VA's own fine-tuning trains."""

    side_network: bool = False
    """Add a side network, a small U-Net that refines masks at a finer resolution: for thin objects
    (docs/how-to/train-weights.md)."""
    side_pixels: Rare[int] = 512
    """Side in pixels of the square that the side network sees, and of its masks; a multiple of 64."""
    encoder: Rare[Literal["frozen", "lora", "full"]] = "frozen"
    """What trains of SAM 2's image encoder: nothing, LoRA on its blocks, or all of it. Its features are then computed
    anew in every step."""
    encoder_lora_r: Rare[int] = 16
    """Rank of LoRA on SAM 2's image encoder; its scale is twice the rank."""

    def __post_init__(self) -> None:
        """Refuse a size that does not fit, and one without a side network."""
        if self.side_pixels < 64 or self.side_pixels % 64:
            raise ValueError(f"side_pixels is {self.side_pixels}, expected a multiple of 64")
        check_at_least(self, 1, "encoder_lora_r")
        if self.encoder != "lora" and changed(self, "encoder_lora_r"):
            raise ValueError("--encoder_lora_r does nothing without --encoder lora; leave it out, or give both")
        if not self.side_network and changed(self, "side_pixels"):
            raise ValueError("--side_pixels does nothing without --side_network; leave it out, or give both")

    @property
    def side(self) -> dict[str, Any] | None:
        """Fields of `SideNetworkConfig` for the plan; None without a side network."""
        return {"pixels": self.side_pixels} if self.side_network else None

    @property
    def encoder_plan(self) -> dict[str, Any] | None:
        """As `GRPOPlan.encoder`."""
        plans = {"frozen": None, "full": {"train": "full"}, "lora": {"train": "lora", "lora_r": self.encoder_lora_r}}
        return plans[self.encoder]


@dataclass(frozen=True)
class RewardArgs:
    """Rewards: their weights, the reward network, the LLM judge."""

    reward_net: Path | None = None
    """Folder of a reward network (REWARD_NET); with it annotated images need no labels."""
    use_llm_judge: bool = False
    """Let a language model compare captions as well (loop 1)."""
    use_llm_judge_loop2: Rare[bool] = False
    """Let the judge compare captions in loop 2; without --use_llm_judge in loop 2 alone."""
    iou_weight: Rare[float] = 1.0
    """Loop 1: IoU of the mask drawn from the caption with the region."""
    caption_weight: Rare[float | None] = None
    """Loop 1: the caption against its reference: METEOR, or 0.25 METEOR + 0.75 judge with --use_llm_judge. 1, or 0
    without captions; at 0 captions drift into words that only the EMA teacher understands (docs/log.md)."""
    loop2_caption_weight: Rare[float | None] = None
    """Loop 2: the caption of the sampled mask against the reference: 1, or 0 without captions or with --reward_net."""
    loop2_iou_weight: Rare[float | None] = None
    """Loop 2: IoU of the sampled mask with the true one: 1, or 0 with --reward_net, which needs no labels."""
    mask_rewards: Rare[dict[WeightedName, float] | None] = None
    """Loop 1: more rewards of the mask drawn from the caption, as names and weights, such as: cldice 0.5; also
    functions of the Python file that SA2VA_RL_REWARDS names."""
    loop2_mask_rewards: Rare[dict[WeightedName, float] | None] = None
    """Loop 2: more rewards of the sampled mask, as --mask_rewards."""
    learned_weight: Rare[float | None] = None
    """Loop 2: the reward network's score of the sampled mask: 1 with --reward_net, else 0."""
    confidence_weight: Rare[float] = 0.0
    """Loop 2: how clear the edges of the sampled mask are."""
    llm_judge_base_url: Rare[str] = "http://127.0.0.1:8000/v1"
    """Address of an OpenAI-compatible server; the key is read from OPENAI_API_KEY."""
    llm_judge_model: Rare[str | None] = None
    """Model of the judge, by its name on the server; by default the only one that the server lists."""
    llm_judge_timeout: Rare[float] = JudgeConfig.timeout_s
    """Timeout of one attempt, in seconds."""
    llm_judge_retries: Rare[int] = JudgeConfig.max_retries
    """Attempts after the first."""
    llm_judge_concurrency: Rare[int] = JudgeConfig.max_concurrency
    """Maximum number of concurrent requests of each process."""
    llm_judge_cache: Rare[Literal["off"] | Path | None] = None
    """Folder of the judge's replies, for later runs: <output_dir>/llm_judge; off keeps none on disk."""

    def __post_init__(self) -> None:
        """Refuse weights below 0."""
        check_range(self, *(field.name for field in fields(self) if field.name.endswith(("_weight", "mask_rewards"))))

    @property
    def mask_rewards_by_loop(self) -> dict[str, dict[str, float]] | None:
        """Loop -> name -> weight; None without such rewards, as in the config.json of older versions."""
        by_loop = {"loop1": self.mask_rewards, "loop2": self.loop2_mask_rewards}
        return {loop: dict(weights) for loop, weights in by_loop.items() if weights} or None

    @property
    def judged_loops(self) -> list[str]:
        """The loops whose captions the LLM judge compares."""
        flags = {"loop1": self.use_llm_judge, "loop2": self.use_llm_judge_loop2}
        return [loop for loop, judged in flags.items() if judged]

    def judge_config(self, output_dir: Path) -> JudgeConfig | None:
        """The judge's settings; None without a judge.

        Raises:
            ValueError: a setting out of range.
        """
        if not self.judged_loops:
            return None
        cache = self.llm_judge_cache or output_dir / "llm_judge"
        return JudgeConfig(
            self.llm_judge_base_url,
            self.llm_judge_model,
            max_concurrency=self.llm_judge_concurrency,
            timeout_s=self.llm_judge_timeout,
            max_retries=self.llm_judge_retries,
            cache_path=None if cache == "off" else Path(cache),
        )

    def judge_facts(self, model: str | None) -> dict[str, Any] | None:
        """The judge as the run's config.json names it, without its key; None without a judge."""
        if not self.judged_loops:
            return None
        return {"base_url": self.llm_judge_base_url, "model": model, "loops": self.judged_loops}


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
    lora: Annotated[LoRAArgs, tyro.conf.arg(name="")] = field(default_factory=LoRAArgs)
    adapters: Annotated[TrainablePartsArgs, tyro.conf.arg(name="")] = field(default_factory=TrainablePartsArgs)
    rewards: Annotated[RewardArgs, tyro.conf.arg(name="")] = field(default_factory=RewardArgs)
    max_labelled: int | None = None
    """With --objective supervised or mean_teacher: use at most so many labelled images (regions), each with all of its
    phrases; those of the reward network's patients first, one per series before a second; a smaller number is a subset
    of a larger. A mean teacher uses the other images without their masks."""
    no_ema: Rare[bool] = False
    """Use the model itself as the EMA teacher, without a moving average (--ema_decay 0)."""
    eval_steps: Rare[int | None] = None
    """Steps between validations: quick 35, full 100, in a run of epochs at most a quarter of them; 0 never validates.
    With --reward_net also the stop rule: training ends when the score rises while Dice has been more than 0.02 below
    its peak in three validations."""
    shuffle_rewards: Rare[bool] = False
    """The control: rewards are permuted at random, so nothing can be gained."""

    @property
    def small(self) -> bool:
        """Whether the model is of the embedded one's size."""
        return is_small(self.inputs.model_path)


def make_plan(args: PlanArgs, inputs: "GRPOInputs", network: "RewardNetwork | None") -> GRPOPlan:
    """The preset of mode, model and data, with the user's changes.

    Raises:
        ValueError: settings that do not go together.
    """
    check_together(args, network is not None)
    several = len({prompt.name for prompt in inputs.prompts}) > 1
    validated = any(prompt.labelled for prompt in inputs.pick("val"))
    run = Chosen(args, network is not None, inputs.kind == "regions", several, validated)
    check_acts(run)
    labels = args.rewards.loop2_iou_weight is not None or args.rewards.loop2_mask_rewards
    if args.grpo.objective == "grpo" and not (run.captions or run.learned or labels):
        raise ValueError("annotated images have no captions to close a loop: give --reward_net or --loop2_iou_weight")
    if args.grpo.objective in (TEACHER, DPO) and (inputs.by_name or inputs.kind != "images"):
        raise ValueError(
            f"--objective {args.grpo.objective} is for annotated images with one question, but these data have "
            "captions or several classes; give --objective supervised"
        )
    if inputs.by_name and network is not None:
        raise ValueError(
            "--reward_net judges one kind of object, but these images are asked for several classes: give labels "
            "(--objective supervised, --loop2_iou_weight), or a data folder of that one phrase"
        )
    settings = _hyperparameters(run)
    check_settings(settings)
    _check_reached(run)
    r = _or(args.lora.lora_r, LORA_R["small" if args.small else "large"])
    return GRPOPlan(
        args.mode,
        _weights(args.rewards, inputs.kind == "regions", network is not None),
        r,
        _or(args.lora.lora_alpha, 2 * r),
        args.lora.lora_dropout,
        settings,
        args.rewards.judge_facts(args.rewards.llm_judge_model),
        None if network is None else network.fingerprint,
        args.shuffle_rewards,
        _or(args.eval_steps, VALIDATION_STEPS[args.mode]),
        args.rewards.mask_rewards_by_loop,
        args.max_labelled,
        args.lora.freeze_embeddings or None,
        args.adapters.side,
        args.adapters.encoder_plan,
        args.grpo.per_device_train_batch_size is not None or None,
    )


def _hyperparameters(run: Chosen) -> GRPOSettings:
    """Hyperparameters with the presets of mode, of what trains, and of the data."""
    args, captions, chosen = run.args, bool(run.captions), run.grpo
    if captions and chosen.augment:
        raise ValueError("--augment turns images, but captions may say where a region is; leave it out")
    of_true = run.trains_side and chosen.objective == "supervised"
    if args.adapters.side_network or of_true:
        chosen = with_side_network(chosen)
    if chosen.objective in (TEACHER, DPO) or (of_true and not captions):
        chosen = of_masks(chosen, args.mode, args.small)
    settings = with_preset(chosen, args.mode, args.small, run.trains_side)
    losses = MASK_LOSSES["regions" if captions else "images"]
    weights = {name: _or(getattr(settings, name), value) for name, value in losses.items()}
    return replace(
        settings,
        **weights,
        mask_to_caption_weight=settings.mask_to_caption_weight if captions else 0.0,
        mask_policy=settings.mask_policy or default_mask_policy(captions),
        pathwise_weight=_or(settings.pathwise_weight, 1.0 if run.pathwise else 0.0),
        ema_decay=0.0 if args.no_ema else settings.ema_decay,
    )


def _check_reached(run: Chosen) -> None:
    """Check that what is added gets a gradient."""
    adapters, loop2 = run.args.adapters, run.grpo.caption_to_mask_weight
    added = ["--side_network"] * adapters.side_network + ["--encoder"] * (adapters.encoder != "frozen")
    if added and not run.reaches_masks:
        why = "--mask_policy gaussian samples the [SEG] embedding, and its gradient ends there"
        raise ValueError(
            f"{added[0]} would not train, for {why if loop2 else '--caption_to_mask_weight is 0'}: give --objective "
            "supervised, --mask_policy bernoulli or, without --shuffle_rewards, --reward_net, whose gradient passes "
            "the masks"
        )


def _weights(rewards: RewardArgs, captions: bool, learned: bool) -> RewardWeights:
    """Weights of the rewards; by default 1 for what the data and the reward network allow.

    Raises:
        ValueError: the judge compares captions in a loop in which they have no weight.
    """
    weights = RewardWeights(
        rewards.iou_weight,
        _or(rewards.caption_weight, 1.0 if captions else 0.0),
        _or(rewards.loop2_caption_weight, 1.0 if captions and not learned else 0.0),
        _or(rewards.loop2_iou_weight, 0.0 if learned else 1.0),
        _or(rewards.learned_weight, 1.0 if learned else 0.0),
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
    """Check that no flags exclude each other, and that each has an effect, whatever the data are.

    Args:
        args: flags.
        learned: whether there is a reward network.

    Raises:
        ValueError: names the flags.
    """
    check_at_least(args, 0, "eval_steps")
    check_at_least(args, 1, "max_labelled")
    settings = with_preset(args.grpo, args.mode, args.small)
    alone = settings.pathwise_weight is None and not learned  # the preset needs the data only with a reward network
    check_settings(replace(settings, pathwise_weight=0.0) if alone else settings)
    _check_unlabelled(args)
    _check_asked(args, learned)
    check_acts(Chosen(args, learned))
    if args.shuffle_rewards and args.grpo.pathwise_weight:
        raise ValueError("--shuffle_rewards cannot permute the gradient of --pathwise_weight; leave one of them out")
    for name, weight in (("pathwise", args.grpo.pathwise_weight), ("learned", args.rewards.learned_weight)):
        if weight and not learned:
            raise ValueError(f"{name}_weight is {weight}, but there is no reward network; give --reward_net")
    if args.no_ema and changed(args.grpo, "ema_decay"):
        raise ValueError(f"--no_ema has no average for --ema_decay {args.grpo.ema_decay}; leave one of them out")
    if args.grpo.num_train_epochs is not None and args.grpo.max_steps is not None:
        raise ValueError("--num_train_epochs and --max_steps both end the training; give one of them")


def _check_asked(args: PlanArgs, learned: bool) -> None:
    """Check that the reward network, the judge and the teacher are there where they are asked, and nowhere else."""
    objective = args.grpo.objective
    if args.rewards.judge_config(args.inputs.output_dir) is not None:
        _weights(args.rewards, True, learned)
    if objective == TEACHER and args.no_ema:
        raise ValueError("--no_ema leaves --objective mean_teacher without its teacher; leave it out")
    if objective == TEACHER and args.rewards.reward_net is not None:
        raise ValueError("--objective mean_teacher has no rewards, so --reward_net does nothing; leave it out")
    if objective == DPO and args.grpo.preferred_by == "learned" and not learned:
        raise ValueError("--preferred_by learned asks the reward network: give --reward_net, or --preferred_by truth")


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
