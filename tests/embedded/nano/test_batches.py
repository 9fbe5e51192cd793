import numpy as np
import torch

from rl_reward_network.embedded.nano.batches import collate, region_scenes
from rl_reward_network.embedded.nano.conversations import (
    CODED,
    describing_conversation,
    phrase_conversation,
    vessel_conversation,
)
from rl_reward_network.embedded.nano.pictures import ATTRIBUTES, Pictures
from rl_reward_network.embedded.regions import PLACES, SIZES
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor


def test_a_batch_pairs_each_mask_with_its_seg_token(pictures: Pictures, processor: Sa2VAProcessor) -> None:
    rng = np.random.default_rng(0)
    conversations = [
        vessel_conversation(pictures, rng, 3, text_only=True),
        vessel_conversation(pictures, rng, 2, text_only=False),
        phrase_conversation(pictures, rng, text_only=True),
        describing_conversation(pictures, rng),
    ]
    batch = collate(conversations, processor)
    segs = [int((batch[name]["input_ids"] == processor.seg_token_id).sum()) for name in ("with_image", "text_only")]
    ordered = [conversations[1], conversations[0], conversations[2]]  # with their image first; no masks, no entry
    assert segs == [2, 3 + len(conversations[2].masks)]
    for masks, conversation in zip(batch["masks"], ordered, strict=True):
        np.testing.assert_array_equal(masks.numpy(), conversation.masks)
    questions = [
        processor.text(row.tolist()) for name in ("with_image", "text_only") for row in batch[name]["input_ids"]
    ]
    for words in (question for conversation in ordered for question, _ in conversation.turns):
        assert any(words in question for question in questions)
    alone = [question for conversation in ordered[1:] for question, _ in conversation.turns]
    for row, question in zip(batch["text_only"]["input_ids"], alone, strict=True):
        assert question in processor.text(row.tolist())  # in the order of the masks
    assert len(batch["sam_pixel_values"]) == 3
    assert len(batch["with_image"]["pixel_values"]) == 2
    words = [[CODED[i] for i in row.nonzero().flatten().tolist()] for row in batch["code_words"]]
    assert [set(found) for found in words] == [set(said) for c in ordered for said in c.words]


def test_watched_scenes_pair_regions_with_their_words(pictures: Pictures, processor: Sa2VAProcessor) -> None:
    watched = region_scenes(pictures, np.random.default_rng(0), 5, processor)
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
    conversations = [vessel_conversation(pictures, rng, 2, text_only=True), describing_conversation(pictures, rng)]
    batch = collate(conversations, processor)["with_image"]
    learned = processor.text(batch["input_ids"][batch["labels"] != -100].tolist())
    assert "region" not in learned
    assert learned.endswith("<|im_end|>")
    assert batch["vp_overall_mask"].tolist() == [True]
    assert batch["labels"].shape == batch["input_ids"].shape == batch["attention_mask"].shape
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    assert torch.equal(batch["attention_mask"].sort(dim=1).values, batch["attention_mask"])  # padded on the left
