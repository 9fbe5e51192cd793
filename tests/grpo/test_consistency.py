"""The table that compares supervised fine-tuning with GRPO: its rows for test models, and for models with errors."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.random_qwen_vl import CHAT
from rl_reward_network.artefacts import read_json
from rl_reward_network.grpo import consistency
from rl_reward_network.grpo.consistency import (
    IMAGE_QWEN_VL,
    TEMPLATES,
    TURNS,
    ConsistencyRow,
    consistency_rows,
    differing,
    dtype_rows,
    loading_row,
    lora_rows,
    part_rows,
    reference_conversation,
    text_rows,
)
from rl_reward_network.grpo.trainable import prepare_model
from rl_reward_network.models.lora import parameter_table
from rl_reward_network.models.sa2va.checkpoint_sa2va import CheckpointFolder, open_checkpoint
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from tests.conftest import GOLDEN, SHARED, needs_golden
from tests.qwen_vl import QWEN3, QWEN25, SYSTEM, write_tiny_qwen

MEANT = {"LoRA dropout", "embeddings", "lm_head", "SAM 2 prompt encoder", "question for a mask", "tiles"}


@pytest.fixture(scope="module")
def prepared(tiny_checkpoint: Path) -> tuple[Any, Sa2VAProcessor, CheckpointFolder]:
    """As the script makes them; tests that change something copy it first."""
    model, processor = load_sa2va_model(tiny_checkpoint)
    processor.max_tiles = 1
    prepare_model(model, 128, 256)
    return model, processor, open_checkpoint(tiny_checkpoint)


def by_item(rows: list[ConsistencyRow]) -> dict[str, ConsistencyRow]:
    result = {row.item: row for row in rows}
    assert len(result) == len(rows)
    return result


def test_a_prepared_model_differs_only_where_it_is_meant(prepared: Any) -> None:
    rows = consistency_rows(*prepared)
    assert differing(rows) == []
    meant = {row.item: row.status for row in rows if row.status.startswith("meant: ")}
    assert meant.keys() == MEANT
    assert all(len(reason) > len("meant: ") + 20 for reason in meant.values())
    assert {row.status for row in rows if row.item not in meant} == {"same"}


def test_counts_are_those_of_the_model(prepared: Any) -> None:
    model = prepared[0]
    rows = by_item(part_rows(model))
    words = model.get_input_embeddings().weight.numel()
    total = next(total for part, total, _ in parameter_table(model) if part == "language model")
    assert rows["embeddings"] == ConsistencyRow(
        "embeddings", "trainable", f"frozen, {words:,}", rows["embeddings"].status
    )
    assert rows["language model"].rl == f"frozen, {total - words:,}"
    assert rows["LoRA"].rl == f"trainable, {128 * 2 * (4 * 64 + 2 * (64 + 32) + 3 * (64 + 96)):,}"
    counted = sum(int(row.rl.split(", ")[1].replace(",", "")) for row in rows.values())
    assert counted == sum(p.numel() for p in model.parameters()), "each parameter is in one row"


def freed_tower(model: Any) -> None:
    model.model.vision_tower.requires_grad_(True)


def frozen_decoder_layer(model: Any) -> None:
    model.grounding_encoder.mask_decoder.conv_s0.requires_grad_(False)


def freed_embeddings(model: Any) -> None:
    model.get_input_embeddings().requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "items"),
    [
        (freed_tower, ["vision tower"]),
        (frozen_decoder_layer, ["SAM 2 mask decoder"]),
        (freed_embeddings, []),  # as the recipe does
    ],
)
def test_another_part_that_trains_is_named(prepared: Any, change: Callable[[Any], None], items: list[str]) -> None:
    model = copy.deepcopy(prepared[0])
    change(model)
    assert differing(part_rows(model)) == items


def test_part_of_a_part_is_counted(prepared: Any) -> None:
    model = copy.deepcopy(prepared[0])
    frozen_decoder_layer(model)
    decoder = model.grounding_encoder.mask_decoder
    trained = sum(p.numel() for p in decoder.parameters() if p.requires_grad)
    total = sum(p.numel() for p in decoder.parameters())
    assert by_item(part_rows(model))["SAM 2 mask decoder"].rl == f"{trained:,} trainable, {total:,}"


@pytest.mark.parametrize(
    ("r", "alpha", "narrow", "wide"),
    [
        (128, 256, [], []),
        (16, 32, [], ["LoRA rank", "LoRA alpha"]),
        (16, 16, ["LoRA rank", "LoRA alpha"], ["LoRA rank", "LoRA alpha"]),
        (128, 128, ["LoRA alpha"], ["LoRA alpha"]),
    ],
)
def test_a_smaller_rank_is_meant_on_a_narrow_model_at_the_same_scale(
    tiny_model: Any, r: int, alpha: int, narrow: list[str], wide: list[str]
) -> None:
    model = copy.deepcopy(tiny_model)
    prepare_model(model, r, alpha)
    assert differing(lora_rows(model)) == narrow
    model.config.text_config.hidden_size = 896  # Sa2VA-1B's
    assert differing(lora_rows(model)) == wide


def test_dropout_like_the_recipes_is_the_same_and_another_is_not_meant(prepared: Any) -> None:
    model = copy.deepcopy(prepared[0])
    for dropout, status in ((0.05, "same"), (0.1, "DIFFERS")):
        model.peft_config["default"].lora_dropout = dropout
        assert by_item(lora_rows(model))["LoRA dropout"].status == status


def test_a_layer_without_lora_and_one_with_lora_elsewhere_are_noticed(prepared: Any) -> None:
    model = copy.deepcopy(prepared[0])
    block = model.model.language_model.layers[0].mlp
    adapted, block.up_proj = block.up_proj, block.up_proj.get_base_layer()
    row = by_item(lora_rows(model))["LoRA targets"]
    assert (row.status, "up_proj 2" in row.sft, "up_proj 1" in row.rl) == ("DIFFERS", True, True)
    block.up_proj = adapted
    assert by_item(lora_rows(model))["LoRA targets"].status == "same"
    model.lm_head = copy.deepcopy(adapted)
    row = by_item(lora_rows(model))["LoRA targets"]
    assert (row.status, "lm_head 1" in row.rl) == ("DIFFERS", True)


@needs_golden
def test_the_expected_ids_are_the_references_own() -> None:
    expected = load_file(GOLDEN / "expected.safetensors")
    processor = Sa2VAProcessor.from_pretrained(GOLDEN / "checkpoint")
    ids, labels = reference_conversation(processor.tokenizer, TEMPLATES["qwen_chat"], 256)
    assert ids == expected["train_conversation_input_ids"].tolist()
    assert labels == expected["train_conversation_labels"].tolist()


@needs_golden
def test_the_golden_model_is_consistent() -> None:
    folder = open_checkpoint(GOLDEN / "checkpoint")
    model, processor = load_sa2va_model(folder.path)
    prepare_model(model, 128, 256)
    rows = consistency_rows(model, processor, folder)
    assert differing(rows) == []
    assert by_item(rows)["loading"].sft == "425 tensors, official layout"


@pytest.mark.parametrize("template", TEMPLATES)
def test_our_tokenisation_is_the_references_in_every_chat_format(tiny_processor: Any, template: str) -> None:
    processor = Sa2VAProcessor(tiny_processor.tokenizer, template)
    assert differing(text_rows(processor, template.replace("_", "-"))) == []


def test_ids_of_a_conversation_by_hand(tiny_processor: Any) -> None:
    """Each piece by itself; answer and suffix are labelled, the line break behind them is not."""
    ids, labels = reference_conversation(tiny_processor.tokenizer, TEMPLATES["qwen_chat"], 4)
    image = "<img>" + 4 * "<IMG_CONTEXT>" + "</img>"
    asked = TURNS[0][0].replace("<image>", image)
    said = tiny_processor.text([label for label in labels if label >= 0])
    assert said == "Sure, it is [SEG].<|im_end|>It is a small round object.<|im_end|>"
    assert tiny_processor.text(ids) == (
        f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\nSure, it is [SEG].<|im_end|>\n"
        "<|im_start|>user\nWhat is region1?<|im_end|>\n<|im_start|>assistant\nIt is a small round object.<|im_end|>\n"
    )
    plain = reference_conversation(tiny_processor.tokenizer, TEMPLATES["vicuna"], 4)[1]
    ends = [label for label in plain if label == tiny_processor.tokenizer.eos_token_id]
    assert len(ends) == 2, "a format without a suffix ends its answers with the eos token"


def test_another_chat_format_than_the_checkpoints_is_noticed(prepared: Any) -> None:
    processor = copy.copy(prepared[1])
    processor.template = replace(processor.template, separator="")
    rows = by_item(text_rows(processor, "qwen_chat"))
    ids, _ = reference_conversation(processor.tokenizer, TEMPLATES["qwen_chat"], processor.tokens_per_tile)
    end = ids.index(processor.token_ids("<|im_end|>")[0], ids.index(processor.seg_token_id))
    assert differing(list(rows.values())) == ["chat template", "conversation: ids", "conversation: labels"]
    assert rows["conversation: ids"].rl == f"{len(ids) - 2} ids, others from position {end + 1}"


def test_a_question_that_is_not_the_recipes_is_noticed(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consistency, "segment_question", lambda caption: f"Segment {caption}")
    assert differing(text_rows(prepared[1], "qwen_chat")) == ["question for a mask"]


def test_dtypes(prepared: Any) -> None:
    model = copy.deepcopy(prepared[0]).to(torch.bfloat16)
    trained, frozen = dtype_rows(model)
    assert (trained.rl, trained.status) == ("bfloat16", "DIFFERS")
    assert frozen.status == "meant: half the memory; both compute in bfloat16 on a GPU"
    prepared_half = copy.deepcopy(prepared[0])
    prepared_half.model.vision_tower.to(torch.float16)
    assert by_item(dtype_rows(prepared_half))["dtype of what is frozen"].rl == "float16, float32"
    assert differing(dtype_rows(prepared_half)) == ["dtype of what is frozen"]


def test_tensors_that_were_not_loaded_are_counted(prepared: Any, tmp_path: Path) -> None:
    model, _, folder = prepared
    assert loading_row(model, folder).rl.endswith(" loaded, 0 missing, 0 surplus")
    state = load_file(folder.path / "model.safetensors")
    count, name = len(state), "text_hidden_fcs.0.bias"
    state["something.else"] = state.pop(name)
    save_file(state, tmp_path / "model.safetensors")
    row = loading_row(model, replace(folder, path=tmp_path))
    assert row.rl == f"{count - 1} loaded, 1 missing, 1 surplus"
    assert row.status == "DIFFERS"


# ---- on a Qwen-VL ----


@pytest.fixture(scope="module", params=[(QWEN3, CHAT), (QWEN25, SYSTEM + CHAT)])
def prepared_qwen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Qwen3-VL without a system turn, Qwen2.5-VL with one, prepared as for training."""
    folder = write_tiny_qwen(tmp_path_factory.mktemp("qwen") / "model", *request.param)
    model, processor = load_sa2va_model(folder)
    prepare_model(model, 128, 256)
    return model, processor, open_checkpoint(folder)


