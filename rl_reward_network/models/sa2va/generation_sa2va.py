"""From an image and text to an answer and masks: batched decoding, the official prediction, and many prompts at once.

Decoding keeps what `generate` discards: the hidden state AT each generated token. A guess of the answer ("Sure,
[SEG].") is verified in the same forward pass as the prompt: a token is accepted only where the loop would have chosen
it, so the output does not change. `model` is a Sa2VAForConditionalGeneration, whose class imports this file.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache

from rl_reward_network.models.sa2va.body_sa2va import positions_of_mask
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features
from rl_reward_network.models.sa2va.pixels_sa2va import ImageLike, square_pixels, to_rgb, upsample_mask_logits
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.templates import IMAGE_PLACEHOLDER, SEG_ANSWERS

LONGEST_GUESS = 32  # ids; every guessed position needs logits over the whole vocabulary
STOP_TAIL_TOKENS = 24  # a stop word of N characters spans at most N tokens; only the tail is decoded
# Tokens between two looks at the chosen ones, for which the host waits: other devices than the CPU run ahead for 8, of
# which those behind the end of an answer are dropped.
CHECKED_EVERY = {"cpu": 1}
MASKS_AT_ONCE = 16  # limits the memory for an answer that repeats [SEG]


@dataclass
class Answer:
    """The generated answer of one row of a batch."""

    token_ids: list[int] = field(default_factory=list)  # the stop token included
    states: list[Tensor] = field(default_factory=list)  # (D,) AT each token, known a pass later: one may lack
    stopped: bool = False  # by a stop word or the end of sequence
    finished: bool = False  # or by `max_new_tokens`

    def states_at(self, token_id: int) -> list[Tensor]:
        """States (D,) at every occurrence of a token whose state is known."""
        known = zip(self.token_ids, self.states, strict=False)
        return [state for generated_id, state in known if generated_id == token_id]


@dataclass(frozen=True)
class Decoding:
    """How to choose tokens: `temperature` 0 is greedy; `guess_ids`, an expected answer, is verified with the prompt."""

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
        model, processor: in evaluation mode (`evaluating`), and with its stop words and ids that must not be chosen.
        inputs: `inputs_embeds` (B, T, D), those that are not in the cache yet, and what else the body's `splice` gives.
        attention_mask: int64 (B, cached + T), left-padded; zeros may also stand between the cache and the inputs.
        how: limits and sampling; a guess cannot be sampled.
        cache: keys and values of earlier inputs, with batch size B.
    """
    if model.training:
        raise ValueError("the model is in training mode; decode inside `with evaluating(model):`")
    if how.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {how.max_new_tokens}, expected 1 or more")
    if how.temperature and how.guess_ids:
        raise ValueError("a guessed answer can only be verified when decoding is greedy (temperature 0)")
    answers = [Answer() for _ in inputs["inputs_embeds"]]
    cache = DynamicCache(config=model.config.text_config) if cache is None else cache
    decoder = _Decoder(model, processor, how, attention_mask, cache)
    state = decoder.prefill(inputs, answers)
    while running := [answer for answer in answers if not answer.finished]:
        left = how.max_new_tokens - min(len(answer.token_ids) for answer in running)
        ids, states = decoder.block(state, min(left, CHECKED_EVERY.get(state.device.type, 8)))
        chosen = ids.tolist()
        for row, answer in enumerate(answers):
            decoder.extend(answer, chosen[row], [of_rows[row] for of_rows in states])
        # The reference drops the mask of a `[SEG]` without a state, at the end of an answer that the limit has cut.
        lacking = (answer for answer in answers if len(answer.states) < len(answer.token_ids))
        if all(a.finished for a in answers) and all(a.token_ids[-1] != processor.seg_token_id for a in lacking):
            break
        state = decoder.step(model.get_input_embeddings()(ids[:, -1:]))[:, -1]
        for row, answer in enumerate(answers):
            if len(answer.states) < len(answer.token_ids):
                answer.states.append(state[row])
    return answers


