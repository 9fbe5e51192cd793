"""Packed trees: the attention of each token, and states and gradients equal to those of the separate texts."""

import pytest
import torch

from rl_reward_network.grpo.policy import Segment, pack
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration

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
