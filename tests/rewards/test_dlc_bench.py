"""DLC-Bench scores of hand-made objects, computed by hand."""

from typing import Any

import pytest

from rl_reward_network.rewards.dlc_bench import (
    BenchObject,
    BenchQuestion,
    ObjectScore,
    benchmark_score,
    object_score,
    read_bench,
    read_predictions,
    score_predictions,
)
from rl_reward_network.rewards.judge import Judge, Question
from rl_reward_network.rewards.judge_client import JudgeConfig
from tests.rewards.judge_server import Reply, judge_server

POSITIVE = [["The wing is not mentioned.", 0], ["Its colour is not.", 0.5], ["It is not grey.", -1], ["It is grey.", 1]]
PART = [["No claws are mentioned.", 1], ["Claws are mentioned.", -1], ["The bird is not mentioned.", 0]]
SALIENT = [["Boats are not mentioned.", 1], ["Boats are mentioned.", -1]]
QA: dict[str, Any] = {
    "7": [
        {"question": "Wing?", "choices": POSITIVE, "type": "positive"},
        {"question": "Wings?", "choices": POSITIVE, "type": "positive"},
        {"question": "Claws?", "choices": PART, "type": "negative", "subtype": "negative part"},
        {"question": "Boats?", "choices": SALIENT, "type": "negative", "subtype": "salient negative"},
    ],
    "8": [{"question": "Wing?", "choices": POSITIVE, "type": "positive"}],
}
NAMES = {"7": "wild bird", "8": "leather shoes"}
BENCH = read_bench(QA, NAMES, "bench")
BIRD = BENCH["7"].questions


def test_the_files_are_read_in_their_own_order() -> None:
    assert list(BENCH) == ["7", "8"]
    choices = (("Boats are not mentioned.", 1.0), ("Boats are mentioned.", -1.0))
    assert BENCH["7"].questions[3] == BenchQuestion(Question("Boats?", choices), "negative", "salient negative")
    assert BENCH["8"] == BenchObject("leather shoes", (BIRD[0],))


@pytest.mark.parametrize(
    ("chosen", "recognised", "expected"),
    [
        ([3, 3, 0, 0], True, ObjectScore((1, 1, 1, 1), 1.0, 1.0, 1.0)),
        ([3, 1, 0, 1], True, ObjectScore((1, 0.5, 1, -1), 0.75, 0.0, 0.375)),
        ([2, 0, 2, 1], True, ObjectScore((-1, 0, 0, -1), -0.5, -0.5, -0.5)),
        ([3, 2, 0, 1], False, ObjectScore((0, -1, 0, -1), -0.5, -0.5, -0.5)),
        ([3, 3, 0, 0], False, ObjectScore((0, 0, 0, 0), 0.0, 0.0, 0.0)),
        ([None, 3, None, 0], True, ObjectScore((0, 1, 0, 1), 0.5, 0.5, 0.5)),
    ],
)
def test_one_object(chosen: list[int | None], recognised: bool, expected: ObjectScore) -> None:
    assert object_score(BIRD, chosen, recognised) == expected


def test_the_pooled_score_is_no_mean_of_means() -> None:
    score = object_score([*BIRD, BIRD[3]], [3, 3, 1, 1, 1], True)  # two positives, three negatives
    assert (score.pos, score.neg, score.score) == (1.0, -1.0, -0.2)


def test_the_benchmark_skips_objects_without_negatives_in_neg_only() -> None:
    scores = [ObjectScore((), 1.0, 0.5, 0.9), ObjectScore((), 0.0, None, 0.0), ObjectScore((), 0.5, -1.0, 0.0)]
    assert benchmark_score(scores) == {"avg_pos": 0.5, "avg_neg": -0.25, "avg": 0.125}
    assert benchmark_score(scores[1:2]) == {"avg_pos": 0.0, "avg_neg": None, "avg": None}


def judge_of(url: str) -> Judge:
    return Judge(JudgeConfig(url, "judge-model", max_retries=0))


def play(prompt: str) -> str | Reply:
    """A judge that answers by the words of the question; about shoes, by the words of the caption."""
    asked = prompt.partition("The question about it")[2] or "Wing?"  # the check has no such part
    replies = {
        "wild bird": "A. Yes",
        "Wing?": "D",
        "Wings?": "what?",
        "Claws?": "B. Claws are mentioned.",
        "Boats?": "A",
    }
    if "leather shoes" in asked:
        return "B. No" if "unclear" not in prompt else "Perhaps"
    return next(reply for words, reply in replies.items() if words in asked)


