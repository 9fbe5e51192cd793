"""The client of an LLM judge against a real HTTP server: good, slow, broken, forbidden, down; and its cache."""

import logging
import re
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diskcache
import pytest

from rl_reward_network.rewards import judge_client
from rl_reward_network.rewards.judge_client import NO_KEY, Answer, JudgeClient, JudgeConfig, Request, api_key
from tests.rewards.judge_server import KEY, SOON, Reply, judge_server, listing

DOWN = "http://127.0.0.1:1/v1"
NONE = Answer(None, None)
GENERAL = "check that the server runs, and its base url (--llm_judge_base_url), which usually ends in /v1"


def client_of(url: str, **options: Any) -> JudgeClient:
    return JudgeClient(JudgeConfig(url, "judge-model", **({"max_retries": 0} | options)))


def echo(text: str) -> str | None:
    """A parser that reads everything but "?"."""
    return None if text == "?" else text


def ask(client: JudgeClient, *prompts: str) -> list[Answer]:
    return list(client.ask([Request(prompt, echo) for prompt in prompts]))


@pytest.fixture(autouse=True)
def key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that accepts every connection and never replies."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"


SECRET = "put the key in the environment"
KEY_MISSING = "set the key in the environment variable OPENAI_API_KEY"


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


def test_the_key_comes_from_the_environment(monkeypatch):
    for value, key in ((" sk-secret\n", "sk-secret"), ("", NO_KEY)):
        monkeypatch.setenv("MY_KEY", value)
        assert api_key("MY_KEY") == key
    for bad in ("sk-sécret", "sk-secret\nsecond line"):
        monkeypatch.setenv("MY_KEY", bad)
        with pytest.raises(ValueError, match="MY_KEY has characters") as refused:
            api_key("MY_KEY")
        assert "cret" not in str(refused.value)