def check_computed(answers: Sequence[Answer], *values: Tensor) -> None:
    """Raise a ValueError for NaN and infinity in what a model computes, which look like no answer or an empty mask."""
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


class _Decoder:
    """The language model with a cache and an attention mask that grow with each step, and the choice of tokens."""

    def __init__(self, model: Any, processor: Sa2VAProcessor, how: Decoding, mask: Tensor, cache: DynamicCache) -> None:
        self.model, self.processor, self.how, self.mask, self.cache = model, processor, how, mask, cache
        self.never = torch.tensor(processor.never_sampled_ids, dtype=torch.long, device=mask.device)
        self.positions: dict[str, Tensor] = {}

    def prefill(self, inputs: dict[str, Any], answers: list[Answer]) -> Tensor:
        """States (B, D) that predict the next token, after the prompt and the accepted tokens of the guess."""
        of_images, ids = dict(inputs), self.how.guess_ids[:LONGEST_GUESS]
        embeds = of_images.pop("inputs_embeds")
        self.positions = {name: table for name, table in inputs.items() if name == "position_table"}
        batch, prompt = embeds.shape[:2]
        guess = torch.tensor([list(ids)] * batch, dtype=torch.long, device=embeds.device)
        guessed = self.model.get_input_embeddings()(guess)
        states = self.step(torch.cat([embeds, guessed], dim=1), **of_images)[:, prompt - 1 :]
        accepted, counts = torch.zeros(batch, dtype=torch.long, device=states.device), [0] * batch
        if guess.shape[1]:
            accepted = (self.choose(states)[:, :-1] == guess).long().cumprod(1).sum(1)
            counts = accepted.tolist()  # one wait for the GPU, not one for each row
        for row, (answer, count) in enumerate(zip(answers, counts, strict=True)):
            for position, token_id in enumerate(ids[:count]):
                self.append(answer, token_id)
                answer.states.append(states[row, position + 1])
                if answer.finished:
                    break
            # Rejected tokens of the guess stay in the cache; the mask hides them from attention and the positions.
            self.mask[row, self.mask.shape[1] - len(ids) + count :] = 0
        return states[torch.arange(batch, device=states.device), accepted]

    def block(self, state: Tensor, count: int) -> tuple[Tensor, list[Tensor]]:
        """The next `count` ids of each row, int64 (B, count), and the states (B, D) at all but the last; no waiting."""
        ids, states = [self.choose(state)], list[Tensor]()
        while len(ids) < count:
            states.append(self.step(self.model.get_input_embeddings()(ids[-1][:, None]))[:, -1])
            ids.append(self.choose(states[-1]))
        return torch.stack(ids, dim=1), states

    def extend(self, answer: Answer, ids: Sequence[int], states: Sequence[Tensor]) -> None:
        """Add tokens up to the end of an answer, and the states that are known; of a finished one nothing."""
        for position, token_id in enumerate(ids):
            if answer.finished:
                return
            self.append(answer, token_id)
            answer.states += states[position : position + 1]

    def step(self, embeds: Tensor, **of_images: Any) -> Tensor:
        """Hidden states (B, t, D) of the next inputs (B, t, D)."""
        missing = self.cache.get_seq_length() + embeds.shape[1] - self.mask.shape[1]
        if missing > 0:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(embeds), missing)], dim=1)
        inputs = {"attention_mask": self.mask, **of_images, **self.positions}
        if embeds.shape[1] == 1 and not self.positions and self.model.config._attn_implementation == "sdpa":
            # Of a mask (B, T) transformers asks whether it hides anything: the host would wait for the GPU each time.
            inputs |= {"attention_mask": self.mask[:, None, None].bool()}
            inputs |= {"position_ids": positions_of_mask(self.mask, 1)}
        body = self.model.model
        return body(inputs_embeds=embeds, past_key_values=self.cache, use_cache=True, **inputs).last_hidden_state

    def choose(self, states: Tensor) -> Tensor:
        """Ids (...) after states (..., D); placeholders are not chosen."""
        allowed = self.model.lm_head(states).float().index_fill(-1, self.never, float("-inf"))
        if self.how.temperature:
            return sampled(torch.softmax(allowed / self.how.temperature, dim=-1), self.how.generator)
        return allowed.argmax(dim=-1)

    def append(self, answer: Answer, token_id: int) -> None:
        """Add a token to an answer that is not finished yet."""
        answer.token_ids.append(token_id)
        answer.stopped = token_id == self.processor.tokenizer.eos_token_id
        words = self.processor.template.stop_words
        if words and not answer.stopped:  # of several tokens in some templates: text is compared
            tail = self.processor.text(answer.token_ids[-STOP_TAIL_TOKENS:]).replace("\r", "").replace("\n", "")
            answer.stopped = tail.endswith(words)
        answer.finished = answer.stopped or len(answer.token_ids) >= self.how.max_new_tokens


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


