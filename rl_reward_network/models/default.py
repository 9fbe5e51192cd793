"""The embedded model, apart from the code that loads it, so that `--help` and early checks need no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_reward_network.atomic_io import read_json

DEFAULT_MODEL = "sa2va-nano"
SMALL_HIDDEN_SIZE = 256  # of the language model: 128 in the embedded model, 896 in the smallest Sa2VA that is published


def is_small(model_path: str) -> bool:
    """Whether a model is of the embedded one's size: that model, a copy, a fine-tuned or an equally small one.

    Presets depend on this, not on the path: a learning rate for billions of parameters trains no small model. The path
    is a folder in either layout, or a hub id, which counts as large. A ValueError for a config.json that is no JSON.
    """
    config = _config(model_path)
    if config is None:
        return model_path == DEFAULT_MODEL
    text_config = config.get("text_config") or config.get("llm_config")  # our layout, the official one
    hidden_size = text_config.get("hidden_size") if isinstance(text_config, Mapping) else None
    return isinstance(hidden_size, int) and hidden_size <= SMALL_HIDDEN_SIZE


def has_side_network(model_path: str) -> bool:
    """Whether a model has a side network; arguments and errors as `is_small`, a hub id counts as without."""
    return bool((_config(model_path) or {}).get("side_network"))


def is_qwen_vl(model_path: str) -> bool | None:
    """Whether a model is a Qwen-VL and not an InternVL; None of a hub id. Arguments and errors as `is_small`."""
    config = _config(model_path)
    if config is None:
        return False if model_path == DEFAULT_MODEL else None
    text_config = config.get("text_config")
    return isinstance(text_config, Mapping) and "_vl" in str(text_config.get("model_type"))


def _config(model_path: str) -> Mapping[str, Any] | None:
    """The fields of a folder's config.json, none of a file that is not a model's; None without the file."""
    file = Path(model_path) / "config.json"
    config = read_json(file) if file.exists() else None
    return config if config is None or isinstance(config, Mapping) else {}
