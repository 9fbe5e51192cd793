import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel
from safetensors.torch import load_file, save_file

from rl_reward_network.models.lora import (
    freeze_parameters,
    load_trainable,
    merge_lora,
    parameter_table,
    read_trainable,
    save_trainable,
    setup_lora,
)
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from tests.conftest import smooth_image


@pytest.fixture
def adapted(tiny_model: Any) -> Any:
    """A copy with LoRA whose weights are not zero, so that it changes the output."""
    model = copy.deepcopy(tiny_model)
    setup_lora(model, r=4, lora_alpha=8, lora_dropout=0.0)
    freeze_parameters(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def logits(model: Any, processor: Sa2VAProcessor) -> torch.Tensor:
    with torch.no_grad():
        return model(**processor("<image>Where?", smooth_image(60, 70))).logits


def test_lora_sits_on_the_language_model_only(adapted: Any) -> None:
    names = [name for name, _ in adapted.named_parameters() if "lora_" in name]
    assert len(names) == 2 * 7 * 2  # A and B, seven layers, two blocks
    assert all(name.startswith("model.language_model.layers.") for name in names)


def test_a_model_without_the_layers_is_refused(tiny_model: Any) -> None:
    model = copy.deepcopy(tiny_model)
    model.model.language_model.layers = torch.nn.ModuleList()
    with pytest.raises(ValueError, match=r"no layer for LoRA .*self_attn"):
        setup_lora(model)


def test_a_fresh_adapter_changes_nothing(tiny_model: Any, tiny_processor: Sa2VAProcessor) -> None:
    model = copy.deepcopy(tiny_model)
    setup_lora(model, r=4, lora_alpha=8)
    assert torch.equal(logits(model, tiny_processor), logits(tiny_model, tiny_processor))
    assert not any(module.training for module in model.modules()), "dropout must stay off in an evaluated model"


def test_adapters_of_a_bfloat16_model_are_float32(tiny_model: Any) -> None:
    model = copy.deepcopy(tiny_model).to(torch.bfloat16)
    setup_lora(model, r=2)
    dtypes = {parameter.dtype for name, parameter in model.named_parameters() if "lora_" in name}
    assert dtypes == {torch.float32}
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_saving_a_model_with_unmerged_lora_is_refused(adapted: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"merge_lora\(model\)"):
        adapted.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_merged_equals_unmerged(adapted: Any, tiny_model: Any, tiny_processor: Sa2VAProcessor) -> None:
    unmerged = logits(adapted, tiny_processor)
    assert not torch.allclose(unmerged, logits(tiny_model, tiny_processor), atol=1e-2)
    merge_lora(adapted)
    assert (logits(adapted, tiny_processor) - unmerged).abs().max() <= 1e-4
    assert set(adapted.state_dict()) == set(tiny_model.state_dict())


def test_adapter_off_is_the_base_model(adapted: Any, tiny_model: Any, tiny_processor: Sa2VAProcessor) -> None:
    adapted.disable_adapters()
    assert torch.equal(logits(adapted, tiny_processor), logits(tiny_model, tiny_processor))


def test_saved_weights_come_back(adapted: Any, tiny_model: Any, tiny_processor: Sa2VAProcessor, tmp_path: Path) -> None:
    with torch.no_grad():
        adapted.text_hidden_fcs[0].bias.add_(1)
    save_trainable(adapted, tmp_path / "adapter")
    fresh = copy.deepcopy(tiny_model)
    load_trainable(fresh, tmp_path / "adapter")
    assert torch.equal(logits(fresh, tiny_processor), logits(adapted, tiny_processor))
    assert torch.equal(fresh.text_hidden_fcs[0].bias, adapted.text_hidden_fcs[0].bias)


def test_folders_of_earlier_versions_hold_lora_among_the_other_tensors(
    adapted: Any, tiny_model: Any, tiny_processor: Sa2VAProcessor, tmp_path: Path
) -> None:
    save_trainable(adapted, tmp_path / "new")
    state = read_trainable(tmp_path / "new")
    (tmp_path / "old").mkdir()
    save_file(state, tmp_path / "old" / "trainable.safetensors")
    shutil.copyfile(tmp_path / "new" / "lora.json", tmp_path / "old" / "lora.json")
    assert state.keys() == {name for name, p in adapted.named_parameters() if p.requires_grad}
    fresh = copy.deepcopy(tiny_model)
    load_trainable(fresh, tmp_path / "old")
    assert torch.equal(logits(fresh, tiny_processor), logits(adapted, tiny_processor))


def test_each_tensor_is_written_once(adapted: Any, tmp_path: Path) -> None:
    save_trainable(adapted, tmp_path / "adapter")
    lora, rest = (load_file(tmp_path / "adapter" / f"{name}.safetensors") for name in ("adapter_model", "trainable"))
    assert len(lora) == 2 * 7 * 2
    assert all("lora_" in name for name in lora)
    assert not any("lora_" in name for name in rest)


def test_peft_reads_the_lora_part(
    adapted: Any, tiny_model: Any, tiny_processor: Sa2VAProcessor, tmp_path: Path
) -> None:
    save_trainable(adapted, tmp_path / "adapter")
    wrapped = PeftModel.from_pretrained(copy.deepcopy(tiny_model), tmp_path / "adapter")
    assert torch.equal(logits(wrapped, tiny_processor), logits(adapted, tiny_processor))
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] is None


