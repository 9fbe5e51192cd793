import pytest

from rl_reward_network.runs.stop_rule import over_optimised


@pytest.mark.parametrize(
    ("proxy", "gold", "stop"),
    [
        ([0.5, 0.6, 0.7, 0.8, 0.9], [0.5, 0.6, 0.57, 0.57, 0.57], True),
        ([0.5, 0.6, 0.7, 0.8, 0.9], [0.5, 0.6, 0.57, 0.59, 0.57], False),  # not three times in a row
        ([0.5, 0.6, 0.7, 0.8, 0.9], [0.5, 0.6, 0.585, 0.585, 0.585], False),  # too little
        ([0.5, 0.6, 0.5, 0.4, 0.4], [0.5, 0.6, 0.57, 0.57, 0.57], False),  # the proxy fell too: no over-optimisation
        ([0.5, 0.6, 0.7], [0.6, 0.5, 0.5], False),  # too early
        ([0.5] * 9, [], False),  # unlabelled
        ([], [], False),
    ],
)
def test_over_optimisation_is_a_rising_proxy_and_a_fallen_truth(
    proxy: list[float], gold: list[float], stop: bool
) -> None:
    assert over_optimised(proxy, gold) is stop
