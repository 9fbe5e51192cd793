"""The losses of both loops over groups: which groups count, and the numbers by hand."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_reward_network.grpo.grpo_config import LossSettings
from rl_reward_network.grpo.image_context import ImageFeatures
from rl_reward_network.grpo.losses import (
    LossParts,
    StepCounts,
    answer_loss,
    caption_loss,
    completion_mask,
    count_step,
    loss_metrics,
    mask_policy_loss,
    reference_loss,
)
from rl_reward_network.grpo.mask_policies import MASK_POLICIES
from rl_reward_network.grpo.rollouts import GroupOutput, RolloutGroup
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features
from tests.grpo.loss.test_losses import case, trl_loss
from tests.grpo.nano import config

NOTHING = ImageFeatures(torch.zeros(1, 1, 1), Sam2Features((torch.zeros(1),) * 3))


def caption_group(lengths: list[int], advantages: list[float], counts: list[bool] | None = None) -> RolloutGroup:
    return RolloutGroup(
        "image",
        NOTHING,
        [1],
        [2],
        completion_ids=[[3] * length for length in lengths],
        counted=None if counts is None else torch.tensor(counts),
        caption_advantages=torch.tensor(advantages),
    )


def output(lengths: list[int], longest: int, value: float = -1.0) -> GroupOutput:
    log_probs = torch.full((len(lengths), longest), value, requires_grad=True)
    return GroupOutput(log_probs, torch.zeros(len(lengths), longest))


def test_captions_that_were_cut_off_do_not_count() -> None:
    group = caption_group([2, 3], [1.0, -1.0], [True, False])
    assert completion_mask(group, 3).tolist() == [[1, 1, 0], [0, 0, 0]]
    drawn = RolloutGroup("third", NOTHING, [1], segment_ids=[2], truth=np.zeros((1, 1), dtype=bool))
    bare = RolloutGroup("fourth", NOTHING, [1], segment_ids=[2])
    counts = count_step([[group, RolloutGroup("other", NOTHING, [1])], [drawn, bare]])
    assert counts == (2, 2, 1), "tokens, groups with a mask, those with a true one"


def test_loss_1_is_the_mean_over_tokens_of_all_groups() -> None:
    groups = [caption_group([1, 3], [1.0, -1.0]), caption_group([2, 2], [0.5, -0.5])]
    outputs = [output([1, 3], 3), output([2, 2], 3)]
    pairs = [*zip(groups, outputs, strict=True), (RolloutGroup("other", NOTHING, [1]), GroupOutput())]
    parts = caption_loss(pairs, LossSettings("dapo", beta=0.0), 8.0)
    assert parts is not None
    assert parts.loss.item() == pytest.approx(-(1 * 1.0 + 3 * -1.0 + 2 * 0.5 - 2 * 0.5) / 8)
    assert caption_loss(pairs[2:], LossSettings(), 1.0) is None


def test_loss_1_uses_what_was_kept_even_from_a_longer_batch() -> None:
    group = caption_group([2], [1.0])
    group.old_output, group.ref_output = output([2], 4, -1.5), output([2], 2, -2.0)
    parts = caption_loss([(group, output([2], 4))], LossSettings("bnpo", beta=0.1, epsilon_high=0.2), None)
    assert parts is not None
    k3 = torch.tensor(-1.0).exp().item() + 1 - 1
    assert parts.kl.item() == pytest.approx(math.exp(0.5) * k3, abs=1e-6), "times the ratio"
    assert parts.loss.item() == pytest.approx(-1.2 + 0.1 * math.exp(0.5) * k3, abs=1e-6)  # clipped: e^0.5 to 1.2


def test_loss_2_is_the_clipped_objective_and_the_closed_form_divergence(tmp_path: Path) -> None:
    policy, settings = MASK_POLICIES["gaussian"], config(tmp_path, mask_beta=0.5)
    mean = torch.zeros(4, requires_grad=True)
    group = RolloutGroup(
        "image",
        NOTHING,
        [1],
        segment_ids=[2],
        actions=torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]]),
        action_width=torch.tensor(2.0),
        mask_advantages=torch.tensor([1.0, -1.0]),
        ref_output=GroupOutput(parameters=torch.full((4,), 1.0)),
    )
    parts = mask_policy_loss([(group, GroupOutput(parameters=mean))], policy, settings)
    assert parts is not None
    assert parts.kl.item() == pytest.approx(1 / (2 * 4))
    assert parts.loss.item() == pytest.approx(0.5 * parts.kl.item())
    (gradient,) = torch.autograd.grad(parts.loss, mean)
    # -(1/G) sum A (a - e) / (width^2 C) and the divergence's (e - e_ref) / (width^2 C)
    assert gradient[0].item() == pytest.approx(-(1 + 1) / 2 / (4 * 4) + 0.5 * -1 / (4 * 4))
    assert gradient[1].item() == pytest.approx(0.5 * -1 / (4 * 4))
    assert parts.policy_loss.item() == 0, "without the divergence: the ratio is 1 and advantages sum to 0"
    whole = mask_policy_loss([(group, GroupOutput(parameters=mean))], policy, settings, 4.0)
    assert whole is not None
    assert whole.loss.item() == pytest.approx(parts.loss.item() / 4), "one of the four groups of a step"
    assert mask_policy_loss([(RolloutGroup("other", NOTHING, [1]), GroupOutput())], policy, settings) is None


def test_the_loss_of_answers_is_the_mean_over_tokens_and_then_over_groups() -> None:
    answered = [RolloutGroup("image", NOTHING, [1], segment_ids=[2] * 5, answer_length=n) for n in (2, 3)]
    log_probs = [torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([0.0, -3.0, -6.0], requires_grad=True)]
    pairs = [(group, GroupOutput(answer_log_probs=row)) for group, row in zip(answered, log_probs, strict=True)]
    pairs.append((caption_group([1], [1.0]), output([1], 1)))
    loss = answer_loss(pairs, 2.0)
    assert loss is not None
    assert loss.item() == pytest.approx((1.5 + 3.0) / 2)
    assert torch.autograd.grad(loss, log_probs[1])[0].tolist() == pytest.approx([-1 / 6] * 3)
    assert answer_loss(pairs[2:], 1.0) is None

    def losses(part: list[int], counts: StepCounts) -> torch.Tensor | None:
        return answer_loss([pairs[n] for n in part if n < 2], counts.masks)

    assert over_parts(losses, answered).item() == pytest.approx(loss.item()), "over micro-batches and ranks"


def test_metrics_are_the_parts_by_tag_and_a_rewarded_loop_without_groups_is_0() -> None:
    parts = LossParts(*(torch.tensor(float(number)) for number in (1, 0, 2, 3, 4, 5)))
    names = ("loss", "policy_loss", "kl_div", "clip_fraction", "entropy")
    loop1 = {f"loop1/{name}": float(number) for number, name in enumerate(names, 1)}
    assert loss_metrics({"loop1": parts}, []) == loop1
    assert loss_metrics({"loop1": parts}, ["loop1", "loop2"]) == loop1 | {"loop2/loss": 0, "loop2/policy_loss": 0}
    assert "loop2/entropy" not in loss_metrics({"loop2": parts}, [])
    fresh = loss_metrics({"loop1": replace(parts, kl=None, clip_fraction=None)}, [])
    assert set(fresh) == {"loop1/loss", "loop1/policy_loss", "loop1/entropy"}, "no reference, no earlier policy"


def test_reference_captions_have_the_gradient_of_advantages_of_1_and_a_loss_that_falls() -> None:
    pairs = [(caption_group([1, 3], [1.0, 1.0]), output([1, 3], 3, value)) for value in (-0.5, -2.0)]
    for loss_type in ("dapo", "grpo", "bnpo", "dr_grpo"):
        settings = LossSettings(loss_type, beta=0.0, max_completion_length=4)  # type: ignore[arg-type]
        rewarded, learned = caption_loss(pairs, settings, 8.0), reference_loss(pairs, settings, 8.0)
        assert rewarded is not None
        assert learned is not None
        rows = [pair[1].log_probs for pair in pairs]
        assert all(map(torch.equal, *(torch.autograd.grad(parts.loss, rows) for parts in (rewarded, learned))))
        assert learned.loss.item() == pytest.approx(1.25 if loss_type != "dr_grpo" else 10 / 16)
        assert learned.policy_loss == learned.loss.detach()
    assert reference_loss([(RolloutGroup("other", NOTHING, [1]), GroupOutput())], LossSettings(), 1.0) is None


RANKS, MICRO_BATCHES = 2, 2
PARTS = [[0], [1, 2], [3], []]  # groups of each micro-batch, those of the first rank first; group 1 is all alike


def over_parts(
    losses: Callable[[list[int], StepCounts], torch.Tensor | None], groups: list[RolloutGroup]
) -> torch.Tensor:
    """A step's loss as trainer and ranks put it together: a sum over micro-batches, the mean over ranks."""
    whole = [value / (RANKS * MICRO_BATCHES) for value in count_step([groups])]
    result = [losses(part, StepCounts(*whole)) for part in PARTS if part]
    return torch.stack([loss / MICRO_BATCHES / RANKS for loss in result if loss is not None]).sum()