def test_a_prepared_qwen_vl_trains_as_its_recipe_but_for_what_is_meant(prepared_qwen: Any) -> None:
    rows = by_item(consistency_rows(*prepared_qwen))
    system = {"chat template", "question cut behind the image"} if "system" in prepared_qwen[1].chat else set()
    assert differing(list(rows.values())) == []
    meant = {item for item, row in rows.items() if row.status.startswith("meant: ")}
    assert meant == {"LoRA dropout", "SAM 2 prompt encoder", "question for a mask", "image resize", *system}
    assert "mlp1" not in rows
    assert "tiles" not in rows
    parts = ("vision tower", "merger", "language model", "embeddings", "LoRA", "lm_head", "text_hidden_fcs")
    assert [rows[part].rl.split(",")[0] for part in parts] == ["frozen"] * 3 + ["trainable"] * 4
    counted = sum(int(row.rl.split(", ")[1].replace(",", "")) for row in part_rows(prepared_qwen[0]))
    assert counted == sum(p.numel() for p in prepared_qwen[0].parameters()), "each parameter is in one row"


def test_tokens_of_an_image_that_is_resized_once_are_the_recipes(prepared_qwen: Any) -> None:
    model, processor, _ = prepared_qwen
    expected = {QWEN3: ("once: 425", "twice: 400"), QWEN25: ("once: 532", "twice: 551")}
    sft, rl = expected[model.config.text_config.model_type]
    row = by_item(text_rows(processor, None))["image resize"]
    assert (row.sft, row.rl) == (f"{sft} tokens of 301 x 199 pixels", f"{rl} tokens of 301 x 199 pixels")
    once = copy.copy(processor)
    once.set_image_resize("training")
    assert by_item(text_rows(once, None))["image resize"].status == "same"


