"""The judge as a reward, over a real HTTP server that plays the judge by fixed rules; its prompts and their answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl_reward_network.rewards.judge import (
    MAX_QUESTIONS,
    Exam,
    Judge,
    Question,
    answer_prompt,
    answer_request,
    exam_request,
    gated,
    is_plural,
    parse_choice,
    parse_exam,
    recognition_question,
)
from rl_reward_network.rewards.judge_client import JudgeConfig
from tests.rewards.judge_server import Reply, judge_server

REFERENCE = "A dark thin vessel."
CHOICES = [["It is not said.", 0], ["It is said of something else.", 0.5], ["It is the opposite.", -1], ["It is.", 1]]
WRITTEN = {
    "object": "blood vessel",
    "questions": [{"question": f"Is the vessel {word}?", "choices": CHOICES} for word in ("dark", "thin")],
}
EXAM = parse_exam(json.dumps(WRITTEN))


def play(prompt: str) -> str | Reply:
    """A judge of vessels (dark, bright, thin, thick) by the words of the caption."""
    if prompt == exam_request(REFERENCE).prompt:
        return f"Here it is:\n```json\n{json.dumps(WRITTEN)}\n```"
    if "Write an exam" in prompt:
        return "I would rather not."
    caption, _, question = prompt.partition("The text:\n")[2].partition("\n\nThe question about it")
    if "garbled" in caption and "thin?" in question:
        return "Hm."
    if "down" in caption and "thin?" in question:
        return Reply(status=500, body="down")
    if "A. Yes" in question:
        return "A. Yes" if "vessel" in caption else "B. No"
    right, wrong = ("dark", "bright") if "dark" in question else ("thin", "thick")
    return "D. It is." if right in caption else "C" if wrong in caption else "A. It is not said."


def judge_of(url: str, cache: Path | None = None) -> Judge:
    return Judge(JudgeConfig(url, "judge-model", max_retries=0, cache_path=cache))


def test_scores_by_hand():
    captions = {
        "a dark thin vessel": 1.0,  # (1 + 1) / 2
        "a dark vessel": 0.5,  # (1 + 0) / 2
        "a dark thick vessel": 0.0,  # (1 - 1) / 2
        "a bright thick vessel": -1.0,
        "a vessel": 0.0,
        "a dark thin cable": 0.0,  # not recognised: min(0, 1) twice
        "a dark thick cable": -0.5,  # not recognised: (min(0, 1) + min(0, -1)) / 2
    }
    with judge_server(play) as server:
        judge = judge_of(server.url)
        assert judge.scores(list(captions), [REFERENCE] * len(captions)) == list(captions.values())
    assert judge.counts["calls"] == len(server.bodies) == 1 + 3 * len(captions)  # one exam; recognition, two questions
    assert judge.counts["failures"] == 0


def test_what_the_judge_could_not_say_is_none_and_never_zero():
    captions = ["a dark vessel", "a garbled dark vessel", "a vessel, going down", "", " \n"]
    with judge_server(play) as server:
        judge = judge_of(server.url)
        assert judge.scores(captions, [REFERENCE] * 5) == [0.5, None, None, 0.0, 0.0]
        assert judge.counts["failures"] == 2
        assert judge.scores(["a vessel", "a vessel", ""], ["A nerve.", REFERENCE, "A nerve."]) == [None, 0.0, 0.0]
    with judge_server(lambda prompt: pytest.fail("asked")) as server:
        judge = judge_of(server.url)
        assert judge.scores(["", "\t"], [REFERENCE, "A nerve."]) == [0.0, 0.0], "an empty prediction costs nothing"
        assert judge.scores([], []) == []
        assert judge.counts["calls"] == 0


def test_equal_pairs_are_judged_once_and_the_cache_saves_the_rest(tmp_path):
    with judge_server(play) as server:
        judge = judge_of(server.url, tmp_path / "cache")
        assert judge.scores(["a dark vessel"] * 4, [REFERENCE] * 4) == [0.5] * 4
        assert len(server.bodies) == 4
        again = judge_of(server.url, tmp_path / "cache")
        assert again.scores(["a dark vessel"], [REFERENCE]) == [0.5]
        assert len(server.bodies) == 4
        assert again.counts["cache_hits"] == 4
        assert again.counts["calls"] == again.counts["prompt_tokens"] == 0


@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    [
        (["a"], [], "each prediction needs its reference, got 1 and 0"),
        (["a", "b"], ["a", " "], "reference 1 is empty; leave the sample out"),
        ("a", ["a"], "must be lists of captions, got one string"),
    ],
)
def test_bad_input(predictions, references, message):
    with pytest.raises(ValueError, match=message):
        judge_of("http://127.0.0.1:1/v1").scores(predictions, references)


def test_requests_name_what_is_asked():
    request = answer_request("a {thin} vessel", recognition_question("blood vessel"))
    assert "\na {thin} vessel\n" in request.prompt
    assert (request.parse("b. no"), request.parse("perhaps")) == (1, None)
    exam = exam_request("A {dark} vessel.")
    assert exam.prompt.endswith("\nA {dark} vessel.")
    assert f"at most {MAX_QUESTIONS}" in exam.prompt
    example = exam.prompt[exam.prompt.index('{"object"') :].splitlines()[0]
    form = parse_exam(example)
    assert form is not None
    assert [score for _, score in form.questions[0].choices] == [0, 0.5, -1, 1]


def test_an_exam_is_found_among_other_words():
    question = Question("Is the vessel dark?", tuple((words, float(score)) for words, score in CHOICES))
    assert EXAM is not None
    assert (EXAM.name, EXAM.questions[0]) == ("blood vessel", question)
    assert parse_exam(f"Sure!\n```json\n{json.dumps(WRITTEN, indent=1)}\n``` Good luck!") == EXAM
    many = parse_exam(json.dumps({"object": " wild\n bird ", "questions": [WRITTEN["questions"][0]] * 20}))
    assert (len(many.questions), many.name) == (MAX_QUESTIONS, "wild bird")
    as_words = exam_with(choices=[["right", "+1"], ["wrong", "-1"]])
    assert as_words.questions[0].choices == (("right", 1.0), ("wrong", -1.0)), "scores may be written as strings"


def exam_with(**changes: Any) -> Exam | None:
    """The exam whose first question is changed, as JSON of a judge."""
    first = WRITTEN["questions"][0] | changes  # type: ignore[index]
    return parse_exam(json.dumps({"object": "x", "questions": [first, WRITTEN["questions"][1]]}))


@pytest.mark.parametrize(
    "changes",
    [
        {"question": ""},
        {"question": 3},
        {"choices": [["right", 1]]},
        {"choices": [["right", 1], ["wrong", -1], ["a", 0], ["b", 0], ["c", 0], ["d", 0]]},
        {"choices": [["right", 1], ["Right ", -1]]},
        {"choices": [["right", 1], ["", -1]]},
        {"choices": [["right", 2], ["wrong", -1]]},
        {"choices": [["half", 0.5], ["wrong", -1]]},
        {"choices": [["right", 1], ["wrong", float("nan")]]},
        {"choices": [["right", 1], ["wrong", "a lot"]]},
        {"choices": [["right", 1], ["wrong", None]]},
        {"choices": [["right", 1], [2, 0]]},
        {"choices": [["right", 1, 1], ["wrong", -1]]},
        {"choices": {"right": 1, "wrong": -1}},
        {"choices": None},
    ],
)
def test_a_question_out_of_form_is_left_out(changes):
    assert [question.text for question in exam_with(**changes).questions] == ["Is the vessel thin?"]


NO_EXAMS = ["", "no", "{", "{}", '{"object": "x"}', '{"object": "x", "questions": []}']
NO_EXAMS += ['{"object": "x", "questions": 3}', '{"object": "x", "questions": [3, null, "a"]}']
NO_EXAMS += [json.dumps(WRITTEN | {"object": " "})]
NO_EXAMS += [json.dumps(WRITTEN | {"object": None}), json.dumps(WRITTEN)[:-3], '{"object": ' + "[" * 100_000 + "}"]


@pytest.mark.parametrize("reply", NO_EXAMS)
def test_what_is_no_exam(reply):
    assert parse_exam(reply) is None


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
def test_answers_are_read_in_this_order(answer, choices, index):
    assert parse_choice(answer, choices) == index


def test_the_prompt_has_rules_caption_and_lettered_choices_in_this_order():
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
def test_the_recognition_question_names_the_object(name, words):
    question = recognition_question(name)
    assert words in question.text
    assert question.choices == (("Yes", 1.0), ("No", 0.0))


def test_plurals():
    plural = ["shoes", "High Heels", "scissors", "glasses", "green beans", "people", "skis", "baked goods"]
    singular = ["bus", "wine glass", "cactus", "tennis racket", "lens", "piano", "chess", "tennis", "shoe box", ""]
    assert [name for name in plural if not is_plural(name)] == []
    assert [name for name in singular if is_plural(name)] == []


def test_what_is_not_recognised_earns_nothing_and_still_loses():
    scores = [1.0, 0.5, 0.0, -1.0]
    assert gated(scores, recognised=True) == scores
    assert gated(scores, recognised=False) == [0.0, 0.0, 0.0, -1.0]
