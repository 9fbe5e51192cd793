"""The policy as one module: from a batch of rollouts to all a loss needs, in one pass through the language model.

It is a module of its own so that data-parallel wrappers see one forward pass for one backward pass.
Axes: P groups, G completions of each, T tokens, D width of a mask policy's parameters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rl_reward_network.grpo.loss.mask_policies import MaskPolicy
from rl_reward_network.grpo.loss.packing import Packed, Segment, pack
from rl_reward_network.grpo.rollouts.features import ImageFeatures

LOGITS_AT_ONCE = 2048  # tokens whose logits over the whole vocabulary are in memory together


@dataclass
class Group:
    """What one prompt's rollouts leave for the loss; see `rollouts` for how they come about.

    Args:
        image_id: groups of one image share its prefix.
        features: of the image.
        prefix_ids: up to and with `</img>`.
        describe_ids: the question of loop 1 behind it; empty where the group takes no part in that loop.
        cells: bool (1, g, g), the region it points at.
        completions: G lists of ids, the stop token included.
        counts: bool (G,), completions that count (not cut off by the limit).
        token_advantages: float32 (G,).
        segment_ids: question and answer of loop 2, up to and with `[SEG]`; empty where the group takes no part.
        actions: (G, A) of the mask policy.
        width: its width when they were sampled.
        mask_advantages: float32 (G,).
        old, reference: what `GRPOPolicy` gave for this group when sampled (None: ratio 1), and under the reference.
        image: uint8 (H, W, 3), and truth: bool (H, W) or None; for losses on the mask itself.
    """

    image_id: str
    features: ImageFeatures
    prefix_ids: list[int]
    describe_ids: list[int] = field(default_factory=list)
    cells: Tensor | None = None
    completions: list[list[int]] = field(default_factory=list)
    counts: Tensor | None = None
    token_advantages: Tensor | None = None
    segment_ids: list[int] = field(default_factory=list)
    actions: Tensor | None = None
    width: Tensor | None = None
    mask_advantages: Tensor | None = None
    old: "GroupOutput | None" = None
    reference: "GroupOutput | None" = None
    image: np.ndarray | None = None
    truth: np.ndarray | None = None


@dataclass
class GroupOutput:
    """What the policy says of a group.

    Args:
        log_probs, entropies: float32 (G, T), 0 behind the end of each completion; None without loop 1.
        parameters: (D,) of the mask policy; None without loop 2.
        mask_logits: float32 (h, w) of the mean action; None unless asked for.
    """

    log_probs: Tensor | None = None
    entropies: Tensor | None = None
    parameters: Tensor | None = None
    mask_logits: Tensor | None = None

    def detached(self) -> "GroupOutput":
        """Without gradients, to be kept."""
        parts = (self.log_probs, self.entropies, self.parameters, self.mask_logits)
        return GroupOutput(*(None if part is None else part.detach() for part in parts))

    def differentiable(self, samples_masks: bool) -> list[Tensor]:
        """What a loss is made of; the parameters of the mask policy only where masks are sampled from it."""
        parts = (self.log_probs, self.parameters if samples_masks else None, self.mask_logits)
        return [part for part in parts if part is not None]


class GRPOPolicy(nn.Module):
    """Sa2VA as a policy over captions and masks.

    Args:
        sa2va: the model.
        mask_policy: distribution of loop 2.
        temperature: of sampling; log-probabilities are of the distribution that is sampled from.
        never: ids that are never sampled, so that have no probability.
        pad_id: fills up shorter texts.
    """

    def __init__(
        self, sa2va: Any, mask_policy: MaskPolicy, temperature: float, never: Sequence[int], pad_id: int
    ) -> None:
        super().__init__()
        self.sa2va, self.mask_policy, self.temperature = sa2va, mask_policy, temperature
        self.never, self.pad_id = list(never), pad_id

    def forward(self, groups: Sequence[Group], with_masks: bool = False) -> tuple[list[GroupOutput], Tensor]:
        """One output per group, differentiable, and a zero that every trainable tensor has part in.

        Without the zero, data-parallel training would wait for gradients of what this batch does not use.

        Args:
            groups: may be none.
            with_masks: decode the mask of the mean action, too.
        """
        anchor = torch.stack([p.flatten()[0].float() * 0 for p in self.parameters() if p.requires_grad]).sum()
        return (self._outputs(groups, with_masks) if groups else []), anchor

    def activation_checkpointing_enable(self, **_: Any) -> None:
        """Compute the language model's activations twice; called by the Trainer."""
        self.sa2va.activation_checkpointing_enable({"use_reentrant": False})

    def _outputs(self, groups: Sequence[Group], with_masks: bool) -> list[GroupOutput]:
        images = _by_image(groups)
        trees = [list(_tree(own)) for own in images]
        packed = pack(trees, self.pad_id)
        states = self._states(images, packed)
        outputs: dict[int, GroupOutput] = {}
        for tree, own in enumerate(images):
            starts = iter(packed.starts[tree][1:])
            for group in own:
                outputs[id(group)] = self._read(group, states[tree], starts, with_masks)
        self._score([(group, outputs[id(group)]) for group in groups])
        return [outputs[id(group)] for group in groups]

    def _states(self, images: Sequence[Sequence[Group]], packed: Packed) -> Tensor:
        """Hidden states (B, L, width of the language model)."""
        device = self.sa2va.device
        vision = torch.cat([own[0].features.vision for own in images])
        cells = [torch.cat(found) for own in images if (found := _regions(own))]
        flags = [flag for own in images for flag in _flags(own)]
        embeds = self.sa2va.model.embed(packed.input_ids.to(device), vision, cells, torch.tensor(flags))
        output = self.sa2va.model(
            inputs_embeds=embeds,
            attention_mask=packed.attention_mask.to(device),
            position_ids=packed.position_ids.to(device),
            use_cache=False,
        )
        return output.last_hidden_state

    def _read(self, group: Group, states: Tensor, starts: Iterator[int], with_masks: bool) -> GroupOutput:
        """Pick the group's states (L, D) out of its tree; the caption states wait in `log_probs` for `_score`."""
        output = GroupOutput()
        if group.describe_ids:
            last = next(starts) + len(group.describe_ids) - 1
            before = []  # index of the state that predicts each token
            for completion in group.completions:
                first = next(starts)
                before += [last, *range(first, first + len(completion) - 1)]
            output.log_probs = states[before]
        if group.segment_ids:
            place = next(starts) + len(group.segment_ids) - 1
            embedding = self.sa2va.text_hidden_fcs(states[place][None])[0]
            output.parameters = self.mask_policy.parameters(self.sa2va, group.features.sam, embedding)
            if with_masks:
                output.mask_logits = self.sa2va.decode_masks(group.features.sam, embedding[None]).mask_logits[0]
        return output

    def _score(self, pairs: list[tuple[Group, GroupOutput]]) -> None:
        """Turn the states of all completions into log-probabilities (G, T), a part of the vocabulary at a time."""
        scored = [(group, output) for group, output in pairs if output.log_probs is not None]
        if not scored:
            return
        states = torch.cat([output.log_probs for _, output in scored if output.log_probs is not None])
        ids = torch.tensor([i for group, _ in scored for one in group.completions for i in one], device=states.device)
        log_probs, entropies = token_log_probs(self.sa2va.lm_head, states, ids, self.temperature, self.never)
        longest = max(len(one) for group, _ in scored for one in group.completions)
        place = 0
        for group, output in scored:
            lengths = [len(one) for one in group.completions]
            own = slice(place, place + sum(lengths))
            place += sum(lengths)
            output.log_probs = _rows(log_probs[own], lengths, longest)
            output.entropies = _rows(entropies[own], lengths, longest)