def test_a_model_without_lora_is_saved_without_an_adapter(tiny_model: Any, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_model)
    freeze_parameters(model)
    save_trainable(model, tmp_path / "parts")
    assert sorted(file.name for file in (tmp_path / "parts").iterdir()) == ["lora.json", "trainable.safetensors"]
    load_trainable(copy.deepcopy(tiny_model), tmp_path / "parts")


@pytest.mark.parametrize("name", ["trainable.safetensors", "adapter_model.safetensors"])
def test_a_truncated_file_is_named(adapted: Any, tiny_model: Any, tmp_path: Path, name: str) -> None:
    save_trainable(adapted, tmp_path / "adapter")
    file = tmp_path / "adapter" / name
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=rf"{name}: not a whole"):
        load_trainable(copy.deepcopy(tiny_model), tmp_path / "adapter")


def test_missing_or_foreign_adapters_are_refused(adapted: Any, tiny_model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lora\.json: file not found"):
        load_trainable(copy.deepcopy(tiny_model), tmp_path)
    save_trainable(adapted, tmp_path / "adapter")
    other = copy.deepcopy(tiny_model)
    setup_lora(other, r=2)
    with pytest.raises(ValueError, match=r"lora\.json: .*'r': 4.*'r': 2"):
        load_trainable(other, tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"28 tensors do not fit"):
        load_trainable(copy.deepcopy(tiny_model), tmp_path / "adapter")


FOREIGN: list[tuple[dict[str, Any], str]] = [
    ({"use_rslora": True}, "use_rslora is True, expected False"),
    ({"use_dora": True}, "use_dora is True, expected False"),
    ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern is {'q_proj': 2}, expected {}"),
    ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is {'q_proj': 2}, expected {}"),
    ({"bias": "lora_only"}, "bias is 'lora_only', expected 'none'"),
    ({"lora_bias": True}, "lora_bias is True, expected False"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\], expected None"),
    ({"layers_to_transform": [1], "target_modules": ["q_proj"]}, r"layers_to_transform is \[1\], expected None"),
    ({"target_modules": ["q_proj"]}, r"target_modules is [\[{]'q_proj'[\]}], expected 'model"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', expected True"),
]


def foreign(tiny_model: Any, fields: dict[str, Any], name: str = "default") -> Any:
    """A copy with an adapter of the user's own making, of the sizes of `adapted`."""
    model = copy.deepcopy(tiny_model)
    given = {"target_modules": model.config.family.lora_targets} | fields
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, **given), name)
    return model


@pytest.mark.parametrize(("fields", "difference"), FOREIGN)
def test_an_adapter_of_another_kind_is_refused_with_the_difference(
    adapted: Any, tiny_model: Any, tmp_path: Path, fields: dict[str, Any], difference: str
) -> None:
    model = foreign(tiny_model, fields)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=rf"^the model's adapter is none of setup_lora: .*{difference}.*; merge it"):
        save_trainable(model, tmp_path / "foreign")
    assert not list(tmp_path.iterdir())
    save_trainable(adapted, tmp_path / "adapter")
    with pytest.raises(ValueError, match=difference):
        load_trainable(model, tmp_path / "adapter")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    fresh = copy.deepcopy(tiny_model)
    with pytest.raises(ValueError, match=rf"adapter_config\.json: the adapter is none .*{difference}"):
        load_trainable(fresh, tmp_path / "adapter")
    assert not hasattr(fresh, "peft_config"), "nothing was changed"


def test_what_only_began_in_another_way_is_no_difference(tiny_model: Any, tmp_path: Path) -> None:
    model = foreign(tiny_model, {"init_lora_weights": "gaussian"})
    save_trainable(model, tmp_path / "adapter")
    load_trainable(copy.deepcopy(tiny_model), tmp_path / "adapter")


def test_adapters_of_other_names_and_methods_are_refused(tiny_model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"adapters are \['mine'\], expected one, 'default'"):
        save_trainable(foreign(tiny_model, {}, "mine"), tmp_path / "adapter")
    model = copy.deepcopy(tiny_model)
    model.add_adapter(IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]))
    with pytest.raises(ValueError, match=r"peft_type is .*IA3.*, expected .*LORA"):
        save_trainable(model, tmp_path / "adapter")
    assert not list(tmp_path.iterdir())


def test_the_parameter_table_counts_every_parameter_once(adapted: Any) -> None:
    table = parameter_table(adapted)
    assert sum(total for _, total, _ in table) == sum(p.numel() for p in adapted.parameters())
    assert sum(train for *_, train in table) == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    frozen = {part for part, _, trainable in table if not trainable}
    assert frozen == {"vision tower", "language model", "lm_head", "SAM 2 image encoder", "SAM 2 memory"}


def test_a_second_adapter_and_bad_sizes_are_refused(adapted: Any, tiny_model: Any) -> None:
    with pytest.raises(ValueError, match=r"LoRA layers.*merge_lora"):
        setup_lora(adapted)
    with pytest.raises(ValueError, match=r"\br is 0"):
        setup_lora(copy.deepcopy(tiny_model), r=0)
