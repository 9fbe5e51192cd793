from pathlib import Path

import pytest
import torch

from rl_reward_network.models.sa2va.loading_sa2va import check_device, load_sa2va_model


def test_short_form_loads_float32_on_the_cpu(tiny_checkpoint: Path) -> None:
    model, processor = load_sa2va_model(tiny_checkpoint, device="cpu")
    assert model.dtype == torch.float32
    assert processor.sam_image_size == 256
    with pytest.raises(ValueError, match=r"use_flash_attn.*cpu"):
        load_sa2va_model(tiny_checkpoint, use_flash_attn=True)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"device.*cuda:0.* 0 GPUs"):
            load_sa2va_model(tiny_checkpoint, device="cuda:0")


def test_a_string_that_is_no_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device.*gpu.*cuda:INDEX"):
        check_device("gpu")
