"""GRPO's losses: TRL's own `_compute_loss` tensor by tensor, closed forms, micro-batches and ranks, losses on masks."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rl_reward_network.grpo.losses import (
    BOUNDS,
    LoopWeights,
    PathwiseReward,
    StepCounts,
    answer_loss,
    caption_loss,
    completion_mask,
    count_step,
    gradient_norm,
    grpo_loss,
    grpo_objective,
    importance_ratio,
    k3,
    labelled_loss,
    mask_policy_loss,
    name_contrast_losses,
    object_losses,
    reference_loss,
    supervised_mask_losses,
)
from rl_reward_network.grpo.policy import PolicyOutputs
from rl_reward_network.grpo.rollouts import (
    MASK_POLICIES,
    AnswerRollout,
    CaptionRollout,
    MaskRollout,
    MicroBatch,
    Rollouts,
    Stored,
)
from rl_reward_network.grpo.settings import GRPOSettings
from rl_reward_network.grpo.trainer import Sa2VAGRPOTrainer
from rl_reward_network.models.ema import copied
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.rewards.learned import ForegroundMaps
from tests.conftest import smooth_image
from tests.grpo.nano import captions_of, config, image_of, nano, regions, rewards
from tests.models.test_reward_network import network_of

COUNT, LENGTH, LONGEST = 6, 5, 9


def case(seed: int = 0) -> dict[str, Tensor]:
    """Log-probabilities near old and reference ones, advantages of both signs, completions of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(COUNT, LENGTH, generator=generator, dtype=torch.float64) * 3
    noise = torch.randn(2, COUNT, LENGTH, generator=generator, dtype=torch.float64) * 0.3
    lengths = torch.tensor([5, 3, 1, 4, 5, 2])
    return {
        "log_probs": log_probs.requires_grad_(),
        "old": log_probs.detach() + noise[0],
        "ref": log_probs.detach() + noise[1],
        "advantages": torch.randn(COUNT, generator=generator, dtype=torch.float64),
        "mask": (torch.arange(LENGTH) < lengths[:, None]).long(),
        "entropies": torch.rand(COUNT, LENGTH, generator=generator, dtype=torch.float64),
    }


