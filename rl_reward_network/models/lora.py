"""LoRA on the language model: setting up, freezing the rest, saving, loading and merging; and adapters of peft.

A folder of trained tensors holds LoRA in the format of peft (`adapter_config.json`, `adapter_model.safetensors`), all
other trained tensors under the model's names (`trainable.safetensors`), and LoRA's sizes with the type of the language
model and the sizes of a side network (`lora.json`). Which layers get LoRA, and what trains beside it, is part of the
model's family (`families.FAMILIES`).

Source: bytedance/Sa2VA@06912e2. Dropout must be 0 in RL, or the log-probabilities of the old, reference and new policy
differ by its noise.
"""

import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_reward_network.atomic_io import read_json, whole_folder
from rl_reward_network.models.sa2va.arguments_sa2va import full_size
from rl_reward_network.models.sa2va.checkpoint_sa2va import check_shapes
from rl_reward_network.models.sa2va.families import EMBEDDINGS, ENCODER, ENCODER_LORA_TARGETS
from rl_reward_network.models.sa2va.side_network import side_network_config
from rl_reward_network.models.weights import check_finite, read_tensors

WEIGHTS, SETTINGS, LANGUAGE, SIDE = "trainable.safetensors", "lora.json", "model_type", "side_network"
PEFT_WEIGHTS, PEFT_CONFIG, PEFT_PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."
FOREIGN = "merge it into the weights by peft (merge_and_unload), and put ours on the merged model"
# Fields of peft's configuration that say where an adapter comes from, not what it computes.
ORIGIN = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"}
PICKLED = "adapter_model.bin"  # of older versions of peft
# Names of a language model's layers, whatever it was wrapped in: InternVL and Sa2VA train it as a model of its own.
OF_LANGUAGE_MODEL = re.compile(
    r"(?:(?:base_model|model|language_model|mllm)\.)*(?=(?:layers\.\d+|embed_tokens|norm)\.)"
)
PARAMETER = re.compile(r"\.(lora_|ia3_)\w+(\.(weight|bias))?$")  # behind the name of an adapted layer
REMEDY = "give the model that it was trained on, in our layout (sa2va-rl convert)"


def setup_lora(
    model: PreTrainedModel,
    r: int = 128,
    lora_alpha: int = 256,
    lora_dropout: float = 0.05,
    encoder_r: int | None = None,
) -> None:
    """Put LoRA layers on the linear layers of each language-model block, in place; only they are trainable.

    With `encoder_r` also on those of each block of SAM 2's image encoder, of this rank and twice the alpha. Adapters
    are float32 for any dtype of the model: bfloat16 would round the small steps of RL to nothing.

    Raises:
        ValueError: the model has LoRA already, has no layer to put it on, or a setting is out of its range.
    """
    if _lora_layers(model):
        raise ValueError("the model has LoRA layers already; merge_lora(model) first, or load a fresh one")
    ranks = [r] if encoder_r is None else [r, encoder_r]
    if min(ranks) < 1 or lora_alpha <= 0 or not 0 <= lora_dropout < 1:
        raise ValueError(
            f"r is {r}, lora_alpha {lora_alpha}, lora_dropout {lora_dropout} and encoder_r {encoder_r}, expected ranks "
            "of 1 or more, lora_alpha > 0 and 0 <= lora_dropout < 1"
        )
    targets = model.config.family.lora_targets
    if not any(re.fullmatch(targets, name) for name, _ in model.named_modules()):
        raise ValueError(
            f"the model has no layer for LoRA (names like {targets}); give a Sa2VA whose language model has such layers"
        )
    config = _lora_config(model, encoder_r, r=r, lora_alpha=lora_alpha, lora_dropout=lora_dropout)
    model.add_adapter(config)
    config.base_model_name_or_path = None  # transformers writes the word "None" for a model without a hub name
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    model.train(model.training)  # peft's new layers are in training mode, whatever the model's mode is


def freeze_parameters(model: PreTrainedModel, freeze_embeddings: bool = False, train_encoder: bool = False) -> None:
    """Freeze all parameters except LoRA and the family's `trainable`.

    On demand a Qwen-VL's embeddings are frozen, too, or SAM 2's image encoder is trained.
    """
    frozen = EMBEDDINGS if freeze_embeddings else ()
    trainable = tuple(name for name in model.config.family.trainable if name not in frozen)
    trainable += (ENCODER,) if train_encoder else ()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or name.startswith(trainable))


