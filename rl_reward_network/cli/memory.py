"""Memory of loading, segmenting and training by config.json: what has a size is counted, the rest was measured."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from rl_reward_network.grpo.policy import prepare_model
from rl_reward_network.grpo.settings import LORA_R, OF_LABELS, GRPOSettings, with_preset
from rl_reward_network.models.ema import trainable_tensors
from rl_reward_network.models.sa2va.arguments_sa2va import BLOCKS
from rl_reward_network.models.sa2va.configuration_sa2va import Sa2VAConfig
from rl_reward_network.models.sa2va.loading_sa2va import weight_dtype
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration

GIB = 2**30
SIZES = (24 * 896, 36 * 2048)  # layers x width of the language models of Sa2VA-1B and 4B, to which activations grow
# GiB of these two beside what is counted: peak - weights - what trains, by docs/results.md "On a GPU": bfloat16, one
# tile of 512 x 512 pixels, 11 prompts, 8 captions of 24 tokens on 2 images. Equal numbers were measured of 1B alone.
MEASURED: dict[str, tuple[float, float]] = {
    "load": (0.07, 0.07),
    "segment": (0.47, 0.47),
    "grpo": (1.1, 3.0),
    "grpo, 8-bit AdamW": (1.2, 3.0),
    "grpo, 4 bit": (1.0, 3.5),
    "supervised": (1.1, 3.1),
    "gradient checkpointing": (0.4, 0.7),
}
GROUPS, CAPTION_TOKENS, OTHER_TOKENS = 2, 4 * 24, 496  # of that step; of a group; the last: of image and questions
CONTEXT, PROCESS = 0.6, 0.55  # GiB of CUDA, which torch does not count; of Python with torch, in main memory
MOMENTS = {"adamw_8bit": 0.5, "paged_adamw_8bit": 0.5, "adafactor": 0.0, "sgd": 0.0}  # of what trains; AdamW has 2
BYTES_OF_BITS = {"4bit": (4 + 0.127) / 8, "8bit": 1.002}  # NF4 with 8-bit constants (arXiv:2305.14314); LLM.int8()
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))  # of a container


class Counted(NamedTuple):
    """Layers x width of the language model, and bytes; `blocks` are its linear layers, their parameters and bytes."""

    size: int
    weights: int
    files: int  # where their dtype differs: they count until all are read
    blocks: tuple[int, int]
    trained: int  # float32
    added: int  # by LoRA, by float32 in place of the weights' dtype, and by the reference of what trains beside LoRA


def count(config: Sa2VAConfig, device: str, small: bool, freeze_embeddings: bool = False) -> Counted:
    """Count on the meta device, which has no values; a `small` model is of the embedded one's size."""
    r, text = LORA_R["small" if small else "large"], config.text_config
    dtype = weight_dtype(device, "auto")
    stored: Any = config.dtype or torch.bfloat16  # of the released weights, where config.json does not say it
    with torch.device("meta"):
        model: Any = Sa2VAForConditionalGeneration(config)
        model.to(dtype)
        weights, number = _bytes(model), sum(p.numel() for p in model.parameters())
        blocks = [p for name, p in model.named_parameters() if name.startswith(BLOCKS) and p.dim() == 2]
        quantizable = sum(p.numel() for p in blocks), sum(p.nbytes for p in blocks)
        files = 0 if stored == dtype else number * stored.itemsize
        prepare_model(model, r, 2 * r, freeze_embeddings)
    trained = {name: tensor.nbytes for name, tensor in trainable_tensors(model).items()}
    added = _bytes(model) - weights + sum(size for name, size in trained.items() if "lora_" not in name)
    size = text.num_hidden_layers * text.hidden_size
    return Counted(size, weights, files, quantizable, sum(trained.values()), added)


def _bytes(model: torch.nn.Module) -> int:
    saved = model.state_dict().keys()
    tensors = [*model.parameters(), *(tensor for name, tensor in model.named_buffers() if name in saved)]
    return sum(tensor.nbytes for tensor in tensors)


