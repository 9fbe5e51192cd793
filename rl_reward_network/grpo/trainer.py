"""The trainer: transformers' loop with rollouts in place of batches, and GRPO's loss in place of the model's.

The Trainer provides steps, accumulation, schedules, data-parallel wrapping and resuming. Added here, in this order:
prompts, rollouts with rewards, the loss, metrics, and checkpoints that are complete (those of the Trainer hold only the
adapter and are not written atomically).
"""

import os
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from rl_reward_network.grpo.checkpoint import load_run_state, save_run_state
from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig
from rl_reward_network.grpo.logs import StepMetrics, summed_counts
from rl_reward_network.grpo.losses import (
    LoopWeights,
    LossParts,
    PathwiseReward,
    StepCounts,
    answer_loss,
    count_step,
    direct_mask_loss,
    gradient_norm,
    loop_losses,
    loss_metrics,
)
from rl_reward_network.grpo.mask_policies import MASK_POLICIES
from rl_reward_network.grpo.policy import GRPOPolicy
from rl_reward_network.grpo.prompts import CurriculumOrder, GRPOPrompt, prompt_order
from rl_reward_network.grpo.ranks import any_rank, first_message
from rl_reward_network.grpo.rewards import (
    MASK_IOU,
    ZERO_STD,
    AlikeRewards,
    LoopRollouts,
    Reward,
    advantage_statistics,
    check_weights,
    prompt_outcomes,
    reward_step,
    rollout_statistics,
)
from rl_reward_network.grpo.rollouts import RolloutGenerator, RolloutGroup
from rl_reward_network.grpo.trainable import mixed_precision
from rl_reward_network.models.ema import EMA, copied, swapped, trainable_tensors
from rl_reward_network.models.lora import lora_off
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.rewards.functions import CaptionJudge
from rl_reward_network.rewards.out_of_distribution import OODCheck
from rl_reward_network.run import clock

TILES = "max_dynamic_patch"  # a Qwen-VL has no tiles: its image tokens grow with the image


def fail_not_finite(trainer: Any, problem: str) -> NoReturn:
    """Raise a ValueError for a loss or gradient that is not finite.

    Args:
        trainer: Sa2VAGRPOTrainer.
        problem: the first part of the message, such as "a gradient is not finite".
    """
    checkpoint = get_last_checkpoint(str(trainer.args.output_dir))
    state = f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
    raise ValueError(f"{_step(trainer)}: {problem}; training stops, {state}; lower learning_rate, or raise beta")


def resume_hint(trainer: Any) -> str:
    """A sentence on the possible use of the last checkpoint."""
    checkpoint = get_last_checkpoint(str(trainer.args.output_dir))
    return f"--resume goes on from {checkpoint}" if checkpoint else "there is no checkpoint yet"


@contextmanager
def hint_to_resume(trainer: Any) -> Iterator[None]:
    """Add step and resume hint to a ValueError of the block, such as a judge that cannot be reached any more."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{_step(trainer)}: {error}; {resume_hint(trainer)}") from error


@contextmanager
def hint_out_of_memory(trainer: Any, phase: str, remedy: str) -> Iterator[None]:
    """Turn an out-of-memory error of the block into a ValueError that names the phase and the settings to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if TILES in remedy and trainer.sa2va.config.family.body == "qwen_vl":
            remedy = remedy.replace(TILES, "the size of the images")
        raise ValueError(
            f"{_step(trainer)}: out of GPU memory in {phase}; lower {remedy}, or turn on gradient_checkpointing"
        ) from error


def _step(trainer: Any) -> str:
    return f"step {trainer.state.global_step + 1}"


