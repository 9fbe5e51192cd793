"""The outcome of a run on its validation items: which weights are kept, and the first line of a run that got worse."""

import pytest

from rl_reward_network.grpo.validation import kept_weights, notice, outcome_of, saved_outcome

DICE = "val/gt_dice"


def config_of(values: list[float], metric: str | None = DICE) -> dict[str, object]:
    """config.json of a run validated at steps 0, 10, ..., on 5 items, 4 of them labelled."""
    return {"validation": outcome_of([10 * n for n in range(max(1, len(values)))], values, metric, 5, 4).facts}


@pytest.mark.parametrize(
    ("values", "kept", "said"),
    [
        ([0.3, 0.4, 0.35], 10, ""),
        ([0.3, 0.4, 0.4], 10, ""),
        ([0.3, 0.4, 0.2], 10, "Worse at the end than the model as it was: on 5 validation items Dice was 0.300 before"),
        ([0.3, 0.1, 0.2], 0, "Worse than the model as it was: on 5 validation items Dice was 0.300 before, 0.200 at"),
        ([0.3, 0.1, 0.3], 0, "Not better than the model as it was"),
    ],
)
def test_the_best_weights_are_kept_and_a_worse_end_is_said_first(values: list[float], kept: int, said: str) -> None:
    config = config_of(values)
    outcome = saved_outcome(config)
    assert outcome is not None
    assert (outcome.before, outcome.last, outcome.best) == (values[0], values[-1], max(values))
    assert (outcome.kept_step, outcome.last_step, outcome.as_it_was) == (kept, 20, kept == 0)
    assert notice(config).startswith(said)
    assert bool(notice(config)) == bool(said)
    assert notice(config).endswith("final_model is the model as it was.") == (kept == 0)


def test_a_card_names_the_weights_and_the_labels_that_chose_them() -> None:
    text = kept_weights(config_of([0.3, 0.4, 0.35]))
    assert "step 10 of 20" in text
    assert "Dice (0.400; 0.300 before) on 5 validation items, 4 of them labelled" in text


def test_without_labels_the_last_weights_are_kept() -> None:
    config = config_of([], None)
    assert (notice(config), kept_weights(config)) == ("", "of the last step; none of 5 validation items has a label")
    never: dict[str, object] = {"validation": None}
    assert (notice(never), kept_weights(never)) == ("", "of the last step; the run was not validated")
    assert (notice({}), kept_weights({})) == ("", "not recorded"), "a checkpoint, or a run of 0.8"
