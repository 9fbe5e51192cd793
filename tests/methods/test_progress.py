"""What is left of a comparison."""

import pytest

from rl_reward_network.methods.progress import Progress


def test_minutes_are_the_means_of_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 600.0, 601.0, 661.0, 841.0, 842.0])
    progress = Progress({"part": 2, "road": 3}, lambda: next(times))
    progress.done("part", "reward_net: trained", reused=False)  # 10 minutes
    progress.done("part", "experiment1: reused", reused=True)  # no example of how long training takes
    progress.done("road", "base: measured", reused=False)  # 1 minute
    progress.done("road", "own: measured", reused=False)  # 3 minutes
    progress.done("road", "fusion: measured before", reused=True)
    assert capsys.readouterr().out.splitlines() == [
        "reward_net: trained; 1 part and 3 roads left",
        "experiment1: reused; 3 roads left",
        "base: measured; 2 roads left, about 2 min",
        "own: measured; 1 road left, about 2 min",
        "fusion: measured before; nothing left",
    ]
