"""Which of the classes of a source are the mask."""

import pytest

from rl_reward_network.data_import.survey import chosen_classes


def test_the_only_class_is_chosen_and_several_are_asked_for() -> None:
    assert chosen_classes(None, ["255"], {}) == ["255"]
    assert chosen_classes(None, ["1", "2"], {}) is None
    assert chosen_classes("all", ["2", "10", "1"], {}) == ["1", "2", "10"]
    assert chosen_classes("2", ["1", "2"], {}) == ["2"]
    assert chosen_classes("2, 1", ["1", "2"], {}) == ["2", "1"]
    assert chosen_classes("#FF0000", ["#ff0000", "#00ff00"], {}) == ["#ff0000"]
    ids = {"1": "vessel", "2": "catheter", "3": "1"}
    assert chosen_classes("2", ["vessel"], ids) == ["catheter"], "by number"
    assert chosen_classes("1", ["vessel"], ids) == ["1"], "names come before numbers"
    assert chosen_classes("all", ["all", "b"], {}) == ["all"], "a class of that name"
    with pytest.raises(ValueError, match=r"label 'tree' is no class .* catheter, vessel.*--label all"):
        chosen_classes("tree", ["vessel", "catheter"], {})


def test_names_that_differ_in_case_only_stay_apart() -> None:
    assert chosen_classes("Vessel", ["Vessel", "vessel"], {}) == ["Vessel"]
    assert chosen_classes("vessel", ["Vessel", "vessel"], {}) == ["vessel"]
    assert chosen_classes("VESSEL", ["vessel"], {}) == ["vessel"]
    with pytest.raises(ValueError, match="'VESSEL' is no class"):
        chosen_classes("VESSEL", ["Vessel", "vessel"], {})
