"""What `--resume` says: how far a run is, and which runs there are where none fits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_reward_network.runs.checkpoints import save_checkpoint
from rl_reward_network.runs.folder import check_version, differences
from rl_reward_network.runs.resume import nothing_to_resume, progress, run_line

WANTED = {"mode": "quick", "ppo": {"n_envs": 2, "seed": 0}, "prompts": ["Where is the vessel?", "And the catheter?"]}


def begun(run: Path, origin: dict[str, Any], **beside: Any) -> Path:
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"origin": origin, **beside}))
    return run


def test_how_far_each_kind_of_run_is(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", {})
    assert run_line(run, False) == f"run folder: {run}"
    assert run_line(run, True) == f"run folder: {run}, no checkpoint yet: it begins anew"
    save_checkpoint(run / "checkpoint.pt", {"step": 100, "members": []})
    assert progress(run) == "step 100"
    save_checkpoint(run / "checkpoint.pt", {"num_timesteps": 512, "policy": torch.zeros(2)})
    assert run_line(run, True) == f"run folder: {run}, resumed from step 512"
    for step in (50, 100):
        (run / f"checkpoint-{step}").mkdir()
    assert progress(run) == "step 100"
    (run / "final_model").mkdir()
    assert run_line(run, True) == f"run folder: {run}, finished"


def test_settings_that_differ_are_named_with_their_values() -> None:
    assert differences(WANTED, WANTED) == []
    other = {**WANTED, "mode": "full", "ppo": {"n_envs": 4}, "prompts": []}
    assert differences(other, WANTED) == [
        "mode was full, now quick",
        "ppo.n_envs was 4, now 2",
        "ppo.seed was None, now 0",
        "prompts",
    ]


def test_what_was_there_and_is_not_any_more_differs_too() -> None:
    assert differences({"judge": {"model": "a name"}}, {"judge": None}) == ["judge"]
    assert differences({"ppo": {"n_envs": 2}}, {"ppo": {}}) == ["ppo.n_envs was 2, now None"]
    assert differences({"ppo": {}}, {"ppo": {"new": None}}) == ["ppo"], "a run of an earlier version"
    assert differences({"ppo": {"n_envs": 2}}, {"ppo": {"n_envs": 2, "stop": False}, "shuffle": False}) == []
    assert differences({"ppo": {"stop": True}}, {"ppo": {"stop": False}}) == ["ppo.stop was True, now False"]
    assert differences({"settings": {"steps": 700}}, {"settings": {"steps": 700, "coarse": 0.0}}) == []
    assert differences({"settings": {}}, {"settings": {"coarse": 0.6}}) == ["settings.coarse was None, now 0.6"]
    assert differences({"settings": {"coarse": 0.6}}, {"settings": {"coarse": 0.0}}) == [
        "settings.coarse was 0.6, now 0.0"
    ]
    assert differences({"ppo": {}}, {"ppo": {"stop": True}}) == ["ppo.stop was None, now True"]


def test_damaged_and_foreign_runs_are_listed_as_such(tmp_path: Path) -> None:
    for number, text in enumerate(("[1]", "{", '{"origin": [1]}')):
        (tmp_path / f"kind_{number}").mkdir()
        (tmp_path / f"kind_{number}/config.json").write_text(text)
    lines = str(nothing_to_resume(tmp_path, "kind", WANTED)).splitlines()[1:]
    assert ["kind_2" in lines[0], "kind_1" in lines[1], "kind_0" in lines[2]] == [True] * 3
    assert "not of a run of this project" in lines[0]
    assert "not valid JSON" in lines[1]
    assert "holds no JSON object" in lines[2]
    with pytest.raises(ValueError, match=r"kind_0/config\.json: holds no JSON object"):
        check_version(tmp_path / "kind_0")


def test_the_runs_there_are_stand_in_the_error(tmp_path: Path) -> None:
    assert str(nothing_to_resume(tmp_path, "kind", WANTED)).endswith("there is none at all: leave it out to begin one")
    for number in range(6):
        begun(tmp_path / f"kind_{number}", {**WANTED, "mode": "full"})
    begun(tmp_path / "kind_7", {"ppo": {"n_envs": 2}, "mode": "quick", "prompts": WANTED["prompts"]}, seed=3)
    (tmp_path / "kind_6").mkdir()
    (tmp_path / "kind_6" / "config.json").write_text("{")
    begun(tmp_path / "other_9", WANTED)
    lines = str(nothing_to_resume(tmp_path, "kind", WANTED)).splitlines()
    assert lines[0].endswith(f"in {tmp_path}; give those of one that is there, or leave it out to begin anew:")
    assert lines[1] == f"  {tmp_path}/kind_7: no checkpoint yet; differs in ppo.seed was None, now 0"
    assert lines[2].startswith(f"  {tmp_path}/kind_6: {tmp_path}/kind_6/config.json: not valid JSON")
    assert lines[3] == f"  {tmp_path}/kind_5: no checkpoint yet; differs in mode was full, now quick"
    assert (len(lines), lines[-1]) == (7, "  and 3 older")
    same = str(nothing_to_resume(tmp_path, "other", WANTED, "the reward network"))
    assert same.endswith("other_9: no checkpoint yet; differs in the reward network")
    assert "seed was 3, now 0" in str(nothing_to_resume(tmp_path, "kind", {"seed": 0}))
