"""The inputs of a run in its config.json: found again wherever the run folder is now."""

from pathlib import Path

import pytest

from rl_reward_network.inputs.config import RegionConfig, RunConfig
from rl_reward_network.inputs.loading import located_data, located_model, portable_settings, saved_config


def saved(**changed: str) -> dict[str, object]:
    world = {"model_path": "../../model", "data_root": "../../data", "output_dir": "..", "prompts": None, "seed": 3}
    return {"inputs": {**world, **changed}}


def test_a_moved_project_finds_its_data_and_model(tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "run"
    run.mkdir(parents=True)
    with pytest.raises(
        ValueError, match=r"run/config\.json: field inputs\.data_root is \.\./\.\./data, no folder here; "
    ):
        saved_config(run, saved())
    (tmp_path / "data").mkdir()
    with pytest.raises(
        ValueError, match=r"field inputs\.model_path is \.\./\.\./model, no folder here; give --base_model"
    ):
        saved_config(run, saved())
    (tmp_path / "model").mkdir()
    config, limits = saved_config(run, saved())
    assert (config.data_root, config.model_path) == (tmp_path / "data", str(tmp_path / "model"))
    assert (config.output_dir, config.seed, limits.prompts) == (tmp_path / "outputs", 3, None)
    moved, _ = saved_config(run, saved(), tmp_path, "elsewhere")
    assert (moved.data_root, moved.model_path) == (tmp_path, "elsewhere")


@pytest.mark.parametrize("name", ["sa2va-nano", "ByteDance/Sa2VA-4B"])
def test_names_of_models_are_no_paths(tmp_path: Path, name: str) -> None:
    assert located_model(tmp_path, saved(model_path=name), "--model_path") == name


def test_a_hub_id_of_data_stays_what_it_is(tmp_path: Path) -> None:
    run, name = tmp_path / "outputs" / "run", Path("owner/regions")
    settings = portable_settings(run, RunConfig(data_root=name, output_dir=tmp_path / "outputs"), RegionConfig())
    assert (settings["data_root"], settings["model_path"], settings["output_dir"]) == (str(name), "sa2va-nano", "..")
    assert located_data(run, {"inputs": settings}) == name