def token_log_probs(
    head: nn.Module, states: Tensor, ids: Tensor, temperature: float, never: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Log-probability of each id and entropy of its distribution, float32 (N,), from states (N, D).

    Logits over the vocabulary exist for `LOGITS_AT_ONCE` tokens at a time; the backward pass computes them again.
    """

    def part(own: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(own).float() / temperature
        logits[:, list(never)] = float("-inf")
        all_log_probs = logits.log_softmax(dim=-1)
        surprise = all_log_probs.masked_fill(all_log_probs.isneginf(), 0.0)  # 0 log 0 is 0, its gradient too
        entropy = -(all_log_probs.exp() * surprise).sum(dim=-1)
        return all_log_probs.gather(1, wanted[:, None])[:, 0], entropy

    pieces = list(zip(states.split(LOGITS_AT_ONCE), ids.split(LOGITS_AT_ONCE), strict=True))
    if len(pieces) == 1:
        return part(states, ids)
    found = [checkpoint(part, *piece, use_reentrant=False) for piece in pieces]
    return torch.cat([log_probs for log_probs, _ in found]), torch.cat([entropies for _, entropies in found])


def _by_image(groups: Sequence[Group]) -> list[list[Group]]:
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(group.image_id, []).append(group)
    return list(found.values())


def _tree(groups: Sequence[Group]) -> Iterator[Segment]:
    """The image, then each group's question with its completions, and its request for a mask."""
    yield Segment(groups[0].prefix_ids, None)
    count = 1
    for group in groups:
        if group.describe_ids:
            yield Segment(group.describe_ids, 0)
            question, count = count, count + 1
            for completion in group.completions:
                yield Segment(completion, question)
                count += 1
        if group.segment_ids:
            yield Segment(group.segment_ids, 0)
            count += 1


def _regions(groups: Sequence[Group]) -> list[Tensor]:
    return [group.cells for group in groups if group.describe_ids and group.cells is not None]


def _flags(groups: Sequence[Group]) -> list[bool]:
    """For each tile of the image, whether regions follow its rows: only its last may have them."""
    return [False] * (len(groups[0].features.vision) - 1) + [bool(_regions(groups))]


def _rows(values: Tensor, lengths: Sequence[int], longest: int) -> Tensor:
    """(G, longest), zeros behind each row's end."""
    rows = [torch.nn.functional.pad(row, (0, longest - len(row))) for row in values.split(list(lengths))]
    return torch.stack(rows)