def test_a_good_server_is_asked_with_the_key_past_any_proxy(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with judge_server(lambda prompt: prompt.upper()) as server:
        client = client_of(server.url)
        answers = ask(client, "one", "two", "one", "three", "two")
        assert answers == [Answer(word, word) for word in ("ONE", "TWO", "ONE", "THREE", "TWO")]
        monkeypatch.delenv("OPENAI_API_KEY")
        ask(client_of(server.url), "four")
    assert sorted(server.prompts) == ["four", "one", "three", "two"], "equal questions are sent once"
    counts = {"calls": 3, "cache_hits": 0, "failures": 0, "retries": 0, "prompt_tokens": 30, "completion_tokens": 6}
    assert client.counts == counts
    client.note(imputed=2)
    client.note(imputed=1)
    assert client.counts == counts | {"imputed": 3}
    assert server.keys == [f"Bearer {KEY}"] * 3 + [f"Bearer {NO_KEY}"]
    assert next(body for body in server.bodies if body["messages"][0]["content"] == "one") == {
        "path": "/v1/chat/completions",
        "model": "judge-model",
        "messages": [{"role": "user", "content": "one"}],
        "max_tokens": 300,
        "temperature": 0.0,
        "top_p": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
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


def test_reasoning_is_cut_off_half_characters_become_question_marks_and_usage_may_be_missing():
    body = Reply("x").content().decode().replace('"x"', r'"<think>A or B?</think>half \ud83d"')
    with judge_server(lambda prompt: Reply(body=body)) as server:
        assert ask(client_of(server.url), "\ud83d and 😀") == [Answer("<think>A or B?</think>half ?", "half ?")]
    assert server.prompts == ["? and 😀"]
    body = '{"choices": [{"message": {"content": "A"}}], "usage": null}'
    replies = iter([Reply(status=503, body="busy", headers=SOON)] * 2 + [Reply(body=body)])
    with judge_server(lambda prompt: next(replies)) as server:
        client = client_of(server.url, max_retries=2)
        assert ask(client, "one") == [Answer("A", "A")], "a busy server is asked again"
    assert [client.counts[name] for name in ("calls", "failures", "retries", "prompt_tokens")] == [1, 0, 2, 0]


# ---- cache ----------------------------------------------------------------------------------------------------------


def test_cached_replies_are_not_asked_again(tmp_path):
    cache = tmp_path / "new" / "folder"
    with judge_server(lambda prompt: prompt.upper()) as server:
        ask(client_of(server.url, cache_path=cache), "one", "two")
        again = client_of(server.url, cache_path=cache)
        assert [answer.value for answer in ask(again, "two", "one", "three")] == ["TWO", "ONE", "THREE"]
        assert (again.counts["calls"], again.counts["cache_hits"], again.counts["prompt_tokens"]) == (1, 2, 10)
        assert len(server.bodies) == 3
        other = JudgeClient(JudgeConfig(server.url, "another-model", cache_path=cache))
        ask(other, "one")
        list(other.ask([Request("one", echo, max_tokens=20)]))
        assert len(server.bodies) == 5, "another model or length is another question"
        other.check()
        other.check()
        assert len(server.bodies) == 7, "a check is not cached"
    with judge_server(lambda prompt: prompt * 2) as elsewhere:
        assert ask(client_of(elsewhere.url, cache_path=cache), "one")[0].value == "oneone", "another server"
    stored = diskcache.Cache(cache, disk=diskcache.JSONDisk)
    assert all(stored[key].keys() == {"reply", "model", "time"} for key in stored)


def test_threads_and_processes_share_a_cache(tmp_path):
    code = "import sys; from tests.rewards.test_judge_client import *; client = client_of(sys.argv[1], cache_path=Path("
    code += "sys.argv[2])); ask(client, *map(str, range(30)))"
    with judge_server(lambda prompt: prompt + "!") as server:
        words = [sys.executable, "-c", code, server.url, str(tmp_path / "cache")]
        others = [subprocess.Popen(words, cwd=Path(__file__).parents[2]) for _ in range(3)]
        assert [other.wait(timeout=120) for other in others] == [0, 0, 0]
        client = client_of(server.url, cache_path=tmp_path / "cache")
        assert [answer.value for answer in ask(client, *map(str, range(30)))] == [f"{n}!" for n in range(30)]
        assert client.counts["cache_hits"] == 30


def test_neither_errors_nor_unreadable_replies_are_cached(tmp_path):
    replies = iter([Reply(status=500, body="{}"), Reply("?"), Reply("good")])
    with judge_server(lambda prompt: next(replies)) as server:
        client = client_of(server.url, cache_path=tmp_path)
        answers = [ask(client, "one")[0] for _ in range(4)]
    assert answers == [NONE, Answer("?", None), Answer("good", "good"), Answer("good", "good")]
    assert (client.counts["failures"], client.counts["cache_hits"]) == (2, 1)


@pytest.mark.parametrize(("mode", "value"), [(4, b"cos\nabort\n(tR."), (1, b"\x00"), (1, zlib.compress(b"[1, 2]"))])
def test_a_pickled_or_damaged_value_in_the_cache_is_never_loaded(tmp_path, mode, value):
    with judge_server(lambda prompt: "A") as server:
        ask(client_of(server.url, cache_path=tmp_path), "one")
        with sqlite3.connect(tmp_path / "cache.db") as base:
            base.execute("UPDATE Cache SET mode = ?, value = ?", (mode, value))
        assert ask(client_of(server.url, cache_path=tmp_path), "one") == [Answer("A", "A")]
    assert len(server.bodies) == 2


def test_places_that_cannot_be_a_cache(tmp_path):
    old = tmp_path / "llm_judge.sqlite"
    old.write_text("the replies of an earlier version")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "cache.db").write_text("not a database, which nobody may overwrite" * 100)
    for place, message in (
        (old, r"\.sqlite: is a file"),
        (old / "x", "name a folder in which you may write"),
        (damaged, "not a database"),
    ):
        with pytest.raises(ValueError, match=message):
            client_of(DOWN, cache_path=place)


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(status=503, body='{"error": "slow down"}', headers=SOON), 'HTTP 503: {"error": "slow down"}'),
        (Reply(status=500, body="<h1>oops</h1>", headers=SOON), "HTTP 500: <h1>oops</h1>"),
        (Reply(status=400, body="too   long\n"), "HTTP 400: too long"),
        (Reply(status=307, headers={"Location": "/elsewhere"}, body=""), "HTTP 307: (empty)"),
        (Reply(body="<html>welcome</html>", headers={"Content-Type": "text/html"}), "no chat completion: <html>welc"),
        *((Reply(body=body), "no chat completion") for body in ("{garbage", '{"choices": []}', '["choices"]', "null")),
        *((Reply(body=body), "no chat completion") for body in ('{"choices": [{}]}', "[" * 100_000)),
        (Reply(body=""), "no chat completion: (empty)"),
        (Reply(text=None), "a reply without text"),
        (Reply(text="  \n"), "a reply without text"),
        (Reply(body='{"choices": [{"message": {"content": ["A"]}}]}'), "a reply without text"),
    ],
)
def test_a_broken_reply_is_no_answer(reply, reason):
    with judge_server(lambda prompt: reply if prompt == "bad" else "A") as server:
        client = client_of(server.url, max_retries=1)
        assert ask(client, "good", "bad") == [Answer("A", "A"), NONE]
        assert (client.counts["failures"], client.counts["retries"]) == (1, int(reply.status in (500, 503)))
    with judge_server(lambda prompt: reply) as server, pytest.raises(ValueError, match=re.escape(reason)) as refused:
        client_of(server.url).check()
    assert str(refused.value).startswith(f"LLM judge {server.url}, model 'judge-model': ")
    assert str(refused.value).endswith(GENERAL)


