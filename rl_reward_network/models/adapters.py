"""Adapters of peft, merged into a Sa2VA: of the whole model, or of its language model alone."""

import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from peft import PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor

from rl_reward_network.models.lora import PEFT_CONFIG, PEFT_PREFIX, PEFT_WEIGHTS, WEIGHTS
from rl_reward_network.models.sa2va.checkpoint_sa2va import check_shapes
from rl_reward_network.models.weights import check_finite, read_tensors

PICKLED = "adapter_model.bin"  # of older versions of peft
# Names of a language model's layers, whatever it was wrapped in: InternVL and Sa2VA train it as a model of its own.
OF_LANGUAGE_MODEL = re.compile(
    r"(?:(?:base_model|model|language_model|mllm)\.)*(?=(?:layers\.\d+|embed_tokens|norm)\.)"
)
PARAMETER = re.compile(r"\.(lora_|ia3_)\w+(\.(weight|bias))?$")  # behind the name of an adapted layer
REMEDY = "give the model that it was trained on, in our layout (sa2va-rl convert)"


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter of peft, and not the LoRA part of a run of ours."""
    return (folder / PEFT_CONFIG).is_file() and not (folder / WEIGHTS).exists()


def merge_adapter(model: Any, folder: Path) -> None:
    """Add an adapter of peft to the weights of a model, in place; pickled tensors are read without running code.

    Raises:
        ValueError: a file is missing or damaged, or the adapter was trained on a model with other layers.
    """
    state = _read(folder)
    parts = tuple(f"{PEFT_PREFIX}model.{name}." for name, _ in model.model.named_children())  # of the whole model
    alone = all(OF_LANGUAGE_MODEL.match(name) and not name.startswith(parts) for name in state)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the name of the base, which a model of ours does not have
            config = PeftConfig.from_pretrained(str(folder))
            config.task_type = None  # whose wrapper would ask for a model that generates text
            if alone:
                layers = {OF_LANGUAGE_MODEL.sub("", name, count=1): tensor for name, tensor in state.items()}
                state = {PEFT_PREFIX + name: tensor for name, tensor in layers.items()}
                _name_layers(config, layers)
            wrapped: Any = get_peft_model(model.model.language_model if alone else model, config)
            expected, found = (
                {name: tuple(tensor.shape) for name, tensor in tensors.items()}
                for tensors in (get_peft_model_state_dict(wrapped), state)
            )
            check_shapes(expected, found, folder, "this model")
            set_peft_model_state_dict(wrapped, state)
            wrapped.merge_and_unload(safe_merge=True)
    except (AttributeError, RuntimeError, ValueError, TypeError, KeyError) as error:  # of peft, whatever does not fit
        raise ValueError(f"{folder}: cannot be merged into this model ({error}); {REMEDY}") from error


def _read(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter, under the names that peft gives them when it writes them."""
    file = folder / PICKLED
    if (folder / PEFT_WEIGHTS).exists() or not file.exists():
        state = read_tensors(folder / PEFT_WEIGHTS)
    else:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise ValueError(f"{file}: not tensors alone ({error}); save the adapter by peft as safetensors") from error
        check_finite(state, file)
    return {re.sub(r"\.default(?=\.|$)", "", name): tensor for name, tensor in state.items()}


def _name_layers(config: Any, names: Iterable[str]) -> None:
    """Let the configuration name the layers of these tensors: its own patterns are of another model's names."""
    config.target_modules, config.exclude_modules = {PARAMETER.sub("", name) for name in names}, None
    for field in ("layers_to_transform", "layers_pattern"):
        if hasattr(config, field):
            setattr(config, field, None)
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(config, field, None) or {}
        setattr(config, field, {OF_LANGUAGE_MODEL.sub("", name, count=1): value for name, value in pattern.items()})
