"""Stop rule against over-optimisation: the learned reward still rises, but the true Dice has fallen."""

from collections.abc import Sequence

import numpy as np

GOLD_FALL, EVALUATIONS = 0.02, 3  # fall of Dice below its peak, and number of evaluations in a row


def over_optimised(proxy: Sequence[float], gold: Sequence[float]) -> bool:
    """Whether training over-optimises its reward.

    True when gold was more than `GOLD_FALL` below its peak in each of the last `EVALUATIONS` evaluations, and the mean
    proxy of these evaluations is above the mean proxy of as many evaluations up to the peak.

    Args:
        proxy: mean reward of the greedy policy on validation images, one number per evaluation.
        gold: mean Dice of the same, against the ground truth; empty when unlabelled.
    """
    if len(gold) <= EVALUATIONS:
        return False
    peak = int(np.argmax(gold))
    fallen = all(value < gold[peak] - GOLD_FALL for value in gold[-EVALUATIONS:])
    return fallen and float(np.mean(proxy[-EVALUATIONS:])) > float(
        np.mean(proxy[max(0, peak + 1 - EVALUATIONS) : peak + 1])
    )
