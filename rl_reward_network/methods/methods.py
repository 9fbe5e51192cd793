"""The table of methods: what each is called, what it needs, how it is trained, and how it makes a mask."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.special import expit, logit

from rl_reward_network.grpo.settings import GRPOSettings
from rl_reward_network.methods import Group
from rl_reward_network.methods.predict import (
    Predict,
    best_of_prompts,
    default_prompt,
    fixed_prompt,
    fixed_sequence,
    mean_of_prompts,
    operations_policy,
    prompt_policy,
    threshold,
    weighted_mean,
)
from rl_reward_network.methods.training import (
    REWARD_NET,
    Train,
    train_operations,
    train_prompt_policy,
    train_reward_net,
    train_weights,
)
from rl_reward_network.methods.view import BASE, ImageView, Trained

PROMPTS_LABELS, PROMPTS_NET, POST = "experiment1", "experiment3", "experiment2"
SUPERVISED, AFTER = "supervised", "supervised_grpo_net"
TEACHER, PREFERENCES = "supervised_mean_teacher", "supervised_dpo"
SURE = 1e-4  # soft masks are kept this far from 0 and 1 where logits are taken
ASCENT = 10  # steps
FUSION_WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of the reward network's map
ASCENT_STEPS = (0.05, 0.1, 0.2, 0.5, 1.0)  # largest change of a pixel in one of ten steps
FLIPS = {"left-right": (1,), "up-down": (0,), "both": (0, 1)}
ZOOM = 5 / 8  # side of a magnified quarter of the image; neighbours overlap by a quarter
FINE_TUNED = "fine_tuned"  # the weights that are best on validation patients; decided when they are measured


def flips_and_scales(view: ImageView, trained: Trained, parameter: float | None) -> np.ndarray:
    """The mean of five soft masks: of the image, its three flips, and its magnified quarters (a mean in overlaps)."""
    prompt = trained.prompts[:1]
    total = view.soft(prompt)[0].copy()
    for name, axes in FLIPS.items():
        copy = np.ascontiguousarray(np.flip(view.image, axes))
        total += np.flip(view.soft_of(copy, prompt, name)[0], axes)
    size = view.image.shape[:2]
    magnified, count = np.zeros(size, np.float32), np.zeros(size, np.float32)
    for number, (rows, cols) in enumerate(quarters(size)):
        copy = np.ascontiguousarray(view.image[rows, cols])  # Sa2VA magnifies it to its input size
        magnified[rows, cols] += view.soft_of(copy, prompt, f"quarter {number}")[0]
        count[rows, cols] += 1
    return np.asarray((total + magnified / count) / 5)


def quarters(size: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of the four overlapping quarters of an image of size (H, W), which cover it."""
    sides = [(slice(0, round(ZOOM * length)), slice(length - round(ZOOM * length), length)) for length in size]
    yield from ((rows, cols) for rows in sides[0] for cols in sides[1])


def own_segmentation(view: ImageView, trained: Trained, parameter: float | None) -> np.ndarray:
    """The reward network's own segmentation: a plain segmenter."""
    return view.scorer.foreground_prob


def fused(view: ImageView, trained: Trained, parameter: float | None) -> np.ndarray:
    """Sa2VA's soft mask and the reward network's; `parameter` is the weight of the second."""
    assert parameter is not None
    return fusion(default_prompt(view, trained), view.scorer.foreground_prob, parameter)


def fusion(soft: np.ndarray, foreground_prob: np.ndarray, weight: float) -> np.ndarray:
    """float (H, W) in [0, 1]: weighted mean of two soft masks (H, W) in logits; `weight` in [0, 1] is the second's."""
    first, second = (logit(np.clip(mask.astype(np.float64), SURE, 1 - SURE)) for mask in (soft, foreground_prob))
    return np.asarray(expit((1 - weight) * first + weight * second))


def ascent(view: ImageView, trained: Trained, parameter: float | None) -> np.ndarray:
    """Sa2VA's soft mask after ten steps up the reward network's score; `parameter` is their size."""
    assert parameter is not None
    soft = default_prompt(view, trained)
    return np.asarray(list(view.scorer.ascend(soft[None], parameter, ASCENT))[-1][0])


@dataclass(frozen=True)
class Method:
    """One way to a mask."""

    name: str  # unique; part of file names, and name of the run that `train` makes
    group: Group | None  # for `--methods`; None for the base model
    title: str  # the method in words
    needs: tuple[str, ...] = ()  # runs that it uses and is charged for; `FINE_TUNED` is the best run of group weights
    predict: Predict = default_prompt  # the soft mask of an image
    grid: tuple[float, ...] = ()  # values of the parameter of `predict`; validation patients choose one
    weights: str = BASE  # of Sa2VA: `BASE`, the run of the group weights that trained them, or `FINE_TUNED`
    train: Train | None = None  # finds or makes the run of this name; None for methods that use the runs of others
    searched: bool = False  # uses what a run has found by search before it trained its policy


