"""Several texts with common beginnings, as one sequence: each common beginning is processed once, with gradient.

The G completions of a group share their prompt, and the prompts of both loops share the image. Packed, they are a tree
of segments; a token attends to its segment up to itself and to all segments on the way to the root, at the positions
of the separate texts. So states, log-probabilities and gradients are those of the separate texts.

Axes: B trees, L tokens (right-padded).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """Part of a text.

    Args:
        token_ids: not empty.
        parent: index of the segment it continues, None at the root.
    """

    token_ids: Sequence[int]
    parent: int | None


@dataclass(frozen=True)
class Packed:
    """Model inputs of B trees.

    Args:
        input_ids, position_ids: int64 (B, L).
        attention_mask: bool (B, 1, L, L), True if the row's token attends to the column's.
        starts: starts[tree][segment] is the index of the segment's first token.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor
    starts: list[list[int]]


def pack(trees: Sequence[Sequence[Segment]], pad_id: int) -> Packed:
    """All trees in one batch; a parent must come before its children.

    Raises:
        ValueError: an empty segment.
    """
    rows = [_pack_tree(tree) for tree in trees]
    length = max(len(ids) for ids, *_ in rows)
    input_ids = torch.full((len(rows), length), pad_id)
    position_ids = torch.zeros(len(rows), length, dtype=torch.long)
    attention = torch.eye(length, dtype=torch.bool).repeat(len(rows), 1, 1)  # padding attends to itself, or to nothing
    for row, (ids, positions, attends, _) in enumerate(rows):
        count = len(ids)
        input_ids[row, :count], position_ids[row, :count] = ids, positions
        attention[row, :count, :count] = attends
    return Packed(input_ids, position_ids, attention[:, None], [starts for *_, starts in rows])


def _pack_tree(tree: Sequence[Segment]) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Token ids and positions (L,), attention (L, L), and where each segment starts."""
    starts: list[int] = []
    ends: list[int] = []  # position behind the last token of each segment
    ids: list[int] = []
    positions: list[int] = []
    owners: list[int] = []  # segment of each token
    on_path = torch.zeros(len(tree), len(tree), dtype=torch.bool)  # [segment, itself or an ancestor]
    for number, segment in enumerate(tree):
        if not len(segment.token_ids):
            raise ValueError(f"segment {number} is empty; leave it out")
        first = 0 if segment.parent is None else ends[segment.parent]
        starts.append(len(ids))
        ends.append(first + len(segment.token_ids))
        ids += segment.token_ids
        positions += range(first, ends[-1])
        owners += [number] * len(segment.token_ids)
        if segment.parent is not None:
            on_path[number] = on_path[segment.parent]
        on_path[number, number] = True
    position, owner = torch.tensor(positions), torch.tensor(owners)
    attends = on_path[owner][:, owner] & (position[None] <= position[:, None])
    return torch.tensor(ids), position, attends, starts
