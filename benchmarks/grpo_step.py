"""One GRPO step compared with the same step in the usual layout: speed of each part, and equality of the gradients.

    python -m benchmarks.grpo_step

The usual layout (as in trainers for text): both image encoders for every generation, prompts repeated for every
generation, logits of the whole text over the whole vocabulary; generations are batched there, too. Both layouts get the
same samples for the loss, so that their gradients can be compared; they are timed in turn. Rewards, optimiser and the
teacher's update are the same in both and left out. FLOP at the size of Sa2VA-4B: grpo_flops.

Gradients are compared in float32, where equal layouts agree; times are those of the device's own dtype, which is
bfloat16 with float32 trainable tensors on a GPU, under autocast as in the trainer.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.segment import exact_float32
from rl_reward_network.cli.app import run
from rl_reward_network.embedded.datasets import embedded_regions
from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig
from rl_reward_network.grpo.image_context import open_batch, seeded_generator
from rl_reward_network.grpo.inputs import open_grpo_inputs
from rl_reward_network.grpo.losses import caption_loss, count_step, mask_policy_loss
from rl_reward_network.grpo.policy import PolicyOutputs, mixed_precision, prepare_model
from rl_reward_network.grpo.prompts import DESCRIBE, TrainingItem, segment_question
from rl_reward_network.grpo.rewards import Reward
from rl_reward_network.grpo.rollouts import MicroBatch, Rollouts, prompt_images
from rl_reward_network.grpo.trainer import Sa2VAGRPOTrainer
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.sa2va.generation_sa2va import Decoding, evaluating
from rl_reward_network.models.sa2va.loading_sa2va import Dtype, load_sa2va_model
from rl_reward_network.models.sa2va.pixels_sa2va import upsample_mask_logits
from rl_reward_network.models.sa2va.prediction_sa2va import answer_batch
from rl_reward_network.rewards.functions import iou_reward, meteor_reward

BAR = 1e-3  # of gradients: sums in another order differ by 1e-5, a wrong layout by 1


@dataclass(frozen=True)
class Args:
    """Time one GRPO step in both layouts."""

    model_path: str = DEFAULT_MODEL
    """Sa2VA folder or hub id."""
    prompts: int = 8
    """Regions in a step."""
    num_generations: int = 4
    """Captions per region."""
    num_mask_generations: int = 8
    """Masks per phrase."""
    repeats: int = 3
    """Pairs of measurements, after one that is not counted."""
    device: str = "cuda:0" if torch.cuda.is_available() else "cpu"
    """cpu, cuda:0, ..."""


@dataclass
class Seconds:
    """Wall time by part."""

    parts: dict[str, float] = field(default_factory=dict)

    def of(self, name: str, function: Callable[[], Any]) -> Any:
        """Call the function and add its time to a part."""
        start = time.perf_counter()
        result = function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - start
        return result


def main(args: Args) -> None:
    """Measure and print; the times first, which need less memory."""
    with TemporaryDirectory() as folder:
        show(timed_pairs(args, Path(folder)))
        with exact_float32():
            different = float32_difference(args, Path(folder))
    print(f"largest difference of a float32 gradient, relative to its tensor's largest: {different:.1e} (bar {BAR:g})")


def timed_pairs(args: Args, folder: Path) -> list[tuple[Seconds, Seconds]]:
    """Both layouts in turn, after a pair that is not counted."""
    trainer, prompts = make_trainer(args, folder)
    groups = samples(trainer, prompts)
    ours(trainer, prompts, groups), usual(trainer, prompts, groups)
    return [(ours(trainer, prompts, groups), usual(trainer, prompts, groups)) for _ in range(args.repeats)]


def float32_difference(args: Args, folder: Path) -> float:
    """`gradient_difference` of a float32 model."""
    trainer, prompts = make_trainer(args, folder, "float32")
    return gradient_difference(trainer, prompts, samples(trainer, prompts))


def make_trainer(args: Args, folder: Path, dtype: Dtype = "auto") -> tuple[Sa2VAGRPOTrainer, list[TrainingItem]]:
    """A trainer on the embedded regions, and the prompts of one step, all about different images."""
    inputs = open_grpo_inputs(RunConfig(data_root=embedded_regions()))
    prompts = {prompt.group_id: prompt for prompt in inputs.pick("policy")}
    model, processor = load_sa2va_model(args.model_path, args.device, dtype=dtype)
    prepare_model(model, 16, 32)
    settings = Sa2VAGRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=args.prompts * args.num_generations,
        num_generations=args.num_generations,
        num_mask_generations=args.num_mask_generations,
        max_completion_length=24,
        report_to="none",
        use_cpu=args.device == "cpu",
    )
    loop1, loop2 = {"iou": Reward(iou_reward, 1.0)}, {"meteor": Reward(meteor_reward, 1.0)}
    picked = list(prompts.values())[: args.prompts]
    trainer = Sa2VAGRPOTrainer(model, processor, settings, picked, {"loop1": loop1, "loop2": loop2})
    trainer.freeze_unreached(picked[:2])
    trainer.reset_reference()
    return trainer, picked


def samples(trainer: Sa2VAGRPOTrainer, prompts: list[TrainingItem]) -> MicroBatch:
    """Rollouts with advantages of both signs, so that each completion has a gradient, and the reference's outputs."""
    with mixed_precision(trainer.sa2va):
        rollouts = trainer.rollout_generator.generate(prompts, (0, 0, 0))
    with torch.no_grad(), trainer.reference_weights(), mixed_precision(trainer.sa2va):
        reference = trainer.policy(rollouts)[0].stored()
    captions = [torch.linspace(-1, 1, len(caption.completion_ids)) for caption in rollouts.captions]
    return MicroBatch(
        rollouts, captions, [torch.linspace(-1, 1, len(mask.actions)) for mask in rollouts.masks], reference
    )


