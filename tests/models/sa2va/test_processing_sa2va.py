import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from rl_reward_network.models.sa2va.templates import TEMPLATES
from tests.conftest import smooth_image, tiny_tokenizer


def test_tiles_are_cut_row_by_row_with_the_thumbnail_last(tiling_processor: Sa2VAProcessor) -> None:
    image = smooth_image(640, 700)
    tiles = tiling_processor.tiles(image)
    resized = np.array(Image.fromarray(image).resize((896, 896)))
    assert len(tiles) == 5
    assert np.array_equal(np.array(tiles[1]), resized[:448, 448:])
    assert np.array_equal(np.array(tiles[2]), resized[448:, :448])
    assert np.array_equal(np.array(tiles[4]), np.array(Image.fromarray(image).resize((448, 448))))


def test_the_tile_cap_holds() -> None:
    processor = Sa2VAProcessor(tiny_tokenizer(), max_tiles=1)
    assert len(processor.tiles(smooth_image(640, 700))) == 1
    with pytest.raises(ValueError, match=r"max_tiles.*0"):
        Sa2VAProcessor(tiny_tokenizer(), max_tiles=0)


def test_sam_pixels_use_bfloat16_rounded_constants(tiny_processor: Sa2VAProcessor) -> None:
    white = np.full((10, 20, 3), 255, dtype=np.uint8)
    pixels = tiny_processor.sam_pixel_values(white)
    mean, std = torch.tensor([0.484375, 0.455078125, 0.40625]), torch.tensor([0.228515625, 0.2236328125, 0.224609375])
    assert pixels.shape == (1, 3, 256, 256)
    assert torch.allclose(pixels[0, :, 0, 0], (1 - mean) / std, atol=1e-6)


def test_region_cells_equal_torch_nearest_sampling(tiny_processor: Sa2VAProcessor) -> None:
    regions = np.random.default_rng(0).random((2, 37, 53)) > 0.5
    nearest = F.interpolate(torch.tensor(regions)[None].float(), size=(16, 16), mode="nearest")[0].bool()
    assert torch.equal(tiny_processor.region_cells(regions), nearest)


def test_a_region_between_the_sample_points_gets_its_nearest_cell(tiny_processor: Sa2VAProcessor) -> None:
    region = np.zeros((1, 160, 160), dtype=bool)
    region[0, 55:58, 33] = True  # sample points lie at multiples of 10; (58, 33) is nearest to row 6, column 3
    with pytest.warns(UserWarning, match=r"region 1 \(3 px\).*16x16"):
        cells = tiny_processor.region_cells(region)
    assert cells[0].nonzero().tolist() == [[6, 3]]


def test_a_region_without_pixels_is_refused(tiny_processor: Sa2VAProcessor) -> None:
    with pytest.raises(ValueError, match=r"mask_prompts.*region 1"):
        tiny_processor.region_cells(np.zeros((1, 50, 50), dtype=bool))
    with pytest.raises(ValueError, match=r"mask_prompts.*\(N, H, W\).*\(50, 50\)"):
        tiny_processor.region_cells(np.ones((50, 50), dtype=bool))


def test_the_prompt_with_regions_reads_as_in_the_reference(tiny_processor: Sa2VAProcessor) -> None:
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


def test_batches_are_padded_on_the_left(tiling_processor: Sa2VAProcessor) -> None:
    images = [smooth_image(100, 100), smooth_image(640, 700)]
    batch = tiling_processor(["<image>Short.", "<image>A longer question."], images)
    lengths = batch["attention_mask"].sum(1).tolist()
    assert lengths[0] < lengths[1] == batch["input_ids"].shape[1]
    assert batch["attention_mask"][0, : lengths[1] - lengths[0]].sum() == 0
    assert batch["pixel_values"].shape == (6, 3, 448, 448)
    assert batch["sam_pixel_values"].shape == (2, 3, 256, 256)
    assert batch["vp_overall_mask"].tolist() == [False] * 6


def test_only_the_last_tile_of_an_image_with_regions_is_flagged(tiling_processor: Sa2VAProcessor) -> None:
    images = [smooth_image(640, 700), smooth_image(100, 100)]
    batch = tiling_processor(["<image>a", "<image>b"], images, mask_prompts=[np.ones((1, 640, 700), bool), None])
    assert batch["vp_overall_mask"].tolist() == [False, False, False, False, True, False]
    assert [tuple(cells.shape) for cells in batch["prompt_masks"]] == [(1, 16, 16)]


@pytest.mark.parametrize(
    ("text", "image", "message"),
    [
        ("no place", True, "0 '<image>'.* 1"),
        ("<image><image>", True, "2 '<image>'.* 1"),
        ("<image>but none", False, "1 '<image>'.* 0"),
    ],
)
def test_text_and_image_must_agree(tiny_processor: Sa2VAProcessor, text: str, image: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_processor(text, smooth_image(20, 20) if image else None)


def test_counts_of_texts_images_and_regions_must_agree(tiny_processor: Sa2VAProcessor) -> None:
    with pytest.raises(ValueError, match="2 texts and 1 images"):
        tiny_processor(["<image>a", "<image>b"], smooth_image(20, 20))
    with pytest.raises(ValueError, match="2 mask_prompts and 1 images"):
        tiny_processor("<image>a", smooth_image(20, 20), [None, None])
    with pytest.raises(ValueError, match=r"uint8.*float64"):
        tiny_processor("<image>a", np.zeros((20, 20, 3)))


def test_a_tokenizer_without_seg_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.get_vocab = lambda: {"<IMG_CONTEXT>": 1}  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"\[SEG\]"):
        Sa2VAProcessor(tokenizer)


def test_labels_cover_answers_and_suffixes_only(tiny_processor: Sa2VAProcessor) -> None:
    out = tiny_processor.tokenize_conversation([("Where?", "Here [SEG]."), ("And?", "No.")])
    kept = out["input_ids"][out["labels"] != -100]
    assert tiny_processor.tokenizer.decode(kept) == "Here [SEG].<|im_end|>No.<|im_end|>"
    assert torch.equal(out["labels"][out["labels"] != -100], kept)
    assert len(tiny_processor.tokenize_conversation([("a", "b")], max_length=5)["input_ids"]) == 5


def test_templates_never_emit_a_system_message() -> None:
    assert all("system" not in template.instruction for template in TEMPLATES.values())
    assert TEMPLATES["phi3_chat"].user_turn("Hi {input}") == "<|user|>\nHi {input}<|end|>\n<|assistant|>\n"


def test_tiles_are_counted_from_one_whenever_they_are_set(tiny_processor: Sa2VAProcessor) -> None:
    processor = copy.copy(tiny_processor)
    processor.max_tiles = -3
    with pytest.raises(ValueError, match="max_tiles is -3, expected 1 or more"):
        processor("<image>a", np.zeros((20, 30, 3), np.uint8))
