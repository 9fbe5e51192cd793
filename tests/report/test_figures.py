import numpy as np

from rl_reward_network.report import figures
from tests.ppo.test_baselines import compared, tables


def test_the_histogram_counts_the_choices_of_deployment_policy_and_oracle():
    test = tables([[0.9, 0.1], [0.8, 0.1], [0.1, 0.7]])
    axes = figures.histogram(compared(test, test, [0, 1, 1], choice="fixed", best_fixed=0)).axes[0]
    heights = [bar.get_height() for bar in axes.patches]
    assert heights == [3, 0, 1, 2, 2, 1]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["deployed", "PPO", "oracle"]


def test_the_scatter_shows_every_mask_and_the_deployed_ones():
    test = tables([[0.9, 0.1], [0.8, 0.1]], scores=[[0.5, 0.2], [0.4, 0.3]])
    fixed = compared(test, test, [0, 1], choice="fixed", best_fixed=0)
    np.testing.assert_allclose(
        figures.scatter(fixed).axes[0].collections[1].get_offsets(), [[0.5, 0.9], [0.4, 0.8]], err_msg="not PPO's"
    )
    policy = compared(test, test, [0, 1])
    every, chosen = (part.get_offsets() for part in figures.scatter(policy).axes[0].collections)
    np.testing.assert_allclose(every, [[0.5, 0.9], [0.2, 0.1], [0.4, 0.8], [0.3, 0.1]])
    np.testing.assert_allclose(chosen, [[0.5, 0.9], [0.3, 0.1]])


def test_proxy_and_gold_are_drawn_together_and_gold_only_where_it_is_known():
    rows = [{"step": 8, "custom/val_score": 0.5, "custom/val_gt_dice": 0.4}, {"step": 16, "custom/val_score": 0.6}]
    proxy, gold = figures.proxy_and_gold(rows).axes[0].lines
    np.testing.assert_allclose(proxy.get_xydata(), [[8, 0.5], [16, 0.6]])
    np.testing.assert_allclose(gold.get_xydata(), [[8, 0.4]])
    assert len(figures.proxy_and_gold([{"step": 8, "custom/val_score": 0.5}]).axes[0].lines) == 1


def test_equal_figures_give_equal_bytes():
    test = tables([[0.9, 0.1], [0.8, 0.1]])
    first, second = (figures.png(figures.histogram(compared(test, test, [0, 1]))) for _ in range(2))
    assert first == second
    assert first.startswith(b"\x89PNG")
