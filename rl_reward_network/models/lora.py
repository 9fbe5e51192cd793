"""What trains and what does not: LoRA on the language model, frozen parts, and their saving, loading and merging.

Source: bytedance/Sa2VA@9832e1a trains LoRA, mlp1, text_hidden_fcs and the mask decoder. Dropout must be 0 while
log-probabilities are taken for RL, or old, reference and new ones differ by noise.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_reward_network.artefacts import read_json, whole_folder

TARGETS = r"model\.language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
TRAINABLE = (
    "model.multi_modal_projector.",  # mlp1
    "text_hidden_fcs.",
    "grounding_encoder.mask_decoder.",  # conv_s0 and conv_s1 included
    "grounding_encoder.prompt_encoder.",
)
WEIGHTS, SETTINGS = "trainable.safetensors", "lora.json"


def setup_lora(model: PreTrainedModel, r: int = 128, lora_alpha: int = 256, lora_dropout: float = 0.05) -> None:
    """Put LoRA layers on the seven linear layers of each language-model block, in place; only they are trainable.

    Adapters are float32 whatever the model is: steps of RL size would round away in bfloat16.

    Raises:
        ValueError: the model has LoRA already, has no layer to put it on, r or alpha is not positive, or
            dropout is outside [0, 1).
    """
    if _lora_layers(model):
        raise ValueError("the model has LoRA layers already; merge_lora(model) first, or load a fresh one")
    if r < 1 or lora_alpha <= 0 or not 0 <= lora_dropout < 1:
        raise ValueError(
            f"r is {r}, lora_alpha {lora_alpha} and lora_dropout {lora_dropout}, expected r >= 1, lora_alpha > 0 and "
            "0 <= lora_dropout < 1"
        )
    if not any(re.fullmatch(TARGETS, name) for name, _ in model.named_modules()):
        raise ValueError(
            f"LoRA finds none of its layers in this model (names like {TARGETS}); name a Sa2VA whose language model is "
            "Qwen2, or whose layers are named so"
        )
    config = LoraConfig(r=r, lora_alpha=lora_alpha, lora_dropout=lora_dropout, target_modules=TARGETS, bias="none")
    model.add_adapter(config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    model.train(model.training)  # peft makes its layers in training mode: dropout would be live in an evaluated model


def freeze_parameters(model: PreTrainedModel) -> None:
    """Freeze vision tower, language-model base and SAM 2's image encoder; leave LoRA and `TRAINABLE` to train."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or name.startswith(TRAINABLE))


def parameter_table(model: nn.Module) -> list[tuple[str, int, int]]:
    """(part, parameters, trainable parameters) for each part of the model, in the order of the forward pass."""
    parts = {
        "vision tower": "model.vision_tower.",
        "mlp1": "model.multi_modal_projector.",
        "language model": "model.language_model.",
        "lm_head": "lm_head.",
        "text_hidden_fcs": "text_hidden_fcs.",
        "SAM 2 image encoder": "grounding_encoder.vision_encoder.",
        "SAM 2 prompt encoder": "grounding_encoder.prompt_encoder.",
        "SAM 2 mask decoder": "grounding_encoder.mask_decoder.",
    }
    rows = []
    rest = dict(model.named_parameters())
    for part, prefix in parts.items():
        own = [rest.pop(name) for name in list(rest) if name.startswith(prefix) and "lora_" not in name]
        rows.append((part, _count(own), _count(p for p in own if p.requires_grad)))
    lora = [rest.pop(name) for name in list(rest) if "lora_" in name]
    for part, own in (("LoRA", lora), ("SAM 2 memory", list(rest.values()))):
        rows.append((part, _count(own), _count(p for p in own if p.requires_grad)))
    return rows


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def unreached_parameters(model: nn.Module, losses: Iterable[Tensor]) -> list[str]:
    """Names of trainable parameters that no loss gives a gradient to, found by one backward pass each.

    A gradient of exactly 0 everywhere counts as none, but for `lora_A`: it starts at 0 because `lora_B` is 0.
    """
    model.zero_grad(set_to_none=True)
    for loss in losses:
        loss.backward()
    names = []
    for name, parameter in model.named_parameters():
        zero = parameter.grad is None or ("lora_A" not in name and not parameter.grad.any())
        if parameter.requires_grad and zero:
            names.append(name)
    model.zero_grad(set_to_none=True)
    return names


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies on the CPU of LoRA and every other trainable tensor, by name."""
    return {
        name: parameter.detach().cpu().clone().contiguous()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or "lora_" in name
    }


def save_trainable(model: PreTrainedModel, folder: Path) -> None:
    """Write what was trained, and LoRA's sizes, as a folder that appears whole."""
    settings = _lora_settings(model) if _lora_layers(model) else None
    with whole_folder(folder) as temporary:
        save_file(trainable_state(model), temporary / WEIGHTS)
        (temporary / SETTINGS).write_text(json.dumps(settings) + "\n", encoding="utf-8")


def load_trainable(model: PreTrainedModel, folder: Path) -> None:
    """Put saved tensors back, adding LoRA layers of the saved sizes where the model has none.

    Raises:
        ValueError: a file is missing or broken, or a tensor does not fit the model.
    """
    settings = read_json(folder / SETTINGS)
    try:
        state = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{folder / WEIGHTS}: not a whole safetensors file ({error})") from error
    if settings and not _lora_layers(model):
        setup_lora(model, **settings)
    elif settings and (found := _lora_settings(model)) != settings:
        raise ValueError(f"{folder / SETTINGS}: the adapter is of {settings}, the model's LoRA layers of {found}")
    own = dict(model.named_parameters())
    wrong = [name for name, tensor in state.items() if name not in own or own[name].shape != tensor.shape]
    wrong += [name for name in own if "lora_" in name and name not in state]
    if wrong:
        raise ValueError(f"{folder / WEIGHTS}: {len(wrong)} tensors do not fit this model, first {wrong[:3]}")
    with torch.no_grad():
        for name, tensor in state.items():
            own[name].copy_(tensor)


def merge_lora(model: PreTrainedModel) -> None:
    """Add LoRA into the base weights and take its layers out; outputs stay the same to rounding."""
    for name, layer in _lora_layers(model):
        layer.merge()
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    model._hf_peft_config_loaded = False
    if hasattr(model, "peft_config"):
        del model.peft_config


@contextmanager
def lora_off(model: nn.Module) -> Iterator[None]:
    """LoRA adds nothing inside the block; peft's own switch would also flip requires_grad."""
    layers = [layer for _, layer in _lora_layers(model)]
    before = [dict(layer.scaling) for layer in layers]
    try:
        for layer in layers:
            layer.scaling.update(dict.fromkeys(layer.scaling, 0.0))
        yield
    finally:
        for layer, scaling in zip(layers, before, strict=True):
            layer.scaling.update(scaling)


def _lora_settings(model: PreTrainedModel) -> dict[str, Any]:
    config: Any = model.peft_config["default"]
    return {"r": config.r, "lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout}


def _lora_layers(model: nn.Module) -> list[tuple[str, LoraLayer]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]
