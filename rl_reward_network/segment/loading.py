"""Load Sa2VA for `sa2va-rl segment`, and a prompt policy and a reward network if they are named."""

import warnings
from dataclasses import replace
from pathlib import Path

import torch

from rl_reward_network.artefacts import weights_fingerprint
from rl_reward_network.data.images import DATA_SET, given_levels, saved_levels
from rl_reward_network.depth import Levels
from rl_reward_network.inputs.loading import located_model
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.loading_sa2va import Dtype, load_sa2va_model
from rl_reward_network.ppo.deploy import load_policy, policy_folder, read_policy_config
from rl_reward_network.report.deployment import AS_IT_IS, Deployment
from rl_reward_network.run import REWARD_NET
from rl_reward_network.segment.maker import MaskMaker

NO_POLICY = {"max_tiles": None, "max_new_tokens": 64}  # limits of an answer where no run has set them


def load_mask_maker(
    model_path: str | None,
    prompt: str,
    policy: Path | None = None,
    reward_net: Path | None = None,
    device: str | None = None,
    max_tiles: int | None = None,
    bit_depth: int | None = None,
    dtype: Dtype | None = None,
    image_resize: str | None = None,
) -> MaskMaker:
    """Load policy, reward network and model, in this order: the largest last.

    Args:
        model_path: Sa2VA folder or hub id; None is the model of the policy's run, or the embedded one.
        prompt: used where no policy chooses.
        policy: a run of step 2, or its final_model folder.
        reward_net: folder; None is the policy's own, if there is one.
        device: None is the first GPU if there is one, else the CPU.
        max_tiles: most tiles of an image; None is as in the policy's training, or as the model's config says.
        bit_depth: of grey images above 8 bit.
        dtype: of Sa2VA's weights; None is as in the policy's training, or "auto".
        image_resize: of a Qwen-VL; None is as in the policy's training, or as the model's config says.

    Raises:
        ValueError: policy, reward network, model or `bit_depth` are refused.
    """
    device = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    folder = None if policy is None else policy_folder(policy)
    trained = {} if folder is None else read_policy_config(folder)
    if folder is not None and not trained["deployment"]:
        raise ValueError(f"{folder}: a row of a report, not a policy to use; name the run {folder.parents[1]}")
    chooser = None
    if folder is not None:
        deployment = Deployment.from_json(trained["deployment"])
        print(f"the run deploys {deployment.words('best fixed prompt')}, because {deployment.reason}")
        chooser = load_policy(folder) if deployment.choice == "policy" else None
        prompt = str(trained["prompts"][deployment.best_fixed if deployment.choice == "fixed" else AS_IT_IS])
    network = load_reward_network(reward_net, folder, device)
    limits = trained.get("world", NO_POLICY)
    path = model_path or default_model(policy)
    model, processor = load_sa2va_model(path, device, dtype=dtype or limits.get("dtype", "auto"))
    tiles = limits["max_tiles"] if max_tiles is None else max_tiles
    processor.max_tiles = tiles or processor.max_tiles
    processor.set_image_resize(image_resize or limits.get("image_resize"))
    weights = weights_fingerprint(model) if trained or network else ""
    if trained and not trained["model_fingerprint"].startswith(weights):
        warnings.warn(f"{folder}: trained on other weights, or on another kind of device, than these", stacklevel=2)
    of_others = network and not str(network.training_info.get("model_fingerprint")).startswith(weights)
    if network and of_others and network.config.intervals:
        # Masks of a model that was trained on the score are worse than predicted.
        print("intervals are left out: they were fitted to masks of other weights, or of another kind of device")
        network.config = replace(network.config, intervals={})
    levels = image_levels(bit_depth, saved_levels(limits))
    return MaskMaker(model, processor, limits["max_new_tokens"], prompt, trained, chooser, network, levels)


def default_model(policy: Path | None) -> str:
    """The model of the policy's run; without a policy the embedded one.

    Raises:
        ValueError: the run's model is not where it was.
    """
    if policy is None:
        return DEFAULT_MODEL
    folder = policy_folder(policy)
    return located_model(folder.parent, read_policy_config(folder), "--model_path")


def load_reward_network(path: Path | None, policy: Path | None, device: str) -> RewardNetwork | None:
    """The reward network at `path`, else the one in the run of the final_model folder `policy`; None if it has none."""
    if path is None and policy is not None and (policy.parent / REWARD_NET).exists():
        path = policy.parent / REWARD_NET
    return None if path is None else RewardNetwork.from_pretrained(path).to(device)


def image_levels(bit_depth: int | None, trained: dict[str, Levels] | None) -> Levels | None:
    """The levels of a grey image above 8 bit; None: percentiles of the image.

    Args:
        bit_depth: of the images.
        trained: levels of the policy's data; None without a policy, or if its images have 8 bit.

    Raises:
        ValueError: both are given, or `bit_depth` is not 8 to 16.
    """
    if trained and bit_depth is not None:
        raise ValueError(f"--bit_depth {bit_depth}: it was trained or measured where {trained[DATA_SET]}; leave it out")
    levels = given_levels(bit_depth, trained)
    return levels[DATA_SET] if levels else None