NET = (REWARD_NET,)
METHODS = (
    Method(BASE, None, "the model as it is, default prompt"),
    Method(
        "fixed_prompt", "prompts", "best fixed prompt", (PROMPTS_LABELS,), partial(fixed_prompt, PROMPTS_LABELS),
        searched=True,
    ),
    Method(
        PROMPTS_LABELS, "prompts", "experiment 1: prompts, labels", (PROMPTS_LABELS,),
        partial(prompt_policy, PROMPTS_LABELS), train=partial(train_prompt_policy, reward="dice"),
    ),
    Method(
        PROMPTS_NET, "prompts", "experiment 3: prompts, reward network", (*NET, PROMPTS_NET),
        partial(prompt_policy, PROMPTS_NET), train=train_prompt_policy,
    ),
    Method("best_of_prompts", "prompts", "best of all prompts by the reward network", NET, best_of_prompts),
    Method("mean_of_prompts", "prompts", "mean of the soft masks of all prompts", (), mean_of_prompts),
    Method("weighted_mean", "prompts", "the same, weighted by predicted quality", NET, weighted_mean),
    Method("flips_and_scales", "prompts", "mean over flips and scales", (), flips_and_scales),
    Method("threshold", "post", "best threshold", (POST,), partial(threshold, POST), searched=True),
    Method(
        "sequence", "post", "best fixed sequence of operations", (POST,), partial(fixed_sequence, POST), searched=True
    ),
    Method(
        POST, "post", "experiment 2: post-processing policy", (POST,), partial(operations_policy, POST),
        train=train_operations,
    ),
    Method("reward_net_segmentation", "fusion", "the reward network's own segmentation", NET, own_segmentation),
    Method("fusion", "fusion", "fusion with the reward network's map", NET, fused, FUSION_WEIGHTS),
    Method("ascent", "fusion", "ten steps up the reward network's score", NET, ascent, ASCENT_STEPS),
    Method(
        SUPERVISED, "weights", "supervised LoRA and mask decoder", (SUPERVISED,), weights=SUPERVISED,
        train=partial(train_weights, settings=GRPOSettings(objective="supervised")),
    ),
    Method("grpo_labels", "weights", "GRPO, labels", ("grpo_labels",), weights="grpo_labels", train=train_weights),
    Method(
        "grpo_net", "weights", "GRPO, reward network", (*NET, "grpo_net"), weights="grpo_net",
        train=partial(train_weights, learned=True),
    ),
    Method(
        "gradient", "weights", "gradient of the reward network", (*NET, "gradient"), weights="gradient",
        train=partial(train_weights, settings=GRPOSettings(caption_to_mask_weight=0.0), learned=True),
    ),
    Method(
        AFTER, "weights", "supervised, then GRPO, reward network", (*NET, SUPERVISED, AFTER), weights=AFTER,
        train=partial(train_weights, learned=True, after=SUPERVISED),
    ),
    Method(
        TEACHER, "weights", "supervised, then mean teacher", (SUPERVISED, TEACHER), weights=TEACHER,
        train=partial(train_weights, settings=GRPOSettings(objective="mean_teacher"), after=SUPERVISED),
    ),
    Method(
        PREFERENCES, "weights", "supervised, then DPO, reward network",
        (*NET, SUPERVISED, PREFERENCES), weights=PREFERENCES,
        train=partial(train_weights, settings=GRPOSettings(objective="dpo"), learned=True, after=SUPERVISED),
    ),
    Method(
        "prompt_post", "combined", "experiment 3, then experiment 2", (*NET, PROMPTS_NET, POST),
        partial(operations_policy, POST, source=partial(prompt_policy, PROMPTS_NET)),
    ),
    Method(
        "fine_tuned_prompts", "combined", "best weights, prompts of experiment 3", (*NET, PROMPTS_NET, FINE_TUNED),
        partial(prompt_policy, PROMPTS_NET), weights=FINE_TUNED,
    ),
    Method(
        "fine_tuned_fusion", "combined", "best weights, fusion with the reward network", (*NET, FINE_TUNED), fused,
        FUSION_WEIGHTS, FINE_TUNED,
    ),
)  # fmt: skip
TRAINED = {REWARD_NET: train_reward_net, **{method.name: method.train for method in METHODS if method.train}}
"""Name of a run -> how it is made, in an order in which each comes after those that it needs."""
WEIGHTS = tuple(method.name for method in METHODS if method.group == "weights")
TRAINED_WITH = {PROMPTS_LABELS: REWARD_NET}  # the report of its run shows the network, which is not charged


def methods_of(groups: Sequence[Group]) -> tuple[Method, ...]:
    """The base model, and the methods of these groups, as in the table; a ValueError for combined without weights."""
    if "combined" in groups and "weights" not in groups:
        raise ValueError("methods: combined needs the best of the fine-tuned weights; give weights as well")
    return tuple(method for method in METHODS if method.group is None or method.group in groups)


def runs_of(methods: Sequence[Method]) -> tuple[str, ...]:
    """The runs that these methods need, each once, in the order of training."""
    needed = {run for method in methods for run in method.needs}
    needed |= {also for run, also in TRAINED_WITH.items() if run in needed}
    return tuple(run for run in TRAINED if run in needed)
