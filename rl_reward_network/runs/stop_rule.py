"""When to stop following a learned reward: it still rises, while what it stands for has fallen."""

from collections.abc import Sequence

import numpy as np

GOLD_FALL, EVALUATIONS = 0.02, 3  # Dice below its peak, for so many evaluations in a row, ends the training


def over_optimised(proxy: Sequence[float], gold: Sequence[float]) -> bool:
    """Whether the reward goes on rising while what it stands for has got worse.

    True when gold was more than `GOLD_FALL` below its peak in each of the last `EVALUATIONS` evaluations, and the
    moving mean of the proxy (over as many) is above what it was at that peak.

    Args:
        proxy: the reward of the greedy policy on validation images, evaluation by evaluation.
        gold: its Dice there.
    """
    if len(gold) <= EVALUATIONS:
        return False
    peak = int(np.argmax(gold))
    fallen = all(value < gold[peak] - GOLD_FALL for value in gold[-EVALUATIONS:])
    return fallen and float(np.mean(proxy[-EVALUATIONS:])) > float(
        np.mean(proxy[max(0, peak + 1 - EVALUATIONS) : peak + 1])
    )
