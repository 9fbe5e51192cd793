"""What is read from a server's replies, and which model it serves."""

import pytest

from rl_reward_network.rewards.judge.client import JudgeClient
from rl_reward_network.rewards.judge.config import JudgeConfig
from rl_reward_network.rewards.judge.server import JudgeServer, read_completion, read_models
from tests.rewards.judge.test_client import Reply, judge_server, listing


def test_a_completion_is_read_whatever_else_is_missing() -> None:
    whole = read_completion(Reply("A").content().decode())
    assert whole is not None
    assert (whole.text, whole.model, whole.prompt_tokens, whole.completion_tokens) == ("A", "served-model", 10, 2)
    bare = read_completion('{"choices": [{"message": {"content": "A"}}], "usage": null}')
    assert bare is not None
    assert (bare.text, bare.prompt_tokens, bare.completion_tokens) == ("A", 0, 0)
    for broken in ('{"choices": [{"message": {"content": ["A"]}}]}', '{"choices": [{}]}', "null", "[" * 100_000):
        assert read_completion(broken) is None


def test_a_list_of_models_is_read_whatever_else_is_there() -> None:
    assert read_models('{"data": [{"id": "a", "owned_by": "me"}, {"id": "b"}], "more": 1}') == ["a", "b"]
    assert read_models('{"data": []}') == []
    for broken in ("", "<html>", "[]", "null", '{"data": null}', '{"data": [3]}', '{"data": [{}]}', "[" * 100_000):
        assert read_models(broken) is None


def test_a_judge_without_a_name_is_the_only_one_that_the_server_lists() -> None:
    with judge_server(lambda prompt: "A", listing("the-only-one")) as server:
        client = JudgeClient(JudgeConfig(server.url, None))
        assert client.config.model == "the-only-one"
        client.check()
    assert [body["model"] for body in server.bodies] == ["the-only-one"]


def test_a_judge_with_a_name_is_not_looked_up() -> None:
    with judge_server(lambda prompt: "A", Reply(status=500, body="no list here")) as server:
        JudgeClient(JudgeConfig(server.url, "mine")).check()
    assert [body["model"] for body in server.bodies] == ["mine"]


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (listing(), ": lists 0 models; name one by --llm_judge_model"),
        (listing("a/b", "c"), ": lists 2 models (a/b, c); name one by --llm_judge_model"),
        (listing(*map(str, range(50))), "38, 39 and 10 more); name one by --llm_judge_model"),
        (Reply(body='{"data": [{"id'), ': a list of models that cannot be read: {"data": [{"id; check that the server'),
        (Reply(status=404, body="no"), ": HTTP 404: no; the model must be the name that the server gives it, and the"),
        (Reply(status=405, body="no"), "usually ends in /v1; a server that lists no models needs --llm_judge_model"),
    ],
)
def test_a_server_that_does_not_say_which_model(models: Reply, said: str) -> None:
    with judge_server(lambda prompt: "A", models) as server, pytest.raises(ValueError) as refused:
        JudgeClient(JudgeConfig(server.url, None))
    assert str(refused.value).startswith(f"LLM judge {server.url}: ")
    assert said in str(refused.value)
    assert "--llm_judge_model" in str(refused.value)


def test_a_name_is_no_remedy_for_a_missing_key() -> None:
    message = "HTTP 401: no; set the key in the environment variable OPENAI_API_KEY$"
    closed = Reply(status=401, body="no")
    with judge_server(lambda prompt: "A", closed) as server, pytest.raises(ValueError, match=message):
        JudgeClient(JudgeConfig(server.url, None))


def test_the_short_timeout_is_the_smaller_one_without_retries() -> None:
    shortened = (
        JudgeServer(JudgeConfig("http://127.0.0.1:1/v1", "m", timeout_s=60, max_retries=9)).with_short_timeout().config
    )
    assert (shortened.timeout_s, shortened.max_retries) == (20, 0)
    unchanged = JudgeServer(JudgeConfig("http://127.0.0.1:1/v1", "m", timeout_s=5)).with_short_timeout().config
    assert (unchanged.timeout_s, unchanged.max_retries) == (5, 0)


def test_the_message_names_server_model_reason_and_remedy() -> None:
    config = JudgeConfig("http://127.0.0.1:1/v1", "m", api_key_env="MY_KEY")
    assert JudgeServer(config).message("HTTP 403: no", 403) == (
        "LLM judge http://127.0.0.1:1/v1, model 'm': HTTP 403: no; set a key that may use this model in the "
        "environment variable MY_KEY"
    )