def trl_loss(tensors: dict[str, Tensor], settings: GRPOSettings, num_items: float) -> Tensor:
    """What TRL makes of the same tensors, with a stand-in for everything that is not the loss."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    same = ("importance_sampling_level", "beta", "loss_type", "epsilon_high", "max_completion_length", "entropy_coef")
    stub = SimpleNamespace(
        **{name: getattr(settings, name) for name in same},
        _get_per_token_logps_and_entropies=lambda *a, **k: (tensors["log_probs"], tensors["entropies"], None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        epsilon_low=settings.epsilon,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=bool(settings.entropy_coef),
        use_adaptive_entropy=False,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(use_bias_correction_kl=True, delta=None, steps_per_generation=1),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x, sync_gradients=True, no_sync=nullcontext
        ),
        _metrics={"train": defaultdict(list)},
    )
    empty = torch.zeros(COUNT, 0, dtype=torch.long)
    inputs: dict[str, Any] = {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": torch.zeros(COUNT, LENGTH, dtype=torch.long),
        "completion_mask": tensors["mask"],
        "advantages": tensors["advantages"],
        "old_per_token_logps": tensors["old"],
        "ref_per_token_logps": tensors["ref"],
        "num_items_in_batch": torch.tensor(num_items, dtype=torch.float64),
    }
    return GRPOTrainer._compute_loss(stub, None, inputs)


def our_loss(tensors: dict[str, Tensor], settings: GRPOSettings, num_items: float | None = None) -> Any:
    log_probs, old, ref, advantages, mask, entropies = tensors.values()
    return grpo_loss(log_probs, advantages, mask, settings, old, ref if settings.beta else None, entropies, num_items)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("beta", "entropy_coef"), [(0.0, 0.0), (0.04, 0.0), (0.04, 0.01)])
def test_loss_and_gradient_are_those_of_trl(loss_type: Any, level: Any, beta: float, entropy_coef: float) -> None:
    pytest.importorskip("trl", reason="trl is in the `test` extra")
    how = {"loss_type": loss_type, "importance_sampling_level": level, "beta": beta, "entropy_coef": entropy_coef}
    settings = GRPOSettings(**how, epsilon_high=0.28, max_completion_length=LONGEST)
    theirs, ours = case(), case()
    expected, result = trl_loss(theirs, settings, 37.0), our_loss(ours, settings, 37.0)
    expected.backward()
    result.value.backward()
    assert result.value.item() == pytest.approx(expected.item(), abs=1e-9)
    torch.testing.assert_close(ours["log_probs"].grad, theirs["log_probs"].grad, atol=1e-9, rtol=0)
    assert ours["log_probs"].grad.abs().max() > 1e-3, "a gradient that is 0 everywhere would prove nothing"


def test_the_ratio_is_exactly_one_before_the_first_step() -> None:
    tensors = case()
    ratio = importance_ratio(tensors["log_probs"], tensors["log_probs"].detach(), tensors["mask"], "token")
    assert (ratio == 1).all()
    settings = GRPOSettings(loss_type="bnpo", beta=0.0)
    parts = grpo_loss(tensors["log_probs"], tensors["advantages"], tensors["mask"], settings)
    mask, advantages = tensors["mask"].double(), tensors["advantages"][:, None]
    assert parts.value.item() == pytest.approx((-(advantages * mask).sum() / mask.sum()).item())
    parts.value.backward()
    torch.testing.assert_close(tensors["log_probs"].grad, -advantages * mask / mask.sum())
    assert not {"clip_fraction", "kl_div"} & parts.metrics.keys(), "nothing could be clipped, there is no reference"


def test_clipping_stops_the_gradient_and_is_counted() -> None:
    log_probs = torch.tensor([[0.5], [-0.5], [0.5], [-0.5]], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0])
    settings = GRPOSettings(loss_type="bnpo", beta=0.0)
    parts = grpo_loss(log_probs, advantages, torch.ones(4, 1), settings, torch.zeros(4, 1))
    parts.value.backward()
    assert log_probs.grad.squeeze(1).bool().tolist() == [False, False, True, True]
    assert parts.metrics["clip_fraction"] == 0.5


def test_padding_changes_no_loss_type() -> None:
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo"):
        settings = GRPOSettings(loss_type=loss_type, beta=0.04, max_completion_length=LONGEST)
        plain, padded = case(), case()
        for name in ("log_probs", "old", "ref", "mask", "entropies"):
            padded[name] = torch.nn.functional.pad(padded[name].detach(), (0, 3), value=0)
        assert our_loss(padded, settings).value.item() == pytest.approx(our_loss(plain, settings).value.item())


def test_the_gradient_of_the_kl_is_that_of_policy_against_reference() -> None:
    """In expectation over sampled tokens, also over those of an older policy: k3 alone has the reverse one's."""
    generator = torch.Generator().manual_seed(0)
    logits, old, ref = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    log_probs, old_log_probs, ref_log_probs = (values.log_softmax(0) for values in (logits, old, ref))
    (expected,) = torch.autograd.grad((log_probs.exp() * (log_probs - ref_log_probs)).sum(), logits, retain_graph=True)
    settings = GRPOSettings(loss_type="bnpo", beta=1.0)

    def kl_loss(n: int, sampled_from: Tensor) -> Tensor:
        one, old, ref = (values[n].reshape(1, 1) for values in (log_probs, sampled_from, ref_log_probs))
        return grpo_loss(one, torch.zeros(1), torch.ones(1, 1), settings, old, ref).kl

    for sampled_from in (log_probs.detach(), old_log_probs):
        loss = sum(p * kl_loss(n, sampled_from) for n, p in enumerate(sampled_from.exp()))
        (result,) = torch.autograd.grad(loss, logits, retain_graph=True)
        torch.testing.assert_close(result, expected, atol=1e-12, rtol=0)
    (plain,) = torch.autograd.grad((log_probs.detach().exp() * k3(log_probs, ref_log_probs)).sum(), logits)
    assert (plain - expected).abs().max() > 0.01


# ---- losses of a micro-batch ----------------------------------------------------------------------------------------


def outputs_of(*log_probs: Tensor, parameters: Sequence[Tensor] = ()) -> PolicyOutputs:
    return PolicyOutputs(list(log_probs), [torch.zeros_like(rows) for rows in log_probs], [], list(parameters), [])


