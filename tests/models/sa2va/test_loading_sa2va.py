"""A checkpoint on a device: transformers' arguments and Auto classes, quantization, and the lines of a model card."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, AutoProcessor, GPTQConfig

import rl_reward_network.models.sa2va.checkpoint_sa2va as checkpoints
from rl_reward_network.atomic_io import weights_fingerprint
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.lora import parameter_table
from rl_reward_network.models.sa2va import Sa2VAConfig, Sa2VAForConditionalGeneration, Sa2VAProcessor
from rl_reward_network.models.sa2va.arguments_sa2va import (
    NOT_QUANTIZED,
    bits_config,
    full_size,
    language_model_in_bits,
    one_device,
    read_arguments,
)
from rl_reward_network.models.sa2va.checkpoint_sa2va import EMBEDDED
from rl_reward_network.models.sa2va.loading_sa2va import (
    WHOLE_MODEL,
    check_device,
    check_first_gpu,
    load_sa2va_model,
    weight_dtype,
)
from tests.cards import card_code
from tests.conftest import tube_image

NANO = EMBEDDED[DEFAULT_MODEL]
IMAGE, _ = tube_image(64, 0)
load = Sa2VAForConditionalGeneration.from_pretrained
BITS = {"4bit": "Linear4bit", "8bit": "Linear8bitLt"}


def same(model: Any, other: Any) -> bool:
    a, b = model.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


# ---- devices and number formats ----


def test_the_dtype_follows_the_device_unless_it_is_said(tiny_checkpoint, tiny_model):
    assert [weight_dtype(device) for device in ("cpu", "cuda:1")] == [torch.float32, torch.bfloat16]
    assert weight_dtype("cuda", "float32") == torch.float32
    model, processor = load_sa2va_model(tiny_checkpoint, device="cpu")
    assert (model.dtype, processor.sam_image_size) == (torch.float32, 256)
    half, _ = load_sa2va_model(tiny_checkpoint, dtype="bfloat16")
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    for (name, value), rounded in zip(tiny_model.named_parameters(), half.parameters(), strict=True):
        assert torch.equal(value.bfloat16(), rounded), name
    with pytest.raises(ValueError, match=r"use_flash_attn.*cpu"):
        load_sa2va_model(tiny_checkpoint, use_flash_attn=True)
    placed = load(tiny_checkpoint, device_map={"": "cpu"})  # the path of a GPU, which reads each tensor to its place
    assert same(placed, tiny_model)


@pytest.mark.parametrize("device", ["gpu", "mps", "cuda:", "cuda:-1", "cuda:1.0", " cpu", "cpu:1", "", "cuda:08"])
def test_a_string_that_is_no_device_is_refused(device):
    with pytest.raises(ValueError, match=f"^device is '{device}', expected cpu, cuda or cuda:INDEX$"):
        check_device(device)


def test_gpus_are_counted_among_the_visible_ones_and_the_remedy_names_the_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for gpu in (None, -1, 0):
        check_first_gpu(gpu)
    for visible, name in (("4,5", "5"), ("GPU-aa, MIG-bb", "MIG-bb")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        check_device("cuda:1")
        with pytest.raises(ValueError, match=f"^gpu is 1, expected 0 or -1; .*CUDA_VISIBLE_DEVICES={name}$"):
            check_first_gpu(1)
        with pytest.raises(ValueError, match=rf"'cuda:2', but 2 GPUs .*\(CUDA_VISIBLE_DEVICES is '{visible}'\); give"):
            check_first_gpu(2)
        with pytest.raises(ValueError, match=r"'cuda:2000000000000000000000', but 2 GPUs"):  # torch cannot parse it
            check_device("cuda:2000000000000000000000")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(ValueError, match=r"CUDA_VISIBLE_DEVICES=1$"):
        check_first_gpu(1)


# ---- arguments of transformers ----


@pytest.mark.parametrize(
    "arguments",
    [
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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        *(
            ({name: 1}, f"{name} is not supported, .*; leave it out")
            for name in ("max_memory", "load_in_4bit", "other")
        ),
        ({"device_map": {"model": 0, "lm_head": "cpu"}}, "expected one device for the whole model"),
        ({"device_map": {"": "disk"}}, "device_map is {'': 'disk'}, expected one device"),
        ({"device_map": "fastest"}, "device_map is 'fastest', expected one device"),
        ({"dtype": "int4"}, "dtype is 'int4', expected a floating-point torch.dtype"),
        ({"quantization_config": GPTQConfig(4, dataset="c4")}, "expected a BitsAndBytesConfig"),
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
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**20, 2**20))
    with pytest.raises(ValueError, match=r"the weights take 0\.0 GiB, but cuda:0 has 0\.0 GiB free"):
        load(NANO, device_map="auto")


def test_a_processor_of_a_hub_id_fetches_neither_weights_nor_code(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, allow_patterns: list[str], **hub: Any) -> str:
        asked.update(hub, patterns=allow_patterns)
        return str(NANO)

    monkeypatch.setattr(checkpoints, "snapshot_download", download)
    Sa2VAProcessor.from_pretrained("owner/name", revision="v1", token="secret", local_files_only=True)
    assert asked.items() >= {"revision": "v1", "token": "secret", "local_files_only": True}.items()
    fetched = {
        name: any(Path(name).match(pattern) for pattern in asked["patterns"])
        for name in ("tokenizer.json", "tokenizer.model", "chat_template.jinja", "model.safetensors", "modeling.py")
    }
    assert [name for name in fetched if not fetched[name]] == ["model.safetensors", "modeling.py"]
    load("owner/name", cache_dir="cache")
    assert (asked["cache_dir"], "*.safetensors" in asked["patterns"]) == ("cache", True)


def test_transformers_auto_classes_load_our_folders():
    expected = load(NANO)
    assert (expected.dtype, load(NANO, dtype="auto").dtype) == (torch.float32, expected.config.dtype)
    assert type(AutoConfig.from_pretrained(NANO)) is Sa2VAConfig
    for auto_class in (AutoModel, AutoModelForImageTextToText):
        model = auto_class.from_pretrained(str(NANO))
        assert type(model) is Sa2VAForConditionalGeneration
        assert not model.training
        assert same(model, expected)
    processor = AutoProcessor.from_pretrained(NANO)
    assert (type(processor), processor.max_tiles) == (Sa2VAProcessor, 1)


def test_the_embedded_models_card_runs_in_a_new_process_and_asks_nothing(tmp_path):
    """Here without a terminal; `test_checkpoint_sa2va` has an official folder on one."""
    card = (NANO / "README.md").read_text()
    assert WHOLE_MODEL in card
    Image.fromarray(IMAGE).save(tmp_path / "image.png")
    (code,) = card_code(card, NANO, tmp_path / "image.png")
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    assert "[y/N]" not in process.stdout + process.stderr
    text = "<image>Please segment the blood vessel."
    expected = load(NANO).predict_forward(image=IMAGE, text=text, processor=Sa2VAProcessor.from_pretrained(NANO))
    shapes = [np.shape(mask) for mask in expected["prediction_masks"]]
    assert process.stdout.strip().endswith(f"{expected['prediction']} {shapes}")


# ---- quantization ----


def test_without_the_package_quantization_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_reward_network.models.sa2va.arguments_sa2va.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[quantization\]'"):
        load(NANO, quantization_config=bits_config("4bit"))


def test_what_is_passed_on_leaves_everything_but_the_language_models_blocks_alone(monkeypatch):
    monkeypatch.setattr("rl_reward_network.models.sa2va.arguments_sa2va.check_bits", lambda: None)
    config = language_model_in_bits({"load_in_8bit": True, "llm_int8_skip_modules": ["down_proj"]})
    assert config.load_in_8bit
    assert config.llm_int8_skip_modules == sorted([*NOT_QUANTIZED, "down_proj"])
    four = language_model_in_bits(bits_config("4bit"))
    assert (four.bnb_4bit_quant_type, four.bnb_4bit_use_double_quant) == ("nf4", True)
    assert read_arguments(quantization_config=four).dtype == torch.bfloat16
    assert read_arguments(quantization_config=four, dtype="float32").dtype == torch.float32


@pytest.mark.parametrize("bits", BITS)
def test_only_blocks_of_the_language_model_are_quantized_and_masks_are_near(bits: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs pip install -e '.[quantization]'")
    model, whole = load(NANO, quantization_config=bits_config(bits)), load(NANO, dtype=torch.bfloat16)  # type: ignore[arg-type]
    names = [name for name, module in model.named_modules() if type(module).__name__ == BITS[bits]]
    assert len(names) == 7 * model.config.text_config.num_hidden_layers
    assert all(name.startswith("model.language_model.layers.") for name in names)
    assert weights_fingerprint(model) == weights_fingerprint(whole)
    assert [row[:2] for row in parameter_table(model)] == [row[:2] for row in parameter_table(whole)]
    sizes = {name: parameter.numel() for name, parameter in whole.named_parameters()}
    assert {name: full_size(parameter) for name, parameter in model.named_parameters()} == sizes
    with pytest.raises(ValueError, match="the language model is quantized"):
        model.save_pretrained(tmp_path)
    image = np.full((96, 96, 3), 230, dtype=np.uint8)
    image[30:60, 20:80] = (200, 30, 30)
    processor = Sa2VAProcessor.from_pretrained(NANO)
    ((exact,), (found,)) = (m.segment([image], ["Segment the red thing."], processor)[0] for m in (whole, model))
    assert found.answer == exact.answer
    assert (found.masks() != exact.masks()).mean() < 0.05
