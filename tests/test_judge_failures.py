"""What the client makes of a server that is slow, broken, forbidden or down; and that the key is nowhere."""

import logging
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from test_judge_client import KEY, SOON, Reply, ask, client_of, judge_server

from rl_reward_network.rewards.judge_client import Answer


@pytest.fixture(autouse=True)
def key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def test_neither_errors_nor_unreadable_replies_are_kept(tmp_path: Path) -> None:
    replies = iter([Reply(status=500, body="{}"), Reply("?"), Reply("good")])
    with judge_server(lambda prompt: next(replies)) as server:
        client = client_of(server.url, cache_path=tmp_path / "cache.sqlite")
        answers = [ask(client, "one")[0] for _ in range(4)]
    assert answers == [Answer(None, None), Answer("?", None), Answer("good", "good"), Answer("good", "good")]
    assert client.counts["failures"] == 2
    assert client.counts["cache_hits"] == 1


def test_503_twice_and_then_good() -> None:
    replies = iter([Reply(status=503, body="busy", headers=SOON)] * 2 + [Reply("A")])
    with judge_server(lambda prompt: next(replies)) as server:
        client = client_of(server.url, max_retries=2)
        assert ask(client, "one") == [Answer("A", "A")]
    assert {name: client.counts[name] for name in ("calls", "failures", "retries")} == {
        "calls": 1,
        "failures": 0,
        "retries": 2,
    }


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(status=429, body='{"error": "slow down"}', headers=SOON), 'HTTP 429: {"error": "slow down"}'),
        (Reply(status=500, body="<h1>oops</h1>", headers=SOON), "HTTP 500: <h1>oops</h1>"),
        (Reply(status=400, body="too   long\n"), "HTTP 400: too long"),
        (Reply(status=307, headers={"Location": "/elsewhere"}, body=""), r"HTTP 307: \(empty\)"),
        (Reply(body="<html>welcome</html>", headers={"Content-Type": "text/html"}), "no chat completion: <html>welc"),
        (Reply(body="{garbage"), "no chat completion: {garbage"),
        (Reply(body='{"choices": []}'), "no chat completion"),
        (Reply(body='["choices"]'), "no chat completion"),
        (Reply(body=""), r"no chat completion: \(empty\)"),
        (Reply(text=None), "a reply without text"),
        (Reply(text="  \n"), "a reply without text"),
    ],
)
def test_what_a_broken_server_sends_is_no_answer(reply: Reply, reason: str) -> None:
    with judge_server(lambda prompt: reply if prompt == "bad" else "A") as server:
        client = client_of(server.url, max_retries=1)
        assert ask(client, "good", "bad") == [Answer("A", "A"), Answer(None, None)]
        assert client.counts["failures"] == 1
        assert client.counts["retries"] == (reply.status in (429, 500))
    with judge_server(lambda prompt: reply) as server, pytest.raises(ValueError, match=reason) as refused:
        client_of(server.url).check()
    assert str(refused.value).startswith(f"LLM judge {server.url}, model 'judge-model': ")
    assert str(refused.value).endswith("check that the server runs, and its base url, which usually ends in /v1")


def test_a_slow_server_is_not_waited_for() -> None:
    end = threading.Event()
    with judge_server(lambda prompt: "A" if prompt == "good" or end.wait(10) else "B") as server:
        client = client_of(server.url, timeout_s=0.2)
        start = time.monotonic()
        assert ask(client, "slow", "good") == [Answer(None, None), Answer("A", "A")]
        assert time.monotonic() - start < 3
        assert client.last_failure == "no reply within 0.2 s"
        end.set()


def test_a_server_that_is_down() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    client = client_of(f"http://127.0.0.1:{port}/v1")
    assert ask(client, "one") == [Answer(None, None)]
    message = rf"LLM judge http://127.0.0.1:{port}/v1, model 'judge-model': no connection \(.*refused\); check that"
    with pytest.raises(ValueError, match=message):
        client.check()


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (401, "set the key in the environment variable OPENAI_API_KEY"),
        (403, "set a key that may use this model in the environment variable OPENAI_API_KEY"),
        (404, "the model must be the name that the server gives it, and the base url usually ends in /v1"),
    ],
)
def test_what_no_later_request_can_mend_stops_the_run(status: int, remedy: str) -> None:
    with judge_server(lambda prompt: Reply(status=status, body="refused") if prompt != "good" else "A") as server:
        client = client_of(server.url, max_retries=2, max_concurrency=1)
        message = rf"LLM judge {server.url}, model 'judge-model': HTTP {status}: refused; {remedy}$"
        with pytest.raises(ValueError, match=message):
            client.check()
        with pytest.raises(ValueError, match=message):
            ask(client, "good", "bad", *map(str, range(50)))
        client._pool.shutdown(wait=True)
        assert len(server.bodies) < 10  # the rest is not asked


def test_a_judge_that_dies_mid_run_stops_it(tmp_path: Path) -> None:
    dead = threading.Event()
    with judge_server(lambda prompt: Reply(status=500, body="out of memory") if dead.is_set() else "A") as server:
        file = tmp_path / "cache.sqlite"
        client = client_of(server.url, max_concurrency=1, max_consecutive_failures=3, cache_path=file)
        assert ask(client, "kept")[0].value == "A"
        dead.set()
        assert ask(client, "1", "2") == [Answer(None, None)] * 2
        dead.clear()
        ask(client, "3")  # one success, and the count begins anew
        dead.set()
        assert ask(client, "4", "5", "6") == [Answer(None, None)] * 3
        asked = len(server.bodies)
        message = (
            rf"the last 3 requests failed, the latest by HTTP 500: out of memory; replies so far are kept in {file}"
        )
        with pytest.raises(ValueError, match=message):
            ask(client, "7")
        assert len(server.bodies) == asked
        assert ask(client, "kept")[0].value == "A"
        dead.clear()
        client.check()  # it is back
        assert ask(client, "7")[0].value == "A"


def test_the_key_is_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "cache.sqlite"
    replies = iter([Reply("A"), *[Reply(status=code, body="x" * 190 + KEY, headers=SOON) for code in (500, 401)]])
    with judge_server(lambda prompt: next(replies)) as server:
        client = client_of(server.url, cache_path=file, max_concurrency=1)
        ask(client, "one", "two")
        with pytest.raises(ValueError, match=r"HTTP 401: x+\*\*\*;") as refused:
            client.check()
    shown = [str(refused.value), client.last_failure, repr(client.config), repr(client.counts), caplog.text]
    stored = [path.read_bytes() for path in tmp_path.iterdir()]
    assert len(stored) == 3  # the file, its log, its index
    for part in (KEY, KEY[:10]):
        assert not [text for text in shown if part in text]
        assert not [content for content in stored if part.encode() in content]


def test_the_package_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ValueError, match=r"the LLM judge needs the package openai: pip install -e '\.\[judge\]'"):
        client_of("http://127.0.0.1:1/v1")