def level(lengths: list[int], longest: int, value: float = -1.0) -> Tensor:
    return torch.full((len(lengths), longest), value, requires_grad=True)


def caption_batch(*groups: CaptionRollout, advantages: Sequence[Tensor], **stored: Stored) -> MicroBatch:
    return MicroBatch(Rollouts(len(groups), list(groups), []), list(advantages), [], **stored)


def answers(*truths: np.ndarray | None) -> list[AnswerRollout]:
    return [AnswerRollout(image_of(row, truth=truth), [2], [3]) for row, truth in enumerate(truths)]


def test_what_counts_in_a_step() -> None:
    group = captions_of(0, [2, 3], [True, False])
    assert completion_mask([group], 3).tolist() == [[1, 1, 0], [0, 0, 0]], "a truncated caption does not"
    segmented = Rollouts(2, [], answers(np.zeros((1, 1), dtype=bool), None))
    assert count_step([Rollouts(2, [group], []), segmented])[:3] == (2, 2, 1), "tokens, answers, those with a true mask"


def test_loss_1_uses_what_was_stored_even_from_a_longer_batch() -> None:
    old, reference = Stored([level([2], 4, -1.5)], []), Stored([level([2], 2, -2.0)], [])
    batch = caption_batch(captions_of(0, [2]), advantages=[torch.ones(1)], old=old, reference=reference)
    parts = caption_loss(batch, outputs_of(level([2], 4)), GRPOSettings(loss_type="bnpo", beta=0.1), None)
    estimate = math.exp(0.5) * (math.exp(-1) + 1 - 1)
    assert parts.metrics["kl_div"] == pytest.approx(estimate, abs=1e-6), "times the ratio"
    assert parts.value.item() == pytest.approx(-1.2 + 0.1 * estimate, abs=1e-6)  # clipped: e^0.5 to 1.2


def test_reference_captions_are_learned_by_cross_entropy_whose_gradient_is_that_of_advantages_of_1() -> None:
    log_probs = torch.tensor([[-1.0, -2.0, -5.0]], requires_grad=True)
    batch = caption_batch(captions_of(0, [2]), advantages=[torch.ones(1)])
    settings = GRPOSettings(beta=0.0)
    parts, rewarded = (loss(batch, outputs_of(log_probs), settings, 2.0) for loss in (reference_loss, caption_loss))
    assert parts.value.item() == parts.metrics["policy_loss"] == pytest.approx(1.5)
    gradients = [torch.autograd.grad(loss.value, log_probs)[0] for loss in (parts, rewarded)]
    torch.testing.assert_close(*gradients)
    assert rewarded.value.item() == -1


def mask_batch(
    masks: Sequence[MaskRollout], advantages: Sequence[Tensor], reference: Sequence[Tensor] = ()
) -> MicroBatch:
    rollouts = Rollouts(len(masks), [], answers(*[None] * len(masks)), list(masks))
    return MicroBatch(rollouts, [], list(advantages), Stored([], list(reference)))


def test_loss_2_is_the_clipped_objective_and_the_closed_form_divergence(tmp_path: Path) -> None:
    policy, settings = MASK_POLICIES["gaussian"], config(tmp_path, mask_beta=0.5)
    mean = torch.zeros(4, requires_grad=True)
    mask = MaskRollout(0, torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]]), torch.tensor(2.0))
    batch = mask_batch([mask], [torch.tensor([1.0, -1.0])], [torch.full((4,), 1.0)])
    parts = mask_policy_loss(batch, outputs_of(parameters=[mean]), settings, 1.0, policy)
    assert parts.metrics["kl_div"] == pytest.approx(1 / (2 * 4))
    assert parts.value.item() == pytest.approx(0.5 / 8)
    (gradient,) = torch.autograd.grad(parts.value, mean)
    # -(1/G) sum A (a - e) / (width^2 C) and the divergence's (e - e_ref) / (width^2 C)
    assert gradient[:2].tolist() == pytest.approx([-(1 + 1) / 2 / (4 * 4) + 0.5 * -1 / (4 * 4), 0.5 * -1 / (4 * 4)])
    assert parts.metrics["policy_loss"] == 0, "without the divergence: the ratio is 1 and advantages sum to 0"
    whole = mask_policy_loss(batch, outputs_of(parameters=[mean]), settings, 4.0, policy)
    assert whole.value.item() == pytest.approx(parts.value.item() / 4), "one of the four groups of a step"


