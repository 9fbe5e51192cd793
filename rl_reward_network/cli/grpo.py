"""Fine-tune Sa2VA's LoRA weights by GRPO: mask -> caption -> mask', and caption -> mask -> caption'.

    sa2va-rl grpo quick --model_path MODEL --data_root DATA
    torchrun --nproc_per_node 8 scripts/train_sa2va_rl.py --model_path MODEL --dataset_name DATA --output_dir OUT

Loop 1 pays a caption by the mask that a moving average of the model draws from it; loop 2 pays a mask by the caption
that the same partner gives it. Data are captioned regions (Grasp-Any-Region or describe-anything), or annotated images
with a reward network (--reward_net), which needs no labels. With --resume the newest run of these settings goes on.
"""

import os
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from rl_reward_network.cli.grpo_flags import GRPOArgs, RewardArgs
from rl_reward_network.grpo.inputs import GRPOWorld, GRPOWorldConfig, changed, check_config, open_grpo_world
from rl_reward_network.grpo.stage import (
    FINAL,
    KIND,
    GRPOPlan,
    RewardWeights,
    find_grpo_run,
    run_grpo_stage,
    wanted_settings,
)
from rl_reward_network.grpo.startup import meanings
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.checkpoint_sa2va import DEFAULT_MODEL
from rl_reward_network.reward_training.stage import check_no_leak
from rl_reward_network.rewards.judge.config import JudgeConfig
from rl_reward_network.rewards.judge.judge import Judge
from rl_reward_network.runs.folder import new_run_folder
from rl_reward_network.runs.resume import nothing_to_resume, run_line

NANO = {
    "learning_rate": 1e-3,
    "batch_size": 64,
    "lora_r": 16,
    "lora_alpha": 32,
}  # the best of what docs/log.md compares
REAL = {"learning_rate": 1e-5, "batch_size": 8, "lora_r": 128, "lora_alpha": 256}
STEPS = {"quick": 140, "full": 400}  # of nano on two CPU cores: 5 and 14 minutes
WATCH = {"quick": 35, "full": 100}  # steps between looks at validation items
JUDGE_FLAGS = (
    "llm_judge_base_url",
    "llm_judge_model",
    "llm_judge_timeout",
    "llm_judge_retries",
    "llm_judge_concurrency",
    "llm_judge_cache",
)
OF_ROLLOUTS = (  # flags that supervised training has no use for
    *("kl_coef", "entropy_coef", "temperature", "num_mask_generations", "mask_policy"),
    *("ema_decay", "no_ema", "scale_rewards", "multi_objective_aggregation"),
)
EPOCHS = {"quick": 1.0, "full": 3.0}


@dataclass(frozen=True)
class Args:
    """Fine-tune Sa2VA's LoRA weights by GRPO in two loops."""

    mode: tyro.conf.Positional[Literal["quick", "full"]] = "full"
    """quick: minutes on two CPU cores with the embedded model, else one epoch. full: 400 steps, else three epochs."""
    world: Annotated[GRPOWorldConfig, tyro.conf.arg(name="")] = field(default_factory=GRPOWorldConfig)
    grpo: Annotated[GRPOArgs, tyro.conf.arg(name="")] = field(default_factory=GRPOArgs)
    rewards: Annotated[RewardArgs, tyro.conf.arg(name="")] = field(default_factory=RewardArgs)
    objective: Literal["grpo", "supervised"] = "grpo"
    """supervised: learn the reference captions and masks instead, the comparison that GRPO must stand."""
    shuffle_rewards: bool = False
    """The control: rewards are dealt out at random, so nothing can be gained."""
    wandb: bool = False
    """Send what TensorBoard shows, sample images and captions included, to Weights & Biases as well (pip install -e
    '.[tracking]'); nothing is sent otherwise."""
    run_folder: Path | None = None
    """Folder of this run; without it <output_dir>/sa2va_grpo_<time>."""
    resume: bool = False
    """Go on with the newest run of these settings, or with --run_folder."""


def check(args: Args) -> None:
    """Raise a ValueError for what can be refused before anything is read."""
    check_config(args.world)
    if args.wandb and find_spec("wandb") is None:
        raise ValueError("--wandb: the package is not installed; pip install -e '.[tracking]', or leave the flag out")


def main(args: Args) -> None:
    """Open the data, train, say where the model is."""
    check(args)
    world = open_grpo_world(args.world)
    network = _reward_network(args.rewards.reward_net, world)
    plan = make_plan(args, world, network)
    judge = _judge(args.rewards, args.world.output_dir)
    if judge is not None:
        plan = replace(plan, judge=_judge_facts(args.rewards, judge.client.config.model))
    found = _to_resume(args, world, plan) if args.resume else None
    folder = found or args.run_folder or one_run_folder(args.world.output_dir, args.world.device == "cpu")
    if os.environ.get("RANK", "0") == "0":
        told = [run_line(folder, found is not None), f"data: {world.seen}", *meanings(args.grpo, plan.settings)]
        print("\n".join(told))
    if found and (found / FINAL).exists():
        print("nothing to resume: this run is finished")
    else:
        run_grpo_stage(world, plan, folder, found is not None, judge, network, args.wandb)
    if os.environ.get("RANK", "0") == "0":
        print(f"\nfine-tuned model: {folder / FINAL}")


