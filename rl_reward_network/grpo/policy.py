"""The policy: which tensors of Sa2VA train, and from the groups of a batch to the inputs of the loss, in one pass.

All texts about an image are one row of the language model: a tree, whose trunk, the image, is computed once.
Axes: G completions of a group, T tokens, L tokens of a packed tree, D width of a hidden state, N scored tokens.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from rl_reward_network.grpo.rollouts import AnswerRollout, CaptionRollout, MaskPolicy, Rollouts, Stored
from rl_reward_network.models.ema import trainable_tensors
from rl_reward_network.models.lora import freeze_parameters, setup_lora
from rl_reward_network.models.sa2va.grounding_sa2va import DecodedMasks
from rl_reward_network.models.sa2va.side_network import SideNetworkConfig

CANDIDATE_HEADS = "grounding_encoder.mask_decoder.output_hypernetworks_mlps."
ATTENTION_DROPOUT = ("attention_dropout", "dropout_p")  # attributes of attention layers in transformers
SELECTABLE = ("1", "2", "3")  # 0 is the head of the single mask, which Sa2VA never uses
LOGITS_AT_ONCE = 2**25  # float32 in memory together: 221 tokens with Sa2VA's vocabulary of 151,679
Entropies = Literal["none", "logged", "trained"]

# ---- what trains ----------------------------------------------------------------------------------------------------


def prepare_model(
    model: Any,
    r: int,
    lora_alpha: int,
    freeze_embeddings: bool = False,
    side_network: SideNetworkConfig | None = None,
    encoder: Mapping[str, Any] | None = None,
) -> None:
    """Put LoRA on a loaded Sa2VA, freeze all but what its family trains, and make trainable tensors float32.

    `freeze_embeddings` also freezes token embeddings and head, which a Qwen-VL trains. A `side_network` is added where
    the model has none; one that is there trains, too. `encoder` says what trains of SAM 2's image encoder, see
    `GRPOPlan`. A ValueError if `setup_lora` refuses, or for SAM 3's image encoder.
    """
    if encoder is not None and model.config.has_sam3:
        raise ValueError(f"--encoder {encoder['train']}: the image encoder of SAM 3 does not train here; leave it out")
    # With dropout, old, reference and new log-probabilities of one caption would differ at random.
    setup_lora(model, r, lora_alpha, 0.0, None if encoder is None else encoder.get("lora_r"))
    if side_network is not None:
        model.add_side_network(side_network)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ATTENTION_DROPOUT:  # which a checkpoint's configuration sets
            if hasattr(module, name):
                setattr(module, name, 0.0)
        if hasattr(module, "support_avx512bf16_for_cpu"):  # bitsandbytes' packed 4-bit weights have no backward pass
            module.support_avx512bf16_for_cpu = False
    freeze_parameters(model, freeze_embeddings, encoder is not None and encoder["train"] == "full")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # steps of RL size would round away in bfloat16


def mixed_precision(model: Any) -> AbstractContextManager[Any]:
    """Autocast if frozen weights are bfloat16 and trainable ones float32; nothing for a float32 model."""
    return torch.autocast(model.device.type, torch.bfloat16) if model.dtype == torch.bfloat16 else nullcontext()


def unreached_of_candidates(unreached: Sequence[str], reached: Collection[str]) -> list[str]:
    """The unreached tensors without those of a selectable candidate's head if another candidate's is reached.

    A mask depends only on the candidate that SAM 2 selects for it, so such a head may be reached by other prompts.
    """

    kept = []
    for name in unreached:
        before, heads, behind = name.partition(CANDIDATE_HEADS)
        number, _, rest = behind.partition(".")
        counterparts = {f"{before}{heads}{other}.{rest}" for other in SELECTABLE if heads and number in SELECTABLE}
        if not counterparts & set(reached):
            kept.append(name)
    return kept


def digests(model: nn.Module) -> dict[str, str]:
    """SHA-256 of the bytes of each trainable parameter; of a frozen one, often gigabytes, the XOR of its words."""
    found = {}
    for name, parameter in model.named_parameters():
        flat = parameter.detach().contiguous().view(-1).view(torch.uint8)
        if parameter.requires_grad:
            found[name] = hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest()
        else:  # the XOR changes with every bit, and is computed where the tensor is, thirteen times as fast
            words = flat.view(torch.int64) if len(flat) % 8 == 0 else flat
            found[name] = str(torch.hash_tensor(words).view(torch.int64).item())
    return found


def check_movement(before: dict[str, str], after: dict[str, str], training: Collection[str]) -> list[str]:
    """Names of tensors of `training` whose digests did not change; a ValueError if a frozen one did."""
    if changed := [name for name, own in before.items() if after.get(name) != own and name not in training]:
        raise ValueError(f"{len(changed)} frozen tensors changed in training, first {changed[:3]}; this is a bug")
    return [name for name, own in before.items() if after.get(name) == own and name in training]


def unmoved_reasons(
    unmoved: Sequence[str], with_gradient: Collection[str], steps: int, learning_rate: float
) -> dict[str, list[str]]:
    """Reason -> the tensors that did not change for it, although some had a gradient at some step."""
    reasons: dict[str, list[str]] = {}
    for name in unmoved:
        if not learning_rate:
            reason = "learning_rate is 0"
        elif name in with_gradient:
            reason = "its steps were too small for float32: raise the learning rate"
        elif "lora_A" in name and steps == 1:
            reason = "its gradient passes lora_B, which began at 0; train for more than one step"
        else:
            reason = f"no loss reached it in {steps} steps"
        reasons.setdefault(reason, []).append(name)
    return reasons


# ---- one row for each image -----------------------------------------------------------------------------------------


class Segment(NamedTuple):
    """Part of a text; `parent` is the index of the segment it continues, None at the root."""

    token_ids: Sequence[int]  # not empty
    parent: int | None


class Packed(NamedTuple):
    """Model inputs of B trees."""

    input_ids: Tensor  # int64 (B, L), as the positions
    position_ids: Tensor
    attention_mask: Tensor  # bool (B, 1, L, L), True if the row's token attends to the column's
    starts: list[list[int]]  # [tree][segment], index of the segment's first token


def pack(trees: Sequence[Sequence[Segment]], pad_id: int) -> Packed:
    """All trees in one batch; a parent must come before its children, and no segment may be empty (a ValueError)."""
    all_ids, positions, attends, starts = zip(*map(_pack_tree, trees), strict=True)
    input_ids = pad_sequence(list(all_ids), batch_first=True, padding_value=pad_id)
    # Padding attends to itself: a row of softmax without anything to attend to would be NaN.
    attention = torch.eye(input_ids.shape[1], dtype=torch.bool).repeat(len(all_ids), 1, 1)
    for row, own in enumerate(attends):
        attention[row, : len(own), : len(own)] = own
    return Packed(input_ids, pad_sequence(list(positions), batch_first=True), attention[:, None], list(starts))


def _pack_tree(tree: Sequence[Segment]) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Token ids and positions (L,), attention (L, L), and where each segment starts.

    Each path from the root reads as a text by itself: a segment's positions go on from its parent's, not from what lies
    before it in the row, and its tokens attend to the segments on the path alone. So completions of one question have
    the same positions, and do not see each other.
    """
    starts, ids, positions = list[int](), list[int](), list[int]()
    ends: list[int] = []  # position behind the last token of each segment
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


