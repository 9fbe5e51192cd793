"""What the client makes of a server that is slow, broken, forbidden or down; and that the key is nowhere."""

import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from rl_reward_network.rewards.judge import client as judge_client
from rl_reward_network.rewards.judge import server as judge_server_file
from rl_reward_network.rewards.judge.client import Answer, JudgeClient
from rl_reward_network.rewards.judge.config import JudgeConfig
from tests.rewards.judge.test_client import KEY, SOON, Reply, Server, ask, client_of, judge_server


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
        (Reply(status=503, body='{"error": "slow down"}', headers=SOON), 'HTTP 503: {"error": "slow down"}'),
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
        assert client.counts["retries"] == (reply.status in (500, 503))
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
def test_what_no_later_request_can_mend_ends_the_asking(status: int, remedy: str) -> None:
    with judge_server(lambda prompt: Reply(status=status, body="refused") if prompt != "good" else "A") as server:
        client = client_of(server.url, max_retries=2, max_concurrency=1)
        message = f"LLM judge {server.url}, model 'judge-model': HTTP {status}: refused; {remedy}"
        with pytest.raises(ValueError, match=rf"^{re.escape(message)}$"):
            client.check()
        assert client.failing() is None
        answers = ask(client, "good", "bad", *map(str, range(50)))
        assert answers == [Answer("A", "A")] + [Answer(None, None)] * 51
        assert client.failing() == message
        assert len(server.bodies) == 3  # the rest is not asked


def failing_server(replies: Iterator[bool], down: Reply) -> AbstractContextManager[Server]:
    """A server that answers while `replies` is True."""
    return judge_server(lambda prompt: "A" if next(replies) else down)


def test_half_of_50_calls_may_fail_and_not_one_more(tmp_path: Path) -> None:
    """Failures and replies by turns; then a reply leaves the window, and a failure takes its place."""
    file = tmp_path / "cache.sqlite"
    replies = iter([True, False] * 25 + [False] + [True] * 100)
    with failing_server(replies, Reply(status=500, body="out of memory")) as server:
        client = client_of(server.url, max_concurrency=1, cache_path=file)
        ask(client, *(f"{number}" for number in range(50)))
        assert client.failing() is None, "25 of 50"
        ask(client, *(f"{number}" for number in range(0, 50, 2)))
        assert client.counts["cache_hits"] == 25, "which are no calls"
        assert ask(client, "one more", "unasked", "0") == [Answer(None, None), Answer(None, None), Answer("A", "A")]
        assert len(server.bodies) == 51
        assert client.failing() == (
            f"LLM judge {server.url}, model 'judge-model': 26 of the last 50 calls failed, the latest by HTTP 500: out "
            "of memory; check that the server runs, and its base url, which usually ends in /v1"
        )
        client.check()  # it is back
        assert client.failing() is None
        assert ask(client, "unasked")[0].value == "A"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply("?"), "a reply that cannot be read: ?; take a model that follows instructions"),
        (Reply(status=429, body="later"), "HTTP 429: later; send fewer requests at once, or raise the server's limit"),
        (Reply(""), "a reply without text; check that the server runs, and its base url, which usually ends in /v1"),
        (Reply(body='{"choices": ['), 'a reply that is no chat completion: {"choices": [; check that the server runs'),
    ],
)
def test_the_remedy_is_for_what_failed(reply: Reply, said: str) -> None:
    with judge_server(lambda prompt: reply) as server:
        client = client_of(server.url, max_concurrency=1)
        ask(client, *map(str, range(40)))
        assert len(server.bodies) == client.counts["failures"] == 26, "enough to be more than half of 50"
    assert f"26 of the last 26 calls failed, the latest by {said}" in str(client.failing())


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that accepts every connection and never replies."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"


def test_a_silent_server_is_named_long_before_its_time_is_up(
    silent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judge_client.SILENT_S * 4 / 3 < 30
    monkeypatch.setattr(judge_client, "SILENT_S", 0.15)
    client = client_of(silent, timeout_s=0.6, max_retries=0)
    assert ask(client, "one", "two") == [Answer(None, None)] * 2
    ask(client, "three")
    assert client.last_failure == "no reply within 0.6 s"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: LLM judge {silent}, model 'judge-model': no answer for 0.15 s; check that the")
    assert "0.6 s and 0 retries" in line


def test_a_slow_judge_that_answers_somebody_is_not_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(judge_client, "SILENT_S", 0.15)
    pause = threading.Event()
    with judge_server(lambda prompt: "A" if pause.wait(0.05) else "B") as server:
        ask(client_of(server.url, max_concurrency=1), *map(str, range(6)))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("model", ["judge-model", None])
def test_a_silent_server_is_named_before_the_run_whatever_the_patience(
    silent: str, model: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert judge_server_file.SHORT_TIMEOUT_S < 30
    monkeypatch.setattr(judge_server_file, "SHORT_TIMEOUT_S", 0.1)
    start = time.monotonic()
    with pytest.raises(ValueError, match=rf"LLM judge {silent}.*: no reply within 0\.1 s; check"):
        JudgeClient(JudgeConfig(silent, model, timeout_s=600, max_retries=5)).check()
    assert time.monotonic() - start < 2


def test_the_key_is_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "cache.sqlite"
    replies = iter([Reply("A"), *[Reply(status=code, body="x" * 190 + KEY, headers=SOON) for code in (500, 401)]])
    with judge_server(lambda prompt: next(replies)) as server:
        client = client_of(server.url, cache_path=file, max_concurrency=1)
        ask(client, "one", "two")
        with pytest.raises(ValueError, match=r"HTTP 401: x+\*\*\*;") as refused:
            client.check()
    shown = [
        str(refused.value),
        client.last_failure,
        str(client.failing()),
        repr(client.config),
        repr(client.counts),
        caplog.text,
    ]
    stored = [path.read_bytes() for path in tmp_path.iterdir()]
    assert len(stored) == 4  # the file, its log, its index, and the lock of the folder
    for part in (KEY, KEY[:10]):
        assert not [text for text in shown if part in text]
        assert not [content for content in stored if part.encode() in content]


def test_the_package_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ValueError, match=r"package openai: pip install -e '\.\[judge\]'"):
        client_of("http://127.0.0.1:1/v1")
