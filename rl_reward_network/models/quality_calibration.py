"""What is fitted on validation images to the numbers that a reward network predicts: their level, and intervals."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from scipy.special import expit
from torch import Tensor

STEEPEST = 15.0  # a steeper curve is nearly a step, and its gradient vanishes at both ends
MIDPOINTS = (-0.5, 1.5)  # outside [0, 1] the curve has no turning point
SPREAD_OFFSET = 0.03  # Dice; members may agree and still be wrong
COVERAGE = 0.9
MIN_PATIENTS = 9  # validation patients that an interval needs: with n, at most n / (n + 1) can be claimed
MAX_HALF_WIDTH = 0.15  # Dice; a wider interval says too little


@dataclass(frozen=True)
class LevelCurve:
    """An S-shaped map of [0, 1] onto itself: strictly increasing and smooth, with a finite slope above 0 everywhere.

    A network that is unsure where the object ends predicts too low numbers for good masks, in the right order. The map
    corrects the level and keeps the order. It is the logistic curve, scaled so that 0 and 1 stay where they are.
    """

    steepness: float
    """Slope of the logistic curve before scaling, in (0, 15]; a small one is nearly the identity."""
    midpoint: float
    """Where the curve is steepest, in [-0.5, 1.5]."""

    def __post_init__(self) -> None:
        """Raise a ValueError for values out of range."""
        if not (0 < self.steepness <= STEEPEST and MIDPOINTS[0] <= self.midpoint <= MIDPOINTS[1]):  # also refuses NaN
            raise ValueError(
                f"level has steepness {self.steepness}, midpoint {self.midpoint}: expected (0, {STEEPEST}], {MIDPOINTS}"
            )

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The logistic curve at 0 and 1."""
        return float(expit(-self.steepness * self.midpoint)), float(expit(self.steepness * (1 - self.midpoint)))

    def __call__(self, numbers: Tensor) -> Tensor:
        """The map of each number in [0, 1]; differentiable. In float64: the differences are far smaller than 1."""
        low, high = self.ends
        curve = (self.steepness * (numbers.double() - self.midpoint)).sigmoid()
        return ((curve - low) / (high - low)).to(numbers.dtype)


@dataclass(frozen=True)
class DiceInterval:
    """The 90 % interval of the Dice of one source of masks, as fitted on validation masks of this source.

    A random mask of a new patient lies inside with a probability of 90 %. It reaches from dice + low * unit to dice +
    high * unit, limited to [0, 1]; see `interval_unit`.
    """

    low: float
    """In units below the predicted Dice, or above it if positive."""
    high: float
    """The other end."""
    half_width: float
    """Median half width of the intervals of the validation masks, in [0, 0.5]."""
    patients: int
    """Distinct validation patients."""
    conformal: bool = field(default=True, repr=False)
    """False before version 0.12, where it was a quantile over masks; not part of a network's fingerprint."""

    def __post_init__(self) -> None:
        """Raise a ValueError for values out of range."""
        if not (self.low <= self.high and 0 <= self.half_width <= 0.5 and self.patients >= 1):  # also refuses NaN
            raise ValueError(f"{self}: expected low <= high, half_width in [0, 0.5], patients >= 1")

    @property
    def refusal(self) -> str | None:
        """Why no interval can be given, or None if one can."""
        if not self.conformal:
            return "it was fitted to masks, not to patients, before version 0.12; train the reward network again"
        if self.patients < MIN_PATIENTS:
            return f"it needs {MIN_PATIENTS} validation patients, got {self.patients}"
        if self.half_width > MAX_HALF_WIDTH:
            return f"its half width would be {self.half_width:.3f}, more than {MAX_HALF_WIDTH} says too little"
        return None

    def around(self, dice: np.ndarray) -> np.ndarray:
        """Limits float (n, 2) in [0, 1] of the intervals of n masks, from the Dice (n, K) predicted by each member."""
        offsets = np.array([self.low, self.high]) * interval_unit(dice)[:, None]
        return np.clip(dice.mean(axis=1)[:, None] + offsets, 0, 1)


def interval_unit(dice: np.ndarray) -> np.ndarray:
    """The unit (n,) of an interval: the standard deviation between the Dice (n, K) of members, plus 0.03."""
    return dice.std(axis=1) + SPREAD_OFFSET
