"""Qwen-VL folders: conversion in both directions, and damaged folders and relatives refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor

from rl_reward_network.cli.convert import Args, main
from rl_reward_network.models.sa2va.checkpoint_sa2va import open_checkpoint
from rl_reward_network.models.sa2va.key_map_sa2va import to_original, to_ours
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.modeling_sa2va import Sa2VAForConditionalGeneration
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from tests.golden_qwen import CASES, FOLDERS, needs_golden_qwen
from tests.qwen_vl import QWEN3, QWEN25, write_tiny_qwen

SAM2, SAM3 = "grounding_encoder.sam2_model.image_encoder.trunk.", "grounding_encoder.sam2_model.backbone."


@pytest.fixture(scope="module", params=[QWEN3, QWEN25])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An official folder; tests must not change it."""
    return write_tiny_qwen(tmp_path_factory.mktemp("qwen") / "model", request.param)


@pytest.fixture
def broken(folder: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(folder, tmp_path / "broken"))


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def test_converted_folders_come_back_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    check_round_trip(folder, tmp_path)


@needs_golden_qwen
@pytest.mark.parametrize("name", CASES)
def test_folders_of_the_official_exporter_come_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    check_round_trip(FOLDERS[name] / "checkpoint", tmp_path)


def check_round_trip(original: Path, tmp_path: Path) -> None:
    """Weights, configuration, image processor, tokenizer and chat template, and the model that our layout gives."""
    main(Args(str(original), tmp_path / "ours"))
    main(Args(str(tmp_path / "ours"), tmp_path / "back"))
    assert same(load_file(original / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors"))
    for name in ("config.json", "preprocessor_config.json", "tokenizer_config.json", "tokenizer.json"):
        before, after = (json.loads((path / name).read_text()) for path in (original, tmp_path / "back"))
        assert before == after, name
    for name in ("preprocessor_config.json", "chat_template.jinja"):
        assert len({(path / name).read_bytes() for path in (original, tmp_path / "ours", tmp_path / "back")}) == 1
    models = [Sa2VAForConditionalGeneration.from_pretrained(path) for path in (original, tmp_path / "ours")]
    assert same(models[0].state_dict(), models[1].state_dict())
    assert models[0].config.seg_token_id == models[1].config.seg_token_id
    assert models[0].config.text_config.to_dict() == models[1].config.text_config.to_dict()
    assert models[0].config.vision_config.to_dict() == models[1].config.vision_config.to_dict()


def test_what_save_pretrained_writes_loads_again(folder: Path, tmp_path: Path) -> None:
    model, processor = load_sa2va_model(folder)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    again, other = load_sa2va_model(tmp_path)
    assert same(again.state_dict(), model.state_dict())
    assert other.chat == processor.chat
    assert vars(other.patches) == vars(processor.patches)


def test_auto_classes_load_our_processor(folder: Path, tmp_path: Path) -> None:
    """The base model's files name its own processor, which would be found first."""
    for name in ("preprocessor_config.json", "tokenizer_config.json"):
        edit(shutil.copytree(folder, tmp_path / "named", dirs_exist_ok=True) / name, processor_class="Qwen3VLProcessor")
    main(Args(str(tmp_path / "named"), tmp_path / "converted"))
    Sa2VAProcessor.from_pretrained(tmp_path / "named").save_pretrained(tmp_path / "saved")
    shutil.copyfile(tmp_path / "converted" / "config.json", tmp_path / "saved" / "config.json")
    for path in (tmp_path / "converted", tmp_path / "saved"):
        assert type(AutoProcessor.from_pretrained(path)) is Sa2VAProcessor
    main(Args(str(tmp_path / "converted"), tmp_path / "back"))
    assert {file.name for file in (tmp_path / "back").iterdir()} == {file.name for file in folder.iterdir()}


def test_the_norm_of_qwen3_moves_into_the_head_and_back(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    config, tensors = checkpoint.model_config(), checkpoint.tensors()
    ours = to_ours(tensors, config)
    head = "lm_head.norm.weight" if config.text_config.model_type == QWEN3 else "model.language_model.norm.weight"
    assert torch.equal(ours[head], tensors["model.model.language_model.norm.weight"])
    assert torch.equal(ours["lm_head.weight"], tensors["model.lm_head.weight"])
    assert not any(name.startswith("model.model.") for name in ours)
    assert same(to_original(ours, config), tensors)


def test_unknown_keys_are_named_in_either_direction(folder: Path) -> None:
    config = open_checkpoint(folder).model_config()
    with pytest.raises(ValueError, match=r"1 keys .*language_model\.lm_head\.weight"):  # of an InternVL
        to_ours({"language_model.lm_head.weight": torch.zeros(1)}, config)
    with pytest.raises(ValueError, match=r"no original name for elsewhere\.weight"):
        to_original({"elsewhere.weight": torch.zeros(1)}, config)


def test_a_projector_is_not_part_of_a_qwen_vl(broken: Path) -> None:
    add_key(broken, "mlp1.0.bias")
    with pytest.raises(ValueError, match=r"1 not expected: mlp1\.0\.bias"):
        load_sa2va_model(broken)


def without(broken: Path, name: str) -> None:
    (broken / name).unlink()


def cut(broken: Path, name: str) -> None:
    (broken / name).write_text((broken / name).read_text()[:40])


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no image processor": (
        lambda path: without(path, "preprocessor_config.json"),
        r"preprocessor_config\.json: is missing; a Qwen-VL needs it",
    ),
    "cut image processor": (lambda path: cut(path, "preprocessor_config.json"), r"preprocessor_config\.json: "),
    "other patches": (
        lambda path: edit(path / "preprocessor_config.json", patch_size=12),
        r"preprocessor_config\.json: patch_size is 12, the model's is 1[46]; copy the right file",
    ),
    "other merge": (
        lambda path: edit(path / "preprocessor_config.json", merge_size=4),
        r"preprocessor_config\.json: merge_size is 4, the model's is 2",
    ),
    "no chat template": (
        lambda path: without(path, "chat_template.jinja"),
        "broken.*: the chat template is missing; copy chat_template.jinja again",
    ),
    "chat template without images": (
        lambda path: (path / "chat_template.jinja").write_text("{{ messages[0].content[-1].text }}"),
        r"broken.*chat template does not put <\|vision_start\|><\|image_pad\|><\|vision_end\|> in front",
    ),
    "no text_config": (lambda path: edit(path / "config.json", text_config=None), r"text_config\.model_type is None"),
    "other language model": (
        lambda path: edit(path / "config.json", text_config={"model_type": "qwen4_vl_text"}),
        r"config\.json: text_config\.model_type is 'qwen4_vl_text'; supported are .*Qwen3-VL",
    ),
    "other vision tower": (
        lambda path: edit(path / "config.json", vision_config={"model_type": "siglip"}),
        r"config\.json: vision_config\.model_type is 'siglip', expected 'qwen",
    ),
    "no vision_config": (
        lambda path: edit(path / "config.json", vision_config=None),
        r"config\.json: vision_config\.model_type is None, expected 'qwen",
    ),
    "SAM 3": (lambda path: rename_keys(path, SAM2, SAM3 + "vision_backbone.trunk."), "this is Sa2VA with SAM 3, which"),
    "Sa2VA-i": (
        lambda path: add_key(path, "grounding_encoder.sam2_model.sam_mask_decoder_modified.iou_token.weight"),
        "this is Sa2VA-i, which is not supported; supported are Sa2VA checkpoints with SAM 2",
    ),
    "LLaVA": (
        lambda path: edit(path / "config.json", architectures=["Sa2VAChatModelLlava"]),
        r"config\.json: Sa2VA on LLaVA is not supported",
    ),
    "LLaVA by its file": (
        lambda path: edit(path / "config.json", auto_map={"AutoModel": "modeling_sa2va_llava.Sa2VAChatModel"}),
        r"config\.json: Sa2VA on LLaVA is not supported",
    ),
    "SaSaSa2VA": (
        lambda path: edit(path / "config.json", auto_map={"AutoModel": "modeling_sasasa2va_chat.SaSaSa2VAChatModel"}),
        r"config\.json: SaSaSa2VA .*not supported",
    ),
}


def rename_keys(path: Path, old: str, new: str) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file({key.replace(old, new): tensor for key, tensor in tensors.items()}, path / "model.safetensors")


def add_key(path: Path, key: str) -> None:
    save_file(load_file(path / "model.safetensors") | {key: torch.zeros(1)}, path / "model.safetensors")


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_and_a_relative_are_refused_in_one_line(broken: Path, name: str, tmp_path: Path) -> None:
    damage, message = DAMAGES[name]
    damage(broken)
    with pytest.raises(ValueError, match=message) as error:
        load_sa2va_model(broken)
    assert len(str(error.value).splitlines()) == 1
    assert str(broken) in str(error.value)
    with pytest.raises(ValueError, match=message):
        main(Args(str(broken), tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_processor_alone_needs_the_same_files(broken: Path) -> None:
    (broken / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match=r"preprocessor_config\.json: is missing"):
        Sa2VAProcessor.from_pretrained(broken)


def test_sharded_weights_of_a_relative_are_told_from_their_headers(broken: Path) -> None:
    """No tensor is read, so the refusal takes no time at real size."""
    tensors = load_file(broken / "model.safetensors")
    (broken / "model.safetensors").unlink()
    file, key = "model-00001-of-00001.safetensors", SAM3 + "vision_backbone.trunk.pos_embed"
    save_file(tensors | {key: torch.zeros(1)}, broken / file)
    (broken / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys([*tensors, key], file)})
    )
    with pytest.raises(ValueError, match="this is Sa2VA with SAM 3"):
        Sa2VAForConditionalGeneration.from_pretrained(broken)