# ---- prediction ----


@dataclass(frozen=True)
class Segmentation:
    """The answer to one prompt on one image."""

    answer: str  # special tokens kept
    mask_logits: Tensor  # float32 (K, h, w) on the masks' grid, one per `[SEG]`; K may be 0
    iou_scores: Tensor  # float32 (K,), IoU of each mask as predicted by SAM 2
    vision_features: Tensor  # float32 (C,), SAM 2's coarsest map averaged over the image; the same for all prompts
    image_size: tuple[int, int]  # (H, W)
    sam_image_size: int  # side in pixels of SAM 2's square input, the intermediate size of `upsample_mask_logits`

    def probabilities(self) -> np.ndarray:
        """Foreground probabilities, float32 (K, H, W) in [0, 1]."""
        if not len(self.mask_logits):
            return np.zeros((0, *self.image_size), dtype=np.float32)
        logits = upsample_mask_logits(self.mask_logits, self.image_size, self.sam_image_size)
        return logits.sigmoid().cpu().numpy()

    def masks(self) -> np.ndarray:
        """Masks, bool (K, H, W): probability above 0.5."""
        return self.probabilities() > 0.5


@torch.no_grad()
def predict_forward(
    model: Any,
    image: ImageLike | None = None,
    video: Sequence[ImageLike] | None = None,
    text: str | None = None,
    past_text: str = "",
    mask_prompts: Sequence[np.ndarray] | np.ndarray | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    processor: Sa2VAProcessor | None = None,
    max_new_tokens: int = 2048,
) -> dict[str, Any]:
    """Answer and masks of one image or one sequence, with the official method's arguments and result.

    One difference: a `[SEG]` in the user's text gives no mask, only those of the answer do.

    Args:
        image: PIL image or uint8 (H, W, 3); None for a question about text only.
        video: frames of a sequence, in place of an image; see `video_sa2va.predict_video`.
        text: the user's turn, with `<image>` at the image's (or all frames') place.
        past_text: earlier turns in the chat format; only without an image.
        mask_prompts: one bool (N, H, W) array of regions (in a list, or alone).
        tokenizer: used when no processor is given.

    Returns:
        `prediction`: str, special tokens kept. `prediction_masks`: one bool (1, H, W) per `[SEG]`, or
        (frames, H, W). `mask_probabilities`: one float32 array of that shape, in [0, 1], per `[SEG]`.

    Raises:
        ValueError: arguments that are missing, of another kind, or do not go together.
    """
    if video is not None and not (image is None and mask_prompts is None and not past_text):
        raise ValueError("video is given together with image, mask_prompts or past_text; leave those out, or the video")
    if not isinstance(text, str):
        raise ValueError(f"text is {text!r:.60}, expected a string: the user's turn with <image> at the image's place")
    if processor is None and tokenizer is None:
        raise ValueError("processor and tokenizer are None; give processor=Sa2VAProcessor.from_pretrained(...)")
    processor = processor or Sa2VAProcessor.from_config(model.config, tokenizer)  # type: ignore[arg-type]
    if video is not None:
        return model.predict_video(video, text, processor, max_new_tokens)
    inputs = send_to_device(processor(text, image, mask_prompts, past_text), model.device)
    result: dict[str, list[np.ndarray]] = {"prediction_masks": [], "mask_probabilities": []}
    with evaluating(model):
        (answer,) = answer_batch(model, processor, inputs, Decoding(max_new_tokens=max_new_tokens))
        if image is not None:
            features = image_features(model, processor, [image])
            size = to_rgb(image).size[::-1]
            (segmentation,) = segmentations(model, processor, features, [answer], size, MASKS_AT_ONCE)
            probabilities = segmentation.probabilities()[:, None]
            result = {"prediction_masks": list(probabilities > 0.5), "mask_probabilities": list(probabilities)}
    return {"prediction": answer_text(processor, answer)} | result