def test_the_loss_of_answers_is_the_mean_over_tokens_and_then_over_groups() -> None:
    log_probs = [torch.tensor(values, requires_grad=True) for values in ([-1.0, -2.0], [0.0, -3.0, -6.0])]
    loss = answer_loss(log_probs, 2.0)
    assert loss.item() == pytest.approx((1.5 + 3.0) / 2)
    assert torch.autograd.grad(loss, log_probs[1])[0].tolist() == pytest.approx([-1 / 6] * 3)


def test_the_objective_sums_the_weighted_losses_and_a_rewarded_loop_without_groups_is_logged_as_0(
    tmp_path: Path,
) -> None:
    batch = caption_batch(captions_of(0, [2]), advantages=[torch.ones(1)])
    outputs = replace(outputs_of(level([2], 2)), answer_log_probs=[torch.tensor([-2.0])])
    settings, weights = config(tmp_path, beta=0.0, seg_text_weight=0.5), {"loop1": 3.0, "loop2": 1.0}
    result = grpo_objective(batch, outputs, settings, StepCounts(2.0, 1.0, 0.0), weights, MASK_POLICIES["gaussian"])
    assert result.value.item() == pytest.approx(3 * -1 + 0.5 * 2)
    tags = {f"loop1/{name}" for name in ("loss", "policy_loss", "entropy")} | {"loop2/loss", "loop2/policy_loss"}
    assert result.metrics.keys() == tags | {"loss/answer"}
    assert (result.metrics["loop1/loss"], result.metrics["loop2/loss"], result.metrics["loss/answer"]) == (-1, 0, 2)
    supervised = config(tmp_path, objective="supervised")
    result = grpo_objective(batch, outputs, supervised, StepCounts(2.0, 1.0, 0.0), weights, MASK_POLICIES["gaussian"])
    assert not any(tag.startswith("loop2") for tag in result.metrics)


def test_the_contrast_is_the_mean_over_equal_names_of_what_cosines_give(tmp_path: Path) -> None:
    embeddings = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0], [0.0, -1.0]], requires_grad=True)
    names = ["left", "left", "right", "alone"]
    cosines = [[1, 0, 0], [1, 0, 0], [0, 0, -1]]  # of each row with the others
    first = -math.log(math.exp(10 * cosines[0][0]) / sum(math.exp(10 * cosine) for cosine in cosines[0]))
    losses = name_contrast_losses(embeddings, names)
    assert losses.tolist() == pytest.approx([first, first, 0, 0], abs=1e-5), "a name that is alone has no loss"
    other = name_contrast_losses(embeddings, ["left", "right", "left", "alone"]).sum()
    (gradient,) = torch.autograd.grad(other, embeddings)
    assert gradient.isfinite().all()
    assert gradient[0, 1] < 0 < gradient[1, 1], "to its own name at (0, 1), and the other name away from it"

    rollouts = [replace(answer, name=name) for answer, name in zip(answers(*[None] * 4), names, strict=True)]
    given = (rollouts, [], list(embeddings), config(tmp_path, objective="supervised", contrast_weight=0.5))
    total, metrics = labelled_loss(*given, StepCounts(0.0, 8.0, 0.0))
    assert total.item() == pytest.approx(0.5 * 2 * first / 8, abs=1e-6), "of two micro-batches of four answers"
    assert metrics == {"loss/contrast": pytest.approx(first / 2, abs=1e-6)}
    alike = [replace(answer, name="left") for answer in rollouts]
    assert labelled_loss(alike, *given[1:], StepCounts(0.0, 8.0, 0.0))[1] == {}, "one name has nothing to differ from"


RANKS, MICRO_BATCHES = 2, 2
PARTS = [[0], [1, 2], [3]]  # groups of each micro-batch, those of the first rank first; group 1 is all alike


def over_parts(losses: Callable[[list[int], StepCounts], Tensor], whole: Rollouts) -> Tensor:
    """A step's loss as trainer and ranks put it together: a sum over micro-batches, the mean over ranks."""
    counts = StepCounts(*[value / (RANKS * MICRO_BATCHES) for value in count_step([whole])])
    return torch.stack([losses(part, counts) / MICRO_BATCHES / RANKS for part in PARTS]).sum()


