"""What only a GPU can show: number formats, speed, whether compilation pays, and recovery when memory runs out.

    python -m benchmarks.gpu                     # the embedded model; on the CPU without the last part
    python -m benchmarks.gpu --model_path MODEL

Texts are compared word by word, masks by IoU, on rendered images and the built-in prompts. Memory is made to run out
by a limit a little above the model's own.
"""

import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.segment import seconds
from rl_reward_network.cli.app import run
from rl_reward_network.embedded.regions import make_scenes
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.inputs.segmenter import load_segmenter
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.sa2va.loading_sa2va import Dtype, load_sa2va_model
from rl_reward_network.models.sa2va.prediction_sa2va import Segmentation
from rl_reward_network.rewards.masks import iou

SIDE = 512  # pixels
REPEATS = 10  # of an encoder
ROOM = 1.05  # share of the model's memory that is allowed where it is to run out


@dataclass(frozen=True)
class Args:
    """Compare number formats, and time decoding."""

    model_path: str = DEFAULT_MODEL
    """Sa2VA folder or hub id."""
    device: str = "cuda:0" if torch.cuda.is_available() else "cpu"
    """cpu, cuda:0, ..."""
    images: int = 4
    """Rendered images."""


def main(args: Args) -> None:
    """Print one line for each part."""
    images = [scene.image for scene in make_scenes(args.images, 0, SIDE)]
    whole, half = (_answers(args, images, dtype) for dtype in ("float32", "bfloat16"))
    same = np.mean([a.answer == b.answer for a, b in zip(whole, half, strict=True)])
    overlap = [iou(_mask(a)[None], _mask(b)[None])[0] for a, b in zip(whole, half, strict=True)]
    print(f"bfloat16 against float32: {same:.1%} of {len(whole)} texts equal, mask IoU {np.mean(overlap):.4f}")
    print(f"decoding: {_tokens_per_second(args, images[0]):.0f} tokens per second")
    print(_compilation(args, images[0]))
    if args.device.startswith("cuda"):
        print(f"out of memory: {_recovery(args, images[0])}")


def _answers(args: Args, images: list[np.ndarray], dtype: Dtype) -> list[Segmentation]:
    model, processor = load_sa2va_model(args.model_path, args.device, dtype=dtype)
    processor.max_tiles = 1
    rows = model.segment(images, list(PROMPTS), processor, max_new_tokens=32)
    return [answer for row in rows for answer in row]


def _mask(answer: Segmentation) -> np.ndarray:
    """bool (H, W): all masks of an answer together."""
    masks = answer.masks()
    return np.asarray(masks.any(axis=0) if len(masks) else np.zeros(answer.image_size, bool))


def _tokens_per_second(args: Args, image: np.ndarray) -> float:
    """Captions of one image, all rows at once, to the last token."""
    model, processor = load_sa2va_model(args.model_path, args.device)
    processor.max_tiles = 1
    answers: list[Segmentation] = []

    def caption() -> None:
        answers[:] = model.segment([image], ["Please describe the image."] * 16, processor, max_new_tokens=128)[0]

    caption()  # is not counted
    taken = seconds(caption)
    return sum(len(processor.token_ids(answer.answer)) for answer in answers) / taken


def _compilation(args: Args, image: np.ndarray) -> str:
    """Both image encoders with and without `torch.compile`: the parts whose shapes never change."""
    model, processor = load_sa2va_model(args.model_path, args.device)
    tile = processor.pixel_values(processor.tiles(image)[:1]).to(model.device)
    pixels = processor.sam_pixel_values(image).to(model.device)

    @torch.no_grad()
    def encode() -> None:
        model.model.get_vision_features(tile)
        model.get_sam_features(pixels)

    eager = _median_seconds(encode)
    model.model.vision_tower.compile()
    model.grounding_encoder.vision_encoder.compile()
    first = seconds(encode)
    compiled = _median_seconds(encode)
    return (
        f"encoders: {1 / eager:.1f} images per second, compiled {eager / compiled:.2f} times as fast, "
        f"after {first:.0f} s of compilation"
    )


def _median_seconds(work: Callable[[], None]) -> float:
    """Of one call, after one that is not counted."""
    work()
    return statistics.median(seconds(work) for _ in range(REPEATS))


def _recovery(args: Args, image: np.ndarray) -> str:
    """Whether a batch that does not fit is halved; the limit of this process is lifted afterwards."""
    segmenter = load_segmenter(args.model_path, args.device, batch_size=len(PROMPTS))
    used, total = torch.cuda.memory_allocated(), torch.cuda.get_device_properties(0).total_memory
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, ROOM * used / total))
        try:
            segmenter.segment(image, list(PROMPTS))
            result = "the batch fitted"
        except ValueError as error:
            result = f"refused: {error}"
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    told = [str(warning.message) for warning in caught if "out of memory" in str(warning.message)]
    return "; ".join([*told, result])


if __name__ == "__main__":
    run(main, Args)
