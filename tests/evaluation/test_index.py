"""The index of runs."""

import os
import re
from pathlib import Path

from rl_reward_network.artefacts import write_json
from rl_reward_network.evaluation.index import write_index


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
    write_json(network / "agreement.json", {"own_dice": 0.9296})
    text = write_index(tmp_path).read_text()
    rows = re.findall(r"<tr><td>.*?</tr>", text)
    assert [re.search(r'href="([^"]+)"', row)[1] for row in rows] == [  # type: ignore[index]
        *("reward_net_1", "compare_1", "policy_2", "policy_1")
    ]
    assert "own segmentation: Dice 0.930" in rows[0]
    assert "Best: &lt;fusion&gt;." in rows[1]
    assert "seeds" not in rows[1]  # the only run of its kind differs from none
    assert "ppo.gamma: 0.5, prompts: [&#x27;bbbbbbb" in rows[2]
    assert "not evaluated" in rows[2]
    assert "mode" not in rows[2]
    assert "seed" not in rows[2]
    assert "Better: +0.100 [+0.050, +0.150] Dice." in rows[3]
    assert 'href="policy_1/evaluation/report.html"' in rows[3]


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