def test_loop_1_over_micro_batches_and_ranks_is_trls_loss_of_the_whole_step() -> None:
    """Tokens of a group without spread are among those that TRL divides by, and its KL counts."""
    pytest.importorskip("trl", reason="trl is in the `test` extra")
    whole = case()
    whole["advantages"][2:4] = 0.0
    one_each = {name: tensor.detach() for name, tensor in whole.items()}
    lengths, rows = whole["mask"].sum(1).tolist(), (slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 6))
    log_probs = one_each["log_probs"].clone().requires_grad_()
    groups = [captions_of(number, lengths[of_group]) for number, of_group in enumerate(rows)]
    settings = GRPOSettings(epsilon_high=0.28, max_completion_length=LONGEST)

    def losses(part: list[int], counts: StepCounts) -> Tensor:
        own = [rows[n] for n in part]
        old, ref = (Stored([one_each[name][of_group] for of_group in own], []) for name in ("old", "ref"))
        advantages = [one_each["advantages"][of_group] for of_group in own]
        batch = caption_batch(*(groups[n] for n in part), advantages=advantages, old=old, reference=ref)
        outputs = outputs_of(*(log_probs[of_group] for of_group in own))
        return caption_loss(batch, outputs, settings, counts.tokens).value

    result = over_parts(losses, Rollouts(4, groups, []))
    expected = trl_loss(whole, settings, float(sum(lengths)))
    result.backward()
    expected.backward()
    assert result.item() == pytest.approx(expected.item(), abs=1e-7)
    torch.testing.assert_close(log_probs.grad, whole["log_probs"].grad, atol=1e-7, rtol=0)
    assert log_probs.grad[2:4].abs().max() > 1e-4, "the KL holds the group without spread, too"


def test_loop_2_over_micro_batches_and_ranks_weighs_each_group_the_same(tmp_path: Path) -> None:
    policy, settings = MASK_POLICIES["gaussian"], config(tmp_path, mask_beta=0.5)
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(4, 3, generator=generator).requires_grad_()
    actions, references = torch.randn(4, 2, 3, generator=generator), torch.randn(4, 3, generator=generator)
    advantages = [torch.zeros(2) if number == 1 else torch.tensor([1.0, -1.0]) for number in range(4)]

    def losses(part: list[int], counts: StepCounts) -> Tensor:
        masks = [MaskRollout(row, actions[n], torch.tensor(2.0)) for row, n in enumerate(part)]
        batch = mask_batch(masks, [advantages[n] for n in part], [references[n] for n in part])
        return mask_policy_loss(batch, outputs_of(parameters=means[part]), settings, counts.masks, policy).value

    everything = Rollouts(4, [], answers(*[None] * 4))
    (expected,) = torch.autograd.grad(losses([0, 1, 2, 3], count_step([everything])), means)
    (result,) = torch.autograd.grad(over_parts(losses, everything), means)
    torch.testing.assert_close(result, expected)
    assert expected[1].abs().max() > 0, "the KL holds the group without spread, too"


# ---- the mask of the mean action ------------------------------------------------------------------------------------

SIDE = 64  # of the square between grid and image
STEP = 100.0  # times the gradient: small, but its effect is far above the rounding of a score


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
    result = PathwiseReward(ForegroundMaps(network), SIDE).scores([(image_of(0, image), logits)]).mean()
    torch.testing.assert_close(result, expected[0])


def test_a_small_step_along_the_gradient_raises_the_score() -> None:
    reward = PathwiseReward(ForegroundMaps(network_of()), SIDE)
    shown = [(image_of(0, smooth_image(48, 80)), start(0)), (image_of(0, smooth_image(64, 64, 1)), start(1))]
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
    reward, image, logits = PathwiseReward(ForegroundMaps(seeing()), SIDE), image_of(0, smooth_image(48, 80)), start()
    scores = []
    for _ in range(61):
        score = reward.scores([(image, logits)]).mean()
        scores.append(score.item())
        (gradient,) = torch.autograd.grad(score, logits)
        logits = (logits + 0.5 * gradient / gradient.abs().max()).detach().requires_grad_()
    assert scores[-1] > scores[0] + 0.2
    assert (logits[:7] > 0).all()
    assert (logits[9:] < 0).all()


