"""What nano learns from: pictures, the target of each prompt, conversations and their batches."""

from pathlib import Path

import numpy as np
import torch

import rl_reward_network.embedded.datasets as embedded
from rl_reward_network.embedded.angiograms import BRANCH, CATHETER, LOOKS, THIN, TRUNK, render_series
from rl_reward_network.embedded.regions import PLACES, SIZES, make_scenes, parse_caption
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor
from tools.nano.conversations import (
    ANSWER,
    CODED,
    collate,
    describing_conversation,
    phrase_conversation,
    region_scenes,
    vessel_conversation,
)
from tools.nano.pictures import (
    ATTRIBUTES,
    PROMPT_TARGETS,
    SEED,
    SWELLING,
    TARGETS,
    Pictures,
    look_of_picture,
    open_pictures,
    target_mask,
)
from tools.nano.score import TEST_SCENES

PART_MAP = np.zeros((32, 32), np.uint8)
PART_MAP[4:8] = TRUNK
PART_MAP[6:14, 10] |= BRANCH
PART_MAP[20, 4:9] = THIN
PART_MAP[:, 25] |= CATHETER


def test_no_training_picture_is_in_the_embedded_data(tmp_path: Path) -> None:
    """NumPy pads short seeds with zeros, so different first numbers are what keeps the streams apart."""
    for seed in (0, embedded.SEED, TEST_SCENES[1]):  # the seeds that would coincide without the offset
        ours = open_pictures(tmp_path, angiograms=6, scenes=3, seed=seed)
        for number, look in enumerate(LOOKS):
            frame = next(render_series(np.random.default_rng([SEED + seed, number]), look, 1))
            np.testing.assert_array_equal(ours.images[number], frame.image)
            patient = next(render_series(np.random.default_rng([embedded.SEED, number, 0]), look, 1))
            assert not np.array_equal(ours.images[number], patient.image)
        for kept in (embedded.SEED, TEST_SCENES[1]):
            for scene, theirs in zip(ours.scenes, make_scenes(3, kept), strict=True):
                assert not np.array_equal(scene, theirs.image)
    files = sorted(tmp_path.rglob("*.npy"))
    made = [path.stat().st_mtime_ns for path in files]
    open_pictures(tmp_path, angiograms=6, scenes=3, seed=0)
    assert [path.stat().st_mtime_ns for path in files] == made  # rendered once


def test_each_prompt_has_a_target_in_each_look_and_none_fits_every_look() -> None:
    assert set(PROMPT_TARGETS) == {(prompt, look) for prompt in PROMPTS for look in LOOKS}
    assert set(PROMPT_TARGETS.values()) <= set(TARGETS)
    fits = {look: {prompt for prompt in PROMPTS if PROMPT_TARGETS[prompt, look] == "tree"} for look in LOOKS}
    assert all(fits.values())
    assert not set.intersection(*fits.values())
    assert PROMPTS[0] in fits["plain"]
    assert set.intersection(*(fits[look] for look in embedded.NO_GAP_LOOKS))


def test_targets_are_unions_of_parts_and_swollen_is_all_within_a_city_block_distance() -> None:
    for target, parts in {
        "tree": TRUNK | BRANCH | THIN,
        "main": TRUNK | BRANCH,
        "main + catheter": TRUNK | BRANCH | CATHETER,
        "tree + catheter": TRUNK | BRANCH | THIN | CATHETER,
        "trunk": TRUNK,
        "thin": THIN,
        "nothing": 0,
    }.items():
        np.testing.assert_array_equal(target_mask(PART_MAP, target), (PART_MAP & parts) > 0)
    dot = np.zeros((21, 21), np.uint8)
    dot[10, 10] = THIN
    rows, cols = np.mgrid[0:21, 0:21]
    np.testing.assert_array_equal(target_mask(dot, "swollen"), np.abs(rows - 10) + np.abs(cols - 10) <= SWELLING)


def test_every_word_is_one_token(processor: Sa2VAProcessor) -> None:
    for text in (PROMPTS[1], " a large orange triangle at the bottom right."):
        assert len(processor.token_ids(text)) == len(text.split()) + 1  # the final dot


