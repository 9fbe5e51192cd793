import numpy as np
import pytest
import torch

from rl_reward_network.models.reward_network import DiceInterval, LevelCurve, interval_unit

CURVES = [(0.05, 0.5), (4.0, 0.35), (15.0, 0.25), (15.0, 1.5), (15.0, -0.5), (1.0, -0.3)]


@pytest.mark.parametrize(("steepness", "midpoint"), CURVES)
def test_a_level_curve_maps_0_to_1_onto_itself_and_rises_everywhere(steepness, midpoint):
    x = torch.linspace(0, 1, 1001, dtype=torch.float64, requires_grad=True)
    y = LevelCurve(steepness, midpoint)(x)
    assert (y[0].item(), y[-1].item()) == pytest.approx((0, 1), abs=1e-12)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.isfinite(slope).all()
    assert (slope > 0).all(), "a mask can be improved from any score, also from an empty mask"
    assert (y.diff() > 0).all()


@pytest.mark.parametrize(("steepness", "midpoint"), CURVES)
def test_a_level_curve_keeps_its_digits_in_float32(steepness, midpoint):
    """As a difference of float32 numbers near 1 it would give a Dice of -0.0001 in place of 0."""
    y = LevelCurve(steepness, midpoint)(x := torch.tensor([0.0, 1e-4, 1e-3, 1.0]))
    expected = LevelCurve(steepness, midpoint)(x.double())
    assert y.dtype == torch.float32
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-9)
    assert y.max() <= 1


def test_a_level_curve_in_numbers():
    assert LevelCurve(4.0, 0.5)(torch.tensor([0.5, 0.75])).tolist() == pytest.approx(
        [0.5, 0.5 + np.tanh(0.5) / np.tanh(1) / 2]
    )
    nearly_identity = LevelCurve(0.05, 0.5)(torch.tensor([0.1, 0.4, 0.8]))
    np.testing.assert_allclose(nearly_identity, [0.1, 0.4, 0.8], atol=1e-4)


@pytest.mark.parametrize("values", [(0.0, 0.5), (15.1, 0.5), (1.0, 1.6), (np.nan, 0.5), (1.0, np.nan)])
def test_a_level_curve_out_of_range_is_refused(values):
    with pytest.raises(ValueError, match="level has steepness"):
        LevelCurve(*values)


def test_intervals_never_leave_0_to_1_and_widen_with_the_disagreement_of_members():
    dice = np.array([[0.02, 0.02], [0.5, 0.5], [0.4, 0.6], [0.99, 0.99]])
    np.testing.assert_allclose(interval_unit(dice), [0.03, 0.03, 0.13, 0.03])
    limits = DiceInterval(-2.0, 1.0, 0.1, 40).around(dice)
    np.testing.assert_allclose(limits, [[0, 0.05], [0.44, 0.53], [0.24, 0.63], [0.93, 1]])


@pytest.mark.parametrize(
    ("half_width", "patients", "why"),
    [(0.15, 30, None), (0.151, 30, "0.151"), (0.5, 400, "0.500"), (0.15, 9, None), (0.01, 8, "got 8")],
)
def test_an_interval_that_says_nothing_is_refused(half_width, patients, why):
    refusal = DiceInterval(-1.0, 1.0, half_width, patients).refusal
    assert refusal is None if why is None else why in refusal


@pytest.mark.parametrize(
    "values", [(1.0, 0.0, 0.1, 30), (-1.0, 1.0, 0.6, 30), (-1.0, 1.0, 0.1, 0), (np.nan, 1.0, 0.1, 30)]
)
def test_a_damaged_interval_is_refused(values):
    with pytest.raises(ValueError, match="DiceInterval"):
        DiceInterval(*values)
