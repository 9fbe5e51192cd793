"""One GRPO step against the same step in the usual layout: how much faster, where, and that the gradients are equal.

    python -m benchmarks.grpo_step

The usual layout (as in trainers that know nothing of images): both image encoders for every generation, prompts
repeated for every generation, logits of the whole text over the whole vocabulary; generations are batched there, too.
Both layouts are given the same samples for the loss, so that their gradients can be compared; they are timed in turn.
Rewards, optimiser and partner's update are the same in both and left out. FLOP at the size of Sa2VA-4B: grpo_flops.
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
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rl_reward_network.cli.app import run
from rl_reward_network.grpo.config import Sa2VAGRPOConfig
from rl_reward_network.grpo.inputs import open_grpo_inputs
from rl_reward_network.grpo.items import DESCRIBE, GRPOItem, segment_question
from rl_reward_network.grpo.loss.objective import caption_loss, count_step, mask_loss
from rl_reward_network.grpo.loss.policy import Group, GroupOutput
from rl_reward_network.grpo.rollouts.batch import open_batch, random_stream
from rl_reward_network.grpo.rollouts.rewards import Reward
from rl_reward_network.grpo.setup import freeze_unreached, prepare_model
from rl_reward_network.grpo.trainer import Sa2VAGRPOTrainer
from rl_reward_network.inputs.config import DEFAULT_REGIONS, RunConfig
from rl_reward_network.models.sa2va.checkpoint_sa2va import DEFAULT_MODEL
from rl_reward_network.models.sa2va.generation_sa2va import Decoding, evaluating
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.pixels_sa2va import upsample_mask_logits
from rl_reward_network.models.sa2va.prediction_sa2va import answer_batch, to_device
from rl_reward_network.rewards.functions import iou_reward, meteor_reward


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
        """The function's result; its time is noted."""
        start = time.perf_counter()
        result = function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - start
        return result


def main(args: Args) -> None:
    """Measure and print."""
    with TemporaryDirectory() as folder:
        trainer, items = make_trainer(args, Path(folder))
        groups = samples(trainer, items)
        different = gradient_difference(trainer, items, groups)
        ours(trainer, items, groups), usual(trainer, items, groups)
        pairs = [(ours(trainer, items, groups), usual(trainer, items, groups)) for _ in range(args.repeats)]
    show(pairs)
    print(f"largest difference of a gradient, relative to its tensor's largest: {different:.1e}")


def make_trainer(args: Args, folder: Path) -> tuple[Sa2VAGRPOTrainer, list[GRPOItem]]:
    """A trainer on the embedded regions, and the items of one step, all of different images."""
    items = {item.image_id: item for item in open_grpo_inputs(RunConfig(data_root=DEFAULT_REGIONS)).pick("policy")}
    model, processor = load_sa2va_model(args.model_path, args.device)
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
    picked = list(items.values())[: args.prompts]
    trainer = Sa2VAGRPOTrainer(model, processor, settings, picked, {"loop1": loop1, "loop2": loop2})
    freeze_unreached(trainer, picked[:2])
    trainer.begin()
    return trainer, picked


def samples(trainer: Sa2VAGRPOTrainer, items: list[GRPOItem]) -> list[Group]:
    """Groups with advantages of both signs, so that every one takes part; what the reference says of them."""
    groups, _ = trainer.maker.sample(items, (0, 0, 0))
    for group in groups:
        group.token_advantages = torch.linspace(-1, 1, len(group.completions))
        assert group.actions is not None
        group.mask_advantages = torch.linspace(-1, 1, len(group.actions))
    with torch.no_grad(), trainer.as_reference():
        for group, output in zip(groups, trainer._policy(groups)[0], strict=True):
            group.reference = output.detached()
    return groups


# ---- our layout ----


