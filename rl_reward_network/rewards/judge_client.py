"""Asks an OpenAI-compatible server many questions at once, each paid for once; what cannot be had is never a score.

Works with vLLM, Ollama, llama.cpp, LM Studio or a provider: one `POST {base_url}/chat/completions` a question, with one
user message and temperature 0. Retries and their pauses are those of the package openai (on 408, 409, 429, 5xx, lost
connections and time-outs). The key stays in the environment: it is in no message, log or file of ours.
"""

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rl_reward_network.rewards.judge_answers import PROMPT_VERSION
from rl_reward_network.rewards.judge_cache import ReplyCache, cache_key
from rl_reward_network.rewards.judge_config import JudgeConfig, api_key, is_loopback

SAMPLING = {"temperature": 0.0, "top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
COUNTED = ("calls", "cache_hits", "failures", "retries", "prompt_tokens", "completion_tokens")
REMEDIES = {  # by HTTP status: no later request can succeed either
    401: "set the key in the environment variable {api_key_env}",
    403: "set a key that may use this model in the environment variable {api_key_env}",
    404: "the model must be the name that the server gives it, and the base url usually ends in /v1",
}
REMEDY = "check that the server runs, and its base url, which usually ends in /v1"
SHOWN = 200  # characters of a server's words in a message


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


@dataclass(frozen=True)
class Completion:
    """One reply of a server: text (None where it is null or blank), the model it says it is, tokens used."""

    text: str | None
    model: str
    prompt_tokens: int
    completion_tokens: int


class _NoReply(Exception):
    """Why a request came to nothing; `status` is the HTTP status, 0 where there is none."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class JudgeClient:
    """A judge that answers requests; may be used from several threads.

    Raises:
        ValueError: the package openai is missing, the key cannot be sent, or the cache cannot be used.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self.config = config
        self.last_failure = ""
        self._key = api_key(config.api_key_env)
        self._library = _openai()
        self._server = self._connected()
        self._cache = ReplyCache(config.cache_path)
        self._pool = ThreadPoolExecutor(config.max_concurrency, thread_name_prefix="judge")
        self._lock = threading.Lock()
        self._counter: Counter[str] = Counter()
        self._in_a_row = 0

    @property
    def counts(self) -> dict[str, int]:
        """Requests sent (without retries), served from the cache, failed, sent again; tokens paid for."""
        with self._lock:
            counted = {**self._counter, "retries": self._counter["attempts"] - self._counter["calls"]}
        return {name: max(0, counted.get(name, 0)) for name in COUNTED}

    def check(self) -> None:
        """Ask one tiny question, past the cache, so that a wrong address, key or model is known before the run.

        Raises:
            ValueError: no reply; the message has the base url, the reason and the remedy.
        """
        try:
            self._completion(Request("Reply with the letter A and nothing else.", str))
        except _NoReply as error:
            raise ValueError(self._stop(str(error), error.status)) from None
        self._succeeded()

    def ask(self, requests: Sequence[Request]) -> Iterator[Answer]:
        """The answers in the order of the requests, equal ones asked once; the next may be under way already.

        Raises:
            ValueError: the server refuses for good (401, 403, 404), or the judge is dead (see JudgeConfig).
        """
        keys = [self._cache_key(request) for request in requests]
        unique = dict(zip(keys, requests, strict=True))
        pending = {key: self._pool.submit(self._answer, key, request) for key, request in unique.items()}
        try:
            for key in keys:
                yield pending[key].result()
        finally:
            for future in pending.values():
                future.cancel()

    def _answer(self, key: str, request: Request) -> Answer:
        """From the cache or the server; only a reply that can be read is kept."""
        kept = self._cache.get(key)
        if kept is not None and (value := request.parse(_spoken(kept))) is not None:
            self._count(cache_hits=1)
            return Answer(kept, value)
        self._still_alive()
        try:
            completion = self._completion(request)
        except _NoReply as error:
            return self._unanswered(error)
        return self._read(key, request, completion)

    def _unanswered(self, error: _NoReply) -> Answer:
        """A failure, which ends the run where no later request can succeed."""
        self._failed(str(error))
        if error.status in REMEDIES:
            raise ValueError(self._stop(str(error), error.status)) from None
        return Answer(None, None)

    def _read(self, key: str, request: Request, completion: Completion) -> Answer:
        """What a reply says; what cannot be read is a failure."""
        reply = completion.text or ""
        value = request.parse(_spoken(reply))
        if value is None:
            self._failed(f"a reply that cannot be read: {self._shown(reply)}")
            return Answer(reply, None)
        self._succeeded()
        self._cache.put(key, reply, value, completion.model)
        return Answer(reply, value)

    def _completion(self, request: Request) -> Completion:
        """One request to the server, with the retries of the package openai."""
        self._count(calls=1)
        create = self._server.chat.completions.with_raw_response.create
        try:
            raw = create(**self._asked(request))
        except self._library.APIStatusError as error:
            reason = f"HTTP {error.status_code}: {self._shown(error.response.text)}"
            raise _NoReply(reason, error.status_code) from None
        except self._library.APITimeoutError:
            raise _NoReply(f"no reply within {self.config.timeout_s:g} s") from None
        except self._library.APIConnectionError as error:
            raise _NoReply(f"no connection ({self._shown(str(error.__cause__ or error))})") from None
        body = raw.http_response.text
        completion = read_completion(body)
        if completion is None:
            raise _NoReply(f"a reply that is no chat completion: {self._shown(body)}")
        self._count(prompt_tokens=completion.prompt_tokens, completion_tokens=completion.completion_tokens)
        if completion.text is None:
            raise _NoReply("a reply without text")
        return completion

    def _asked(self, request: Request) -> dict[str, Any]:
        message = {"role": "user", "content": _sendable(request.prompt)}
        return {"model": self.config.model, "messages": [message], "max_tokens": request.max_tokens, **SAMPLING}

    def _cache_key(self, request: Request) -> str:
        return cache_key({"api": "chat.completions", "prompts": PROMPT_VERSION, **self._asked(request)})

    def _connected(self) -> Any:
        """The package's client. Redirects are not followed: they would lose the POST, and count as retries."""

        def attempt(_: Any) -> None:
            self._count(attempts=1)

        trust = not is_loopback(self.config.base_url)
        http = self._library.DefaultHttpxClient(
            trust_env=trust, follow_redirects=False, event_hooks={"request": [attempt]}
        )
        return self._library.OpenAI(
            api_key=self._key,
            base_url=self.config.base_url,
            timeout=self.config.timeout_s,
            max_retries=self.config.max_retries,
            http_client=http,
        )

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counter.update(more)

    def _succeeded(self) -> None:
        with self._lock:
            self._in_a_row = 0

    def _failed(self, reason: str) -> None:
        with self._lock:
            self._counter["failures"] += 1
            self._in_a_row += 1
            self.last_failure = reason

    def _still_alive(self) -> None:
        """Refuse to go on with a judge that died mid-run."""
        if self._in_a_row >= self.config.max_consecutive_failures:
            kept = f"; replies so far are kept in {self.config.cache_path}" if self.config.cache_path else ""
            reason = f"the last {self._in_a_row} requests failed, the latest by {self.last_failure}{kept}"
            raise ValueError(self._stop(reason, 0))

    def _stop(self, reason: str, status: int) -> str:
        """The message of an error that ends the run."""
        remedy = REMEDIES.get(status, REMEDY).format(api_key_env=self.config.api_key_env)
        return f"LLM judge {self.config.base_url}, model {self.config.model!r}: {reason}; {remedy}"

    def _shown(self, words: str) -> str:
        """The start of a server's words on one line; some servers repeat the key."""
        return " ".join(words.replace(self._key, "***").split())[:SHOWN] or "(empty)"


def read_completion(body: str) -> Completion | None:
    """The reply in the body of a response, None where that is no chat completion (HTML, garbage, other JSON)."""
    try:
        reply = json.loads(body)
        text = reply["choices"][0]["message"]["content"]
    except (ValueError, RecursionError, KeyError, IndexError, TypeError):
        return None
    if text is not None and not isinstance(text, str):
        return None
    usage = reply.get("usage")
    tokens = [usage.get(name) if isinstance(usage, dict) else 0 for name in ("prompt_tokens", "completion_tokens")]
    used = [number if isinstance(number, int) else 0 for number in tokens]
    said = _sendable(text) if text is not None and text.strip() else None
    return Completion(said, _sendable(str(reply.get("model"))), *used)


def _spoken(reply: str) -> str:
    """A reply without the thoughts that some models put before it."""
    return reply.rpartition("</think>")[2]


def _sendable(text: str) -> str:
    """`text` with a ? for each half of a character, which neither HTTP nor SQLite takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _openai() -> Any:
    """The package openai, imported late because only judges need it."""
    try:
        import openai
    except ImportError:
        raise ValueError("the LLM judge needs the package openai: pip install -e '.[judge]'") from None
    for noisy in ("openai", "httpx2"):  # a line for each request
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return openai
