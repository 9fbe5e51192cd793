"""The folders best/ and cheapest/ of a comparison: a method that `sa2va-rl segment --run` applies to new images."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_reward_network.atomic_io import read_json, whole_folder, write_json
from rl_reward_network.env.mask_bank import NO_MASK_LOGIT
from rl_reward_network.inputs.loading import RunInputs, located_model
from rl_reward_network.inputs.segmenter import load_segmenter
from rl_reward_network.methods.measure import MethodResult
from rl_reward_network.methods.methods import METHODS, WEIGHTS, Method
from rl_reward_network.methods.training import MERGED, REWARD_NET, digest
from rl_reward_network.methods.view import ImageView, Models, Trained
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.rewards.learned import ImageScorer
from rl_reward_network.run import BEST_REWARD_NET, portable

DEPLOYED = "method.json"


@dataclass(frozen=True)
class DeployedMethod:
    """A method that is ready for new images.

    Args:
        method: of the table.
        weights: of Sa2VA, by name.
        parameter: of the method.
        trained: the runs that it uses.
        models: Sa2VA by name of its weights.
        network: reward network; None where the method has none.
        saved: the content of its file.
    """

    method: Method
    weights: str
    parameter: float | None
    trained: Trained
    models: Models
    network: RewardNetwork | None
    saved: dict[str, Any]

    def mask(self, image: np.ndarray) -> np.ndarray | None:
        """bool (H, W): the mask of an image, uint8 (H, W, 3); None where Sa2VA was asked, and no answer has one."""
        network = self.network
        scorer = None if network is None else lambda pixels: ImageScorer(network, pixels)
        view = ImageView(image, self.models(self.weights), scorer)
        mask = np.asarray(self.method.predict(view, self.trained, self.parameter) > 0.5)
        answers = [answer.mask_logits for answer in view.answers.values()]
        return None if answers and all((logits == NO_MASK_LOGIT).all() for logits in answers) else mask


def save_deployed(folder: Path, inputs: RunInputs, result: MethodResult, runs: Mapping[str, Path], run: Path) -> None:
    """Write a method into `folder`, inside the folder of the comparison.

    Runs are named by paths relative to the comparison, so that the project can be moved as a whole; none is copied.

    Args:
        folder: best/ or cheapest/; one that exists is replaced.
        inputs: of the comparison.
        result: of the method.
        runs: that the method needs.
        run: folder of the comparison.
    """
    method = next(method for method in METHODS if method.name == result.method)
    model = Path(inputs.config.model_path)
    limits = inputs.prompt_config
    description = {
        "method": method.name,
        "title": method.title,
        "weights": result.weights,
        "parameter": result.parameter,
        "runs": {name: portable(path, run) for name, path in runs.items()},
        "trained": {name: digest(path) for name, path in runs.items()},
        "model_fingerprint": inputs.segmenter.fingerprint,
        "inputs": {"model_path": portable(model, run) if model.exists() else inputs.config.model_path},
        "limits": [
            limits.segment_batch,
            limits.max_new_tokens,
            limits.max_tiles,
            inputs.config.dtype,
            inputs.config.image_resize,
        ],
        "prompts": list(inputs.prompts),
        "grey_levels": inputs.grey_levels,
    }
    with whole_folder(folder) as temporary:
        write_json(temporary / DEPLOYED, description)


def load_deployed(folder: Path, device: str) -> DeployedMethod:
    """Load the method of `best/` or `cheapest/`.

    Raises:
        ValueError: the folder holds no method, or a run or the model that it needs is missing or was trained again.
    """
    path, comparison = folder / DEPLOYED, folder.resolve().parent
    if not path.exists():
        raise ValueError(
            f"--run {folder}: holds no {DEPLOYED}; name the folder best or cheapest of a compare_<time> folder"
        )
    saved: dict[str, Any] = read_json(path)
    method = next((method for method in METHODS if method.name == saved.get("method")), None)
    if method is None:
        raise ValueError(f"{path}: method {saved.get('road')!r} is unknown in this version; run the comparison again")
    runs = {name: (comparison / saved_path).resolve() for name, saved_path in saved["runs"].items()}
    if missing := [str(run) for run in runs.values() if not run.is_dir()]:
        raise ValueError(f"{path}: the run {missing[0]} is missing; put it back, or run the comparison again")
    if changed := [str(run) for name, run in runs.items() if saved["trained"][name] != digest(run)]:
        raise ValueError(f"{path}: {changed[0]} was trained again since; run the comparison again")
    limits = saved["limits"]
    base = load_segmenter(located_model(comparison, saved, "the model"), device, *limits)
    if base.fingerprint != saved["model_fingerprint"]:
        warnings.warn(f"{path}: measured with other weights, or on another kind of device, than these", stacklevel=2)
    merged = {name: run / MERGED for name, run in runs.items() if name in WEIGHTS}
    models = Models(base, merged, lambda weights: load_segmenter(weights, device, *limits), None)
    network = None
    if REWARD_NET in runs:
        network = RewardNetwork.from_pretrained(runs[REWARD_NET] / BEST_REWARD_NET).to(device)
    trained = Trained(saved["prompts"], runs)
    return DeployedMethod(method, saved["weights"], saved["parameter"], trained, models, network, saved)