def one_run_folder(output_dir: Path, cpu: bool) -> Path:
    """A new folder; the same in all processes that torchrun started."""
    named = [str(new_run_folder(output_dir, KIND))]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        PartialState(cpu=cpu, timeout=timedelta(minutes=30))  # one process may wait so long for a judge
        broadcast_object_list(named)
    return Path(named[0])


def check_together(args: Args, world: GRPOWorld, network: RewardNetwork | None) -> None:
    """Raise a ValueError for flags that exclude each other, or that nothing would look at."""
    grpo, rewards = args.grpo, args.rewards
    if not _judged_loops(rewards) and (named := changed(rewards, *JUDGE_FLAGS)):
        raise ValueError(f"{named[0]} does nothing without --use_llm_judge or --use_llm_judge_loop2; give one of them")
    for flag, weight in (
        ("use_llm_judge", "mask_to_caption_weight"),
        ("use_llm_judge_loop2", "caption_to_mask_weight"),
    ):
        if getattr(rewards, flag) and not getattr(grpo, weight):
            raise ValueError(f"--{flag} does nothing in a loop that --{weight} 0 leaves out; leave one of them out")
    if world.kind == "images":
        paid_by_labels = rewards.loop2_iou_weight is not None or rewards.loop2_mask_rewards
        if network is None and not paid_by_labels and args.objective == "grpo":
            raise ValueError(
                "annotated images have no captions to close a loop: give --reward_net or --loop2_iou_weight"
            )
        if _judged_loops(rewards) or rewards.caption_weight or rewards.loop2_caption_weight:
            raise ValueError("annotated images have no captions: leave out --use_llm_judge and the caption weights")
        if named := changed(grpo, "mask_to_caption_weight") + changed(rewards, "iou_weight", "mask_rewards"):
            raise ValueError(f"annotated images have no captions, so no loop 1: leave out {named[0]}")
    paid = replace(rewards, reward_net=None) != RewardArgs()
    if args.objective == "supervised" and (args.shuffle_rewards or paid):
        raise ValueError("--objective supervised pays no rewards: leave out what shuffles, judges or weighs them")
    if args.objective == "supervised" and (named := changed(grpo, *OF_ROLLOUTS)):
        raise ValueError(f"--objective supervised samples nothing, so {named[0]} does nothing; leave it out")
    if args.shuffle_rewards and rewards.pathwise_weight:
        raise ValueError("--shuffle_rewards cannot deal out the gradient of --pathwise_weight; leave one of them out")
    if (named := changed(grpo, "clip_range", "epsilon_high")) and not grpo.mask_to_caption_weight:
        raise ValueError(f"{named[0]} clips words, and --mask_to_caption_weight 0 leaves their loop out; leave it out")
    if grpo.num_iterations == 1 and (named := changed(grpo, "clip_range", "epsilon_high")):
        raise ValueError(
            f"{named[0]} does nothing with --num_iterations 1: the ratio it clips is 1 on fresh rollouts; leave it "
            "out, or raise --num_iterations"
        )
    if grpo.no_ema and grpo.ema_decay != GRPOArgs.ema_decay:
        raise ValueError(f"--no_ema has no average to decay; leave it out, or --ema_decay {grpo.ema_decay}")
    if grpo.num_epochs is not None and grpo.max_steps is not None:
        raise ValueError("--num_epochs and --max_steps both say when to stop; give one of them")


