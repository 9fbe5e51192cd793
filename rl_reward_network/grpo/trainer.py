"""The trainer: transformers' loop with rollouts in place of batches, and GRPO's loss in place of the model's.

The Trainer gives steps, accumulation, schedules, data-parallel wrapping and resuming; here are rollouts, rewards, loss,
the moving-average partner, and checkpoints that are whole (its own hold only the adapter and appear bit by bit).
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
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

from rl_reward_network.grpo.callbacks import AroundEachStep
from rl_reward_network.grpo.checkpoint import load_run_state, save_run_state
from rl_reward_network.grpo.config import Sa2VAGRPOConfig
from rl_reward_network.grpo.items import GRPOItem
from rl_reward_network.grpo.loss.loop_weights import LoopWeights, gradient_norm
from rl_reward_network.grpo.loss.losses import LossParts
from rl_reward_network.grpo.loss.mask_policies import MASK_POLICIES
from rl_reward_network.grpo.loss.mask_rewards import PathwiseReward, supervised_mask_losses
from rl_reward_network.grpo.loss.objective import Pairs, StepCounts, caption_loss, count_step, mask_loss
from rl_reward_network.grpo.loss.policy import Group, GRPOPolicy
from rl_reward_network.grpo.measure import mixed_precision
from rl_reward_network.grpo.rollouts.curriculum import CurriculumOrder, prompt_order
from rl_reward_network.grpo.rollouts.maker import RolloutMaker
from rl_reward_network.grpo.rollouts.rewards import Reward, Samples, check_paid, paid_of_prompts
from rl_reward_network.grpo.rollouts.statistics import ALIKE, EQUAL, rollout_statistics
from rl_reward_network.models.ema import EMA, copied, swapped, trainable_tensors
from rl_reward_network.models.lora import lora_off
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.rewards.functions import CaptionJudge

SMALLER_ROLLOUTS = "batch_size, num_generations, num_mask_generations or max_dynamic_patch"


class Sa2VAGRPOTrainer(Trainer):
    """GRPO in two loops.

    Args:
        model: Sa2VA with LoRA layers, what trains in float32 (`prepare_model`).
        processor: its processor.
        args: settings.
        items: prompts.
        rewards: loop -> name -> Reward.
        pathwise: the reward whose own gradient is followed, needed where `pathwise_weight` is not 0.
        shuffle_rewards: the control: rewards are dealt out at random, so that nothing can be learned from them.
    """

    args: Sa2VAGRPOConfig

    def __init__(
        self,
        model: Any,
        processor: Sa2VAProcessor,
        args: Sa2VAGRPOConfig,
        items: Sequence[GRPOItem],
        rewards: Mapping[str, Mapping[str, Reward]],
        pathwise: PathwiseReward | None = None,
        shuffle_rewards: bool = False,
    ) -> None:
        if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1"):
            raise ValueError("FSDP is not supported in training; use torchrun alone (DDP), or --deepspeed (ZeRO-2)")
        if args.pathwise_weight and pathwise is None:
            raise ValueError(
                f"pathwise_weight is {args.pathwise_weight}, but there is no reward network; give --reward_net"
            )
        policy = GRPOPolicy(
            model,
            MASK_POLICIES[args.mask_policy],
            args.temperature,
            processor.never_sampled_ids,
            processor.tokenizer.pad_token_id or 0,
        )
        if args.objective == "grpo":
            check_paid(rewards, args)
        order = prompt_order(len(items), args)  # refuses too few prompts now: the Trainer makes the run's folder
        super().__init__(policy, args, data_collator=list, train_dataset=items)  # type: ignore[arg-type]
        self.loss_is_scaled_for_ga = True  # by `compute_loss` itself
        self.sa2va, self.pathwise, self.order = model, pathwise, order
        self.maker = RolloutMaker(model, processor, args, rewards, shuffle_rewards)
        self.begin()
        self.last_samples: dict[str, Samples] = {}
        self.watch: Any = None  # `Watch`, where validation is watched
        self.judge: CaptionJudge | None = None  # the one that pays, where one does
        self.ended = False  # by the clock or by the look at validation, before its last step
        self.lost_judge: str | None = None  # why the run stopped for want of it
        self.buffer: list[list[Group]] = []
        self.places = {id(item): place for place, item in enumerate(items)}
        self.paid: list[tuple[int, float, bool]] = []  # of this rollout's prompts, for a curriculum
        self.gradient_norms: dict[str, list[float]] = defaultdict(list)  # of this step's micro-batches
        self.statistics: dict[str, list[float]] = defaultdict(list)
        self.reached: set[str] = set()  # tensors that had a gradient other than 0 at some step
        # Whether the rewards of some group differed, or there is something to learn from without.
        self.any_spread = args.objective == "supervised" or bool(args.pathwise_weight)
        self.began, self.earlier_s = time.monotonic(), 0.0
        asked = {"loop1": args.mask_to_caption_weight, "loop2": args.caption_to_mask_weight}
        self.loop_weights = LoopWeights(asked, args.adaptive_loop_weights)
        self.add_callback(AroundEachStep(self))

    def begin(self) -> None:
        """Take what trains now as the reference and as the partner's start; again after more has been frozen."""
        self.reference = {name: tensor for name, tensor in copied(self.sa2va).items() if "lora_" not in name}
        partner = self.args.ema_decay and self.args.objective == "grpo"  # supervised training asks none
        self.ema = EMA(self.sa2va, self.args.ema_decay) if partner else None
        self.maker.ema = self.ema

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """The schedule that was asked for, but its warm-up begins above 0: a run of one step must learn, too."""
        schedule = super().create_scheduler(num_training_steps, optimizer)
        warmup = self.args.get_warmup_steps(num_training_steps)
        if warmup and isinstance(schedule, LambdaLR):
            own = schedule.lr_lambdas[0]
            self.lr_scheduler = LambdaLR(
                schedule.optimizer, lambda step: (step + 1) / (warmup + 1) if step < warmup else own(step)
            )
        return self.lr_scheduler  # type: ignore[return-value]

    # ---- data ---------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[int]:
        """One number for each batch of an epoch: the Trainer counts them, `order` says which prompts they hold.

        A sampler behind accelerate's wrappers would not be told of the epoch when a run is resumed inside one.
        """
        steps = self.order.rollouts_per_epoch * self.args.num_iterations
        return DataLoader(range(steps * self.args.gradient_accumulation_steps), batch_size=1)  # type: ignore[arg-type]

    def _batches(self) -> list[tuple[int, list[GRPOItem]]]:
        """The batches of this process in the rollout of now, each with its number among those of all processes.

        Batches go round the processes: two processes with one batch each see what one process with two sees.
        """
        args, size = self.args, self.args.prompts_per_step
        chosen = self.order.indices(self.state.global_step // args.num_iterations)
        numbers = range(args.process_index, args.gradient_accumulation_steps * args.world_size, args.world_size)
        items: Any = self.train_dataset
        return [(number, [items[i] for i in chosen[number * size : (number + 1) * size]]) for number in numbers]

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[list[Group]], Tensor]:
        """Rollouts of all micro-batches of one optimisation step, made anew every `num_iterations` steps.

        Returns:
            Groups by micro-batch, and `StepCounts` of a process, on average, as a tensor.
        """
        for _ in range(num_batches):
            next(epoch_iterator)
        if self.state.global_step % self.args.num_iterations == 0 or not self.buffer:
            with self.out_of_memory("rollouts", SMALLER_ROLLOUTS), self._told_to_resume():
                self.buffer = [self._rollouts(items, number) for number, items in self._batches()]
            self._steer_spread(len(self.buffer))
            self._tell_order()
        counts = torch.tensor(count_step(self.buffer), device=device)
        return self.buffer, self.accelerator.reduce(counts, "sum") / self.args.world_size

    def _rollouts(self, items: Sequence[GRPOItem], number: int) -> list[Group]:
        """Groups that tell something, with what the reference says of them."""
        if self.args.objective == "supervised":
            return self.probe(items)
        seed = (self.args.seed, self.state.global_step, number)
        with mixed_precision(self.sa2va):
            groups, samples = self.maker.make(items, seed)
        self.last_samples = samples
        if self.args.curriculum:
            self.paid += paid_of_prompts([self.places[id(item)] for item in items], samples)
        self.any_spread |= any(own.advantages is not None and own.advantages.spread.any() for own in samples.values())
        for name, value in rollout_statistics(groups, samples, self.maker).items():
            self.statistics[name].append(value)
        kept = [group for group in groups if group.describe_ids or group.segment_ids]
        if kept and (self.args.beta or self.args.mask_beta):
            with torch.no_grad(), self.as_reference(), mixed_precision(self.sa2va):
                for group, output in zip(kept, self._policy(kept)[0], strict=True):
                    group.reference = output.detached()
        return kept

    def _steer_spread(self, batches: int) -> None:
        """Widen or narrow the mask policy by what all processes saw in this step, so that it is the same on all."""
        if ALIKE in self.statistics:
            seen = [sum(self.statistics[name][-batches:]) / batches for name in (ALIKE, EQUAL)]
            alike, equal = self.accelerator.reduce(torch.tensor(seen, device=self.args.device), "mean").tolist()
            self.maker.controller.update(alike, equal)

    def _tell_order(self) -> None:
        """What the prompts of this rollout were paid, gathered from all processes, for a curriculum."""
        if isinstance(self.order, CurriculumOrder):
            self.order.note(sorted(gather_object(self.paid)))
            self.paid = []

    def probe(self, items: Sequence[GRPOItem]) -> list[Group]:
        """Groups of some items that take part in every enabled loop, whatever they are worth."""
        with mixed_precision(self.sa2va):
            return self.maker.supervise(items)

    @property
    def planned_steps(self) -> int:
        """Optimisation steps of the whole run, unless something ends it before."""
        return self.args.planned_steps(self.order.rollouts_per_epoch)

    @property
    def needs_masks(self) -> bool:
        """Whether a loss looks at the mask itself, and so reaches the mask decoder."""
        return bool(self.args.pathwise_weight) or self.args.objective == "supervised"

    @property
    def samples_masks(self) -> bool:
        """Whether a loss looks at the parameters of the mask policy."""
        return self.args.objective == "grpo" and bool(self.args.caption_to_mask_weight)

    @property
    def _policy(self) -> GRPOPolicy:
        policy = self.accelerator.unwrap_model(self.model)
        assert isinstance(policy, GRPOPolicy)
        return policy

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """The model as it was before training: LoRA off, and copies of everything else that trains."""
        with swapped(self.sa2va, self.reference), lora_off(self.sa2va):
            yield

    # ---- loss ---------------------------------------------------------------------------------------------------

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward pass of one micro-batch."""
        with self.out_of_memory("the loss", "batch_size, num_generations or max_dynamic_patch"):
            return super().training_step(*args, **kwargs)

    def compute_loss(  # type: ignore[override]
        self, model: nn.Module, inputs: list[Group], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The weighted loss of both loops over one micro-batch, scaled for accumulation.

        Raises:
            ValueError: it is not finite; names the step.
        """
        outputs, anchor = model(inputs, self.needs_masks)
        pairs = list(zip(inputs, outputs, strict=True))
        loss = anchor
        steps = self.current_gradient_accumulation_steps
        counts = StepCounts(*count_step([inputs]) if num_items_in_batch is None else (num_items_in_batch / steps))
        loops = {
            "loop1": caption_loss(pairs, self.args.loss_settings, counts.tokens),
            "loop2": self._mask_policy_loss(pairs, counts.masks),
        }
        for name, parts in loops.items():
            if parts is not None:
                loss = loss + self.loop_weights[name] * parts.loss / steps
                self._note(name, parts)
            elif (
                self.args.objective == "grpo" and self.loop_weights.asked[name]
            ):  # or a curve's mean would leave it out
                for part in ("loss", "policy_loss"):
                    self.statistics[f"{name}/{part}"].append(0.0)
        self._measure_loops({name: parts.loss for name, parts in loops.items() if parts is not None})
        loss = loss + self._mask_terms(pairs, counts) / steps
        self.statistics["total_loss"].append(float(loss.detach()) * steps)  # curves show a mean over micro-batches
        if not torch.isfinite(loss):
            self.stop(f"the loss is {float(loss.detach())}")
        for group, output in pairs:
            if group.old is None and self.args.num_iterations > 1:
                group.old = output.detached()
        return loss

    def _measure_loops(self, losses: Mapping[str, Tensor]) -> None:
        """Gradient norms of both loops, the mean over all micro-batches and processes; `AroundEachStep` uses them."""
        if self.loop_weights.wants(self.state.global_step):
            shared = [p for name, p in trainable_tensors(self.sa2va).items() if "lora_" in name]
            for name in self.loop_weights.asked:
                norm = gradient_norm(losses[name], shared) if name in losses else torch.zeros(())
                self.gradient_norms[name].append(float(norm))

    def _mask_policy_loss(self, pairs: Pairs, groups: Tensor | float) -> LossParts | None:
        if self.args.objective == "supervised":
            return None
        return mask_loss(pairs, self._policy.mask_policy, self.args, groups)

    def _mask_terms(self, pairs: Pairs, counts: StepCounts) -> Tensor:
        """Losses that look at the mask of the mean action: the learned reward's gradient, or supervision."""
        total = torch.zeros((), device=self.args.device)
        shown = [(group, output.mask_logits) for group, output in pairs if output.mask_logits is not None]
        true = [(group, logits) for group, logits in shown if group.truth is not None]
        if true and self.args.objective == "supervised":
            supervised = supervised_mask_losses(true)
            self.statistics["loss/mask"].append(float(supervised.detach().mean()))
            total = total + self.args.supervised_mask_weight * supervised.sum() / counts.true_masks
        if shown and self.args.pathwise_weight and self.pathwise is not None:
            scores = self.pathwise.scores(shown)
            self.statistics["loop2/pathwise_score"].append(float(scores.detach().mean()))
            total = total - self.args.pathwise_weight * scores.sum() / counts.masks
        return total

    def _note(self, loop: str, parts: Any) -> None:
        self.statistics[f"{loop}/loss"].append(float(parts.loss.detach()))
        self.statistics[f"{loop}/policy_loss"].append(float(parts.policy_loss))
        self.statistics[f"{loop}/kl_div"].append(float(parts.kl))
        self.statistics[f"{loop}/clip_fraction"].append(float(parts.clip_fraction))
        if loop == "loop1":
            self.statistics["loop1/entropy"].append(float(parts.entropy))

    def stop(self, why: str) -> NoReturn:
        """Raise a ValueError that names the step, the last good checkpoint and the remedy."""
        last = get_last_checkpoint(str(self.args.output_dir))
        kept = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
        raise ValueError(
            f"step {self.state.global_step + 1}: {why}; training stops, {kept}; lower learning_rate, or raise beta"
        )

    @property
    def way_back(self) -> str:
        """Where `--resume` goes on."""
        last = get_last_checkpoint(str(self.args.output_dir))
        if last and self.is_deepspeed_enabled:
            return f"{last} can be evaluated and merged; --resume cannot go on from it under DeepSpeed"
        return f"--resume goes on from {last}" if last else "there is no checkpoint yet"

    @contextmanager
    def _told_to_resume(self) -> Iterator[None]:
        """Say at which step a reward failed for good, such as a judge that went away, and that not all is lost."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"step {self.state.global_step + 1}: {error}; {self.way_back}") from error

    @contextmanager
    def out_of_memory(self, what: str, remedy: str) -> Iterator[None]:
        """Say what to lower where the block runs out of GPU memory."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"step {self.state.global_step + 1}: out of GPU memory in {what}; lower {remedy}, or turn on "
                "gradient_checkpointing"
            ) from error

    # ---- logs and checkpoints -----------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Everything noted since the last call, averaged over micro-batches."""
        logs.pop("loss", None)
        logs |= self._averaged() | self._judge_counts()
        if logs.get("loop1/frac_truncated") == 1 and self.args.should_log:
            warnings.warn(
                f"every caption was cut off at max_completion_length {self.args.max_completion_length} and does not "
                "count, so loop 1 learns nothing; raise it",
                stacklevel=2,
            )
        if self.ema is not None:
            logs["ema_distance"], logs["ema_decay"] = self.ema.distance(self.sa2va), self.ema.current_decay
        self.statistics.clear()
        super().log(logs, start_time)

    def _judge_counts(self) -> dict[str, float]:
        """The judge's counts, summed over processes: each has a judge of its own."""
        if self.judge is None:
            return {}
        everyone = gather_object([self.judge.counts]) if self.args.world_size > 1 else [self.judge.counts]
        return {f"judge/{name}": float(sum(one[name] for one in everyone)) for name in everyone[0]}

    def _averaged(self) -> dict[str, float]:
        """What was noted since the last call: mean over micro-batches and processes that noted it."""
        own = {name: sum(values) / len(values) for name, values in self.statistics.items()}
        everyone = gather_object([own]) if self.args.world_size > 1 else [own]
        names = dict.fromkeys(name for one in everyone for name in one)
        found = {name: [one[name] for one in everyone if name in one] for name in names}
        return {name: sum(values) / len(values) for name, values in found.items()}

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        save_run_state(self)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_run_state(self, Path(resume_from_checkpoint))

    @property
    def seconds(self) -> float:
        """Spent on training so far, before an interruption as well."""
        return self.earlier_s + time.monotonic() - self.began
