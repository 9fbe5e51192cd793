"""From an image file to the file of its mask: load Sa2VA, choose the prompt, segment, write, predict the quality."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.policies import ActorCriticPolicy
from tqdm import tqdm

from rl_reward_network.atomic_io import weights_fingerprint
from rl_reward_network.bit_depth import Levels
from rl_reward_network.data.images import DATA_SET, given_levels, load_for_model, saved_levels
from rl_reward_network.inputs.loading import located_model
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features
from rl_reward_network.models.sa2va.loading_sa2va import Dtype, load_sa2va_model
from rl_reward_network.models.sa2va.prediction_sa2va import Segmentation, image_features
from rl_reward_network.ppo.policy import deployed_prompt, load_policy, policy_folder, read_policy_config
from rl_reward_network.report.deployment import AS_IT_IS, Deployment
from rl_reward_network.reward_training.calibration import given_interval
from rl_reward_network.rewards.learned import ImageScorer
from rl_reward_network.run import REWARD_NET
from rl_reward_network.segment.files import Target, check_free, remove_mask, write_mask


@dataclass(frozen=True)
class Segmented:
    """The result for one image.

    Args:
        target: the files written; none where `segs` is 0.
        prompt, answer: input and output text of Sa2VA.
        share: of the image that the mask covers, [0, 1].
        segs: number of `[SEG]` in the answer; None where several answers make the mask.
        quality: Dice and score predicted by the reward network, as text, or why it gives none; empty without one.
    """

    target: Target
    prompt: str
    answer: str
    share: float
    segs: int | None
    quality: str


@dataclass(frozen=True, eq=False)
class Answered:
    """Sa2VA's answer to one prompt on one image.

    Args:
        prompt: that was used, or chosen.
        answer: text, special tokens kept.
        segs: number of `[SEG]` in the answer.
        soft: float32 (H, W) in [0, 1], maximum over the `[SEG]`; of a complement prompt that of its own prompt.
        mask: bool (H, W).
        scorer: the reward network applied to the image; None without one.
    """

    prompt: str
    answer: str
    segs: int
    soft: np.ndarray
    mask: np.ndarray
    scorer: ImageScorer | None


@dataclass(frozen=True)
class MaskMaker:
    """A loaded Sa2VA, with the policy that chooses the prompt and the reward network that predicts the mask's quality.

    Args:
        model, processor: of one checkpoint.
        max_new_tokens: longest answer.
        prompt: used where no policy chooses.
        trained: config.json of the policy's final_model; empty without a policy.
        policy: None where one prompt is used for all images.
        network: reward network, if there is any.
        levels: of grey images above 8 bit; None: percentiles of the image.
    """

    model: Any
    processor: Any
    max_new_tokens: int
    prompt: str
    trained: dict[str, Any]
    policy: ActorCriticPolicy | None
    network: RewardNetwork | None
    levels: Levels | None = None

    def __call__(self, target: Target) -> Segmented:
        """Choose the prompt, segment, write, predict the quality; without `[SEG]` nothing is written."""
        image, note = load_for_model(target.image, self.levels)
        if note:
            tqdm.write(note)
        result = self.answer(image, before=lambda prompt: check_free(target, prompt))
        if not result.segs:
            remove_mask(target)
            return Segmented(target, result.prompt, result.answer, 0.0, 0, "")
        write_mask(target, image, result.mask, result.prompt)
        share = float(result.mask.mean())
        return Segmented(target, result.prompt, result.answer, share, result.segs, self.quality(result))

    def answer(
        self, image: np.ndarray, prompt: str | None = None, before: Callable[[str], None] = lambda prompt: None
    ) -> Answered:
        """The answer to a prompt.

        Args:
            image: uint8 (H, W, 3), RGB.
            prompt: None is the one that the policy chooses, or, without a policy, the maker's own.
            before: called with the prompt before it is answered.
        """
        features = image_features(self.model, self.processor, [image])  # used for both the policy and the masks
        scorer = self.scorer(image)
        prompt = prompt or self._choose(image, features, scorer)
        before(prompt)
        answer, mask = self._segment(image, features, prompt)
        soft = answer.probabilities().max(axis=0, initial=0.0)
        return Answered(prompt, answer.answer, len(answer.mask_logits), soft, mask, scorer)

    def scorer(self, image: np.ndarray) -> ImageScorer | None:
        """The reward network applied to an image, uint8 (H, W, 3): its U-Nets run once; None without a network."""
        return None if self.network is None else ImageScorer(self.network, image)

    def quality(self, result: Answered) -> str:
        """Dice and score predicted by the reward network, as text, or why it gives none; empty without a network."""
        if result.scorer is None or self.network is None:
            return ""
        return predicted_quality(result.scorer, self.network.config, result.mask)

    def _segment(self, image: np.ndarray, features: Sam2Features, prompt: str) -> tuple[Segmentation, np.ndarray]:
        limits: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "sam_features": [features]}
        answer: Segmentation = self.model.segment([image], [prompt], self.processor, **limits)[0][0]
        joined = np.logical_or.reduce(answer.masks())  # several [SEG] are joined; none is an empty mask
        return answer, joined

    def _choose(self, image: np.ndarray, features: Sam2Features, scorer: ImageScorer | None) -> str:
        if self.policy is None:
            return self.prompt
        prompts, pooled = self.trained["prompts"], features.pooled()[0].cpu().float().numpy()

        def score(index: int) -> float:
            if scorer is None:
                raise ValueError(
                    "--policy: it tries several prompts, but its reward network is missing; give --reward_net"
                )
            mask = self._segment(image, features, prompts[index])[1].astype(np.float32)
            return float(scorer.quality(mask[None])["score"][0])

        return str(prompts[deployed_prompt(self.policy, self.trained, image, pooled, score)])


def predicted_quality(scorer: ImageScorer, config: RewardNetworkConfig, mask: np.ndarray) -> str:
    """The Dice that a reward network predicts for a mask of Sa2VA, its 90 % interval if one can be given, its score.

    Outside the network's domain, the reason instead.
    """
    if scorer.outside:
        return f"none, {scorer.outside}"
    quality, limits = scorer.quality(mask[None].astype(np.float32)), given_interval(config, scorer, mask)
    interval = " (no interval can be given)" if isinstance(limits, str) else " [{:.3f}, {:.3f}]".format(*limits)
    return f"{float(quality['dice'][0]):.3f}{interval}, score {float(quality['score'][0]):.3f}"


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
    limits = trained.get("inputs", NO_POLICY)
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
