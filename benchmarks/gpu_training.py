"""Seconds and memory of training steps at real size on one GPU, in one process, on random weights that are made there.

    python -m benchmarks.gpu_training --sizes 1b 4b
    python -m benchmarks.gpu_training --sizes tiny --device cpu      # a rehearsal

Each row is a way to train: its last optimisation step, divided into rollouts (sampling, rewards, reference) and
learning (loss, gradients, optimiser), and the peak of the GPU's memory. A step has 8 captions of 24 tokens and 16 masks
on 2 images, as the presets of a real model. A first line says what it costs to launch a kernel, which bounds decoding
from below. A way that fails is a row, too, and the exit status is 1.
"""

import gc
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers.models.internvl.modeling_internvl import InternVLPreTrainedModel
from transformers.trainer_callback import PrinterCallback

from benchmarks.random_checkpoint import Size, random_model
from rl_reward_network.cli.app import run
from rl_reward_network.data.items import make_region
from rl_reward_network.data.masks import to_rle
from rl_reward_network.embedded.regions import make_scenes
from rl_reward_network.grpo.grpo_config import Sa2VAGRPOConfig
from rl_reward_network.grpo.policy import prepare_model
from rl_reward_network.grpo.prompts import TrainingItem, region_prompt
from rl_reward_network.grpo.rewards import Reward
from rl_reward_network.grpo.trainer import Sa2VAGRPOTrainer, StepCallback
from rl_reward_network.models.sa2va.arguments_sa2va import Quantization, bits_config, language_model_in_bits
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.rewards.functions import iou_reward
from rl_reward_network.run import peak_memory_gib

SIDE, STEPS, TOKENS, LAUNCHES = 512, 3, 24, 1000
GIB = 2**30


@dataclass(frozen=True)
class Way:
    """A way to train.

    Args:
        settings: of `Sa2VAGRPOConfig`.
        quantization: of the language model.
    """

    settings: dict[str, Any]
    quantization: Quantization | None = None


WAYS: dict[str, Way] = {
    "GRPO": Way({}),
    "GRPO, gradient checkpointing": Way({"activation_checkpointing": True}),
    "GRPO, 8-bit AdamW": Way({"optim": "adamw_8bit"}),
    "GRPO, 4 bit": Way({}, "4bit"),
    "GRPO, 8 bit": Way({}, "8bit"),
    "supervised": Way({"objective": "supervised"}),
}


@dataclass(frozen=True)
class Args:
    """Measure ways to train."""

    sizes: tuple[Size, ...] = ("1b", "4b")
    """Of the released checkpoints that the random ones resemble."""
    device: str = "cuda:0" if torch.cuda.is_available() else "cpu"
    """cpu, cuda:0, ..."""
    ways: tuple[str, ...] = tuple(WAYS)
    """Which of them, in this order."""
    max_seconds: float = 540.0
    """Ways that would begin later are left out."""


@dataclass(frozen=True)
class Measured:
    """Seconds of the last step and of its rollouts, GiB at the peak and for the weights."""

    seconds: float
    rollouts: float
    peak_gib: float
    weights_gib: float


def main(args: Args) -> None:
    """Print a line for each way as it ends, and the table."""
    start, failed = time.perf_counter(), False
    print(launch_cost(args.device), flush=True)
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    table = Table("size", "way", "step (s)", "rollouts (s)", "peak (GiB)", "weights (GiB)", title=name)
    for size in args.sizes:
        for way in args.ways:
            if time.perf_counter() - start > args.max_seconds:
                table.add_row(size, way, "-", "-", "-", "left out")
                continue
            cells, success = _cells(args, size, way)
            failed |= not success
            table.add_row(size, way, *cells)
            print(f"{size}, {way}: {', '.join(cells)}; {time.perf_counter() - start:.0f} s", flush=True)
    Console(width=140).print(table)
    if failed:
        sys.exit(1)


