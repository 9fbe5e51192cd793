"""A checkpoint on a device, by transformers' Auto classes, and by the lines of its model card."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText, AutoProcessor

from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.sa2va import Sa2VAConfig, Sa2VAProcessor
from rl_reward_network.models.sa2va.checkpoint_sa2va import EMBEDDED
from rl_reward_network.models.sa2va.loading_sa2va import (
    WHOLE_MODEL,
    check_device,
    check_first_gpu,
    load_sa2va_model,
    weight_dtype,
)
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from tests.cards import card_code
from tests.conftest import tube_image


def test_short_form_loads_float32_on_the_cpu(tiny_checkpoint):
    model, processor = load_sa2va_model(tiny_checkpoint, device="cpu")
    assert model.dtype == torch.float32
    assert processor.sam_image_size == 256
    with pytest.raises(ValueError, match=r"use_flash_attn.*cpu"):
        load_sa2va_model(tiny_checkpoint, use_flash_attn=True)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"device.*cuda:0.* 0 GPUs"):
            load_sa2va_model(tiny_checkpoint, device="cuda:0")


def test_the_dtype_follows_the_device_unless_it_is_said(tiny_checkpoint):
    assert [weight_dtype(device) for device in ("cpu", "cuda:1")] == [torch.float32, torch.bfloat16]
    assert weight_dtype("cuda", "float32") == torch.float32
    exact, half = (load_sa2va_model(tiny_checkpoint, dtype=dtype)[0] for dtype in ("float32", "bfloat16"))
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    for (name, value), rounded in zip(exact.named_parameters(), half.parameters(), strict=True):
        assert torch.equal(value.bfloat16(), rounded), name


def test_weights_loaded_straight_to_a_device_are_the_same(tiny_checkpoint):
    """The path of a GPU, with the CPU as the device: `device_map` reads each tensor to its place."""
    placed = Sa2VAForConditionalGeneration.from_pretrained(tiny_checkpoint, device_map={"": "cpu"})
    usual = Sa2VAForConditionalGeneration.from_pretrained(tiny_checkpoint)
    assert placed.state_dict().keys() == usual.state_dict().keys()
    for name, value in usual.state_dict().items():
        assert torch.equal(value, placed.state_dict()[name]), name


@pytest.mark.parametrize(
    "device", ["gpu", "mps", "cuda:", "cuda:-1", "cuda:1.0", "CUDA", " cpu", "cpu:1", "", "meta", "cuda:08"]
)
def test_a_string_that_is_no_device_is_refused(device):
    with pytest.raises(ValueError, match=f"^device is '{device}', expected cpu, cuda or cuda:INDEX$"):
        check_device(device)


def test_gpus_are_counted_among_the_visible_ones(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    check_device("cuda:1")
    with pytest.raises(ValueError, match=r"'cuda:2', but 2 GPUs are visible \(CUDA_VISIBLE_DEVICES is '4,5'\); give"):
        check_device("cuda:2")
    with pytest.raises(ValueError, match=r"'cuda:2000000000000000000000', but 2 GPUs"):  # torch cannot parse it
        check_device("cuda:2000000000000000000000")


def test_the_remedy_for_another_gpu_names_the_card_under_slurm(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for gpu in (None, -1, 0):
        check_first_gpu(gpu)
    for visible, name in ((None, "1"), ("4,5", "5"), ("GPU-aa, MIG-bb", "MIG-bb")):
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(
            ValueError, match=f"^gpu is 1, expected 0 or -1; choose one by CUDA_VISIBLE_DEVICES={name}$"
        ):
            check_first_gpu(1)
    with pytest.raises(ValueError, match="'cuda:2', but 2 GPUs are visible"):
        check_first_gpu(2)


NANO = EMBEDDED[DEFAULT_MODEL]
IMAGE, _ = tube_image(64, 0)


def test_transformers_auto_classes_load_our_folders():
    expected = Sa2VAForConditionalGeneration.from_pretrained(NANO)
    assert type(AutoConfig.from_pretrained(NANO)) is Sa2VAConfig
    for auto_class in (AutoModel, AutoModelForImageTextToText):
        model = auto_class.from_pretrained(NANO)
        assert type(model) is Sa2VAForConditionalGeneration
        assert not model.training
        state = expected.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert AutoModel.from_pretrained(str(NANO), dtype=torch.bfloat16).dtype == torch.bfloat16
    processor = AutoProcessor.from_pretrained(NANO)
    assert type(processor) is Sa2VAProcessor
    assert processor.max_tiles == 1


@pytest.mark.parametrize("auto_class", [AutoModel, AutoProcessor])
def test_an_argument_without_effect_is_refused(auto_class):
    with pytest.raises(ValueError, match="low_memory"):
        auto_class.from_pretrained(NANO, low_memory=True)


def test_the_embedded_models_card_runs_in_a_new_process_and_asks_nothing(tmp_path):
    """Here without a terminal; `test_checkpoint_sa2va` has an official folder on one."""
    card = (NANO / "README.md").read_text()
    assert WHOLE_MODEL in card
    Image.fromarray(IMAGE).save(tmp_path / "image.png")
    (code,) = card_code(card, NANO, tmp_path / "image.png")
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    assert "[y/N]" not in process.stdout + process.stderr
    model, processor = (kind.from_pretrained(NANO) for kind in (Sa2VAForConditionalGeneration, Sa2VAProcessor))
    text = "<image>Please segment the blood vessel."
    expected = model.predict_forward(image=IMAGE, text=text, processor=processor)
    shapes = [np.shape(mask) for mask in expected["prediction_masks"]]
    assert process.stdout.strip().endswith(f"{expected['prediction']} {shapes}")