# ---- our layout ----


def ours(trainer: Sa2VAGRPOTrainer, prompts: list[TrainingItem], batch: MicroBatch) -> Seconds:
    """One step as in the trainer, with image features computed anew as for new images."""
    seconds = Seconds()
    with mixed_precision(trainer.sa2va):
        our_rollouts(trainer, prompts, seconds)
    learn(trainer, batch, lambda: trainer.policy(batch.rollouts)[0], seconds)
    return seconds


def our_rollouts(trainer: Sa2VAGRPOTrainer, prompts: list[TrainingItem], seconds: Seconds) -> None:
    """Both loops' generations, those about an image from one computation of its prefix."""
    generator = trainer.rollout_generator
    generator.cache.entries.clear()
    batch = seconds.of("image encoders", lambda: open_batch(prompts, generator.cache))
    rng, images = seeded_generator((0, 0, 0)), prompt_images(batch)
    context = seconds.of("sampling captions", lambda: batch.context(generator.model))
    captions, _ = seconds.of("sampling captions", lambda: generator.sample_captions(batch, context, images, rng))
    empty = Rollouts(len(prompts), [], generator.reference_answers(batch, images))
    masks, _ = seconds.of("sampling masks", lambda: generator.sample_masks(batch, context, empty, rng))
    teacher = seconds.of("drawing captions", lambda: batch.context(generator.model))
    seconds.of("drawing captions", lambda: generator.masks_of_captions(batch, teacher, captions))
    seconds.of("describing masks", lambda: generator.captions_of_masks(batch, teacher, masks))


def learn(trainer: Sa2VAGRPOTrainer, batch: MicroBatch, outputs: Callable[[], PolicyOutputs], seconds: Seconds) -> None:
    """The reference's outputs, then loss and gradients; as in the trainer, autocast covers the forward passes alone."""

    def reference() -> None:
        with torch.no_grad(), trainer.reference_weights(), mixed_precision(trainer.sa2va):
            outputs()

    def loss() -> None:
        with mixed_precision(trainer.sa2va):
            current = outputs()
        total_loss(trainer, batch, current).backward()

    seconds.of("reference", reference)
    trainer.sa2va.zero_grad()
    seconds.of("loss and gradients", loss)


def total_loss(trainer: Sa2VAGRPOTrainer, batch: MicroBatch, outputs: PolicyOutputs) -> Tensor:
    """Both loops' loss."""
    counts, policy = count_step([batch.rollouts]), trainer.policy.mask_policy
    captions = caption_loss(batch, outputs, trainer.args, counts.tokens)
    return captions.value + mask_policy_loss(batch, outputs, trainer.args, len(batch.rollouts.masks), policy).value