def test_the_network_gets_no_gradient_and_an_image_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    network, looked = network_of(), []
    real = network.foreground_probs
    monkeypatch.setattr(network, "foreground_probs", lambda image: looked.append(image.shape) or real(image))
    reward = PathwiseReward(ForegroundMaps(network), SIDE)
    first, second = image_of(0, smooth_image(48, 80)), image_of(0, smooth_image(64, 64, 1))
    for _ in range(2):
        reward.scores([(first, start(0)), (second, start(1)), (first, start(2))]).mean().backward()
    assert looked == [(1, 3, 48, 80), (1, 3, 64, 64)]
    assert all(parameter.grad is None for parameter in network.parameters())


def test_supervision_by_hand() -> None:
    """Equal logits x: cross-entropy softplus(x) - x * share of truth, Dice (2 p t + 1) / (n p + t + 1) on n cells."""
    truth = np.zeros((4, 4), dtype=bool)
    truth[:, :1] = True
    x = 0.7
    p = 1 / (1 + math.exp(-x))
    expected = 0.3 * (math.log1p(math.exp(x)) - x / 4) + 1.7 * (1 - (2 * p * 4 + 1) / (16 * p + 4 + 1))
    logits = torch.full((2, 2), x, requires_grad=True)
    loss = supervised_mask_losses([(image_of(truth=truth), logits)], 0.3, 1.7)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert (gradient[:, 0] < gradient[:, 1]).all(), "the truth's side is pushed up more"


def test_masks_are_compared_on_a_grid_twice_as_fine() -> None:
    """A thin object counts by its area: half of two of four columns, wherever it begins."""
    thin = [np.isin(np.arange(64).reshape(8, 8) % 8, (start, start + 1)) for start in (1, 2, 3)]
    targets = supervised_mask_losses([(image_of(truth=one), torch.zeros(2, 2)) for one in thin], 2.0, 0.5).tolist()
    # 16 cells of probability 1 / 2, truth of area 4; the cross-entropy of probability 1 / 2 is the same for any truth
    assert targets == pytest.approx([2 * math.log(2) + 0.5 * (1 - (2 * 0.5 * 4 + 1) / (8 + 4 + 1))] * 3)


def test_an_absent_object_has_no_dice_loss_by_name() -> None:
    absent = [(image_of(truth=np.zeros((4, 4), dtype=bool)), torch.zeros(2, 2))]
    assert supervised_mask_losses(absent, 1, 1, by_name=True).item() == pytest.approx(math.log(2))
    assert supervised_mask_losses(absent, 1, 1).item() == pytest.approx(math.log(2) + 1 - 1 / (16 * 0.5 + 1))


def test_the_score_that_empties_masks_learns_which_truths_are_empty() -> None:
    images = [image_of(truth=truth) for truth in (np.ones((2, 2), bool), np.zeros((2, 2), bool), None)]
    scores = [torch.tensor([0.5]), torch.tensor([0.5]), torch.tensor([9.0])]
    expected = [math.log(1 + math.exp(-0.5)), math.log(1 + math.exp(0.5))]
    assert [loss.item() for loss in object_losses(images, scores)] == pytest.approx(expected)
    assert object_losses(images, []) == [], "as of SAM 2, whose score is not used"


def test_supervision_is_of_each_group_that_has_a_truth() -> None:
    half, full = np.zeros((4, 4), dtype=bool), np.ones((6, 8), dtype=bool)
    half[:2] = True
    both = [(image_of(truth=half), torch.zeros(2, 2)), (image_of(truth=full), torch.ones(2, 3))]
    alone = [supervised_mask_losses([one], 1, 1).item() for one in both]
    assert supervised_mask_losses(both, 1, 1).tolist() == pytest.approx(alone, rel=1e-6)


def pathwise_trainer(folder: Path, **settings: Any) -> Sa2VAGRPOTrainer:
    (model, processor), how = nano(), {"pathwise_weight": 5.0, "mask_to_caption_weight": 0.0} | settings
    pathwise = PathwiseReward(ForegroundMaps(seeing()), processor.sam_image_size)
    return Sa2VAGRPOTrainer(model, processor, config(folder, **how), regions()[:2], rewards(), pathwise)


