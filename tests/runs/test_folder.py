import threading
from pathlib import Path

import pytest

from rl_reward_network import __version__
from rl_reward_network.runs.folder import new_run_folder, only_here, portable, provenance, reward_run_files


def test_paths_inside_the_project_move_with_it_and_others_stay(tmp_path: Path) -> None:
    run = tmp_path / "project" / "outputs" / "run"
    assert portable(tmp_path / "project" / "data", run) == "../../data"
    assert portable(run / "models" / "own", run) == "./models/own"
    assert portable(tmp_path / "elsewhere", run) == str(tmp_path / "elsewhere")
    assert portable(Path("/data"), Path("/outputs/run")) == "/data", "the whole machine is no project"


def test_runs_started_together_have_folders_of_their_own(tmp_path: Path) -> None:
    names: list[str] = []
    threads = [threading.Thread(target=lambda: names.append(new_run_folder(tmp_path, "run").name)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(names)) == 20
    assert all(name.startswith("run_2") for name in names)


def test_one_process_at_a_time_works_in_a_run(tmp_path: Path) -> None:
    with only_here(tmp_path / "run"), pytest.raises(ValueError, match="another process is working on this run"):  # noqa: SIM117
        with only_here(tmp_path / "run"):
            pass
    with only_here(tmp_path / "run"):
        pass


def test_a_run_says_which_version_began_it() -> None:
    assert provenance()["version"] == __version__


def test_the_run_of_a_reward_network_is_found_by_its_name(tmp_path: Path) -> None:
    files = reward_run_files(tmp_path / "run", "../reward_net_1/best_reward_net, of 2026-11-23 14:02")
    assert [path.resolve() for path in files.values()] == [
        tmp_path / "reward_net_1",
        tmp_path / "reward_net_1" / "sheet.png",
    ]
    assert reward_run_files(tmp_path, None) == {}, "no network, or a run of 0.6"
    assert reward_run_files(tmp_path, "not from a folder") == {}
