"""The list of roads is consistent, and so are its groups and parts."""

import pytest

from rl_reward_network.methods.roads import (
    AFTER,
    BASE,
    FINE_TUNED,
    GROUPS,
    POST,
    REWARD_NET,
    ROADS,
    SUPERVISED,
    WEIGHTS,
    parts_of,
    roads_of,
)


def test_names_are_unique_and_weights_known() -> None:
    names = [road.name for road in ROADS]
    assert len(set(names)) == len(names)
    assert {road.weights for road in ROADS} <= {BASE, FINE_TUNED, *WEIGHTS}


def test_parts_come_after_those_they_need() -> None:
    parts = parts_of(ROADS)
    assert parts[0] == REWARD_NET
    assert parts.index(SUPERVISED) < parts.index(AFTER)
    assert set(WEIGHTS) <= set(parts)


def test_groups_leave_out_what_they_do_not_need() -> None:
    roads = roads_of(("post",))
    assert [road.name for road in roads] == [BASE, "threshold", "sequence", POST]
    assert parts_of(roads) == (POST,)


def test_combined_roads_need_fine_tuned_weights() -> None:
    with pytest.raises(ValueError, match="give weights as well"):
        roads_of(("fusion", "combined"))
    assert len(roads_of(GROUPS)) == len(ROADS)
