"""Rewards by name, for PPO (`--reward`), GRPO (`--mask_rewards`) and the evaluation, and as functions of columns.

Those that need the true mask are the metrics in [0, 1] of which higher is better, and `betti`, the two Betti errors as
one number; `rewards/metrics.py` says how to add one. A reward that needs the image alone, or the mask alone as
`single_tree`, is a function and an entry of `IMAGE_REWARDS`: PPO and GRPO then take its name, on unlabelled images too.
The functions of a file that the variable `SA2VA_RL_REWARDS` names are such entries, so a reward of one's own changes no
file here.
"""

import hashlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import groupby
from pathlib import Path
from runpy import run_path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from rl_reward_network.rewards.combine import caption_reward
from rl_reward_network.rewards.metrics import METRICS, betti_match, meteor, one_tree

if TYPE_CHECKING:  # torch takes long to import, and --help needs this table
    from rl_reward_network.rewards.judge import Judge
    from rl_reward_network.rewards.learned import ForegroundMaps

MASK_REWARDS = {name: metric.function for name, metric in METRICS.items() if metric.is_reward} | {"betti": betti_match}

ImageReward = Callable[[np.ndarray, np.ndarray], np.ndarray]
IMAGE_REWARDS: dict[str, ImageReward] = {"single_tree": lambda masks, image: one_tree(masks)}
"""Name -> function of masks bool (N, H, W) and their image uint8 (H, W, 3), to float64 (N,) in [0, 1]."""

OWN_REWARDS = "SA2VA_RL_REWARDS"  # environment variable: a Python file with rewards of the user
RESERVED = {
    *(*MASK_REWARDS, *IMAGE_REWARDS, "net", "net_and_dice", "score"),  # other rewards, the reward network's column
    *("learned", "confidence", "meteor", "judge", "caption"),  # terms of GRPO
    *("scores", "features", "metrics", "own_dice", "sample_id", "group_id"),  # beside the rewards in tables.json
}


def own_rewards(file: str | None) -> dict[str, ImageReward]:
    """Name -> reward, for each public function that a Python file defines; the file is run, its folder on the path.

    None or "" gives no rewards.

    Raises:
        ValueError: the file is missing, cannot be run, or defines no function; a function cannot be called as
            (masks, image), or has a name that is taken. A function raises it, too, where its values are not float (N,)
            in [0, 1].
    """
    if not file:
        return {}
    path = Path(file).expanduser()
    if not path.is_file() or path.suffix != ".py":
        raise ValueError(f"{OWN_REWARDS} is {file}, expected a Python file (.py) with your rewards; correct the path")
    sys.path.insert(0, str(path.resolve().parent))  # the file may import others beside it
    try:
        names = run_path(str(path), run_name=OWN_REWARDS)
    except Exception as error:
        raise ValueError(f"{file}: it cannot be run: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    functions = {
        name: value
        for name, value in names.items()
        if inspect.isfunction(value) and value.__module__ == OWN_REWARDS and not name.startswith("_")
    }
    if not functions:
        raise ValueError(f"{file}: defines no function; define one of (masks, image) for each reward")
    if taken := sorted(functions.keys() & RESERVED):
        raise ValueError(f"{file}: {taken[0]} is the name of a reward or a number of this project; rename the function")
    return {name: _checked(name, function, file) for name, function in functions.items()}