def test_a_slow_server_is_not_waited_for_and_one_that_is_down_is_named():
    end = threading.Event()
    with judge_server(lambda prompt: "A" if prompt == "good" or end.wait(10) else "B") as server:
        client = client_of(server.url, timeout_s=0.2)
        start = time.monotonic()
        assert ask(client, "slow", "good") == [NONE, Answer("A", "A")]
        assert time.monotonic() - start < 3
        assert client.last_failure == "no reply within 0.2 s"
        end.set()
    client = client_of(DOWN)
    assert ask(client, "one") == [NONE]
    with pytest.raises(ValueError, match=rf"LLM judge {DOWN}, model 'judge-model': no connection \(.*\); check that"):
        client.check()


def test_a_silent_server_is_named_long_before_its_time_is_up(silent, monkeypatch, capsys):
    monkeypatch.setattr(judge_client, "SILENT_S", 0.15)
    client = client_of(silent, timeout_s=0.6)
    assert ask(client, "one", "two") == [NONE] * 2
    ask(client, "three")
    assert client.last_failure == "no reply within 0.6 s"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: LLM judge {silent}, model 'judge-model': no answer for 0.15 s; check that the")
    assert "0.6 s and 0 retries" in line
    monkeypatch.setattr(judge_client, "SHORT_TIMEOUT_S", 0.1)
    start = time.monotonic()
    for model in ("judge-model", None):
        with pytest.raises(ValueError, match=rf"LLM judge {silent}.*: no reply within 0\.1 s; check"):
            JudgeClient(JudgeConfig(silent, model, timeout_s=600, max_retries=5)).check()
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (401, "set the key in the environment variable OPENAI_API_KEY"),
        (403, "set a key that may use this model in the environment variable OPENAI_API_KEY"),
        (404, "the model must be the name that the server gives it, and the base url usually ends in /v1"),
    ],
)
def test_a_permanent_refusal_ends_the_asking(status, remedy):
    with judge_server(lambda prompt: Reply(status=status, body="refused") if prompt != "good" else "A") as server:
        client = client_of(server.url, max_retries=2, max_concurrency=1)
        message = f"LLM judge {server.url}, model 'judge-model': HTTP {status}: refused; {remedy}"
        with pytest.raises(ValueError, match=rf"^{re.escape(message)}$"):
            client.check()
        assert client.failing() is None
        assert ask(client, "good", "bad", *map(str, range(50))) == [Answer("A", "A")] + [NONE] * 51
        assert client.failing() == message
        assert len(server.bodies) == 3  # the rest is not asked


