"""The roads of the comparison: which weights, which source of a soft mask, what is done to it.

A road is a source and a refinement, so combinations need no code of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Group = Literal["prompts", "post", "fusion", "weights", "combined"]
GROUPS: tuple[Group, ...] = ("prompts", "post", "fusion", "weights", "combined")
Source = Literal["default", "fixed", "policy", "best of", "mean", "weighted mean", "flips", "network"]
Refinement = Literal["", "threshold", "sequence", "policy", "fusion", "ascent"]

BASE = "base"  # the model as it is: its weights, and the road of its default prompt
REWARD_NET, PROMPTS_LABELS, PROMPTS_NET, POST = "reward_net", "experiment1", "experiment3", "experiment2"
SUPERVISED, GRPO_LABELS, GRPO_NET, GRADIENT = "supervised", "grpo_labels", "grpo_net", "gradient"
AFTER = "supervised_grpo_net"
FINE_TUNED = "fine_tuned"  # the weights that are best on validation patients; decided when they are measured
WEIGHTS = (SUPERVISED, GRPO_LABELS, GRPO_NET, GRADIENT, AFTER)

FUSION_WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of the reward network's map
ASCENT_STEPS = (0.05, 0.1, 0.2, 0.5, 1.0)  # largest change of a pixel in one of ten steps


@dataclass(frozen=True)
class Method:
    """One way to a mask.

    Args:
        name: of the road, unique; part of file names.
        group: of the road, for `--roads`; None for the model as it is.
        title: the road in words.
        parts: what must be trained for it, is charged to it, and makes its masks.
        weights: of Sa2VA: `BASE`, one of `WEIGHTS`, or `FINE_TUNED`.
        source: of the soft mask.
        policy: part whose prompt policy (or whose best fixed prompt) is the source.
        refinement: of the soft mask.
        grid: values of the refinement's parameter; validation patients choose one.
        trained_with: further parts that the commands of `parts` ask for; neither charged nor used.
    """

    name: str
    group: Group | None
    title: str
    parts: tuple[str, ...] = ()
    weights: str = BASE
    source: Source = "default"
    policy: str = ""
    refinement: Refinement = ""
    grid: tuple[float, ...] = ()
    trained_with: tuple[str, ...] = ()

    @property
    def searched(self) -> bool:
        """Whether the road uses what a part found by search before it trained its policy."""
        return self.source == "fixed" or self.refinement in ("threshold", "sequence")


NET, EXP1, EXP3 = (REWARD_NET,), (PROMPTS_LABELS,), (REWARD_NET, PROMPTS_NET)
METHODS = (
    Method(BASE, None, "the model as it is, default prompt"),
    Method(
        "fixed_prompt", "prompts", "best fixed prompt", EXP1, source="fixed", policy=PROMPTS_LABELS, trained_with=NET,
    ),
    Method(
        PROMPTS_LABELS, "prompts", "experiment 1: prompts, labels", EXP1, source="policy", policy=PROMPTS_LABELS,
        trained_with=NET,
    ),
    Method(PROMPTS_NET, "prompts", "experiment 3: prompts, reward network", EXP3, source="policy", policy=PROMPTS_NET),
    Method("best_of_prompts", "prompts", "best of all prompts by the reward network", NET, source="best of"),
    Method("mean_of_prompts", "prompts", "mean of the soft masks of all prompts", source="mean"),
    Method("weighted_mean", "prompts", "the same, weighted by predicted quality", NET, source="weighted mean"),
    Method("flips_and_scales", "prompts", "mean over flips and scales", source="flips"),
    Method("threshold", "post", "best threshold", (POST,), refinement="threshold"),
    Method("sequence", "post", "best fixed sequence of operations", (POST,), refinement="sequence"),
    Method(POST, "post", "experiment 2: post-processing policy", (POST,), refinement="policy"),
    Method("own", "fusion", "the reward network's own segmentation", NET, source="network"),
    Method("fusion", "fusion", "fusion with the reward network's map", NET, refinement="fusion", grid=FUSION_WEIGHTS),
    Method("ascent", "fusion", "ten steps up the reward network's score", NET, refinement="ascent", grid=ASCENT_STEPS),
    Method(SUPERVISED, "weights", "supervised LoRA and mask decoder", (SUPERVISED,), SUPERVISED),
    Method(GRPO_LABELS, "weights", "GRPO, labels", (GRPO_LABELS,), GRPO_LABELS),
    Method(GRPO_NET, "weights", "GRPO, reward network", (REWARD_NET, GRPO_NET), GRPO_NET),
    Method(GRADIENT, "weights", "gradient of the reward network", (REWARD_NET, GRADIENT), GRADIENT),
    Method(AFTER, "weights", "supervised, then GRPO, reward network", (REWARD_NET, SUPERVISED, AFTER), AFTER),
    Method(
        "prompt_post", "combined", "experiment 3, then experiment 2", (*EXP3, POST),
        source="policy", policy=PROMPTS_NET, refinement="policy",
    ),
    Method(
        "fine_tuned_prompts", "combined", "best weights, prompts of experiment 3", (*EXP3, FINE_TUNED), FINE_TUNED,
        source="policy", policy=PROMPTS_NET,
    ),
    Method(
        "fine_tuned_fusion", "combined", "best weights, fusion with the reward network", (*NET, FINE_TUNED), FINE_TUNED,
        refinement="fusion", grid=FUSION_WEIGHTS,
    ),
)  # fmt: skip


def methods_of(groups: Sequence[Group]) -> tuple[Method, ...]:
    """The model as it is, and the roads of these groups, in the order of the table.

    The best weights are known only where roads of the group `weights` are measured.

    Raises:
        ValueError: the group `combined` without `weights`.
    """
    if "combined" in groups and "weights" not in groups:
        raise ValueError("roads: combined needs the best of the fine-tuned weights; give weights as well")
    return tuple(method for method in METHODS if method.group is None or method.group in groups)


def parts_of(methods: Sequence[Method]) -> tuple[str, ...]:
    """The parts that must be trained for these roads, each once, those that others need first."""
    order = (REWARD_NET, PROMPTS_LABELS, PROMPTS_NET, POST, *WEIGHTS)
    needed = {part for method in methods for part in (*method.parts, *method.trained_with)}
    return tuple(part for part in order if part in needed)