def parameter_table(model: nn.Module) -> list[tuple[str, int, int]]:
    """(part, parameters, trainable parameters) for each part of the model, in the order of the forward pass."""
    parts: dict[str, str | tuple[str, ...]] = {
        "merger": ("model.visual.merger.", "model.visual.deepstack_merger_list."),  # of a Qwen-VL
        "vision tower": ("model.vision_tower.", "model.visual."),
        "mlp1": "model.multi_modal_projector.",
        "language model": ("model.language_model.", "lm_head.norm."),  # its final norm is in a Qwen3-VL's head
        "lm_head": "lm_head.",
        "text_hidden_fcs": "text_hidden_fcs.",
        "SAM 2 image encoder": "grounding_encoder.vision_encoder.",
        "SAM 2 prompt encoder": "grounding_encoder.prompt_encoder.",
        "SAM 2 mask decoder": "grounding_encoder.mask_decoder.",
        "side network": "side_network.",
    }
    members: dict[str, list[Tensor]] = {part: [] for part in ("vision tower", *parts, "LoRA", "SAM 2 memory")}
    for name, parameter in model.named_parameters():
        part = next((part for part, prefix in parts.items() if name.startswith(prefix)), "SAM 2 memory")
        members["LoRA" if "lora_" in name and part != "SAM 2 image encoder" else part].append(parameter)
    absent = ["mlp1" if members["merger"] else "merger"]  # an InternVL has one, a Qwen-VL the other
    absent += [] if members["side network"] else ["side network"]
    return [
        (part, sum(map(full_size, tensors)), sum(p.numel() for p in tensors if p.requires_grad))
        for part, tensors in members.items()
        if part not in absent
    ]


def unreached_parameters(model: nn.Module, losses: Iterable[Tensor]) -> list[str]:
    """Names of trainable parameters without a gradient after one backward pass of each loss.

    A gradient that is 0 everywhere counts as none, except behind a layer that begins at 0: `lora_A` is behind `lora_B`,
    and a side network behind its last layer.
    """
    model.zero_grad(set_to_none=True)
    for loss in losses:
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    flags = torch.stack([gradient.any() for gradient in gradients.values()]).tolist() if gradients else []
    reached = dict(zip(gradients, flags, strict=True))
    side = reached.get("side_network.head.weight", False)
    for name in reached:
        reached[name] |= "lora_A" in name or (side and name.startswith("side_network."))
    model.zero_grad(set_to_none=True)
    return [name for name, p in model.named_parameters() if p.requires_grad and not reached.get(name)]


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies on the CPU of LoRA and every other trainable tensor, by name."""
    return {
        name: parameter.detach().cpu().clone().contiguous()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or "lora_" in name
    }


def save_trainable(model: PreTrainedModel, folder: Path) -> None:
    """Write LoRA and other trained tensors as a folder that appears whole; a ValueError for a foreign adapter."""
    settings = _lora_settings(model) if getattr(model, "peft_config", None) else None
    state = trainable_state(model)
    # peft's names, without the adapter's: x.lora_A.default.weight -> base_model.model.x.lora_A.weight
    names = {name: PEFT_PREFIX + name.replace(".default.", ".") for name in state if "lora_" in name}
    lora = {peft_name: state.pop(name) for name, peft_name in names.items()}
    with whole_folder(folder) as temporary:
        save_file(state, temporary / WEIGHTS)
        if lora:
            save_file(lora, temporary / PEFT_WEIGHTS)
            model.peft_config["default"].save_pretrained(str(temporary))
        if settings:
            settings |= {LANGUAGE: model.config.text_config.model_type}
        if model.config.side_network:
            settings = {**(settings or {}), SIDE: model.config.side_network}
        (temporary / SETTINGS).write_text(json.dumps(settings) + "\n", encoding="utf-8")


def read_trainable(folder: Path) -> dict[str, Tensor]:
    """The tensors that `save_trainable` wrote, by the model's names; errors as `read_tensors`."""
    state = read_tensors(folder / WEIGHTS)
    if (folder / PEFT_WEIGHTS).exists():
        for name, tensor in read_tensors(folder / PEFT_WEIGHTS).items():
            state[re.sub(r"\.(lora_[AB])\.", r".\1.default.", name.removeprefix(PEFT_PREFIX))] = tensor
    return state


