import json
import re
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_reward_network import __version__
from rl_reward_network import run as run_module
from rl_reward_network.atomic_io import locked
from rl_reward_network.curves import save_checkpoint
from rl_reward_network.run import (
    GRPO_RUN,
    KINDS,
    POST_RUN,
    REWARD_RUN,
    RUN_FILE,
    SPENT,
    Kind,
    Run,
    check_folder,
    clock,
    differences,
    peak_memory_gib,
    portable,
    read_model_config,
    reward_run_files,
    run_folders,
)

WANTED: dict[str, Any] = {"mode": "quick", "ppo": {"n_envs": 2, "seed": 0}, "prompts": ["Where is it?", "And?"]}
MAJOR, MINOR = __version__.split(".")[:2]
ALL_KINDS = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.prefix)


def begun(kind: Kind, folder: Path, settings: dict[str, Any] = WANTED, finished: bool = False, **facts: Any) -> Run:
    run = Run(folder, kind)
    run.begin(settings, facts)
    if finished:
        write_end(run)
        run.finish()
    return run


def write_end(run: Run) -> None:
    (run / run.kind.end).parent.mkdir(exist_ok=True)
    (run / run.kind.end).write_text("{}")


def of_version(run: Run, version: str) -> Run:
    (run / "config.json").write_text(json.dumps(run.config | {"version": version}))
    return run


@ALL_KINDS
def test_a_run_from_its_beginning_to_its_end(tmp_path: Path, kind: Kind) -> None:
    run = Run.create(kind, tmp_path, WANTED)
    assert re.fullmatch(rf"{kind.prefix}_\d{{8}}_\d{{6}}_\d{{6}}_[0-9a-f]{{8}}", run.path.name)
    assert Run.create(kind, tmp_path, WANTED).path.name[-8:] == run.path.name[-8:]
    assert Run.create(kind, tmp_path, {}).path.name[-8:] != run.path.name[-8:]
    assert re.fullmatch(
        rf"{kind.prefix}_\d{{8}}_\d{{6}}_\d{{6}}_a-b", Run.create(kind, tmp_path, {}, name="a-b").path.name
    )
    assert (run.state, list(tmp_path.iterdir())) == ("new", [])
    with run.lock():
        assert run.state == "new"
        config = run.begin(WANTED, {"seed": 3})
        assert run.config == config
        assert (config["stage"], config["settings"], config["version"]) == (kind.stage, WANTED, __version__)
        assert run.settings == {**WANTED, "seed": 3, "reward_net": None}
        assert (run.state, run.progress()) == ("interrupted", "no checkpoint yet")
        write_end(run)
        assert run.state == "interrupted", "done.json is written last"
        run.finish()
    assert (run.state, run.progress()) == ("finished", "finished")
    assert Run.open(run.path) == run
    for refused in (lambda: run.begin(WANTED, {}), lambda: Run.create(kind, tmp_path, WANTED, run.path)):
        with pytest.raises(ValueError, match="holds a run already"):
            refused()


@ALL_KINDS
def test_the_newest_run_of_equal_settings_is_found(tmp_path: Path, kind: Kind) -> None:
    """Newest by the time of the name, whatever else is in it, and without it by that of the file."""
    first = begun(kind, tmp_path / f"{kind.prefix}_experiment1_20260101_000000", finished=True)
    second = begun(kind, tmp_path / f"{kind.prefix}_20260101_000001_500000_01234567")
    begun(kind, tmp_path / f"{kind.prefix}_20260101_000002_000000_01234567", {"mode": "full"})
    (tmp_path / f"{kind.prefix}_20260101_000003").mkdir()  # cut off before its config.json
    begun(kind, tmp_path / "other_20260101_000004")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Run.find(kind, tmp_path, WANTED) == second
        assert Run.find(kind, tmp_path, WANTED, "finished") == first
        assert Run.find(kind, tmp_path, WANTED, also=lambda run: run != second) == first
        assert Run.find(kind, tmp_path, {**WANTED, "seed": 1}) is None
    dated = begun(kind, tmp_path / f"{kind.prefix}_20260101_000005_000000_20250101_000000")  # by --name
    assert run_folders(tmp_path, kind.prefix)[0] == dated.path
    (dated / "config.json").unlink()
    named = begun(kind, tmp_path / f"{kind.prefix}_mine")
    assert run_folders(tmp_path, kind.prefix)[0] == named.path
    assert len(run_folders(tmp_path)) == 5


