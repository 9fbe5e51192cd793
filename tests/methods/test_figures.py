"""The plots of a comparison."""

from rl_reward_network.methods.figures import dice_over_minutes
from tests.methods.test_table import BASE, result, table


def test_roads_at_one_place_share_a_label() -> None:
    rows = table(result(BASE, 0.5, 0.5), result("own", 0.9, 0.9, 9.0), result("fusion", 0.9, 0.9, 9.0))
    figure = dice_over_minutes(rows)
    assert [text.get_text() for text in figure.axes[0].texts] == ["0", "1, 2"]
