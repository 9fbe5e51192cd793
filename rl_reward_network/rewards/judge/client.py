"""Asks a judge many questions at once, each paid for once; what cannot be had is never a score.

Each question is one user message at temperature 0. A question that fails has no answer and is counted; when more than
half of the last 50 calls failed, or the server refuses for good, the judge is lost: nothing more is sent, and `failing`
says why. A server that lets everybody wait is named on the screen after 15 to 20 s, whatever its timeout.
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
WINDOW = 50  # calls: when more than half of them failed, the judge is lost
SILENT_S = 15.0  # without an answer to any request, before the server is named


@dataclass(frozen=True)
class Request:
    """One question to the judge.

    Attributes:
        prompt: the whole user message.
        parse: reads the reply, thoughts cut off; None where it makes no sense.
        max_tokens: longest reply.
    """

    prompt: str
    parse: Callable[[str], Any]
    max_tokens: int = 300


@dataclass(frozen=True)
class Answer:
    """What came of a request: `reply` is None where none came, `value` is None where `parse` could not read it."""

    reply: str | None
    value: Any


class JudgeClient:
    """A judge that answers requests; may be used from several threads.

    Attributes:
        config: with the server's only model, where none was named.
        last_failure: why the latest failed call failed; empty where none did.

    Raises:
        ValueError: the package openai is missing, the key cannot be sent, the cache cannot be used, or no model is
            named and the server does not list exactly one.
    """

    def __init__(self, config: JudgeConfig) -> None:
        if config.model is None:
            config = replace(config, model=JudgeServer(config).in_haste().only_model())
        self.config = config
        self.last_failure = ""
        self._server = JudgeServer(config, lambda: self._count(attempts=1))
        self._cache = ReplyCache(config.cache_path)
        self._pool = ThreadPoolExecutor(config.max_concurrency, thread_name_prefix="judge")
        self._lock = threading.Lock()
        self._counter: Counter[str] = Counter()
        self._failed: deque[bool] = deque(maxlen=WINDOW)  # of the latest calls
        self._lost: str | None = None
        self._heard, self._named = 0.0, False  # when an answer last came; whether the silence was spoken of

    @property
    def counts(self) -> dict[str, int]:
        """Requests sent (without retries), served from the cache, failed, sent again; tokens paid for."""
        with self._lock:
            counted = {**self._counter, "retries": self._counter["attempts"] - self._counter["calls"]}
        return {name: max(0, counted.get(name, 0)) for name in COUNTED}

    def failing(self) -> str | None:
        """Why the judge is lost: the server, the share of failures, the last reason, the remedy; None while it is not.

        It is lost when 26 of the last 50 calls failed, or when the server refused one for good (401, 403, 404), and
        stays so until `check` succeeds. Replies from the cache are no calls.
        """
        return self._lost

    def check(self) -> None:
        """Ask one tiny question, past the cache, so that a wrong address, key or model is known before the run.

        It is asked once and waited for at most 20 s.

        Raises:
            ValueError: no reply; the message has the base url, the reason and the remedy.
        """
        try:
            self._completion(Request("Reply with the letter A and nothing else.", str), self._server.in_haste())
        except NoReply as error:
            raise ValueError(self._server.explained(str(error), error.status)) from None
        with self._lock:
            self._failed.clear()
            self._lost = None

    def ask(self, requests: Sequence[Request]) -> Iterator[Answer]:
        """The answers in the order of the requests, equal ones asked once; the next may be under way already.

        Raises:
            ValueError: the cache cannot be used.
        """
        self._heard = time.monotonic()
        keys = [self._cache_key(request) for request in requests]
        unique = dict(zip(keys, requests, strict=True))
        pending = {key: self._pool.submit(self._answer, key, request) for key, request in unique.items()}
        try:
            for key in keys:
                yield self._awaited(pending[key])
        finally:
            for future in pending.values():
                future.cancel()

    def _awaited(self, future: Future[Answer]) -> Answer:
        """The answer, once it is there; a server that gives none to anybody is named, once."""
        while not self._named:
            try:
                return future.result(SILENT_S / 3)
            except TimeoutError:
                if time.monotonic() - self._heard > SILENT_S:
                    self._name_the_silent()
        return future.result()

    def _name_the_silent(self) -> None:
        self._named = True
        message = self._server.explained(f"no answer for {SILENT_S:g} s", TIMED_OUT)
        patience = f"{self.config.timeout_s:g} s and {self.config.max_retries} retries"
        tqdm.write(f"warning: {message}; a request that has used up {patience} has failed", file=sys.stderr)

    def _answer(self, key: str, request: Request) -> Answer:
        """From the cache or the server, which is not asked any more once it is lost."""
        kept = self._cache.get(key)
        if kept is not None and (value := request.parse(_spoken(kept))) is not None:
            self._count(cache_hits=1)
            return Answer(kept, value)
        if self._lost is not None:
            return Answer(None, None)
        try:
            completion = self._completion(request, self._server)
        except NoReply as error:
            self._over(str(error), error.status)
            return Answer(None, None)
        finally:
            self._heard = time.monotonic()
        return self._read(key, request, completion)

    def _read(self, key: str, request: Request, completion: Completion) -> Answer:
        """What a reply says, and only what can be read is kept; what cannot is a failure."""
        reply = completion.text or ""
        value = request.parse(_spoken(reply))
        if value is None:
            self._over(f"a reply that cannot be read: {self._server.shown(reply)}", UNREADABLE)
            return Answer(reply, None)
        self._over()
        self._cache.put(key, reply, value, completion.model)
        return Answer(reply, value)

    def _completion(self, request: Request, server: JudgeServer) -> Completion:
        """One request to the server."""
        self._count(calls=1)
        completion = server.complete(self._asked(request))
        self._count(prompt_tokens=completion.prompt_tokens, completion_tokens=completion.completion_tokens)
        if completion.text is None:
            raise NoReply("a reply without text")
        return completion

    def _asked(self, request: Request) -> dict[str, Any]:
        message = {"role": "user", "content": sendable(request.prompt)}
        return {"model": self.config.model, "messages": [message], "max_tokens": request.max_tokens, **SAMPLING}

    def _cache_key(self, request: Request) -> str:
        about = {"api": "chat.completions", "server": self.config.base_url, "prompts": PROMPT_VERSION}
        return cache_key({**about, **self._asked(request)})

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counter.update(more)

    def _over(self, reason: str | None = None, status: int = 0) -> None:
        """A call is over; with a reason it failed, which may be the one failure too many."""
        with self._lock:
            self._failed.append(reason is not None)
            if reason is None:
                return
            self._counter["failures"] += 1
            self.last_failure = reason
            failed = sum(self._failed)
            if self._lost is None and status in FINAL:
                self._lost = self._server.explained(reason, status)
            elif self._lost is None and 2 * failed > WINDOW:
                share = f"{failed} of the last {len(self._failed)} calls failed, the latest by {reason}"
                self._lost = self._server.explained(share, status)


def _spoken(reply: str) -> str:
    """A reply without the thoughts that some models put before it."""
    return reply.rpartition("</think>")[2]
