"""LoRA on every kind of body: which layers, what trains beside it, saving, merging, and foreign adapters."""

import copy
import json
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel
from safetensors.torch import load_file, save_file

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

IMAGE = smooth_image(60, 70)
FROZEN = {"SAM 2 image encoder", "SAM 2 memory", "vision tower"}


@pytest.fixture(scope="module", params=["internvl", QWEN3, QWEN25])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Model and processor; tests must not change them."""
    if request.param == "internvl":
        return request.getfixturevalue("tiny_model"), request.getfixturevalue("tiny_processor")
    return load_sa2va_model(write_tiny_qwen(tmp_path_factory.mktemp("lora") / "model", request.param))


def with_lora(base: Any) -> Any:
    """A copy with LoRA whose weights are not zero, so that it changes the output."""
    model = copy.deepcopy(base)
    setup_lora(model, r=4, lora_alpha=8, lora_dropout=0.0)
    freeze_parameters(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


@pytest.fixture
def adapted(loaded: tuple[Any, Any]) -> Any:
    return with_lora(loaded[0])


@pytest.fixture
def tiny_adapted(tiny_model: Any) -> Any:
    return with_lora(tiny_model)


def logits(model: Any, processor: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**processor("<image>Where?", IMAGE)).logits


def test_every_linear_layer_of_the_language_model_gets_an_adapter_and_no_other(loaded, adapted):
    inside = loaded[0].model.language_model.named_modules(prefix="model.language_model")
    linear = {name for name, module in inside if isinstance(module, torch.nn.Linear)}
    found = {name.split(".lora_A")[0] for name, _ in adapted.named_parameters() if ".lora_A" in name}
    assert found == linear
    assert len(found) == 7 * loaded[0].config.text_config.num_hidden_layers


def test_the_parameter_table_counts_every_parameter_once(loaded, adapted):
    table = parameter_table(adapted)
    assert sum(total for _, total, _ in table) == sum(p.numel() for p in adapted.parameters())
    assert sum(train for *_, train in table) == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    frozen = {part for part, _, trainable in table if not trainable}
    if loaded[0].config.family.body == "internvl":
        assert frozen == FROZEN | {"language model", "lm_head"}
        return
    assert frozen == FROZEN | {"merger"}
    parts = {part: (total, trained) for part, total, trained in table}
    vocabulary, width = adapted.lm_head.weight.shape
    assert parts["language model"][1] == vocabulary * width, "the embeddings"
    assert parts["lm_head"][1] == vocabulary * width, "without the final norm"
    merger = [p.numel() for name, p in adapted.model.visual.named_parameters() if "merger" in name]
    assert parts["merger"][0] == sum(merger)


def test_a_fresh_adapter_changes_nothing_and_a_merged_one_gives_the_same(loaded, adapted):
    model, processor = loaded
    fresh, base, unmerged = copy.deepcopy(model), logits(model, processor), logits(adapted, processor)
    setup_lora(fresh, r=4, lora_alpha=8)
    assert torch.equal(logits(fresh, processor), base)
    assert not any(module.training for module in fresh.modules()), "dropout must stay off in an evaluated model"
    with lora_off(adapted):
        assert torch.equal(logits(adapted, processor), base)
    assert (unmerged - base).abs().max() > 0.01
    merge_lora(adapted)
    assert (logits(adapted, processor) - unmerged).abs().max() <= 1e-4
    assert adapted.state_dict().keys() == model.state_dict().keys()


def test_every_trainable_tensor_is_reached_by_text_and_mask(loaded, adapted):
    processor = loaded[1]
    inputs = processor("<image>Where?", IMAGE)
    ids = torch.cat([inputs["input_ids"], torch.tensor([processor.token_ids("Sure [SEG].<|im_end|>")])], dim=1)
    output = adapted(**inputs | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, labels=ids)
    embeddings = adapted.seg_embeddings(output.last_hidden_state, ids)[0]
    decoded = adapted.decode_masks(adapted.get_sam_features(inputs["sam_pixel_values"]), embeddings)
    scores = decoded.object_score_logits.sum() + decoded.candidate_scores.sum()
    unreached = unreached_parameters(adapted, [output.loss + decoded.candidates.sum() + scores])
    assert [name for name in unreached if "grounding_encoder" not in name] == []


def test_saved_tensors_come_back(loaded, adapted, tmp_path):
    model, processor = loaded
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.1)
    folder = tmp_path / "adapter"
    save_trainable(adapted, folder)
    lora, rest = (load_file(folder / f"{name}.safetensors") for name in ("adapter_model", "trainable"))
    assert all("lora_" in name for name in lora)
    assert not any("lora_" in name for name in rest), "each tensor is written once"
    fresh = copy.deepcopy(model)
    load_trainable(fresh, folder)
    assert torch.equal(logits(fresh, processor), logits(adapted, processor))
    loaded_state = fresh.state_dict()
    assert all(torch.equal(loaded_state[name], p) for name, p in adapted.named_parameters() if p.requires_grad)
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] is None
    base = copy.deepcopy(model)
    base.load_state_dict(rest, strict=False)
    by_peft = PeftModel.from_pretrained(base, folder)
    assert torch.equal(logits(by_peft, processor), logits(adapted, processor))


def test_adapters_of_a_bfloat16_model_are_float32(tiny_model):
    model = copy.deepcopy(tiny_model).to(torch.bfloat16)
    setup_lora(model, r=2)
    assert {p.dtype for name, p in model.named_parameters() if "lora_" in name} == {torch.float32}
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.isfinite().all()


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_what_cannot_get_or_keep_lora_is_refused(tiny_model, tiny_adapted, tmp_path):
    bare = copy.deepcopy(tiny_model)
    bare.model.language_model.layers = torch.nn.ModuleList()
    refused = [
        (lambda: setup_lora(bare), r"no layer for LoRA .*self_attn"),
        (lambda: setup_lora(tiny_adapted), r"LoRA layers.*merge_lora"),
        (lambda: setup_lora(copy.deepcopy(tiny_model), r=0), r"\br is 0"),
        (lambda: tiny_adapted.save_pretrained(tmp_path / "model"), r"merge_lora\(model\)"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
    assert not (tmp_path / "model").exists()


def test_missing_truncated_and_unfitting_folders_are_refused(tiny_adapted, tiny_model, tmp_path):
    def refuses(message: str, model: Any = tiny_model) -> None:
        with pytest.raises(ValueError, match=message):
            load_trainable(copy.deepcopy(model), tmp_path / "adapter")

    refuses(r"lora\.json: file not found")
    save_trainable(tiny_adapted, tmp_path / "adapter")
    other = copy.deepcopy(tiny_model)
    setup_lora(other, r=2)
    refuses(r"lora\.json: .*'r': 4.*'r': 2", other)
    for name in ("adapter_model.safetensors", "trainable.safetensors"):
        file = tmp_path / "adapter" / name
        whole = file.read_bytes()
        file.write_bytes(whole[:100])
        refuses(rf"{name}: not a whole")
        file.write_bytes(whole)
        tensors = load_file(file)
        first = min(tensors)
        save_file(tensors | {first: torch.full_like(tensors[first], torch.nan)}, file)
        refuses(rf"{name}: tensor {first} holds NaN \({tensors[first].numel()} of {tensors[first].numel()}\)")
        file.write_bytes(whole)
    settings = tmp_path / "adapter" / "lora.json"
    whole_settings = settings.read_text()
    settings.write_text('{"r": 4, "lora_alpha": 8, "lora_dropout": 0.0}')
    refuses(r"lora\.json: the adapter is of a None language model, this model has a 'qwen2'")
    settings.write_text(whole_settings)
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    refuses(r"28 tensors do not fit")


@pytest.mark.parametrize("loaded", [QWEN3, QWEN25], indirect=True)
def test_tensors_of_another_family_are_refused_by_name(loaded, adapted, tiny_model, tmp_path):
    save_trainable(adapted, tmp_path / "adapter")
    model, language = copy.deepcopy(tiny_model), loaded[0].config.text_config.model_type
    with pytest.raises(ValueError, match=rf"lora\.json: .*'{language}'.*'qwen2'; give the model that .* trained on"):
        load_trainable(model, tmp_path / "adapter")
    assert not any("lora_" in name for name, _ in model.named_parameters()), "refused before the model is changed"
    save_trainable(with_lora(tiny_model), tmp_path / "other")
    with pytest.raises(ValueError, match=rf"'qwen2'.*'{language}'"):
        load_trainable(copy.deepcopy(loaded[0]), tmp_path / "other")
    freeze_parameters(bare := copy.deepcopy(loaded[0]))
    save_trainable(bare, tmp_path / "parts")
    assert sorted(file.name for file in (tmp_path / "parts").iterdir()) == ["lora.json", "trainable.safetensors"]
    load_trainable(copy.deepcopy(loaded[0]), tmp_path / "parts")
    with pytest.raises(ValueError, match=r"do not fit this model.*give the model that they were trained on"):
        load_trainable(copy.deepcopy(tiny_model), tmp_path / "parts")


FOREIGN: list[tuple[dict[str, Any], str]] = [
    ({"use_rslora": True}, "use_rslora is True, expected False"),
    ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is {'q_proj': 2}, expected {}"),
    ({"bias": "lora_only"}, "bias is 'lora_only', expected 'none'"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\], expected None"),
    ({"target_modules": ["q_proj"]}, r"target_modules is [\[{]'q_proj'[\]}], expected 'model"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', expected True"),
]


def foreign(tiny_model: Any, fields: dict[str, Any], name: str = "default") -> Any:
    """A copy with an adapter of the user's own making, of the sizes of `with_lora`."""
    model = copy.deepcopy(tiny_model)
    given = {"target_modules": model.config.family.lora_targets} | fields
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, **given), name)
    return model


