import numpy as np

from rl_reward_network.embedded.nano.conversations import (
    ANSWER,
    describing_conversation,
    phrase_conversation,
    vessel_conversation,
)
from rl_reward_network.embedded.nano.pictures import Pictures, look_of_picture
from rl_reward_network.embedded.nano.prompt_targets import PROMPT_TARGETS, target_mask
from rl_reward_network.embedded.regions import parse_caption
from rl_reward_network.env.prompts import PROMPTS
from rl_reward_network.models.sa2va.processing_sa2va import Sa2VAProcessor


def test_every_word_of_ours_is_one_token(processor: Sa2VAProcessor) -> None:
    prompt, caption = PROMPTS[1], " a large orange triangle at the bottom right."
    assert len(processor.token_ids(prompt)) == len(prompt.split()) + 1  # the final dot
    assert len(processor.token_ids(caption)) == len(caption.split()) + 1


def test_vessel_masks_follow_the_table_under_the_same_turn_as_the_image(pictures: Pictures) -> None:
    for seed in range(8):
        conversation = vessel_conversation(pictures, np.random.default_rng(seed), 11, text_only=False)
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
            np.testing.assert_array_equal(mask, target_mask(parts, PROMPT_TARGETS[question, look]))


def test_phrases_and_descriptions_fit_their_masks(pictures: Pictures) -> None:
    for seed in range(6):
        asked = phrase_conversation(pictures, np.random.default_rng(seed), text_only=False)
        for (question, _), mask, said in zip(asked.turns, asked.masks, asked.words, strict=True):
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
