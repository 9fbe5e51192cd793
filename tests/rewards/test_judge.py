"""The LLM judge against servers that answer well, answer badly, and fail or are slow; its exams, answers and cache."""

import json
import logging
import re
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import diskcache
import pytest

from rl_reward_network.rewards import judge as judging
from rl_reward_network.rewards.judge import (
    MAX_QUESTIONS,
    NO_KEY,
    Judge,
    JudgeConfig,
    Question,
    Request,
    answer_request,
    exam_request,
    is_plural,
    parse_choice,
    parse_exam,
    recognition_question,
)
from tests.rewards.judge_server import KEY, SOON, Reply, Server, judge_server, listing

DOWN = "http://127.0.0.1:1/v1"
GENERAL = "check that the server runs, and its base url (--llm_judge_base_url), which usually ends in /v1"
REFERENCE = "A dark thin vessel."
CHOICES = [["It is not said.", 0], ["It is said of something else.", 0.5], ["It is the opposite.", -1], ["It is.", 1]]
WRITTEN = {
    "object": "blood vessel",
    "questions": [{"question": f"Is the vessel {word}?", "choices": CHOICES} for word in ("dark", "thin")],
}
EXAM = parse_exam(json.dumps(WRITTEN))


def play(prompt):
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


def client_of(url, **options):
    return Judge(JudgeConfig(url, "judge-model", **({"max_retries": 0} | options)))


def echo(text):
    """A parser that reads everything but "?"."""
    return None if text == "?" else text


def ask(client, *prompts):
    return list(client.ask([Request(prompt, echo) for prompt in prompts]))


def numbers(count):
    return [str(number) for number in range(count)]