@pytest.mark.parametrize(("fields", "difference"), FOREIGN)
def test_an_adapter_of_another_kind_is_refused_with_the_difference(
    tiny_adapted, tiny_model, tmp_path, fields, difference
):
    model = foreign(tiny_model, fields)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=rf"^the model's adapter is none of setup_lora: .*{difference}.*; merge it"):
        save_trainable(model, tmp_path / "foreign")
    assert not list(tmp_path.iterdir())
    save_trainable(tiny_adapted, tmp_path / "adapter")
    with pytest.raises(ValueError, match=difference):
        load_trainable(model, tmp_path / "adapter")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    fresh = copy.deepcopy(tiny_model)
    with pytest.raises(ValueError, match=rf"adapter_config\.json: the adapter is none .*{difference}"):
        load_trainable(fresh, tmp_path / "adapter")
    assert not hasattr(fresh, "peft_config"), "nothing was changed"


def test_adapters_of_other_names_and_methods_are_refused_and_other_beginnings_are_not(tiny_model, tmp_path):
    with pytest.raises(ValueError, match=r"adapters are \['mine'\], expected one, 'default'"):
        save_trainable(foreign(tiny_model, {}, "mine"), tmp_path / "adapter")
    model = copy.deepcopy(tiny_model)
    model.add_adapter(IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]))
    with pytest.raises(ValueError, match=r"peft_type is .*IA3.*, expected .*LORA"):
        save_trainable(model, tmp_path / "adapter")
    assert not list(tmp_path.iterdir())
    save_trainable(foreign(tiny_model, {"init_lora_weights": "gaussian"}), tmp_path / "adapter")
    load_trainable(copy.deepcopy(tiny_model), tmp_path / "adapter")
