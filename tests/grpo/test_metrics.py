"""Means of recorded values on one process; several processes are in test_distributed.py."""

import pytest

from rl_reward_network.grpo.logs import StepMetrics, summed_counts, with_learning
from rl_reward_network.run import clock


def test_each_tag_has_the_mean_of_its_own_values() -> None:
    metrics = StepMetrics(world_size=1)
    metrics.record({"a": 1.0, "b": 5.0})
    metrics.record({"a": 2.0})
    assert metrics.means() == {"a": 1.5, "b": 5.0}
    assert list(metrics.means()) == ["a", "b"], "in the order of the first record"
    metrics.clear()
    assert metrics.means() == {}


def test_the_mean_of_the_last_values() -> None:
    metrics = StepMetrics(world_size=1)
    for value in (9.0, 1.0, 2.0):
        metrics.record({"a": value, "b": 2 * value})
    assert metrics.mean_of_last(("a", "b"), 2) == pytest.approx([1.5, 3])


def test_counts_become_numbers_for_curves() -> None:
    counts = summed_counts({"calls": 3, "failures": 0}, world_size=1)
    assert counts == {"calls": 3.0, "failures": 0.0}
    assert all(isinstance(count, float) for count in counts.values())


def test_what_no_phase_took_is_learning() -> None:
    phases: dict[str, float] = {}
    for _ in range(2):
        with clock(phases, "rollouts"):
            pass
    assert list(seconds := with_learning(phases, 10.0)) == ["rollouts", "learning"]
    assert sum(seconds.values()) == 10.0
