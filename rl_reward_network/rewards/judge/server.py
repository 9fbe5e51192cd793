"""An OpenAI-compatible server: chat completions, or the reason why there is none.

Works with vLLM, Ollama, llama.cpp, LM Studio or a provider: `POST {base_url}/chat/completions` for a question, and
`GET {base_url}/models` if no model is given. The package openai retries (on 408, 409, 429, 5xx, lost connections and
timeouts). The key is read from the environment and appears in no message, log or file.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rl_reward_network.rewards.judge.config import JudgeConfig, api_key, is_loopback

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
REMEDY = "check that the server runs, and its base url, which usually ends in /v1"
UNLISTED = "; a server that lists no models needs --llm_judge_model"
SHORT_TIMEOUT_S = 20.0  # for requests before a run
EXCERPT = 200  # characters of a reply in a message
LISTED = 40  # models in a message


@dataclass(frozen=True)
class Completion:
    """A reply of a server: its text (None if null or blank), the reported model, and tokens used."""

    text: str | None
    model: str
    prompt_tokens: int
    completion_tokens: int


class NoReply(Exception):
    """A request failed; `status` is the HTTP status (408 after a timeout), 0 without one."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class JudgeServer:
    """The server of a judge; thread-safe.

    Args:
        config: address, timeout and retries.
        attempted: called before each request, including retries.

    Raises:
        ValueError: the package openai is missing, or the key cannot be sent.
    """

    def __init__(self, config: JudgeConfig, attempted: Callable[[], None] = lambda: None) -> None:
        self.config, self._attempted = config, attempted
        self._key = api_key(config.api_key_env)
        self._library = _openai()
        self._client = self._connected()

    def with_short_timeout(self) -> "JudgeServer":
        """The same server with a timeout of at most 20 s and no retries, for checks before a run."""
        timeout_s = min(self.config.timeout_s, SHORT_TIMEOUT_S)
        return JudgeServer(replace(self.config, timeout_s=timeout_s, max_retries=0), self._attempted)

    def complete(self, asked: dict[str, Any]) -> Completion:
        """Request a chat completion.

        Raises:
            NoReply: there is no reply, or it is not a chat completion; the message has the reason.
        """
        body = self._body(lambda: self._client.chat.completions.with_raw_response.create(**asked))
        completion = read_completion(body)
        if completion is None:
            raise NoReply(f"a reply that is no chat completion: {self.excerpt(body)}")
        return completion

    def only_model(self) -> str:
        """The model of a server that lists exactly one.

        Raises:
            ValueError: there is no list, or it has no or several models; the message names them.
        """
        try:
            body = self._body(self._client.models.with_raw_response.list)
        except NoReply as error:
            hint = "" if error.status in (0, 401, 403, TIMED_OUT) else UNLISTED
            raise ValueError(self.message(str(error), error.status) + hint) from None
        names = read_models(body)
        if names is None:
            reason = f"a list of models that cannot be read: {self.excerpt(body)}"
            raise ValueError(self.message(reason) + UNLISTED)
        if len(names) != 1:
            more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
            listed = f" ({', '.join(names[:LISTED])}{more})" if names else ""
            raise ValueError(
                f"LLM judge {self.config.base_url}: lists {len(names)} models{listed}; name one by --llm_judge_model"
            )
        return names[0]

    def message(self, reason: str, status: int = 0) -> str:
        """An error message with judge, reason and remedy."""
        model = "" if self.config.model is None else f", model {self.config.model!r}"
        remedy = REMEDIES.get(status, REMEDY).format(api_key_env=self.config.api_key_env)
        return f"LLM judge {self.config.base_url}{model}: {reason}; {remedy}"

    def excerpt(self, text: str) -> str:
        """The start of a reply on one line, without the key, which some servers repeat."""
        return " ".join(text.replace(self._key, "***").split())[:EXCERPT] or "(empty)"

    def _body(self, send: Callable[[], Any]) -> str:
        """The body of a successful response, after the retries of the package openai."""
        try:
            response = send()
        except self._library.APIStatusError as error:
            reason = f"HTTP {error.status_code}: {self.excerpt(error.response.text)}"
            raise NoReply(reason, error.status_code) from None
        except self._library.APITimeoutError:
            raise NoReply(f"no reply within {self.config.timeout_s:g} s", TIMED_OUT) from None
        except self._library.APIConnectionError as error:
            raise NoReply(f"no connection ({self.excerpt(str(error.__cause__ or error))})") from None
        return str(response.http_response.text)

    def _connected(self) -> Any:
        """The package's client. Redirects are not followed: they would lose the POST and count as retries."""
        http = self._library.DefaultHttpxClient(
            trust_env=not is_loopback(self.config.base_url),
            follow_redirects=False,
            event_hooks={"request": [lambda _: self._attempted()]},
        )
        return self._library.OpenAI(
            api_key=self._key,
            base_url=self.config.base_url,
            timeout=self.config.timeout_s,
            max_retries=self.config.max_retries,
            http_client=http,
        )


def read_completion(body: str) -> Completion | None:
    """The reply in the body of a response; None if it is not a chat completion (HTML, other JSON, ...)."""
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
    content = sendable(text) if text is not None and text.strip() else None
    return Completion(content, sendable(str(reply.get("model"))), *used)


def read_models(body: str) -> list[str] | None:
    """The names in a list of models, in its order; None if the body is not such a list."""
    try:
        return [sendable(str(model["id"])) for model in json.loads(body)["data"]]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None


def sendable(text: str) -> str:
    """`text` with a ? for each lone surrogate, which neither HTTP nor SQLite accepts."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _openai() -> Any:
    """The package openai, an optional dependency."""
    try:
        import openai
    except ImportError:
        raise ValueError("the LLM judge needs the package openai: pip install -e '.[judge]'") from None
    for noisy in ("openai", "httpx2"):  # a line for each request
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return openai
