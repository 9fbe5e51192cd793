"""Why loop 2 samples masks and not tokens, and how wide each mask policy must be: numbers, and a picture in docs.

    python -m benchmarks.mask_policies

On test scenes, with the embedded model: the probability p of the answer's tokens (the gradient of a policy over tokens
is proportional to 1 - p); then, for each mask policy and spread, how similar the masks of a group are, and in how many
groups the rewards of loop 2 differ.
"""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from benchmarks.common import show
from rl_reward_network.cli.app import run
from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig
from rl_reward_network.grpo.image_context import Question, open_batch, seeded_generator
from rl_reward_network.grpo.inputs import open_grpo_inputs
from rl_reward_network.grpo.policy import GRPOPolicy
from rl_reward_network.grpo.prompts import TrainingItem
from rl_reward_network.grpo.rewards import Reward, median_pair_iou, score, step_advantages
from rl_reward_network.grpo.rollouts import MASK_POLICIES, CaptionRollout, RolloutGenerator, Rollouts
from rl_reward_network.inputs.config import DEFAULT_REGIONS, RunConfig
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.sa2va.generation_sa2va import Decoding, evaluating
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.report.page import png
from rl_reward_network.rewards.table import iou_reward, meteor_reward

SPREADS = {
    "gaussian": (0.05, 0.1, 0.2, 0.4, 0.8, 1.6),
    "bernoulli": (0.25, 0.5, 1.0, 2.0, 4.0),
}
REWARDS = {"loop2": {"meteor": Reward(meteor_reward, 1.0), "iou": Reward(iou_reward, 0.0)}}
SAMPLED = 16  # answers per prompt


@dataclass(frozen=True)
class Args:
    """Measure the answers and masks that loop 2 can sample."""

    items: int = 48
    """Number of test regions."""
    picture: Path = Path("docs/pictures/mask_policies.png")
    """Path of the plot."""


def main(args: Args) -> None:
    """Measure, print, draw."""
    prompts = open_grpo_inputs(RunConfig(data_root=DEFAULT_REGIONS)).pick("test")[: args.items]
    model, processor = load_sa2va_model(DEFAULT_MODEL)
    with TemporaryDirectory() as folder:
        print(certainty_of_answers(make_generator(model, processor, folder, "gaussian"), prompts))
        rows = {
            name: [(spread, *measure_spread(model, processor, folder, name, spread, prompts)) for spread in spreads]
            for name, spreads in SPREADS.items()
        }
    heads = ("policy", "spread", "IoU between two masks", "IoU with the truth", "groups with different METEOR")
    lines = ((name, *row) for name, of_policy in rows.items() for row in of_policy)
    show(heads, ((name, f"{spread:g}", f"{a:.3f}", f"{b:.3f}", f"{c:.0%}") for name, spread, a, b, c in lines))
    args.picture.write_bytes(png(draw(rows)))
    print(f"\npicture: {args.picture}")


def make_generator(model: Any, processor: Any, folder: str, name: str) -> RolloutGenerator:
    """Rollouts of loop 2 alone, eight masks each."""
    config = Sa2VAGRPOConfig(
        output_dir=folder,
        mask_policy=name,  # type: ignore[arg-type]
        mask_to_caption_weight=0.0,
        max_completion_length=24,
        per_device_train_batch_size=8,
        report_to="none",
        use_cpu=True,
    )
    return RolloutGenerator(model, processor, config)


def certainty_of_answers(generator: RolloutGenerator, prompts: list[TrainingItem]) -> str:
    """Probability of the greedy answers, and the number of sampled answers that differ from them."""
    batch = open_batch(prompts, generator.cache)
    context = batch.context(generator.model)
    questions = [batch.question(row, prompt.question) for row, prompt in enumerate(prompts)]
    greedy = [answer.token_ids for (answer,) in context.answer(questions, Decoding(32))]
    probs = answer_probabilities(generator, generator.references(prompts).rollouts, questions, greedy)
    sampled = context.answer(questions, Decoding(32, 1.0, generator=seeded_generator((0,))), SAMPLED)
    differ = [
        answer.token_ids != token_ids for answers, token_ids in zip(sampled, greedy, strict=True) for answer in answers
    ]
    return (
        f"probability of the whole answer: {np.mean(probs):.6f} in the mean, {min(probs):.6f} at least; "
        f"{sum(differ)} of {len(differ)} sampled answers differ from it"
    )


@torch.no_grad()
def answer_probabilities(
    generator: RolloutGenerator, rollouts: Rollouts, questions: list[Question], answers: list[list[int]]
) -> list[float]:
    """Probability of each answer as a whole, scored like the completions of loop 1."""
    answered = zip(rollouts.answers, questions, answers, strict=True)
    captions = [
        CaptionRollout(a.image, question, [ids], torch.ones(1, dtype=torch.bool)) for a, question, ids in answered
    ]
    processor = generator.processor
    policy = GRPOPolicy(
        generator.model, generator.mask_policy, 1.0, processor.never_sampled_ids, processor.tokenizer.pad_token_id or 0
    )
    with evaluating(generator.model):
        outputs, _ = policy(Rollouts(len(captions), captions, []))
    return [float(log_probs.sum().exp()) for log_probs in outputs.log_probs]


def measure_spread(
    model: Any, processor: Any, folder: str, name: str, spread: float, prompts: list[TrainingItem]
) -> tuple[float, float, float]:
    """Median IoU between two masks of a group, mean IoU with the truth, share of groups whose METEOR differs."""
    generator = make_generator(model, processor, folder, name)
    generator.sigma_controller.sigma = spread
    with torch.no_grad():
        rollouts = generator.generate(prompts, (0, 0, 0))
    terms = score(rollouts, REWARDS)
    (advantages,) = step_advantages([terms], REWARDS, generator.config)
    pair_iou = median_pair_iou(rollouts.columns["loop2"]["predicted_masks"], len(prompts))
    return pair_iou, float(terms["loop2"].values["iou"].mean()), float(advantages["loop2"].differ.mean())


def draw(policies: dict[str, list[tuple[float, float, float, float]]]) -> Figure:
    """Quality of the masks, and share of groups with different rewards, over the similarity of a group's masks."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for policy, rows in policies.items():
        _, pair_iou, iou, differ = (np.array(column) for column in zip(*rows, strict=True))
        left.plot(1 - pair_iou, iou, marker=".", label=policy)
        right.plot(1 - pair_iou, differ, marker=".", label=policy)
    left.set(xlabel="1 - IoU between two masks of a group", ylabel="mean IoU with the truth")
    right.set(xlabel="1 - IoU between two masks of a group", ylabel="share of groups with different METEOR")
    left.legend()
    return figure


assert set(SPREADS) == set(MASK_POLICIES)

if __name__ == "__main__":
    run(main, Args)
