"""Checkpoints converted between the official layout and ours, in either direction, bit for bit."""

import shutil
from pathlib import Path

from huggingface_hub import save_torch_state_dict

from rl_reward_network.artefacts import whole_folder, write_json
from rl_reward_network.models.sa2va.checkpoint_sa2va import CheckpointFolder, open_checkpoint
from rl_reward_network.models.sa2va.configuration_sa2va import HIERA_L, Sa2VAConfig, sam2_sizes
from rl_reward_network.models.sa2va.key_map_sa2va import to_original, to_ours
from rl_reward_network.models.sa2va.modeling_sa2va import check_checkpoint

REWRITTEN = {"config.json", "sam2_sizes.json", "model.safetensors.index.json", "generation_config.json"}


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
        for file in source.path.iterdir():  # the tokenizer; no weights, configuration or code
            if file.suffix in (".json", ".txt", ".jinja") and file.name not in REWRITTEN:
                shutil.copyfile(file, folder / file.name)
    return "ours" if source.original else "official layout", len(tensors)


def _write_config(config: Sa2VAConfig, source: CheckpointFolder, folder: Path) -> None:
    """Write the configuration in the layout that `source` does not have."""
    if source.original:
        config.architectures = ["Sa2VAForConditionalGeneration"]
        config.save_pretrained(folder)
        return
    assert config.original_config is not None  # `convert_checkpoint` has checked it
    write_json(folder / "config.json", config.original_config)
    if (sizes := sam2_sizes(config.sam2_config)) != HIERA_L:
        write_json(folder / "sam2_sizes.json", sizes)
