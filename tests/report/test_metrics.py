import numpy as np
import pytest

from rl_reward_network.report.metrics import measure_sample
from rl_reward_network.rewards.table import MASK_REWARDS

MASKS = np.random.default_rng(0).random((3, 8, 9)) < 0.4


def test_a_table_holds_every_reward_of_every_mask():
    table = measure_sample("a", "g", np.array([0.25, 0.5, 1.0]), MASKS, MASKS[2])
    np.testing.assert_array_equal(table.column("score"), [0.25, 0.5, 1.0])
    assert list(table.metrics) == list(MASK_REWARDS)
    for name, values in table.metrics.items():
        np.testing.assert_array_equal(values, MASK_REWARDS[name](MASKS, MASKS[[2, 2, 2]]))


def test_unlabelled_images_have_scores_only():
    table = measure_sample("a", "g", np.array([0.25, 0.5, 0.75]), MASKS, None)
    assert table.metrics is None
    with pytest.raises(KeyError):
        table.column("dice")


@pytest.mark.parametrize(
    ("scores", "masks", "target"),
    [
        (np.zeros(2), MASKS, MASKS[0]),
        (np.zeros(3), MASKS.astype(float), MASKS[0]),
        (np.zeros(3), MASKS, MASKS[0, :-1]),
        (np.zeros(3), MASKS, MASKS[0].astype(np.uint8)),
    ],
)
def test_other_shapes_and_types_are_refused(scores, masks, target):
    with pytest.raises(ValueError, match=r"sample7: (masks|target): got"):
        measure_sample("sample7", "g", scores, masks, target)