# ---- the usual layout ----


def usual(trainer: Sa2VAGRPOTrainer, prompts: list[TrainingItem], batch: MicroBatch) -> Seconds:
    """The same step, each generation computed separately."""
    seconds = Seconds()
    with mixed_precision(trainer.sa2va):
        usual_rollouts(trainer, prompts, seconds)
    learn(trainer, batch, lambda: repeated(trainer, prompts, batch), seconds)
    return seconds


def usual_rollouts(trainer: Sa2VAGRPOTrainer, prompts: list[TrainingItem], seconds: Seconds) -> None:
    """Both loops' generations, each from its whole text and image."""
    loaded = [prompt.load() for prompt in prompts]
    count, masks = trainer.args.num_generations, trainer.args.num_mask_generations
    regions = [(image, DESCRIBE, mask) for image, mask in loaded for _ in range(count)]
    answers = seconds.of("sampling captions", lambda: answered(trainer, regions, 1.0))
    processor = trainer.rollout_generator.processor
    captions = [processor.text(answer.token_ids).removesuffix("<|im_end|>") for answer in answers]
    segment = [(image, segment_question(text), None) for (image, _, _), text in zip(regions, captions, strict=True)]
    seconds.of("drawing captions", lambda: segmented(trainer, segment))
    pairs = zip(prompts, loaded, strict=True)
    questions = [(image, prompt.question, None) for prompt, (image, _) in pairs for _ in range(masks)]
    sampled = seconds.of("sampling masks", lambda: segmented(trainer, questions))
    describe = [(image, DESCRIBE, mask) for (image, _, _), mask in zip(questions, sampled, strict=True) if mask.any()]
    seconds.of("describing masks", lambda: answered(trainer, describe, 0.0))


def answered(trainer: Sa2VAGRPOTrainer, asked: list[tuple[np.ndarray, str, Any]], temperature: float) -> list[Any]:
    """Answers to (image, question, region) in one batch; the image is repeated for each."""
    model, processor = trainer.sa2va, trainer.rollout_generator.processor
    with evaluating(model), torch.no_grad():
        how = Decoding(24, temperature, generator=seeded_generator((0,)))
        return answer_batch(model, processor, _inputs(trainer, asked), how)


def _inputs(trainer: Sa2VAGRPOTrainer, asked: list[tuple[np.ndarray, str, Any]]) -> dict[str, Any]:
    inputs = trainer.rollout_generator.processor(
        ["<image>" + text for _, text, _ in asked],
        [image for image, _, _ in asked],
        None if asked[0][2] is None else [mask[None] for _, _, mask in asked],
    )
    return send_to_device(inputs, trainer.sa2va.device)


def segmented(trainer: Sa2VAGRPOTrainer, asked: list[tuple[np.ndarray, str, Any]]) -> list[np.ndarray]:
    """The mask of each (image, question): answers in one batch, SAM 2's encoder in one batch, one decoding each."""
    model, processor, masks = trainer.sa2va, trainer.rollout_generator.processor, []
    inputs = _inputs(trainer, asked)
    with evaluating(model), torch.no_grad():
        answers = answer_batch(model, processor, inputs, Decoding(24))
        features = model.get_sam_features(inputs["sam_pixel_values"])
        for number, ((image, _, _), answer) in enumerate(zip(asked, answers, strict=True)):
            states = answer.states_at(processor.seg_token_id)
            if not states:
                masks.append(np.zeros(image.shape[:2], dtype=bool))
                continue
            logits = model.decode_masks(features[number], model.text_hidden_fcs(states[0][None])).mask_logits
            masks.append((upsample_mask_logits(logits, image.shape[:2], processor.sam_image_size)[0] > 0).cpu().numpy())
    return masks


