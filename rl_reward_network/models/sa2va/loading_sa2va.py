"""A checkpoint as a whole: loaded on an available device, converted to the other layout, and shown in a model card."""

import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import save_torch_state_dict

from rl_reward_network.atomic_io import whole_folder, write_json
from rl_reward_network.models.sa2va.arguments_sa2va import Quantization, bits_config
from rl_reward_network.models.sa2va.checkpoint_sa2va import (
    PROCESSOR_FILE,
    CheckpointFolder,
    name_processor,
    open_checkpoint,
    to_original,
    to_ours,
)
from rl_reward_network.models.sa2va.configuration_sa2va import HIERA_L, SAM3_L, Sa2VAConfig, sam2_sizes
from rl_reward_network.models.sa2va.internlm2 import MODEL_FILE
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration, check_checkpoint
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor

Dtype = Literal["auto", "float32", "bfloat16"]
REWRITTEN = {
    "config.json",
    "sam2_sizes.json",
    "sam3_sizes.json",
    "model.safetensors.index.json",
    "generation_config.json",
    PROCESSOR_FILE,
}
TOKENIZER_FILE = "tokenizer.json"

# Python lines of the model cards. `<this folder>` and `image.png` stand for the reader's own; tests run the lines.
WHOLE_MODEL = """```python
import rl_reward_network.models.sa2va  # registers Sa2VA with transformers; no remote code is run
from PIL import Image
from transformers import AutoModel, AutoProcessor

model = AutoModel.from_pretrained("<this folder>")
processor = AutoProcessor.from_pretrained("<this folder>")
image, text = Image.open("image.png"), "<image>Please segment the blood vessel."
result = model.predict_forward(image=image, text=text, processor=processor)
print(result["prediction"], [mask.shape for mask in result["prediction_masks"]])
```"""

TRAINED_PART = """```python
from PIL import Image
from rl_reward_network.models.lora import load_trainable
from rl_reward_network.models.sa2va import load_sa2va_model

model, processor = load_sa2va_model("{base}")
load_trainable(model, "<this folder>/trainable")
processor.max_tiles = {max_tiles}  # as in training
{resize}image, text = Image.open("image.png"), "<image>Please segment the blood vessel."
result = model.predict_forward(image=image, text=text, processor=processor)
print(result["prediction"], [mask.shape for mask in result["prediction_masks"]])
```"""

LORA_PART = """LoRA alone, without the other trained tensors, in peft:

```python
from peft import PeftModel
from rl_reward_network.models.sa2va import load_sa2va_model

model, processor = load_sa2va_model("{base}")
model = PeftModel.from_pretrained(model, "<this folder>/trainable")
```"""


def load_sa2va_model(
    path: str | Path,
    device: str = "cpu",
    use_flash_attn: bool = False,
    dtype: Dtype = "auto",
    quantization: Quantization | None = None,
) -> tuple[Sa2VAForConditionalGeneration, Sa2VAProcessor]:
    """Model and processor in one call; each tensor goes from its file to the device by itself.

    Args:
        path: local folder, embedded model, or hub id; either layout.
        device: "cpu", "cuda" or "cuda:INDEX".
        use_flash_attn: FlashAttention 2 in place of PyTorch's attention; CUDA only.
        dtype: of the weights; "auto" is bfloat16 on CUDA, float32 on the CPU.
        quantization: of the language model's blocks, in place of `dtype`; None leaves them as they are.

    Raises:
        ValueError: flash attention without CUDA or its package, an unavailable GPU, or an error of `from_pretrained`.
    """
    check_device(device)
    if use_flash_attn:
        check_flash_attn(device)
    model = Sa2VAForConditionalGeneration.from_pretrained(
        path,
        dtype=weight_dtype(device, dtype),
        attn_implementation="flash_attention_2" if use_flash_attn else "sdpa",
        device_map=device,
        quantization_config=None if quantization is None else bits_config(quantization),
    )
    return model, Sa2VAProcessor.from_pretrained(path)