def make_plan(args: Args, world: GRPOWorld, network: RewardNetwork | None) -> GRPOPlan:
    """The mode's settings with what the user changed.

    Raises:
        ValueError: settings that do not go together.
    """
    embedded = args.world.model_path == DEFAULT_MODEL
    own: dict[str, Any] = NANO if embedded else REAL
    grpo, rewards = args.grpo, args.rewards
    check_together(args, world, network)
    captions = world.kind == "regions"
    follows = network is not None and not captions and args.objective == "grpo" and not args.shuffle_rewards
    weights = RewardWeights(
        rewards.iou_weight,
        _or(rewards.caption_weight, 1.0 if captions else 0.0),
        _or(rewards.loop2_caption_weight, 1.0 if captions and network is None else 0.0),
        _or(rewards.loop2_iou_weight, 1.0 if network is None else 0.0),
        _or(rewards.learned_weight, 1.0 if network is not None else 0.0),
        rewards.confidence_weight,
    )
    for loop, weight in (("loop1", weights.caption), ("loop2", weights.loop2_caption)):
        if loop in _judged_loops(rewards) and not weight:
            name = "caption_weight" if loop == "loop1" else "loop2_caption_weight"
            raise ValueError(f"the judge would pay nothing in {loop}: --{name} is 0 here; give it a weight")
    mask_rewards = {"loop1": rewards.mask_rewards, "loop2": rewards.loop2_mask_rewards}
    r = _or(grpo.lora_r, own["lora_r"])
    steps = _or(grpo.max_steps, STEPS[args.mode] if embedded and grpo.num_epochs is None else -1)
    settings = {
        "objective": args.objective,
        "per_device_train_batch_size": _or(grpo.batch_size, own["batch_size"]),
        "num_generations": grpo.num_generations,
        "num_mask_generations": grpo.num_mask_generations,
        "gradient_accumulation_steps": grpo.gradient_accumulation_steps,
        "learning_rate": _or(grpo.learning_rate, own["learning_rate"]),
        "num_train_epochs": _or(grpo.num_epochs, EPOCHS[args.mode]),
        "max_steps": steps,
        "max_minutes": grpo.max_minutes,
        "lr_scheduler_type": "linear",
        "warmup_steps": grpo.warmup_steps,
        "max_grad_norm": grpo.max_grad_norm,
        "beta": grpo.kl_coef,
        "mask_beta": grpo.kl_coef,
        "epsilon": grpo.clip_range,
        "epsilon_high": grpo.epsilon_high,
        "num_iterations": grpo.num_iterations,
        "mask_to_caption_weight": grpo.mask_to_caption_weight if captions else 0.0,
        "caption_to_mask_weight": grpo.caption_to_mask_weight,
        "loss_type": grpo.loss_type,
        "importance_sampling_level": grpo.importance_sampling_level,
        "scale_rewards": grpo.scale_rewards,
        "multi_objective_aggregation": grpo.multi_objective_aggregation,
        "entropy_coef": grpo.entropy_coef,
        "temperature": grpo.temperature,
        "max_completion_length": _or(grpo.max_completion_length, 24 if embedded else 128),
        "mask_policy": _or(grpo.mask_policy, "bernoulli" if embedded and captions else "gaussian"),
        "curriculum": grpo.curriculum,
        "adaptive_loop_weights": grpo.adaptive_loop_weights,
        "ema_decay": 0.0 if grpo.no_ema else grpo.ema_decay,
        "pathwise_weight": _or(rewards.pathwise_weight, 1.0 if follows else 0.0),
        "activation_checkpointing": grpo.gradient_checkpointing,
        "logging_steps": 1 if args.mode == "quick" else 5,
        "save_strategy": "steps" if grpo.deepspeed is None else "no",
        "save_steps": grpo.save_steps,
        "deepspeed": None if grpo.deepspeed is None else str(grpo.deepspeed),
    }
    return GRPOPlan(
        args.mode,
        weights,
        r,
        _or(grpo.lora_alpha, 2 * r),
        grpo.lora_dropout,
        settings,
        _judge_facts(rewards, rewards.llm_judge_model) if _judged_loops(rewards) else None,
        None if network is None else network.fingerprint,
        args.shuffle_rewards,
        WATCH[args.mode] if grpo.watch_every is None else grpo.watch_every,
        {name: named for name, named in mask_rewards.items() if named} or None,
    )


def _judged_loops(rewards: RewardArgs) -> list[str]:
    """The loops whose captions a language model compares."""
    asked = {"loop1": rewards.use_llm_judge, "loop2": rewards.use_llm_judge_loop2}
    return [loop for loop, wanted in asked.items() if wanted]


def _judge_facts(rewards: RewardArgs, model: str | None) -> dict[str, Any]:
    """Which judge pays for what; the key is no part of it."""
    return {"base_url": rewards.llm_judge_base_url, "model": model, "loops": _judged_loops(rewards)}


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _reward_network(folder: Path | None, world: GRPOWorld) -> RewardNetwork | None:
    """The reward network that was named, if it has not seen the patients it is to judge."""
    if folder is None:
        return None
    network = RewardNetwork.from_pretrained(folder)
    check_no_leak(world.split, network, folder)
    return network


def _judge(rewards: RewardArgs, output_dir: Path) -> Judge | None:
    """The judge, asked once whether it is there."""
    if not (loops := _judged_loops(rewards)):
        return None
    kept = rewards.llm_judge_cache or output_dir / "llm_judge.sqlite"
    config = JudgeConfig(
        rewards.llm_judge_base_url,
        rewards.llm_judge_model,
        max_concurrency=rewards.llm_judge_concurrency,
        timeout_s=rewards.llm_judge_timeout,
        max_retries=rewards.llm_judge_retries,
        cache_path=None if kept == "off" else Path(kept),
    )
    judge = Judge(config)
    judge.check()
    if os.environ.get("RANK", "0") == "0":
        print(f"LLM judge: {judge.client.config.model} at {config.base_url}, in {' and '.join(loops)}; replies: {kept}")
    return judge


def _to_resume(args: Args, world: GRPOWorld, plan: GRPOPlan) -> Path:
    """The run that was named, or the newest of these settings.

    Raises:
        ValueError: there is none; names the runs there are.
    """
    if args.run_folder is None:
        if found := find_grpo_run(world, plan):
            return found
        raise nothing_to_resume(args.world.output_dir, KIND, wanted_settings(world, plan))
    if not (args.run_folder / "config.json").exists():
        raise ValueError(f"--resume: {args.run_folder} holds no run; leave --resume out to begin one there")
    return args.run_folder
