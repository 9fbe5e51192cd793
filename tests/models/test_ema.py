"""The moving average: closed form, warm-up, precision; and weights that are swapped in and out."""

import math

import pytest
import torch
from torch import nn

from rl_reward_network.models.ema import EMA, copied, swapped


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    made[1].requires_grad_(False)
    return made


def test_the_average_follows_the_closed_form_with_warm_up():
    net = model()
    ema, expected = EMA(net, decay=0.5), net[0].weight.detach().clone()
    for step in range(6):
        with torch.no_grad():
            net[0].weight += 1
        decay = min(0.5, (1 + step) / (10 + step))
        assert ema.current_decay == decay
        expected = decay * expected + (1 - decay) * net[0].weight.detach()
        ema.update(net)
    torch.testing.assert_close(ema.weights["0.weight"], expected)
    assert set(ema.weights) == {"0.weight", "0.bias"}, "what is frozen has no average"
    assert ema.distance(net) == pytest.approx(float((expected - net[0].weight.detach()).norm()))


def test_with_buffers_the_statistics_of_batchnorm_are_averaged_and_numbers_copied():
    student = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    nn.init.constant_(student[0].weight, 1.0)
    teacher = EMA(student, 0.15, buffers=True)
    with torch.no_grad():
        student[0].weight.fill_(2.0)
        student[1].running_mean.fill_(1.0)
        student[1].num_batches_tracked.fill_(7)
    teacher.update(student)  # decay 1 / 10
    assert teacher.weights["0.weight"].item() == pytest.approx(0.1 * 1 + 0.9 * 2)
    assert teacher.weights["1.running_mean"].item() == pytest.approx(0.9)
    assert teacher.weights["1.num_batches_tracked"].item() == 7
    teacher.update(student)  # decay 0.15, less than 2 / 11
    assert teacher.weights["0.weight"].item() == pytest.approx(0.15 * 1.9 + 0.85 * 2)
    assert teacher.weights.keys() == student.state_dict().keys()
    mean, variance = (teacher.weights[f"1.running_{name}"] for name in ("mean", "var"))
    expected = (3 * teacher.weights["0.weight"] - mean) / (variance + student[1].eps).sqrt()
    with torch.no_grad(), swapped(student.eval(), teacher.weights):
        torch.testing.assert_close(student(torch.full((1, 1), 3.0)), expected)
    assert student[1].running_mean.item() == 1.0


def test_the_half_life_is_in_steps():
    assert EMA(model(), 0.999).half_life_after(9000) == pytest.approx(math.log(0.5) / math.log(0.999))
    assert EMA(model(), 0.999).half_life_after(140) == EMA(model(), 0.99).half_life_after(140), "still warming up"
    assert EMA(model(), 0.9).half_life_after(0) == pytest.approx(math.log(0.5) / math.log(0.1))


def test_small_steps_arrive():
    net = model()
    ema = EMA(net, decay=0.999)
    ema.steps = 10**6
    start = net[0].weight.detach().clone()
    for _ in range(1000):
        with torch.no_grad():
            net[0].weight += 1e-5
        ema.update(net)
    arrived = (ema.weights["0.weight"] - start).mean().item()
    assert arrived == pytest.approx(1e-5 * (1000 - 999 * (1 - 0.999**1000)), rel=0.02)


def _fail_inside(net: nn.Module, other: dict[str, torch.Tensor]) -> None:
    with swapped(net, other):
        assert (net[0].weight == 1).all()
        raise RuntimeError("stop")


def test_swapped_weights_are_back_afterwards_even_after_an_error():
    net, other = model(), {"0.weight": torch.ones(2, 3)}
    before = copied(net)
    optimiser = torch.optim.SGD(net[0].parameters(), lr=1.0)
    with pytest.raises(RuntimeError, match="stop"):
        _fail_inside(net, other)
    assert torch.equal(net[0].weight, before["0.weight"])
    assert net[0].weight.requires_grad
    net(torch.ones(1, 3)).sum().backward()
    optimiser.step()
    assert not torch.equal(net[0].weight, before["0.weight"]), "the optimiser still moves the model's own tensors"
    assert (other["0.weight"] == 1).all()


def test_autocast_sees_what_is_swapped():
    """It keeps bfloat16 casts of parameters, and used them for the EMA teacher: it was then the policy."""
    net, row = model(), torch.ones(1, 3)
    other = {"0.weight": torch.zeros(2, 3), "0.bias": torch.zeros(2)}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        output = net[0](row)
        with swapped(net, other):
            assert not net[0](row).any()
        assert torch.equal(net[0](row), output)


def test_what_does_not_fit_is_refused():
    with (
        pytest.raises(ValueError, match=r"0\.weight: got \(1, 3\), the model has \(2, 3\)"),
        swapped(model(), {"0.weight": torch.ones(1, 3)}),
    ):
        pass
    with pytest.raises(ValueError, match="ema_decay is 1, expected 0 <= ema_decay < 1"):
        EMA(model(), 1)
    with pytest.raises(ValueError, match="make it float32 first"):
        EMA(model().bfloat16())
