"""DLC-Bench scores of hand-made objects, computed by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.dlc_bench import (
    Args,
    BenchObject,
    BenchQuestion,
    ObjectScore,
    benchmark_score,
    main,
    object_score,
    read_bench,
    read_predictions,
    score_predictions,
)
from rl_reward_network.artefacts import read_json, write_json
from rl_reward_network.cli.app import run
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


@pytest.mark.parametrize(
    ("caption", "reply", "message"),
    [
        ("A car.", Reply(status=500, body="oops"), r"1 of 7 questions .*again"),
        ("unclear", "B", "object 8: the judge answers the recognition question by 'Perhaps'"),
    ],
)
def test_a_missing_or_an_unreadable_reply_is_an_error(caption: str, reply: str | Reply, message: str) -> None:
    with (
        judge_server(lambda prompt: reply if "Claws?" in prompt else play(prompt)) as server,
        pytest.raises(ValueError, match=message),
    ):
        score_predictions(judge_of(server.url), BENCH, {"7": "A bird.", "8": caption})


def test_predictions_may_hold_more_than_the_benchmark() -> None:
    actual = read_predictions({"query": "Describe it.", "8": "A shoe.", "7": "", "9": 3}, BENCH, "pred.json")
    assert actual == {"7": "", "8": "A shoe."}
    assert list(actual) == ["7", "8"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], r"pred\.json: expected an object of annotation id -> caption, got list"),
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
        ([], NAMES, r"bench/qa\.json: .* got list"),
        ({}, NAMES, r"bench/qa\.json: .* got an empty object"),
        (QA, [], r"bench/class_names\.json: .* got list"),
        (QA, {"7": "bird"}, r"bench/class_names\.json: 8 has the name None"),
        ({"8": "Wing?"}, NAMES, "8 is str, expected a list"),
        ({"8": QA["7"][2:]}, NAMES, "8 has no positive question"),
        ({"8": ["Wing?"]}, NAMES, r"8\[0\] is not a question \(TypeError"),
        (
            {"8": [{"question": "Wing?", "type": "positive"}]},
            NAMES,
            r"8\[0\] is not a question \(KeyError: 'choices'\)",
        ),
        (with_first(type="neutral"), NAMES, r"8\[0\]: type 'neutral'"),
        (with_first(choices=[["yes", 1]]), NAMES, "with 1 choices"),
        (with_first(choices=[["yes", 1], ["no", 2]]), NAMES, "the score 2.0"),
        (with_first(choices=[["yes", 1], ["no", float("nan")]]), NAMES, "the score nan"),
    ],
)
def test_a_bad_benchmark(qa: Any, names: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_bench(qa, names, "bench")


# ---- the command, over a real HTTP server ----


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Args:
    """Everything in a folder of its own; the server is still to be named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    predictions = {"query": "Describe it.", "7": "A grey bird with claws.", "8": "A car."}
    write_json(Path("DLC-bench/qa.json"), QA)
    write_json(Path("DLC-bench/class_names.json"), NAMES)
    write_json(Path("pred.json"), predictions)
    return Args(Path("pred.json"), Path("DLC-bench"), "http://127.0.0.1:1/v1", "judge-model")


def test_the_command_writes_the_result_and_prints_it(args: Args, capsys: pytest.CaptureFixture[str]) -> None:
    with judge_server(play) as server:
        main(replace(args, llm_judge_base_url=server.url))
        assert len(server.bodies) == 1 + 7  # the check, and two recognitions with five questions
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "2 objects, judge judge-model: Pos 0.250  Neg 0.000  Avg 0.125"
        assert "unreadable 1" in lines[1]
        assert "calls 8, cache_hits 0, failures 1" in lines[1]
        assert lines[-1] == "written: pred_eval.json"
        first: dict[str, Any] = read_json(Path("pred_eval.json"))
        assert (first["avg_pos"], first["avg_neg"], first["avg"], first["8"]["score"]) == (0.25, 0.0, 0.125, 0.0)
        words = ["--predictions", "pred.json", "--bench", "DLC-bench", "--llm_judge_model", "judge-model"]
        run(main, Args, words=[*words, "--llm_judge_base_url", server.url, "--output", "new/again.json"])
        assert len(server.bodies) == 8 + 1 + 1  # the check, and what could not be read
    again: dict[str, Any] = read_json(Path("new/again.json"))
    assert again.pop("judge")["cache_hits"] == 6
    assert again == {name: value for name, value in first.items() if name != "judge"}


def test_nothing_is_written_when_the_judge_is_lost(args: Args) -> None:
    down = [True]
    oops = Reply(status=500, body="oops")
    with judge_server(lambda prompt: oops if down and "Boats?" in prompt else play(prompt)) as server:
        config = replace(args, llm_judge_base_url=server.url)
        with pytest.raises(ValueError, match="1 of 7 questions"):
            main(config)
        assert not Path("pred_eval.json").exists()
        down.clear()
        before = len(server.bodies)
        main(config)
        assert len(server.bodies) - before == 1 + 2  # the replies of the first run were kept


@pytest.mark.parametrize(
    ("changes", "predictions", "message"),
    [
        ({"output": Path("./pred.json")}, None, r"--output pred\.json: "),
        ({"bench": Path("DLC-Bench")}, None, r"--bench DLC-Bench: qa\.json .*hf download nvidia/DLC-Bench"),
        ({"predictions": Path("none.json")}, None, r"none\.json: file not found"),
        ({"llm_judge_base_url": "localhost:8000"}, None, "url is 'localhost:8000'"),
        ({"llm_judge_concurrency": 0}, None, "max_concurrency is 0"),
        ({}, '{"7": "a"}', r"pred\.json: 1 of 2 captions"),
        ({}, '{"7": ', r"pred\.json: not valid JSON"),
        ({}, None, r"LLM judge http://127\.0\.0\.1:1/v1, model 'judge-model': no connection"),
    ],
)
def test_wrong_input_is_refused(args: Args, changes: dict[str, Any], predictions: str | None, message: str) -> None:
    if predictions is not None:
        Path("pred.json").write_text(predictions)
    with pytest.raises(ValueError, match=message):
        main(replace(args, **changes))
    assert not Path("pred_eval.json").exists()