def load_trainable(model: Any, folder: str | Path) -> None:
    """Load saved tensors into a model; LoRA layers and a side network of the saved sizes are added where it has none.

    A ValueError for a broken file, or one of another model, or of an adapter that `setup_lora` does not make.
    """
    folder = Path(folder)
    settings: dict[str, Any] = read_json(folder / SETTINGS) or {}  # of `setup_lora`; empty without LoRA
    side, language = settings.pop(SIDE, None), model.config.text_config.model_type
    if settings and (trained_on := settings.pop(LANGUAGE, None)) != language:
        raise ValueError(
            f"{folder / SETTINGS}: the adapter is of a {trained_on!r} language model, this model has a {language!r}; "
            "give the model that the adapter was trained on"
        )
    if side is not None:
        model.add_side_network(side_network_config(side, str(folder / SETTINGS)))
    state = read_trainable(folder)
    if settings:
        config = _lora_config(model, **settings)
        _check_adapter(f"{folder / PEFT_CONFIG}: the adapter", read_json(folder / PEFT_CONFIG), config)
    if settings and not getattr(model, "peft_config", None):
        setup_lora(model, **settings)
    elif settings and (present := _lora_settings(model)) != settings:
        raise ValueError(f"{folder / SETTINGS}: the adapter is of {settings}, the model's LoRA layers of {present}")
    parameters = dict(model.named_parameters())
    wrong = [name for name, tensor in state.items() if name not in parameters or parameters[name].shape != tensor.shape]
    wrong += [name for name in parameters if "lora_" in name and name not in state]
    if wrong:
        raise ValueError(
            f"{folder / WEIGHTS}: {len(wrong)} tensors do not fit this model, first {wrong[:3]}; give the model that "
            "they were trained on"
        )
    with torch.no_grad():
        for name, tensor in state.items():
            parameters[name].copy_(tensor)


def merge_lora(model: PreTrainedModel) -> None:
    """Add LoRA to the base weights and remove its layers; outputs stay the same to rounding."""
    for name, layer in _lora_layers(model):
        layer.merge()
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    model._hf_peft_config_loaded = False
    vars(model).pop("peft_config", None)


@contextmanager
def lora_off(model: nn.Module) -> Iterator[None]:
    """Inside the block, LoRA adds nothing; peft's own switch would also change `requires_grad`."""
    before = [(layer.scaling, dict(layer.scaling)) for _, layer in _lora_layers(model)]
    try:
        for scaling, _ in before:
            scaling.update(dict.fromkeys(scaling, 0.0))
        yield
    finally:
        for scaling, saved in before:
            scaling.update(saved)


def _lora_config(model: PreTrainedModel, encoder_r: int | None = None, **settings: Any) -> LoraConfig:
    """The one kind of adapter that this project makes, from the arguments of `setup_lora`."""
    targets = model.config.family.lora_targets
    if encoder_r is not None:
        targets = f"{targets}|{ENCODER_LORA_TARGETS}"
        settings["rank_pattern"] = {ENCODER_LORA_TARGETS: encoder_r}
        settings["alpha_pattern"] = {ENCODER_LORA_TARGETS: 2 * encoder_r}
    return LoraConfig(target_modules=targets, bias="none", **settings)


def _lora_settings(model: PreTrainedModel) -> dict[str, Any]:
    """The arguments of `setup_lora` that a model's LoRA layers were made with; a ValueError for other adapters."""
    configs: dict[str, Any] = model.peft_config
    if list(configs) != ["default"]:
        raise ValueError(f"the model's adapters are {sorted(configs)}, expected one, 'default'; {FOREIGN}")
    present = configs["default"].to_dict()
    settings = {name: present.get(name) for name in ("r", "lora_alpha", "lora_dropout")}
    if (encoder_r := (present.get("rank_pattern") or {}).get(ENCODER_LORA_TARGETS)) is not None:
        settings["encoder_r"] = encoder_r
    _check_adapter("the model's adapter", present, _lora_config(model, **settings))
    return settings


def _check_adapter(name: str, found: Mapping[str, Any], ours: LoraConfig) -> None:
    """Raise a ValueError that lists where peft's fields, `found` or their defaults, differ from our adapter's."""
    expected = ours.to_dict()
    present = LoraConfig().to_dict() | dict(found)
    if present["init_lora_weights"] in (False, "gaussian"):  # other ways to begin change the base weights, too
        present["init_lora_weights"] = True
    differences = [
        f"{field} is {present.get(field)!r}, expected {expected.get(field)!r}"
        for field in sorted(present.keys() - ORIGIN)
        if (present[field] or None) != (expected.get(field) or None)
    ]
    if differences:
        raise ValueError(f"{name} is none of setup_lora: {'; '.join(differences)}; {FOREIGN}")


def _lora_layers(model: nn.Module) -> list[tuple[str, LoraLayer]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


# ---- adapters of peft ----


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter of peft, and not the LoRA part of a run of ours."""
    return (folder / PEFT_CONFIG).is_file() and not (folder / WEIGHTS).exists()


def merge_adapter(model: Any, folder: Path) -> None:
    """Add an adapter of peft to the weights of a model, in place; pickled tensors are read without running code.

    A ValueError for a missing or damaged file, or an adapter that was trained on a model with other layers.
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