def launch_cost(device: str) -> str:
    """Microseconds of an operation on one number."""
    number = torch.zeros(1, device=device)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            number += 1
        _synchronise(device)
        times.append((time.perf_counter() - start) / LAUNCHES)
    return f"one operation on one number: {1e6 * min(times):.1f} us"


def _cells(args: Args, size: Size, way: str) -> tuple[list[str], bool]:
    try:
        result = measure(args, size, WAYS[way])
    except Exception:  # what failed is part of the result
        traceback.print_exc()
        return ["-", "-", "-", "failed, see above"], False
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    numbers = (result.seconds, result.rollouts, result.peak_gib, result.weights_gib)
    return [f"{number:.2f}" for number in numbers], True


def measure(args: Args, size: Size, way: Way) -> Measured:
    """A few steps of a way to train."""
    if args.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    model, processor = _model(size, args.device, way.quantization)
    weights = torch.cuda.memory_allocated() / GIB if args.device.startswith("cuda") else 0.0
    prepare_model(model, 128, 256)
    with TemporaryDirectory() as folder, _step_ends(args.device) as ends:
        trainer = _trainer(model, processor, Path(folder), args.device, way.settings)
        trainer.train()
    (before, rollouts_before), (after, rollouts) = ends[-2:]
    return Measured(after - before, rollouts - rollouts_before, peak_memory_gib(args.device), weights)


def _model(size: Size, device: str, quantization: Quantization | None) -> tuple[Any, Sa2VAProcessor]:
    """The random model on the device, in bfloat16."""
    model, tokenizer, _ = random_model(size, device)
    config = model.config
    config._attn_implementation = model.config._attn_implementation = "sdpa"
    processor = Sa2VAProcessor.from_config(config, tokenizer, max_tiles=1)
    config.image_token_id, config.seg_token_id = processor.image_token_id, processor.seg_token_id
    config.never_sampled_ids = processor.never_sampled_ids
    if quantization is not None:
        load: Any = InternVLPreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
        state = model.state_dict()
        del model
        model = load(
            Sa2VAForConditionalGeneration,
            None,
            config=config,
            state_dict=state,
            dtype=torch.bfloat16,
            device_map={"": device},
            quantization_config=language_model_in_bits(bits_config(quantization)),
        )
    return model.eval(), processor


def _trainer(model: Any, processor: Any, folder: Path, device: str, settings: dict[str, Any]) -> Sa2VAGRPOTrainer:
    config = Sa2VAGRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_generations=4,
        num_mask_generations=8,
        max_completion_length=TOKENS,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=True,
        use_cpu=device == "cpu",
        **settings,
    )
    prompts = _prompts(2 * STEPS)
    rewards = {"loop1": {"iou": Reward(iou_reward, 1.0)}, "loop2": {"iou": Reward(iou_reward, 1.0)}}
    trainer = Sa2VAGRPOTrainer(model, processor, config, prompts, rewards)
    trainer.remove_callback(PrinterCallback)
    trainer.freeze_unreached(prompts[:2])
    trainer.reset_reference()
    return trainer


def _prompts(count: int) -> list[TrainingItem]:
    """Captioned regions, one of each rendered scene."""
    prompts = []
    for number, scene in enumerate(make_scenes(count, 0, SIDE)):
        thing = scene.objects[0]
        region = make_region(
            f"{thing.caption}.", to_rle(thing.mask), str(number), f"{number}/0", partial(np.asarray, scene.image)
        )
        prompts.append(region_prompt(region))
    return prompts


@contextmanager
def _step_ends(device: str) -> Iterator[list[tuple[float, float]]]:
    """When optimisation steps end inside the block and the GPU is done, and the seconds of all rollouts until then."""
    ends: list[tuple[float, float]] = []
    whole = StepCallback.on_step_end

    def on_step_end(self: StepCallback, *words: Any, **named: Any) -> None:
        whole(self, *words, **named)
        _synchronise(device)
        ends.append((time.perf_counter(), self.trainer.phases["rollouts"]))

    with mock.patch.object(StepCallback, "on_step_end", on_step_end):
        yield ends


def _synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    run(main, Args)