def test_predictions_are_scored_over_the_wire() -> None:
    with judge_server(play) as server:
        result = score_predictions(judge_of(server.url), BENCH, {"7": "A grey bird with claws.", "8": "A car."})
    bird, shoes = result["7"], result["8"]
    # bird: positives 1 and unreadable = 0, negatives -1 and 1; shoes: not recognised, min(0, 1)
    assert (bird["score_pos"], bird["score_neg"], bird["score"]) == (0.5, 0.0, 0.25)
    assert (shoes["score_pos"], shoes["score_neg"], shoes["score"]) == (0.0, None, 0.0)
    assert (result["avg_pos"], result["avg_neg"], result["avg"]) == (0.25, 0.0, 0.125)
    assert (bird["recognition_result"], shoes["recognition_result"]) == (True, False)
    assert (bird["neg_valid_num"], shoes["neg_valid_num"]) == (2, 0)
    assert bird["pred"] == "A grey bird with claws."
    assert bird["response"] == ["A. Yes", "D", "what?", "B. Claws are mentioned.", "A"]
    assert len(bird["prompt"]) == 5
    assert all("\nA grey bird with claws.\n" in prompt for prompt in bird["prompt"])
    assert bird["details_negatives"][1] == {
        "question": "Boats?",
        "choices": SALIENT,
        "type": "negative",
        "subtype": "salient negative",
        "pred_answer": "A",
        "pred_index": 0,
        "question_index": 3,
        "eval_result": 1.0,
    }
    assert [one["pred_index"] for one in bird["details_positives"]] == [3, None]
    assert shoes["details_recognition"][0]["eval_result"] == "incorrect"
    assert shoes["details_positives"][0]["eval_result"] == 0
    counted = {"calls": 7, "cache_hits": 0, "failures": 1, "retries": 0, "prompt_tokens": 70, "completion_tokens": 14}
    assert result["judge"] == {"model": "judge-model", "prompt_version": 1, "unreadable": 1} | counted
    assert sorted(server.prompts) == sorted([*bird["prompt"], *shoes["prompt"]])


def test_a_question_without_reply_is_an_error() -> None:
    def fails(prompt: str) -> str | Reply:
        return Reply(status=500, body="oops") if "Claws?" in prompt else play(prompt)

    message = r"1 of 7 questions .*again"
    with judge_server(fails) as server, pytest.raises(ValueError, match=message):
        score_predictions(judge_of(server.url), BENCH, {"7": "A bird.", "8": "A car."})


def test_a_recognition_that_cannot_be_read_is_an_error() -> None:
    message = "object 8: the judge answers the recognition question by 'Perhaps', which is neither Yes nor No"
    with judge_server(play) as server, pytest.raises(ValueError, match=message):
        score_predictions(judge_of(server.url), BENCH, {"7": "A bird.", "8": "unclear"})


def test_predictions_may_hold_more_than_the_benchmark() -> None:
    actual = read_predictions({"query": "Describe it.", "8": "A shoe.", "7": "", "9": 3}, BENCH, "pred.json")
    assert actual == {"7": "", "8": "A shoe."}
    assert list(actual) == ["7", "8"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], r"pred\.json: expected an object of annotation id -> caption, got list"),
        ({"7": "a"}, r"pred\.json: 1 of 2 captions are missing \(8\); make them"),
        ({}, r"2 of 2 captions are missing \(7, 8\)"),
        ({"7": "a", "8": None}, "the caption of 8 is NoneType, expected a string"),
        ({"7": "Error: out of memory", "8": "a"}, r"1 captions are errors of the model \(7\); make them again"),
    ],
)
def test_bad_predictions(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_predictions(values, BENCH, "pred.json")


def with_first(**changes: Any) -> dict[str, Any]:
    """QA whose object 8 has a changed question."""
    return {"8": [QA["8"][0] | changes]}


@pytest.mark.parametrize(
    ("qa", "names", "message"),
    [
        ([], NAMES, r"bench/qa\.json: expected an object of annotation ids, got list; download it again"),
        ({}, NAMES, r"bench/qa\.json: expected an object of annotation ids, got an empty object"),
        (QA, [], r"bench/class_names\.json: expected an object, got list"),
        (QA, {"7": "bird"}, r"bench/class_names\.json: 8 has the name None, expected words"),
        ({"8": "Wing?"}, NAMES, r"bench/qa\.json: 8 is str, expected a list"),
        ({"8": []}, NAMES, r"bench/qa\.json: 8 has no positive question"),
        ({"8": QA["7"][2:]}, NAMES, r"bench/qa\.json: 8 has no positive question"),
        ({"8": ["Wing?"]}, NAMES, r"bench/qa\.json: 8\[0\] is not a question \(TypeError"),
        (
            {"8": [{"question": "Wing?", "type": "positive"}]},
            NAMES,
            r"8\[0\] is not a question \(KeyError: 'choices'\)",
        ),
        (with_first(type="neutral"), NAMES, r"8\[0\]: type 'neutral' with 4 choices; expected positive or negative"),
        (with_first(choices=[["yes", 1]]), NAMES, r"8\[0\]: type 'positive' with 1 choices; .* 2 to 26"),
        (with_first(choices=[["yes", 1], ["no", 2]]), NAMES, r"8\[0\]: a choice has the score 2.0, expected -1 to 1"),
        (with_first(choices=[["yes", 1], ["no", float("nan")]]), NAMES, "a choice has the score nan"),
    ],
)
def test_a_bad_benchmark(qa: Any, names: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_bench(qa, names, "bench")
