"""The list of roads is consistent, and so are its groups and parts."""

import pytest

from rl_reward_network.methods.methods import (
    AFTER,
    BASE,
    FINE_TUNED,
    GROUPS,
    METHODS,
    POST,
    REWARD_NET,
    SUPERVISED,
    WEIGHTS,
    methods_of,
    parts_of,
)


def test_names_are_unique_and_weights_known() -> None:
    names = [method.name for method in METHODS]
    assert len(set(names)) == len(names)
    assert {method.weights for method in METHODS} <= {BASE, FINE_TUNED, *WEIGHTS}


def test_parts_come_after_those_they_need() -> None:
    parts = parts_of(METHODS)
    assert parts[0] == REWARD_NET
    assert parts.index(SUPERVISED) < parts.index(AFTER)
    assert set(WEIGHTS) <= set(parts)


def test_groups_leave_out_what_they_do_not_need() -> None:
    methods = methods_of(("post",))
    assert [method.name for method in methods] == [BASE, "threshold", "sequence", POST]
    assert parts_of(methods) == (POST,)


def test_combined_roads_need_fine_tuned_weights() -> None:
    with pytest.raises(ValueError, match="give weights as well"):
        methods_of(("fusion", "combined"))
    assert len(methods_of(GROUPS)) == len(METHODS)