def test_a_system_turn_alone_is_meant_and_another_chat_format_is_not(prepared_qwen: Any) -> None:
    processor = copy.copy(prepared_qwen[1])
    processor.chat = processor.chat.replace("<|im_start|>user\n", "<|im_start|>user ")
    assert differing(text_rows(processor, None)) == ["chat template", "question cut behind the image"]


def test_a_merger_that_trains_and_a_head_that_does_not_are_named(prepared_qwen: Any) -> None:
    model = copy.deepcopy(prepared_qwen[0])
    model.model.visual.merger.requires_grad_(True)
    model.text_hidden_fcs.requires_grad_(False)
    assert differing(part_rows(model)) == ["merger", "text_hidden_fcs"]


@needs_golden
@pytest.mark.parametrize("case", ["case_q3", "case_q25"])
def test_the_recipes_ids_of_a_qwen_vl_are_the_references_own(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = SHARED / "golden" / case
    expected = load_file(folder / "expected.safetensors")
    said = read_json(folder / "train_conversation.json")["conversation"]
    turns = [(said[n]["value"], said[n + 1]["value"]) for n in range(0, len(said), 2)]
    processor = Sa2VAProcessor.from_pretrained(folder / "checkpoint")
    tokens = int(expected["train_image_grid_thw"].prod()) // 4
    monkeypatch.setattr(consistency, "TURNS", turns)
    ids, labels = reference_conversation(processor.tokenizer, TEMPLATES["qwen_chat"], tokens, IMAGE_QWEN_VL)
    assert ids == expected["train_input_ids"].flatten().tolist()
    assert labels == expected["train_labels"].flatten().tolist()
