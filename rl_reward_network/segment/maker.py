"""From an image file to the file of its mask: choose the prompt, run Sa2VA, write, predict the quality."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from stable_baselines3.common.policies import ActorCriticPolicy
from tqdm import tqdm

from rl_reward_network.data.images import load_for_model
from rl_reward_network.depth import Levels
from rl_reward_network.models.reward_network import RewardNetwork, RewardNetworkConfig
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features
from rl_reward_network.models.sa2va.prediction_sa2va import Segmentation, image_features
from rl_reward_network.ppo.deploy import deployed_prompt
from rl_reward_network.reward_training.calibration import given_interval
from rl_reward_network.rewards.learned import ImageScorer
from rl_reward_network.segment.files import Target, check_free, write_mask


@dataclass(frozen=True)
class Segmented:
    """The result for one image.

    Args:
        target: the files written.
        prompt, answer: input and output text of Sa2VA.
        share: of the image that the mask covers, [0, 1].
        segs: number of `[SEG]` in the answer; None where several answers make the mask.
        quality: Dice and score predicted by the reward network, as text; empty without a network.
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
        """Choose the prompt, segment, write, predict the quality."""
        image, note = load_for_model(target.image, self.levels)
        if note:
            tqdm.write(note)
        result = self.answer(image, before=lambda prompt: check_free(target, prompt))
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
        features = image_features(self.model, self.processor, image)  # used for both the policy and the masks
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
        """Dice and score predicted by the reward network, as text; empty without a network."""
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
    """The Dice that a reward network predicts for a mask of Sa2VA, its 90 % interval if one can be given, its score."""
    quality = scorer.quality(mask[None].astype(np.float32))
    limits = given_interval(config, quality["members"][..., 0])
    interval = " (no interval can be given)" if limits is None else " [{:.3f}, {:.3f}]".format(*limits[0])
    return f"{float(quality['dice'][0]):.3f}{interval}, score {float(quality['score'][0]):.3f}"
