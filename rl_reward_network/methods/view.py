"""What a method works with: one image as the models see it, and the runs that were trained."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from rl_reward_network.env.mask_bank import FrozenAnswer, MaskBank
from rl_reward_network.inputs.segmenter import Sa2VASegmenter
from rl_reward_network.rewards.learned import ImageScorer

BASE = "base"  # the weights of the base model
WHOLE = "whole"  # the image itself, beside flipped and magnified copies
Loaded = TypeVar("Loaded")


@dataclass(frozen=True)
class FrozenModel:
    """A Sa2VA whose weights do not change."""

    answer: Callable[[np.ndarray, list[str]], FrozenAnswer]  # of an image uint8 (H, W, 3), and prompts
    upsample: Callable[[np.ndarray, tuple[int, int]], np.ndarray]  # logits (P, h, w), (H, W) -> float32 (P, H, W)


class Models:
    """Sa2VA with the weights of `folders`, by name; besides the base only those used last stay in memory."""

    def __init__(
        self,
        base: Sa2VASegmenter,
        folders: Mapping[str, Path],
        load: Callable[[Path], Sa2VASegmenter],
        bank: Path | None,
    ) -> None:
        self._folders, self._load, self._bank = folders, load, bank
        self._base = self._frozen(base)
        self._other: tuple[str, FrozenModel] | None = None

    def __call__(self, weights: str) -> FrozenModel:
        """The Sa2VA with these weights."""
        if weights == BASE:
            return self._base
        if self._other is None or self._other[0] != weights:
            self._other = None  # frees the memory before the next model is read
            self._other = weights, self._frozen(self._load(self._folders[weights]))
        return self._other[1]

    def _frozen(self, segmenter: Sa2VASegmenter) -> FrozenModel:
        if self._bank is None:
            return FrozenModel(segmenter.segment, segmenter.upsample)
        bank = partial(MaskBank, self._bank, segmenter.segment, segmenter.fingerprint)
        return FrozenModel(lambda image, prompts: bank(prompts).answer(image), segmenter.upsample)


class ImageView:
    """An image, uint8 (H, W, 3) RGB, and what models say about it, each computed once it is needed.

    `scorer` applies the reward network. `answers` of Sa2VA are by (prompt, copy of the image).
    """

    def __init__(
        self, image: np.ndarray, model: FrozenModel, scorer: Callable[[np.ndarray], ImageScorer] | None = None
    ) -> None:
        self.image, self._model, self._make_scorer = image, model, scorer
        self.has_scorer = scorer is not None
        self._scorer: ImageScorer | None = None
        self.answers: dict[tuple[str, str], FrozenAnswer] = {}

    @property
    def scorer(self) -> ImageScorer:
        """The reward network applied to this image; raises a ValueError where there is none."""
        if self._scorer is None:
            if self._make_scorer is None:
                raise ValueError("this method needs a reward network, and there is none; name one by --reward_net")
            self._scorer = self._make_scorer(self.image)
        return self._scorer

    def soft(self, prompts: Sequence[str]) -> np.ndarray:
        """float32 (P, H, W) in [0, 1]: the soft mask of each prompt."""
        return self.soft_of(self.image, prompts, WHOLE)

    def soft_of(self, image: np.ndarray, prompts: Sequence[str], copy: str) -> np.ndarray:
        """As `soft`, of a changed copy of the image, uint8 (h, w, 3), with a name of its own."""
        logits = [answer.mask_logits for answer in self._answered(image, prompts, copy)]
        return self._model.upsample(np.concatenate(logits), image.shape[:2])

    def features(self, prompt: str) -> np.ndarray:
        """float32 (C,): pooled features of Sa2VA's image encoder; they do not depend on the prompt."""
        return self._answered(self.image, [prompt], WHOLE)[0].vision_features

    def _answered(self, image: np.ndarray, prompts: Sequence[str], copy: str) -> list[FrozenAnswer]:
        if missing := [prompt for prompt in prompts if (prompt, copy) not in self.answers]:
            answer = self._model.answer(image, missing)
            for prompt, logits in zip(missing, answer.mask_logits, strict=True):
                self.answers[prompt, copy] = FrozenAnswer(logits[None], answer.vision_features)
        return [self.answers[prompt, copy] for prompt in prompts]


class Trained:
    """The finished runs that methods use, each read once it is needed; the first of the prompts is the default."""

    def __init__(self, prompts: Sequence[str], runs: Mapping[str, Path]) -> None:
        self.prompts, self.runs = tuple(prompts), runs
        self._loaded: dict[tuple[str, Callable[[Path], Any]], Any] = {}

    def load(self, run: str, loader: Callable[[Path], Loaded]) -> Loaded:
        """What `loader` reads from the folder of a run; it is read once."""
        if (run, loader) not in self._loaded:
            self._loaded[run, loader] = loader(self.runs[run])
        return cast(Loaded, self._loaded[run, loader])