def test_vessel_masks_follow_the_table_and_turn_with_the_image(pictures: Pictures) -> None:
    for seed in range(8):
        conversation = vessel_conversation(pictures, np.random.default_rng(seed), 11, text_only=False)
        assert sorted(question for question, _ in conversation.turns) == sorted(PROMPTS)
        number, parts = next(
            (number, np.rot90(pictures.parts[number], quarter)[:, ::flip])
            for number in range(len(pictures.images))
            for quarter in range(4)
            for flip in (1, -1)
            if np.array_equal(conversation.image[..., 0], np.rot90(pictures.images[number], quarter)[:, ::flip])
        )
        for (question, answer), mask in zip(conversation.turns, conversation.masks, strict=True):
            assert answer == ANSWER
            np.testing.assert_array_equal(mask, target_mask(parts, PROMPT_TARGETS[question, look_of_picture(number)]))


def test_phrases_and_descriptions_fit_their_masks(pictures: Pictures) -> None:
    for seed in range(6):
        phrases = phrase_conversation(pictures, np.random.default_rng(seed), text_only=False)
        for (question, _), mask, words in zip(phrases.turns, phrases.masks, phrases.words, strict=True):
            assert tuple(parse_caption(question)[name] for name in ("colour", "shape", "size", "place")) == words
            assert mask.any()
        described = describing_conversation(pictures, np.random.default_rng(seed))
        for (_, answer), region in zip(described.turns, described.regions, strict=True):
            rows, cols = np.nonzero(region)
            height = "top" if rows.mean() < 256 / 3 else "bottom" if rows.mean() > 512 / 3 else ""
            side = "left" if cols.mean() < 256 / 3 else "right" if cols.mean() > 512 / 3 else ""
            assert parse_caption(answer)["place"] == (f"{height} {side}".strip() or "centre")


def test_a_batch_pairs_each_mask_with_its_seg_token(pictures: Pictures, processor: Sa2VAProcessor) -> None:
    rng = np.random.default_rng(0)
    text_only, image, phrases, described = (
        vessel_conversation(pictures, rng, 3, text_only=True),
        vessel_conversation(pictures, rng, 2, text_only=False),
        phrase_conversation(pictures, rng, text_only=True),
        describing_conversation(pictures, rng),
    )
    batch = collate([text_only, image, phrases, described], processor)
    segs = [int((batch[name]["input_ids"] == processor.seg_token_id).sum()) for name in ("with_image", "text_only")]
    assert segs == [2, 3 + len(phrases.masks)]
    ordered = [image, text_only, phrases]  # with their image first
    for masks, conversation in zip(batch["masks"], ordered, strict=True):
        np.testing.assert_array_equal(masks.numpy(), conversation.masks)
    rows = [*batch["with_image"]["input_ids"][:1].repeat(2, 1), *batch["text_only"]["input_ids"]]
    questions = [question for conversation in ordered for question, _ in conversation.turns]
    for row, question in zip(rows, questions, strict=True):
        assert question in processor.text(row.tolist())  # in the order of the masks
    assert (len(batch["sam_pixel_values"]), len(batch["with_image"]["pixel_values"])) == (3, 2)
    words = [{CODED[i] for i in row.nonzero().flatten().tolist()} for row in batch["code_words"]]
    assert words == [set(described) for conversation in ordered for described in conversation.words]


def test_only_answers_are_learned(pictures: Pictures, processor: Sa2VAProcessor) -> None:
    rng = np.random.default_rng(1)
    conversations = [vessel_conversation(pictures, rng, 2, text_only=True), describing_conversation(pictures, rng)]
    batch = collate(conversations, processor)["with_image"]
    learned = processor.text(batch["input_ids"][batch["labels"] != -100].tolist())
    assert "region" not in learned
    assert learned.endswith("<|im_end|>")
    assert batch["vp_overall_mask"].tolist() == [True]
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    assert torch.equal(batch["attention_mask"].sort(dim=1).values, batch["attention_mask"])  # padded on the left


def test_watched_scenes_pair_regions_with_their_words(pictures: Pictures, processor: Sa2VAProcessor) -> None:
    watched = region_scenes(pictures, np.random.default_rng(0), 5, processor)
    assert len(watched["pixel_values"]) == len(watched["cells"]) == 5
    regions = torch.cat(watched["cells"])
    for cells, words in zip(regions, watched["attributes"].tolist(), strict=True):
        row, col = (min(2, int((mean + 0.5) / 16 * 3)) for mean in cells.nonzero().double().mean(dim=0).tolist())
        assert ATTRIBUTES[3][words[3]] == PLACES[3 * row + col]
    large = watched["attributes"][:, 2] == SIZES.index("large")
    sizes = regions.flatten(1).sum(dim=1).double()
    assert sizes[large].mean() > 1.5 * sizes[~large].mean()