@pytest.fixture(autouse=True)
def key_in_the_environment(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.fixture
def good():
    """A server that answers well: it plays the judge of vessels, and says other prompts in capitals."""
    with judge_server(lambda prompt: play(prompt) if "vessel" in prompt else prompt.upper()) as server:
        yield server


Bad = Callable[[Reply], Server]


@pytest.fixture
def bad():
    """A server that answers badly: "good" gets "A", every other prompt the reply in question."""
    replies = []
    with judge_server(lambda prompt: "A" if prompt == "good" else replies[-1]) as server:
        yield lambda reply: replies.append(reply) or server


@pytest.fixture
def silent():
    """The address of a server that accepts every connection and never replies."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"


# ---- a server that answers well --------------------------------------------------------------------------------------


def test_scores_by_hand(good, tmp_path):
    captions = {
        "a dark thin vessel": 1.0,  # (1 + 1) / 2
        "a dark vessel": 0.5,  # (1 + 0) / 2
        "a dark thick vessel": 0.0,  # (1 - 1) / 2
        "a bright thick vessel": -1.0,
        "a vessel": 0.0,
        "a dark thin cable": 0.0,  # not recognised: min(0, 1) twice
        "a dark thick cable": -0.5,  # not recognised: (min(0, 1) + min(0, -1)) / 2
    }
    judge = client_of(good.url, cache_path=tmp_path)
    assert judge.scores([*captions, *captions], [REFERENCE] * 14) == [*captions.values()] * 2
    assert judge.counts["calls"] == len(good.bodies) == 1 + 3 * len(captions)  # one exam; recognition, two questions
    assert judge.counts["failures"] == 0
    again = client_of(good.url, cache_path=tmp_path)
    assert again.scores(["a dark vessel"], [REFERENCE]) == [0.5]
    assert (again.counts["cache_hits"], again.counts["calls"], again.counts["prompt_tokens"]) == (4, 0, 0)


def test_what_the_judge_could_not_say_is_none_and_never_zero(good):
    captions = ["a dark vessel", "a garbled dark vessel", "a vessel, going down", "", " \n"]
    judge = client_of(good.url)
    assert judge.scores(captions, [REFERENCE] * 5) == [0.5, None, None, 0.0, 0.0]
    assert judge.counts["failures"] == 2
    assert judge.scores(["a vessel", "a vessel", ""], ["A nerve.", REFERENCE, "A nerve."]) == [None, 0.0, 0.0]
    asked = len(good.bodies)
    assert judge.scores(["", "\t"], [REFERENCE, "A nerve."]) == [0.0, 0.0]
    assert judge.scores([], []) == []
    assert len(good.bodies) == asked, "an empty prediction costs nothing"


def test_it_is_asked_with_the_key_past_any_proxy(good, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    client = client_of(good.url)
    assert ask(client, "one", "two", "one", "three", "two") == ["ONE", "TWO", "ONE", "THREE", "TWO"]
    monkeypatch.delenv("OPENAI_API_KEY")
    ask(client_of(good.url), "four")
    assert sorted(good.prompts) == ["four", "one", "three", "two"], "equal questions are sent once"
    counts = {"calls": 3, "cache_hits": 0, "failures": 0, "retries": 0, "prompt_tokens": 30, "completion_tokens": 6}
    assert client.counts == counts
    client.note(imputed=2)
    client.note(imputed=1)
    assert client.counts == counts | {"imputed": 3}
    assert good.keys == [f"Bearer {KEY}"] * 3 + [f"Bearer {NO_KEY}"]
    assert next(body for body in good.bodies if body["messages"][0]["content"] == "one") == {
        "path": "/v1/chat/completions",
        "model": "judge-model",
        "messages": [{"role": "user", "content": "one"}],
        "max_tokens": 300,
        **{"temperature": 0.0, "top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    }


def test_no_more_requests_at_once_than_allowed():
    with judge_server(lambda prompt: time.sleep(0.02) or prompt) as server:
        client = client_of(server.url, max_concurrency=3)
        both = [threading.Thread(target=ask, args=(client, *(f"{k}{n}" for n in range(12)))) for k in "ab"]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
    assert (len(server.bodies), server.most_at_once) == (24, 3)


def test_reasoning_is_cut_off_half_characters_become_question_marks_and_a_busy_server_is_asked_again():
    odd = Reply("x").content().decode().replace('"x"', r'"<think>A or B?</think>half \ud83d"')
    without_usage = '{"choices": [{"message": {"content": "A"}}], "usage": null}'
    busy = Reply(status=503, body="busy", headers=SOON)
    replies = iter([Reply(body=odd), busy, busy, Reply(body=without_usage)])
    with judge_server(lambda prompt: next(replies)) as server:
        client = client_of(server.url, max_retries=2)
        assert ask(client, "\ud83d and 😀") == ["half ?"]
        assert server.prompts == ["? and 😀"]
        assert ask(client, "one") == ["A"]
    assert [client.counts[name] for name in ("calls", "failures", "retries", "prompt_tokens")] == [2, 0, 2, 10]


# ---- cache -----------------------------------------------------------------------------------------------------------


def test_cached_replies_are_not_asked_again(good, tmp_path):
    cache = tmp_path / "new" / "folder"
    ask(client_of(good.url, cache_path=cache), "one", "two")
    again = client_of(good.url, cache_path=cache)
    assert ask(again, "two", "one", "three") == ["TWO", "ONE", "THREE"]
    assert (again.counts["calls"], again.counts["cache_hits"], again.counts["prompt_tokens"]) == (1, 2, 10)
    other = Judge(JudgeConfig(good.url, "another-model", cache_path=cache))
    ask(other, "one")
    list(other.ask([Request("one", echo, max_tokens=20)]))
    assert len(good.bodies) == 5, "another model or length is another question"
    other.check()
    other.check()
    assert len(good.bodies) == 7, "a check is not cached"
    with judge_server(lambda prompt: prompt * 2) as elsewhere:
        assert ask(client_of(elsewhere.url, cache_path=cache), "one") == ["oneone"], "another server"
    stored = diskcache.Cache(cache, disk=diskcache.JSONDisk)
    assert all(stored[key].keys() == {"reply", "model", "time"} for key in stored)


def test_threads_and_processes_share_a_cache(good, tmp_path):
    code = "import sys; from tests.rewards.test_judge import *; client = client_of(sys.argv[1], cache_path=Path("
    code += "sys.argv[2])); ask(client, *numbers(30))"
    words = [sys.executable, "-c", code, good.url, str(tmp_path / "cache")]
    others = [subprocess.Popen(words, cwd=Path(__file__).parents[2]) for _ in range(2)]
    assert [other.wait(timeout=120) for other in others] == [0, 0]
    client = client_of(good.url, cache_path=tmp_path / "cache")
    assert ask(client, *numbers(30)) == numbers(30)
    assert client.counts["cache_hits"] == 30


def test_neither_errors_nor_unreadable_replies_are_cached(tmp_path):
    replies = iter([Reply(status=500, body="{}"), Reply("?"), Reply("good")])
    with judge_server(lambda prompt: next(replies)) as server:
        client = client_of(server.url, cache_path=tmp_path)
        assert [ask(client, "one") for _ in range(4)] == [[None], [None], ["good"], ["good"]]
    assert (client.counts["failures"], client.counts["cache_hits"]) == (2, 1)


@pytest.mark.parametrize(("mode", "value"), [(4, b"cos\nabort\n(tR."), (1, b"\x00"), (1, zlib.compress(b"[1, 2]"))])
def test_a_pickled_or_damaged_value_in_the_cache_is_never_loaded(good, tmp_path, mode, value):
    ask(client_of(good.url, cache_path=tmp_path), "one")
    with sqlite3.connect(tmp_path / "cache.db") as base:
        base.execute("UPDATE Cache SET mode = ?, value = ?", (mode, value))
    assert ask(client_of(good.url, cache_path=tmp_path), "one") == ["ONE"]
    assert len(good.bodies) == 2


# ---- a server that answers badly -------------------------------------------------------------------------------------

UNUSABLE = "no chat completion"
FAILURES = [  # reply, reason, remedy
    (Reply(status=503, body='{"error": "slow down"}', headers=SOON), 'HTTP 503: {"error": "slow down"}', GENERAL),
    (Reply(status=500, body="<h1>oops</h1>", headers=SOON), "HTTP 500: <h1>oops</h1>", GENERAL),
    (Reply(status=400, body="too   long\n"), "HTTP 400: too long", GENERAL),
    (Reply(status=307, headers={"Location": "/elsewhere"}, body=""), "HTTP 307: (empty)", GENERAL),
    (Reply(status=401, body="no"), "HTTP 401: no", "set the key in the environment variable OPENAI_API_KEY"),
    (Reply(status=403, body="no"), "HTTP 403: no", "set a key that may use this model in the environment variable OP"),
    (Reply(status=404, body="no"), "HTTP 404: no", "the model must be the name that the server gives it, and the bas"),
    (Reply(status=429, body="later", headers=SOON), "HTTP 429: later", "send fewer requests at once, or raise"),
    (Reply(body="<html>welcome</html>", headers={"Content-Type": "text/html"}), f"{UNUSABLE}: <html>welc", GENERAL),
    *((Reply(body=body), UNUSABLE, GENERAL) for body in ("{garbage", '{"choices": []}', '["choices"]', "null")),
    *((Reply(body=body), UNUSABLE, GENERAL) for body in ('{"choices": [{}]}', "[" * 100_000)),
    (Reply(body=""), f"{UNUSABLE}: (empty)", GENERAL),
    *((Reply(text=text), "a reply without text", GENERAL) for text in (None, "  \n")),
    (Reply(body='{"choices": [{"message": {"content": ["A"]}}]}'), "a reply without text", GENERAL),
]


@pytest.mark.parametrize(("reply", "reason", "remedy"), FAILURES)
def test_a_failure_is_no_answer_and_is_named_with_its_remedy(bad, reply, reason, remedy):
    server, final = bad(reply), reply.status in (401, 403, 404)
    with pytest.raises(ValueError, match=re.escape(reason)) as refused:
        client_of(server.url).check()
    assert str(refused.value).startswith(f"LLM judge {server.url}, model 'judge-model': ")
    assert f"; {remedy}" in str(refused.value)
    client = client_of(server.url, max_retries=1, max_concurrency=1)
    assert ask(client, "good", "bad") == ["A", None]
    assert (client.counts["failures"], client.counts["retries"]) == (1, int(reply.status in (429, 500, 503)))
    assert client.failing() == (str(refused.value) if final else None)
    sent = len(server.bodies)
    assert ask(client, *numbers(2)) == [None] * 2
    assert (len(server.bodies) == sent) == final, "after a permanent refusal nothing more is asked"


def test_half_of_50_calls_may_fail_and_not_one_more(tmp_path):
    """Failures and replies by turns; then a reply leaves the window, and a failure takes its place."""
    replies = iter([True, False] * 25 + [False] + [True] * 100)
    down = Reply(status=500, body="out of memory")
    with judge_server(lambda prompt: "A" if next(replies) else down) as server:
        client = client_of(server.url, max_concurrency=1, cache_path=tmp_path)
        ask(client, *numbers(50))
        assert client.failing() is None, "25 of 50"
        ask(client, *map(str, range(0, 50, 2)))
        assert client.counts["cache_hits"] == 25, "which are no calls"
        assert ask(client, "one more", "unasked", "0") == [None, None, "A"]
        assert len(server.bodies) == 51
        assert client.failing() == (
            f"LLM judge {server.url}, model 'judge-model': 26 of the last 50 calls failed, the latest by HTTP 500: out "
            f"of memory; {GENERAL}"
        )
        client.check()  # it is back
        assert client.failing() is None
        assert ask(client, "unasked") == ["A"]


def test_replies_that_cannot_be_read_end_the_asking_with_their_own_remedy(bad):
    server = bad(Reply("?"))
    client = client_of(server.url, max_concurrency=1)
    ask(client, *numbers(40))
    assert len(server.bodies) == client.counts["failures"] == 26, "enough to be more than half of 50"
    said = "a reply that cannot be read: ?; take a model that follows instructions"
    assert str(client.failing()).endswith(f"26 of the last 26 calls failed, the latest by {said}")


def test_the_key_is_nowhere(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    replies = iter([Reply("A"), *[Reply(status=code, body="x" * 190 + KEY, headers=SOON) for code in (500, 401)]])
    with judge_server(lambda prompt: next(replies)) as server:
        client = client_of(server.url, cache_path=tmp_path, max_concurrency=1)
        ask(client, "one", "two")
        with pytest.raises(ValueError, match=r"HTTP 401: x+\*\*\*;") as refused:
            client.check()
    shown = [str(refused.value), client.last_failure, str(client.failing()), repr(client.config), caplog.text]
    stored = [path.read_bytes() for path in tmp_path.iterdir()]
    assert len(stored) >= 1
    for part in (KEY, KEY[:10]):
        assert not [text for text in shown if part in text]
        assert not [content for content in stored if part.encode() in content]


# ---- a server that is down, slow or silent ---------------------------------------------------------------------------


def test_a_slow_server_is_not_waited_for_and_one_that_is_down_is_named():
    end = threading.Event()
    with judge_server(lambda prompt: "A" if prompt == "good" or end.wait(10) else "B") as server:
        client = client_of(server.url, timeout_s=0.2)
        start = time.monotonic()
        assert ask(client, "slow", "good") == [None, "A"]
        assert time.monotonic() - start < 3
        assert client.last_failure == "no reply within 0.2 s"
        end.set()
    client = client_of(DOWN)
    assert ask(client, "one") == [None]
    with pytest.raises(ValueError, match=rf"LLM judge {DOWN}, model 'judge-model': no connection \(.*\); check that"):
        client.check()


def test_a_silent_server_is_named_long_before_its_time_is_up(silent, monkeypatch, capsys):
    monkeypatch.setattr(judging, "SILENT_S", 0.15)
    client = client_of(silent, timeout_s=0.6)
    assert ask(client, "one", "two") == [None] * 2
    ask(client, "three")
    assert client.last_failure == "no reply within 0.6 s"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: LLM judge {silent}, model 'judge-model': no answer for 0.15 s; check that the")
    assert "0.6 s and 0 retries" in line
    monkeypatch.setattr(judging, "SHORT_TIMEOUT_S", 0.1)
    start = time.monotonic()
    for model in ("judge-model", None):
        with pytest.raises(ValueError, match=rf"LLM judge {silent}.*: no reply within 0\.1 s; check"):
            Judge(JudgeConfig(silent, model, timeout_s=600, max_retries=5)).check()
    assert time.monotonic() - start < 2


# ---- settings, the model, and packages -------------------------------------------------------------------------------

SECRET = "put the key in the environment"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(({"base_url": url}, "base url is") for url in ("localhost:8000/v1", "ftp://host/v1", "http:///v1")),
        *(({"base_url": url}, "base url is") for url in ("http://host:99999/v1", "http://[::1", "http://a b/v1")),
        ({"base_url": "http://host/v1\n"}, "base url is"),
        *(({"base_url": url}, SECRET) for url in ("https://me:secret@host/v1", "https://host/v1?key=secret")),
        ({"base_url": "https://host:99999@secret/v1"}, SECRET),
        ({"model": " "}, "model is empty"),
        ({"max_concurrency": 0}, "max_concurrency is 0"),
        ({"timeout_s": 0.0}, "timeout_s is 0.0"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
        ({"max_retries": -1}, "max_retries is -1"),
    ],
)
def test_bad_settings_are_refused_without_showing_a_secret(wrong, message):
    with pytest.raises(ValueError, match=message) as refused:
        JudgeConfig(**({"base_url": "http://host/v1", "model": "m"} | wrong))
    assert "secret" not in str(refused.value)


def test_what_cannot_be_a_key_a_cache_or_captions(tmp_path, monkeypatch):
    for bad_key in ("sk-sécret", "sk-secret\nsecond line"):
        monkeypatch.setenv("MY_KEY", bad_key)
        with pytest.raises(ValueError, match="MY_KEY has characters") as refused:
            client_of(DOWN, api_key_env="MY_KEY")
        assert "cret" not in str(refused.value)
    old, damaged = tmp_path / "llm_judge.sqlite", tmp_path / "damaged"
    old.write_text("the replies of an earlier version")
    damaged.mkdir()
    (damaged / "cache.db").write_text("not a database, which nobody may overwrite" * 100)
    places = {old: r"\.sqlite: is a file", old / "x": "name a folder in which you may write", damaged: "not a database"}
    for place, message in places.items():
        with pytest.raises(ValueError, match=message):
            client_of(DOWN, cache_path=place)
    for captions, message in (((["a"], []), "got 1 and 0"), ((["a", "b"], ["a", " "]), "reference 1 is empty")):
        with pytest.raises(ValueError, match=message):
            client_of(DOWN).scores(*captions)


@pytest.mark.parametrize(
    ("model", "models", "used"),
    [(None, listing("the-only-one"), "the-only-one"), ("mine", Reply(status=500, body="no list"), "mine")],
)
def test_a_judge_without_a_name_is_the_only_one_of_the_server(model, models, used):
    with judge_server(lambda prompt: "A", models) as server:
        client = Judge(JudgeConfig(server.url, model))
        assert client.config.model == used
        client.check()
    assert [body["model"] for body in server.bodies] == [used]


KEY_MISSING = "set the key in the environment variable OPENAI_API_KEY"


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (listing(), ": lists 0 models; name one by --llm_judge_model"),
        (listing("a/b", "c"), ": lists 2 models (a/b, c); name one by --llm_judge_model"),
        *((Reply(body=body), ": a list of models that cannot be read") for body in ('{"data": [{"id', "[]", "null")),
        *((Reply(body=body), "cannot be read") for body in ('{"data": null}', '{"data": [3]}', "[" * 100_000)),
        (Reply(body="<html>", headers={"Content-Type": "text/html"}), "cannot be read: <html>; check that the server"),
        (Reply(status=405, body="no"), "usually ends in /v1; a server that lists no models needs --llm_judge_model"),
        (Reply(status=401, body="no"), KEY_MISSING),  # for which a name is no remedy
    ],
)
def test_a_server_that_does_not_say_which_model(models, said):
    with judge_server(lambda prompt: "A", models) as server, pytest.raises(ValueError) as refused:
        Judge(JudgeConfig(server.url, None))
    assert str(refused.value).startswith(f"LLM judge {server.url}: ")
    assert said in str(refused.value)
    assert ("--llm_judge_model" in str(refused.value)) == (said != KEY_MISSING)


@pytest.mark.parametrize("package", ["openai", "diskcache"])
def test_a_package_is_missing(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"package {package}; .*/python\S* -m pip install -e '\.\[judge\]'"):
        client_of(DOWN)


# ---- prompts, exams and answers --------------------------------------------------------------------------------------


def test_prompts_have_the_caption_or_the_reference_and_lettered_choices_in_this_order():
    question = Question("Which holds for {it}?", (("Red {x}.", 1.0), ("Not red.", -1.0), ("Not said.", 0.0)))
    request = answer_request("A {red} bird.\nIt sings.", question)
    rules, _, rest = request.prompt.partition("A {red} bird.\nIt sings.")
    assert "exactly one of the choices" in rules
    assert rest.endswith("\nWhich holds for {it}?\nA. Red {x}.\nB. Not red.\nC. Not said.")
    assert (request.parse("b. not red"), request.parse("perhaps")) == (1, None)
    exam = exam_request("A {dark} vessel.")
    assert exam.prompt.endswith("\nA {dark} vessel.")
    assert f"at most {MAX_QUESTIONS}" in exam.prompt
    form = parse_exam(exam.prompt[exam.prompt.index('{"object"') :].splitlines()[0])
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


def exam_with(**changes):
    """The exam whose first question is changed, as JSON of a judge."""
    first = WRITTEN["questions"][0] | changes
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