def ours(trainer: Sa2VAGRPOTrainer, items: list[GRPOItem], groups: list[Group]) -> Seconds:
    """One step as the trainer takes it, image features computed anew as for images never seen."""
    seconds = Seconds()
    maker, policy = trainer.maker, trainer._policy
    maker.cache.kept.clear()
    maker.cache.nbytes = 0
    batch = seconds.of("image encoders", lambda: open_batch(items, maker.cache))
    chance, fresh = random_stream((0, 0, 0)), maker._groups(batch)
    context = seconds.of("sampling captions", lambda: batch.context(maker.model))
    captions = seconds.of("sampling captions", lambda: maker._sample_captions(batch, context, fresh, chance))
    masks = seconds.of("sampling masks", lambda: maker._sample_masks(batch, context, fresh, chance))
    partner = seconds.of("drawing captions", lambda: batch.context(maker.model))
    seconds.of("drawing captions", lambda: maker._draw_captions(batch, partner, captions))
    seconds.of("describing masks", lambda: maker._describe_masks(batch, partner, masks))

    def reference() -> None:
        with torch.no_grad(), trainer.as_reference():
            policy(groups)

    seconds.of("reference", reference)
    trainer.sa2va.zero_grad()
    seconds.of("loss and gradients", lambda: total_loss(trainer, groups, policy(groups)[0]).backward())
    return seconds


def total_loss(trainer: Sa2VAGRPOTrainer, groups: list[Group], outputs: list[GroupOutput]) -> Tensor:
    """Both loops' loss."""
    pairs = list(zip(groups, outputs, strict=True))
    captions = caption_loss(pairs, trainer.args.loss_settings, count_step([groups]).tokens)
    masks = mask_loss(pairs, trainer._policy.mask_policy, trainer.args)
    assert captions is not None
    assert masks is not None
    return captions.loss + masks.loss


# ---- the usual layout ----


def usual(trainer: Sa2VAGRPOTrainer, items: list[GRPOItem], groups: list[Group]) -> Seconds:
    """The same step, every generation by itself."""
    seconds, loaded = Seconds(), [item.load() for item in items]
    count, masks = trainer.args.num_generations, trainer.args.num_mask_generations
    regions = [(image, DESCRIBE, mask) for image, mask in loaded for _ in range(count)]
    answers = seconds.of("sampling captions", lambda: answered(trainer, regions, 1.0))
    said = [trainer.maker.processor.text(answer.token_ids).removesuffix("<|im_end|>") for answer in answers]
    drawn = [(image, segment_question(text), None) for (image, _, _), text in zip(regions, said, strict=True)]
    seconds.of("drawing captions", lambda: segmented(trainer, drawn))
    asked = [(image, item.question, None) for item, (image, _) in zip(items, loaded, strict=True) for _ in range(masks)]
    found = seconds.of("sampling masks", lambda: segmented(trainer, asked))
    shown = [(image, DESCRIBE, mask) for (image, _, _), mask in zip(asked, found, strict=True) if mask.any()]
    seconds.of("describing masks", lambda: answered(trainer, shown, 0.0))

    def reference() -> None:
        with torch.no_grad(), trainer.as_reference():
            repeated(trainer, items, groups)

    seconds.of("reference", reference)
    trainer.sa2va.zero_grad()
    seconds.of("loss and gradients", lambda: total_loss(trainer, groups, repeated(trainer, items, groups)).backward())
    return seconds


def answered(trainer: Sa2VAGRPOTrainer, asked: list[tuple[np.ndarray, str, Any]], temperature: float) -> list[Any]:
    """Answers to (image, question, region) in one batch, each with its own image."""
    model, processor = trainer.sa2va, trainer.maker.processor
    with evaluating(model), torch.no_grad():
        how = Decoding(24, temperature, generator=random_stream((0,)))
        return answer_batch(model, processor, _inputs(trainer, asked), how)


def _inputs(trainer: Sa2VAGRPOTrainer, asked: list[tuple[np.ndarray, str, Any]]) -> dict[str, Any]:
    inputs = trainer.maker.processor(
        ["<image>" + text for _, text, _ in asked],
        [image for image, _, _ in asked],
        None if asked[0][2] is None else [mask[None] for _, _, mask in asked],
    )
    return to_device(inputs, trainer.sa2va.device)


def segmented(trainer: Sa2VAGRPOTrainer, asked: list[tuple[np.ndarray, str, Any]]) -> list[np.ndarray]:
    """The mask of each (image, question): answers in one batch, SAM 2's encoder in one batch, one decoding each."""
    model, processor, found = trainer.sa2va, trainer.maker.processor, []
    inputs = _inputs(trainer, asked)
    with evaluating(model), torch.no_grad():
        answers = answer_batch(model, processor, inputs, Decoding(24))
        features = model.get_sam_features(inputs["sam_pixel_values"])
        for number, ((image, _, _), answer) in enumerate(zip(asked, answers, strict=True)):
            states = answer.states_at(processor.seg_token_id)
            if not states:
                found.append(np.zeros(image.shape[:2], dtype=bool))
                continue
            logits = model.decode_masks(features[number], model.text_hidden_fcs(states[0][None])).mask_logits
            found.append((upsample_mask_logits(logits, image.shape[:2], processor.sam_image_size)[0] > 0).cpu().numpy())
    return found


