"""What is refused before a judge is asked anything."""

import pytest

from rl_reward_network.rewards.judge.config import NO_KEY, JudgeConfig, api_key, is_loopback


@pytest.mark.parametrize(
    "url", ["localhost:8000/v1", "ftp://host/v1", "http:///v1", "http://host:99999/v1", "http://[::1"]
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ValueError, match=r"base url is '.*', expected http\(s\)://host\[:port\]/path"):
        JudgeConfig(url, "m")


@pytest.mark.parametrize("url", ["http://a b/v1", "http://host/v1\n"])
def test_white_space_in_an_address(url: str) -> None:
    with pytest.raises(ValueError, match="the judge's base url is"):
        JudgeConfig(url, "m")


@pytest.mark.parametrize(
    "url", ["https://me:secret@host/v1", "https://host:99999@secret/v1", "https://host/v1?key=secret"]
)
def test_a_secret_in_the_address_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ValueError, match="put the key in the environment") as refused:
        JudgeConfig(url, "m")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": " "}, "the judge's model is empty"),
        ({"max_concurrency": 0}, "max_concurrency is 0, expected 1 or more"),
        ({"timeout_s": 0.0}, r"timeout_s is 0.0, expected 0.001 or more"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
        ({"max_retries": -1}, "max_retries is -1, expected 0 or more"),
    ],
)
def test_values_out_of_range(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JudgeConfig(**({"base_url": "http://host/v1", "model": "m"} | wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://localhost:8000/v1", True),
        ("http://127.0.0.1/v1", True),
        ("http://127.9.9.9:1/v1", True),
        ("http://[::1]:8000/v1", True),
        ("http://127.0.0.1.example.org/v1", False),
        ("http://10.0.0.1:8000/v1", False),
        ("https://api.example.org/v1", False),
    ],
)
def test_which_addresses_are_this_machine(url: str, here: bool) -> None:
    assert is_loopback(url) == here


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    assert api_key("MY_KEY") == NO_KEY
    monkeypatch.setenv("MY_KEY", " sk-secret\n")
    assert api_key("MY_KEY") == "sk-secret"
    for bad in ("sk-sécret", "sk-secret\nsecond line"):
        monkeypatch.setenv("MY_KEY", bad)
        with pytest.raises(ValueError, match="environment variable MY_KEY has characters") as refused:
            api_key("MY_KEY")
        assert "cret" not in str(refused.value)