@ALL_KINDS
@pytest.mark.parametrize(
    ("file", "content"),
    [
        *(("config.json", content) for content in (b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"architectures": []}')),
        ("config.json", b'{"stage": "x", "settings": {}}'),
        ("config.json", None),
        ("end", b"{"),
        ("end", None),
    ],
)
def test_a_damaged_or_foreign_run_is_passed_over_with_one_warning(
    tmp_path: Path, kind: Kind, file: str, content: bytes | None
) -> None:
    """Without content: a folder in place of config.json, or final_model without what it must hold."""
    good = begun(kind, tmp_path / f"{kind.prefix}_20260101_000000")
    bad = begun(kind, tmp_path / f"{kind.prefix}_20260101_000001", finished=True)
    path = bad / (file if file == "config.json" else kind.end)
    if content is not None:
        path.write_bytes(content)
    elif file == "config.json":
        path.unlink()
        path.mkdir()
    elif path.parent != bad.path:
        path.unlink()
    else:
        pytest.skip("the run is unfinished then")
    assert bad.state == "damaged"
    with pytest.warns(UserWarning, match="passed over") as shown:
        assert Run.find(kind, tmp_path, WANTED) == good
    assert [str(path) in str(warning.message) for warning in shown] == [True]


def test_many_searches_warn_once(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    warnings.simplefilter("default")
    (begun(POST_RUN, tmp_path / "sa2va_post_process_1") / "config.json").write_text("{")
    for _ in range(3):
        assert Run.find(POST_RUN, tmp_path, {}) is None
    assert len(recwarn) == 1


def test_a_folder_without_a_run_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"stage": "dreaming"}')
    for folder, why in ((tmp_path, "field stage is 'dreaming'"), (tmp_path / "none", "file not found")):
        with pytest.raises(ValueError, match=f"config.json.*{why}"):
            Run.open(folder)


def test_the_progress_is_read_from_the_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path / "run", GRPO_RUN)
    assert run.line() == f"run folder: {run}"
    begun(GRPO_RUN, run.path)
    assert run.line() == f"run folder: {run}, no checkpoint yet: it begins anew"
    for state, step in (({"step": 100, "members": []}, 100), ({"num_timesteps": 512, "policy": torch.zeros(2)}, 512)):
        save_checkpoint(run / "checkpoint.pt", state)
        assert run.progress() == f"step {step}"
    for step in (50, 100):
        (run / f"checkpoint-{step}").mkdir()
    assert run.line() == f"run folder: {run}, resumed from step 100"
    write_end(run)
    run.finish()
    run.announce()
    assert capsys.readouterr().out == f"run folder: {run}, finished\n"


def test_a_command_tells_its_run_to_a_shell_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_FILE, str(tmp_path / "answer"))
    Run(tmp_path / "a run", GRPO_RUN).announce()
    assert (tmp_path / "answer").read_text() == f"{tmp_path / 'a run'}\n"


def test_a_named_run_is_checked_before_it_is_resumed(tmp_path: Path) -> None:
    run = begun(GRPO_RUN, tmp_path / "run")
    check_folder(None, GRPO_RUN, resume=True)
    check_folder(run.path, GRPO_RUN, resume=True)
    check_folder(tmp_path / "none", GRPO_RUN, resume=False)
    with pytest.raises(ValueError, match="holds a run already"):
        check_folder(run.path, GRPO_RUN, resume=False)
    for refused in (
        lambda: check_folder(tmp_path / "none", GRPO_RUN, resume=True),
        lambda: Run.resume(GRPO_RUN, tmp_path, WANTED, tmp_path / "none"),
    ):
        with pytest.raises(ValueError, match="none holds no run; leave --resume out"):
            refused()
    assert Run.resume(GRPO_RUN, tmp_path, WANTED, run.path) == run
    with pytest.raises(ValueError, match=r"other settings \(mode was quick, now full\); give the same"):
        Run.resume(GRPO_RUN, tmp_path, {**WANTED, "mode": "full"}, run.path)
    with pytest.raises(ValueError, match="not of a run of this project"):
        Run.resume(POST_RUN, tmp_path, WANTED, run.path)


def test_versions_that_differ_in_the_last_number_resume_each_other(tmp_path: Path) -> None:
    run = begun(GRPO_RUN, tmp_path / "sa2va_grpo_1")
    for version in (__version__, f"{MAJOR}.{MINOR}.99"):
        of_version(run, version).check_same(WANTED)
        assert Run.resume(GRPO_RUN, tmp_path, WANTED) == run
    for other in (f"{MAJOR}.{int(MINOR) + 1}.0", f"{int(MAJOR) + 1}.{MINOR}.0"):
        with pytest.raises(ValueError, match=f"version {other} began this run, .*{__version__}.*without --resume$"):
            of_version(run, other).check_same(WANTED)
        with pytest.raises(ValueError, match=f"no checkpoint yet; version {other} began it"):
            Run.resume(GRPO_RUN, tmp_path, WANTED)


