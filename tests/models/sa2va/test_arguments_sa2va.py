"""transformers' arguments of `from_pretrained` are taken, or refused with one sentence; masks are not quantized."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, GPTQConfig

import rl_reward_network.models.sa2va.checkpoint_sa2va as checkpoints
from rl_reward_network.atomic_io import weights_fingerprint
from rl_reward_network.models.lora import parameter_table
from rl_reward_network.models.sa2va import Sa2VAForConditionalGeneration, Sa2VAProcessor
from rl_reward_network.models.sa2va.arguments_sa2va import (
    NOT_QUANTIZED,
    bits_config,
    full_size,
    language_model_in_bits,
    one_device,
    read_arguments,
)
from rl_reward_network.models.sa2va.checkpoint_sa2va import EMBEDDED

NANO = EMBEDDED["sa2va-nano"]
load = Sa2VAForConditionalGeneration.from_pretrained
BITS = {"4bit": "Linear4bit", "8bit": "Linear8bitLt"}


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "bfloat16"},
        {"torch_dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "low_cpu_mem_usage": True, "use_safetensors": True, "trust_remote_code": False},
        {"dtype": "bfloat16", "device_map": "auto", "use_flash_attn": False, "token": None, "revision": "main"},
        {"torch_dtype": "bfloat16", "device_map": {"": "cpu"}, "local_files_only": True, "cache_dir": "cache"},
    ],
    ids=str,
)
def test_arguments_of_transformers_are_taken(arguments: dict[str, Any]) -> None:
    model = AutoModelForImageTextToText.from_pretrained(NANO, **arguments)
    assert (model.dtype, model.device.type, model.config._attn_implementation) == (torch.bfloat16, "cpu", "sdpa")


def test_auto_is_the_dtype_of_the_files() -> None:
    assert load(NANO, dtype="auto").dtype == load(NANO).config.dtype
    assert load(NANO).dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"load_in_4bit": True}, "load_in_4bit is not supported: give quantization_config"),
        ({"max_memory": {0: "10GiB"}}, "max_memory is not supported: a Sa2VA stays whole on one device"),
        ({"offload_folder": "offload"}, "offload_folder is not supported"),
        ({"device_map": {"model": 0, "lm_head": "cpu"}}, "a Sa2VA stays whole on one device"),
        ({"device_map": {"": "disk"}}, "a Sa2VA stays whole on one device"),
        ({"device_map": "fastest"}, "device_map is 'fastest', expected one device"),
        ({"dtype": torch.bfloat16, "torch_dtype": torch.float32}, "give one of them"),
        ({"dtype": "int4"}, "dtype is 'int4', expected a floating-point torch.dtype"),
        ({"use_safetensors": False}, "pickled weights are not read"),
        ({"subfolder": "model"}, "subfolder is not supported"),
        ({"use_flash_attn": True, "attn_implementation": "eager"}, "give one of them"),
        ({"quantization_config": GPTQConfig(4, dataset="c4")}, "expected a BitsAndBytesConfig"),
        ({"low_memory": True}, "'low_memory' is no argument of a Sa2VA"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_others_are_refused_by_one_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        load(NANO, **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("device_map", "device"),
    [
        *((None, "cpu"), ("cpu", "cpu"), (0, "cuda:0"), ("cuda:1", "cuda:1"), (torch.device("cuda", 1), "cuda:1")),
        *(({"": 0}, "cuda:0"), ({"model": "cuda:0", "lm_head": "cuda:0"}, "cuda:0")),
    ],
)
def test_a_device_map_names_one_device(device_map: Any, device: str) -> None:
    assert one_device(device_map) == torch.device(device)


def test_auto_is_the_first_gpu_and_refused_where_the_weights_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**20, 2**20))
    assert one_device("auto") == torch.device("cuda:0")
    with pytest.raises(ValueError, match=r"the weights take 0\.0 GiB, but cuda:0 has 0\.0 GiB free"):
        load(NANO, device_map="auto")


def test_a_processor_of_a_hub_id_fetches_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, allow_patterns: list[str], **hub: Any) -> str:
        asked.update(hub, name=name, patterns=allow_patterns)
        return str(NANO)

    monkeypatch.setattr(checkpoints, "snapshot_download", download)
    Sa2VAProcessor.from_pretrained("owner/name", revision="v1", token="secret", local_files_only=True)
    assert not any("safetensors" in pattern for pattern in asked["patterns"])
    assert asked.items() >= {"revision": "v1", "token": "secret", "local_files_only": True}.items()
    load("owner/name", cache_dir="cache")
    assert any("safetensors" in pattern for pattern in asked["patterns"])
    assert asked["cache_dir"] == "cache"


def test_without_the_package_quantization_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr("rl_reward_network.models.sa2va.arguments_sa2va.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[quantization\]'"):
        load(NANO, quantization_config=bits_config("4bit"))


def test_what_is_passed_on_leaves_everything_but_the_language_models_blocks_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rl_reward_network.models.sa2va.arguments_sa2va.check_bits", lambda: None)
    config = language_model_in_bits({"load_in_8bit": True, "llm_int8_skip_modules": ["down_proj"]})
    assert config.load_in_8bit
    assert config.llm_int8_skip_modules == sorted([*NOT_QUANTIZED, "down_proj"])
    four = language_model_in_bits(bits_config("4bit"))
    assert (four.bnb_4bit_quant_type, four.bnb_4bit_use_double_quant) == ("nf4", True)
    assert read_arguments(quantization_config=four).dtype == torch.bfloat16
    assert read_arguments(quantization_config=four, dtype="float32").dtype == torch.float32


@pytest.fixture(params=BITS)
def quantized(request: pytest.FixtureRequest) -> tuple[str, Any]:
    pytest.importorskip("bitsandbytes", reason="needs pip install -e '.[quantization]'")
    return request.param, load(NANO, quantization_config=bits_config(request.param))


def test_only_blocks_of_the_language_model_are_quantized(quantized: tuple[str, Any], tmp_path: Path) -> None:
    bits, model = quantized
    names = [name for name, module in model.named_modules() if type(module).__name__ == BITS[bits]]
    layers = model.config.text_config.num_hidden_layers
    assert len(names) == 7 * layers
    assert all(name.startswith("model.language_model.layers.") for name in names)
    whole = load(NANO, dtype=torch.bfloat16)
    assert weights_fingerprint(model) == weights_fingerprint(whole)
    assert [row[:2] for row in parameter_table(model)] == [row[:2] for row in parameter_table(whole)]
    sizes = {name: parameter.numel() for name, parameter in whole.named_parameters()}
    assert {name: full_size(parameter) for name, parameter in model.named_parameters()} == sizes
    with pytest.raises(ValueError, match="the language model is quantized"):
        model.save_pretrained(tmp_path)


def test_a_quantized_model_answers_and_its_masks_are_near(quantized: tuple[str, Any]) -> None:
    processor = AutoProcessor.from_pretrained(NANO)
    image = np.full((96, 96, 3), 230, dtype=np.uint8)
    image[30:60, 20:80] = (200, 30, 30)
    ((exact,),) = load(NANO, dtype=torch.bfloat16).segment([image], ["Please segment the red thing."], processor)
    ((found,),) = quantized[1].segment([image], ["Please segment the red thing."], processor)
    assert found.answer == exact.answer
    assert (found.masks() != exact.masks()).mean() < 0.05
