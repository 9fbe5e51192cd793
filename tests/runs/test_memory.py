"""The peak of a process covers what it has allocated."""

import subprocess
import sys

from rl_reward_network.runs.memory import peak_memory_gib

SCRIPT = """
import numpy as np
from rl_reward_network.runs.memory import peak_memory_gib
before = peak_memory_gib()
array = np.ones(2**27)  # 1 GiB
del array
print(before, peak_memory_gib())
"""


def test_the_peak_remains_after_memory_is_freed() -> None:
    """In a process of its own: the peak of this one may be larger already."""
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    before, after = map(float, result.stdout.split())
    assert before < 0.5
    assert 0.9 < after - before < 1.2


def test_this_process_has_a_peak() -> None:
    assert 0.01 < peak_memory_gib() < 1000