def answer_batch(model: Any, processor: Sa2VAProcessor, inputs: dict[str, Any], how: Decoding) -> list[Answer]:
    """One answer per sample of a processor's output."""
    body, rows = model.model, None
    if "pixel_values" in inputs:
        pixels = {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}
        regions = {name: inputs[name] for name in ("prompt_masks", "vp_overall_mask") if name in inputs}
        rows = body.image_rows(body.get_vision_features(**pixels), **regions)
    spliced = body.splice(inputs["input_ids"], rows, inputs["attention_mask"])
    return decode(model, processor, spliced, inputs["attention_mask"], how)


def answer_text(processor: Sa2VAProcessor, answer: Answer) -> str:
    """The answer as text: special tokens kept, outer white space removed."""
    return processor.text(answer.token_ids).strip()


@torch.no_grad()
def segment(
    model: Any,
    images: Sequence[ImageLike],
    prompts: Sequence[str],
    processor: Sa2VAProcessor,
    batch_size: int = 16,
    max_new_tokens: int = 64,
    sam_features: Sequence[Sam2Features] | None = None,
) -> list[list[Segmentation]]:
    """Every prompt on every image: `result[image][prompt]`.

    Both image encoders run once per image, prompts share the image's keys and values, and a guessed answer ("Sure,
    [SEG]." at first, then the model's previous answer) is verified in the prompt's forward pass. The result equals one
    `predict_forward` per pair.

    Args:
        images: PIL images or uint8 (H, W, 3).
        prompts: the user's turns; `<image>` is put in front where it is missing.
        batch_size: prompts decoded at once (SEGMENT_BATCH of the shell files).
        sam_features: of each image, from `image_features`; None computes them.

    Raises:
        ValueError: no prompt, batch_size below 1, or a single image or prompt in place of a list.
    """
    one_image = isinstance(images, Image.Image) or (isinstance(images, np.ndarray) and images.ndim < 4)
    if one_image or isinstance(prompts, str):
        raise ValueError("images and prompts must be lists; put a single one into a list: segment([image], [prompt])")
    if not prompts or batch_size < 1:
        raise ValueError(f"{len(prompts)} prompts, batch_size {batch_size}: expected at least 1 of both")
    texts = [prompt if IMAGE_PLACEHOLDER in prompt else IMAGE_PLACEHOLDER + prompt for prompt in prompts]
    how, results = Decoding(max_new_tokens, guess_ids=processor.answer_ids(SEG_ANSWERS[1])), []
    with evaluating(model):
        for index, image in enumerate(images):
            features = sam_features[index] if sam_features else image_features(model, processor, [image])
            answers = _answer_prompts(model, image, texts, processor, batch_size, how)
            how = replace(how, guess_ids=answers[0].token_ids)  # most likely the answer for the next image, too
            results.append(segmentations(model, processor, features, answers, to_rgb(image).size[::-1], batch_size))
    return results


