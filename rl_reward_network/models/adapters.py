"""Adapters that were trained elsewhere, merged into a model: those of peft, and the trained tensors of our runs."""

import warnings
from pathlib import Path
from typing import Any

from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open

from rl_reward_network.models.lora import PEFT_CONFIG, PEFT_WEIGHTS, WEIGHTS, load_trainable, merge_lora
from rl_reward_network.models.sa2va.checkpoint_sa2va import FINAL_MODEL, TRAINABLE
from rl_reward_network.models.sa2va.key_map_sa2va import first_few

REMEDY = "give the model that it was trained on, in our layout (sa2va-rl convert)"


def adapter_folder(path: Path) -> Path:
    """The folder of an adapter's files, which may be named by a run of ours, or its final_model.

    Raises:
        ValueError: no adapter is there.
    """
    for folder in (path, path / TRAINABLE, path / FINAL_MODEL / TRAINABLE):
        if (folder / WEIGHTS).is_file() or (folder / PEFT_CONFIG).is_file():
            return folder
    raise ValueError(
        f"adapter: {path} holds neither {PEFT_CONFIG} with {PEFT_WEIGHTS}, as peft writes them, nor the result of "
        "sa2va-rl grpo"
    )


def merge_adapter(model: Any, path: Path) -> None:
    """Add an adapter to the weights of a model, in place.

    Args:
        model: the Sa2VA that it was trained on, in our classes.
        path: as `adapter_folder` takes it.

    Raises:
        ValueError: there is no adapter, or it was trained on a model with other layers.
    """
    folder = adapter_folder(path)
    if (folder / WEIGHTS).is_file():
        load_trainable(model, folder)
        if getattr(model, "peft_config", None):
            merge_lora(model)
        return
    _merge_peft(model, folder)


def _merge_peft(model: Any, folder: Path) -> None:
    """Merge an adapter of peft whose tensors are exactly those of the model's layers: peft would skip others."""
    try:
        with safe_open(folder / PEFT_WEIGHTS, "pt") as file:
            found = set(file.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{folder / PEFT_WEIGHTS}: not a whole safetensors file ({error}); copy it again") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of missing keys, which are an error below
            wrapped: Any = PeftModel.from_pretrained(model, str(folder))
        expected = set(get_peft_model_state_dict(wrapped))
        if found == expected:
            wrapped.merge_and_unload(safe_merge=True)
            return
    except (AttributeError, RuntimeError, ValueError, TypeError, KeyError) as error:  # of peft, whatever does not fit
        raise ValueError(f"{folder}: peft cannot merge this adapter into this model: {error}; {REMEDY}") from error
    raise ValueError(
        f"{folder / PEFT_WEIGHTS}: the tensors are not those of this model's layers: {len(found - expected)} surplus, "
        f"{len(expected - found)} missing, first {first_few(sorted(found ^ expected))}; {REMEDY}"
    )
