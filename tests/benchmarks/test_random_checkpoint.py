"""The random checkpoints: parameters of the released sizes, and tiny ones that answer, of every family."""

import math
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from PIL import Image

from benchmarks.random_checkpoint import QwenVLSize, official_config, sam_sizes, write_random_checkpoint
from rl_reward_network.models.sa2va.configuration_sa2va import config_from_original
from rl_reward_network.models.sa2va.loading_sa2va import WHOLE_MODEL, convert_checkpoint, load_sa2va_model
from rl_reward_network.models.sa2va.modeling_sa2va import expected_shapes
from tests.cards import run_card

IMAGE = np.random.Generator(np.random.PCG64(0)).integers(0, 255, (60, 90, 3)).astype(np.uint8)
TINY: list[QwenVLSize] = [size for size in get_args(QwenVLSize) if size.startswith("tiny")]


@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ("qwen3-vl-2b", 2_666_775_090),
        ("qwen3-vl-4b", 5_057_072_690),
        ("qwen2.5-vl-3b", 4_293_849_650),
        ("qwen2.5-vl-7b", 8_527_539_250),
    ],
)
def test_the_sizes_are_those_of_the_released_models(size: QwenVLSize, parameters: int) -> None:
    config = config_from_original(official_config(size), sam_sizes(size), "config.json")
    assert sum(map(math.prod, expected_shapes(config, original=True).values())) == parameters


@pytest.mark.parametrize("size", TINY)
def test_a_tiny_qwen_vl_answers_with_a_mask_and_converts_back_bit_for_bit(size: QwenVLSize, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "model", size)
    model, processor = load_sa2va_model(tmp_path / "model")
    answer = model.predict_forward(image=IMAGE, text="<image>Please segment the vessel.", processor=processor)
    assert answer["prediction"] == "[SEG]<|im_end|>"
    assert [mask.shape for mask in answer["prediction_masks"]] == [(1, 60, 90)]
    assert ("<|im_start|>system" in processor.chat) == (size == "tiny-qwen2.5-vl"), "as in the released templates"
    convert_checkpoint(str(tmp_path / "model"), tmp_path / "ours")
    convert_checkpoint(str(tmp_path / "ours"), tmp_path / "back")
    Image.fromarray(IMAGE).save(tmp_path / "image.png")
    (names_of_card,) = run_card(WHOLE_MODEL, tmp_path / "ours", tmp_path / "image.png")
    assert names_of_card["result"]["prediction"] == answer["prediction"], "by transformers' Auto classes"
    names = [{path.name for path in (tmp_path / folder).iterdir()} for folder in ("model", "back")]
    assert names[0] == names[1]
    weights, back = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("model", "back"))
    assert weights == back


def test_a_checkpoint_with_internlm2_answers_with_a_mask(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "model", "tiny-internlm2")
    model, processor = load_sa2va_model(tmp_path / "model")
    assert model.config.text_config.model_type == "llama"
    assert model.segment([IMAGE], ["the vessel"], processor)[0][0].answer.startswith("[SEG]")
