"""From an image file to the file of its mask: choose the prompt, ask Sa2VA, write, judge."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from stable_baselines3.common.policies import ActorCriticPolicy
from tqdm import tqdm

from rl_reward_network.data.images import load_for_model
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.models.sa2va.grounding_sa2va import Sam2Features
from rl_reward_network.models.sa2va.prediction_sa2va import Segmentation, image_features
from rl_reward_network.prompt_policy.policy import deployed_prompt
from rl_reward_network.reward_training.calibration import half_width
from rl_reward_network.rewards.learned import predict_mask_quality, score_masks
from rl_reward_network.segment.files import Target, check_free, write_mask


@dataclass(frozen=True)
class Segmented:
    """What came of an image.

    Args:
        target: where its mask is now.
        prompt, answer: what was asked, and Sa2VA's words.
        share: of the image that the mask covers, [0, 1].
        segs: number of `[SEG]` in the answer.
        quality: the reward network's opinion in words; empty without one.
    """

    target: Target
    prompt: str
    answer: str
    share: float
    segs: int
    quality: str


@dataclass(frozen=True)
class MaskMaker:
    """A loaded model with what chooses its prompt and judges its masks.

    Args:
        model, processor: of one checkpoint.
        max_new_tokens: longest answer.
        prompt: what is asked where no policy chooses.
        trained: config.json of the policy's final_model; empty without one.
        policy: what it deploys; None where that is one prompt.
        network: the judge, if there is any.
        white_level: what is white in a grey image above 8 bit; None: nobody says.
    """

    model: Any
    processor: Any
    max_new_tokens: int
    prompt: str
    trained: dict[str, Any]
    policy: ActorCriticPolicy | None
    network: RewardNetwork | None
    white_level: int | None = None

    def __call__(self, target: Target) -> Segmented:
        """Choose the prompt, ask, judge and write."""
        image, said = load_for_model(target.image, self.white_level)
        if said:
            tqdm.write(said)
        features = image_features(self.model, self.processor, image)  # both the policy and the masks are made of them
        prompt = self._choose(image, features)
        check_free(target, prompt)
        answer, mask = self._ask(image, features, prompt)
        write_mask(target, image, mask, prompt)
        quality = "" if self.network is None else predicted_quality(self.network, image, mask)
        return Segmented(target, prompt, answer.answer, float(mask.mean()), len(answer.mask_logits), quality)

    def _ask(self, image: np.ndarray, features: Sam2Features, prompt: str) -> tuple[Segmentation, np.ndarray]:
        limits: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "sam_features": [features]}
        answer: Segmentation = self.model.segment([image], [prompt], self.processor, **limits)[0][0]
        return answer, np.logical_or.reduce(answer.masks())  # several [SEG] are joined; none is an empty mask

    def _choose(self, image: np.ndarray, features: Sam2Features) -> str:
        if self.policy is None:
            return self.prompt
        prompts, pooled = self.trained["prompts"], features.pooled()[0].cpu().float().numpy()

        def score(tried: int) -> float:
            if self.network is None:
                raise ValueError("--policy: tries several prompts, but its reward network is gone; give --reward_net")
            mask = self._ask(image, features, prompts[tried])[1].astype(np.float32)
            return float(score_masks(self.network, image, mask[None])[0])

        return str(prompts[deployed_prompt(self.policy, self.trained, image, pooled, score)])


def predicted_quality(network: RewardNetwork, image: np.ndarray, mask: np.ndarray) -> str:
    """The Dice that a reward network predicts, with its 90 % interval, and its score."""
    judged = predict_mask_quality(network, image, mask[None].astype(np.float32))
    dice, half = float(judged["dice"][0]), float(half_width(judged["members"][..., 0], network.config.interval)[0])
    low, high = max(0.0, dice - half), min(1.0, dice + half)
    return f"{dice:.3f} [{low:.3f}, {high:.3f}], score {float(judged['score'][0]):.3f}"