def weight_dtype(device: str, dtype: Dtype = "auto") -> torch.dtype:
    """The dtype of Sa2VA's weights on a device."""
    if dtype == "auto":
        dtype = "bfloat16" if torch.device(device).type == "cuda" else "float32"
    return torch.float32 if dtype == "float32" else torch.bfloat16


def convert_weights(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert the parameters of a model in place, quantized ones excepted; rotary frequencies stay float32 buffers."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def check_flash_attn(device: str) -> None:
    """Raise a ValueError unless FlashAttention 2 can run on the device."""
    if torch.device(device).type != "cuda":
        raise ValueError(f"use_flash_attn needs a CUDA device, got device={device!r}; leave it out on a CPU")
    if find_spec("flash_attn") is None:
        raise ValueError("use_flash_attn: the package is not installed; pip install flash-attn, or leave the flag out")


def check_device(device: str) -> None:
    """Raise a ValueError for an unavailable GPU, or a string that is no device of this project (mps is none)."""
    if not (parts := re.fullmatch(r"cpu|cuda(?::(0|[1-9][0-9]*))?", device)):
        raise ValueError(f"device is {device!r}, expected cpu, cuda or cuda:INDEX")
    count = torch.cuda.device_count()
    if device != "cpu" and int(parts[1] or 0) >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
        remedy = f"give an index below {count}" if count else "give -1, the CPU"
        raise ValueError(
            f"device is {device!r}, but {count} GPUs are visible{shown}; {remedy}, as GPU or --gpu (in Python "
            "device='cpu'), or leave it out"
        )


def check_first_gpu(gpu: int | None) -> None:
    """Raise a ValueError for a GPU that is not the first visible one, which transformers' Trainer takes."""
    if gpu in (None, -1, 0):
        return
    name = str(gpu)
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):  # under SLURM; the index counts these alone
        check_device(f"cuda:{gpu}")
        name = visible.split(",")[gpu].strip()
    raise ValueError(f"gpu is {gpu}, expected 0 or -1; choose one by CUDA_VISIBLE_DEVICES={name}")


def convert_checkpoint(path: str, target: Path) -> tuple[str, int]:
    """Write a checkpoint in the other layout to a new folder; returns that layout and the number of tensors."""
    if target.exists():
        raise ValueError(f"target {target} exists; give a new folder")
    source = open_checkpoint(path)
    config, file = check_checkpoint(source), source.path / "config.json"
    if not source.original and config.original_config is None:
        raise ValueError(f"{file}: original_config is missing; this model has no official layout")
    tensors = (to_ours if source.original else to_original)(source.tensors(), config)
    with whole_folder(target) as folder:
        save_torch_state_dict(tensors, folder)
        _write_config(config, source, folder)
        # The tokenizer's files, no weights, configuration or code. A `tokenizer.model` is read once, for the official
        # layout has no tokenizer.json beside it.
        files = {file.name for file in source.path.iterdir()}
        for name in files - REWRITTEN - ({TOKENIZER_FILE} if MODEL_FILE in files else set()):
            if name.endswith((".json", ".txt", ".jinja")) or name == MODEL_FILE:
                shutil.copyfile(source.path / name, folder / name)
        if MODEL_FILE in files and source.original:
            source.tokenizer(config).backend_tokenizer.save(str(folder / TOKENIZER_FILE))
    return "ours" if source.original else "official layout", len(tensors)


def _write_config(config: Sa2VAConfig, source: CheckpointFolder, folder: Path) -> None:
    """Write the configuration in the layout that `source` does not have."""
    if source.original:
        config.architectures = ["Sa2VAForConditionalGeneration"]
        config.save_pretrained(folder)
        if config.family.body == "qwen_vl":
            name_processor(folder)
        return
    assert config.original_config is not None  # `convert_checkpoint` has checked it
    original = dict(config.original_config)
    part = "llm_config" if "llm_config" in original else "text_config"
    original[part] = {**original[part], "vocab_size": config.text_config.vocab_size}  # which may have been resized
    write_json(folder / "config.json", original)
    if (sizes := sam2_sizes(config.sam2_config)) not in (HIERA_L, SAM3_L):
        write_json(folder / f"sam{3 if config.has_sam3 else 2}_sizes.json", sizes)
