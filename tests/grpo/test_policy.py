"""The packed policy: attention, log-probabilities, gradients and masks are those of one text at a time."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_reward_network.grpo import policy as policy_file
from rl_reward_network.grpo.policy import GRPOPolicy, Segment, pack, token_log_probs
from rl_reward_network.grpo.rollouts import MASK_POLICIES, CaptionRollout, Rollouts
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from tests.grpo.nano import make_trainer, nano, regions, shake, some

TREE = [Segment([1, 2, 3], None), Segment([4, 5], 0), Segment([6], 1), Segment([7, 8], 1), Segment([9], 0)]
SMALL = [Segment([1, 2], None), Segment([3], 0)]


def test_positions_and_sight_are_those_of_the_separate_texts() -> None:
    packed = pack([TREE, SMALL], pad_id=0)
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 0, 0, 0, 0, 0, 0]]
    assert packed.position_ids[0].tolist() == [0, 1, 2, 3, 4, 5, 5, 6, 3]
    assert packed.starts == [[0, 3, 5, 6, 8], [0, 2]]
    seen = [set(row.nonzero().flatten().tolist()) for row in packed.attention_mask[0, 0]]
    assert seen[7] == {0, 1, 2, 3, 4, 6, 7}, "the second completion attends to question and itself, not to the first"
    assert seen[8] == {0, 1, 2, 8}
    padding = packed.attention_mask[1, 0, 3:]
    assert torch.equal(padding, torch.eye(9, dtype=torch.bool)[3:]), "padding attends to itself alone"


def test_an_empty_segment_is_refused() -> None:
    with pytest.raises(ValueError, match="segment 1 is empty"):
        pack([[Segment([1], None), Segment([], 0)]], 0)


def test_states_and_gradients_equal_the_separate_texts(tiny_model: Sa2VAForConditionalGeneration) -> None:
    language = tiny_model.model
    embed = tiny_model.get_input_embeddings()
    paths = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7, 8], [1, 2, 3, 9]]
    ends = [5, 7, 8]  # position of each path's last token in the packed row
    packed = pack([TREE, SMALL], pad_id=0)
    weight = language.language_model.layers[0].mlp.down_proj.weight.requires_grad_(True)

    states = language(
        inputs_embeds=embed(packed.input_ids),
        attention_mask=packed.attention_mask,
        position_ids=packed.position_ids,
        use_cache=False,
    ).last_hidden_state
    (together,) = torch.autograd.grad(states[0, ends].pow(2).sum(), weight)
    apart = torch.zeros_like(weight)
    for path, end in zip(paths, ends, strict=True):
        alone = language(inputs_embeds=embed(torch.tensor([path])), use_cache=False).last_hidden_state[0, -1]
        torch.testing.assert_close(states[0, end], alone, atol=1e-5, rtol=1e-4)
        apart += torch.autograd.grad(alone.pow(2).sum(), weight)[0]
    torch.testing.assert_close(together, apart, atol=1e-4, rtol=1e-4)
    assert together.abs().max() > 1e-3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Rollouts]:
    """A trainer whose weights are not those of the start, and completions of different lengths."""
    trainer = make_trainer(tmp_path_factory.mktemp("policy"))
    shake(trainer.sa2va)
    rollouts = trainer.rollout_generator.generate(regions()[:6], (0, 0, 0))
    assert len({len(one) for caption in rollouts.captions for one in caption.completion_ids}) > 1
    images = {answer.image.image_id for answer in rollouts.answers}
    assert len(images) == 2, "several regions of one image, and several images"
    return trainer, rollouts


def plain_log_probs(trainer: Any, caption: CaptionRollout, completion: list[int]) -> Tensor:
    """The usual layout: the whole text of one completion by itself, all logits."""
    model, processor = trainer.sa2va, trainer.rollout_generator.processor
    ids = torch.tensor([caption.question.prefix_ids + caption.question.suffix_ids + completion])
    logits = model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        vision_features=caption.image.features.vision,
        prompt_masks=[caption.question.region_cells],
        vp_overall_mask=torch.tensor([True]),
    ).logits[0, -len(completion) - 1 : -1]
    logits[:, processor.never_sampled_ids] = float("-inf")
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def test_log_probs_are_those_of_each_text_by_itself(made: tuple[Any, Rollouts]) -> None:
    trainer, rollouts = made
    outputs, _ = trainer.policy(rollouts)
    for caption, rows in zip(rollouts.captions, outputs.log_probs, strict=True):
        for row, completion in zip(rows, caption.completion_ids, strict=True):
            alone = plain_log_probs(trainer, caption, completion)
            torch.testing.assert_close(row[: len(completion)], alone, atol=2e-4, rtol=1e-4)
            assert not row[len(completion) :].any()


def test_the_gradient_is_that_of_the_repeated_layout(made: tuple[Any, Rollouts]) -> None:
    trainer, rollouts = made[0], some(made[1], 0, 1, 2)
    names = [name for name, p in trainer.sa2va.named_parameters() if p.requires_grad]
    weights = [trainer.sa2va.get_parameter(name) for name in names]
    outputs, _ = trainer.policy(rollouts)
    packed = torch.autograd.grad(sum(rows.sum() for rows in outputs.log_probs), weights, allow_unused=True)
    captions = rollouts.captions
    total = sum(plain_log_probs(trainer, caption, one).sum() for caption in captions for one in caption.completion_ids)
    apart = torch.autograd.grad(total, weights, allow_unused=True)
    compared = 0
    for name, ours, theirs in zip(names, packed, apart, strict=True):
        if theirs is not None:
            scale = theirs.abs().max().clamp(min=1e-3)
            torch.testing.assert_close(ours / scale, theirs / scale, atol=1e-4, rtol=0, msg=name)
            compared += 1
    assert compared >= 20


def test_images_stay_with_their_prompts_whatever_order_and_batch(made: tuple[Any, Rollouts]) -> None:
    trainer, rollouts = made
    together, _ = trainer.policy(rollouts)
    turned = replace(rollouts, captions=rollouts.captions[::-1], answers=rollouts.answers[::-1])
    turned_outputs, _ = trainer.policy(turned)
    for row in range(len(rollouts.captions)):
        alone, _ = trainer.policy(some(rollouts, row))
        width = alone.log_probs[0].shape[1]
        for other, place in ((together, row), (turned_outputs, -1 - row)):
            torch.testing.assert_close(other.log_probs[place][:, :width], alone.log_probs[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(other.parameters[place], alone.parameters[0], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(together.parameters[0], together.parameters[-1], atol=1e-2)


def test_loop_2_reads_the_answer_and_the_state_at_seg(made: tuple[Any, Rollouts]) -> None:
    trainer, rollouts = made[0], some(made[1], 0)
    outputs, _ = trainer.policy(rollouts, True)
    (answer,), model = rollouts.answers, trainer.sa2va
    ids = torch.tensor([answer.image.prefix_ids + answer.token_ids])
    states = model.model(input_ids=ids, vision_features=answer.image.features.vision).last_hidden_state
    (embedding,) = model.seg_embeddings(states, ids)
    torch.testing.assert_close(outputs.parameters[0], embedding[0], atol=1e-4, rtol=1e-4)
    mask = model.decode_masks(answer.image.features.sam, embedding[:1]).mask_logits[0]
    torch.testing.assert_close(outputs.mask_logits[0], mask, atol=1e-3, rtol=1e-3)
    words = torch.tensor(answer.answer_ids)
    assert words[-1] == model.config.seg_token_id
    logits = model.lm_head(states)[0, -len(words) - 1 : -1]
    logits[:, trainer.rollout_generator.processor.never_sampled_ids] = float("-inf")
    expected = logits.log_softmax(-1).gather(1, words[:, None])[:, 0]
    torch.testing.assert_close(outputs.answer_log_probs[0], expected, atol=2e-4, rtol=1e-4)


def test_the_zero_reaches_every_trainable_tensor_and_nothing_needs_no_group() -> None:
    model, processor = nano()
    trainer = GRPOPolicy(model, MASK_POLICIES["gaussian"], 1.0, processor.never_sampled_ids, 0)
    outputs, anchor = trainer(Rollouts(0, [], []))
    assert (outputs.log_probs, outputs.parameters, float(anchor.detach())) == ([], [], 0.0)
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
    assert token_log_probs(head, states, ids, 1.0, [9], entropies="none")[1] is None
    with_graph = token_log_probs(head, states, ids, 1.0, [9], entropies="trained")
    assert not entropies.requires_grad
    assert with_graph[1].requires_grad
    torch.testing.assert_close((log_probs, entropies), with_graph)
    gradients = [torch.autograd.grad(values.sum(), states)[0] for values in (log_probs, with_graph[0])]
    assert torch.equal(*gradients)


def test_activations_computed_twice_give_the_same_gradient(made: tuple[Any, Rollouts]) -> None:
    trainer, rollouts = made[0], some(made[1], 0, 1)
    weight = next(p for name, p in trainer.sa2va.named_parameters() if "lora_B" in name)
    result = []
    for twice in (False, True):
        if twice:
            trainer.policy.activation_checkpointing_enable()
        trainer.sa2va.train()
        outputs, _ = trainer.policy(rollouts)
        result.append(torch.autograd.grad(outputs.log_probs[0].sum(), weight)[0])
    trainer.sa2va.activation_checkpointing_disable()
    trainer.sa2va.eval()
    torch.testing.assert_close(result[0], result[1])
