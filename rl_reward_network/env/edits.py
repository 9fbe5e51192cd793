"""An image whose mask is edited: every sequence of operations is computed once."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rl_reward_network.env.operations import OPERATIONS, GuideImage, apply_operation
from rl_reward_network.env.post_observation import observe_mask
from rl_reward_network.env.post_process_env import MaskState
from rl_reward_network.rewards.learned import ImageScorer
from rl_reward_network.rewards.metrics import dice, recall

KEPT = 24  # soft masks in memory for each image; others are computed again from the nearest kept one
LabelReward = Callable[[np.ndarray, np.ndarray], float]
"""(mask, truth), bool (H, W) each -> reward in [0, 1]."""

LABEL_REWARDS: dict[str, LabelReward] = {
    "dice": lambda mask, truth: float(dice(mask[None], truth[None])[0]),
    "dice+recall": lambda mask, truth: float(dice(mask[None], truth[None])[0] + recall(mask[None], truth[None])[0]) / 2,
}


@dataclass(eq=False)
class EditedImage:
    """One image, its soft mask by Sa2VA, and what its masks are worth.

    Args:
        sample_id: hash that names the image and phrase.
        group_id: hash that names the patient.
        guide: the image.
        soft: float32 (H, W) in [0, 1], Sa2VA's soft mask.
        features: float32 (F,), of the image, for the policy.
        truth: bool (H, W); None for an unlabelled image.
        scorer: the reward network applied to the image; None without one.
        reward: "net", or a name in `LABEL_REWARDS`.
        paid_by: truth that pays, if it is not `truth`: in the control with shuffled rewards that of another image.
    """

    sample_id: str
    group_id: str
    guide: GuideImage
    soft: np.ndarray
    features: np.ndarray
    truth: np.ndarray | None
    scorer: ImageScorer | None = None
    reward: str = "dice"
    paid_by: np.ndarray | None = None
    _states: dict[tuple[int, ...], MaskState] = field(default_factory=dict)
    _values: dict[tuple[int, ...], tuple[float, float | None]] = field(default_factory=dict)
    _softs: "OrderedDict[tuple[int, ...], np.ndarray]" = field(default_factory=OrderedDict)

    def state(self, operations: tuple[int, ...]) -> MaskState:
        """The mask after a sequence of operations."""
        if operations not in self._states:
            soft = self.edited(operations)
            reward, gold = self._value(operations, soft)
            info = {} if gold is None else {"dice": gold}
            self._states[operations] = MaskState(observe_mask(self.guide, soft), reward, info)
        return self._states[operations]

    def worth(self, operations: tuple[int, ...]) -> float:
        """The reward of the mask after a sequence of operations, in [0, 1]."""
        return self._value(operations)[0]

    def _value(self, operations: tuple[int, ...], soft: np.ndarray | None = None) -> tuple[float, float | None]:
        """Reward and Dice, of one look at the mask; `soft` is the mask where the caller has it."""
        if operations not in self._values:
            mask = (self.edited(operations) if soft is None else soft) > 0.5
            gold = None if self.truth is None else LABEL_REWARDS["dice"](mask, self.truth)
            pays = gold is not None and self.reward == "dice" and self.paid_by is None
            self._values[operations] = (gold if pays and gold is not None else self.reward_of(mask), gold)
        return self._values[operations]

    def edited(self, operations: tuple[int, ...]) -> np.ndarray:
        """float32 (H, W): the soft mask after a sequence of operations."""
        if not operations:
            return self.soft
        if operations not in self._softs:
            before = self.edited(operations[:-1])
            after = apply_operation(OPERATIONS[operations[-1]], self.guide, before)
            self._softs[operations] = after.astype(np.float16)
            while len(self._softs) > KEPT:
                self._softs.popitem(last=False)
            return after
        return self._softs[operations].astype(np.float32)

    def mask(self, operations: tuple[int, ...]) -> np.ndarray:
        """bool (H, W): the mask after a sequence of operations."""
        return self.edited(operations) > 0.5

    def dice(self, operations: tuple[int, ...]) -> float:
        """Dice of the mask after a sequence of operations; the image is labelled."""
        gold = self._value(operations)[1]
        assert gold is not None
        return gold

    def score(self, operations: tuple[int, ...]) -> float:
        """The reward network's score of the mask; there is a network."""
        assert self.scorer is not None
        return float(self.scorer.quality(self.mask(operations)[None].astype(np.float32))["score"][0])

    def reward_of(self, mask: np.ndarray) -> float:
        """The reward of a mask, bool (H, W), in [0, 1].

        Raises:
            ValueError: labels pay, and the image has none.
        """
        if self.reward == "net":
            assert self.scorer is not None
            return float(self.scorer.quality(mask[None].astype(np.float32))["score"][0])
        truth = self.truth if self.paid_by is None else self.paid_by
        if truth is None:
            raise ValueError(f"{self.sample_id}: reward {self.reward} needs a true mask; use --reward net")
        return LABEL_REWARDS[self.reward](mask, truth)