def _checked(name: str, function: ImageReward, file: str) -> ImageReward:
    """The function, whose values are checked at each call: a wrong one would train without an error."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        raise ValueError(
            f"{file}: {name}{inspect.signature(function)}: expected the arguments (masks, image); let the names of "
            "helpers begin with an underscore"
        ) from None

    path = Path(file).expanduser()

    @wraps(function)
    def checked(masks: np.ndarray, image: np.ndarray) -> np.ndarray:
        try:
            values = _numbers(function(masks.copy(), image.copy()))  # which it may change
        except (Exception, SystemExit) as error:  # of the user's code: any
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
            place = f" in line {lines[-1]}" if lines else ""
            given = f"masks {masks.dtype} {masks.shape} and an image {image.dtype} {image.shape}"
            raise ValueError(f"{file}: {name}: {type(error).__name__}{place}: {error}; it was given {given}") from error
        if values.shape != (len(masks),):
            raise ValueError(f"{file}: {name}: got shape {values.shape}, expected ({len(masks)},): one number per mask")
        if wrong := np.flatnonzero(~((values >= 0) & (values <= 1))).tolist():
            which = f"for mask {wrong[0] + 1} of {len(masks)}, with {int(masks[wrong[0]].sum())} pixels"
            raise ValueError(f"{file}: {name}: got {values[wrong[0]]} {which}; expected a number in [0, 1]: scale it")
        return values

    return checked


def _numbers(values: Any) -> np.ndarray:
    """float64 array of numbers, else a ValueError; tensors, also in a list, on any device, are their values."""
    if hasattr(values, "detach"):  # a tensor; torch is not imported for it
        return values.detach().cpu().double().numpy()
    if isinstance(values, list | tuple):
        values = [_numbers(value) if hasattr(value, "detach") else value for value in values]
    array = np.asarray(values)
    if array.dtype.kind not in "buif":
        raise ValueError(f"it returned {values!r:.80}, expected numbers")
    return array.astype(np.float64)


OWN = own_rewards(os.environ.get(OWN_REWARDS))
IMAGE_REWARDS |= OWN


def own_fingerprint(names: Iterable[str]) -> dict[str, str]:
    """{"own_rewards": SHA-256 of the file}, for the settings of a run, if one of its rewards is in it; else {}."""
    file = os.environ.get(OWN_REWARDS)
    if not file or not OWN.keys() & set(names):
        return {}
    return {"own_rewards": hashlib.sha256(Path(file).expanduser().read_bytes()).hexdigest()}


# PPO's rewards as weighted columns: `score` is the reward network's, the others are the mask rewards.
PROMPT_REWARDS: dict[str, dict[str, float]] = {
    "net": {"score": 1.0},
    **{name: {name: 1.0} for name in (*MASK_REWARDS, *IMAGE_REWARDS)},
    "net_and_dice": {"score": 0.5, "dice": 0.5},
    "dice+recall": {"dice": 0.5, "recall": 0.5},
}


def needs_truth(name: str) -> bool:
    """Whether a reward of `PROMPT_REWARDS`, or a mask reward, needs the true mask."""
    return any(column in MASK_REWARDS for column in PROMPT_REWARDS[name])


LEARNED = tuple(name for name, columns in PROMPT_REWARDS.items() if "score" in columns)
OF_LABELS = tuple(name for name in PROMPT_REWARDS if needs_truth(name) and name not in LEARNED)

WITH_OWN_FLAG = "iou"  # of weight 1 in loop 1, --loop2_iou_weight in loop 2

if TYPE_CHECKING:
    RewardName = str
    WeightedName = str
else:  # the choices of `--reward`, and of `--mask_rewards` and `--loop2_mask_rewards`
    RewardName = Literal[tuple(PROMPT_REWARDS)]
    WeightedName = Literal[tuple(name for name in (*MASK_REWARDS, *IMAGE_REWARDS) if name != WITH_OWN_FLAG)]


def prompt_reward(name: RewardName, scores: np.ndarray, metrics: Mapping[str, np.ndarray]) -> np.ndarray:
    """float32 (P,) in [0, 1]: the reward `name` of `PROMPT_REWARDS` of the masks of P prompts.

    `scores` are the reward network's; `metrics`, mask reward -> float64 (P,), lack those of the ground truth without
    it.

    Raises:
        ValueError: an unknown name, or a reward that needs the ground truth where there is none.
    """
    weights = PROMPT_REWARDS.get(name)
    if weights is None:
        known = ", ".join(PROMPT_REWARDS)
        raise ValueError(f"reward: got {name!r}; expected one of {known}, or name the file of yours by {OWN_REWARDS}")
    columns = {"score": scores, **metrics}
    if missing := weights.keys() - columns.keys():
        names = ", ".join(sorted(missing))
        raise ValueError(f"reward {name!r} needs labelled images: {names} is missing; use net, or label them")
    return np.sum([weight * columns[column] for column, weight in weights.items()], axis=0).astype(np.float32)


# ---- as functions of named columns, one value per generation: TRL's reward-function protocol -------------------------
#
# A function takes the columns that it needs by name and ignores the rest; None means that the reward is missing, which
# differs from 0. A reward that is the estimate of an ensemble may return `EnsembleScores` in place of a list, so that
# its noise is known. TRL's further arguments (`trainer_state`, `log_extra`, `log_metric`) are not passed. Columns, each
# a list with one entry per generation:
#
# - `prompts`: questions to the model.
# - `completions`: captions, of the policy in loop 1, of the EMA teacher in loop 2.
# - `completion_ids`: their tokens, as generated, the stop token included.
# - `captions`: reference captions.
# - `images`: uint8 (H, W, 3).
# - `masks`: ground truth, bool (H, W), or None.
# - `predicted_masks`: bool (H, W), or None if the answer has no `[SEG]`; overlap rewards are then 0.
# - `mask_probabilities`: float32 (H, W) in [0, 1], or None likewise.


class EnsembleScores(NamedTuple):
    """Rewards of N generations by an ensemble, and float (N, K), those by each of its members."""

    values: Sequence[float | None]
    members: np.ndarray


RewardFunction = Callable[..., Sequence[float | None] | EnsembleScores]
GroupFunction = Callable[..., np.ndarray]  # of other terms, each float64 (P, G) with NaN where missing
Mask = np.ndarray | None


def mask_reward(name: str) -> RewardFunction:
    """A reward of `MASK_REWARDS` or `IMAGE_REWARDS` as a function of columns, in [0, 1]; None without its truth."""
    of_image = name in IMAGE_REWARDS
    function = IMAGE_REWARDS[name] if of_image else MASK_REWARDS[name]

    def reward(*, predicted_masks: Sequence[Mask], **columns: Any) -> list[float | None]:
        values: list[float | None] = []
        for given, masks in _runs(columns["images" if of_image else "masks"], predicted_masks):
            if given is None:
                values += [None] * len(masks)
                continue
            stack = np.stack([np.zeros(given.shape[:2], dtype=bool) if mask is None else mask for mask in masks])
            found = function(stack, given if of_image else np.broadcast_to(given, stack.shape))
            values += [0.0 if mask is None else float(value) for mask, value in zip(masks, found, strict=True)]
        return values

    return reward


def _runs(keys: Sequence[Any], masks: Sequence[Mask]) -> Iterator[tuple[Any, list[Mask]]]:
    """Each run of one image or true mask, and the predicted masks beside it."""
    for _, group in groupby(zip(keys, masks, strict=True), key=lambda pair: id(pair[0])):
        pairs = list(group)
        yield pairs[0][0], [mask for _, mask in pairs]


iou_reward = mask_reward("iou")


def meteor_reward(*, completions: Sequence[str], captions: Sequence[str], **_: Any) -> list[float | None]:
    """METEOR of each caption, divided by the METEOR of its reference with itself, in [0, 1]."""
    return [float(value) for value in meteor(completions, captions, normalise=True)]


def judge_reward(judge: "Judge") -> RewardFunction:
    """The LLM judge's score in [-1, 1], below 0 for wrong statements; None where it is missing."""
    return lambda *, completions, captions, **_: judge.scores(completions, captions)


