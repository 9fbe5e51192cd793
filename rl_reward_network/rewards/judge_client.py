"""Client of an LLM judge: concurrent requests to an OpenAI-compatible server, with a cache of replies.

Works with vLLM, Ollama, llama.cpp, LM Studio or a provider. Each request is one user message at temperature 0. The
package openai retries it (on 408, 409, 429, 5xx, lost connections and timeouts). A failed request has no answer, which
is not a score of 0, and is counted. When more than half of the last 50 calls failed, or the server rejects a call
permanently, the client stops sending, and `failing` returns the reason.

Replies are cached in a folder by the package diskcache, as JSON. Threads, ranks and later runs share it on a local
disk, but not on a network drive. It contains replies, but no questions. The key is read from the environment and
appears in no message, log or file.
"""

import hashlib
import json
import logging
import os
import sqlite3
import sys
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

NO_KEY = "no-key"  # the package openai requires a key also for servers without keys
SAMPLING = {"temperature": 0.0, "top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
COUNTED = ("calls", "cache_hits", "failures", "retries", "prompt_tokens", "completion_tokens")
WINDOW = 50  # latest calls; when more than half of them failed, the client stops sending
SILENT_S = 15.0  # without the first of several answers before the warning
SHORT_TIMEOUT_S = 20.0  # for requests before a run
EXCERPT = 200  # characters of a reply or a list in a message
LOOPBACK = ("localhost", "127.0.0.1", "::1")

FINAL = {  # remedies by HTTP status, for which no later request can succeed
    401: "set the key in the environment variable {api_key_env}",
    403: "set a key that may use this model in the environment variable {api_key_env}",
    404: "the model must be the name that the server gives it, and the base url usually ends in /v1",
}
UNREADABLE, TIMED_OUT = 200, 408
REMEDIES = FINAL | {
    UNREADABLE: "take a model that follows instructions",
    TIMED_OUT: "check that the server answers at all (its model may still be loading); a slow one needs a longer "
    "timeout or fewer requests at once",
    429: "send fewer requests at once, or raise the server's limit",
}
REMEDY = "check that the server runs, and its base url (--llm_judge_base_url), which usually ends in /v1"


@dataclass(frozen=True)
class JudgeConfig:
    """Address, model and limits of an LLM judge.

    Attributes:
        base_url: http(s)://host[:port]/path, usually ending in /v1. Proxies are ignored for localhost.
        model: name of the model on the server; None takes the only one that the server lists.
        api_key_env: environment variable with the key; may be unset for servers without keys.
        max_concurrency: maximum number of concurrent requests.
        timeout_s: timeout of one attempt, in seconds.
        max_retries: attempts after the first.
        cache_path: folder of cached replies, which depend on the whole request, the model and the server; None caches
            for this run only.

    Raises:
        ValueError: a value out of range; the message names it.
    """

    base_url: str
    model: str | None
    api_key_env: str = "OPENAI_API_KEY"
    max_concurrency: int = 8
    timeout_s: float = 60.0
    max_retries: int = 2
    cache_path: Path | None = None

    def __post_init__(self) -> None:
        _check_url(self.base_url)
        if self.model is not None and not self.model.strip():
            raise ValueError("the judge's model is empty; give the name that the server gives it")
        for name, least in {"max_concurrency": 1, "timeout_s": 1e-3, "max_retries": 0}.items():
            if not getattr(self, name) >= least:
                raise ValueError(f"the judge's {name} is {getattr(self, name)}, expected {least:g} or more")


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


class NoReply(Exception):
    """A request failed; `status` is the HTTP status (408 after a timeout), 0 without one."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class JudgeClient:
    """A thread-safe client of an LLM judge.

    Attributes:
        config: the configuration; a missing model is replaced by the only model of the server.
        last_failure: reason of the latest failed call; empty without one.

    Raises:
        ValueError: a package is missing, the key cannot be sent, the cache cannot be used, or no model is given and the
            server does not list exactly one.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._openai, diskcache = _libraries()
        self.config, self._key, self.last_failure = config, api_key(config.api_key_env), ""
        self._lock, self._counter = threading.Lock(), Counter(dict.fromkeys(COUNTED, 0))
        self._failed: deque[bool] = deque(maxlen=WINDOW)  # of the latest calls
        self._stopped: str | None = None
        self._warned = False  # whether the absence of answers was reported
        self._pool = ThreadPoolExecutor(config.max_concurrency, thread_name_prefix="judge")
        http = self._openai.DefaultHttpxClient(
            trust_env=urlsplit(config.base_url).hostname not in LOOPBACK,
            follow_redirects=False,  # they would lose the POST
            event_hooks={"request": [self._count_retry]},
        )
        self._server = self._openai.OpenAI(
            api_key=self._key,
            base_url=config.base_url,
            timeout=config.timeout_s,
            max_retries=config.max_retries,
            http_client=http,
        )
        self._cache: MutableMapping[str, dict[str, Any]] = {}
        if config.cache_path is not None:
            if config.cache_path.is_file():
                raise ValueError(f"{config.cache_path}: is a file, but replies are cached in a folder; name a new one")
            with self._cache_explained():
                self._cache = _json_cache(diskcache, config.cache_path)
        if config.model is None:
            self.config = replace(config, model=self._only_model())

    @property
    def counts(self) -> dict[str, int]:
        """Calls (without retries), cache hits, failures, retries, tokens used, and what `note` added, by name."""
        with self._lock:
            return dict(self._counter)

    def note(self, **counts: int) -> None:
        """Add to the counts, such as the number of imputed scores."""
        with self._lock:
            self._counter.update(counts)

    def failing(self) -> str | None:
        """Server, share of failures, last reason and remedy once the client has stopped sending; None before.

        The client stops sending when 26 of the last 50 calls failed or the server answered 401, 403 or 404, until
        `check` succeeds. Replies from the cache do not count as calls.
        """
        return self._stopped

    def check(self) -> None:
        """Send one short request without cache and retries, to find a wrong address, key or model before the run.

        Raises:
            ValueError: no reply within at most 20 s; the message has the base url, the reason and the remedy.
        """
        try:
            self._complete(Request("Reply with the letter A and nothing else.", str), self._impatient())
        except NoReply as error:
            raise ValueError(self._message(str(error), error.status)) from None
        with self._lock:
            self._failed.clear()
            self._stopped = None

    def ask(self, requests: Sequence[Request]) -> Iterator[Answer]:
        """Yield the answers in the order of the requests, which are sent concurrently; equal ones are sent once.

        Raises:
            ValueError: the cache cannot be used.
        """
        keys = [self._cache_key(request) for request in requests]
        unique = dict(zip(keys, requests, strict=True))
        pending = {key: self._pool.submit(self._answer, key, request) for key, request in unique.items()}
        try:
            if pending and not self._warned and not wait(pending.values(), SILENT_S, FIRST_COMPLETED).done:
                self._warned = True
                message = self._message(f"no answer for {SILENT_S:g} s", TIMED_OUT)
                patience = f"{self.config.timeout_s:g} s and {self.config.max_retries} retries"
                tqdm.write(f"warning: {message}; a request fails after {patience}", file=sys.stderr)
            for key in keys:
                yield pending[key].result()
        finally:
            for future in pending.values():
                future.cancel()

    def _answer(self, key: str, request: Request) -> Answer:
        """The answer from the cache or the server; none once the client has stopped sending."""
        with self._cache_explained():
            cached = self._cache.get(key)
        reply = cached.get("reply") if isinstance(cached, dict) else None  # of a damaged entry none
        if isinstance(reply, str) and (value := request.parse(_without_reasoning(reply))) is not None:
            self.note(cache_hits=1)
            return Answer(reply, value)
        if self._stopped is not None:
            return Answer(None, None)
        try:
            reply, model = self._complete(request, self._server)
        except NoReply as error:
            self._finish_call(str(error), error.status)
            return Answer(None, None)
        value = request.parse(_without_reasoning(reply))
        if value is None:  # a failure, which is not cached
            self._finish_call(f"a reply that cannot be read: {self._excerpt(reply)}", UNREADABLE)
            return Answer(reply, None)
        self._finish_call()
        with self._cache_explained():
            self._cache[key] = {"reply": reply, "model": model, "time": datetime.now(UTC).isoformat(timespec="seconds")}
        return Answer(reply, value)

    def _complete(self, request: Request, server: Any) -> tuple[str, str]:
        """The text of one chat completion, and the model that the server reports."""
        self.note(calls=1)

        def read(reply: Any) -> tuple[Any, str]:
            text, usage = reply.choices[0].message.content, reply.usage
            tokens = {name: getattr(usage, name, 0) for name in ("prompt_tokens", "completion_tokens")}
            self.note(**{name: number for name, number in tokens.items() if isinstance(number, int)})
            return text, str(reply.model)

        create = server.chat.completions.with_raw_response.create
        body, broken = self._body(request), "a reply that is no chat completion"
        text, model = self._sent(server, lambda: create(**body), read, broken)
        if not isinstance(text, str) or not text.strip():
            raise NoReply("a reply without text")
        return _sendable(text), model

    def _only_model(self) -> str:
        """The model of a server that lists exactly one; a ValueError names several."""
        server = self._impatient()
        models = server.models.with_raw_response.list
        try:
            names = self._sent(server, models, _model_names, "a list of models that cannot be read")
        except NoReply as error:
            hint = (
                ""
                if error.status in (401, 403, TIMED_OUT)
                else "; a server that lists no models needs --llm_judge_model"
            )
            raise ValueError(self._message(str(error), error.status) + hint) from None
        if len(names) != 1:
            listed = f" ({self._excerpt(', '.join(names))})" if names else ""
            raise ValueError(
                f"LLM judge {self.config.base_url}: lists {len(names)} models{listed}; name one by --llm_judge_model"
            )
        return names[0]

    def _impatient(self) -> Any:
        """The server with a timeout of at most 20 s and no retries, for checks before a run."""
        return self._server.with_options(timeout=min(self.config.timeout_s, SHORT_TIMEOUT_S), max_retries=0)

    def _sent(self, server: Any, send: Callable[[], Any], read: Callable[[Any], Any], unreadable: str) -> Any:
        """What `read` finds in the parsed response of `send` to a server, after the retries of the package openai.

        Raises:
            NoReply: there is no response, or `read` cannot read it; the message has the reason.
        """
        try:
            response = send()
        except self._openai.APIStatusError as error:
            reason = f"HTTP {error.status_code}: {self._excerpt(error.response.text)}"
            raise NoReply(reason, error.status_code) from None
        except self._openai.APITimeoutError:
            raise NoReply(f"no reply within {server.timeout:g} s", TIMED_OUT) from None
        except self._openai.APIConnectionError as error:
            raise NoReply(f"no connection ({self._excerpt(str(error.__cause__ or error))})") from None
        try:
            return read(response.parse())
        except (AttributeError, IndexError, TypeError, ValueError, RecursionError):  # HTML, other JSON, ...
            raise NoReply(f"{unreadable}: {self._excerpt(response.http_response.text)}") from None

    def _body(self, request: Request) -> dict[str, Any]:
        message = {"role": "user", "content": _sendable(request.prompt)}
        return {"model": self.config.model, "messages": [message], "max_tokens": request.max_tokens, **SAMPLING}

    def _cache_key(self, request: Request) -> str:
        asked = {"api": "chat.completions", "server": self.config.base_url, **self._body(request)}
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode("ascii")).hexdigest()

    def _finish_call(self, reason: str | None = None, status: int = 0) -> None:
        """Count a finished call; with a reason it failed, which may stop the client."""
        with self._lock:
            self._failed.append(reason is not None)
            if reason is None:
                return
            self._counter["failures"] += 1
            self.last_failure, failed = reason, sum(self._failed)
            if self._stopped is None and status in FINAL:
                self._stopped = self._message(reason, status)
            elif self._stopped is None and 2 * failed > WINDOW:
                share = f"{failed} of the last {len(self._failed)} calls failed, the latest by {reason}"
                self._stopped = self._message(share, status)

    def _message(self, reason: str, status: int = 0) -> str:
        """An error message with judge, reason and remedy."""
        model = "" if self.config.model is None else f", model {self.config.model!r}"
        remedy = REMEDIES.get(status, REMEDY).format(api_key_env=self.config.api_key_env)
        return f"LLM judge {self.config.base_url}{model}: {reason}; {remedy}"

    def _excerpt(self, text: str) -> str:
        """The start of a text on one line, without the key, which some servers repeat."""
        return " ".join(_sendable(text).replace(self._key, "***").split())[:EXCERPT] or "(empty)"

    def _count_retry(self, request: Any) -> None:
        if request.headers.get("x-stainless-retry-count", "0") != "0":  # which the package openai sets
            self.note(retries=1)

    @contextmanager
    def _cache_explained(self) -> Iterator[None]:
        """Turn errors of SQLite and the file system into a ValueError with a remedy."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise ValueError(
                f"{self.config.cache_path}: cannot be used as the judge's cache ({error}); name a folder in which you "
                "may write, on a disk with free space; if it is damaged, delete it"
            ) from error


def api_key(name: str) -> str:
    """The key in the environment variable `name`; NO_KEY if it is not set."""
    key = os.environ.get(name, "").strip() or NO_KEY
    if not key.isascii() or not key.isprintable():
        raise ValueError(f"the key in the environment variable {name} has characters that cannot be sent; set it again")
    return key


def _check_url(url: str) -> None:
    """Raise a ValueError for an invalid address, or one with a secret that messages would show."""
    if set("@?#") & set(url):
        raise ValueError("the judge's base url holds a name, a password or a query; put the key in the environment")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        valid = False
    if not valid or not url.isprintable() or " " in url:
        raise ValueError(f"the judge's base url is {url!r}, expected http(s)://host[:port]/path, such as .../v1")


def _json_cache(diskcache: Any, folder: Path) -> Any:
    """A cache of JSON values without a limit; pickled values, which could run code, are refused."""

    class JSONOnly(diskcache.JSONDisk):  # type: ignore[misc]  # a class of an optional package
        def fetch(self, mode: int, filename: str, value: Any, read: bool) -> Any:
            if mode == diskcache.core.MODE_PICKLE:
                raise OSError("a pickled value, which is never written here")
            try:
                return super().fetch(mode, filename, value, read)
            except (zlib.error, ValueError) as error:
                raise OSError(f"a damaged reply: {error}") from error

    return diskcache.Cache(folder, disk=JSONOnly, eviction_policy="none")


def _model_names(page: Any) -> list[str]:
    return [_sendable(str(model.id)) for model in page.data]


def _without_reasoning(reply: str) -> str:
    """A reply without the reasoning that some models put before it."""
    return reply.rpartition("</think>")[2]


def _sendable(text: str) -> str:
    """`text` with a ? for each lone surrogate, which HTTP does not accept."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _libraries() -> tuple[Any, Any]:
    """The packages openai and diskcache, optional dependencies."""
    try:
        import diskcache
        import openai
    except ImportError as error:
        install = f"{sys.executable} -m pip install -e '.[judge]'"  # in a fresh shell, `pip` is of another Python
        raise ValueError(f"the LLM judge needs the package {error.name}; in the project folder: {install}") from None
    for noisy in ("openai", "httpx2"):  # a line for each request
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return openai, diskcache
