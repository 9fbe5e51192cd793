"""The folders best/ and cheapest/ of a comparison: a road that `sa2va-rl segment --run` applies to new images."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_reward_network.artefacts import read_json, whole_folder, write_json
from rl_reward_network.data.images import saved_levels
from rl_reward_network.depth import Levels
from rl_reward_network.inputs.loading import RunInputs, located_model
from rl_reward_network.inputs.segmenter import load_segmenter
from rl_reward_network.methods.masks import Tools, method_mask
from rl_reward_network.methods.measure import MethodResult
from rl_reward_network.methods.methods import METHODS, REWARD_NET, WEIGHTS, Method
from rl_reward_network.methods.parts import part_digest
from rl_reward_network.methods.tools import Models, load_tools
from rl_reward_network.methods.views import ImageView
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.rewards.learned import ImageScorer
from rl_reward_network.run import BEST_REWARD_NET, portable

ROAD = "road.json"


@dataclass(frozen=True)
class DeployedMethod:
    """A road that is ready for new images.

    Args:
        road: source and refinement.
        weights: of Sa2VA, by name.
        parameter: of the refinement.
        tools: trained parts.
        models: Sa2VA by name of its weights.
        network: reward network; None where the road has none.
        grey_levels: of grey images above 8 bit, as in the data of the comparison.
    """

    method: Method
    weights: str
    parameter: float | None
    tools: Tools
    models: Models
    network: RewardNetwork | None
    grey_levels: dict[str, Levels] | None

    def mask(self, image: np.ndarray) -> np.ndarray:
        """bool (H, W): the mask of an image, uint8 (H, W, 3)."""
        network = self.network
        scorer = None if network is None else lambda pixels: ImageScorer(network, pixels)
        return method_mask(self.method, ImageView(image, self.models, scorer), self.tools, self.weights, self.parameter)


def save_deployed(
    folder: Path, inputs: RunInputs, chosen: tuple[Method, MethodResult, Mapping[str, Path]], run: Path
) -> None:
    """Write a road into `folder`, inside the folder of the comparison.

    Runs are named by paths relative to the comparison, so that the project can be moved as a whole; none is copied.

    Args:
        folder: best/ or cheapest/; one that exists is replaced.
        inputs: of the comparison.
        chosen: the road, its result, and the runs that it needs.
        run: folder of the comparison.
    """
    method, result, runs = chosen
    model = Path(inputs.config.model_path)
    limits = inputs.prompt_config
    description = {
        "road": method.name,
        "title": method.title,
        "weights": result.weights,
        "parameter": result.parameter,
        "runs": {part: portable(path, run) for part, path in runs.items()},
        "trained": {part: part_digest(part, path) for part, path in runs.items()},
        "model_fingerprint": inputs.segmenter.fingerprint,
        "world": {"model_path": portable(model, run) if model.exists() else inputs.config.model_path},
        "limits": [
            limits.segment_batch,
            limits.max_new_tokens,
            limits.max_tiles,
            inputs.config.dtype,
            inputs.config.image_resize,
        ],
        "prompts": list(inputs.prompts),
        "grey_levels": inputs.config.grey_levels,
    }
    with whole_folder(folder) as temporary:
        write_json(temporary / ROAD, description)


def load_deployed(folder: Path, device: str) -> DeployedMethod:
    """Load the road of `best/` or `cheapest/`.

    Raises:
        ValueError: the folder holds no road, or a run or the model that it needs is missing or was trained again.
    """
    path = folder / ROAD
    if not path.exists():
        raise ValueError(
            f"--run {folder}: holds no {ROAD}; name the folder best or cheapest of a compare_<time> folder"
        )
    saved: dict[str, Any] = read_json(path)
    method = next((method for method in METHODS if method.name == saved.get("road")), None)
    if method is None:
        raise ValueError(f"{path}: road is {saved.get('road')!r}, unknown in this version; run the comparison again")
    runs = {part: (folder.resolve().parent / saved_path).resolve() for part, saved_path in saved["runs"].items()}
    if missing := [str(run) for run in runs.values() if not run.is_dir()]:
        raise ValueError(f"{path}: the run {missing[0]} is missing; put it back, or run the comparison again")
    if changed := [str(run) for part, run in runs.items() if saved["trained"][part] != part_digest(part, run)]:
        raise ValueError(f"{path}: {changed[0]} was trained again since; run the comparison again")
    limits = saved["limits"]
    base = load_segmenter(located_model(folder.resolve().parent, saved, "the model"), device, *limits)
    if base.fingerprint != saved["model_fingerprint"]:
        warnings.warn(f"{path}: measured with other weights, or on another kind of device, than these", stacklevel=2)
    merged = {part: run / "merged" for part, run in runs.items() if part in WEIGHTS}
    models = Models(base, merged, lambda weights: load_segmenter(weights, device, *limits), None)
    network = None
    if REWARD_NET in runs:
        network = RewardNetwork.from_pretrained(runs[REWARD_NET] / BEST_REWARD_NET).to(device)
    tools = load_tools(tuple(saved["prompts"]), runs)
    return DeployedMethod(method, saved["weights"], saved["parameter"], tools, models, network, saved_levels(saved))