def base_gib(counted: Counted, device: str) -> float:
    """GiB before anything is computed."""
    return counted.weights / GIB + (CONTEXT if device == "cuda" else PROCESS + counted.files / GIB)


def train_gib(counted: Counted, device: str, settings: GRPOSettings, bits: str | None = None) -> float:
    """GiB of training at its peak; `settings` are complete, `bits` are those of `--quantization`."""
    labels = settings.objective in OF_LABELS
    copies = 1 + MOMENTS.get(str(settings.optim), 2.0) + (device != "cpu") * 0.5  # gradients; 0.5: by autocast
    copies += settings.ema_decay > 0 and settings.objective != "supervised"
    saved = counted.blocks[1] - counted.blocks[0] * BYTES_OF_BITS[bits] if bits else 0.0
    name = "grpo, 4 bit" if bits else "grpo, 8-bit AdamW" if "8bit" in str(settings.optim) else "grpo"
    name = "gradient checkpointing" if settings.activation_checkpointing else "supervised" if labels else name
    tokens = OTHER_TOKENS + settings.num_generations * int(settings.max_completion_length or 1)
    step = _measured(counted.size, name, device) * (1.0 if labels else tokens / (OTHER_TOKENS + CAPTION_TOKENS))
    groups = max(1, int(settings.per_device_train_batch_size or 1) // settings.num_generations)
    return base_gib(counted, device) + (counted.added + copies * counted.trained - saved) / GIB + step * groups / GROUPS


def _measured(size: int, name: str, device: str) -> float:
    """Linear through both `SIZES`, below the smaller one in proportion; CPU kernels widen bfloat16."""
    small, large = MEASURED[name]
    grown = small * min(1, size / SIZES[0]) + (large - small) * max(0, size - SIZES[0]) / (SIZES[1] - SIZES[0])
    return grown * (2 if device == "cpu" else 1)


def needed_gib(config: Sa2VAConfig, device: str, small: bool) -> dict[str, float]:
    """GiB of each stage by the defaults of full training, and of training with each flag that lowers them."""
    counted = count(config, device, small)
    needed = {
        stage: base_gib(counted, device) + _measured(counted.size, stage, device) for stage in ("load", "segment")
    }
    plain = with_preset(GRPOSettings(), "full", small)
    half = int(plain.per_device_train_batch_size or 2) // 2
    needed["train"] = train_gib(counted, device, plain)
    for flags, changes in {
        "--gradient_checkpointing": {"activation_checkpointing": True},
        "--optim adamw_8bit": {"optim": "adamw_8bit"},
        f"--batch_size {half} --gradient_accumulation_steps 2": {"per_device_train_batch_size": half},
        "--objective supervised": {"objective": "supervised"},
    }.items():
        changed: Any = changes
        needed[f"train {flags}"] = train_gib(counted, device, with_preset(GRPOSettings(**changed), "full", small))
    less = replace(plain, activation_checkpointing=True)
    if device == "cuda":
        needed["train --quantization 4bit"] = train_gib(counted, device, plain, "4bit")
        needed["train --gradient_checkpointing --quantization 4bit"] = train_gib(counted, device, less, "4bit")
    if config.family.body == "qwen_vl":
        frozen = count(config, device, small, freeze_embeddings=True)
        needed["train --gradient_checkpointing --freeze_embeddings"] = train_gib(frozen, device, less)
    return needed


def available_gib(device: str) -> float:
    """Memory of this machine (of a container, its limit) or of its first GPU, in GiB; ValueError without a GPU."""
    if device == "cpu":
        limits = [file.read_text().strip() for file in LIMITS if file.is_file()]
        return min([psutil.virtual_memory().total, *map(int, filter(str.isdigit, limits))]) / GIB
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no GPU; give its memory: --memory_gib 24")
    return torch.cuda.get_device_properties(0).total_memory / GIB
