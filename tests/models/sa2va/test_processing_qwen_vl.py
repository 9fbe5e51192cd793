"""Prompts and batches of a Qwen-VL: its chat template, the image in front, and what it refuses."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2VLImageProcessorPil

from rl_reward_network.artefacts import read_json
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.templates import chat_instruction
from tests.conftest import smooth_image
from tests.golden_qwen import CASES, FOLDERS, needs_golden_qwen
from tests.qwen_vl import CHAT, QWEN3, SYSTEM, tiny_qwen_tokenizer, write_tiny_qwen

IMAGE = "<|vision_start|>" + "<|image_pad|>" * 3 + "<|vision_end|>"
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def processor(chat_template: str = CHAT, patch: int = 16) -> Sa2VAProcessor:
    patches = Qwen2VLImageProcessorPil(patch_size=patch, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    return Sa2VAProcessor(tiny_qwen_tokenizer(chat_template), sam_image_size=256, patches=patches)


def test_the_image_stands_in_front_of_the_text() -> None:
    made = processor()
    assert made.prompt_text("<image>Where?", 3) == TURN.format(IMAGE + "Where?")
    assert made.prompt_text("Look:<image> where?", 3) == TURN.format(IMAGE + "Look: where?"), "wherever it is written"
    assert made.prompt_text("Where?", 3) == TURN.format(IMAGE + "Where?"), "or left out"
    assert made.prompt_text("<image>\nWhere?", 3) == TURN.format(IMAGE + "\nWhere?"), "the newline is the user's"
    assert made.prompt_text("Hello?") == TURN.format("Hello?")
    assert made.prompt_text("And?", past_text="before\n") == "before\n" + TURN.format("And?")


def test_braces_of_a_user_are_text() -> None:
    assert processor().prompt_text("<image>{input} {0}", 3) == TURN.format(IMAGE + "{input} {0}")


def test_a_system_turn_of_the_template_stays_in_prediction_and_is_not_trained() -> None:
    made = processor("{{ '" + SYSTEM.replace("\n", "\\n") + "' }}" + CHAT)
    assert made.prompt_text("<image>Where?", 3) == SYSTEM + TURN.format(IMAGE + "Where?")
    ids = made.tokenize_conversation([("<image>\nWhere?", "Here [SEG].")], image_tokens=3)["input_ids"]
    assert made.text(ids.tolist()) == TURN.format(IMAGE + "\nWhere?") + "Here [SEG].<|im_end|>\n"


def test_a_system_turn_stands_once_in_front_of_all_turns() -> None:
    made = processor("{{ '" + SYSTEM.replace("\n", "\\n") + "' }}" + CHAT)
    answered = made.prompt_text("Hi") + "Hello<|im_end|>\n"
    longer = made.prompt_text("And?", past_text=answered)
    assert longer == answered + TURN.format("And?")
    assert made.prompt_text("And?", past_text=answered.removeprefix(SYSTEM)) == longer
    assert (made.system_turn, processor().system_turn) == (SYSTEM, "")


def test_the_images_place_may_be_left_out_of_a_conversation() -> None:
    made = processor()
    given, left_out = ([(text, "Here [SEG].")] for text in ("<image>Where?", "Where?"))
    ids = made.tokenize_conversation(left_out, image_tokens=3)["input_ids"]
    assert ids.tolist() == made.tokenize_conversation(given, image_tokens=3)["input_ids"].tolist()
    assert ids.tolist().count(made.image_token_id) == 3


@needs_golden_qwen
@pytest.mark.parametrize("name", CASES)
def test_the_published_templates_give_the_prompts_of_the_reference(name: str) -> None:
    made, meta = Sa2VAProcessor.from_pretrained(FOLDERS[name] / "checkpoint"), read_json(FOLDERS[name] / "meta.json")
    count = meta["image_tokens"]
    whole = meta["prompt_text"].replace(f"<|image_pad|>*{count}", "<|image_pad|>" * count)
    assert made.prompt_text(meta["text"], count) == whole
    assert ("<|im_start|>system" in made.chat) == (name == "case_q25")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the chat template is missing; copy chat_template.jinja again"),
        ("{{ messages[0].content[-1].text }}", r"does not put .* in front of a text"),
        (CHAT.replace("<|image_pad|>", ""), r"does not put <\|vision_start\|><\|image_pad\|><\|vision_end\|>"),
        (CHAT.replace("{{ part.text }}", "{{ part.text }}{{ part.text }}"), r"does not put .* in front of a text"),
        (CHAT.replace("{{ part.text }}", "A question"), r"does not put .* in front of a text"),
    ],
)
def test_a_template_without_images_or_text_is_refused(template: Any, message: str) -> None:
    tokenizer = tiny_qwen_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=message):
        chat_instruction(tokenizer)


def test_batches_are_padded_on_the_left_and_counted_by_their_images() -> None:
    made, images = processor(), [smooth_image(100, 100), smooth_image(640, 700)]
    batch = made(["<image>Short.", "<image>A longer question."], images)
    tokens = (batch["image_grid_thw"].prod(1) // 4).tolist()
    assert (batch["input_ids"] == made.image_token_id).sum(1).tolist() == tokens == [400, 440]
    assert len(batch["pixel_values"]) == 4 * sum(tokens)
    lengths = batch["attention_mask"].sum(1)
    assert batch["attention_mask"][0, : lengths[1] - lengths[0]].sum() == 0
    assert batch["attention_mask"][0, -1] == 1
    assert batch["sam_pixel_values"].shape == (2, 3, 256, 256)
    assert not {"prompt_masks", "vp_overall_mask"} & batch.keys()
    assert made("Hello?").keys() == {"input_ids", "attention_mask"}


def test_image_tokens_are_those_of_the_models_features(tmp_path: Path) -> None:
    made = Sa2VAProcessor.from_pretrained(write_tiny_qwen(tmp_path / "model", QWEN3))
    inputs, counts = made.vision_inputs([smooth_image(100, 100), smooth_image(640, 700)])
    assert counts == [400, 440]
    assert [made.num_image_tokens(torch.zeros(count, 8)) for count in counts] == counts
    assert len(inputs["pixel_values"]) == 4 * sum(counts)


def test_the_resize_of_training_is_chosen_by_name() -> None:
    made = processor()
    image = smooth_image(480, 640)
    assert made.vision_inputs([image])[1] == [432]
    made.set_image_resize("training")
    assert made.vision_inputs([image])[1] == [414]
    with pytest.raises(ValueError, match=r"image_resize is 'twice', expected one of \('prediction', 'training'\)"):
        made.set_image_resize("twice")


def test_labels_cover_answers_and_their_ends_only() -> None:
    made = processor()
    turns = [("<image>Where?", "Here [SEG]."), ("And?", "No.")]
    out = made.tokenize_conversation(turns, image_tokens=3)
    kept = out["input_ids"][out["labels"] != -100]
    assert made.text(kept.tolist()) == "Here [SEG].<|im_end|>No.<|im_end|>"
    assert int((out["input_ids"] == made.image_token_id).sum()) == 3


def test_an_answer_cannot_hold_a_placeholder() -> None:
    made = processor()
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<vp>", "</vp>"]
    assert set(made.never_sampled_ids) == {made.tokenizer.convert_tokens_to_ids(name) for name in names}


@pytest.mark.parametrize(
    ("text", "image", "message"),
    [
        ("<image><image>", True, "2 '<image>'.* 1"),
        ("<image>but none", False, "1 '<image>'.* 0"),
    ],
)
def test_text_and_image_must_agree(text: str, image: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        processor()(text, smooth_image(60, 60) if image else None)


def test_regions_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="cannot be shown a region by mask_prompts; draw it"):
        processor()("<image>What?", smooth_image(60, 60), np.ones((1, 60, 60), bool))


@pytest.mark.parametrize("token", ["[SEG]", "<|image_pad|>", "<|vision_end|>"])
def test_a_tokenizer_without_a_special_token_is_refused(token: str) -> None:
    tokenizer = tiny_qwen_tokenizer()
    vocabulary = {name: index for name, index in tokenizer.get_vocab().items() if name != token}
    tokenizer.get_vocab = lambda: vocabulary
    with pytest.raises(ValueError, match="no token " + repr(token).replace("[", r"\[").replace("|", r"\|")):
        Sa2VAProcessor(tokenizer, patches=copy.copy(processor().patches))


def test_predict_forward_needs_the_processor(tmp_path: Path, tiny_processor: Sa2VAProcessor) -> None:
    """The tokenizer alone does not know how to cut an image into patches."""
    model, made = load_sa2va_model(write_tiny_qwen(tmp_path / "model", QWEN3))
    with pytest.raises(ValueError, match=r"needs its image processor; give processor=Sa2VAProcessor"):
        model.predict_forward(image=smooth_image(60, 60), text="<image>Where?", tokenizer=made.tokenizer)
    with pytest.raises(ValueError, match="image_resize is 'training', but this model cuts images into tiles"):
        tiny_processor.set_image_resize("training")
