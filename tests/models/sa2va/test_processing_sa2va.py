"""Prompts, batches, tiles, regions and labels; and what is refused."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from rl_reward_network.atomic_io import read_json
from rl_reward_network.models.sa2va.checkpoint_sa2va import EMBEDDED
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.templates import chat_instruction, read_chat
from tests.conftest import smooth_image, tiny_tokenizer
from tests.golden_qwen import CASES, FOLDERS, needs_golden_qwen
from tests.qwen_vl import CHAT, QWEN3, SYSTEM, tiny_qwen_tokenizer, write_tiny_qwen


def test_tiles_are_cut_row_by_row_with_the_thumbnail_last(tiling_processor):
    image = smooth_image(640, 700)
    tiles = tiling_processor.tiles(image)
    resized = np.array(Image.fromarray(image).resize((896, 896)))
    assert len(tiles) == 5
    assert np.array_equal(np.array(tiles[1]), resized[:448, 448:])
    assert np.array_equal(np.array(tiles[2]), resized[448:, :448])
    assert np.array_equal(np.array(tiles[4]), np.array(Image.fromarray(image).resize((448, 448))))


def test_sam_pixels_use_bfloat16_rounded_constants(tiny_processor):
    white = np.full((10, 20, 3), 255, dtype=np.uint8)
    pixels = tiny_processor.sam_pixel_values(white)
    mean, std = torch.tensor([0.484375, 0.455078125, 0.40625]), torch.tensor([0.228515625, 0.2236328125, 0.224609375])
    assert pixels.shape == (1, 3, 256, 256)
    assert torch.allclose(pixels[0, :, 0, 0], (1 - mean) / std, atol=1e-6)


def test_region_cells_equal_torch_nearest_sampling(tiny_processor):
    regions = np.random.default_rng(0).random((2, 37, 53)) > 0.5
    nearest = F.interpolate(torch.tensor(regions)[None].float(), size=(16, 16), mode="nearest")[0].bool()
    assert torch.equal(tiny_processor.region_cells(regions), nearest)


def test_a_region_between_the_sample_points_gets_its_nearest_cell(tiny_processor):
    region = np.zeros((1, 160, 160), dtype=bool)
    region[0, 55:58, 33] = True  # sample points lie at multiples of 10; (58, 33) is nearest to row 6, column 3
    with pytest.warns(UserWarning, match=r"region 1 \(3 px\).*16x16"):
        cells = tiny_processor.region_cells(region)
    assert cells[0].nonzero().tolist() == [[6, 3]]


def test_the_prompt_with_regions_reads_as_in_the_reference(tiny_processor):
    cells = torch.zeros(2, 16, 16, dtype=torch.bool)
    cells[0, :2, 0] = True
    cells[1, 5, 5] = True
    text = tiny_processor.prompt_text("<image>What is region1?", tiny_processor.tokens_per_tile, cells)
    context = "<IMG_CONTEXT>"
    assert text == (
        f"<|im_start|>user\n<img>{context * 256}</img>\nThere are 2 part regions in the picture: "
        f"region1<vp>{context * 2}</vp>, region2<vp>{context}</vp>.\n"
        "What is region1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_batches_are_padded_on_the_left(tiling_processor):
    images = [smooth_image(100, 100), smooth_image(640, 700)]
    batch = tiling_processor(["<image>Short.", "<image>A longer question."], images)
    lengths = batch["attention_mask"].sum(1).tolist()
    assert lengths[0] < lengths[1] == batch["input_ids"].shape[1]
    assert batch["attention_mask"][0, : lengths[1] - lengths[0]].sum() == 0
    assert batch["pixel_values"].shape == (6, 3, 448, 448)
    assert batch["sam_pixel_values"].shape == (2, 3, 256, 256)
    assert batch["vp_overall_mask"].tolist() == [False] * 6
    batch = tiling_processor(["<image>a", "<image>b"], images[::-1], mask_prompts=[np.ones((1, 640, 700), bool), None])
    assert batch["vp_overall_mask"].tolist() == [False, False, False, False, True, False], "the last tile of the first"
    assert [tuple(cells.shape) for cells in batch["prompt_masks"]] == [(1, 16, 16)]


# ---- of a Qwen-VL: its chat template, the image in front ------------------------------------------------------------

IMAGE = "<|vision_start|>" + "<|image_pad|>" * 3 + "<|vision_end|>"
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def qwen_processor(chat_template: str = CHAT, patch: int = 16) -> Sa2VAProcessor:
    patches = Qwen2VLImageProcessorPil(patch_size=patch, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    return Sa2VAProcessor(tiny_qwen_tokenizer(chat_template), sam_image_size=256, patches=patches)


def test_the_image_stands_in_front_of_the_text():
    made = qwen_processor()
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<vp>", "</vp>"]
    assert set(made.never_sampled_ids) == {made.tokenizer.convert_tokens_to_ids(name) for name in names}
    for text, expected in (
        ("<image>Where?", "Where?"),
        ("Look:<image> where?", "Look: where?"),  # wherever it is written
        ("Where?", "Where?"),  # or left out
        ("<image>\nWhere?", "\nWhere?"),  # the newline is the user's
        ("<image>{input} {0}", "{input} {0}"),  # and so are braces
    ):
        assert made.prompt_text(text, 3) == TURN.format(IMAGE + expected)
    assert made.prompt_text("Hello?") == TURN.format("Hello?")
    assert made.prompt_text("And?", past_text="before\n") == "before\n" + TURN.format("And?")


def test_a_system_turn_of_the_template_stands_once_in_prediction_and_is_not_trained():
    made = qwen_processor("{{ '" + SYSTEM.replace("\n", "\\n") + "' }}" + CHAT)
    assert made.prompt_text("<image>Where?", 3) == SYSTEM + TURN.format(IMAGE + "Where?")
    ids = made.tokenize_conversation([("<image>\nWhere?", "Here [SEG].")], image_tokens=3)["input_ids"]
    assert made.text(ids.tolist()) == TURN.format(IMAGE + "\nWhere?") + "Here [SEG].<|im_end|>\n"
    answered = made.prompt_text("Hi") + "Hello<|im_end|>\n"
    longer = made.prompt_text("And?", past_text=answered)
    assert longer == answered + TURN.format("And?")
    assert made.prompt_text("And?", past_text=answered.removeprefix(SYSTEM)) == longer
    assert (made.system_turn, qwen_processor().system_turn) == (SYSTEM, "")


@needs_golden_qwen
@pytest.mark.parametrize("name", CASES)
def test_the_published_templates_give_the_prompts_of_the_reference(name):
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
def test_a_template_without_images_or_text_is_refused(template, message):
    tokenizer = tiny_qwen_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=message):
        chat_instruction(tokenizer)


def test_batches_are_padded_on_the_left_and_counted_by_their_images():
    made, images = qwen_processor(), [smooth_image(100, 100), smooth_image(640, 700)]
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


@pytest.mark.parametrize("token", ["[SEG]", "<IMG_CONTEXT>", "<|image_pad|>", "<|vision_end|>"])
def test_a_tokenizer_without_a_special_token_is_refused(token):
    tokenizer = tiny_qwen_tokenizer()
    patches = None if token == "<IMG_CONTEXT>" else copy.copy(qwen_processor().patches)
    vocabulary = {name: index for name, index in tokenizer.get_vocab().items() if name != token}
    tokenizer.get_vocab = lambda: vocabulary
    with pytest.raises(ValueError, match="no token " + repr(token).replace("[", r"\[").replace("|", r"\|")):
        Sa2VAProcessor(tokenizer, patches=patches)


@pytest.mark.parametrize("qwen", [False, True])
def test_labels_cover_answers_and_their_ends_only(tiny_processor, qwen):
    made = qwen_processor() if qwen else tiny_processor
    turns = [("<image>Where?", "Here [SEG]."), ("And?", "No.")]
    out = made.tokenize_conversation(turns, image_tokens=3)
    kept = out["input_ids"][out["labels"] != -100]
    assert torch.equal(out["labels"][out["labels"] != -100], kept)
    assert made.text(kept.tolist()) == "Here [SEG].<|im_end|>No.<|im_end|>"
    assert int((out["input_ids"] == made.image_token_id).sum()) == 3
    assert len(made.tokenize_conversation(turns, image_tokens=3, max_length=5)["input_ids"]) == 5
    if qwen:  # which may leave the image's place out
        left_out = made.tokenize_conversation([("Where?", "Here [SEG]."), turns[1]], image_tokens=3)
        assert torch.equal(left_out["input_ids"], out["input_ids"])


def test_the_resize_and_the_number_of_tiles_are_checked(tiny_processor):
    made, image = qwen_processor(), smooth_image(480, 640)
    assert made.vision_inputs([image])[1] == [432]
    made.set_image_resize("training")
    assert made.vision_inputs([image])[1] == [414]
    assert made.num_image_tokens(torch.zeros(414, 8)) == 414
    for processor, name, expected in ((made, "twice", "expected one of"), (tiny_processor, "training", "into tiles")):
        with pytest.raises(ValueError, match=rf"image_resize is '{name}', .*{expected}"):
            processor.set_image_resize(name)
    with pytest.raises(ValueError, match=r"max_tiles.*0"):
        Sa2VAProcessor(tiny_tokenizer(), max_tiles=0)
    changed = Sa2VAProcessor(tiny_tokenizer(), max_tiles=1)
    assert len(changed.tiles(smooth_image(640, 700))) == 1
    changed.max_tiles = -3
    with pytest.raises(ValueError, match="max_tiles is -3, expected 1 or more"):
        changed("<image>a", smooth_image(20, 30))


SHOWN, REGIONS = smooth_image(60, 60), np.ones((1, 60, 60), bool)


@pytest.mark.parametrize("qwen", [False, True])
@pytest.mark.parametrize(
    ("arguments", "internvl", "qwen_vl"),
    [
        (("no place", SHOWN), "0 '<image>'.* 1", None),
        (("<image><image>", SHOWN), *["2 '<image>'.* 1"] * 2),
        (("<image>but none",), *["1 '<image>'.* 0"] * 2),
        ((["<image>a", "<image>b"], SHOWN), *["2 texts and 1 images"] * 2),
        (("<image>a", SHOWN, [None, None]), *["2 mask_prompts and 1 images"] * 2),
        (("<image>a", np.zeros((20, 20, 3))), *[r"uint8.*float64"] * 2),
        (("<image>a", SHOWN, [~REGIONS]), *[r"mask_prompts.*region 1"] * 2),
        (("<image>a", SHOWN, [REGIONS[0]]), *[r"mask_prompts.*\(N, H, W\).*\(60, 60\)"] * 2),
        (("<image>a", SHOWN, REGIONS), None, "cannot be shown a region by mask_prompts; draw it"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(tiny_processor, qwen, arguments, internvl, qwen_vl):
    made, message = (qwen_processor(), qwen_vl) if qwen else (tiny_processor, internvl)
    if message is None:
        assert made(*arguments)
        return
    with pytest.raises(ValueError, match=message):
        made(*arguments)


# ---- messages, and a processor without its model -------------------------------------------------------------------

SEGMENT = "Please segment the red thing."


def turn(text: str, role: str = "user", image: Any = None) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [] if image is None else [{"type": "image", "image": image}]
    return {"role": role, "content": [*parts, {"type": "text", "text": text}]}


def test_one_message_is_the_prompt_of_the_processor(tiny_processor, tmp_path):
    expected = tiny_processor(f"<image>{SEGMENT}", SHOWN)
    Image.fromarray(SHOWN).save(tmp_path / "image.png")
    path = {"role": "user", "content": [{"type": "image", "path": str(tmp_path / "image.png")}]}
    path["content"].append({"type": "text", "text": SEGMENT})
    for messages in ([turn(SEGMENT, image=SHOWN)], [path], [[turn(SEGMENT, image=Image.fromarray(SHOWN))]]):
        inputs = tiny_processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
        assert inputs.keys() == expected.keys()
        for name, tensor in expected.items():
            assert isinstance(tensor, list) or torch.equal(inputs[name], tensor), name
    assert tiny_processor.apply_chat_template([turn("What is Dice?")]) == tiny_processor.prompt_text("What is Dice?")
    with pytest.raises(ValueError, match="tools is not supported"):
        tiny_processor.apply_chat_template([turn("x")], tools=[{"name": "search"}])


def test_a_conversation_has_the_text_of_training(tiny_processor):
    turns = [(f"<image>{SEGMENT}", "Sure, [SEG]."), ("And now?", "A circle."), ("Why?", "x")]
    messages = [turn(SEGMENT, image=SHOWN), turn("Sure, [SEG].", "assistant"), turn("And now?")]
    messages += [{"role": "assistant", "content": "A circle."}, turn("Why?")]
    ids = tiny_processor.apply_chat_template(messages, tokenize=True)[0].tolist()
    tokens = tiny_processor.vision_inputs([SHOWN])[1][0]
    assert ids == tiny_processor.tokenize_conversation(turns, tokens)["input_ids"].tolist()[: len(ids)]
    begun = tiny_processor.apply_chat_template(messages[:2])
    assert begun == tiny_processor.apply_chat_template(messages[:1]) + "Sure, [SEG]."


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([turn("Be brief.", "system"), turn("x")], "no system message"),
        ([turn("x"), turn("y")], "expected user, assistant, user"),
        ([], "expected user, assistant, user"),
        ([turn("x"), turn("y", "assistant"), turn("z", image=SHOWN)], r"messages\[2\]: 1 images"),
        ([{"role": "user", "content": [{"type": "video", "video": "x"}]}], "of the type 'video'"),
        ([{"role": "user", "content": [{"type": "image"}]}], "none of the keys"),
    ],
)
def test_messages_that_cannot_be_answered_are_refused(messages, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_chat(messages)


@pytest.mark.parametrize("kind", ["nano", QWEN3])
def test_a_saved_processor_needs_no_model_and_is_pushed_to_the_hub_whole(kind, monkeypatch, tmp_path):
    processor = Sa2VAProcessor.from_pretrained(
        EMBEDDED["sa2va-nano"] if kind == "nano" else write_tiny_qwen(tmp_path / "model", kind)
    )
    pushed: dict[str, Any] = {}

    def push(self: Any, repo_id: str, **how: Any) -> None:
        self.save_pretrained(tmp_path / "uploaded", max_shard_size="5GB")  # as transformers does
        pushed.update(how, repo_id=repo_id)

    monkeypatch.setattr(Sa2VAProcessor, "push_to_hub", push)
    processor.save_pretrained(tmp_path / "mine", push_to_hub=True, private=True)
    assert pushed == {"repo_id": "mine", "private": True}
    assert {f.name for f in (tmp_path / "uploaded").iterdir()} == {f.name for f in (tmp_path / "mine").iterdir()}
    again = Sa2VAProcessor.from_pretrained(tmp_path / "mine")
    assert (repr(again), again.grid, again.chat) == (repr(processor), processor.grid, processor.chat)
    expected, inputs = processor(f"<image>{SEGMENT}", SHOWN), again(f"<image>{SEGMENT}", SHOWN)
    assert all(torch.equal(inputs[name], expected[name]) for name in ("input_ids", "pixel_values"))
