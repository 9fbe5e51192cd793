"""Every family of the table, at toy size, a resized vocabulary, and the files of an image processor."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from rl_reward_network.atomic_io import read_json
from rl_reward_network.cli.convert import Args, main
from rl_reward_network.models.lora import setup_lora
from rl_reward_network.models.sa2va import Sa2VAForConditionalGeneration, Sa2VAProcessor, load_sa2va_model
from rl_reward_network.models.sa2va.configuration_sa2va import config_from_original
from rl_reward_network.models.sa2va.families import FAMILIES, Family, family_of, original_family
from rl_reward_network.models.sa2va.loading_sa2va import convert_checkpoint
from tests.conftest import TINY_SAM, randomise, smooth_image, teach_answer, tiny_config, tiny_tokenizer, write_official
from tests.qwen_vl import QWEN3, write_tiny_qwen


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


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An InternVL with Qwen3 in the official layout, as in InternVL3.5."""
    folder, tokenizer = tmp_path_factory.mktemp("qwen3"), tiny_tokenizer()
    original = tiny_config(len(tokenizer))
    original["llm_config"] |= {"architectures": ["Qwen3ForCausalLM"], "head_dim": 24, "attention_bias": False}
    model = Sa2VAForConditionalGeneration(config_from_original(original, TINY_SAM, "config.json"))
    randomise(model)
    teach_answer(model, tokenizer)
    tokenizer.save_pretrained(folder)
    return write_official(folder, model, original)


def test_qwen3_under_internvl_is_the_model_of_transformers(qwen3: Path) -> None:
    model = Sa2VAForConditionalGeneration.from_pretrained(qwen3)
    language: Any = Qwen3ForCausalLM(model.config.text_config).eval()
    language.model.load_state_dict(model.model.language_model.state_dict())
    language.lm_head.load_state_dict(model.lm_head.state_dict())
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, language(input_ids=ids).logits)
    assert model.config.text_config.head_dim == 24
    result = model.predict_forward(
        smooth_image(60, 60), text="<image>x", processor=Sa2VAProcessor.from_pretrained(qwen3)
    )
    assert len(result["prediction_masks"]) == 1


@pytest.mark.parametrize("kind", ["internvl", QWEN3])
def test_a_resized_vocabulary_is_converted_to_a_folder_that_loads(
    kind: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    source = tiny_checkpoint if kind == "internvl" else write_tiny_qwen(tmp_path / "source", kind)
    model, processor = Sa2VAForConditionalGeneration.from_pretrained(source), Sa2VAProcessor.from_pretrained(source)
    processor.tokenizer.add_tokens(["<stenosis>"])
    model.resize_token_embeddings(len(processor.tokenizer), mean_resizing=False)
    model.save_pretrained(tmp_path / "ours")
    processor.save_pretrained(tmp_path / "ours")
    convert_checkpoint(str(tmp_path / "ours"), tmp_path / "official")
    again = Sa2VAForConditionalGeneration.from_pretrained(tmp_path / "official")
    assert again.get_input_embeddings().num_embeddings == len(processor.tokenizer)
    words = Sa2VAProcessor.from_pretrained(tmp_path / "official").token_ids("<stenosis>")
    assert words == [len(processor.tokenizer) - 1]
    state = again.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_a_qwen_vl_folder_with_the_processors_file_alone_loads(tmp_path: Path) -> None:
    """As transformers 5 writes it: the image processor is a part of processor_config.json."""
    folder = write_tiny_qwen(tmp_path / "model", QWEN3)
    expected = Sa2VAProcessor.from_pretrained(folder)
    file = folder / "preprocessor_config.json"
    fields = read_json(file)
    (folder / "processor_config.json").write_text(
        json.dumps({"image_processor": fields, "processor_class": "Qwen3VLProcessor"})
    )
    file.unlink()
    processor = Sa2VAProcessor.from_pretrained(folder)
    image = smooth_image(70, 50)
    for name, tensor in expected("<image>x", image).items():
        assert torch.equal(processor("<image>x", image)[name], tensor)
    (folder / "processor_config.json").unlink()
    with pytest.raises(ValueError, match=r"preprocessor_config\.json: is missing"):
        Sa2VAProcessor.from_pretrained(folder)