def test_loop_1_over_micro_batches_and_ranks_is_trls_loss_of_the_whole_step() -> None:
    """Tokens of a group without spread are among those that TRL divides by, and its KL counts."""
    pytest.importorskip("trl", reason="trl is in the `test` extra")
    whole = case()
    whole["advantages"][2:4] = 0.0
    one_each = {name: tensor.detach() for name, tensor in whole.items()}
    groups, outputs = [], []
    lengths = whole["mask"].sum(1).tolist()
    log_probs = one_each["log_probs"].clone().requires_grad_()
    for number, rows in enumerate((slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 6))):
        group = caption_group(lengths[rows], [])
        group.image_id, group.caption_advantages = str(number), one_each["advantages"][rows]
        group.old_output, group.ref_output = (GroupOutput(one_each[name][rows]) for name in ("old", "ref"))
        groups.append(group)
        outputs.append(GroupOutput(log_probs[rows], one_each["entropies"][rows]))
    settings = LossSettings("dapo", epsilon_high=0.28, beta=0.04)

    def losses(part: list[int], counts: StepCounts) -> torch.Tensor | None:
        parts = caption_loss([(groups[n], outputs[n]) for n in part], settings, counts.tokens)
        return None if parts is None else parts.loss

    result, expected = over_parts(losses, groups), trl_loss(whole, settings, float(sum(lengths)))
    result.backward()
    expected.backward()
    assert result.item() == pytest.approx(expected.item(), abs=1e-7)
    torch.testing.assert_close(log_probs.grad, whole["log_probs"].grad, atol=1e-7, rtol=0)
    assert log_probs.grad is not None
    assert log_probs.grad[2:4].abs().max() > 1e-4, "the KL holds the group without spread, too"


