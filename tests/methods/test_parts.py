"""The parts of a comparison: reuse, split, cost."""

from pathlib import Path

import pytest

from rl_reward_network.artefacts import write_json
from rl_reward_network.data.splits import Split
from rl_reward_network.methods import parts
from rl_reward_network.methods.methods import PROMPTS_NET, REWARD_NET, SUPERVISED
from rl_reward_network.methods.parts import PartCommand, check_split, cost_of, is_finished, make_part
from rl_reward_network.report.cost import Cost, cost_from_json, cost_json, total_cost


def test_parts_that_learn_from_one_split_share_its_labels() -> None:
    both = total_cost([Cost(2, (("reward", 50),), 10, 1.5), Cost(3, (("policy", 20), ("reward", 40)), 5, None)])
    assert both == Cost(5, (("policy", 20), ("reward", 50)), 15, 1.5)
    assert both.labelled_images == 70
    assert total_cost([]) == Cost()
    assert cost_from_json(cost_json(both)) == both


def test_a_finished_run_is_reused(tmp_path: Path) -> None:
    (tmp_path / "final_model").mkdir()
    assert make_part(PartCommand(SUPERVISED, ("no-such-command",), lambda: tmp_path)) == (tmp_path, True)
    assert not is_finished(REWARD_NET, tmp_path)


def test_a_command_that_fails_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    message = "supervised failed with exit status 2: sa2va-rl no-such-command --resume --run_folder"
    with pytest.raises(ValueError, match=message):
        make_part(PartCommand(SUPERVISED, ("no-such-command",), lambda: tmp_path))
    assert "no such command" in capfd.readouterr().err


def test_a_run_of_another_split_is_refused(tmp_path: Path) -> None:
    split = Split({"reward": ("a",), "policy": ("b",), "val": ("c",), "test": ("d",)}, 0, "f")
    write_json(tmp_path / "split.json", {"groups": {name: list(ids) for name, ids in split.groups.items()}})
    check_split(SUPERVISED, tmp_path, split)
    other = Split({**split.groups, "val": ("d",), "test": ("c",)}, 1, "f")
    with pytest.raises(ValueError, match="supervised was trained with another split"):
        check_split(SUPERVISED, tmp_path, other)


def test_cost_of_a_grpo_run(tmp_path: Path) -> None:
    config = {"minutes": 4.5, "labels": 60, "parameters": [["LoRA", 100, 30], ["mlp1", 10, 10]], "peak_memory_gib": 2.0}
    config["validation"] = {"labelled": 48}
    write_json(tmp_path / "final_model" / "config.json", config)
    cost = cost_of(SUPERVISED, tmp_path, {"reward": 50, "policy": 70})
    assert cost == Cost(4.5, (("policy", 10), ("reward", 50), ("val", 48)), 40, 2.0)


def test_labels_that_chose_something_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_parameters", lambda *_: 7)
    config = {"seconds": {"masks and scores": 30, "PPO": 50, "decision": 10}, "resumed": True}
    config["labels"] = {"reward": {}, "weights": {"val": 48}, "deployment": {"policy": 20, "val": 40}}
    config["deployment"] = {"choice": "policy"}
    write_json(tmp_path / "final_model" / "config.json", config)
    labels = (("policy", 20), ("val", 48))
    assert cost_of(PROMPTS_NET, tmp_path, {}) == Cost(1.5, labels, 7, None, resumed=True)
    labels = (("policy", 20), ("val", 40))
    assert cost_of(PROMPTS_NET, tmp_path, {}, searched=True) == Cost(0.5, labels, 0, None, resumed=True)
    write_json(tmp_path / "final_model" / "config.json", config | {"labels": {"policy": 5}, "deployment": {}})
    assert cost_of(PROMPTS_NET, tmp_path, {}).labels == (("policy", 5),), "of version 0.11"
