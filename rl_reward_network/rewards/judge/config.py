"""Configuration of an LLM judge, validated before anything is sent."""

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

NO_KEY = "no-key"  # the package openai requires a key also for servers without keys


@dataclass(frozen=True)
class JudgeConfig:
    """Address, model and limits of an LLM judge.

    Attributes:
        base_url: http(s)://host[:port]/path, usually ending in /v1. Proxies are ignored if the host is this machine.
        model: name of the model on the server; None takes the only one that the server lists.
        api_key_env: environment variable with the key; may be unset for servers without keys.
        max_concurrency: maximum number of concurrent requests.
        timeout_s: timeout of one attempt, in seconds.
        max_retries: attempts after the first.
        cache_path: file of cached replies; None caches for this run only. The cache key has the whole request, the
            model and the server (base_url).

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
        least = {"max_concurrency": 1, "timeout_s": 1e-3, "max_retries": 0}
        for name, bound in least.items():
            if not getattr(self, name) >= bound:
                raise ValueError(f"the judge's {name} is {getattr(self, name)}, expected {bound:g} or more")


def api_key(name: str) -> str:
    """The key in the environment variable `name`; NO_KEY if it is not set."""
    key = os.environ.get(name, "").strip() or NO_KEY
    if not key.isascii() or not key.isprintable():
        raise ValueError(f"the key in the environment variable {name} has characters that cannot be sent; set it again")
    return key


def is_loopback(url: str) -> bool:
    """Whether the host of `url` is this machine: localhost, 127.x.x.x or ::1."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
