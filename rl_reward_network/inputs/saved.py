"""Write the inputs of a run into its config.json, and read them back after the run folder was moved."""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rl_reward_network.artefacts import write_json
from rl_reward_network.data.splits import save_split
from rl_reward_network.inputs.config import PromptConfig, RunConfig, pick_fields
from rl_reward_network.inputs.loading import RunInputs
from rl_reward_network.runs.folder import check_new, portable, provenance


def describe_run(run: Path, inputs: RunInputs, stage: dict[str, Any]) -> dict[str, Any]:
    """Make the run folder of step 1 or 2 with config.json and split.json, and return the former.

    Args:
        run: run folder.
        inputs: inputs of the run; paths are written as `portable` returns them.
        stage: entries of the stage (mode, preset, reward network, ...).

    Raises:
        ValueError: the folder holds a run already.
    """
    check_new(run)
    config = {
        **stage,
        "world": portable_settings(run, inputs.config, inputs.prompt_config),
        "device": inputs.config.device,
        "data_fingerprint": inputs.data_fingerprint,
        "model_fingerprint": inputs.segmenter.fingerprint,
        "prompts": list(inputs.prompts),
        "patients": {name: len(ids) for name, ids in inputs.split.groups.items()},
        "images": len(inputs.samples),
        **provenance(),
    }
    save_split(inputs.split, run / "split.json")
    write_json(run / "config.json", config)  # last: a folder with a config.json is complete
    return config


def portable_settings(run: Path, config: RunConfig, *further: Any) -> dict[str, Any]:
    """Settings as "world" of config.json: a flat mapping, paths as `portable` returns them, names and hub ids as is.

    Args:
        run: run folder.
        config: model, data, seeds and device.
        further: dataclasses with more settings of the stage.
    """
    values = {name: value for settings in (config, *further) for name, value in asdict(settings).items()}
    values = {name: portable(value, run) if isinstance(value, Path) else value for name, value in values.items()}
    named = {"model_path": Path(config.model_path), "data_root": config.data_root}
    return values | {name: portable(path, run) if path.exists() else str(path) for name, path in named.items()}


def saved_config(
    run: Path, config: dict[str, Any], data_root: Path | None = None, model_path: str | None = None
) -> tuple[RunConfig, PromptConfig]:
    """Settings of a run of step 1 or 2 in its present folder; the prompts are in `config` itself.

    Args:
        run: run folder.
        config: its config.json.
        data_root, model_path: where data and model are now, if not where they were.

    Raises:
        ValueError: data or model are missing; names the flag for their place.
    """
    saved = config["world"]
    output_dir = (run / saved["output_dir"]).resolve()
    paths: dict[str, Any] = {
        "data_root": data_root or located_data(run, config),
        "model_path": model_path or located_model(run, config, "--base_model"),
        "output_dir": output_dir if output_dir.is_dir() else run.parent.resolve(),
        "unlabelled_root": located_unlabelled(run, config),
    }
    return replace(pick_fields(RunConfig, saved), **paths), pick_fields(PromptConfig, {**saved, "prompts": None})


def located_data(run: Path, config: dict[str, Any]) -> Path:
    """The data of a run: a folder that exists, or a hub id.

    Raises:
        ValueError: it was a folder and is missing; names the flag for its place.
    """
    return Path(_located(run, config, "data_root", "--data_root, the folder where the same data are now"))


def located_unlabelled(run: Path, config: dict[str, Any]) -> Path | None:
    """The folder of a run's unlabelled images; None without any, or where it is no longer there."""
    saved = config["world"].get("unlabelled_root")
    folder = (run / saved).resolve() if saved else None
    return folder if folder is not None and folder.is_dir() else None


def located_model(run: Path, config: dict[str, Any], flag: str) -> str:
    """The model of a run: a folder that exists, the name of an embedded model, or a hub id.

    Raises:
        ValueError: it was a folder and is missing; names `flag`, for its place.
    """
    return _located(run, config, "model_path", f"{flag}, the folder where the same model is now")


def _located(run: Path, config: dict[str, Any], name: str, remedy: str) -> str:
    saved = str(config["world"][name])
    if not saved.startswith((".", os.sep)):
        return saved
    folder = (run / saved).resolve()
    if not folder.is_dir():
        raise ValueError(f"{run / 'config.json'}: field world.{name} is {saved}, no folder here; give {remedy}")
    return str(folder)