# ---- the module -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyOutputs:
    """The policy's outputs for `Rollouts`."""

    log_probs: list[Tensor]  # float32 (G, T) of each caption rollout, 0 behind the end of each completion
    entropies: list[Tensor]  # likewise; none where no gradient is computed, as of the reference
    answer_log_probs: list[Tensor]  # float32 (T,) of each answer's tokens, `[SEG]` included
    parameters: list[Tensor]  # float32 (D,) of the mask policy for each answer, if masks were sampled or on request
    mask_logits: list[Tensor]  # float32 (h, w) of the mean action of each answer, on request
    embeddings: list[Tensor] = field(default_factory=list)  # (C,), `[SEG]` of each answer
    decoded: list[DecodedMasks] = field(default_factory=list)  # the same masks, K = 1 each, with SAM 2's candidates
    objects: list[Tensor] = field(default_factory=list)  # SAM 3's score (1,) that there is one, which empties masks

    def stored(self) -> Stored:
        """What a later loss compares with, without gradient."""
        return Stored(*([one.detach() for one in of] for of in (self.log_probs, self.parameters, self.mask_logits)))


class GRPOPolicy(nn.Module):
    """Sa2VA as a policy over captions and masks.

    Args:
        sa2va, mask_policy: the model, and the distribution of loop 2.
        temperature: of sampling; log-probabilities are those of the sampling distribution.
        never_sampled_ids, pad_id: token ids whose probability is 0, as in sampling; the one that fills up shorter rows.
        entropy_gradient: whether a loss depends on the entropies; otherwise they are for the logs alone.
    """

    def __init__(
        self,
        sa2va: Any,
        mask_policy: MaskPolicy,
        temperature: float,
        never_sampled_ids: Sequence[int],
        pad_id: int,
        entropy_gradient: bool = False,
    ) -> None:
        super().__init__()
        self.sa2va, self.mask_policy, self.temperature = sa2va, mask_policy, temperature
        self.never_sampled_ids, self.pad_id = list(never_sampled_ids), pad_id
        self.entropies: Entropies = "trained" if entropy_gradient else "logged"

    def forward(
        self, rollouts: Rollouts, with_masks: bool = False, with_parameters: bool = False
    ) -> tuple[PolicyOutputs, Tensor]:
        """The differentiable outputs for the rollouts, and a zero that depends on every trainable tensor.

        Without the zero, data-parallel training would wait for gradients of tensors that this batch does not use. The
        rollouts may be empty. `with_masks` decodes the mask of the mean action, too; `with_parameters` evaluates the
        mask policy, whose cells are another decoding, also where it sampled nothing.
        """
        anchor = torch.stack([p.flatten()[0].float() * 0 for p in self.parameters() if p.requires_grad]).sum()
        if not rollouts.captions and not rollouts.answers:
            return PolicyOutputs([], [], [], [], []), anchor
        return self._outputs(rollouts, with_masks, with_parameters or bool(rollouts.masks)), anchor

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights; frozen ones may be missing, as in the checkpoints of DeepSpeed."""
        frozen = {name: tensor for name, tensor in self.state_dict().items() if name not in trainable_tensors(self)}
        return super().load_state_dict({**frozen, **state_dict}, strict, assign)

    def activation_checkpointing_enable(self, **_: Any) -> None:
        """Recompute the language model's activations in the backward pass; called by the Trainer."""
        self.sa2va.activation_checkpointing_enable({"use_reentrant": False})

    def _outputs(self, rollouts: Rollouts, with_masks: bool, with_parameters: bool) -> PolicyOutputs:
        trees = _trees(rollouts)
        packed = pack([list(tree.segments()) for tree in trees], self.pad_id)
        states = self._states(trees, packed)
        of_text: dict[Text, Tensor] = {}  # the states that predict its tokens
        made: dict[AnswerRollout, tuple[Any, ...]] = {}
        for tree, starts, tree_states in zip(trees, packed.starts, states, strict=True):
            places = zip(tree.texts, tree.predicting(starts), strict=True)
            of_text |= {text: tree_states[indices] for text, indices in places}
            # Image by image, since the order of the forward pass is that in which gradients are summed.
            answers = {text: of_text[text] for text in tree.texts if isinstance(text, AnswerRollout)}
            if answers:
                made |= self._answers(answers, with_masks, with_parameters)
        of_captions = self._captions({caption: of_text[caption] for caption in rollouts.captions})
        in_order = [made[answer] for answer in rollouts.answers]
        words, embeddings, parameters, decoded = ([own[n] for own in in_order if own[n] is not None] for n in range(4))
        masks = [own.mask_logits[0] for own in decoded]
        objects = [own.object_score_logits for own in decoded] if self.sa2va.config.has_sam3 else []
        return PolicyOutputs(*of_captions, words, parameters, masks, embeddings, decoded, objects)

    def _states(self, trees: Sequence["_Tree"], packed: Packed) -> Tensor:
        """Hidden states (B, L, D)."""
        device, body = self.sa2va.device, self.sa2va.model
        rows = body.image_rows(body.join([tree.vision for tree in trees]), *_regions(trees))
        inputs = body.splice(packed.input_ids.to(device), rows)
        places = {"attention_mask": packed.attention_mask.to(device), "position_ids": packed.position_ids.to(device)}
        return body(**inputs, **places, use_cache=False).last_hidden_state

    def _answers(
        self, answers: Mapping[AnswerRollout, Tensor], with_masks: bool, with_parameters: bool
    ) -> dict[AnswerRollout, tuple[Any, ...]]:
        """Log-probabilities, embedding, parameters and mask of an image's answers, from their states (T + 1, D)."""
        sam = next(iter(answers)).image.features.sam
        embeddings = self.sa2va.text_hidden_fcs(torch.stack([states[-1] for states in answers.values()]))
        decoded = self.sa2va.decode_masks(sam, embeddings) if with_masks else [None] * len(answers)
        made: dict[AnswerRollout, tuple[Any, ...]] = {}
        for row, ((answer, states), embedding) in enumerate(zip(answers.items(), embeddings, strict=True)):
            log_probs, _ = self._log_probs(states[:-1], answer.answer_ids, 1.0, "none")
            parameters = self.mask_policy.parameters(self.sa2va, sam, embedding) if with_parameters else None
            made[answer] = log_probs, embedding, parameters, decoded[row]
        return made

    def _log_probs(
        self, states: Tensor, token_ids: Sequence[int], temperature: float, entropies: Entropies
    ) -> tuple[Tensor, Tensor | None]:
        ids = torch.tensor(token_ids, device=states.device)
        return token_log_probs(self.sa2va.lm_head, states, ids, temperature, self.never_sampled_ids, entropies)

    def _captions(self, captions: Mapping[CaptionRollout, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probabilities (G, T) of each rollout, padded to one length; entropies, or nothing without gradient."""
        if not captions:
            return [], []
        completions = [ids for caption in captions for ids in caption.completion_ids]
        wanted: Entropies = self.entropies if torch.is_grad_enabled() else "none"  # nobody reads the reference's
        flat = self._log_probs(torch.cat([*captions.values()]), [*chain(*completions)], self.temperature, wanted)
        lengths, counts = [len(ids) for ids in completions], [len(caption.completion_ids) for caption in captions]
        log_probs, entropies = (
            [] if values is None else pad_sequence(list(values.split(lengths)), batch_first=True).split(counts)
            for values in flat
        )
        return list(log_probs), list(entropies)


Text = CaptionRollout | AnswerRollout


class _Tree(NamedTuple):
    """Texts of both loops that begin with one image, of these features and token ids."""

    vision: Any
    prefix_ids: list[int]
    texts: list[Text]

    def segments(self) -> Iterator[Segment]:
        """The image; then each question of loop 1 with its completions, and each question of loop 2 with its answer."""
        yield Segment(self.prefix_ids, None)
        count = 1
        for text in self.texts:
            if isinstance(text, AnswerRollout):
                yield Segment(text.token_ids, 0)
                count += 1
            else:
                yield Segment(text.question.suffix_ids, 0)
                yield from (Segment(ids, count) for ids in text.completion_ids)
                count += 1 + len(text.completion_ids)

    def predicting(self, starts: Sequence[int]) -> Iterator[slice | list[int]]:
        """For each text the indices of the states that predict its tokens; of an answer also that of its last token.

        A token is predicted by the state before it. In the row that is the token on its left, except for the first
        token of a completion: the question, whose last state predicts it, lies before the other completions. `starts`
        are those of the segments in the row.
        """
        segments = iter(starts[1:])
        for text in self.texts:
            if isinstance(text, AnswerRollout):
                start = next(segments) + len(text.question_ids)
                yield slice(start - 1, start + len(text.answer_ids))  # the last state is that of [SEG]
                continue
            last = next(segments) + len(text.question.suffix_ids) - 1
            firsts = [(next(segments), len(ids)) for ids in text.completion_ids]
            yield [index for first, length in firsts for index in (last, *range(first, first + length - 1))]


def _trees(rollouts: Rollouts) -> list[_Tree]:
    """One tree for each image, and one for each image with a region drawn into it."""
    by_image, drawn = dict[str, _Tree](), list[_Tree]()
    texts: list[Text] = [*rollouts.captions, *rollouts.answers]
    for text in sorted(texts, key=lambda text: text.image.row):
        image = text.image
        if isinstance(text, CaptionRollout) and text.question.drawn is not None:
            drawn.append(_Tree(text.question.drawn.vision, text.question.prefix_ids, [text]))
        else:
            by_image.setdefault(image.image_id, _Tree(image.features.vision, image.prefix_ids, [])).texts.append(text)
    return [*by_image.values(), *drawn]


def _regions(trees: Sequence[_Tree]) -> tuple[list[Tensor], Tensor | None]:
    """Region cells bool (N, g, g) of each image that has some, and whether regions follow a tile; the last one's do."""
    asked = [[text.question.region_cells for text in tree.texts if isinstance(text, CaptionRollout)] for tree in trees]
    regions = [[cells for cells in of_tree if cells is not None] for of_tree in asked]
    if not any(regions):
        return [], None
    flags = [torch.zeros(len(tree.vision), dtype=torch.bool) for tree in trees]
    for tile_flags, own in zip(flags, regions, strict=True):
        tile_flags[-1] = bool(own)
    return [torch.cat(own) for own in regions if own], torch.cat(flags)


def token_log_probs(
    head: nn.Linear,
    states: Tensor,
    token_ids: Tensor,
    temperature: float,
    never_sampled_ids: Sequence[int],
    entropies: Entropies = "logged",
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each token and entropy of its distribution, float32 (N,), from states (N, D).

    Logits exist for a part of the tokens at a time, `LOGITS_AT_ONCE` in all; the backward pass computes them again.
    Entropies that are only logged have no gradient, and "none" saves a quarter of the time.
    """

    def score(states: Tensor, token_ids: Tensor) -> list[Tensor]:
        logits = head(states).float() / temperature
        logits[:, list(never_sampled_ids)] = torch.finfo(logits.dtype).min  # a probability of 0 whose 0 log 0 is 0
        log_probs = logits.log_softmax(dim=-1)
        scores = [log_probs.gather(1, token_ids[:, None])[:, 0]]
        if entropies != "none":
            with torch.set_grad_enabled(entropies == "trained" and torch.is_grad_enabled()):
                scores.append(-torch.linalg.vecdot(log_probs.exp(), log_probs))
        return scores

    tokens = max(1, LOGITS_AT_ONCE // head.out_features)
    chunks = list(zip(states.split(tokens), token_ids.split(tokens), strict=True))
    parts = [score(*chunk) if len(chunks) == 1 else checkpoint(score, *chunk, use_reentrant=False) for chunk in chunks]
    log_probs, *rest = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return log_probs, rest[0] if rest else None
