"""What only a GPU can show: number formats, decoding, recovery when memory runs out, and whether compilation pays.

    python -m benchmarks.gpu                     # the embedded model; on the CPU without recovery
    python -m benchmarks.gpu --model_path MODEL --parts formats decoding

Texts are compared word by word, masks by IoU, on rendered images and the built-in prompts; the bar is that of trained
weights, since the logits of random ones are close to 0. Memory is made to run out by a limit between what a batch of
prompts needs and what half of it needs. Where a part fails, the next one begins, and the exit status is 1.
"""

import gc
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.segment import exact_float32, seconds
from rl_reward_network.cli.app import run
from rl_reward_network.embedded.regions import make_scenes
from rl_reward_network.env.mask_bank import NO_MASK_LOGIT
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.grpo.image_context import ImageContext, encode_image, make_question
from rl_reward_network.inputs.segmenter import Sa2VASegmenter
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.sa2va.generation_sa2va import Decoding
from rl_reward_network.models.sa2va.loading_sa2va import Dtype, load_sa2va_model
from rl_reward_network.models.sa2va.prediction_sa2va import Segmentation
from rl_reward_network.rewards.metrics import iou

SIDE = 512  # pixels
REPEATS = 10  # of an encoder
IOU_BAR = 0.85  # of masks in bfloat16, as in tests/test_golden.py
TOKENS, ROWS = 128, (1, 8, 64)
WARM_UP = 4  # tokens
CROWD = 8  # times the built-in prompts: of so many rows the answers need most of the memory, not the image encoders
SMALLEST_GAP = 1.05  # between the memory of a batch and that of its half, so that a limit fits between
LONGEST_ANSWER = 64
GIB = 2**30

Part = Literal["formats", "decoding", "recovery", "compilation"]


@dataclass(frozen=True)
class Args:
    """Compare number formats, time decoding, and let memory run out."""

    model_path: str = DEFAULT_MODEL
    """Sa2VA folder or hub id."""
    device: str = "cuda:0" if torch.cuda.is_available() else "cpu"
    """cpu, cuda:0, ..."""
    images: int = 4
    """Rendered images."""
    parts: tuple[Part, ...] = ("formats", "decoding", "recovery", "compilation")
    """Which of them, in this order."""


def main(args: Args) -> None:
    """Print what each part says; exit status 1 if one failed."""
    if failed := [name for name in args.parts if not _printed(args, name)]:
        sys.exit(f"failed, see above: {', '.join(failed)}")


def _printed(args: Args, name: Part) -> bool:
    """Whether a part ran to its end."""
    try:
        for line in PARTS[name](args):
            print(f"{name}: {line}", flush=True)
    except Exception:  # what failed is part of the result
        traceback.print_exc()
        return False
    finally:
        _free()
    return True


def _free() -> None:
    """Give the memory of models that are used no more back to the GPU; they hold cycles of references."""
    gc.collect()
    torch.cuda.empty_cache()


def _load(args: Args, dtype: Dtype = "auto") -> tuple[Any, Any]:
    model, processor = load_sa2va_model(args.model_path, args.device, dtype=dtype)
    processor.max_tiles = 1
    return model, processor


def _images(count: int) -> list[np.ndarray]:
    return [scene.image for scene in make_scenes(count, 0, SIDE)]


# ---- number formats ----


def formats(args: Args) -> Iterator[str]:
    """Texts and masks in bfloat16 and in float32."""
    whole = _float32_answers(args)
    if whole is None:
        yield "float32 of this model does not fit this GPU"
        return
    _free()
    half = _answers(args, "bfloat16")
    same = np.mean([a.answer == b.answer for a, b in zip(whole, half, strict=True)])
    overlap = [iou(_mask(a)[None], _mask(b)[None])[0] for a, b in zip(whole, half, strict=True)]
    yield (
        f"bfloat16 against float32: {same:.1%} of {len(whole)} texts equal, "
        f"mask IoU {np.mean(overlap):.4f} (bar {IOU_BAR} for trained weights), least {min(overlap):.4f}"
    )


def _float32_answers(args: Args) -> list[Segmentation] | None:
    """None where the GPU is too small."""
    try:
        with exact_float32():
            return _answers(args, "float32")
    except torch.OutOfMemoryError:
        return None


def _answers(args: Args, dtype: Dtype) -> list[Segmentation]:
    model, processor = _load(args, dtype)
    rows = model.segment(_images(args.images), list(PROMPTS), processor, max_new_tokens=32)
    return [answer for row in rows for answer in row]


def _mask(answer: Segmentation) -> np.ndarray:
    """bool (H, W): all masks of an answer together."""
    masks = answer.masks()
    return np.asarray(masks.any(axis=0) if len(masks) else np.zeros(answer.image_size, bool))


# ---- decoding ----