def repeated(trainer: Sa2VAGRPOTrainer, items: list[GRPOItem], groups: list[Group]) -> list[GroupOutput]:
    """What `GRPOPolicy` gives, from every text in full with its own image, and all logits of all tokens."""
    outputs = [_repeated_captions(trainer, item, group) for item, group in zip(items, groups, strict=True)]
    longest = max(output.log_probs.shape[1] for output in outputs if output.log_probs is not None)
    for output in outputs:
        assert output.log_probs is not None
        output.log_probs = torch.nn.functional.pad(output.log_probs, (0, longest - output.log_probs.shape[1]))
        output.entropies = torch.zeros_like(output.log_probs)
    return outputs


def _repeated_captions(trainer: Sa2VAGRPOTrainer, item: GRPOItem, group: Group) -> GroupOutput:
    model, processor, (image, _) = trainer.sa2va, trainer.maker.processor, item.load()
    count = len(group.completions)
    pixels = processor.pixel_values(processor.tiles(image)).to(model.device)
    texts = [group.prefix_ids + group.describe_ids + one for one in group.completions]
    padded = {name: tensor.to(model.device) for name, tensor in processor.pad(texts).items()}
    assert group.cells is not None
    logits = model(
        **padded,
        pixel_values=pixels.repeat(count, 1, 1, 1),
        prompt_masks=[group.cells] * count,
        vp_overall_mask=torch.tensor([False] * (len(pixels) - 1) + [True]).repeat(count),
    ).logits.float()
    logits[..., processor.never_sampled_ids] = float("-inf")
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, padded["input_ids"][:, 1:, None])[..., 0]
    rows = [log_probs[row, -len(one) :] for row, one in enumerate(group.completions)]
    longest = max(map(len, rows))
    stacked = torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in rows])
    ids = torch.tensor([group.prefix_ids + group.segment_ids], device=model.device)
    assert group.actions is not None
    masks = len(group.actions)
    states = model(input_ids=ids.repeat(masks, 1), pixel_values=pixels.repeat(masks, 1, 1, 1)).last_hidden_state
    embeddings = torch.stack([own[0] for own in model.seg_embeddings(states, ids.repeat(masks, 1))])
    return GroupOutput(stacked, None, embeddings.mean(dim=0))


# ---- comparison ----


def gradient_difference(trainer: Sa2VAGRPOTrainer, items: list[GRPOItem], groups: list[Group]) -> float:
    """Largest difference between the two layouts' gradients, relative to the largest number of each tensor."""
    found = []
    for outputs in (trainer._policy(groups)[0], repeated(trainer, items, groups)):
        trainer.sa2va.zero_grad()
        total_loss(trainer, groups, outputs).backward()
        named = trainer.sa2va.named_parameters()
        found.append({name: p.grad.clone() for name, p in named if p.requires_grad and p.grad is not None})
    return max(
        float((found[0][name] - found[1][name]).abs().max() / found[0][name].abs().max().clamp(min=1e-6))
        for name in found[0]
    )


def show(pairs: list[tuple[Seconds, Seconds]]) -> None:
    """Medians by part, and the ratio of whole steps."""
    table = Table("part", "ours, s", "usual, s", "ratio", "share of ours", title="one optimisation step")
    names = list(dict.fromkeys(name for own, other in pairs for name in (*own.parts, *other.parts)))
    whole = statistics.median(sum(own.parts.values()) for own, _ in pairs)
    for name in names:
        own, other = (statistics.median(pair[side].parts.get(name, 0.0) for pair in pairs) for side in (0, 1))
        table.add_row(name, f"{own:.3f}", f"{other:.3f}", f"{other / own:.1f}" if own else "-", f"{own / whole:.0%}")
    ratios = [sum(other.parts.values()) / sum(own.parts.values()) for own, other in pairs]
    usual_whole = statistics.median(sum(other.parts.values()) for _, other in pairs)
    table.add_row("whole step", f"{whole:.3f}", f"{usual_whole:.3f}", f"{statistics.median(ratios):.1f}", "100%")
    Console().print(table)
    print(f"ratio: {statistics.median(ratios):.2f}x (pairs {min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    run(main, Args)