def test_loop_2_over_micro_batches_and_ranks_weighs_each_group_the_same(tmp_path: Path) -> None:
    policy, settings = MASK_POLICIES["gaussian"], config(tmp_path, mask_beta=0.5)
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(4, 3, generator=generator).requires_grad_()
    groups = []
    for number in range(4):
        advantages = torch.zeros(2) if number == 1 else torch.tensor([1.0, -1.0])
        actions, reference = torch.randn(2, 3, generator=generator), torch.randn(3, generator=generator)
        group = RolloutGroup("image", NOTHING, [1], segment_ids=[2], actions=actions, action_width=torch.tensor(2.0))
        group.mask_advantages, group.ref_output = advantages, GroupOutput(parameters=reference)
        groups.append(group)

    def losses(part: list[int], counts: StepCounts) -> torch.Tensor | None:
        pairs = [(groups[n], GroupOutput(parameters=means[n])) for n in part]
        parts = mask_policy_loss(pairs, policy, settings, counts.masks)
        return None if parts is None else parts.loss

    whole = losses([0, 1, 2, 3], count_step([groups]))
    assert whole is not None
    (expected,) = torch.autograd.grad(whole, means)
    (result,) = torch.autograd.grad(over_parts(losses, groups), means)
    torch.testing.assert_close(result, expected)
    assert expected[1].abs().max() > 0, "the KL holds the group without spread, too"
