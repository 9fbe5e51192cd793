"""A model with an adapter (`--adapter`), merged once into a folder that every command then reads as any other model."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from rl_reward_network.artefacts import locked, whole_folder
from rl_reward_network.data.images import file_stamp
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.models.adapters import adapter_folder, merge_adapter
from rl_reward_network.models.sa2va.checkpoint_sa2va import located
from rl_reward_network.models.sa2va.loading_sa2va import convert_weights
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor

MERGED = "merged"  # below the output folder


def check_adapter(config: RunConfig) -> None:
    """Raise a ValueError where an adapter is named and none is there; the weights are not read."""
    if config.adapter is not None:
        adapter_folder(config.adapter)


def with_adapter(config: RunConfig) -> RunConfig:
    """The settings with the merged model as `model_path`, which is written if it is missing.

    Raises:
        ValueError: no adapter is there, or it is of another model.
    """
    if config.adapter is None:
        return config
    adapter = adapter_folder(config.adapter)
    folder = config.output_dir / MERGED / f"{config.adapter.resolve().name}_{_digest(config.model_path, adapter)}"
    if not folder.exists():
        with locked(folder.parent):  # other processes wait while this one writes
            if not folder.exists():
                tqdm.write(f"adapter {config.adapter}: merging into {config.model_path}, once")
                merge_model(config.model_path, adapter, folder)
    if os.environ.get("RANK", "0") == "0":
        tqdm.write(f"model: {config.model_path} with the adapter {config.adapter}: {folder}")
    return replace(config, model_path=str(folder), adapter=None)


def merge_model(model_path: str, adapter: Path, folder: Path) -> None:
    """Write a model with a merged adapter, in our layout and the number format of its files; added up in float32."""
    model = Sa2VAForConditionalGeneration.from_pretrained(model_path, dtype="auto")
    stored = model.dtype
    convert_weights(model, torch.float32)
    merge_adapter(model, adapter)
    convert_weights(model, stored)
    with whole_folder(folder) as temporary:
        model.save_pretrained(temporary)
        Sa2VAProcessor.from_pretrained(model_path).save_pretrained(temporary)


def _digest(model_path: str, adapter: Path) -> str:
    """8 hex digits that change with the files of the adapter and of the model."""
    folder = located(model_path, weights=False)
    stamps = [file_stamp(file) for place in (folder, adapter) for file in sorted(place.iterdir())]
    return hashlib.sha256(f"{folder.resolve()} {stamps}".encode()).hexdigest()[:8]
