"""Outputs of the policy for a group: which of them a loss is made of, and copies without gradients."""

import torch

from rl_reward_network.grpo.rollouts import GroupOutput


def output() -> GroupOutput:
    return GroupOutput(*(torch.ones(size, requires_grad=True) * 2 for size in (1, 2, 3, 4)))


def test_detached_outputs_have_the_same_values_and_no_gradient() -> None:
    whole = output()
    detached = whole.detached()
    for name in ("log_probs", "entropies", "parameters", "mask_logits"):
        assert torch.equal(getattr(detached, name), getattr(whole, name))
        assert getattr(whole, name).requires_grad
        assert not getattr(detached, name).requires_grad
    assert GroupOutput().detached() == GroupOutput()


def test_a_loss_depends_on_mask_parameters_only_if_masks_are_sampled() -> None:
    assert [len(part) for part in output().differentiable(samples_masks=True)] == [1, 3, 4]
    assert [len(part) for part in output().differentiable(samples_masks=False)] == [1, 4]
    assert GroupOutput().differentiable(samples_masks=True) == []
