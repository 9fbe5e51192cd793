"""Checkpoints converted between the official layout and ours, in either direction, bit for bit."""

import shutil
from pathlib import Path

from huggingface_hub import save_torch_state_dict

from rl_reward_network.artefacts import whole_folder, write_json
from rl_reward_network.models.sa2va.checkpoint_sa2va import (
    PROCESSOR_FILE,
    CheckpointFolder,
    name_processor,
    open_checkpoint,
)
from rl_reward_network.models.sa2va.configuration_sa2va import HIERA_L, Sa2VAConfig, sam2_sizes
from rl_reward_network.models.sa2va.internlm2_tokenizer import MODEL_FILE
from rl_reward_network.models.sa2va.key_map_sa2va import to_original, to_ours
from rl_reward_network.models.sa2va.modeling_sa2va import check_checkpoint

REWRITTEN = {
    "config.json",
    "sam2_sizes.json",
    "model.safetensors.index.json",
    "generation_config.json",
    PROCESSOR_FILE,
}
TOKENIZER_FILE = "tokenizer.json"


def convert_checkpoint(path: str, target: Path) -> tuple[str, int]:
    """Write a checkpoint in the other layout; returns the name of that layout and the number of tensors.

    Args:
        path: model folder or hub id.
        target: folder to write.

    Raises:
        ValueError: `target` exists, or the model has no official layout.
    """
    if target.exists():
        raise ValueError(f"target {target} exists; give a new folder")
    source = open_checkpoint(path)
    config = check_checkpoint(source)
    if not source.original and config.original_config is None:
        raise ValueError(
            f"{source.path / 'config.json'}: original_config is missing; this model has no official layout"
        )
    tensors = to_ours(source.tensors(), config) if source.original else to_original(source.tensors(), config)
    with whole_folder(target) as folder:
        save_torch_state_dict(tensors, folder)
        _write_config(config, source, folder)
        _copy_tokenizer(config, source, folder)
    return "ours" if source.original else "official layout", len(tensors)


def _copy_tokenizer(config: Sa2VAConfig, source: CheckpointFolder, folder: Path) -> None:
    """Copy the tokenizer's files; no weights, configuration or code.

    A `tokenizer.model` is read once, for the official layout has no tokenizer.json beside it.
    """
    files = {file.name for file in source.path.iterdir()}
    rewritten = REWRITTEN | ({TOKENIZER_FILE} if MODEL_FILE in files else set())
    for name in files - rewritten:
        if name.endswith((".json", ".txt", ".jinja")) or name == MODEL_FILE:
            shutil.copyfile(source.path / name, folder / name)
    if MODEL_FILE in files and source.original:
        source.tokenizer(config).backend_tokenizer.save(str(folder / TOKENIZER_FILE))


def _write_config(config: Sa2VAConfig, source: CheckpointFolder, folder: Path) -> None:
    """Write the configuration in the layout that `source` does not have."""
    if source.original:
        config.architectures = ["Sa2VAForConditionalGeneration"]
        config.save_pretrained(folder)
        if config.family.body == "qwen_vl":
            name_processor(folder)
        return
    assert config.original_config is not None  # `convert_checkpoint` has checked it
    write_json(folder / "config.json", config.original_config)
    if (sizes := sam2_sizes(config.sam2_config)) != HIERA_L:
        write_json(folder / "sam2_sizes.json", sizes)