def repeated(trainer: Sa2VAGRPOTrainer, prompts: list[TrainingItem], batch: MicroBatch) -> PolicyOutputs:
    """The outputs of `GRPOPolicy`, from each whole text with its image, and all logits of all tokens."""
    pairs = [_repeated(trainer, prompt, batch.rollouts, row) for row, prompt in enumerate(prompts)]
    longest = max(rows.shape[1] for rows, _ in pairs)
    log_probs = [torch.nn.functional.pad(rows, (0, longest - rows.shape[1])) for rows, _ in pairs]
    entropies = [torch.zeros_like(rows) for rows in log_probs]
    return PolicyOutputs(log_probs, entropies, [], [parameters for _, parameters in pairs], [])


def _repeated(
    trainer: Sa2VAGRPOTrainer, prompt: TrainingItem, rollouts: Rollouts, number: int
) -> tuple[Tensor, Tensor]:
    model, processor, (image, _) = trainer.sa2va, trainer.rollout_generator.processor, prompt.load()
    caption, answer = rollouts.captions[number], rollouts.answers[number]
    count, question = len(caption.completion_ids), caption.question
    pixels = processor.pixel_values(processor.tiles(image)).to(model.device)
    texts = [question.prefix_ids + question.suffix_ids + ids for ids in caption.completion_ids]
    padded = {name: tensor.to(model.device) for name, tensor in processor.pad(texts).items()}
    assert question.region_cells is not None
    logits = model(
        **padded,
        pixel_values=pixels.repeat(count, 1, 1, 1),
        prompt_masks=[question.region_cells] * count,
        vp_overall_mask=torch.tensor([False] * (len(pixels) - 1) + [True]).repeat(count),
    ).logits.float()
    logits[..., processor.never_sampled_ids] = float("-inf")
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, padded["input_ids"][:, 1:, None])[..., 0]
    rows = [log_probs[row, -len(ids) :] for row, ids in enumerate(caption.completion_ids)]
    ids = torch.tensor([answer.image.prefix_ids + answer.token_ids], device=model.device)
    masks = trainer.args.num_mask_generations
    states = model(input_ids=ids.repeat(masks, 1), pixel_values=pixels.repeat(masks, 1, 1, 1)).last_hidden_state
    embeddings = torch.stack([row[0] for row in model.seg_embeddings(states, ids.repeat(masks, 1))])
    return pad_sequence(rows, batch_first=True), embeddings.mean(dim=0)


# ---- comparison ----


def gradient_difference(trainer: Sa2VAGRPOTrainer, prompts: list[TrainingItem], batch: MicroBatch) -> float:
    """Largest difference between the two layouts' gradients, relative to the largest number of each tensor."""
    gradients = []
    for layout in (lambda: trainer.policy(batch.rollouts)[0], lambda: repeated(trainer, prompts, batch)):
        trainer.sa2va.zero_grad()
        with mixed_precision(trainer.sa2va):
            outputs = layout()
        total_loss(trainer, batch, outputs).backward()
        named = trainer.sa2va.named_parameters()
        gradients.append({name: p.grad.clone() for name, p in named if p.requires_grad and p.grad is not None})
    return max(
        float((gradients[0][name] - gradients[1][name]).abs().max() / gradients[0][name].abs().max().clamp(min=1e-6))
        for name in gradients[0]
    )


def show(pairs: list[tuple[Seconds, Seconds]]) -> None:
    """Print medians by part, and the ratio of whole steps."""
    table = Table("part", "ours, s", "usual, s", "ratio", "share of ours", title="one optimisation step")
    totals = [(sum(ours.parts.values()), sum(usual.parts.values())) for ours, usual in pairs]
    ours_total, usual_total = (statistics.median(pair[side] for pair in totals) for side in (0, 1))
    for name in dict.fromkeys(name for ours, usual in pairs for name in (*ours.parts, *usual.parts)):
        ours, usual = (statistics.median(pair[side].parts.get(name, 0.0) for pair in pairs) for side in (0, 1))
        ratio = f"{usual / ours:.1f}" if ours else "-"
        table.add_row(name, f"{ours:.3f}", f"{usual:.3f}", ratio, f"{ours / ours_total:.0%}")
    ratios = [usual / ours for ours, usual in totals]
    ratio = f"{statistics.median(ratios):.1f}"
    table.add_row("whole step", f"{ours_total:.3f}", f"{usual_total:.3f}", ratio, "100%")
    Console().print(table)
    print(f"ratio: {statistics.median(ratios):.2f}x (pairs {min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    run(main, Args)
