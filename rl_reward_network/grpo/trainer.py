"""The trainer: transformers' loop with rollouts in place of batches, and GRPO's loss in place of the model's.

Checkpoints are complete: those of the Trainer hold only the adapter and are not written atomically.
"""

import math
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from rl_reward_network.grpo.checkpoint import (
    RunState,
    any_rank,
    first_message,
    from_first_rank,
    load_run_state,
    save_run_state,
    state_if_finished,
)
from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig
from rl_reward_network.grpo.logs import SampledBatch, StepMetrics, summed_counts
from rl_reward_network.grpo.losses import (
    EVERY,
    LoopWeights,
    PathwiseReward,
    StepCounts,
    count_step,
    gradient_norm,
    grpo_objective,
)
from rl_reward_network.grpo.policy import GRPOPolicy, mixed_precision, unreached_of_candidates
from rl_reward_network.grpo.preferences import PairMaker, compared_batch
from rl_reward_network.grpo.prompts import CurriculumOrder, TrainingItem, of_one_image, prompt_order
from rl_reward_network.grpo.rewards import (
    FRAC_REWARD_ZERO_STD,
    MASK_IOU,
    LoopRewards,
    Terms,
    advantage_statistics,
    check_weights,
    prompt_outcomes,
    rollout_statistics,
    score,
    step_advantages,
)
from rl_reward_network.grpo.rollouts import MASK_POLICIES, NOTHING_STORED, MicroBatch, RolloutGenerator, Rollouts
from rl_reward_network.grpo.settings import OF_LABELS
from rl_reward_network.models.ema import EMA, FADE_IN, copied, fade_in, swapped, trainable_tensors
from rl_reward_network.models.lora import lora_off, unreached_parameters
from rl_reward_network.models.sa2va.families import DECODER, ENCODER
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.rewards.combine import Advantages
from rl_reward_network.rewards.judge import Judge
from rl_reward_network.run import clock, work_seconds

SMALLER_ROLLOUTS = "batch_size, num_generations, num_mask_generations or max_dynamic_patch"
SMALLER_LOSS = "batch_size, num_generations or max_dynamic_patch"
NO_CHECKPOINT = "there is no checkpoint yet"
TILES = "max_dynamic_patch"  # a Qwen-VL has no tiles: its image tokens grow with the image
COARSE_SHARE = 0.6  # of the steps of a side network by name, as of the U-Nets of a reward network
LONGEST_ALIKE = 20  # optimisation steps in a row whose rewards do not differ, before a warning
DIFFERENT_REWARDS = {
    "loop1": "raise temperature or num_generations, or weigh a reward that differs between captions",
    "loop2": "raise num_mask_generations, or weigh a reward that differs between masks",
}


