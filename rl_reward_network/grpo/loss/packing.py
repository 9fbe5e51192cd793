"""Several texts that begin alike, as one sequence: each shared beginning is read once, with gradient.

A group's G completions share their prompt, and the prompts of both loops share the image. Packed, they are a tree of
segments; a token sees its own segment up to itself and everything on the way to the root, at the positions it would
have alone. So states, log-probabilities and gradients are those of the separate texts.

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
        parent: index of the segment it goes on from, None at the root.
    """

    token_ids: Sequence[int]
    parent: int | None


@dataclass(frozen=True)
class Packed:
    """Model inputs of B trees.

    Args:
        input_ids, position_ids: int64 (B, L).
        attention_mask: bool (B, 1, L, L), True where the row's token sees the column's.
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
    rows = [_row(tree) for tree in trees]
    length = max(len(row[0]) for row in rows)
    ids = torch.full((len(rows), length), pad_id)
    places = torch.zeros(len(rows), length, dtype=torch.long)
    sees = torch.eye(length, dtype=torch.bool).repeat(len(rows), 1, 1)  # padding sees itself: no row may see nothing
    for number, (own_ids, own_places, own_sees, _) in enumerate(rows):
        count = len(own_ids)
        ids[number, :count], places[number, :count] = own_ids, own_places
        sees[number, :count, :count] = own_sees
    return Packed(ids, places, sees[:, None], [row[3] for row in rows])


def _row(tree: Sequence[Segment]) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Ids and positions (L,), what sees what (L, L), and where each segment starts."""
    starts: list[int] = []
    ends: list[int] = []  # position behind each segment's last token
    ids: list[int] = []
    places: list[int] = []
    owners: list[int] = []
    above = torch.zeros(len(tree), len(tree), dtype=torch.bool)
    for number, segment in enumerate(tree):
        if not len(segment.token_ids):
            raise ValueError(f"segment {number} is empty; leave it out")
        first = 0 if segment.parent is None else ends[segment.parent]
        starts.append(len(ids))
        ends.append(first + len(segment.token_ids))
        ids += segment.token_ids
        places += range(first, ends[-1])
        owners += [number] * len(segment.token_ids)
        if segment.parent is not None:
            above[number] = above[segment.parent]
        above[number, number] = True
    position, owner = torch.tensor(places), torch.tensor(owners)
    sees = above[owner][:, owner] & (position[None] <= position[:, None])
    return torch.tensor(ids), position, sees, starts
