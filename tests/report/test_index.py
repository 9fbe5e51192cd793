"""The index of runs."""

import os
import re
from datetime import datetime
from pathlib import Path

import pytest

from rl_reward_network.artefacts import write_json
from rl_reward_network.report.index import write_index


def make_run(folder: Path, stage: str, origin: dict[str, object], time: int, **results: object) -> Path:
    write_json(folder / "config.json", {"stage": stage, "origin": origin})
    os.utime(folder / "config.json", (time, time))
    for name, values in results.items():
        write_json(folder / "evaluation" / f"{name}.json", values)
    return folder


def test_runs_newest_first_with_differing_settings_and_results(tmp_path: Path) -> None:
    verdict = {"label": "better", "sentence": "Better: +0.100 [+0.050, +0.150] Dice."}
    old = {"mode": "quick", "ppo": {"gamma": 0.99, "seed": 0}, "prompts": ["a" * 50]}
    new = {"mode": "quick", "ppo": {"gamma": 0.5, "seed": 0}, "prompts": ["b" * 50]}
    make_run(tmp_path / "policy_1", "prompt policy", old, 1000, eval={"verdict": verdict})
    (tmp_path / "policy_1" / "evaluation" / "report.html").write_text("report")
    make_run(tmp_path / "policy_2", "prompt policy", new, 2000)
    compared = make_run(tmp_path / "compare_1", "comparison", {"seeds": [0]}, 3000)
    write_json(compared / "eval.json", {"verdict": ["Best: <fusion>.", "more"]})
    network = make_run(tmp_path / "reward_net_1", "reward network", {}, 4000)
    write_json(network / "agreement.json", agreement(0.9296, 0.0237, 0.051))
    text = write_index(tmp_path).read_text()
    rows = re.findall(r"<tr><td>.*?</tr>", text)
    assert [re.search(r'href="([^"]+)"', row)[1] for row in rows] == [  # type: ignore[index]
        *("reward_net_1", "compare_1", "policy_2", "policy_1")
    ]
    assert (
        "predicted Dice of Sa2VA&#x27;s masks: mean absolute error 0.024, 90 % intervals of ±0.051; "
        "own segmentation: Dice 0.930 on test patients" in rows[0]
    )
    assert "Best: &lt;fusion&gt;." in rows[1]
    assert "seeds" not in rows[1]  # the only run of its kind differs from none
    assert re.search(r"<td>ppo.gamma: 0.5, prompts: list of 1 \([0-9a-f]{6}\)</td>", rows[2])
    assert "not evaluated" in rows[2]
    assert "mode" not in rows[2]
    assert "seed" not in rows[2]
    assert "Better: +0.100 [+0.050, +0.150] Dice." in rows[3]
    assert '<a href="policy_1/evaluation/report.html">evaluation</a>' in rows[3]


def agreement(own_dice: float | None, error: float, half_width: float | None) -> dict[str, object]:
    interval = {"refusal": None if half_width else "few patients", "coverage": None, "half_width": half_width}
    tables = {"Sa2VA": {"network": {"mae": error}}}
    return {"own_dice": own_dice, "tables": tables, "intervals": {"Sa2VA": interval}}


def test_a_reward_network_without_interval_has_none_in_its_row(tmp_path: Path) -> None:
    run = make_run(tmp_path / "reward_net_1", "reward network", {}, 1000)
    write_json(run / "agreement.json", agreement(0.93, 0.02, None))
    text = write_index(tmp_path).read_text()
    assert "mean absolute error 0.020; own segmentation" in text
    assert "interval" not in text
    write_json(run / "agreement.json", agreement(None, 0.02, None))
    assert "own segmentation: unknown" in write_index(tmp_path).read_text()


def test_the_time_is_that_of_the_name_and_the_whole_name_is_shown(tmp_path: Path) -> None:
    make_run(tmp_path / "run_20261124_212941_001775", "s", {}, 9000)
    make_run(tmp_path / "run_20261125_212941_001775", "s", {}, 1000)
    make_run(tmp_path / "run_20269999_999999_lr_0.001", "s", {}, 2000)
    text = write_index(tmp_path).read_text()
    text = text.replace("<wbr>", "")
    rows = re.findall(r"<tr><td><span>(.*?)</span></td><td><a href=\"[^\"]+\">(.*?)</a>", text)
    assert rows[:2] == [
        ("2026-11-25 21:29", "run_20261125_212941_001775"),
        ("2026-11-24 21:29", "run_20261124_212941_001775"),
    ]
    assert rows[2] == (f"{datetime.fromtimestamp(2000):%Y-%m-%d %H:%M}", "run_20269999_999999_lr_0.001")


def test_evaluations_of_one_run_are_told_apart(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "prompt policy", {}, 1000)
    for name, words in (("evaluation", "Better."), ("evaluation_20", "Worse.")):
        write_json(run / name / "eval.json", {"verdict": {"sentence": words}})
        (run / name / "report.html").write_text("report")
    text = write_index(tmp_path).read_text()
    assert "<td>evaluation: Better. evaluation_20: Worse.</td>" in text
    assert '<a href="run/evaluation_20/report.html">evaluation_<wbr>20</a>' in text


def test_values_that_differ_look_different(tmp_path: Path) -> None:
    hashes = ("0123456789abcdef" * 2, "1123456789abcdef" * 2)
    for index, value in enumerate(hashes):
        origin = {
            "fingerprint": value,
            "model": f"c21d63facc110b18 99a97604 tiles=1 tokens={64 + index} dtype=torch.float32",
            "prompts": ["the same words in both lists"] * 10 + [f"prompt {index}"],
        }
        make_run(tmp_path / f"run_{index}", "s", origin, 1000)
    cells = re.findall(r"<td>fingerprint: (.*?), model: (.*?), prompts: (.*?)</td>", write_index(tmp_path).read_text())
    (first, model, prompts), other = cells
    assert {first, other[0]} == {hashes[0][:8], hashes[1][:8]}
    assert model.startswith("c21d63facc110b18 99a... (")
    assert model != other[1]
    assert re.fullmatch(r"list of 11 \([0-9a-f]{6}\)", prompts)
    assert prompts != other[2]


@pytest.mark.parametrize("config", [{"origin": None}, {"origin": [1]}, [1], None, {"stage": ["a"], "origin": "\ud800"}])
def test_an_odd_config_does_not_break_the_index(config: object, tmp_path: Path) -> None:
    write_json(tmp_path / "odd" / "config.json", config)
    assert '<a href="odd">odd</a>' in write_index(tmp_path).read_text()


def test_odd_names_do_not_break_the_index(tmp_path: Path) -> None:
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    write_json(tmp_path / os.fsdecode(b"gr\xf6sse") / "config.json", {"origin": {"odd": "\ud800"}})  # Latin-1
    text = write_index(tmp_path).read_text()
    assert "damaged config.json" in text
    assert 'href="gr%F6sse"' in text
    (tmp_path / "other" / "index.html").mkdir(parents=True)
    assert write_index(tmp_path / "other").is_dir()


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    run = make_run(tmp_path / "run", "prompt policy", {}, 1000)
    write_json(run / "eval.json", {"verdict": {"label": "better"}})
    text = write_index(tmp_path).read_text()
    assert "damaged config.json" in text
    assert "its results are damaged or of another version" in text


def test_an_index_of_another_origin_is_kept(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("my pages")
    assert write_index(tmp_path).read_text() == "my pages"


def test_no_runs_give_an_empty_table(tmp_path: Path) -> None:
    assert "<tbody></tbody>" in write_index(tmp_path).read_text()
