"""The command from stored captions to a score, over a real HTTP server."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_reward_network.artefacts import read_json
from rl_reward_network.cli import dlc_bench
from rl_reward_network.cli.app import run
from rl_reward_network.cli.dlc_bench import Args
from tests.rewards.judge_server import Reply, judge_server
from tests.rewards.test_dlc_bench import NAMES, QA, play

PREDICTIONS = {"query": "Describe it.", "7": "A grey bird with claws.", "8": "A car."}


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Args:
    """Everything in a folder of its own; the server is still to be named."""
    monkeypatch.chdir(tmp_path)
    files = {"DLC-bench/qa.json": QA, "DLC-bench/class_names.json": NAMES, "pred.json": PREDICTIONS}
    for name, value in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(json.dumps(value))
    return Args(Path("pred.json"), Path("DLC-bench"), "http://127.0.0.1:1/v1", "judge-model")


def test_the_command_writes_the_result_and_prints_it(args: Args, capsys: pytest.CaptureFixture[str]) -> None:
    with judge_server(play) as server:
        dlc_bench.main(replace(args, llm_judge_base_url=server.url))
        assert len(server.bodies) == 1 + 7  # the check, and two recognitions with five questions
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "2 objects, judge judge-model: Pos 0.250  Neg 0.000  Avg 0.125"
        assert "unreadable 1" in lines[1]
        assert "calls 8, cache_hits 0, failures 1" in lines[1]
        assert lines[-1] == "written: pred_eval.json"
        first: dict[str, Any] = read_json(Path("pred_eval.json"))
        assert (first["avg_pos"], first["avg_neg"], first["avg"], first["8"]["score"]) == (0.25, 0.0, 0.125, 0.0)
        dlc_bench.main(replace(args, llm_judge_base_url=server.url, output=Path("new/again.json")))
        assert len(server.bodies) == 8 + 1 + 1  # the check, and what could not be read
    again: dict[str, Any] = read_json(Path("new/again.json"))
    assert again.pop("judge")["cache_hits"] == 6
    assert again == {name: value for name, value in first.items() if name != "judge"}


def test_the_command_line(args: Args) -> None:
    with judge_server(play) as server:
        words = ["--predictions", "pred.json", "--bench", "DLC-bench", "--llm_judge_model", "judge-model"]
        run(dlc_bench.main, Args, words=[*words, "--llm_judge_base_url", server.url])
    assert read_json(Path("pred_eval.json"))["avg"] == 0.125


def test_a_benchmark_without_negatives(args: Args, capsys: pytest.CaptureFixture[str]) -> None:
    Path("DLC-bench/qa.json").write_text(json.dumps({"8": QA["8"]}))
    with judge_server(play) as server:
        dlc_bench.main(replace(args, llm_judge_base_url=server.url))
    assert "Pos 0.000  Neg none  Avg none" in capsys.readouterr().out


def test_nothing_is_written_when_the_judge_is_lost(args: Args, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    down = [True]
    oops = Reply(status=500, body="oops")
    with judge_server(lambda prompt: oops if down and "Boats?" in prompt else play(prompt)) as server:
        config = replace(args, llm_judge_base_url=server.url)
        with pytest.raises(ValueError, match="1 of 7 questions"):
            dlc_bench.main(config)
        assert not Path("pred_eval.json").exists()
        down.clear()
        before = len(server.bodies)
        dlc_bench.main(config)
        assert len(server.bodies) - before == 1 + 2  # the replies of the first run were kept


def test_wrong_input_is_refused_before_any_request(args: Args) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"output": Path("./pred.json")}, r"--output pred\.json: "),
        ({"bench": Path("DLC-Bench")}, r"--bench DLC-Bench: qa\.json .*hf download nvidia/DLC-Bench"),
        ({"predictions": Path("none.json")}, r"none\.json: file not found"),
        ({"llm_judge_base_url": "localhost:8000"}, "url is 'localhost:8000'"),
        ({"llm_judge_concurrency": 0}, "max_concurrency is 0"),
    ]
    for changes, message in wrong:
        with pytest.raises(ValueError, match=message):
            dlc_bench.main(replace(args, **changes))
    Path("pred.json").write_text('{"7": "a"}')
    with pytest.raises(ValueError, match=r"pred\.json: 1 of 2 captions"):
        dlc_bench.main(args)
    Path("pred.json").write_text('{"7": ')
    with pytest.raises(ValueError, match=r"pred\.json: not valid JSON"):
        dlc_bench.main(args)
    assert sorted(path.name for path in Path().iterdir()) == ["DLC-bench", "pred.json"]


def test_a_judge_that_is_not_there(args: Args, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    with pytest.raises(ValueError, match=r"LLM judge http://127\.0\.0\.1:1/v1, model 'judge-model': no connection"):
        dlc_bench.main(args)
    assert not Path("pred_eval.json").exists()
