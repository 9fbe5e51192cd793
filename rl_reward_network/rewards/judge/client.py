"""Client of an LLM judge: concurrent requests with a cache of replies.

Each request is one user message at temperature 0. A failed request has no answer, which is not a score of 0, and is
counted. When more than half of the last 50 calls failed, or the server rejects a call permanently, the client stops
sending, and `failing` returns the reason. A warning is printed when the server has not answered for 15 to 20 s.
"""

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from rl_reward_network.rewards.judge.answers import PROMPT_VERSION
from rl_reward_network.rewards.judge.cache import ReplyCache, cache_key
from rl_reward_network.rewards.judge.config import JudgeConfig
from rl_reward_network.rewards.judge.server import (
    FINAL,
    TIMED_OUT,
    UNREADABLE,
    Completion,
    JudgeServer,
    NoReply,
    sendable,
)

SAMPLING = {"temperature": 0.0, "top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
COUNTED = ("calls", "cache_hits", "failures", "retries", "prompt_tokens", "completion_tokens")
WINDOW = 50  # latest calls; when more than half of them failed, the client stops sending
SILENT_S = 15.0  # without any answer before the warning


@dataclass(frozen=True)
class Request:
    """A question to the judge.

    Attributes:
        prompt: the user message.
        parse: parses the reply without its reasoning part; returns None for an unreadable reply.
        max_tokens: maximum length of the reply.
    """

    prompt: str
    parse: Callable[[str], Any]
    max_tokens: int = 300


@dataclass(frozen=True)
class Answer:
    """The result of a request: `reply` is None without a reply, `value` is None if `parse` could not read it."""

    reply: str | None
    value: Any


class JudgeClient:
    """A thread-safe client of an LLM judge.

    Attributes:
        config: the configuration; a missing model is replaced by the only model of the server.
        last_failure: reason of the latest failed call; empty without one.

    Raises:
        ValueError: the package openai is missing, the key cannot be sent, the cache cannot be used, or no model is
            given and the server does not list exactly one.
    """

    def __init__(self, config: JudgeConfig) -> None:
        if config.model is None:
            config = replace(config, model=JudgeServer(config).with_short_timeout().only_model())
        self.config = config
        self.last_failure = ""
        self._server = JudgeServer(config, lambda: self._count(attempts=1))
        self._cache = ReplyCache(config.cache_path)
        self._pool = ThreadPoolExecutor(config.max_concurrency, thread_name_prefix="judge")
        self._lock = threading.Lock()
        self._counter: Counter[str] = Counter()
        self._failed: deque[bool] = deque(maxlen=WINDOW)  # of the latest calls
        self._stopped: str | None = None
        self._last_answer, self._warned = 0.0, False  # time of the latest answer; whether its absence was reported

    @property
    def counts(self) -> dict[str, int]:
        """Calls (without retries), cache hits, failures, retries, and tokens used, by name."""
        with self._lock:
            counted = {**self._counter, "retries": self._counter["attempts"] - self._counter["calls"]}
        return {name: max(0, counted.get(name, 0)) for name in COUNTED}

    def failing(self) -> str | None:
        """Server, share of failures, last reason and remedy once the client has stopped sending; None before.

        The client stops sending when 26 of the last 50 calls failed or the server answered 401, 403 or 404, until
        `check` succeeds. Replies from the cache do not count as calls.
        """
        return self._stopped

    def check(self) -> None:
        """Send one short request without the cache, to find a wrong address, key or model before the run.

        There are no retries, and the timeout is at most 20 s.

        Raises:
            ValueError: no reply; the message has the base url, the reason and the remedy.
        """
        try:
            self._completion(
                Request("Reply with the letter A and nothing else.", str), self._server.with_short_timeout()
            )
        except NoReply as error:
            raise ValueError(self._server.message(str(error), error.status)) from None
        with self._lock:
            self._failed.clear()
            self._stopped = None

    def ask(self, requests: Sequence[Request]) -> Iterator[Answer]:
        """Yield the answers in the order of the requests, which are sent concurrently; equal ones are sent once.

        Raises:
            ValueError: the cache cannot be used.
        """
        self._last_answer = time.monotonic()
        keys = [self._cache_key(request) for request in requests]
        unique = dict(zip(keys, requests, strict=True))
        pending = {key: self._pool.submit(self._answer, key, request) for key, request in unique.items()}
        try:
            for key in keys:
                yield self._wait_for(pending[key])
        finally:
            for future in pending.values():
                future.cancel()

    def _wait_for(self, future: Future[Answer]) -> Answer:
        """Wait for the answer; warn once if the server has not answered any request for long."""
        while not self._warned:
            try:
                return future.result(SILENT_S / 3)
            except TimeoutError:
                if time.monotonic() - self._last_answer > SILENT_S:
                    self._warned = True
                    message = self._server.message(f"no answer for {SILENT_S:g} s", TIMED_OUT)
                    patience = f"{self.config.timeout_s:g} s and {self.config.max_retries} retries"
                    tqdm.write(f"warning: {message}; a request fails after {patience}", file=sys.stderr)
        return future.result()

    def _answer(self, key: str, request: Request) -> Answer:
        """The answer from the cache or the server; none once the client has stopped sending."""
        cached = self._cache.get(key)
        if cached is not None and (value := request.parse(_without_reasoning(cached))) is not None:
            self._count(cache_hits=1)
            return Answer(cached, value)
        if self._stopped is not None:
            return Answer(None, None)
        try:
            completion = self._completion(request, self._server)
        except NoReply as error:
            self._finish_call(str(error), error.status)
            return Answer(None, None)
        finally:
            self._last_answer = time.monotonic()
        return self._read(key, request, completion)

    def _read(self, key: str, request: Request, completion: Completion) -> Answer:
        """Parse a reply and cache it; an unreadable reply is a failure and is not cached."""
        reply = completion.text or ""
        value = request.parse(_without_reasoning(reply))
        if value is None:
            self._finish_call(f"a reply that cannot be read: {self._server.excerpt(reply)}", UNREADABLE)
            return Answer(reply, None)
        self._finish_call()
        self._cache.put(key, reply, value, completion.model)
        return Answer(reply, value)

    def _completion(self, request: Request, server: JudgeServer) -> Completion:
        """One request to the server."""
        self._count(calls=1)
        completion = server.complete(self._body(request))
        self._count(prompt_tokens=completion.prompt_tokens, completion_tokens=completion.completion_tokens)
        if completion.text is None:
            raise NoReply("a reply without text")
        return completion

    def _body(self, request: Request) -> dict[str, Any]:
        message = {"role": "user", "content": sendable(request.prompt)}
        return {"model": self.config.model, "messages": [message], "max_tokens": request.max_tokens, **SAMPLING}

    def _cache_key(self, request: Request) -> str:
        about = {"api": "chat.completions", "server": self.config.base_url, "prompts": PROMPT_VERSION}
        return cache_key({**about, **self._body(request)})

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counter.update(more)

    def _finish_call(self, reason: str | None = None, status: int = 0) -> None:
        """Count a finished call; with a reason it failed, which may stop the client."""
        with self._lock:
            self._failed.append(reason is not None)
            if reason is None:
                return
            self._counter["failures"] += 1
            self.last_failure = reason
            failed = sum(self._failed)
            if self._stopped is None and status in FINAL:
                self._stopped = self._server.message(reason, status)
            elif self._stopped is None and 2 * failed > WINDOW:
                share = f"{failed} of the last {len(self._failed)} calls failed, the latest by {reason}"
                self._stopped = self._server.message(share, status)


def _without_reasoning(reply: str) -> str:
    """A reply without the reasoning that some models put before it."""
    return reply.rpartition("</think>")[2]
