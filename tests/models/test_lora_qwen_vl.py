"""LoRA on the Qwen-VL families: which layers, what trains beside it, and adapters of another family."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rl_reward_network.models.lora import (
    freeze_parameters,
    load_trainable,
    lora_off,
    merge_lora,
    parameter_table,
    save_trainable,
    setup_lora,
    unreached_parameters,
)
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from tests.conftest import smooth_image
from tests.qwen_vl import QWEN3, QWEN25, write_tiny_qwen

LAYERS = 3
IMAGE = smooth_image(90, 120)


@pytest.fixture(scope="module", params=[QWEN3, QWEN25])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Model and processor; tests must not change them."""
    return load_sa2va_model(write_tiny_qwen(tmp_path_factory.mktemp("lora") / "model", request.param))


@pytest.fixture
def adapted(loaded: tuple[Any, Any]) -> Any:
    """A copy of the model with an adapter that changes its output."""
    model = copy.deepcopy(loaded[0])
    setup_lora(model, r=4, lora_alpha=8, lora_dropout=0.0)
    freeze_parameters(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def logits(model: Any, processor: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**processor("<image>Where?", IMAGE)).logits


def test_every_linear_layer_of_the_language_model_gets_an_adapter(loaded: tuple[Any, Any], adapted: Any) -> None:
    inside = loaded[0].model.language_model.named_modules(prefix="model.language_model")
    linear = {name for name, module in inside if isinstance(module, torch.nn.Linear)}
    found = {name.split(".lora_A")[0] for name, _ in adapted.named_parameters() if ".lora_A" in name}
    assert found == linear
    assert len(found) == 7 * LAYERS


def test_head_and_embeddings_train_and_the_vision_is_frozen(adapted: Any) -> None:
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    beside = {name for name in trained if "lora_" not in name and not name.startswith(("text_hidden", "grounding"))}
    assert beside == {"lm_head.weight", "model.language_model.embed_tokens.weight"}
    assert any(name.startswith("grounding_encoder.mask_decoder.") for name in trained)
    assert not any(name.startswith(("model.visual.", "grounding_encoder.vision_encoder.")) for name in trained)


def test_the_parameter_table_counts_every_parameter_once(adapted: Any) -> None:
    table = parameter_table(adapted)
    assert sum(total for _, total, _ in table) == sum(p.numel() for p in adapted.parameters())
    assert sum(trained for *_, trained in table) == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    parts = {part: (total, trained) for part, total, trained in table}
    assert "mlp1" not in parts
    assert {part for part, (_, trained) in parts.items() if not trained} == {
        "vision tower",
        "merger",
        "SAM 2 image encoder",
        "SAM 2 memory",
    }
    vocabulary, width = adapted.lm_head.weight.shape
    assert parts["language model"][1] == vocabulary * width, "the embeddings"
    assert parts["lm_head"][1] == vocabulary * width, "without the final norm"
    assert parts["merger"][0] == sum(
        p.numel() for name, p in adapted.model.visual.named_parameters() if "merger" in name
    )


def test_a_fresh_adapter_changes_nothing_and_a_merged_one_gives_the_same(loaded: tuple[Any, Any], adapted: Any) -> None:
    model, processor = loaded
    fresh = copy.deepcopy(model)
    setup_lora(fresh, r=4, lora_alpha=8)
    assert torch.equal(logits(fresh, processor), logits(model, processor))
    with lora_off(adapted):
        assert torch.equal(logits(adapted, processor), logits(model, processor))
    unmerged = logits(adapted, processor)
    assert (unmerged - logits(model, processor)).abs().max() > 0.1
    merge_lora(adapted)
    assert (logits(adapted, processor) - unmerged).abs().max() < 1e-4
    assert adapted.state_dict().keys() == model.state_dict().keys()


def test_every_trainable_tensor_is_reached_by_text_and_mask(loaded: tuple[Any, Any], adapted: Any) -> None:
    processor = loaded[1]
    inputs = processor("<image>Where?", IMAGE)
    ids = torch.cat([inputs["input_ids"], torch.tensor([processor.token_ids("Sure [SEG].<|im_end|>")])], dim=1)
    output = adapted(**inputs | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, labels=ids)
    embeddings = adapted.seg_embeddings(output.last_hidden_state, ids)[0]
    decoded = adapted.decode_masks(adapted.get_sam_features(inputs["sam_pixel_values"]), embeddings)
    scores = decoded.object_score_logits.sum() + decoded.candidate_scores.sum()
    unreached = unreached_parameters(adapted, [output.loss + decoded.candidates.sum() + scores])
    assert [name for name in unreached if "grounding_encoder" not in name] == []


def test_saved_tensors_come_back(loaded: tuple[Any, Any], adapted: Any, tmp_path: Path) -> None:
    model, processor = loaded
    with torch.no_grad():
        adapted.lm_head.weight.mul_(1.1)
        adapted.get_input_embeddings().weight.add_(0.01)
    save_trainable(adapted, tmp_path / "adapter")
    assert {"lm_head.weight", "model.language_model.embed_tokens.weight"} <= load_file(
        tmp_path / "adapter" / "trainable.safetensors"
    ).keys()
    fresh = copy.deepcopy(model)
    load_trainable(fresh, tmp_path / "adapter")
    assert torch.equal(logits(fresh, processor), logits(adapted, processor))


def test_an_adapter_of_another_family_is_refused_by_name(
    adapted: Any, tiny_model: Any, tmp_path: Path, loaded: tuple[Any, Any]
) -> None:
    save_trainable(adapted, tmp_path / "adapter")
    model, language = copy.deepcopy(tiny_model), loaded[0].config.text_config.model_type
    with pytest.raises(ValueError, match=rf"lora\.json: .*'{language}'.*'qwen2'; give the model that .* trained on"):
        load_trainable(model, tmp_path / "adapter")
    assert not any("lora_" in name for name, _ in model.named_parameters()), "refused before the model is changed"
    other = copy.deepcopy(tiny_model)
    setup_lora(other, r=4, lora_alpha=8, lora_dropout=0.0)
    save_trainable(other, tmp_path / "other")
    with pytest.raises(ValueError, match=rf"'qwen2'.*'{language}'"):
        load_trainable(copy.deepcopy(loaded[0]), tmp_path / "other")


def test_a_folder_of_an_earlier_version_names_no_family(loaded: tuple[Any, Any], adapted: Any, tmp_path: Path) -> None:
    save_trainable(adapted, tmp_path / "adapter")
    file = tmp_path / "adapter" / "lora.json"
    settings = json.loads(file.read_text())
    assert settings.pop("model_type") == loaded[0].config.text_config.model_type
    file.write_text(json.dumps(settings))
    fresh = copy.deepcopy(loaded[0])
    load_trainable(fresh, tmp_path / "adapter")
    assert torch.equal(logits(fresh, loaded[1]), logits(adapted, loaded[1]))


def test_tensors_of_another_family_without_lora_do_not_fit(
    loaded: tuple[Any, Any], tiny_model: Any, tmp_path: Path
) -> None:
    model = copy.deepcopy(loaded[0])
    freeze_parameters(model)
    save_trainable(model, tmp_path / "parts")
    with pytest.raises(ValueError, match=r"do not fit this model.*give the model that they were trained on"):
        load_trainable(copy.deepcopy(tiny_model), tmp_path / "parts")