def judged_caption_reward(judge: "Judge") -> GroupFunction:
    """0.25 METEOR + 0.75 judge of whole groups, see `caption_reward`; the judge counts the imputed scores."""

    def reward(meteor: np.ndarray, judged: np.ndarray) -> np.ndarray:
        missing = np.isnan(judged)
        alone = missing.all(axis=1)
        judge.note(imputed=int(missing[~alone].sum()), groups_paid_by_meteor=int(alone.sum()))
        return caption_reward(meteor, judged)

    return reward


def learned_reward(maps: "ForegroundMaps") -> Callable[..., EnsembleScores]:
    """The reward network's score of each mask, in [0, 1], and those of its members; needs no ground truth.

    It is missing where the image is outside the network's domain.
    """

    def of_one_image(image: np.ndarray, masks: Sequence[Mask]) -> np.ndarray:
        """Score and members' scores (N, 1 + K); 0 without a mask."""
        present = np.array([mask is not None for mask in masks])
        stack = [mask.astype(np.float32) for mask in masks if mask is not None]
        scorer = maps.scorer(image)
        quality = scorer.quality(np.array(stack, dtype=np.float32).reshape(-1, *image.shape[:2]))
        columns = np.column_stack([quality["score"], quality["member_scores"]])
        scores = np.full((len(masks), columns.shape[1]), np.nan if scorer.outside else 0.0)
        scores[present] = columns
        return scores

    def reward(*, images: Sequence[np.ndarray], predicted_masks: Sequence[Mask], **_: Any) -> EnsembleScores:
        scores = np.concatenate([of_one_image(*group) for group in _runs(images, predicted_masks)])
        values = [None if np.isnan(score) else float(score) for score in scores[:, 0]]
        return EnsembleScores(values, np.nan_to_num(scores[:, 1:]))

    return reward


def confidence_reward(*, mask_probabilities: Sequence[Mask], **_: Any) -> list[float | None]:
    """Mean probability inside the predicted mask, scaled from [0.5, 1] to [0, 1]; favours clear edges."""
    inside = [np.empty(0) if probs is None else probs[probs > 0.5] for probs in mask_probabilities]
    return [float(2 * probs.mean() - 1) if len(probs) else 0.0 for probs in inside]
