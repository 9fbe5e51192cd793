"""Prompts, batches, tiles, regions and labels; and what is refused."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from rl_reward_network.atomic_io import read_json
from rl_reward_network.models.sa2va.loading_sa2va import load_sa2va_model
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.templates import TEMPLATES, chat_instruction
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


def test_the_tile_cap_holds_and_is_checked_whenever_it_is_set(tiny_processor):
    processor = Sa2VAProcessor(tiny_tokenizer(), max_tiles=1)
    assert len(processor.tiles(smooth_image(640, 700))) == 1
    with pytest.raises(ValueError, match=r"max_tiles.*0"):
        Sa2VAProcessor(tiny_tokenizer(), max_tiles=0)
    processor.max_tiles = -3
    with pytest.raises(ValueError, match="max_tiles is -3, expected 1 or more"):
        processor("<image>a", smooth_image(20, 30))


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


def test_a_region_without_pixels_is_refused(tiny_processor):
    with pytest.raises(ValueError, match=r"mask_prompts.*region 1"):
        tiny_processor.region_cells(np.zeros((1, 50, 50), dtype=bool))
    with pytest.raises(ValueError, match=r"mask_prompts.*\(N, H, W\).*\(50, 50\)"):
        tiny_processor.region_cells(np.ones((50, 50), dtype=bool))


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


def test_only_the_last_tile_of_an_image_with_regions_is_flagged(tiling_processor):
    images = [smooth_image(640, 700), smooth_image(100, 100)]
    batch = tiling_processor(["<image>a", "<image>b"], images, mask_prompts=[np.ones((1, 640, 700), bool), None])
    assert batch["vp_overall_mask"].tolist() == [False, False, False, False, True, False]
    assert [tuple(cells.shape) for cells in batch["prompt_masks"]] == [(1, 16, 16)]


@pytest.mark.parametrize(
    ("qwen", "text", "image", "message"),
    [
        (False, "no place", True, "0 '<image>'.* 1"),
        *((qwen, "<image><image>", True, "2 '<image>'.* 1") for qwen in (False, True)),
        *((qwen, "<image>but none", False, "1 '<image>'.* 0") for qwen in (False, True)),
    ],
)
def test_text_and_image_must_agree(tiny_processor, qwen, text, image, message):
    with pytest.raises(ValueError, match=message):
        (qwen_processor() if qwen else tiny_processor)(text, smooth_image(60, 60) if image else None)


def test_counts_of_texts_images_and_regions_must_agree(tiny_processor):
    with pytest.raises(ValueError, match="2 texts and 1 images"):
        tiny_processor(["<image>a", "<image>b"], smooth_image(20, 20))
    with pytest.raises(ValueError, match="2 mask_prompts and 1 images"):
        tiny_processor("<image>a", smooth_image(20, 20), [None, None])
    with pytest.raises(ValueError, match=r"uint8.*float64"):
        tiny_processor("<image>a", np.zeros((20, 20, 3)))


def test_labels_cover_answers_and_suffixes_only(tiny_processor):
    out = tiny_processor.tokenize_conversation([("Where?", "Here [SEG]."), ("And?", "No.")])
    kept = out["input_ids"][out["labels"] != -100]
    assert tiny_processor.tokenizer.decode(kept) == "Here [SEG].<|im_end|>No.<|im_end|>"
    assert torch.equal(out["labels"][out["labels"] != -100], kept)
    assert len(tiny_processor.tokenize_conversation([("a", "b")], max_length=5)["input_ids"]) == 5


def test_templates_never_emit_a_system_message():
    assert all("system" not in template.instruction for template in TEMPLATES.values())
    assert TEMPLATES["phi3_chat"].user_turn("Hi {input}") == "<|user|>\nHi {input}<|end|>\n<|assistant|>\n"


# ---- of a Qwen-VL: its chat template, the image in front ------------------------------------------------------------

IMAGE = "<|vision_start|>" + "<|image_pad|>" * 3 + "<|vision_end|>"
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def qwen_processor(chat_template: str = CHAT, patch: int = 16) -> Sa2VAProcessor:
    patches = Qwen2VLImageProcessorPil(patch_size=patch, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    return Sa2VAProcessor(tiny_qwen_tokenizer(chat_template), sam_image_size=256, patches=patches)


def test_the_image_stands_in_front_of_the_text():
    made = qwen_processor()
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


def test_a_system_turn_of_the_template_stays_in_prediction_and_is_not_trained():
    made = qwen_processor("{{ '" + SYSTEM.replace("\n", "\\n") + "' }}" + CHAT)
    assert made.prompt_text("<image>Where?", 3) == SYSTEM + TURN.format(IMAGE + "Where?")
    ids = made.tokenize_conversation([("<image>\nWhere?", "Here [SEG].")], image_tokens=3)["input_ids"]
    assert made.text(ids.tolist()) == TURN.format(IMAGE + "\nWhere?") + "Here [SEG].<|im_end|>\n"


def test_a_system_turn_stands_once_in_front_of_all_turns():
    made = qwen_processor("{{ '" + SYSTEM.replace("\n", "\\n") + "' }}" + CHAT)
    answered = made.prompt_text("Hi") + "Hello<|im_end|>\n"
    longer = made.prompt_text("And?", past_text=answered)
    assert longer == answered + TURN.format("And?")
    assert made.prompt_text("And?", past_text=answered.removeprefix(SYSTEM)) == longer
    assert (made.system_turn, qwen_processor().system_turn) == (SYSTEM, "")


def test_the_images_place_may_be_left_out_of_a_conversation():
    made = qwen_processor()
    given, left_out = ([(text, "Here [SEG].")] for text in ("<image>Where?", "Where?"))
    ids = made.tokenize_conversation(left_out, image_tokens=3)["input_ids"]
    assert ids.tolist() == made.tokenize_conversation(given, image_tokens=3)["input_ids"].tolist()
    assert ids.tolist().count(made.image_token_id) == 3


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


def test_image_tokens_are_those_of_the_models_features(tmp_path):
    made = Sa2VAProcessor.from_pretrained(write_tiny_qwen(tmp_path / "model", QWEN3))
    inputs, counts = made.vision_inputs([smooth_image(100, 100), smooth_image(640, 700)])
    assert counts == [400, 440]
    assert [made.num_image_tokens(torch.zeros(count, 8)) for count in counts] == counts
    assert len(inputs["pixel_values"]) == 4 * sum(counts)


def test_the_resize_of_training_is_chosen_by_name():
    made = qwen_processor()
    image = smooth_image(480, 640)
    assert made.vision_inputs([image])[1] == [432]
    made.set_image_resize("training")
    assert made.vision_inputs([image])[1] == [414]
    with pytest.raises(ValueError, match=r"image_resize is 'twice', expected one of \('prediction', 'training'\)"):
        made.set_image_resize("twice")


def test_labels_cover_answers_and_their_ends_only():
    made = qwen_processor()
    turns = [("<image>Where?", "Here [SEG]."), ("And?", "No.")]
    out = made.tokenize_conversation(turns, image_tokens=3)
    kept = out["input_ids"][out["labels"] != -100]
    assert made.text(kept.tolist()) == "Here [SEG].<|im_end|>No.<|im_end|>"
    assert int((out["input_ids"] == made.image_token_id).sum()) == 3


def test_an_answer_cannot_hold_a_placeholder():
    made = qwen_processor()
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<vp>", "</vp>"]
    assert set(made.never_sampled_ids) == {made.tokenizer.convert_tokens_to_ids(name) for name in names}


def test_regions_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match="cannot be shown a region by mask_prompts; draw it"):
        qwen_processor()("<image>What?", smooth_image(60, 60), np.ones((1, 60, 60), bool))


@pytest.mark.parametrize("token", ["[SEG]", "<IMG_CONTEXT>", "<|image_pad|>", "<|vision_end|>"])
def test_a_tokenizer_without_a_special_token_is_refused(token):
    tokenizer = tiny_qwen_tokenizer()
    patches = None if token == "<IMG_CONTEXT>" else copy.copy(qwen_processor().patches)
    vocabulary = {name: index for name, index in tokenizer.get_vocab().items() if name != token}
    tokenizer.get_vocab = lambda: vocabulary
    with pytest.raises(ValueError, match="no token " + repr(token).replace("[", r"\[").replace("|", r"\|")):
        Sa2VAProcessor(tokenizer, patches=patches)


def test_predict_forward_needs_the_processor(tmp_path, tiny_processor):
    """The tokenizer alone does not know how to cut an image into patches."""
    model, made = load_sa2va_model(write_tiny_qwen(tmp_path / "model", QWEN3))
    with pytest.raises(ValueError, match=r"needs its image processor; give processor=Sa2VAProcessor"):
        model.predict_forward(image=smooth_image(60, 60), text="<image>Where?", tokenizer=made.tokenizer)
    with pytest.raises(ValueError, match="image_resize is 'training', but this model cuts images into tiles"):
        tiny_processor.set_image_resize("training")
