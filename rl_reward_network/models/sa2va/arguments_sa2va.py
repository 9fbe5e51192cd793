"""The arguments of transformers' `from_pretrained` that a Sa2VA takes, and quantization.

- `dtype`, `torch_dtype`: of the weights in memory: a torch.dtype, its name, "auto" (the files'); None is float32
- `device_map`: one device for the whole model: "cpu", "cuda:0", 0, {"": 0}; "auto" is the first GPU, or the CPU where
  there is none
- `quantization_config`: a BitsAndBytesConfig: the blocks of the language model in 4 or 8 bit, the rest in `dtype`
- `attn_implementation`: "sdpa", "eager", "flash_attention_2"; `use_flash_attn=True` of the official models is the last
- `cache_dir`, `token`, `revision`, `local_files_only`, `force_download`: of a download from the hub
- `low_cpu_mem_usage`, `trust_remote_code`, `use_safetensors`: without effect: weights are read one by one from
  safetensors, and remote code is never run
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import BitsAndBytesConfig

Quantization = Literal["4bit", "8bit"]
GIB = 2**30

HUB = ("cache_dir", "token", "revision", "local_files_only", "force_download")
WITHOUT_EFFECT = ("low_cpu_mem_usage", "trust_remote_code", "use_safetensors")
OF_TRANSFORMERS = ("adapter_kwargs", "code_revision", "use_fast", "backend", "weights_only")  # of Auto classes
SUPPORTED = ("dtype", "device_map", "quantization_config", "attn_implementation", *HUB)
# Everything but the blocks of the language model: what makes masks must stay exact.
NOT_QUANTIZED = [
    *("model.vision_tower", "model.visual", "model.multi_modal_projector", "lm_head"),
    *("text_hidden_fcs", "grounding_encoder", "side_network"),
]
BLOCKS = "model.language_model.layers."


@dataclass(frozen=True)
class LoadingArguments:
    """How a model is read."""

    dtype: torch.dtype | None  # of the weights; None is that of the files
    attn_implementation: str
    device: torch.device
    quantization: BitsAndBytesConfig | None  # of the language model's blocks
    hub: dict[str, Any] = field(default_factory=dict)  # of a download


def read_arguments(
    dtype: torch.dtype | str | None = None,
    attn_implementation: str | None = None,
    device_map: Any = None,
    quantization_config: Any = None,
    torch_dtype: torch.dtype | str | None = None,
    use_flash_attn: bool | None = None,
    **others: Any,
) -> LoadingArguments:
    """The arguments of `from_pretrained`; a ValueError for one that is not supported, or whose value is not."""
    hub = hub_arguments(others)
    quantization = None if quantization_config is None else language_model_in_bits(quantization_config)
    default = torch.bfloat16 if quantization else torch.float32
    given = torch_dtype if dtype is None else dtype
    named = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given or default
    if given != "auto" and not (isinstance(named, torch.dtype) and named.is_floating_point):
        raise ValueError(f"dtype is {given!r}, expected a floating-point torch.dtype, its name, or 'auto'")
    attention = attn_implementation or ("flash_attention_2" if use_flash_attn else "sdpa")
    return LoadingArguments(None if given == "auto" else named, attention, one_device(device_map), quantization, hub)


def hub_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a download; a ValueError unless the others are without effect."""
    for name in arguments:
        if name not in (*HUB, *WITHOUT_EFFECT, *OF_TRANSFORMERS) and not name.startswith("_"):
            raise ValueError(
                f"from_pretrained: {name} is not supported, as a Sa2VA is read whole, from safetensors, to one device; "
                f"leave it out (supported are {', '.join(SUPPORTED)})"
            )
    return {name: value for name, value in arguments.items() if name in HUB and value is not None}


def one_device(device_map: Any) -> torch.device:
    """The device of a `device_map`; a ValueError for one that divides the model, or offloads a part of it."""
    if isinstance(device_map, str) and device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    places = device_map.values() if isinstance(device_map, Mapping) else ["cpu" if device_map is None else device_map]
    names = {f"cuda:{place}" if isinstance(place, int) else str(place) for place in places}
    try:
        (name,) = names
        return torch.device(name)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"device_map is {device_map!r}, expected one device for the whole model, such as 'cuda:0', or 'auto'"
        ) from error


def check_fits(arguments: LoadingArguments, shapes: Mapping[str, Iterable[int]]) -> None:
    """Raise a ValueError where weights of these shapes, by our names, do not fit into the free memory of the GPU."""
    needed, whole = 0.0, (arguments.dtype or torch.bfloat16).itemsize
    for name, shape in shapes.items():
        bits = arguments.quantization if name.startswith(BLOCKS) else None
        needed += torch.Size(tuple(shape)).numel() * (whole if bits is None else 0.5 if bits.load_in_4bit else 1)
    free, _ = torch.cuda.mem_get_info(arguments.device)
    if needed > free:
        smaller = "dtype=torch.bfloat16" if arguments.dtype == torch.float32 else "quantization_config"
        raise ValueError(
            f"the weights take {needed / GIB:.1f} GiB, but {arguments.device} has {free / GIB:.1f} GiB free; give "
            f"{smaller}, another device or device_map='cpu'"
        )


# ---- quantization ----


def bits_config(quantization: Quantization) -> BitsAndBytesConfig:
    """QLoRA's settings for 4 bit (NF4, constants quantized as well, computing in bfloat16), or LLM.int8() for 8.

    Source: Dettmers et al. 2023 (arXiv:2305.14314); Dettmers et al. 2022 (arXiv:2208.07339).
    """
    if quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def language_model_in_bits(config: Any) -> BitsAndBytesConfig:
    """The configuration for the blocks of the language model alone; a ValueError for another kind of quantization."""
    if isinstance(config, dict):
        config = BitsAndBytesConfig.from_dict(config)
    if not isinstance(config, BitsAndBytesConfig) or not (config.load_in_4bit or config.load_in_8bit):
        raise ValueError(
            f"quantization_config is a {type(config).__name__}, expected a BitsAndBytesConfig with load_in_4bit or "
            "load_in_8bit"
        )
    check_bits()
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # a line for each layer in bfloat16
    skipped = {*NOT_QUANTIZED, *(config.llm_int8_skip_modules or [])}
    return BitsAndBytesConfig.from_dict({**config.to_dict(), "llm_int8_skip_modules": sorted(skipped)})


def check_bits() -> None:
    """Raise a ValueError where bitsandbytes is not installed."""
    if find_spec("bitsandbytes") is None:
        raise ValueError(
            "4 and 8 bit need bitsandbytes, which is not installed; pip install -e '.[quantization]', or leave them out"
        )


def full_size(parameter: Tensor) -> int:
    """Number of weights of a parameter; one of 4 bit holds two in each element."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else torch.Size(state.shape).numel()
