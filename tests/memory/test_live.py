"""Counts of live bytes on the meta device equal those worked out by hand."""

import pytest
import torch
from torch import nn

from rl_reward_network.memory.live import live_memory

ROW = 4 * 1000  # bytes of 1,000 float32 numbers


def test_what_is_released_no_longer_counts() -> None:
    given = torch.zeros(1000, device="meta")
    with live_memory([given]) as live:
        first = given + 1
        second = first * 2
        assert (live.now, live.peak) == (2 * ROW, 2 * ROW)
        del first
        assert live.now == ROW
        third = second + given
        assert (live.now, live.peak) == (2 * ROW, 2 * ROW)
        view = third.view(10, 100)[2:]
        given.add_(1)
        assert live.now == 2 * ROW, "views and known tensors are not new"
        del second, third
        assert live.now == ROW, "the view keeps its storage"
        del view
        assert live.now == 0


def test_the_backward_pass_keeps_inputs_and_adds_gradients() -> None:
    weight = nn.Parameter(torch.zeros(1000, 1000, device="meta"))
    given = torch.zeros(1, 1000, device="meta")
    with live_memory([weight, given]) as live:
        hidden = (given @ weight).exp()
        assert live.now == ROW, "exp is differentiated by its result, and its input is not needed"
        hidden.sum().backward()
        del hidden
    assert 1000 * ROW <= live.now < 1001 * ROW, "the gradient of the weight alone"
    assert 1000 * ROW <= live.peak < 1006 * ROW


def test_attention_needs_no_matrix_of_all_pairs() -> None:
    rows = [torch.zeros(1, 8, 2000, 64, device="meta") for _ in range(3)]
    mask = torch.ones(1, 1, 2000, 2000, dtype=torch.bool, device="meta")
    with live_memory([*rows, mask]) as live:
        nn.functional.scaled_dot_product_attention(*rows, attn_mask=mask)
    assert live.peak < 8 * 2000 * 2000 * 4, "one matrix for each of eight heads"
    assert live.peak >= 8 * 2000 * 64 * 4


def test_grouped_heads_count_as_they_are_computed() -> None:
    query = torch.zeros(1, 4, 100, 8, device="meta")
    few = torch.zeros(1, 2, 100, 8, device="meta")
    with live_memory([query, few]):
        result = nn.functional.scaled_dot_product_attention(query, few, few, is_causal=True, enable_gqa=True)
    assert result.shape == query.shape


def test_attention_is_as_before_afterwards() -> None:
    before = nn.functional.scaled_dot_product_attention
    with pytest.raises(RuntimeError), live_memory([]):
        raise RuntimeError
    assert nn.functional.scaled_dot_product_attention is before
