"""Adapters of peft, of a whole model or of its language model alone, are merged into a checkpoint or refused."""

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from rl_reward_network.cli.main import main as command
from rl_reward_network.models.lora import merge_adapter
from rl_reward_network.models.sa2va import Sa2VAForConditionalGeneration

IDS = torch.arange(3, 30)[None]
KINDS = {
    "lora": LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"]),
    "rslora": LoraConfig(
        r=3, use_rslora=True, target_modules=["down_proj"], rank_pattern={"layers.0.mlp.down_proj": 2}
    ),
    "dora": LoraConfig(r=2, use_dora=True, target_modules=["o_proj"]),
    "ia3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "saved": LoraConfig(r=2, bias="lora_only", target_modules=["q_proj"], modules_to_save=["embed_tokens", "norm"]),
    "regex": LoraConfig(r=2, target_modules=r".*layers\.1\.self_attn\.q_proj"),
}
NAMES = {  # of a language model's layers, after what was wrapped: ours, a causal model, InternVL's, Sa2VA's, all of it
    "body": "base_model.model.",
    "causal": "base_model.model.model.",
    "internvl": "language_model.base_model.model.model.",
    "sa2va": "base_model.model.language_model.model.",
}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def trained_elsewhere(model: Any, kind: str, folder: Path, names: str | None = None) -> torch.Tensor:
    """An adapter with random values, of the language model alone if it has `NAMES`, and the logits of the model."""
    model = copy.deepcopy(model)
    wrapped = get_peft_model(model if names is None else model.model.language_model, copy.deepcopy(KINDS[kind]))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    wrapped.save_pretrained(str(folder))
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"task_type": "CAUSAL_LM"}))
    if names is not None:
        file = folder / "adapter_model.safetensors"
        renamed = {NAMES[names] + name.removeprefix(NAMES["body"]): value for name, value in load_file(file).items()}
        save_file(renamed, file)
    return logits(model.eval())


@pytest.fixture
def adapter(tiny_model: Sa2VAForConditionalGeneration, tmp_path: Path) -> Path:
    trained_elsewhere(tiny_model, "lora", tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        *((kind, None) for kind in KINDS),
        *(("lora", n) for n in NAMES),
        ("rslora", "causal"),
        ("dora", "body"),
        ("saved", "causal"),
        ("saved", "sa2va"),
        ("ia3", "sa2va"),
        ("regex", "causal"),
    ],
)
def test_an_adapter_is_merged(kind, names, tiny_model, tmp_path):
    expected = trained_elsewhere(tiny_model, kind, tmp_path, names)
    model = copy.deepcopy(tiny_model)
    merge_adapter(model, tmp_path)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    assert (logits(tiny_model) - expected).abs().max() > 0.01
    assert list(model.state_dict()) == list(tiny_model.state_dict()), "nothing of peft is left"


def test_what_is_no_adapter_of_this_model_is_refused(adapter: Path, tiny_model: Sa2VAForConditionalGeneration) -> None:
    file, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    tensors, settings = load_file(file), json.loads(config.read_text())
    first = next(iter(tensors))
    broken: dict[str, dict[str, torch.Tensor]] = {
        r"16 missing: .*layers\.1\..*16 not expected: .*layers\.7\.": {
            n.replace("layers.1.", "layers.7."): t for n, t in tensors.items()
        },
        r"of another shape: .*lora_A\.weight \(3, 31\) instead of \(3, 32\)": {
            n: t[..., :-1].contiguous() for n, t in tensors.items()
        },
        rf"tensor {first} holds infinity": tensors | {first: torch.full_like(tensors[first], torch.inf)},
    }
    for message, changed in broken.items():
        save_file(changed, file)
        with pytest.raises(ValueError, match=message):
            merge_adapter(copy.deepcopy(tiny_model), adapter)
    file.write_bytes(b"cut")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        merge_adapter(copy.deepcopy(tiny_model), adapter)
    save_file(tensors, file)
    config.write_text(json.dumps(settings | {"target_modules": ["wqkv"]}))
    with pytest.raises(ValueError, match="wqkv"):
        merge_adapter(copy.deepcopy(tiny_model), adapter)


def test_pickled_tensors_are_read_and_pickled_code_is_not_run(adapter, tiny_model):
    expected, model = copy.deepcopy(tiny_model), copy.deepcopy(tiny_model)
    merge_adapter(expected, adapter)
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    merge_adapter(model, adapter)
    assert torch.equal(logits(model), logits(expected))
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps({"weights": Path("run me")}))
    with pytest.raises(ValueError, match=r"adapter_model\.bin: not tensors alone"):
        merge_adapter(copy.deepcopy(tiny_model), adapter)


def test_the_command_writes_a_checkpoint_and_checks_its_base(adapter, tiny_checkpoint, tiny_model, tmp_path, capsys):
    config, of_tiny = adapter / "adapter_config.json", ["--base_model", str(tiny_checkpoint)]
    settings = json.loads(config.read_text())
    for named, words, message in (
        (None, [], "base_model_name_or_path is not set; .* by --base_model"),
        ("sa2va-nano", of_tiny, "is of sa2va-nano, but --base_model is .*; leave it out"),
        ("sa2va-nano", [], "do not fit this model"),
    ):
        config.write_text(json.dumps(settings | {"base_model_name_or_path": named}))
        with pytest.raises(SystemExit):
            command(["merge", str(adapter), "--output", str(tmp_path / "merged"), *words])
        assert re.search(message, capsys.readouterr().err)
        assert not (tmp_path / "merged").exists()
    config.write_text(json.dumps(settings | {"base_model_name_or_path": "elsewhere/model"}))
    command(["merge", str(adapter), "--output", str(tmp_path / "merged"), *of_tiny, "--dtype", "bfloat16"])
    assert "the adapter is of elsewhere/model" in capsys.readouterr().out
    expected = copy.deepcopy(tiny_model)
    merge_adapter(expected, adapter)
    found = Sa2VAForConditionalGeneration.from_pretrained(tmp_path / "merged", dtype="auto").state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found[name], tensor.to(torch.bfloat16)), f"{name}: added up in float32, rounded once"
