"""How questions are put and answers read: pure functions."""

import pytest

from rl_reward_network.rewards.judge.answers import (
    Question,
    answer_prompt,
    gated,
    is_plural,
    parse_choice,
    recognition_question,
)

WING = (
    "The wing is not mentioned.",
    "The wing is mentioned, but not its colour.",
    "The colour of the wing is mentioned and is not grey.",
    "The colour of the wing is mentioned and is grey.",
)
YES_NO = ("Yes", "No")


@pytest.mark.parametrize(
    ("answer", "choices", "index"),
    [
        # 1. a choice, its letter, or both
        ("the wing is not mentioned.", WING, 0),
        (" D\n", WING, 3),
        ("B. The wing is mentioned, but not its colour.", WING, 1),
        ("a", ("not a", "a"), 0),  # the letter of the first choice comes before the words of the second
        # 2. exactly one choice inside
        ("I would say: the colour of the wing is mentioned and is grey. Certainly.", WING, 3),
        ("A. Yes, it does", YES_NO, 0),
        ("B) No", YES_NO, 1),
        ("A. I mean no", YES_NO, 1),  # the words count, whatever the letter
        # 3. a letter and a full stop
        ("B. The wing is there", WING, 1),
        ("b. yes and no", YES_NO, 1),
        # 4. several choices inside: the one that begins last, of those the longest
        ("yes... well, no", YES_NO, 1),
        ("it is dark grey", ("grey", "dark", "dark grey"), 0),
        ("it is dark greyish", ("dark", "dark grey", "blue"), 1),
        # 5. inside a choice: the longest such
        ("grey", ("is grey", "is not grey", "is blue"), 1),
        ("mentioned and is", WING, 2),
        # 6. a letter and a line break
        ("B\nbecause of its colour", WING, 1),
        # nothing that can be told
        ("", WING, None),
        ("  \n", WING, None),
        ("E", WING, None),
        ("e. something else", WING, None),
        ("C\nneither", YES_NO, None),
        ("x", WING, None),
        ("w", WING, None),  # a letter of many words is no part of a choice
        ("I cannot tell", WING, None),
        (".", WING, None),
    ],
)
def test_answers_are_read_in_this_order(answer: str, choices: tuple[str, ...], index: int | None) -> None:
    assert parse_choice(answer, choices) == index


def test_the_prompt_has_rules_caption_and_lettered_choices_in_this_order() -> None:
    question = Question("Which holds for {it}?", (("Red {x}.", 1.0), ("Not red.", -1.0), ("Not said.", 0.0)))
    prompt = answer_prompt("A {red} bird.\nIt sings.", question)
    rules, _, rest = prompt.partition("A {red} bird.\nIt sings.")
    assert "exactly one of the choices" in rules
    assert rest.endswith("\nWhich holds for {it}?\nA. Red {x}.\nB. Not red.\nC. Not said.")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wild bird", "likely to be a wild bird, or one of"),
        ("umbrella", "likely to be an umbrella, or one of"),
        ("unicycle", "likely to be a unicycle, or"),
        ("utensil", "likely to be a utensil, or"),
        ("hourglass", "likely to be an hourglass, or"),
        ("horse", "likely to be a horse, or"),
        ("bus", "likely to be a bus, or"),
        ("leather shoes", "Are the objects that the text describes likely to be leather shoes, or objects of"),
    ],
)
def test_the_recognition_question_names_the_object(name: str, words: str) -> None:
    question = recognition_question(name)
    assert words in question.text
    assert question.choices == (("Yes", 1.0), ("No", 0.0))


def test_plurals() -> None:
    plural = ["shoes", "High Heels", "scissors", "glasses", "green beans", "people", "skis", "baked goods"]
    singular = ["bus", "wine glass", "cactus", "tennis racket", "lens", "piano", "chess", "tennis", "shoe box", ""]
    assert [name for name in plural if not is_plural(name)] == []
    assert [name for name in singular if is_plural(name)] == []


def test_what_is_not_recognised_earns_nothing_and_still_loses() -> None:
    scores = [1.0, 0.5, 0.0, -1.0]
    assert gated(scores, recognised=True) == scores
    assert gated(scores, recognised=False) == [0.0, 0.0, 0.0, -1.0]
