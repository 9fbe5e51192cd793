import threading
from pathlib import Path

import pytest

from rl_reward_network import __version__
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.runs.folder import (
    located_data,
    located_model,
    new_run_folder,
    only_here,
    portable,
    portable_settings,
    provenance,
    saved_config,
)


def saved(**changed: str) -> dict[str, object]:
    world = {"model_path": "../../model", "data_root": "../../data", "output_dir": "..", "prompts": None, "seed": 3}
    return {"world": {**world, **changed}}


def test_paths_inside_the_project_move_with_it_and_others_stay(tmp_path: Path) -> None:
    run = tmp_path / "project" / "outputs" / "run"
    assert portable(tmp_path / "project" / "data", run) == "../../data"
    assert portable(run / "models" / "own", run) == "./models/own"
    assert portable(tmp_path / "elsewhere", run) == str(tmp_path / "elsewhere")
    assert portable(Path("/data"), Path("/outputs/run")) == "/data", "the whole machine is no project"


def test_a_moved_project_finds_its_data_and_model(tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "run"
    run.mkdir(parents=True)
    with pytest.raises(
        ValueError, match=r"run/config\.json: field world\.data_root is \.\./\.\./data, no folder here; "
    ):
        saved_config(run, saved())
    (tmp_path / "data").mkdir()
    with pytest.raises(
        ValueError, match=r"field world\.model_path is \.\./\.\./model, no folder here; give --base_model"
    ):
        saved_config(run, saved())
    (tmp_path / "model").mkdir()
    found = saved_config(run, saved())
    assert (found.data_root, found.model_path) == (tmp_path / "data", str(tmp_path / "model"))
    assert (found.output_dir, found.seed, found.prompts) == (tmp_path / "outputs", 3, None)
    assert saved_config(run, saved(), tmp_path, "elsewhere").data_root == tmp_path
    assert saved_config(run, saved(), tmp_path, "elsewhere").model_path == "elsewhere"


@pytest.mark.parametrize("name", ["sa2va-nano", "ByteDance/Sa2VA-4B"])
def test_names_of_models_are_no_paths(tmp_path: Path, name: str) -> None:
    assert located_model(tmp_path, saved(model_path=name), "--model_path") == name


def test_a_hub_id_of_data_stays_what_it_is(tmp_path: Path) -> None:
    run, name = tmp_path / "outputs" / "run", Path("owner/regions")
    kept = portable_settings(RunConfig(data_root=name, output_dir=tmp_path / "outputs"), run)
    assert (kept["data_root"], kept["model_path"], kept["output_dir"]) == (str(name), "sa2va-nano", "..")
    assert located_data(run, {"world": kept}) == name


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