def test_a_run_of_a_release_candidate_is_named_with_its_version(tmp_path: Path) -> None:
    run = begun(GRPO_RUN, tmp_path / "sa2va_grpo_1", finished=True)
    config = {"origin" if name == "settings" else name: value for name, value in run.config.items()}
    (run / "config.json").write_text(json.dumps(config | {"version": "1.0.0rc1"}))
    with pytest.raises(ValueError, match=r"config\.json: version 1\.0\.0rc1 made and reads it, this one does not"):
        _ = run.config


def test_the_config_of_an_earlier_model_has_the_names_of_today(tmp_path: Path) -> None:
    old = {"world": {"seed": 3}, "origin": {"settings": {"beta": 0.1}, "mode": "full"}, "steps": 5}
    (tmp_path / "config.json").write_text(json.dumps(old))
    config = read_model_config(tmp_path / "config.json")
    assert (config["inputs"], config["settings"]["training"], config["steps"]) == ({"seed": 3}, {"beta": 0.1}, 5)
    assert config["settings"]["mode"] == "full"


@pytest.mark.parametrize(
    ("before", "now", "lines"),
    [
        (WANTED, WANTED, []),
        (
            {**WANTED, "mode": "full", "ppo": {"n_envs": 4}, "prompts": []},
            WANTED,
            ["mode was full, now quick", "ppo.n_envs was 4, now 2", "ppo.seed was None, now 0", "prompts"],
        ),
        ({"judge": {"model": "a name"}}, {"judge": None}, ["judge"]),
        ({"ppo": {"n_envs": 2}}, {"ppo": {}}, ["ppo.n_envs was 2, now None"]),
        ({"ppo": {"stop": True}}, {"ppo": {"stop": False}}, ["ppo.stop was True, now False"]),
        ({"ppo": {"stop": True}}, {"ppo": {}}, ["ppo.stop was True, now None"]),
        ({"ppo": {}}, {"ppo": {"stop": True}}, ["ppo.stop was None, now True"]),
        ({"ppo": {}}, {"ppo": {"new": None, "stop": False}, "shuffle": False, "share": 0.0}, []),
        ({"ppo": {"gone": None, "stop": False, "share": 0.0}}, {"ppo": {}}, []),
        ({"settings": {}}, {"settings": {"coarse": 0.6}}, ["settings.coarse was None, now 0.6"]),
        ({"settings": {"coarse": 0.6}}, {"settings": {"coarse": 0.0}}, ["settings.coarse was 0.6, now 0.0"]),
    ],
)
def test_settings_that_differ_are_named_with_their_values(
    before: dict[str, Any], now: dict[str, Any], lines: list[str]
) -> None:
    """A setting that one version does not have equals one that is off."""
    assert differences(before, now) == lines


def test_the_runs_there_are_stand_in_the_error(tmp_path: Path) -> None:
    def listed(settings: dict[str, Any], otherwise: str = "nothing") -> list[str]:
        with pytest.raises(ValueError, match="--resume: no reward_net run of these settings") as caught:
            Run.resume(REWARD_RUN, tmp_path, settings, state="interrupted", otherwise=otherwise)
        return str(caught.value).splitlines()

    assert listed(WANTED)[0].endswith("there is none at all: leave it out to begin one")
    runs = [tmp_path / f"reward_net_20260101_00000{number}" for number in range(9)]
    for run in runs[:5]:
        begun(REWARD_RUN, run, {**WANTED, "mode": "full"})
    for run, text in zip(runs[5:8], ("{", "[1]", '{"settings": [1]}'), strict=True):
        run.mkdir()
        (run / "config.json").write_text(text)
    begun(REWARD_RUN, runs[8], {**WANTED, "ppo": {"n_envs": 2}}, finished=True, seed=3)
    lines = listed(WANTED)
    assert lines[0].endswith(f"in {tmp_path}; give those of one that is there, or leave it out to begin anew:")
    assert lines[1] == f"  {runs[8]}: finished; differs in ppo.seed was None, now 0"
    for line, run, why in zip(
        lines[2:5], runs[7:4:-1], ("not of a run", "no JSON object", "not valid JSON"), strict=True
    ):
        assert line.startswith(f"  {run}: {run}/config.json: ")
        assert why in line
    assert lines[5] == f"  {runs[4]}: no checkpoint yet; differs in mode was full, now quick"
    assert (len(lines), lines[-1]) == (7, "  and 4 older")
    assert "seed was 3, now 0" in listed({"seed": 0})[1]
    assert listed({"seed": 3}, "the reward network")[1].endswith("finished; differs in the reward network")