class Sa2VAGRPOTrainer(Trainer):
    """GRPO in two loops.

    Args:
        model, processor: Sa2VA with LoRA layers, trainable tensors in float32 (`prepare_model`).
        args, prompts: settings; prompts of the training split.
        rewards: loop -> name -> Reward.
        pathwise: the reward network's score with gradient, needed if `pathwise_weight` is not 0.
        shuffle_rewards: control experiment: rewards are permuted at random, so that nothing can be learned from them.
        pairs: makes the pairs of the objective dpo.

    Attributes set from outside, all optional:
        judge: the LLM judge that scores captions; its counts are logged, and the run stops when it fails for good.
        validation: `ValidationCallback`, whose state goes into checkpoints.
        watch: `TeacherWatch` of a mean teacher, whose state does so, too.
    """

    args: Sa2VAGRPOConfig

    def __init__(
        self,
        model: Any,
        processor: Sa2VAProcessor,
        args: Sa2VAGRPOConfig,
        prompts: Sequence[TrainingItem],
        rewards: LoopRewards,
        pathwise: PathwiseReward | None = None,
        shuffle_rewards: bool = False,
        pairs: PairMaker | None = None,
    ) -> None:
        check_supported(args, pathwise)
        temperature = args.temperature if args.objective == "grpo" else 1.0  # nothing else samples captions
        ids = processor.never_sampled_ids, processor.tokenizer.pad_token_id or 0
        policy = GRPOPolicy(model, MASK_POLICIES[args.mask_policy], temperature, *ids, bool(args.entropy_coef))
        if args.objective == "grpo":
            check_weights(rewards, args)
        self.taken_together = taken_together(prompts, args)
        order = prompt_order(prompts, self.taken_together, args)  # refuses too few before there is a run's folder
        super().__init__(policy, args, data_collator=list, train_dataset=prompts)  # type: ignore[arg-type]
        self.loss_is_scaled_for_ga = False  # the Trainer takes the mean over micro-batches, see `get_batch_samples`
        self.sa2va, self.prompts, self.rewards, self.pathwise, self.order = model, prompts, rewards, pathwise, order
        self.shuffle_rewards, self.pairs = shuffle_rewards, pairs
        self.rollout_generator = RolloutGenerator(model, processor, args)
        self.reset_reference()
        self.judge: Judge | None = None
        self.validation: Any = None
        self.watch: Any = None
        self.loop_weights = LoopWeights({"loop1": args.mask_to_caption_weight, "loop2": args.caption_to_mask_weight})
        self._init_state()
        self.add_callback(StepCallback(self))

    def _init_state(self) -> None:
        """State of the run besides weights and optimiser."""
        self.buffer: list[MicroBatch] = []
        self.last_rollouts = Rollouts(0, [], [])
        self.sampled = SampledBatch()
        self.prompt_indices = {id(prompt): index for index, prompt in enumerate(self.prompts)}
        self.metrics = StepMetrics(self.args.world_size)
        self.gradient_norms: dict[str, list[float]] = defaultdict(list)  # of the micro-batches of this step, by loop
        self.tensors_with_gradient: set[str] = set()  # a gradient other than 0 at some step
        # Whether something can be learned: the rewards of some group differed, or the loss needs no rewards.
        self.any_spread = self.args.objective in OF_LABELS or bool(self.args.pathwise_weight)
        rewarded = [loop for loop, terms in self.rewards.items() if any(term.weight for term in terms.values())]
        self.alike_steps = {loop: 0 for loop in rewarded if self.loop_weights.configured[loop]}  # in a row
        self.taught = {"images": 0, "no_seg": 0}  # that the teacher was asked for; those whose answer has no [SEG]
        self.ended = False  # before its last step, by the time limit, a stop rule of validation or a collapse
        self.judge_failure: str | None = None  # the reason, if the run stopped for lack of a judge
        self.start_time, self.earlier_seconds = work_seconds(), 0.0
        self.phases: dict[str, float] = {}  # seconds of this process, since it began or resumed the run
        self.logged_phases: dict[str, float] = {}  # at the last line of the log
        self.sampled_tokens = 0  # of captions, since that line
        self.timings: dict[str, float] = {}  # of the last line

    def reset_reference(self) -> None:
        """Make the current weights the reference and the teacher's start; call again after freezing more tensors."""
        self.reference = {name: tensor for name, tensor in copied(self.sa2va).items() if "lora_" not in name}
        captioned = any(prompt.caption for prompt in self.prompts)  # else there is nothing to segment or to describe
        has_teacher = self.args.objective in ("mean_teacher", "dpo") or (self.args.objective == "grpo" and captioned)
        self.ema = EMA(self.sa2va, self.args.ema_decay) if has_teacher and self.args.ema_decay else None
        self.rollout_generator.ema = self.ema

    def freeze_unreached(self, prompts: Sequence[TrainingItem]) -> list[str]:
        """Freeze the tensors that no enabled loss gives a gradient to, and return their names.

        They are found by one backward pass per prompt, one after the other: a trial must not take more memory than
        training. Rank 0 decides for all. If the head of one of SAM 2's candidates is reached, all of them train, unless
        a side network refines a fixed one.
        """
        self.sa2va.train()
        if self.args.activation_checkpointing:  # the Trainer turns it on only when training begins
            self.policy.activation_checkpointing_enable()
        losses = (self._trial_loss(prompt) for prompt in prompts)
        unreached = from_first_rank(self.accelerator, lambda: unreached_parameters(self.sa2va, losses))
        side, reached = self.sa2va.side_network, trainable_tensors(self.sa2va).keys() - set(unreached)
        fixed = side is not None and side.config.candidate is not None
        names = unreached if fixed else unreached_of_candidates(unreached, reached)
        for name in names:
            self.sa2va.get_parameter(name).requires_grad_(False)
        return names

    def _trial_loss(self, prompt: TrainingItem) -> Tensor:
        """A sum of all outputs that the enabled losses depend on."""
        with mixed_precision(self.sa2va):
            batch = self.rollout_generator.references([prompt])
            outputs, anchor = self.policy(batch.rollouts, self.args.needs_masks, self.args.samples_masks)
        parts = [*outputs.log_probs, *outputs.mask_logits]
        parts += outputs.parameters if self.args.samples_masks else []
        if self.args.objective in OF_LABELS and self.sa2va.side_network is None:
            parts += [decoded.candidate_scores for decoded in outputs.decoded]
        parts += outputs.objects if self.args.objective in OF_LABELS else []
        parts += outputs.answer_log_probs if self.args.seg_text_weight else []
        return anchor + sum(part.float().sum() for part in parts)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's optimiser, with own learning rates for the parts that have one."""
        optimizer, args = super().create_optimizer(model), self.args
        rates = {
            ("side_network.",): args.side_learning_rate,
            (ENCODER,): args.encoder_learning_rate,
            ("text_hidden_fcs.",): args.seg_learning_rate,
            DECODER: args.decoder_learning_rate,
        }
        tensors = {name: p for name, p in trainable_tensors(self.sa2va).items() if "lora_" not in name}
        for part, rate in rates.items():
            own_ids = {id(parameter) for name, parameter in tensors.items() if name.startswith(part)}
            for group in list(optimizer.param_groups):
                own = [p for p in group["params"] if id(p) in own_ids]
                if own and rate is not None and group["lr"] != rate:
                    group["params"] = [p for p in group["params"] if id(p) not in own_ids]
                    optimizer.add_param_group({**group, "params": own, "lr": rate})
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """The configured schedule, with a warm-up that begins above 0: a run of one step must learn, too."""
        schedule = super().create_scheduler(num_training_steps, optimizer)
        warmup = self.args.get_warmup_steps(num_training_steps)
        if warmup and isinstance(schedule, LambdaLR):
            after = schedule.lr_lambdas[0]
            rate = lambda step: (step + 1) / (warmup + 1) if step < warmup else after(step)  # noqa: E731
            self.lr_scheduler = LambdaLR(schedule.optimizer, rate)
        return self.lr_scheduler  # type: ignore[return-value]

    @torch.no_grad()
    def take_teacher(self) -> None:
        """Give the model the weights of its moving average, which a mean teacher is used for."""
        assert self.ema is not None, "the objective mean_teacher has a moving average"
        for name, tensor in self.ema.weights.items():
            self.sa2va.get_parameter(name).copy_(tensor)

    @property
    def policy(self) -> GRPOPolicy:
        """The policy without data-parallel wrappers."""
        policy: GRPOPolicy = self.accelerator.unwrap_model(self.model)
        return policy

    @property
    def planned_steps(self) -> int:
        """Optimisation steps of the whole run, unless it ends earlier."""
        return self.args.planned_steps(self.order.rollouts_per_epoch)

    @property
    def settling_steps(self) -> int:
        """Optimisation steps in which the loss or the learning rate still rises, or images are coarse."""
        fading = FADE_IN * self.planned_steps if self.args.objective == "mean_teacher" else 0
        return max(int(self.args.get_warmup_steps(self.planned_steps)), math.ceil(fading), self.coarse_steps)

    @property
    def coarse_steps(self) -> int:
        """The first optimisation steps, in which a side network that learns names sees half the resolution.

        Names take many steps, and so many more of them fit in a time (docs/log.md).
        """
        side = self.sa2va.side_network
        by_name = self.args.objective == "supervised" and any(prompt.name for prompt in self.prompts)
        fits = side is not None and side.config.pixels % (2 * side.config.stride) == 0
        return int(COARSE_SHARE * self.planned_steps) if by_name and fits else 0

    @property
    def seconds(self) -> float:
        """Training time so far, including the time before an interruption."""
        return self.earlier_seconds + work_seconds() - self.start_time

    @property
    def taught_counts(self) -> dict[str, int]:
        """`taught` of all processes together; every process must ask for it."""
        return {name: int(count) for name, count in summed_counts(self.taught, self.args.world_size).items()}

    def place(self) -> "Place":
        """Where the run is, for messages."""
        return Place(self.state.global_step + 1, str(self.args.output_dir), self.sa2va.config.family.body == "qwen_vl")

    # ---- prompts ------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[int]:
        """One number for each batch of an epoch, for the Trainer's count of steps; `order` selects the prompts.

        A sampler behind accelerate's wrappers has no epoch when a run is resumed inside one.
        """
        steps = self.order.rollouts_per_epoch * self.args.num_iterations
        return DataLoader(range(steps * self.args.gradient_accumulation_steps), batch_size=1)  # type: ignore[arg-type]

    def _prompt_batches(self) -> list[tuple[int, list[TrainingItem]]]:
        """The batches of this process in the current rollout, each with its number among those of all processes.

        Batches alternate between processes: two processes with one batch each get the batches of one with two.
        """
        args, size = self.args, self.args.prompts_per_step
        indices = self.order.indices(self.state.global_step // args.num_iterations)
        numbers = range(args.process_index, args.gradient_accumulation_steps * args.world_size, args.world_size)
        parts = {n: (self.taken_together[i] for i in indices[n * size : (n + 1) * size]) for n in numbers}
        return [(n, [self.prompts[index] for group in groups for index in group]) for n, groups in parts.items()]

    # ---- rollouts -----------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[MicroBatch], Tensor]:
        """All micro-batches of one optimisation step, and their `StepCounts` as a tensor.

        Rollouts are generated anew every `num_iterations` steps.
        """
        for _ in range(num_batches):
            next(epoch_iterator)
        if self.state.global_step % self.args.num_iterations == 0 or not self.buffer:
            self.buffer.clear()  # in place, for the Trainer holds this list, too: image features of both are too much
            self.buffer = self._generate_step()
        # The one normalisation of a step: the Trainer divides each loss by the number of micro-batches in this process,
        # and data-parallel training averages over processes, so the divisor is an average as well, see `StepCounts`.
        own = torch.tensor(count_step([batch.rollouts for batch in self.buffer]), device=device)
        totals = self.accelerator.reduce(own, "sum")
        return self.buffer, totals / self.args.world_size / len(self.buffer)

    def _generate_step(self) -> list[MicroBatch]:
        """The micro-batches of this process in one optimisation step."""
        with (
            clock(self.phases, "rollouts"),
            hint_out_of_memory(self.place, "rollouts", SMALLER_ROLLOUTS, resume=True),
        ):
            prompts = self._prompt_batches()
            if self.args.objective in OF_LABELS:
                with mixed_precision(self.sa2va):
                    return [self._of_labels(batch, n) for n, batch in prompts]
            if self.args.objective == "dpo":
                return [self._compared(batch, n) for n, batch in prompts]
            batches, terms = zip(*(self.generate_and_score(own, number) for number, own in prompts), strict=True)
            advantages = step_advantages(terms, self.rewards, self.args, self.accelerator)
        self.sampled = SampledBatch(self.last_rollouts.columns, terms[-1], advantages[-1])
        outcomes: list[tuple[int, float, bool]] = []
        for (_, of_batch), of_loops in zip(prompts, advantages, strict=True):
            self.metrics.record(advantage_statistics(of_loops))
            outcomes += prompt_outcomes([self.prompt_indices[id(prompt)] for prompt in of_batch], of_loops)
        self._adapt_sigma(len(batches))
        if isinstance(self.order, CurriculumOrder):  # by the prompts of this step, of all processes
            self.order.update(sorted(gather_object(outcomes)))
        self._note_alike(advantages)
        return [with_advantages(batch, of_loops) for batch, of_loops in zip(batches, advantages, strict=True)]

    def _of_labels(self, prompts: Sequence[TrainingItem], number: int) -> MicroBatch:
        """The micro-batch of an objective that learns true masks."""
        views = np.random.default_rng(self._seed(number))
        if self.args.objective == "supervised":
            return self.rollout_generator.references(prompts, views if self.args.augment else None)
        weight = fade_in(self.state.global_step, self.planned_steps)
        batch = self.rollout_generator.taught(prompts, views, weight)
        lost = [answer.image.taught is None for answer in batch.rollouts.answers if answer.image.truth is None]
        self.metrics.record({"teacher/no_seg_share": sum(lost) / max(1, len(lost))})
        self.taught = {"images": self.taught["images"] + len(lost), "no_seg": self.taught["no_seg"] + sum(lost)}
        return batch

    def _compared(self, prompts: Sequence[TrainingItem], number: int) -> MicroBatch:
        """The micro-batch of the objective dpo, with the logits of the initial model."""
        assert self.pairs is not None, "the objective dpo has pairs"
        with mixed_precision(self.sa2va):
            batch = compared_batch(self.rollout_generator, prompts, self._seed(number), self.pairs)
            with torch.no_grad(), self.reference_weights():
                reference = self.policy(batch.rollouts, with_masks=True)[0].stored()
        self.any_spread |= any(answer.image.pair is not None for answer in batch.rollouts.answers)
        return replace(batch, reference=reference)

    def _seed(self, number: int) -> tuple[int, int, int]:
        """What all randomness of one batch of this step follows from."""
        return self.args.seed, self.state.global_step, number

    def generate_and_score(self, prompts: Sequence[TrainingItem], number: int) -> tuple[MicroBatch, dict[str, Terms]]:
        """The rollouts of one micro-batch with the reference's outputs, still without advantages, and their terms."""
        seed = self._seed(number)
        with mixed_precision(self.sa2va):
            rollouts = self.rollout_generator.generate(prompts, seed)
            terms = score(rollouts, self.rewards, seed if self.shuffle_rewards else None)
        self.last_rollouts = rollouts  # for the pictures; the pixels of all micro-batches of a step would be too much
        self.metrics.record(rollout_statistics(rollouts, terms))
        self.sampled_tokens += sum(len(ids) for one in rollouts.captions for ids in one.completion_ids)
        if "loop2" in terms:
            self.metrics.record({"loop2/sigma": self.rollout_generator.sigma_controller.sigma})
        reference = NOTHING_STORED
        if self.args.beta or self.args.mask_beta:
            with torch.no_grad(), self.reference_weights(), mixed_precision(self.sa2va):
                reference = self.policy(rollouts)[0].stored()
        return MicroBatch(replace(rollouts, columns={}), [], [], reference), terms

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """The initial model: LoRA off, and copies of all other trainable tensors."""
        with swapped(self.sa2va, self.reference), lora_off(self.sa2va):
            yield

    def _adapt_sigma(self, micro_batches: int) -> None:
        """Widen or narrow the mask policy by the means over all processes, so that it is equal on all."""
        if MASK_IOU in self.metrics.values:
            own = self.metrics.mean_of_last((MASK_IOU, FRAC_REWARD_ZERO_STD), micro_batches)
            means = self.accelerator.reduce(torch.tensor(own, device=self.args.device), "mean").tolist()
            self.rollout_generator.sigma_controller.update(*means)

    def _note_alike(self, advantages: Sequence[Mapping[str, Advantages]]) -> None:
        """Count the steps in a row in which the rewards of every group of a loop were alike, and warn of many."""
        differed = {loop: any(bool(one[loop].differ.any()) for one in advantages) for loop in advantages[0]}
        self.any_spread |= any(differed.values())
        for loop in sorted(differed.keys() & self.alike_steps.keys()):
            before, uses = self.alike_steps[loop], self.args.num_iterations
            self.alike_steps[loop] = 0 if any_rank(self.accelerator, differed[loop]) else before + uses
            if before < LONGEST_ALIKE <= self.alike_steps[loop] and self.args.should_log:
                last = self.state.global_step + uses
                warnings.warn(
                    f"steps {last - self.alike_steps[loop] + 1} to {last}: the rewards of every group of {loop} were "
                    f"alike, so nothing was learned from them; {DIFFERENT_REWARDS[loop]}",
                    stacklevel=2,
                )

    # ---- loss ---------------------------------------------------------------------------------------------------

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: the Trainer's estimate needs its own kind of batch."""
        return 0

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward pass of one micro-batch."""
        with hint_out_of_memory(self.place, "the loss", SMALLER_LOSS):
            return super().training_step(*args, **kwargs)

    def compute_loss(  # type: ignore[override]
        self, model: nn.Module, inputs: MicroBatch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of one micro-batch; a ValueError with the step if it is not finite."""
        outputs, anchor = model(inputs.rollouts, self.args.needs_masks)
        counts = count_step([inputs.rollouts]) if num_items_in_batch is None else StepCounts(*num_items_in_batch)
        weights = {loop: self.loop_weights[loop] for loop in self.loop_weights.configured}
        mask_policy = self.policy.mask_policy
        total, losses, logged = grpo_objective(inputs, outputs, self.args, counts, weights, mask_policy, self.pathwise)
        if self.args.adaptive_loop_weights and self.state.global_step % EVERY == 0:  # for `StepCallback`
            lora = [p for name, p in trainable_tensors(self.sa2va).items() if "lora_" in name]
            for loop in weights:
                norm = gradient_norm(losses[loop].rewarded, lora) if loop in losses else torch.zeros(())
                self.gradient_norms[loop].append(float(norm))
        loss = anchor + total  # the anchor is a zero that depends on all tensors
        value = float(loss.detach())
        self.metrics.record({**logged, "total_loss": value})  # curves are means over micro-batches as well
        if not math.isfinite(value):
            fail_not_finite(self.place(), f"the loss is {value}")
        if self.args.num_iterations > 1 and inputs.old is NOTHING_STORED:
            place = next(number for number, batch in enumerate(self.buffer) if batch is inputs)
            self.buffer[place] = replace(inputs, old=outputs.stored())
        return loss

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
        self.timings = self._seconds_since_the_last_line()  # not in `logs`: those of a resumed run are the same
        if self.ema is not None:
            logs["ema_distance"], logs["ema_decay"] = self.ema.distance(self.sa2va), self.ema.current_decay
        self.metrics.values.clear()
        super().log(logs, start_time)

    def _seconds_since_the_last_line(self) -> dict[str, float]:
        """Seconds of each phase of the steps of this line, and the tokens of captions that were sampled in a second."""
        now = {**self.phases, "all": self.seconds - self.earlier_seconds}
        spent = {name: value - self.logged_phases.get(name, 0.0) for name, value in now.items()}
        spent["learning"] = spent.pop("all") - sum(spent.values())
        tokens, self.sampled_tokens, self.logged_phases = self.sampled_tokens, 0, now
        speed = {"tokens_per_second": tokens / max(spent["rollouts"], 1e-9)} if tokens else {}
        return {f"seconds/{name}": value for name, value in spent.items()} | speed

    def log_now(self, values: Mapping[str, float]) -> None:
        """A line of its own, of this very step; the values recorded for the next line stay."""
        due = self.control.should_log
        super().log(dict(values))
        self.control.should_log = due  # the Trainer takes any line for the one that is due

    def save_checkpoint(self) -> None:
        """Write `checkpoint-<step>`."""
        state = RunState(
            sigma=self.rollout_generator.sigma_controller.sigma,
            seconds=self.seconds,
            reached=sorted(self.tensors_with_gradient),
            ended=self.ended,
            any_spread=any_rank(self.accelerator, self.any_spread),
            alike_rewards=self.alike_steps,
            loop_weights={"norms": self.loop_weights.norms},
            curriculum=self.order.state_dict() if isinstance(self.order, CurriculumOrder) else {},
            ema_steps=self.ema.steps if self.ema is not None else 0,
            validation=self.validation.state_dict() if self.validation is not None else {},
            taught=self.taught_counts if self.args.objective == "mean_teacher" else {},
            watch=self.watch.state_dict() if self.watch is not None else {},
        )
        save_run_state(self, self.sa2va, self.ema, state)

    def load_checkpoint(self, folder: Path) -> None:
        """Restore what the Trainer does not load itself (it loads optimiser, schedule and step)."""
        state = load_run_state(folder, self.sa2va, self.ema, self.is_deepspeed_enabled)
        self.rollout_generator.sigma_controller.sigma, self.earlier_seconds = state.sigma, state.seconds
        self.loop_weights.norms, self.alike_steps = state.loop_weights["norms"], state.alike_rewards
        self.tensors_with_gradient, self.any_spread = set(state.reached), state.any_spread
        if self.args.process_index == 0:  # the counts are those of all processes
            self.taught |= state.taught
        if isinstance(self.order, CurriculumOrder):
            self.order.load_state_dict(state.curriculum)
        if self.validation is not None:
            self.validation.load_state_dict(state.validation)
        if self.watch is not None:
            self.watch.load_state_dict(state.watch)

    def load_if_finished(self, folder: Path) -> bool:
        """Load a checkpoint after whose step nothing is left to train; otherwise leave it to the Trainer.

        Its loop checks for the end only after a step, so it would train one step too many.
        """
        if state := state_if_finished(folder, self.planned_steps):
            self.load_checkpoint(folder)
            self.state = state
        return state is not None

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.save_checkpoint()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.load_checkpoint(Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.is_deepspeed_enabled and checkpoint is not None:  # for which the Trainer loads no more than its files
            self.load_checkpoint(Path(checkpoint))
        super()._load_optimizer_and_scheduler(checkpoint)


def taken_together(prompts: Sequence[TrainingItem], args: Sa2VAGRPOConfig) -> list[list[int]]:
    """Indices of prompts that always share a batch, counted as one: in supervised training the names of an image.

    They share the image's features, the start of their text and the side network's pass, which are most of the cost.
    """
    named = args.objective == "supervised" and all(prompt.name for prompt in prompts)
    return of_one_image(prompts) if named else [[index] for index in range(len(prompts))]


def fit_batch(prompts: Sequence[TrainingItem], args: Sa2VAGRPOConfig) -> None:
    """Lower the batch where a step would take more prompts than there are; a mean teacher takes them again."""
    most = len(taken_together(prompts, args)) // args.world_size
    if args.objective != "mean_teacher" and 0 < most < args.prompts_per_step * args.gradient_accumulation_steps:
        at_once = max(count for count in range(1, args.prompts_per_step + 1) if most % count == 0)
        args.per_device_train_batch_size = at_once * args.num_generations
        args.gradient_accumulation_steps = most // at_once


def with_advantages(batch: MicroBatch, advantages: Mapping[str, Advantages]) -> MicroBatch:
    """A micro-batch with the advantages of its rollouts."""
    values = {loop: torch.tensor(of_loop.values).float() for loop, of_loop in advantages.items()}
    masks = [values["loop2"][mask.row] for mask in batch.rollouts.masks]
    return replace(batch, caption_advantages=list(values.get("loop1", ())), mask_advantages=masks)


def check_supported(args: Sa2VAGRPOConfig, pathwise: PathwiseReward | None) -> None:
    """Refuse settings that this trainer cannot run, by a ValueError."""
    if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1"):
        raise ValueError("FSDP is not supported in training; use torchrun alone (DDP), or --deepspeed (ZeRO-2)")
    plugin = args.deepspeed_plugin
    if plugin is not None and plugin.zero_stage > 2:
        raise ValueError(
            f"{args.deepspeed}: zero_optimization.stage is {plugin.zero_stage}, expected 1 or 2: ZeRO-3 splits the "
            "weights, which rollouts and the EMA teacher need whole"
        )
    if plugin is not None and args.bf16:
        raise ValueError(
            f"{args.deepspeed}: DeepSpeed would round trained tensors to bfloat16; give --dtype float32, or use "
            "torchrun alone (DDP), which keeps them in float32"
        )
    if (weight := args.pathwise_weight) and pathwise is None:
        raise ValueError(f"pathwise_weight is {weight}, but there is no reward network; give --reward_net")


# ---- around each step -----------------------------------------------------------------------------------------------


class StepCallback(TrainerCallback):
    """Check the gradients before each optimisation step; after it, update teacher and loop weights, and may stop."""

    def __init__(self, trainer: Sa2VAGRPOTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.trainer.start_time = work_seconds()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Choose the resolution of the side network; the first step is whole, so that memory lacks there or nowhere."""
        trainer, side = self.trainer, self.trainer.sa2va.side_network
        if side is None:
            return
        side.coarse = 0 < state.global_step < trainer.coarse_steps
        if side.coarse and args.max_minutes is not None:
            side.coarse = not any_rank(trainer.accelerator, trainer.seconds > COARSE_SHARE * 60 * args.max_minutes)

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Refuse a gradient that is not finite, which a finite loss can have; record the tensors with a gradient."""
        tensors = trainable_tensors(self.trainer.sa2va)
        gradients = {name: p.grad for name, p in tensors.items() if p.grad is not None}
        norms = torch.stack(torch._foreach_norm(list(gradients.values()))) if gradients else torch.zeros(0)
        if not norms.isfinite().all():
            fail_not_finite(self.trainer.place(), "a gradient is not finite")
        found = zip(gradients, (norms > 0).tolist(), strict=True)
        self.trainer.tensors_with_gradient.update(name for name, not_zero in found if not_zero)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update loop weights and teacher, and stop when the time is over or the judge has failed."""
        trainer = self.trainer
        self._update_loop_weights()
        rollouts_used_up = state.global_step % args.num_iterations == 0  # a checkpoint holds no half-used rollouts
        if rollouts_used_up and trainer.judge is not None:  # METEOR alone would be another objective
            trainer.judge_failure = first_message(trainer.accelerator, trainer.judge.failing())
            if trainer.judge_failure:
                control.should_training_stop = control.should_save = True
        if trainer.ema is not None:
            trainer.ema.update(trainer.sa2va)
        if args.max_minutes is not None:
            late = any_rank(trainer.accelerator, trainer.seconds > 60 * args.max_minutes)
            if late and rollouts_used_up:
                trainer.ended = control.should_training_stop = control.should_save = True
        # A resumed run begins a line of its own, so the whole one must do so there, too; and no step is left out.
        control.should_log |= control.should_save or state.global_step >= state.max_steps

    def _update_loop_weights(self) -> None:
        """Update the loop weights with the gradient norms of this step, if they were measured: means over processes."""
        trainer, norms = self.trainer, self.trainer.gradient_norms
        if norms:
            own = torch.tensor([sum(values) / len(values) for values in norms.values()], device=trainer.args.device)
            means = dict(zip(norms, trainer.accelerator.reduce(own, "mean").tolist(), strict=True))
            trainer.loop_weights.update(means)
            for loop, norm in means.items():
                trainer.metrics.record({f"{loop}/gradient_norm": norm, f"{loop}/weight": trainer.loop_weights[loop]})
            norms.clear()


# ---- errors that end a run ------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a run is, for its messages."""

    step: int  # from 1
    output_dir: str  # with the checkpoints
    qwen_vl: bool = False

    @property
    def resume_hint(self) -> str:
        """A sentence on the possible use of the last checkpoint."""
        checkpoint = get_last_checkpoint(self.output_dir)
        return f"--resume goes on from {checkpoint}" if checkpoint else NO_CHECKPOINT


def fail_not_finite(place: Place, problem: str) -> NoReturn:
    """Raise a ValueError for a loss or gradient that is not finite, such as `problem` says."""
    checkpoint = get_last_checkpoint(place.output_dir)
    state = f"the last good checkpoint is {checkpoint}" if checkpoint else NO_CHECKPOINT
    raise ValueError(f"step {place.step}: {problem}; training stops, {state}; lower learning_rate, or raise kl_coef")


@contextmanager
def hint_out_of_memory(place: Callable[[], Place], phase: str, remedy: str, resume: bool = False) -> Iterator[None]:
    """Turn an out-of-memory error of the block into a ValueError that names the phase and the settings to lower.

    With `resume` a ValueError, such as of a judge that cannot be reached any more, gets step and resume hint.
    """
    try:
        yield
    except ValueError as error:
        if not resume:
            raise
        raise ValueError(f"step {place().step}: {error}; {place().resume_hint}") from error
    except torch.OutOfMemoryError as error:
        if place().qwen_vl:
            remedy = remedy.replace(TILES, "the size of the images")
        raise ValueError(
            f"step {place().step}: out of GPU memory in {phase}; lower {remedy}, or turn on gradient_checkpointing"
        ) from error