def test_half_of_50_calls_may_fail_and_not_one_more(tmp_path):
    """Failures and replies by turns; then a reply leaves the window, and a failure takes its place."""
    replies = iter([True, False] * 25 + [False] + [True] * 100)
    down = Reply(status=500, body="out of memory")
    with judge_server(lambda prompt: "A" if next(replies) else down) as server:
        client = client_of(server.url, max_concurrency=1, cache_path=tmp_path)
        ask(client, *map(str, range(50)))
        assert client.failing() is None, "25 of 50"
        ask(client, *map(str, range(0, 50, 2)))
        assert client.counts["cache_hits"] == 25, "which are no calls"
        assert ask(client, "one more", "unasked", "0") == [NONE, NONE, Answer("A", "A")]
        assert len(server.bodies) == 51
        assert client.failing() == (
            f"LLM judge {server.url}, model 'judge-model': 26 of the last 50 calls failed, the latest by HTTP 500: out "
            f"of memory; {GENERAL}"
        )
        client.check()  # it is back
        assert client.failing() is None
        assert ask(client, "unasked")[0].value == "A"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply("?"), "a reply that cannot be read: ?; take a model that follows instructions"),
        (Reply(status=429, body="later"), "HTTP 429: later; send fewer requests at once, or raise the server's limit"),
        (Reply(""), f"a reply without text; {GENERAL}"),
    ],
)
def test_the_remedy_is_for_the_last_failure(reply, said):
    with judge_server(lambda prompt: reply) as server:
        client = client_of(server.url, max_concurrency=1)
        ask(client, *map(str, range(40)))
        assert len(server.bodies) == client.counts["failures"] == 26, "enough to be more than half of 50"
    assert f"26 of the last 26 calls failed, the latest by {said}" in str(client.failing())


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


# ---- the model, and packages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "models", "used"),
    [(None, listing("the-only-one"), "the-only-one"), ("mine", Reply(status=500, body="no list"), "mine")],
)
def test_a_judge_without_a_name_is_the_only_one_of_the_server(model, models, used):
    with judge_server(lambda prompt: "A", models) as server:
        client = JudgeClient(JudgeConfig(server.url, model))
        assert client.config.model == used
        client.check()
    assert [body["model"] for body in server.bodies] == [used]


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (listing(), ": lists 0 models; name one by --llm_judge_model"),
        (listing("a/b", "c"), ": lists 2 models (a/b, c); name one by --llm_judge_model"),
        *((Reply(body=body), ": a list of models that cannot be read") for body in ('{"data": [{"id', "[]", "null")),
        *((Reply(body=body), "cannot be read") for body in ('{"data": null}', '{"data": [3]}', "[" * 100_000)),
        (Reply(body="<html>", headers={"Content-Type": "text/html"}), "cannot be read: <html>; check that the server"),
        (Reply(status=404, body="no"), ": HTTP 404: no; the model must be the name that the server gives it, and the"),
        (Reply(status=405, body="no"), "usually ends in /v1; a server that lists no models needs --llm_judge_model"),
        (Reply(status=401, body="no"), KEY_MISSING),  # for which a name is no remedy
    ],
)
def test_a_server_that_does_not_say_which_model(models, said):
    with judge_server(lambda prompt: "A", models) as server, pytest.raises(ValueError) as refused:
        JudgeClient(JudgeConfig(server.url, None))
    assert str(refused.value).startswith(f"LLM judge {server.url}: ")
    assert said in str(refused.value)
    assert ("--llm_judge_model" in str(refused.value)) == (said != KEY_MISSING)


@pytest.mark.parametrize("package", ["openai", "diskcache"])
def test_a_package_is_missing(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"package {package}; .*/python\S* -m pip install -e '\.\[judge\]'"):
        client_of(DOWN)
