"""The table of `sa2va-rl doctor --memory`: what each stage will need, and the commands that fit."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from rl_reward_network.data.readers import REGIONS, recognise
from rl_reward_network.embedded.datasets import DEFAULT_DATA
from rl_reward_network.grpo.settings import OF_LABELS
from rl_reward_network.memory.advice import (
    CUDA_CONTEXT,
    EXACT,
    MARGIN,
    Fit,
    MemorySettings,
    Stage,
    changed_flags,
    fit,
    memory_gib,
)
from rl_reward_network.memory.predict import SIDE, has_tiles, load_stage, merge_stage, segment_stage, training_stage
from rl_reward_network.models.default import DEFAULT_MODEL, is_small
from rl_reward_network.models.sa2va.checkpoint_sa2va import open_checkpoint
from rl_reward_network.models.sa2va.configuration_sa2va import Sa2VAConfig

SHOWN_GIB = 0.05  # smaller parts are not named
CAPTION = f"needed: {' and '.join(EXACT)}, {MARGIN} x the other parts, and {CUDA_CONTEXT} GiB more on a GPU"
OF_IMAGES = f"; images of {SIDE} x {SIDE} pixels: a Qwen-VL reads more tokens of larger ones"
SEGMENT_FLAGS = ("segment_batch", "max_dynamic_patch", "dtype")
OTHERS = ("device", "memory_gib", "segment_batch", "images")  # are not flags of training
TRAINING_FLAGS = tuple(field.name for field in fields(MemorySettings) if field.name not in OTHERS)


class Row(NamedTuple):
    """A stage of the table.

    Args:
        predict: the stage of a model and settings.
        command: that runs it; none for `load`.
        flags: settings that the command has.
    """

    predict: Callable[[Sa2VAConfig, MemorySettings], Stage]
    command: str
    flags: tuple[str, ...]

    def flags_of(self, settings: MemorySettings, config: Sa2VAConfig, captions: bool) -> tuple[str, ...]:
        """Those flags that have an effect with these settings, on this model, and on data with or without captions."""
        unused: tuple[str, ...] = ("num_mask_generations", "ema_decay") if settings.objective in OF_LABELS else ()
        unused += () if captions else ("max_completion_length",) + ("ema_decay",) * (settings.objective == "grpo")
        unused += () if has_tiles(config) else ("max_dynamic_patch",)
        return tuple(name for name in self.flags if name not in unused)


LOAD = Row(load_stage, "", ())
SEGMENT = Row(segment_stage, "bash run_step2_finetune.sh full", SEGMENT_FLAGS)
TRAIN = Row(training_stage, "sa2va-rl grpo full", TRAINING_FLAGS)
MERGE = Row(merge_stage, "sa2va-rl merge --model_path RUN --output merged", ("dtype",))


def show_memory(model_path: str, data_root: Path, reward_net: str, asked: MemorySettings) -> bool:
    """Print the table, and for each stage a command; whether all stages fit.

    Args:
        model_path: of Sa2VA; of a hub id only the configuration is downloaded.
        data_root: for the commands.
        reward_net: for the command of training.
        asked: the settings as given.

    Raises:
        ValueError: not a model of ours, or a GPU is asked for where none is and no memory is given.
    """
    config, small = open_checkpoint(model_path, weights=False).model_config(), is_small(model_path)
    settings = asked.on_device("cuda" if torch.cuda.is_available() else "cpu").of_model(small)
    usual, device = MemorySettings().of_model(small), settings.device or "cpu"
    available = settings.memory_gib or memory_gib(device)
    title = f"{model_path} on {device}, {available:.1f} GiB"
    captions = data_root == DEFAULT_DATA or _captioned(data_root)
    caption = CAPTION + ("" if has_tiles(config) else OF_IMAGES)
    table = Table("stage", "needed (GiB)", "largest parts", title=title, caption=caption)
    results = [
        (row, fit(partial(row.predict, config), settings, available, row.flags_of(settings, config, captions)))
        for row in tqdm((LOAD, SEGMENT, TRAIN), "predicting", leave=False)
    ]
    results.append((MERGE, _merging(config, settings, available)))
    for _, result in results:
        table.add_row(result.asked.name, _needed(result), _parts(result.stage))
    console, flags = Console(), _inputs(model_path, data_root)
    console.print(table)
    for row, result in results:
        if row.command:
            inputs = "" if row is MERGE else flags + _rewards(row, data_root, reward_net, settings)
            words = changed_flags(usual, result.settings, row.flags_of(settings, config, captions))
            console.print(_advice(result, " ".join(filter(None, (row.command, inputs, words)))), soft_wrap=True)
    return all(result.fits for _, result in results)


def _merging(config: Sa2VAConfig, settings: MemorySettings, available: float) -> Fit:
    """In main memory: that which was given, or that of this machine; of another machine with a GPU it is not known."""
    if settings.device == "cuda":
        available = float("inf") if settings.memory_gib else memory_gib("cpu")
    return fit(partial(merge_stage, config), replace(settings, device="cpu"), available, MERGE.flags)


def _inputs(model_path: str, data_root: Path) -> str:
    """Model and data as flags; the data of the embedded model need no name."""
    if model_path == DEFAULT_MODEL and data_root == DEFAULT_DATA:
        return f"--model_path {model_path}"
    return f"--model_path {model_path} --data_root {'DATA' if data_root == DEFAULT_DATA else data_root}"


def _rewards(row: Row, data_root: Path, reward_net: str, settings: MemorySettings) -> str:
    """The reward network as a flag, where GRPO has no captions to close a loop, or the policy that reaches adapters."""
    if row is not TRAIN:
        return ""
    needed = settings.objective not in OF_LABELS and data_root != DEFAULT_DATA and not _captioned(data_root)
    network = reward_net or ("NET" if needed else "")
    if network:
        return f" --reward_net {network}"
    adapted = settings.side_network or settings.encoder != "frozen"
    return " --mask_policy bernoulli" if adapted and settings.objective not in OF_LABELS else ""  # the gradient's way


def _captioned(data_root: Path) -> bool:
    """Whether these are captioned regions; what does not exist or is unknown is taken for annotated images."""
    try:
        return recognise(data_root) in REGIONS
    except ValueError:
        return False


def _needed(result: Fit) -> str:
    device = result.settings.device or "cpu"
    needed = f"{result.asked.needed_gib(device):.1f}"
    if result.harm:
        needed += f", lowered {result.stage.needed_gib(device):.1f}"
    return needed if result.fits else f"{needed}: does not fit"


def _parts(stage: Stage) -> str:
    parts = sorted(((size / 2**30, name) for name, size in stage.parts.items()), reverse=True)
    return ", ".join(f"{name} {size:.1f}" for size, name in parts if size > SHOWN_GIB)


def _advice(result: Fit, command: str) -> str:
    if not result.fits:
        return f"{result.asked.name}: too large for this device with everything lowered; take a smaller model"
    cost = f" ({'; '.join(result.harm)})" if result.harm else ""
    return f"{result.asked.name}: {command}{cost}"
