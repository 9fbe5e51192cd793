from pathlib import Path

import numpy as np
import pytest
import torch

import rl_reward_network.embedded.datasets as embedded
from rl_reward_network.embedded.angiograms import LOOKS, render_series
from rl_reward_network.embedded.nano.model import nano_config, nano_tokenizer
from rl_reward_network.embedded.nano.pictures import (
    ANSWER,
    ATTRIBUTES,
    CODED,
    SEED,
    Pictures,
    collate,
    corpus,
    describing_conversation,
    look_of_picture,
    open_pictures,
    phrase_conversation,
    vessel_conversation,
    watched_scenes,
)
from rl_reward_network.embedded.nano.prompt_targets import TABLE, target
from rl_reward_network.embedded.nano.score import TEST_SCENES
from rl_reward_network.embedded.regions import PLACES, SIZES, make_scenes, parse_caption
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    return open_pictures(tmp_path_factory.mktemp("pictures"), angiograms=12, scenes=4, seed=0)


@pytest.fixture(scope="module")
def processor() -> Sa2VAProcessor:
    tokenizer = nano_tokenizer(corpus())
    return Sa2VAProcessor.from_config(nano_config(tokenizer), tokenizer)


def test_pictures_are_rendered_once_and_whole(tmp_path: Path, pictures: Pictures) -> None:
    again = open_pictures(tmp_path, angiograms=12, scenes=4, seed=0)
    for name in ("images", "parts", "scenes", "objects", "words"):
        np.testing.assert_array_equal(getattr(pictures, name), getattr(again, name))
    made = [path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*.npy"))]
    open_pictures(tmp_path, angiograms=12, scenes=4, seed=0)
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*.npy"))] == made


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


def test_numbers_that_are_too_small_are_refused(tmp_path: Path) -> None:
    for numbers in ((0, 1, 0), (1, 0, 0), (1, 1, -1)):
        with pytest.raises(ValueError, match="expected >= 1, >= 1, >= 0"):
            open_pictures(tmp_path, *numbers)


def test_every_word_of_ours_is_one_token(processor: Sa2VAProcessor) -> None:
    prompt, caption = PROMPTS[1], " a large orange triangle at the bottom right."
    assert len(processor.token_ids(prompt)) == len(prompt.split()) + 1  # the final dot
    assert len(processor.token_ids(caption)) == len(caption.split()) + 1


def test_vessel_masks_follow_the_table_under_the_same_turn_as_the_image(pictures: Pictures) -> None:
    for seed in range(8):
        conversation = vessel_conversation(pictures, np.random.default_rng(seed), 11, blind=False)
        assert sorted(question for question, _ in conversation.turns) == sorted(PROMPTS)
        grey = conversation.image[..., 0]
        number, parts = next(
            (number, turned)
            for number in range(len(pictures.images))
            for quarter in range(4)
            for flip in (1, -1)
            if np.array_equal(grey, np.rot90(pictures.images[number], quarter)[:, ::flip])
            for turned in [np.rot90(pictures.parts[number], quarter)[:, ::flip]]
        )
        look = look_of_picture(number)
        for (question, answer), mask in zip(conversation.turns, conversation.masks, strict=True):
            assert answer == ANSWER
            np.testing.assert_array_equal(mask, target(parts, TABLE[question, look]))


def test_phrases_and_descriptions_fit_their_masks(pictures: Pictures) -> None:
    for seed in range(6):
        asked = phrase_conversation(pictures, np.random.default_rng(seed), blind=False)
        for (question, _), mask, said in zip(asked.turns, asked.masks, asked.said, strict=True):
            assert tuple(parse_caption(question)[name] for name in ("colour", "shape", "size", "place")) == said
            assert mask.any()
        described = describing_conversation(pictures, np.random.default_rng(seed))
        assert len(described.turns) == len(described.regions)
        for (_, answer), region in zip(described.turns, described.regions, strict=True):
            rows, cols = np.nonzero(region)
            word = parse_caption(answer)["place"]
            height = "top" if rows.mean() < 256 / 3 else "bottom" if rows.mean() > 512 / 3 else ""
            side = "left" if cols.mean() < 256 / 3 else "right" if cols.mean() > 512 / 3 else ""
            assert word == (f"{height} {side}".strip() or "centre")


def test_a_batch_pairs_each_mask_with_its_seg_token(pictures: Pictures, processor: Sa2VAProcessor) -> None:
    rng = np.random.default_rng(0)
    conversations = [
        vessel_conversation(pictures, rng, 3, blind=True),
        vessel_conversation(pictures, rng, 2, blind=False),
        phrase_conversation(pictures, rng, blind=True),
        describing_conversation(pictures, rng),
    ]
    batch = collate(conversations, processor)
    segs = [int((batch[name]["input_ids"] == processor.seg_token_id).sum()) for name in ("seen", "blind")]
    ordered = [conversations[1], conversations[0], conversations[2]]  # with their image first; no masks, no entry
    assert segs == [2, 3 + len(conversations[2].masks)]
    for masks, conversation in zip(batch["masks"], ordered, strict=True):
        np.testing.assert_array_equal(masks.numpy(), conversation.masks)
    questions = [processor.text(row.tolist()) for name in ("seen", "blind") for row in batch[name]["input_ids"]]
    for words in (question for conversation in ordered for question, _ in conversation.turns):
        assert any(words in question for question in questions)
    blind = [question for conversation in ordered[1:] for question, _ in conversation.turns]
    for row, question in zip(batch["blind"]["input_ids"], blind, strict=True):
        assert question in processor.text(row.tolist())  # in the order of the masks
    assert len(batch["sam_pixel_values"]) == 3
    assert len(batch["seen"]["pixel_values"]) == 2
    words = [[CODED[i] for i in row.nonzero().flatten().tolist()] for row in batch["said"]]
    assert [set(found) for found in words] == [set(said) for c in ordered for said in c.said]


def test_watched_scenes_pair_regions_with_their_words(pictures: Pictures, processor: Sa2VAProcessor) -> None:
    watched = watched_scenes(pictures, np.random.default_rng(0), 5, processor)
    assert len(watched["pixel_values"]) == len(watched["cells"]) == 5
    regions = torch.cat(watched["cells"])
    assert len(regions) == len(watched["attributes"])
    for cells, words in zip(regions, watched["attributes"].tolist(), strict=True):
        row, col = cells.nonzero().double().mean(dim=0).tolist()
        place = ATTRIBUTES[3].index(PLACES[3 * min(2, int((row + 0.5) / 16 * 3)) + min(2, int((col + 0.5) / 16 * 3))])
        assert words[3] == place
    large = watched["attributes"][:, 2] == SIZES.index("large")
    sizes = regions.flatten(1).sum(dim=1).double()
    assert sizes[large].mean() > 2 * sizes[~large].mean()


def test_only_answers_are_learned(pictures: Pictures, processor: Sa2VAProcessor) -> None:
    rng = np.random.default_rng(1)
    conversations = [vessel_conversation(pictures, rng, 2, blind=True), describing_conversation(pictures, rng)]
    batch = collate(conversations, processor)["seen"]
    learned = processor.text(batch["input_ids"][batch["labels"] != -100].tolist())
    assert "region" not in learned
    assert learned.endswith("<|im_end|>")
    assert batch["vp_overall_mask"].tolist() == [True]
    assert batch["labels"].shape == batch["input_ids"].shape == batch["attention_mask"].shape
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    assert torch.equal(batch["attention_mask"].sort(dim=1).values, batch["attention_mask"])  # padded on the left
