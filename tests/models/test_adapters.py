"""Adapters of peft and of our runs are merged into a model, by every command that takes --adapter."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file

from rl_reward_network.artefacts import weights_fingerprint
from rl_reward_network.cli.main import main as command
from rl_reward_network.grpo.inputs import check_config
from rl_reward_network.inputs.adapter import merge_model, with_adapter
from rl_reward_network.inputs.config import RegionConfig, RunConfig
from rl_reward_network.inputs.loading import check_inputs
from rl_reward_network.models.adapters import adapter_folder, merge_adapter
from rl_reward_network.models.lora import freeze_parameters, save_trainable, setup_lora
from rl_reward_network.models.sa2va import Sa2VAForConditionalGeneration, Sa2VAProcessor
from tests.conftest import smooth_image

IDS = torch.arange(3, 30)[None]
KINDS = {
    "lora": LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"]),
    "rslora": LoraConfig(r=3, use_rslora=True, target_modules=["down_proj"], rank_pattern={"0.mlp": 2}),
    "dora": LoraConfig(r=2, use_dora=True, target_modules=["o_proj"]),
    "ia3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def trained_elsewhere(model: Any, kind: str, folder: Path) -> torch.Tensor:
    """An adapter of peft with random values in a folder, and the logits of the model with it."""
    wrapped = get_peft_model(copy.deepcopy(model), KINDS[kind])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    wrapped.save_pretrained(str(folder))
    return logits(wrapped.eval())


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_peft_is_merged(kind: str, tiny_model: Sa2VAForConditionalGeneration, tmp_path: Path) -> None:
    expected = trained_elsewhere(tiny_model, kind, tmp_path)
    model = copy.deepcopy(tiny_model)
    merge_adapter(model, tmp_path)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    assert (logits(tiny_model) - expected).abs().max() > 0.05
    assert list(model.state_dict()) == list(tiny_model.state_dict()), "nothing of peft is left"


def test_the_result_of_our_training_is_merged(tiny_model: Sa2VAForConditionalGeneration, tmp_path: Path) -> None:
    trained = copy.deepcopy(tiny_model)
    setup_lora(trained, 2, 4)
    freeze_parameters(trained)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter += 0.05
    save_trainable(trained, tmp_path / "run" / "final_model" / "trainable")
    for named in ("run", "run/final_model", "run/final_model/trainable"):
        assert adapter_folder(tmp_path / named) == tmp_path / "run" / "final_model" / "trainable"
    model = copy.deepcopy(tiny_model)
    merge_adapter(model, tmp_path / "run")
    torch.testing.assert_close(logits(model), logits(trained), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.text_hidden_fcs[0].weight, trained.text_hidden_fcs[0].weight)


def test_what_is_no_adapter_of_this_model_is_refused(tiny_model: Sa2VAForConditionalGeneration, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds neither adapter_config\.json"):
        merge_adapter(tiny_model, tmp_path)
    for check in (check_inputs, lambda config: check_config(config, RegionConfig())):
        with pytest.raises(ValueError, match=r"holds neither adapter_config\.json"):
            check(RunConfig(adapter=tmp_path, gpu=-1))
    trained_elsewhere(tiny_model, "lora", tmp_path / "good")
    file, config = tmp_path / "good" / "adapter_model.safetensors", tmp_path / "good" / "adapter_config.json"
    tensors = load_file(file)
    deeper = {name.replace("layers.1.", "layers.7."): tensor for name, tensor in tensors.items()}
    save_file(deeper, file)
    with pytest.raises(ValueError, match=r"16 surplus, 16 missing, first .*layers\.1\."):
        merge_adapter(copy.deepcopy(tiny_model), tmp_path / "good")
    save_file({name: tensor[..., :-1].contiguous() for name, tensor in tensors.items()}, file)
    with pytest.raises(ValueError, match="peft cannot merge this adapter into this model"):
        merge_adapter(copy.deepcopy(tiny_model), tmp_path / "good")
    file.write_bytes(b"cut")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        merge_adapter(copy.deepcopy(tiny_model), tmp_path / "good")
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"target_modules": ["wqkv"]}))
    save_file(tensors, file)
    with pytest.raises(ValueError, match="wqkv"):
        merge_adapter(copy.deepcopy(tiny_model), tmp_path / "good")


def test_a_run_reads_the_merged_model_which_is_written_once(
    tiny_checkpoint: Path, tiny_model: Sa2VAForConditionalGeneration, tmp_path: Path
) -> None:
    expected = trained_elsewhere(tiny_model, "lora", tmp_path / "adapter")
    config = RunConfig(model_path=str(tiny_checkpoint), adapter=tmp_path / "adapter", output_dir=tmp_path / "outputs")
    first = with_adapter(config)
    model = Sa2VAForConditionalGeneration.from_pretrained(first.model_path)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    written = Path(first.model_path).stat().st_mtime_ns
    assert with_adapter(config) == first
    assert first.adapter is None
    assert Path(first.model_path).stat().st_mtime_ns == written
    assert weights_fingerprint(model) != weights_fingerprint(tiny_model)
    trained_elsewhere(tiny_model, "dora", tmp_path / "adapter")
    assert with_adapter(config).model_path != first.model_path


def test_a_merged_model_keeps_the_number_format_of_its_files(
    tiny_model: Sa2VAForConditionalGeneration, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    trained_elsewhere(tiny_model, "lora", tmp_path / "adapter")
    half = copy.deepcopy(tiny_model).to(torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    Sa2VAProcessor.from_pretrained(tiny_checkpoint).save_pretrained(tmp_path / "half")
    merge_model(str(tmp_path / "half"), tmp_path / "adapter", tmp_path / "merged")
    expected = Sa2VAForConditionalGeneration.from_pretrained(tmp_path / "half", dtype=torch.float32)
    merge_adapter(expected, tmp_path / "adapter")
    found = Sa2VAForConditionalGeneration.from_pretrained(tmp_path / "merged", dtype="auto").state_dict()
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found[name], tensor.to(torch.bfloat16)), f"{name}: added up in float32, rounded once"


def test_segment_takes_an_adapter(
    tiny_checkpoint: Path, tiny_model: Sa2VAForConditionalGeneration, tmp_path: Path
) -> None:
    trained_elsewhere(tiny_model, "lora", tmp_path / "adapter")
    Image.fromarray(smooth_image(64, 64)).save(tmp_path / "image.png")
    masks = {}
    for name, words in {"plain": [], "adapted": ["--adapter", str(tmp_path / "adapter")]}.items():
        output = tmp_path / f"{name}.png"
        model = ["--model_path", str(tiny_checkpoint), "--device", "cpu"]
        command(["segment", str(tmp_path / "image.png"), *model, "--output", str(output), *words])
        masks[name] = np.asarray(Image.open(output))
    assert (masks["plain"] != masks["adapted"]).any()