class StepCallback(TrainerCallback):
    """Check the gradients before each optimisation step; after it, update partner and loop weights, and may stop.

    Args:
        trainer: Sa2VAGRPOTrainer.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.trainer.start_time = time.monotonic()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Refuse a gradient that is not finite, which a finite loss can have; record the tensors with a gradient."""
        tensors = trainable_tensors(self.trainer.sa2va)
        gradients = {name: p.grad for name, p in tensors.items() if p.grad is not None}
        norms = torch.stack(torch._foreach_norm(list(gradients.values()))) if gradients else torch.zeros(0)
        if not norms.isfinite().all():
            fail_not_finite(self.trainer, "a gradient is not finite")
        not_zero = (norms > 0).tolist()
        self.trainer.tensors_with_gradient.update(name for name, flag in zip(gradients, not_zero, strict=True) if flag)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update loop weights and partner, and stop when the time is over or the judge has failed."""
        self._update_loop_weights()
        rollouts_used_up = state.global_step % args.num_iterations == 0  # a checkpoint holds no half-used rollouts
        if rollouts_used_up:
            self._stop_without_judge(control)
        if self.trainer.ema is not None:
            self.trainer.ema.update(self.trainer.sa2va)
        if args.max_minutes is not None:
            late = any_rank(self.trainer.accelerator, self.trainer.seconds > 60 * args.max_minutes)
            if late and rollouts_used_up:
                self.trainer.ended = control.should_training_stop = control.should_save = True
        # A resumed run begins a line of its own, so the whole one must do so there, too; and no step is left out.
        control.should_log |= control.should_save or state.global_step >= state.max_steps

    def _stop_without_judge(self, control: Any) -> None:
        """Stop, with a checkpoint, if the judge of some process fails for good; METEOR alone is another objective."""
        trainer = self.trainer
        if trainer.judge is not None:
            trainer.judge_failure = first_message(trainer.accelerator, trainer.judge.failing())
            if trainer.judge_failure:
                control.should_training_stop = control.should_save = True

    def _update_loop_weights(self) -> None:
        """Update the loop weights with the gradient norms of this step, if they were measured: means over processes."""
        trainer, norms = self.trainer, self.trainer.gradient_norms
        if norms:
            means = torch.tensor([sum(values) / len(values) for values in norms.values()], device=trainer.args.device)
            means = trainer.accelerator.reduce(means, "mean").tolist()
            trainer.loop_weights.update(dict(zip(norms, means, strict=True)))
            for loop, norm in zip(norms, means, strict=True):
                trainer.metrics.record({f"{loop}/gradient_norm": norm, f"{loop}/weight": trainer.loop_weights[loop]})
            norms.clear()


SMALLER_ROLLOUTS = "batch_size, num_generations, num_mask_generations or max_dynamic_patch"
SMALLER_LOSS = "batch_size, num_generations or max_dynamic_patch"


class Sa2VAGRPOTrainer(Trainer):
    """GRPO in two loops.

    Args:
        model: Sa2VA with LoRA layers, trainable tensors in float32 (`prepare_model`).
        processor: of the model.
        args: settings.
        prompts: of the training split.
        rewards: loop -> name -> Reward.
        pathwise: the reward network's score with gradient, needed if `pathwise_weight` is not 0.
        shuffle_rewards: control experiment: rewards are permuted at random, so that nothing can be learned from them.

    Attributes set from outside, all optional:
        judge: the LLM judge that scores captions; its counts are logged, and the run stops when it fails for good.
        ood_check: how many unlabelled images were left out.
        validation: `ValidationCallback`, whose state goes into checkpoints.
    """

    args: Sa2VAGRPOConfig

    def __init__(
        self,
        model: Any,
        processor: Sa2VAProcessor,
        args: Sa2VAGRPOConfig,
        prompts: Sequence[GRPOPrompt],
        rewards: Mapping[str, Mapping[str, Reward]],
        pathwise: PathwiseReward | None = None,
        shuffle_rewards: bool = False,
    ) -> None:
        check_supported(args, pathwise)
        pad_id = processor.tokenizer.pad_token_id or 0
        mask_policy, never_sampled_ids = MASK_POLICIES[args.mask_policy], processor.never_sampled_ids
        policy = GRPOPolicy(model, mask_policy, args.temperature, never_sampled_ids, pad_id, bool(args.entropy_coef))
        if args.objective == "grpo":
            check_weights(rewards, args)
        order = prompt_order(len(prompts), args)  # refuses too few prompts before the Trainer makes the run's folder
        super().__init__(policy, args, data_collator=list, train_dataset=prompts)  # type: ignore[arg-type]
        self.loss_is_scaled_for_ga = True  # by `compute_loss` itself
        self.sa2va, self.prompts, self.pathwise, self.order = model, prompts, pathwise, order
        self.rollout_generator = RolloutGenerator(model, processor, args, rewards, shuffle_rewards)
        self.reset_reference()
        self.judge: CaptionJudge | None = None
        self.ood_check: OODCheck | None = None
        self.validation: Any = None
        self.loop_weights = LoopWeights(
            {"loop1": args.mask_to_caption_weight, "loop2": args.caption_to_mask_weight}, args.adaptive_loop_weights
        )
        self._init_state()
        self.add_callback(StepCallback(self))

    def _init_state(self) -> None:
        """State of the run besides weights and optimiser."""
        # Rollouts in use, and their results for logs and curriculum.
        self.buffer: list[list[RolloutGroup]] = []
        self.last_rollouts: dict[str, LoopRollouts] = {}
        self.prompt_outcomes: list[tuple[int, float, bool]] = []  # of the rollouts of this step
        self.prompt_indices = {id(prompt): index for index, prompt in enumerate(self.prompts)}
        # Measurements.
        self.metrics = StepMetrics(self.args.world_size)
        self.gradient_norms: dict[str, list[float]] = defaultdict(list)  # of the micro-batches of this step, by loop
        self.tensors_with_gradient: set[str] = set()  # a gradient other than 0 at some step
        # Whether the rewards of some group differed, or the loss needs no rewards.
        self.any_spread = self.args.objective == "supervised" or bool(self.args.pathwise_weight)
        rewards, weights = self.rollout_generator.rewards, self.loop_weights.configured
        loops = [loop for loop, terms in rewards.items() if weights[loop] and any(t.weight for t in terms.values())]
        self.alike_rewards = AlikeRewards(loops)
        # End of the run.
        self.ended = False  # before its last step, by the time limit or by the stop rule of validation
        self.judge_failure: str | None = None  # the reason, if the run stopped for lack of a judge
        self.start_time, self.earlier_seconds = time.monotonic(), 0.0
        self.phases: dict[str, float] = {}  # seconds of this process, since it began or resumed the run

    def reset_reference(self) -> None:
        """Make the current weights the reference and the partner's start; call again after freezing more tensors."""
        self.reference = {name: tensor for name, tensor in copied(self.sa2va).items() if "lora_" not in name}
        captioned = any(prompt.caption for prompt in self.prompts)  # else there is nothing to draw or to describe
        has_partner = self.args.ema_decay and self.args.objective == "grpo" and captioned  # supervised: needs none
        self.ema = EMA(self.sa2va, self.args.ema_decay) if has_partner else None
        self.rollout_generator.ema = self.ema

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """The configured schedule, with a warm-up that begins above 0: a run of one step must learn, too."""
        schedule = super().create_scheduler(num_training_steps, optimizer)
        warmup = self.args.get_warmup_steps(num_training_steps)
        if warmup and isinstance(schedule, LambdaLR):
            after = schedule.lr_lambdas[0]
            self.lr_scheduler = LambdaLR(
                schedule.optimizer, lambda step: (step + 1) / (warmup + 1) if step < warmup else after(step)
            )
        return self.lr_scheduler  # type: ignore[return-value]

    @property
    def policy(self) -> GRPOPolicy:
        """The policy without data-parallel wrappers."""
        policy = self.accelerator.unwrap_model(self.model)
        assert isinstance(policy, GRPOPolicy)
        return policy

    @property
    def planned_steps(self) -> int:
        """Optimisation steps of the whole run, unless it ends earlier."""
        return self.args.planned_steps(self.order.rollouts_per_epoch)

    @property
    def needs_masks(self) -> bool:
        """Whether a loss depends on the mask of the mean action."""
        supervised = self.args.objective == "supervised" and self.args.caption_to_mask_weight
        return bool(self.args.pathwise_weight or supervised)

    @property
    def samples_masks(self) -> bool:
        """Whether a loss, be it the KL alone, depends on the parameters of the mask policy."""
        held = self.args.pathwise_weight and self.args.mask_beta
        return self.args.objective == "grpo" and bool(self.args.caption_to_mask_weight or held)

    @property
    def seconds(self) -> float:
        """Training time so far, including the time before an interruption."""
        return self.earlier_seconds + time.monotonic() - self.start_time

    # ---- prompts ------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[int]:
        """One number for each batch of an epoch, for the Trainer's count of steps; `order` selects the prompts.

        A sampler behind accelerate's wrappers has no epoch when a run is resumed inside one.
        """
        steps = self.order.rollouts_per_epoch * self.args.num_iterations
        return DataLoader(range(steps * self.args.gradient_accumulation_steps), batch_size=1)  # type: ignore[arg-type]

    def _prompt_batches(self) -> list[tuple[int, list[GRPOPrompt]]]:
        """The batches of this process in the current rollout, each with its number among those of all processes.

        Batches alternate between processes: two processes with one batch each get the batches of one with two.
        """
        args, size = self.args, self.args.prompts_per_step
        indices = self.order.indices(self.state.global_step // args.num_iterations)
        numbers = range(args.process_index, args.gradient_accumulation_steps * args.world_size, args.world_size)
        return [(n, [self.prompts[i] for i in indices[n * size : (n + 1) * size]]) for n in numbers]

    # ---- rollouts -----------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[list[RolloutGroup]], Tensor]:
        """Rollouts of all micro-batches of one optimisation step, generated anew every `num_iterations` steps.

        Returns:
            Groups by micro-batch, and `StepCounts` of a process, on average, as a tensor.
        """
        for _ in range(num_batches):
            next(epoch_iterator)
        if self.state.global_step % self.args.num_iterations == 0 or not self.buffer:
            self.buffer.clear()  # in place, for the Trainer holds this list, too: image features of both are too much
            self.buffer = self._generate_step()
        counts = torch.tensor(count_step(self.buffer), device=device)
        return self.buffer, self.accelerator.reduce(counts, "sum") / self.args.world_size

    def _generate_step(self) -> list[list[RolloutGroup]]:
        batches = self._prompt_batches()
        with (
            clock(self.phases, "rollouts"),
            hint_out_of_memory(self, "rollouts", SMALLER_ROLLOUTS),
            hint_to_resume(self),
        ):
            if self.args.objective == "supervised":
                return [self.groups_from_references(prompts) for _, prompts in batches]
            step = [self._generate_and_score(prompts, number) for number, prompts in batches]
            reward_step(step, self.rollout_generator.rewards, self.args, self.accelerator)
        for (_, prompts), (_, rollouts) in zip(batches, step, strict=True):
            self._record_advantages(prompts, rollouts)
        self._update_spread(len(step))
        self._update_curriculum()
        self.alike_rewards.end_step(self.accelerator, self.state.global_step, self.args.num_iterations)
        return [groups for groups, _ in step]

    def _generate_and_score(
        self, prompts: Sequence[GRPOPrompt], number: int
    ) -> tuple[list[RolloutGroup], dict[str, LoopRollouts]]:
        """Groups of one micro-batch with the reference's outputs, and their rollouts with terms."""
        seed = (self.args.seed, self.state.global_step, number)
        with mixed_precision(self.sa2va):
            groups, rollouts = self.rollout_generator.generate_and_score(prompts, seed)
        self._record_rollouts(groups, rollouts)
        if self.args.beta or self.args.mask_beta:
            with torch.no_grad(), self.reference_weights(), mixed_precision(self.sa2va):
                for group, output in zip(groups, self.policy(groups)[0], strict=True):
                    group.ref_output = output.detached()
        return groups, rollouts

    def groups_from_references(self, prompts: Sequence[GRPOPrompt]) -> list[RolloutGroup]:
        """Groups that take part in every enabled loop, with the reference answers in place of rollouts."""
        with mixed_precision(self.sa2va):
            return self.rollout_generator.groups_from_references(prompts)

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """The model as it was before training: LoRA off, and copies of all other trainable tensors."""
        with swapped(self.sa2va, self.reference), lora_off(self.sa2va):
            yield

    def _record_rollouts(self, groups: Sequence[RolloutGroup], rollouts: dict[str, LoopRollouts]) -> None:
        for loop in self.last_rollouts.values():
            loop.columns.clear()  # the pixels of all micro-batches of a step would be too much
        self.last_rollouts = rollouts
        self.metrics.record(rollout_statistics(groups, rollouts))
        if "loop2" in rollouts:
            self.metrics.record({"loop2/sigma": self.rollout_generator.spread_controller.spread})

    def _record_advantages(self, prompts: Sequence[GRPOPrompt], rollouts: Mapping[str, LoopRollouts]) -> None:
        self.metrics.record(advantage_statistics(rollouts))
        if self.args.curriculum:
            self.prompt_outcomes += prompt_outcomes([self.prompt_indices[id(prompt)] for prompt in prompts], rollouts)
        self.any_spread |= any(
            loop.advantages is not None and loop.advantages.spread.any() for loop in rollouts.values()
        )
        self.alike_rewards.note(rollouts)

    def _update_spread(self, micro_batches: int) -> None:
        """Widen or narrow the mask policy by the means over all processes, so that it is equal on all."""
        if MASK_IOU in self.metrics.values:
            means = torch.tensor(
                self.metrics.mean_of_last((MASK_IOU, ZERO_STD), micro_batches), device=self.args.device
            )
            self.rollout_generator.spread_controller.update(*self.accelerator.reduce(means, "mean").tolist())

    def _update_curriculum(self) -> None:
        """Pass the rewards of the prompts of this step, gathered from all processes, to the curriculum."""
        if isinstance(self.order, CurriculumOrder):
            self.order.update(sorted(gather_object(self.prompt_outcomes)))
            self.prompt_outcomes = []

    # ---- loss ---------------------------------------------------------------------------------------------------

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward pass of one micro-batch."""
        with hint_out_of_memory(self, "the loss", SMALLER_LOSS):
            return super().training_step(*args, **kwargs)

    def compute_loss(  # type: ignore[override]
        self, model: nn.Module, inputs: list[RolloutGroup], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The weighted loss of both loops over one micro-batch, scaled for accumulation.

        Raises:
            ValueError: it is not finite; names the step.
        """
        outputs, loss = model(inputs, self.needs_masks)  # the loss begins as a zero that depends on all tensors
        pairs = list(zip(inputs, outputs, strict=True))
        steps = self.current_gradient_accumulation_steps
        counts = StepCounts(*count_step([inputs]) if num_items_in_batch is None else (num_items_in_batch / steps))
        losses = loop_losses(pairs, self.args, self.policy.mask_policy, counts)
        rewarded_loops = [
            loop for loop, weight in self.loop_weights.configured.items() if weight and self.args.objective == "grpo"
        ]
        self.metrics.record(loss_metrics(losses, rewarded_loops))
        self._measure_gradients(losses)
        for loop, parts in losses.items():
            loss = loss + (self.loop_weights[loop] * parts.rewarded + parts.kl_loss) / steps
        mask_loss, values = direct_mask_loss(pairs, self.args, counts, self.pathwise)
        loss = loss + mask_loss / steps
        if self.args.answer_weight and (answers := answer_loss(pairs, counts.masks)) is not None:
            loss = loss + self.args.answer_weight * answers / steps
            values["loss/answer"] = float(answers.detach())
        # Curves are means over micro-batches, so the scaling for accumulation is undone.
        self.metrics.record({**values, "total_loss": float(loss.detach()) * steps})
        if not torch.isfinite(loss):
            fail_not_finite(self, f"the loss is {float(loss.detach())}")
        if self.args.num_iterations > 1:
            for group, output in pairs:
                group.old_output = group.old_output or output.detached()
        return loss

    def _measure_gradients(self, losses: Mapping[str, LossParts]) -> None:
        """Record the gradient norms of both loops for `StepCallback`, in the steps in which the loop weights change."""
        if self.loop_weights.measures_at(self.state.global_step):
            lora = [p for name, p in trainable_tensors(self.sa2va).items() if "lora_" in name]
            for loop in self.loop_weights.configured:
                norm = gradient_norm(losses[loop].rewarded, lora) if loop in losses else torch.zeros(())
                self.gradient_norms[loop].append(float(norm))

    # ---- logs and checkpoints -----------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the means of everything recorded since the last call."""
        logs.pop("loss", None)
        logs |= self.metrics.means()
        if self.judge is not None:  # each process has a judge
            counts = summed_counts(self.judge.counts, self.args.world_size)
            logs |= {f"judge/{name}": count for name, count in counts.items()}
        if logs.get("loop1/frac_truncated") == 1 and self.args.should_log:
            warnings.warn(
                f"every caption was cut off at max_completion_length {self.args.max_completion_length} and does not "
                "count, so loop 1 learns nothing; raise it",
                stacklevel=2,
            )
        if self.ema is not None:
            logs["ema_distance"], logs["ema_decay"] = self.ema.distance(self.sa2va), self.ema.current_decay
        self.metrics.clear()
        super().log(logs, start_time)

    def log_now(self, values: Mapping[str, float]) -> None:
        """A line of its own, of this very step; the values recorded for the next line stay."""
        due = self.control.should_log
        super().log(dict(values))
        self.control.should_log = due  # the Trainer takes any line for the one that is due

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        save_run_state(self)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_run_state(self, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.is_deepspeed_enabled and checkpoint is not None:  # for which the Trainer loads no more than its files
            load_run_state(self, Path(checkpoint))
        super()._load_optimizer_and_scheduler(checkpoint)


def check_supported(args: Any, pathwise: PathwiseReward | None) -> None:
    """Check a `Sa2VAGRPOConfig`.

    Raises:
        ValueError: settings that this trainer cannot run.
    """
    if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1"):
        raise ValueError("FSDP is not supported in training; use torchrun alone (DDP), or --deepspeed (ZeRO-2)")
    plugin = args.deepspeed_plugin
    if plugin is not None and plugin.zero_stage > 2:
        raise ValueError(
            f"{args.deepspeed}: zero_optimization.stage is {plugin.zero_stage}, expected 1 or 2: ZeRO-3 splits the "
            "weights, which rollouts and the partner need whole"
        )
    if plugin is not None and args.bf16:
        raise ValueError(
            f"{args.deepspeed}: DeepSpeed would round trained tensors to bfloat16; give --dtype float32, or use "
            "torchrun alone (DDP), which keeps them in float32"
        )
    if args.pathwise_weight and pathwise is None:
        raise ValueError(
            f"pathwise_weight is {args.pathwise_weight}, but there is no reward network; give --reward_net"
        )
