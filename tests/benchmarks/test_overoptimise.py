import numpy as np
import pytest

from benchmarks.overoptimise import BEST_OF, POOLED, _best_of_n, _candidates, _draw, _summary
from rl_reward_network.reward_training.masks import RewardExample, true_dice

RNG = np.random.default_rng(0)
TRUTH = np.zeros((48, 48), dtype=bool)
TRUTH[20:28, 4:44] = True
EXAMPLE = RewardExample(np.zeros((48, 48, 3), np.uint8), TRUTH, np.stack([np.roll(TRUTH, 3, 0), TRUTH]))


def test_candidates_start_with_the_default_prompts_mask_and_differ():
    candidates = _candidates(EXAMPLE, np.random.default_rng(1))
    assert (candidates.dtype, candidates.shape) == (bool, (256, 48, 48))
    assert np.array_equal(candidates[0], EXAMPLE.masks[0])
    assert len({mask.tobytes() for mask in candidates}) > 200


def test_a_true_score_is_not_over_optimised_by_many_candidates_and_a_false_one_is():
    candidates = _candidates(EXAMPLE, np.random.default_rng(1))
    honest = _best_of_n(lambda image, masks: true_dice(masks, TRUTH), EXAMPLE, candidates)
    assert honest.shape == (2, len(BEST_OF))
    np.testing.assert_array_equal(honest[0], honest[1])
    assert (np.diff(honest[1]) >= 0).all()
    greedy = _best_of_n(lambda image, masks: masks.mean(axis=(1, 2)), EXAMPLE, candidates)  # the larger the better
    assert (np.diff(greedy[0]) >= 0).all()
    assert _summary(greedy[None])["end_over_peak"] < 0.8 < _summary(honest[None])["end_over_peak"]


def test_summary_by_hand():
    seeds = np.array([[[0.1, 0.5, 0.9], [0.4, 0.8, 0.6]], [[0.1, 0.5, 0.7], [0.4, 0.5, 0.5]]])
    summary = _summary(seeds)
    assert summary["gold_peak"] == pytest.approx(0.65)
    assert summary["gold_end"] == pytest.approx(0.55)
    assert summary["end_over_peak"] == pytest.approx((0.75 + 1) / 2)
    assert summary["end_over_peak_worst_seed"] == pytest.approx(0.75)
    assert summary["score_end"] == pytest.approx(0.8)


def test_the_plot_is_written_whole(tmp_path):
    curves = {f"best of n, {POOLED}": RNG.random((2, 2, 9)), "gradient ascent, one member": RNG.random((2, 2, 8))}
    _draw(curves, tmp_path / "plot.png")
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]
