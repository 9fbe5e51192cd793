"""Batched decoding that keeps what `generate` discards: the hidden state AT each generated token.

One loop serves greedy prediction and sampling. A guess of the answer ("Sure, [SEG].") is verified in the same forward
pass as the prompt: a token is accepted only where the loop would have chosen it, so the output does not change.

Axes: B rows of a batch, T tokens, D language width, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from rl_reward_network.models.sa2va.body_sa2va import positions_of_mask
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor

LONGEST_GUESS = 32  # ids; every guessed position needs logits over the whole vocabulary
STOP_TAIL_TOKENS = 24  # a stop word of N characters spans at most N tokens; only the tail is decoded


@dataclass
class Answer:
    """The generated answer of one row of a batch.

    Args:
        token_ids: generated ids, the stop token included.
        states: the hidden state (D,) AT each token, known one forward pass after its choice; the last may be missing.
        stopped: a stop word or the end of sequence was reached.
        finished: `stopped`, or `max_new_tokens` was reached.
    """

    token_ids: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    stopped: bool = False
    finished: bool = False

    def states_at(self, token_id: int) -> list[Tensor]:
        """States (D,) at every occurrence of a token whose state is known."""
        known = zip(self.token_ids, self.states, strict=False)
        return [state for generated_id, state in known if generated_id == token_id]


@dataclass(frozen=True)
class Decoding:
    """How to choose tokens.

    Args:
        temperature: of sampling; 0 is greedy decoding.
        guess_ids: ids of an expected answer, verified together with the prompt; greedy only.
        generator: source of randomness for sampling.
    """

    max_new_tokens: int = 2048
    temperature: float = 0.0
    guess_ids: Sequence[int] = ()
    generator: torch.Generator | None = None


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block: checkpointing discards the cache, and dropout changes the answer."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)


@torch.no_grad()
def decode(
    model: Any,
    processor: Sa2VAProcessor,
    inputs: dict[str, Any],
    attention_mask: Tensor,
    how: Decoding,
    cache: DynamicCache | None = None,
) -> list[Answer]:
    """One `Answer` per row.

    Args:
        model: Sa2VAForConditionalGeneration; put it into evaluation mode first (`evaluating`).
        processor: provides the stop words and the ids that must not be chosen.
        inputs: `inputs_embeds` (B, T, D), those that are not in the cache yet, and what else the body's `splice` gives.
        attention_mask: int64 (B, cached + T), left-padded; zeros may also stand between the cache and the inputs.
        how: limits and sampling.
        cache: keys and values of earlier inputs, with batch size B.

    Raises:
        ValueError: max_new_tokens below 1, a guess together with sampling, or a model in training mode.
    """
    if model.training:
        raise ValueError("the model is in training mode; decode inside `with evaluating(model):`")
    if how.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {how.max_new_tokens}, expected 1 or more")
    if how.temperature and how.guess_ids:
        raise ValueError("a guessed answer can only be verified when decoding is greedy (temperature 0)")
    answers = [Answer() for _ in inputs["inputs_embeds"]]
    how = replace(how, guess_ids=how.guess_ids[:LONGEST_GUESS])
    cache = DynamicCache(config=model.config.text_config) if cache is None else cache
    step = _Stepper(model, attention_mask, cache, inputs.get("position_table"))
    choose = _chooser(processor.never_sampled_ids, how)
    state = _prefill(model, processor, inputs, step, answers, choose, how)
    while not all(answer.finished for answer in answers):
        ids = choose(model.lm_head(state))
        running = [not answer.finished for answer in answers]
        for answer, token_id in zip(answers, ids.tolist(), strict=True):
            _append(answer, token_id, processor, how.max_new_tokens)
        if all(answer.finished for answer in answers) and not _lacks_seg_state(answers, processor):
            break
        state = step(model.get_input_embeddings()(ids[:, None]))[:, -1]
        for answer, was_running, row in zip(answers, running, state, strict=True):
            if was_running:
                answer.states.append(row)
    return answers


def check_computed(answers: Sequence[Answer], *values: Tensor) -> None:
    """Refuse NaN and infinity in what a model computes, which would look like no answer, or like an empty mask.

    Raises:
        ValueError: a value, or the last state of an answer, is not finite.
    """
    last = [answer.states[-1] for answer in answers if answer.states]
    if not all(bool(part.isfinite().all()) for part in (*values, *([torch.stack(last)] if last else []))):
        raise ValueError(
            "the model computes NaN or infinity: its weights are damaged, or too large for their number format; look "
            "at sa2va-rl doctor, or load it in float32"
        )


def selected_rows(cache: DynamicCache, rows: Tensor, config: Any) -> DynamicCache:
    """A new cache of some rows, int64 (N,), of another; a row may be repeated."""
    copy = DynamicCache(config=config)
    for number, layer in enumerate(cache.layers):
        copy.update(layer.keys[rows], layer.values[rows], number)  # type: ignore[union-attr, index]
    return copy


class _Stepper:
    """Runs the language model on the next inputs, and extends its cache and attention mask."""

    def __init__(self, model: Any, attention_mask: Tensor, cache: DynamicCache, position_table: Tensor | None) -> None:
        self.model, self.attention_mask, self.cache = model, attention_mask, cache
        self.positions = {} if position_table is None else {"position_table": position_table}

    def __call__(self, embeds: Tensor, **of_images: Any) -> Tensor:
        """Hidden states (B, t, D) of the next inputs (B, t, D)."""
        missing = self.cache.get_seq_length() + embeds.shape[1] - self.attention_mask.shape[1]
        if missing > 0:
            ones = self.attention_mask.new_ones(len(embeds), missing)
            self.attention_mask = torch.cat([self.attention_mask, ones], dim=1)
        return self.model.model(
            inputs_embeds=embeds,
            **self._mask(embeds.shape[1]),
            past_key_values=self.cache,
            use_cache=True,
            **(of_images | self.positions),
        ).last_hidden_state

    def _mask(self, length: int) -> dict[str, Any]:
        """The attention mask; with the positions, where one token attends to all that came before it.

        Of a mask (B, T) transformers asks whether it hides anything, so the host would wait for the GPU at each token.
        """
        known = self.attention_mask
        if length > 1 or self.positions or self.model.config._attn_implementation != "sdpa":
            return {"attention_mask": known}
        return {"attention_mask": known[:, None, None].bool(), "position_ids": positions_of_mask(known, 1)}


def _prefill(
    model: Any,
    processor: Sa2VAProcessor,
    inputs: dict[str, Any],
    step: _Stepper,
    answers: list[Answer],
    choose: Callable[[Tensor], Tensor],
    how: Decoding,
) -> Tensor:
    """States (B, D) that predict the next token, after the prompt and the accepted tokens of the guess."""
    of_images = dict(inputs)
    embeds = of_images.pop("inputs_embeds")
    batch, prompt = embeds.shape[:2]
    guess = torch.tensor([list(how.guess_ids)] * batch, dtype=torch.long, device=embeds.device)
    states = step(torch.cat([embeds, model.get_input_embeddings()(guess)], dim=1), **of_images)[:, prompt - 1 :]
    accepted = torch.zeros(batch, dtype=torch.long, device=states.device)
    if guess.shape[1]:
        accepted = (choose(model.lm_head(states))[:, :-1] == guess).long().cumprod(1).sum(1)
    counts = accepted.tolist() if guess.shape[1] else [0] * batch  # one wait for the GPU, not one for each row
    for row, (answer, count) in enumerate(zip(answers, counts, strict=True)):
        for position, token_id in enumerate(how.guess_ids[:count]):
            _append(answer, token_id, processor, how.max_new_tokens)
            answer.states.append(states[row, position + 1])
            if answer.finished:
                break
        # Rejected tokens of the guess stay in the cache; the mask hides them from attention and from the positions.
        wrong = slice(step.attention_mask.shape[1] - guess.shape[1] + count, None)
        step.attention_mask[row, wrong] = 0
    return states[torch.arange(batch, device=states.device), accepted]


def _chooser(never: Sequence[int], how: Decoding) -> Callable[[Tensor], Tensor]:
    """A function from logits (..., V) to chosen ids (...); the ids in `never` are not chosen."""
    ids: Tensor | None = None  # on the device of the logits: a list would be copied there for each token

    def choose(logits: Tensor) -> Tensor:
        nonlocal ids
        if ids is None:
            ids = torch.tensor(list(never), dtype=torch.long, device=logits.device)
        allowed = logits.float().index_fill(-1, ids, float("-inf"))
        if how.temperature:
            return sampled(torch.softmax(allowed / how.temperature, dim=-1), how.generator)
        return allowed.argmax(dim=-1)

    return choose


def sampled(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """One sampled index (...) per row of probabilities (..., V), from one uniform number per row.

    The uniform numbers are drawn on the generator's device and copied to the model's: that is cheaper than copying the
    vocabulary's probabilities at every token, and a CPU generator gives the same numbers for every device.
    """
    rng_device = generator.device if generator is not None else probabilities.device
    uniform = torch.rand(probabilities.shape[:-1], generator=generator, device=rng_device).to(probabilities.device)
    # float64: parallel float32 sums on a GPU may decrease, and an index of probability 0 could be drawn.
    sums = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = sums[..., -1]
    below = torch.minimum(uniform.double() * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, below[..., None], right=True)[..., 0]


def _append(answer: Answer, token_id: int, processor: Sa2VAProcessor, max_new_tokens: int) -> None:
    """Add a token to an answer that is not finished yet."""
    if answer.finished:
        return
    answer.token_ids.append(token_id)
    answer.stopped = token_id == processor.tokenizer.eos_token_id or _ends_with_stop_word(answer.token_ids, processor)
    answer.finished = answer.stopped or len(answer.token_ids) >= max_new_tokens


def _ends_with_stop_word(token_ids: list[int], processor: Sa2VAProcessor) -> bool:
    """Compares text, not ids: the stop words of some templates are ordinary text of several tokens."""
    words = processor.template.stop_words
    if not words:
        return False
    tail = processor.text(token_ids[-STOP_TAIL_TOKENS:])
    return tail.replace("\r", "").replace("\n", "").endswith(words)


def _lacks_seg_state(answers: list[Answer], processor: Sa2VAProcessor) -> bool:
    """Whether an answer that the limit ended has a last `[SEG]` without a state; the reference drops that mask."""
    return any(
        answer.token_ids[-1] == processor.seg_token_id and len(answer.states) < len(answer.token_ids)
        for answer in answers
    )
