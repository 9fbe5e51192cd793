"""The packed policy: log-probabilities, gradients and masks are those of one text at a time, whatever the batch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rl_reward_network.grpo import policy as policy_file
from rl_reward_network.grpo.mask_policies import MASK_POLICIES
from rl_reward_network.grpo.policy import GRPOPolicy, token_log_probs
from rl_reward_network.grpo.rollouts import RolloutGroup
from tests.grpo.nano import make_trainer, nano, regions, shake


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[RolloutGroup]]:
    """A trainer whose weights are not those of the start, and groups with completions of different lengths."""
    trainer = make_trainer(tmp_path_factory.mktemp("policy"))
    shake(trainer.sa2va)
    groups = trainer.rollout_generator.generate(regions()[:6], (0, 0, 0))[0]
    assert len({len(one) for group in groups for one in group.completion_ids}) > 1
    assert len({group.image_id for group in groups}) == 2, "several regions of one image, and several images"
    return trainer, groups


def plain_log_probs(trainer: Any, group: RolloutGroup, completion: list[int]) -> Tensor:
    """The usual layout: the whole text of one completion by itself, all logits."""
    model, processor = trainer.sa2va, trainer.rollout_generator.processor
    ids = torch.tensor([group.prefix_ids + group.describe_ids + completion])
    logits = model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        vision_features=group.features.vision,
        prompt_masks=[group.region_cells],
        vp_overall_mask=torch.tensor([True]),
    ).logits[0, -len(completion) - 1 : -1]
    logits[:, processor.never_sampled_ids] = float("-inf")
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def test_log_probs_are_those_of_each_text_by_itself(made: tuple[Any, list[RolloutGroup]]) -> None:
    trainer, groups = made
    outputs, _ = trainer.policy(groups)
    for group, output in zip(groups, outputs, strict=True):
        for row, completion in zip(output.log_probs, group.completion_ids, strict=True):
            alone = plain_log_probs(trainer, group, completion)
            torch.testing.assert_close(row[: len(completion)], alone, atol=2e-4, rtol=1e-4)
            assert not row[len(completion) :].any()


def test_the_gradient_is_that_of_the_repeated_layout(made: tuple[Any, list[RolloutGroup]]) -> None:
    trainer, groups = made
    names = [name for name, p in trainer.sa2va.named_parameters() if p.requires_grad]
    weights = [trainer.sa2va.get_parameter(name) for name in names]
    outputs, _ = trainer.policy(groups[:3])
    packed = torch.autograd.grad(sum(output.log_probs.sum() for output in outputs), weights, allow_unused=True)
    total = sum(plain_log_probs(trainer, group, one).sum() for group in groups[:3] for one in group.completion_ids)
    apart = torch.autograd.grad(total, weights, allow_unused=True)
    compared = 0
    for name, ours, theirs in zip(names, packed, apart, strict=True):
        if theirs is not None:
            scale = theirs.abs().max().clamp(min=1e-3)
            torch.testing.assert_close(ours / scale, theirs / scale, atol=1e-4, rtol=0, msg=name)
            compared += 1
    assert compared >= 20


def test_images_stay_with_their_prompts_whatever_order_and_batch(made: tuple[Any, list[RolloutGroup]]) -> None:
    trainer, groups = made
    together, _ = trainer.policy(groups)
    turned, _ = trainer.policy(groups[::-1])
    for number, group in enumerate(groups):
        (alone,), _ = trainer.policy([group])
        width = alone.log_probs.shape[1]
        for other in (together[number], turned[::-1][number]):
            torch.testing.assert_close(other.log_probs[:, :width], alone.log_probs, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(other.parameters, alone.parameters, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(together[0].parameters, together[-1].parameters, atol=1e-2)


def test_loop_2_reads_the_state_at_seg(made: tuple[Any, list[RolloutGroup]]) -> None:
    trainer, groups = made
    group = groups[0]
    (output,), _ = trainer.policy([group], True)
    ids = torch.tensor([group.prefix_ids + group.segment_ids])
    states = trainer.sa2va.model(input_ids=ids, vision_features=group.features.vision).last_hidden_state
    (embedding,) = trainer.sa2va.seg_embeddings(states, ids)
    torch.testing.assert_close(output.parameters, embedding[0], atol=1e-4, rtol=1e-4)
    mask = trainer.sa2va.decode_masks(group.features.sam, embedding[:1]).mask_logits[0]
    torch.testing.assert_close(output.mask_logits, mask, atol=1e-3, rtol=1e-3)


def test_the_answers_log_probs_are_those_of_the_whole_text(made: tuple[Any, list[RolloutGroup]]) -> None:
    trainer, groups = made
    (output,), _ = trainer.policy([groups[0]])
    group, model = groups[0], trainer.sa2va
    answer = torch.tensor(group.segment_ids[-group.answer_length :])
    assert answer[-1] == model.config.seg_token_id
    ids = torch.tensor([group.prefix_ids + group.segment_ids])
    logits = model(input_ids=ids, vision_features=group.features.vision).logits[0, -len(answer) - 1 : -1]
    logits[:, trainer.rollout_generator.processor.never_sampled_ids] = float("-inf")
    expected = logits.log_softmax(-1).gather(1, answer[:, None])[:, 0]
    torch.testing.assert_close(output.answer_log_probs, expected, atol=2e-4, rtol=1e-4)


def test_the_zero_reaches_every_trainable_tensor_and_nothing_needs_no_group() -> None:
    model, processor = nano()
    trainer = GRPOPolicy(model, MASK_POLICIES["gaussian"], 1.0, processor.never_sampled_ids, 0)
    outputs, anchor = trainer([])
    assert (outputs, float(anchor.detach())) == ([], 0.0)
    anchor.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained
    assert all(p.grad is not None and not p.grad.any() for p in trained)


def test_chunks_change_nothing_and_never_sampled_ids_have_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    head, states, ids = torch.nn.Linear(6, 11, bias=False), torch.randn(7, 6, requires_grad=True), torch.arange(7)
    whole = token_log_probs(head, states, ids, 0.7, [9, 10], entropies="trained")
    (gradient,) = torch.autograd.grad(whole[0].sum() + whole[1].sum(), states)
    monkeypatch.setattr(policy_file, "LOGITS_AT_ONCE", 3 * head.out_features)
    parts = token_log_probs(head, states, ids, 0.7, [9, 10], entropies="trained")
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(torch.autograd.grad(parts[0].sum() + parts[1].sum(), states)[0], gradient)
    assert gradient.isfinite().all()
    allowed = (head(states) / 0.7)[:, :9].log_softmax(-1)
    torch.testing.assert_close(whole[0], allowed.gather(1, ids[:, None])[:, 0])
    torch.testing.assert_close(whole[1], torch.distributions.Categorical(logits=allowed).entropy())


@pytest.mark.parametrize("at_once", [2**25, 33])
def test_entropies_for_the_logs_have_no_graph(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_file, "LOGITS_AT_ONCE", at_once)
    head, states = torch.nn.Linear(4, 11), torch.randn(7, 4, requires_grad=True)
    ids = torch.arange(7)
    log_probs, entropies = token_log_probs(head, states, ids, 1.0, [9])
    assert entropies is not None
    assert token_log_probs(head, states, ids, 1.0, [9], entropies="none")[1] is None
    with_graph = token_log_probs(head, states, ids, 1.0, [9], entropies="trained")
    assert not entropies.requires_grad
    assert with_graph[1].requires_grad
    torch.testing.assert_close((log_probs, entropies), with_graph)
    gradients = [torch.autograd.grad(values.sum(), states)[0] for values in (log_probs, with_graph[0])]
    assert torch.equal(*gradients)


def test_activations_computed_twice_give_the_same_gradient(made: tuple[Any, list[RolloutGroup]]) -> None:
    trainer, groups = made
    weight = next(p for name, p in trainer.sa2va.named_parameters() if "lora_B" in name)
    result = []
    for twice in (False, True):
        if twice:
            trainer.policy.activation_checkpointing_enable()
        trainer.sa2va.train()
        outputs, _ = trainer.policy(groups[:2])
        result.append(torch.autograd.grad(outputs[0].log_probs.sum(), weight)[0])
    trainer.sa2va.activation_checkpointing_disable()
    trainer.sa2va.eval()
    torch.testing.assert_close(result[0], result[1])
