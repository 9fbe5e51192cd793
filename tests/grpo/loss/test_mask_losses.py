"""Losses on the mask itself: the gradient of a reward network points upwards, supervision is right by hand."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_reward_network.grpo.image_context import ImageFeatures
from rl_reward_network.grpo.losses import PathwiseReward, supervised_mask_losses
from rl_reward_network.grpo.rollouts import RolloutGroup
from rl_reward_network.grpo.trainable import freeze_unreached
from rl_reward_network.grpo.trainer import Sa2VAGRPOTrainer
from rl_reward_network.models.ema import copied
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features
from rl_reward_network.rewards.learned import ForegroundMaps
from tests.conftest import smooth_image
from tests.grpo.nano import config, nano, regions, rewards
from tests.models.test_reward_network import network_of

NOTHING = ImageFeatures(torch.zeros(1, 1, 1), Sam2Features((torch.zeros(1),) * 3))
SIDE = 64  # of the square between grid and image
STEP = 100.0  # times the gradient: small, but its effect is far above the rounding of a score


def group(name: str, image: np.ndarray | None = None, truth: np.ndarray | None = None) -> RolloutGroup:
    return RolloutGroup(name, NOTHING, [1], image=image, truth=truth)


def seeing() -> RewardNetwork:
    """Random weights, but an object in the top half of every picture: a network without any belief has no slope."""
    network = network_of()
    real = network.foreground_probs

    def halved(image: Tensor) -> Tensor:
        maps = real(image)
        half = torch.zeros_like(maps)
        half[..., : maps.shape[-2] // 2, :] = 0.8
        return 0.2 * maps + half

    network.foreground_probs = halved  # type: ignore[method-assign]
    return network


def start(seed: int = 0) -> Tensor:
    return torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_the_score_is_that_of_the_soft_mask_at_image_size() -> None:
    network, logits, image = network_of(), start(), smooth_image(48, 80)
    square = torch.nn.functional.interpolate(logits[None, None], size=(SIDE, SIDE), mode="bilinear")
    mask = torch.nn.functional.interpolate(square, size=(48, 80), mode="bilinear").sigmoid()
    picture = torch.from_numpy(image).permute(2, 0, 1)[None] / 255
    expected = network(picture, mask).score
    assert expected.shape == (1,)
    result = PathwiseReward(ForegroundMaps(network), SIDE).scores([(group("a", image), logits)]).mean()
    torch.testing.assert_close(result, expected[0])


def test_a_small_step_along_the_gradient_raises_the_score() -> None:
    reward = PathwiseReward(ForegroundMaps(network_of()), SIDE)
    shown = [(group("a", smooth_image(48, 80)), start(0)), (group("b", smooth_image(64, 64, 1)), start(1))]
    score = reward.scores(shown).mean()
    gradients = torch.autograd.grad(score, [logits for _, logits in shown])
    assert all(gradient.abs().max() > 0 for gradient in gradients)
    up, down = (
        reward.scores([(g, logits + step * slope) for (g, logits), slope in zip(shown, gradients, strict=True)]).mean()
        for step in (STEP, -STEP)
    )
    assert down < score < up
    slope = sum(gradient.square().sum().item() for gradient in gradients)
    assert (up - score).item() == pytest.approx(STEP * slope, rel=0.05), "a first-order step"


def test_ascent_draws_the_object_that_the_network_believes_in() -> None:
    reward, logits = PathwiseReward(ForegroundMaps(seeing()), SIDE), start()
    image = smooth_image(48, 80)
    first = reward.scores([(group("a", image), logits)]).mean().item()
    for _ in range(60):
        (gradient,) = torch.autograd.grad(reward.scores([(group("a", image), logits)]).mean(), logits)
        logits = (logits + 0.5 * gradient / gradient.abs().max()).detach().requires_grad_()
    assert reward.scores([(group("a", image), logits)]).mean().item() > first + 0.2
    assert (logits[:7] > 0).all()
    assert (logits[9:] < 0).all()


def test_the_network_gets_no_gradient_and_an_image_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    network, looked = network_of(), []
    real = network.foreground_probs
    monkeypatch.setattr(network, "foreground_probs", lambda image: looked.append(image.shape) or real(image))
    reward = PathwiseReward(ForegroundMaps(network), SIDE)
    first, second = group("a", smooth_image(48, 80)), group("b", smooth_image(64, 64, 1))
    for _ in range(2):
        reward.scores([(first, start(0)), (second, start(1)), (first, start(2))]).mean().backward()
    assert looked == [(1, 3, 48, 80), (1, 3, 64, 64)]
    assert all(parameter.grad is None for parameter in network.parameters())


def test_the_mean_is_over_groups() -> None:
    reward = PathwiseReward(ForegroundMaps(network_of()), SIDE)
    shown = [(group("a", smooth_image(48, 80)), start()), (group("b", smooth_image(64, 64, 1)), start() - 3)]
    single = [reward.scores([one]).mean().item() for one in shown]
    assert abs(single[0] - single[1]) > 0.02
    assert reward.scores(shown).mean().item() == pytest.approx(np.mean(single), abs=1e-6)


def test_supervision_by_hand() -> None:
    """Equal logits x: cross-entropy softplus(x) - x * share of truth, Dice (2 p t + 1) / (n p + t + 1) on n cells."""
    truth = np.zeros((4, 4), dtype=bool)
    truth[:, :1] = True
    x = 0.7
    p = 1 / (1 + math.exp(-x))
    expected = 0.3 * (math.log1p(math.exp(x)) - x / 4) + 1.7 * (1 - (2 * p * 4 + 1) / (16 * p + 4 + 1))
    logits = torch.full((2, 2), x, requires_grad=True)
    loss = supervised_mask_losses([(group("a", truth=truth), logits)], 0.3, 1.7)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert (gradient[:, 0] < gradient[:, 1]).all(), "the truth's side is pushed up more"


def test_masks_are_compared_on_a_grid_twice_as_fine() -> None:
    """A thin object counts by its area: half of two of four columns, wherever it begins."""
    targets = []
    for start in (1, 2, 3):
        thin = np.zeros((8, 8), dtype=bool)
        thin[:, start : start + 2] = True
        loss = supervised_mask_losses([(group("a", truth=thin), torch.zeros(2, 2))], 2.0, 0.5)
        targets.append(loss.item())
    # 16 cells of probability 1 / 2, truth of area 4; the cross-entropy of probability 1 / 2 is the same for any truth
    assert targets == pytest.approx([2 * math.log(2) + 0.5 * (1 - (2 * 0.5 * 4 + 1) / (8 + 4 + 1))] * 3)


def test_supervision_is_of_each_group_that_has_a_truth() -> None:
    half, full = np.zeros((4, 4), dtype=bool), np.ones((6, 8), dtype=bool)
    half[:2] = True
    first, second = (group("a", truth=half), torch.zeros(2, 2)), (group("b", truth=full), torch.ones(2, 3))
    alone = [supervised_mask_losses([one], 1, 1).item() for one in (first, second)]
    bare = (group("c"), torch.full((2, 2), 9.0))
    assert supervised_mask_losses([first, bare, second], 1, 1).tolist() == pytest.approx(alone, rel=1e-6)
    with pytest.raises(ValueError, match="true mask"):
        supervised_mask_losses([bare], 1, 1)


def test_a_trainer_climbs_the_score_and_moves_the_mask_decoder(tmp_path: Path) -> None:
    model, processor = nano()
    settings = config(tmp_path, pathwise_weight=5.0, mask_to_caption_weight=0.0, max_steps=3, learning_rate=1e-4)
    pathwise = PathwiseReward(ForegroundMaps(seeing()), processor.sam_image_size)
    own = Sa2VAGRPOTrainer(model, processor, settings, regions()[:2], rewards(), pathwise)
    freeze_unreached(own, regions()[:2])
    own.reset_reference()
    before = copied(model)
    own.train()
    scores = [log["loop2/pathwise_score"] for log in own.state.log_history if "loop2/pathwise_score" in log]
    assert scores == sorted(scores)
    assert scores[-1] > scores[0]
    assert any(not torch.equal(p, before[name]) for name, p in copied(model).items() if "mask_decoder" in name)


def test_the_kl_holds_a_run_that_trains_by_the_gradient_alone(tmp_path: Path) -> None:
    """It does not depend on the weight of the loop, here 0."""
    kl = {}
    for beta in (0.0, 100.0):
        model, processor = nano()
        settings = config(
            tmp_path / str(beta),
            **{"pathwise_weight": 5.0, "mask_to_caption_weight": 0.0, "caption_to_mask_weight": 0.0},
            **{"mask_beta": beta, "beta": 0.0, "answer_weight": 0.0, "max_steps": 3, "learning_rate": 1e-3},
        )
        pathwise = PathwiseReward(ForegroundMaps(seeing()), processor.sam_image_size)
        own = Sa2VAGRPOTrainer(model, processor, settings, regions()[:2], rewards(), pathwise)
        groups, _ = own.rollout_generator.generate(regions()[:2], (0, 0, 0))
        before = [output.parameters for output in own.policy(groups)[0]]
        own.train()
        after = [output.parameters for output in own.policy(groups)[0]]
        widths = [group.action_width for group in groups]
        policy = own.policy.mask_policy
        kl[beta] = sum(policy.kl(*of_group).item() for of_group in zip(after, before, widths, strict=True))
    assert kl[100.0] < 0.2 * kl[0.0]
