"""Every family of the table, at toy size: from an original folder to an answer, and back."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rl_reward_network.cli.convert import Args, main
from rl_reward_network.models.lora import setup_lora
from rl_reward_network.models.sa2va.configuration_sa2va import config_from_original
from rl_reward_network.models.sa2va.families import FAMILIES, Family, family_of, original_family
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from tests.conftest import TINY_SAM, randomise, smooth_image, tiny_config, tiny_tokenizer, write_official
from tests.qwen_vl import write_tiny_qwen


def write_original(folder: Path, family: Family) -> Path:
    """A folder in the official layout whose language model is of the family, with random weights."""
    if family.body == "qwen_vl":
        return write_tiny_qwen(folder, family.architecture)
    folder.mkdir()
    tokenizer = tiny_tokenizer()
    original = tiny_config(len(tokenizer))
    original["llm_config"] |= {"architectures": [family.architecture], **dict(family.demanded)}
    model: Any = Sa2VAForConditionalGeneration(config_from_original(original, TINY_SAM, "config.json"))
    randomise(model)
    tokenizer.save_pretrained(folder)
    return write_official(folder, model, original)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architecture)
def test_a_model_of_each_family_loads_answers_converts_and_takes_lora(family, tmp_path):
    folder = write_original(tmp_path / "original", family)
    model, processor = load_sa2va_model(folder)
    assert model.model.language_model.config.model_type == family.config_class.model_type
    assert type(processor.tokenizer) is family.tokenizer_class
    asked = {"text": "<image>Where?", "image": smooth_image(50, 60), "processor": processor, "max_new_tokens": 4}
    answer = model.predict_forward(**asked)["prediction"]
    main(Args(str(folder), tmp_path / "ours"))
    main(Args(str(tmp_path / "ours"), tmp_path / "back"))
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    ours, _ = load_sa2va_model(tmp_path / "ours")
    assert ours.predict_forward(**asked)["prediction"] == answer
    setup_lora(ours, r=2)
    assert sum("lora_A" in name for name, _ in ours.named_parameters()) == ours.config.text_config.num_hidden_layers * 7


def test_what_cannot_be_built_is_named_with_what_is_supported():
    """The official configuration class of InternLM2 reads a missing `bias` as True."""
    for bias in (True, None):
        with pytest.raises(ValueError, match=rf"llm_config.bias is {bias}, expected False for InternVL with InternLM2"):
            original_family({"llm_config": {"architectures": ["InternLM2ForCausalLM"], "bias": bias}})
    with pytest.raises(ValueError, match=r"architectures is 'GemmaForCausalLM'; .*Qwen2For.*InternLM2For"):
        original_family({"llm_config": {"architectures": ["GemmaForCausalLM"]}})
    with pytest.raises(ValueError, match=r"text_config.model_type is 'gemma', .*qwen2"):
        family_of(SimpleNamespace(model_type="gemma"))