def test_a_trainer_climbs_the_score_and_moves_the_mask_decoder(tmp_path: Path) -> None:
    own = pathwise_trainer(tmp_path, max_steps=3, learning_rate=1e-4)
    own.freeze_unreached(regions()[:2])
    own.reset_reference()
    before = copied(own.sa2va)
    own.train()
    scores = [log["loop2/pathwise_score"] for log in own.state.log_history if "loop2/pathwise_score" in log]
    assert scores == sorted(scores)
    assert scores[-1] > scores[0]
    assert any(not torch.equal(p, before[name]) for name, p in copied(own.sa2va).items() if "mask_decoder" in name)


def test_the_kl_holds_a_run_that_trains_by_the_gradient_alone(tmp_path: Path) -> None:
    """It does not depend on the weight of the loop, here 0."""
    kl = {}
    for beta in (0.0, 100.0):
        alone = {"caption_to_mask_weight": 0.0, "beta": 0.0, "seg_text_weight": 0.0}
        own = pathwise_trainer(tmp_path / str(beta), mask_beta=beta, **alone)
        rollouts = own.rollout_generator.generate(regions()[:2], (0, 0, 0))
        before = own.policy(rollouts)[0].parameters
        own.train()
        groups = zip(own.policy(rollouts)[0].parameters, before, rollouts.masks, strict=True)
        kl[beta] = sum(own.policy.mask_policy.kl(now, then, mask.width).item() for now, then, mask in groups)
    assert kl[100.0] < 0.2 * kl[0.0]


# ---- weights of the loops -------------------------------------------------------------------------------------------


def test_the_loop_with_the_larger_gradient_is_turned_down() -> None:
    own = LoopWeights({"loop1": 1.0, "loop2": 1.0})
    # Nothing without a gradient; norms are averaged: 2 and 1.
    for norm, expected in ((0.0, [1.0, 1.0]), (3.0, [0.5, 1.5]), (1.0, [2 / 3, 4 / 3])):
        own.update({"loop1": norm, "loop2": 1.0})
        assert [own["loop1"], own["loop2"]] == pytest.approx(expected)


@pytest.mark.parametrize("configured", [{"loop1": 1.0, "loop2": 1.0}, {"loop1": 0.01, "loop2": 1.0}])
@pytest.mark.parametrize("noise", [1e-30, 1e-10, 1e-3, 1e3, 1e10, 1e30])
def test_a_loop_whose_gradient_is_noise_does_not_silence_the_other(configured: dict[str, float], noise: float) -> None:
    own = LoopWeights(configured)
    for _ in range(3):
        own.update({"loop1": noise, "loop2": 1.0})
    ratios = [own[loop] / weight for loop, weight in configured.items()]
    assert all(BOUNDS[0] <= ratio <= BOUNDS[1] for ratio in ratios)
    assert (ratios[0] > ratios[1]) == (noise < 1), "the smaller gradient still gets the larger weight"


def test_the_norm_is_of_the_gradient_and_leaves_none_behind() -> None:
    first, second, unused = (nn.Parameter(torch.ones(2)) for _ in range(3))
    loss = (3 * first).sum() + (4 * second).sum()
    assert gradient_norm(loss, [first, second, unused]).item() == pytest.approx((2 * 9 + 2 * 16) ** 0.5)
    assert first.grad is None
    assert gradient_norm(loss, [unused]).item() == 0
    loss.backward()
    assert first.grad is not None, "the graph is still there"


def test_soft_cldice_joins_the_losses_of_masks_with_its_weight() -> None:
    truth = np.zeros((64, 64), dtype=bool)
    truth[31:33, 4:60] = True
    image = image_of(truth=truth)
    logits = torch.where(torch.from_numpy(truth), 3.0, -3.0)
    logits[31:33, 28:34] = -3.0  # a gap
    without = supervised_mask_losses([(image, logits)], 1.0, 0.5)
    assert torch.equal(without, supervised_mask_losses([(image, logits)], 1.0, 0.5, 0.0))
    whole, half = (supervised_mask_losses([(image, logits)], 1.0, 0.5, weight) - without for weight in (1.0, 0.5))
    assert 0.02 < whole.item() < 1
    torch.testing.assert_close(half, whole / 2)