def test_runs_started_together_have_folders_of_their_own(tmp_path: Path) -> None:
    names: list[str] = []
    make = lambda: names.append(Run.create(GRPO_RUN, tmp_path, WANTED).path.name)  # noqa: E731
    threads = [threading.Thread(target=make) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(names)) == 20


def test_one_process_at_a_time_works_in_a_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", GRPO_RUN)
    with run.lock(), pytest.raises(ValueError, match="another process is working on this run"), run.lock():
        pass
    with run.lock():
        pass  # free again


def test_a_run_begins_although_another_process_looks_whether_it_is_busy(tmp_path: Path) -> None:
    run, looks = Run(tmp_path / "run", GRPO_RUN), threading.Event()

    def look() -> None:
        with locked(run.path):
            looks.set()
            time.sleep(0.1)

    threading.Thread(target=look).start()
    looks.wait()
    with run.lock():
        pass


def test_a_run_that_another_process_works_on_is_not_resumed(tmp_path: Path) -> None:
    """The newest that nobody works on is; what is finished may be read by everybody."""
    older, newer = (begun(GRPO_RUN, tmp_path / f"sa2va_grpo_20260101_00000{second}") for second in (1, 2))
    with newer.lock():
        assert Run.resume(GRPO_RUN, tmp_path, WANTED) == older
        with (
            older.lock(),
            pytest.raises(ValueError, match=r"(?s)no sa2va_grpo run .*_000002: .*another process is working"),
        ):
            Run.resume(GRPO_RUN, tmp_path, WANTED)
        write_end(newer)
        newer.finish()
        assert Run.find(GRPO_RUN, tmp_path, WANTED) == newer


def test_paths_inside_the_project_move_with_it_and_others_stay(tmp_path: Path) -> None:
    run = tmp_path / "project" / "outputs" / "run"
    assert portable(tmp_path / "project" / "data", run) == "../../data"
    assert portable(run / "models" / "own", run) == "./models/own"
    assert portable(tmp_path / "elsewhere", run) == str(tmp_path / "elsewhere")
    assert portable(Path("/data"), Path("/outputs/run")) == "/data", "the whole machine is no project"


def test_the_run_of_a_reward_network_is_found_by_its_name(tmp_path: Path) -> None:
    files = reward_run_files(tmp_path / "run", "../reward_net_1/best_reward_net, of 2026-11-23 14:02")
    folder = tmp_path / "reward_net_1"
    assert [path.resolve() for path in files.values()] == [folder, folder / "report.html"]
    assert reward_run_files(tmp_path, None) == {}, "no network, or a run of 0.6"
    assert reward_run_files(tmp_path, "not from a folder") == {}


def test_the_peak_of_memory_remains_after_it_is_freed() -> None:
    """In a process of its own: the peak of this one may be larger already."""
    code = """
import numpy as np
from rl_reward_network.run import peak_memory_gib
before = peak_memory_gib()
np.ones(2**27)  # 1 GiB
print(before, peak_memory_gib())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(float, result.stdout.split())
    assert before < 0.5
    assert 0.9 < after - before < 1.2
    assert 0.01 < peak_memory_gib() < 1000


def test_pauses_do_not_count_and_a_killed_process_leaves_its_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seconds = Run(tmp_path, GRPO_RUN), {"training": 100.0}
    monkeypatch.setattr(run_module, "BEAT_S", 0.01)
    run_module._work.cache_clear()  # the clock of this test beats faster

    def killed() -> None:
        with clock(seconds, "training", run / SPENT):
            time.sleep(0.3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed()
    assert seconds == {"training": 100.0}
    before = run.seconds_before()
    kept = before["training"]
    assert 100.1 < kept < 110
    monkeypatch.setattr(run_module, "BEAT_S", 60.0)
    run_module._work.cache_clear()
    monkeypatch.setattr(run_module, "PAUSE_S", 0.1)
    with clock(before, "training"):
        time.sleep(0.3)  # no beat, as in a process that is stopped
    assert before["training"] == pytest.approx(kept, abs=0.05)
    run_module._work.cache_clear()
    run.finish()
    assert run.seconds_before() == {}
