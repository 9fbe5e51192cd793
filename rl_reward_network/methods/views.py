"""One image as the roads see it: the soft masks of Sa2VA and the reward network, each computed when it is needed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rl_reward_network.env.mask_bank import FrozenAnswer
from rl_reward_network.rewards.learned import ImageScorer

WHOLE = "whole"  # the image as it is, beside flipped and magnified copies


@dataclass(frozen=True)
class FrozenModel:
    """A Sa2VA whose weights do not change.

    Args:
        answer: (image uint8 (H, W, 3), prompts) -> `FrozenAnswer`; from the mask bank or from the model itself.
        upsample: (logits float32 (P, h, w), (H, W)) -> probabilities float32 (P, H, W).
    """

    answer: Callable[[np.ndarray, list[str]], FrozenAnswer]
    upsample: Callable[[np.ndarray, tuple[int, int]], np.ndarray]


class ImageView:
    """An image, and what models say about it.

    Args:
        image: uint8 (H, W, 3), RGB.
        model: name of weights -> the Sa2VA with these weights.
        scorer: image -> the reward network applied to it.

    """

    def __init__(
        self,
        image: np.ndarray,
        model: Callable[[str], FrozenModel],
        scorer: Callable[[np.ndarray], ImageScorer] | None = None,
    ) -> None:
        self.image, self._model, self._make_scorer = image, model, scorer
        self._scorer: ImageScorer | None = None
        self._answers: dict[tuple[str, str, str], FrozenAnswer] = {}

    @property
    def answers(self) -> set[tuple[str, str, str]]:
        """The answers of Sa2VA that were asked for, as (weights, prompt, copy of the image)."""
        return set(self._answers)

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of the image."""
        return self.image.shape[0], self.image.shape[1]

    @property
    def has_scorer(self) -> bool:
        """Whether there is a reward network."""
        return self._make_scorer is not None

    @property
    def scorer(self) -> ImageScorer:
        """The reward network applied to this image.

        Raises:
            ValueError: there is no reward network.
        """
        if self._scorer is None:
            if self._make_scorer is None:
                raise ValueError("this road needs a reward network, and there is none; name one by --reward_net")
            self._scorer = self._make_scorer(self.image)
        return self._scorer

    def soft(self, weights: str, prompts: Sequence[str]) -> np.ndarray:
        """float32 (P, H, W) in [0, 1]: the soft mask of each prompt."""
        return self.soft_of(self.image, weights, prompts, WHOLE)

    def soft_of(self, image: np.ndarray, weights: str, prompts: Sequence[str], copy: str) -> np.ndarray:
        """As `soft`, of a changed copy of the image, uint8 (h, w, 3), with a name of its own."""
        logits = [answer.mask_logits for answer in self._answered(image, weights, prompts, copy)]
        return self._model(weights).upsample(np.concatenate(logits), image.shape[:2])

    def features(self, weights: str, prompt: str) -> np.ndarray:
        """float32 (C,): pooled features of Sa2VA's image encoder; they do not depend on the prompt."""
        (answer,) = self._answered(self.image, weights, [prompt], WHOLE)
        return answer.vision_features

    def _answered(self, image: np.ndarray, weights: str, prompts: Sequence[str], copy: str) -> list[FrozenAnswer]:
        """The answer to each prompt; each is computed once."""
        missing = [prompt for prompt in prompts if (weights, prompt, copy) not in self._answers]
        if missing:
            answer = self._model(weights).answer(image, missing)
            for prompt, logits in zip(missing, answer.mask_logits, strict=True):
                self._answers[weights, prompt, copy] = FrozenAnswer(logits[None], answer.vision_features)
        return [self._answers[weights, prompt, copy] for prompt in prompts]
