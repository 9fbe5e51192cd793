"""The client against a real HTTP server on this machine; `judge_server` is used by the other tests of judges too."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rl_reward_network.rewards.judge.client import Answer, JudgeClient, Request
from rl_reward_network.rewards.judge.config import NO_KEY, JudgeConfig

KEY = "sk-very-secret-0123456789"
SOON = {"retry-after-ms": "1"}  # the client's own pause would take half a second


@dataclass
class Server:
    """What a server saw: its address, each request's body and key, and the most requests under way at once."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    now: int = 0
    most_at_once: int = 0

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.bodies]


@dataclass(frozen=True)
class Reply:
    """What a server sends: words of a chat completion, or anything else as `body`."""

    text: str | None = None
    status: int = 200
    body: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def content(self) -> bytes:
        message = {"role": "assistant", "content": self.text}
        usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
        whole = {"model": "served-model", "choices": [{"index": 0, "message": message}], "usage": usage}
        return (json.dumps(whole) if self.body is None else self.body).encode()


def listing(*names: str) -> Reply:
    """A list of models, as vLLM sends it."""
    return Reply(body=json.dumps({"object": "list", "data": [{"id": name, "object": "model"} for name in names]}))


@contextmanager
def judge_server(answer: Callable[[str], Reply | str], models: Reply | None = None) -> Iterator[Server]:
    """A server whose reply to a prompt is `answer(prompt)`: a string is the text of a good reply.

    Its list of models is `models`, by default of one; asking for it is no request in `Server`.
    """
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # 40 ms for each reply

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                server.bodies.append({**body, "path": self.path})
                server.keys.append(self.headers["Authorization"])
                server.now += 1
                server.most_at_once = max(server.most_at_once, server.now)
            reply = answer(body["messages"][0]["content"])
            with lock:
                server.now -= 1
            self.send(Reply(reply) if isinstance(reply, str) else reply)

        def do_GET(self) -> None:
            good = self.path == "/v1/models"
            self.send((models or listing("judge-model")) if good else Reply(status=404, body="no such path"))

        def send(self, reply: Reply) -> None:
            content = reply.content()
            try:
                self.send_response(reply.status)
                for name, value in ({"Content-Type": "application/json"} | reply.headers).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except (BrokenPipeError, ConnectionResetError):  # the client had waited long enough
                pass

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        server = Server(f"http://127.0.0.1:{listening.server_port}/v1")
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        listening.shutdown()


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


def test_a_good_server() -> None:
    with judge_server(lambda prompt: prompt.upper()) as server:
        client = client_of(server.url)
        assert ask(client, "one", "two", "three") == [Answer(word, word) for word in ("ONE", "TWO", "THREE")]
    counts = {"calls": 3, "cache_hits": 0, "failures": 0, "retries": 0, "prompt_tokens": 30, "completion_tokens": 6}
    assert client.counts == counts
    assert set(server.keys) == {f"Bearer {KEY}"}
    body = next(body for body in server.bodies if body["messages"][0]["content"] == "one")
    assert body == {
        "path": "/v1/chat/completions",
        "model": "judge-model",
        "messages": [{"role": "user", "content": "one"}],
        "max_tokens": 300,
        "temperature": 0.0,
        "top_p": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
    }


def test_a_server_without_keys_is_sent_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    with judge_server(lambda prompt: "A") as server:
        ask(client_of(server.url), "one")
    assert server.keys == [f"Bearer {NO_KEY}"]


def test_proxies_are_ignored_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with judge_server(lambda prompt: "A") as server:
        client_of(server.url).check()
    assert len(server.bodies) == 1


def test_equal_questions_are_asked_once_and_answered_in_order() -> None:
    with judge_server(lambda prompt: prompt.upper()) as server:
        answers = ask(client_of(server.url), "a", "b", "a", "c", "b", "a")
    assert [answer.value for answer in answers] == ["A", "B", "A", "C", "B", "A"]
    assert sorted(server.prompts) == ["a", "b", "c"]


def test_never_more_requests_at_once_than_allowed() -> None:
    def slowly(prompt: str) -> str:
        time.sleep(0.02)
        return prompt

    with judge_server(slowly) as server:
        client = client_of(server.url, max_concurrency=3)
        both = [threading.Thread(target=ask, args=(client, *(f"{k}{n}" for n in range(12)))) for k in "ab"]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
    assert len(server.bodies) == 24
    assert server.most_at_once == 3


def test_what_is_in_the_cache_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cache.sqlite"
    with judge_server(lambda prompt: prompt.upper()) as server:
        ask(client_of(server.url, cache_path=file), "one", "two")
        again = client_of(server.url, cache_path=file)
        assert [answer.value for answer in ask(again, "two", "one", "three")] == ["TWO", "ONE", "THREE"]
        assert len(server.bodies) == 3
        assert again.counts == {
            "calls": 1,
            "cache_hits": 2,
            "failures": 0,
            "retries": 0,
            "prompt_tokens": 10,
            "completion_tokens": 2,
        }
        other = JudgeClient(JudgeConfig(server.url, "another-model", cache_path=file))
        ask(other, "one")
        list(other.ask([Request("one", echo, max_tokens=20)]))
        with monkeypatch.context() as changed:
            changed.setattr("rl_reward_network.rewards.judge.client.PROMPT_VERSION", -1)
            ask(again, "one")
    assert len(server.bodies) == 6  # another model, length or wording: other questions
    with judge_server(lambda prompt: prompt * 2) as elsewhere:
        assert ask(client_of(elsewhere.url, cache_path=file), "one")[0].value == "oneone", (
            "another server, another judge"
        )
    assert ask(client_of(server.url, cache_path=file), "one")[0].value == "ONE"


def test_a_good_check_costs_one_request_and_is_not_kept(tmp_path: Path) -> None:
    with judge_server(lambda prompt: "A") as server:
        for _ in range(2):
            client = client_of(server.url, cache_path=tmp_path / "cache.sqlite")
            client.check()
            assert client.counts["calls"] == 1
    assert len(server.bodies) == 2


def test_half_characters_are_sent_and_kept_as_question_marks(tmp_path: Path) -> None:
    body = Reply("x").content().decode().replace('"x"', r'"half \ud83d"')
    with judge_server(lambda prompt: Reply(body=body)) as server:
        client = client_of(server.url, cache_path=tmp_path / "cache.sqlite")
        assert ask(client, "\ud83d and 😀") == [Answer("half ?", "half ?")]
    assert server.prompts == ["? and 😀"]


def test_thoughts_are_cut_off_before_reading_and_kept_in_the_reply() -> None:
    with judge_server(lambda prompt: "<think>A or B?</think>\nB") as server:
        client = client_of(server.url)
        assert ask(client, "one", "one") == [Answer("<think>A or B?</think>\nB", "\nB")] * 2