def decoding(args: Args) -> Iterator[str]:
    """Tokens per second of captions that cannot end early, for several numbers of rows."""
    model, processor = _load(args)
    _never_end(processor)
    question = make_question(processor, 0, processor.tokens_per_tile, "Please describe the image.")
    context = ImageContext(model, processor, [encode_image(model, processor, _images(1)[0])], [question.prefix_ids])
    single = 0.0
    for rows in ROWS:
        rate = _tokens_per_second(context, [question] * rows)
        single = single or rate
        yield f"rows {rows}, {TOKENS} tokens each: {rate:.0f} tokens/s, batched decoding {rate / single:.1f} x one row"


def _never_end(processor: Any) -> None:
    """Answers of this processor end at their limit alone."""
    ends = [processor.tokenizer.eos_token_id, processor.seg_token_id]
    processor.never_sampled_ids = processor.never_sampled_ids + ends
    processor.template = replace(processor.template, stop_words=())


def _tokens_per_second(context: ImageContext, questions: list[Any]) -> float:
    context.answer(questions, Decoding(WARM_UP))
    answers: list[Any] = []
    taken = seconds(lambda: answers.extend(context.answer(questions, Decoding(TOKENS))))
    lengths = {len(answer.token_ids) for (answer,) in answers}
    if lengths != {TOKENS}:
        raise RuntimeError(f"answers have {lengths} tokens, expected {TOKENS}")
    return len(questions) * TOKENS / taken


# ---- memory ----


def recovery(args: Args) -> Iterator[str]:
    """Whether a batch that does not fit is halved, and its masks come."""
    if not args.device.startswith("cuda"):
        yield "out of memory: needs a GPU"
        return
    model, processor = _load(args)
    with torch.cuda.device(args.device):
        yield f"out of memory: {_recovered(model, processor, *_images(1))}"


def _recovered(model: Any, processor: Any, image: np.ndarray) -> str:
    prompts = list(PROMPTS) * CROWD
    needed, _ = _peak(model, processor, image, len(prompts))
    _, enough = _peak(model, processor, image, len(prompts) // 2)
    known = f"{len(prompts)} prompts need {needed / GIB:.2f} GiB, halves {enough / GIB:.2f} GiB"
    if needed < SMALLEST_GAP * enough:
        return f"not tried, since no limit fits between; {known}"
    segmenter = Sa2VASegmenter(model, processor, len(prompts), LONGEST_ANSWER, "")
    try:
        with _memory_limit((needed + enough) // 2):
            logits = segmenter.segment(image, prompts).mask_logits
    except (ValueError, torch.OutOfMemoryError) as error:
        return f"NOT recovered: {str(error).splitlines()[0]}; {known}"
    masks = int((logits > NO_MASK_LOGIT).any(axis=(1, 2)).sum())
    result = "recovered, the batch was halved" if segmenter.halved and masks else "NOT recovered"
    return f"{result}: halved {segmenter.halved}, {masks} of {len(logits)} answers have a mask; {known}"


def _peak(model: Any, processor: Any, image: np.ndarray, rows: int) -> tuple[int, int]:
    """Bytes allocated and bytes reserved at the peak of `CROWD` times the prompts, so many at once."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model.segment([image], list(PROMPTS) * CROWD, processor, batch_size=rows, max_new_tokens=LONGEST_ANSWER)
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


@contextmanager
def _memory_limit(limit: int) -> Iterator[None]:
    """This process gets so many bytes of the current GPU inside the block."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# ---- compilation ----


def compilation(args: Args) -> Iterator[str]:
    """Both image encoders with and without `torch.compile`: the parts whose shapes never change."""
    model, processor = _load(args)
    (image,) = _images(1)
    tile = processor.pixel_values(processor.tiles(image)[:1]).to(model.device)
    pixels = processor.sam_pixel_values(image).to(model.device)

    @torch.no_grad()
    def encode() -> None:
        model.model.get_vision_features(tile)
        model.get_sam_features(pixels)

    eager = _median_seconds(encode)
    yield f"encoders: {1 / eager:.1f} images per second"
    model.model.vision_tower.compile()
    model.grounding_encoder.vision_encoder.compile()
    yield _compiled(encode, eager)


def _compiled(encode: Callable[[], None], eager: float) -> str:
    """How much faster; or why a compiler failed, which costs nothing but this number."""
    try:
        first = seconds(encode)
        faster = eager / _median_seconds(encode)
    except Exception as error:
        return f"not compiled: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return f"compiled {faster:.2f} times as fast, after {first:.0f} s of compilation"


def _median_seconds(work: Callable[[], None]) -> float:
    """Of one call, after one that is not counted."""
    work()
    return statistics.median(seconds(work) for _ in range(REPEATS))


PARTS: dict[Part, Callable[[Args], Iterator[str]]] = {
    "formats": formats,
    "decoding": decoding,
    "recovery": recovery,
    "compilation": compilation,
}


if __name__ == "__main__":
    run(main, Args)