@torch.no_grad()
def image_features(
    model: Any, processor: Sa2VAProcessor, images: Sequence[ImageLike], encoder_trains: bool = False
) -> Sam2Features:
    """SAM 2's maps of B images (its pixels if `encoder_trains`: maps change then), and pixels for a side network."""
    pixels = torch.cat([processor.sam_pixel_values(image) for image in images]).to(model.device)
    side_pixels = None
    if side := model.config.side_pixels:
        side_pixels = torch.stack([square_pixels(image, side) for image in images]).to(model.device)
    if encoder_trains:
        return Sam2Features((), side_pixels, pixels)
    return Sam2Features(model.get_sam_features(pixels).maps, side_pixels)


def segmentations(
    model: Any, processor: Sa2VAProcessor, features: Any, answers: list[Answer], size: tuple[int, int], at_once: int
) -> list[Segmentation]:
    """Answers on one image of size (H, W) with the masks of their `[SEG]`, `at_once` decoded at a time."""
    states = [answer.states_at(processor.seg_token_id) for answer in answers]
    flat = [state for group in states for state in group]
    logits, scores = [torch.zeros(0, *features.grid, device=model.device)], [torch.zeros(0, device=model.device)]
    for start in range(0, len(flat), at_once):
        decoded = model.decode_masks(features, model.text_hidden_fcs(torch.stack(flat[start : start + at_once])))
        logits.append(model.answer_masks(decoded))
        scores.append(decoded.iou_scores)
    counts, masks, pooled = [len(group) for group in states], torch.cat(logits), features.pooled()[0]
    check_computed(answers, masks, pooled)
    groups = zip(answers, masks.split(counts), torch.cat(scores).split(counts), strict=True)
    return [
        Segmentation(answer_text(processor, answer), mask, score, pooled, size, processor.sam_image_size)
        for answer, mask, score in groups
    ]


def _answer_prompts(
    model: Any, shown: ImageLike, texts: list[str], processor: Sa2VAProcessor, batch_size: int, how: Decoding
) -> list[Answer]:
    """Answers to all texts, `batch_size` at a time; the image's part of the prompt is computed once."""
    pixels, (count,) = processor.vision_inputs([shown])
    prompts = [processor.token_ids(processor.prompt_text(text, count)) for text in texts]
    split = prompts[0].index(processor.token_ids(processor.image_tokens.end)[0]) + 1  # the image included
    if any(prompt[:split] != prompts[0][:split] for prompt in prompts):
        raise ValueError("prompts of one image must not differ before <image>; put <image> first in each")
    prefix = torch.tensor([prompts[0][:split]], device=model.device)
    body, cache = model.model, DynamicCache(config=model.config.text_config)
    features = body.get_vision_features(**send_to_device(pixels, model.device))
    image = body.splice(prefix, body.image_rows(features))
    body(**image, past_key_values=cache, use_cache=True)
    answers: list[Answer] = []
    for start in range(0, len(prompts), batch_size):
        suffixes = [prompt[split:] for prompt in prompts[start : start + batch_size]]
        how = replace(how, guess_ids=answers[0].token_ids) if answers else how
        padded = processor.pad(suffixes)
        mask = torch.cat([torch.ones(len(suffixes), split, dtype=torch.long), padded["attention_mask"]], dim=1)
        inputs = {"inputs_embeds": model.get_input_embeddings()(padded["input_ids"].to(model.device))}
        if "position_table" in image:
            inputs["position_table"] = image["position_table"].expand(-1, len(suffixes), -1)
        first = torch.zeros(len(suffixes), dtype=torch.long, device=model.device)
        rows = selected_rows(cache, first, model.config.text_config)
        answers += decode(model, processor, inputs, mask.to(model.device), how, rows)
    return answers
