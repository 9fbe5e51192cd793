"""transformers' chat format, its pipelines, and a conversation about one image that is read once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, pipeline

from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.sa2va import Sa2VAForConditionalGeneration, Sa2VAProcessor
from rl_reward_network.models.sa2va.chat_sa2va import read_chat
from rl_reward_network.models.sa2va.checkpoint_sa2va import EMBEDDED
from tests.qwen_vl import QWEN3, write_tiny_qwen

NANO = str(EMBEDDED[DEFAULT_MODEL])
SEGMENT = "Please segment the red thing."


def red_thing() -> np.ndarray:
    image = np.full((96, 96, 3), 230, dtype=np.uint8)
    image[30:60, 20:80] = (200, 30, 30)
    return image


IMAGE = red_thing()


def turn(text: str, role: str = "user", image: Any = None) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [] if image is None else [{"type": "image", "image": image}]
    return {"role": role, "content": [*parts, {"type": "text", "text": text}]}


@pytest.fixture(scope="module")
def nano() -> tuple[Any, Sa2VAProcessor]:
    return Sa2VAForConditionalGeneration.from_pretrained(NANO), Sa2VAProcessor.from_pretrained(NANO)


def test_one_message_is_the_prompt_of_the_processor(nano: Any, tmp_path: Path) -> None:
    _, processor = nano
    expected = processor(f"<image>{SEGMENT}", IMAGE)
    Image.fromarray(IMAGE).save(tmp_path / "image.png")
    path = {"role": "user", "content": [{"type": "image", "path": str(tmp_path / "image.png")}]}
    path["content"].append({"type": "text", "text": SEGMENT})
    for messages in ([turn(SEGMENT, image=IMAGE)], [path], [[turn(SEGMENT, image=Image.fromarray(IMAGE))]]):
        inputs = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
        assert inputs.keys() == expected.keys()
        for name, tensor in expected.items():
            assert isinstance(tensor, list) or torch.equal(inputs[name], tensor), name
    text = processor.apply_chat_template([turn("What is Dice?")])
    assert text == processor.prompt_text("What is Dice?")


def test_a_conversation_has_the_text_of_training(nano: Any) -> None:
    _, processor = nano
    turns = [(f"<image>{SEGMENT}", "Sure, [SEG]."), ("And now?", "A circle.")]
    messages = [
        turn(SEGMENT, image=IMAGE),
        turn("Sure, [SEG].", "assistant"),
        turn("And now?"),
        {"role": "assistant", "content": "A circle."},
        turn("Why?"),
    ]
    ids = processor.apply_chat_template(messages, tokenize=True)[0].tolist()
    tokens = processor.vision_inputs([IMAGE])[1][0]
    trained = processor.tokenize_conversation([*turns, ("Why?", "x")], tokens)["input_ids"].tolist()
    assert ids == trained[: len(ids)]
    begun = processor.apply_chat_template(messages[:2])
    assert begun.endswith(processor.apply_chat_template(messages[:1])[-20:] + "Sure, [SEG].")


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([turn("Be brief.", "system"), turn("x")], "no system message"),
        ([turn("x"), turn("y")], "expected user, assistant, user"),
        ([], "expected user, assistant, user"),
        ([turn("x"), turn("y", "assistant"), turn("z", image=IMAGE)], r"messages\[2\]: 1 images"),
        ([{"role": "user", "content": [{"type": "video", "video": "x"}]}], "of the type 'video'"),
        ([{"role": "user", "content": [{"type": "image"}]}], "none of the keys"),
    ],
)
def test_messages_that_cannot_be_answered_are_refused(messages: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_chat(messages)


def test_another_argument_of_a_chat_is_refused(nano: Any) -> None:
    with pytest.raises(ValueError, match="tools="):
        nano[1].apply_chat_template([turn("x")], tools=[{"name": "search"}])


def test_the_pipeline_of_transformers_answers(nano: Any) -> None:
    model, processor = nano
    expected = model.predict_forward(image=IMAGE, text=f"<image>{SEGMENT}", processor=processor)
    texts = pipeline("image-text-to-text", model=NANO, dtype="float32")
    messages = [turn(SEGMENT, image=Image.fromarray(IMAGE))]
    (answer,) = texts(messages, return_full_text=False, skip_special_tokens=False, max_new_tokens=12)
    assert answer["generated_text"] == expected["prediction"]


@pytest.mark.parametrize("how", [{"top_p": 0.5}, {"top_k": 3}, {"repetition_penalty": 1.5}], ids=str)
def test_generate_takes_the_usual_ways_to_sample(nano: Any, how: dict[str, Any]) -> None:
    model, processor = nano
    inputs = processor("<image>What is this?", IMAGE)
    plain = {"max_new_tokens": 8, "do_sample": True, "temperature": 3.0}
    texts = []
    for settings in (plain, plain | how):
        torch.manual_seed(0)
        texts.append([processor.batch_decode(model.generate(**inputs, **settings))[0] for _ in range(4)])
    assert texts[0] != texts[1]


@pytest.mark.parametrize("kind", ["nano", QWEN3])
def test_a_saved_processor_needs_no_model(kind: str, nano: Any, tmp_path: Path) -> None:
    folder = NANO if kind == "nano" else write_tiny_qwen(tmp_path / "model", kind)
    processor = Sa2VAProcessor.from_pretrained(folder)
    processor.save_pretrained(tmp_path / "alone")
    again = Sa2VAProcessor.from_pretrained(tmp_path / "alone")
    assert (repr(again), again.grid, again.chat) == (repr(processor), processor.grid, processor.chat)
    expected, inputs = processor(f"<image>{SEGMENT}", IMAGE), again(f"<image>{SEGMENT}", IMAGE)
    assert all(torch.equal(inputs[name], expected[name]) for name in ("input_ids", "pixel_values"))
    assert repr(AutoProcessor.from_pretrained(NANO)) == repr(nano[1])


def test_a_processor_is_pushed_to_the_hub_whole(nano: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pushed: dict[str, Any] = {}

    def push(self: Any, repo_id: str, **how: Any) -> None:
        self.save_pretrained(tmp_path / "uploaded", max_shard_size="5GB")  # as transformers does
        pushed.update(how, repo_id=repo_id)

    monkeypatch.setattr(Sa2VAProcessor, "push_to_hub", push)
    nano[1].save_pretrained(tmp_path / "mine", push_to_hub=True, private=True)
    assert pushed == {"repo_id": "mine", "private": True}
    assert {f.name for f in (tmp_path / "uploaded").iterdir()} == {f.name for f in (tmp_path / "mine").iterdir()}
