"""Labelled samples with the masks of every prompt: training and test data of the reward network."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from rl_reward_network.data.items import Sample
from rl_reward_network.inputs.loading import RunInputs
from rl_reward_network.reward_training.masks import RewardExample


@dataclass(frozen=True)
class RewardExamples:
    """Labelled samples with every prompt's mask; can be iterated several times, with one image in memory at a time.

    Args:
        inputs: the segmenter and its mask bank.
        samples: labelled samples.
        desc: name of the progress bar.
    """

    inputs: RunInputs
    samples: list[Sample]
    desc: str

    def __iter__(self) -> Iterator[RewardExample]:
        """One example after the other, under a progress bar."""
        for sample in tqdm(self.samples, desc=self.desc, unit="image"):
            image, truth = labelled_pair(sample)
            yield RewardExample(image, truth, self.inputs.probabilities(image) > 0.5, sample.group_id)


def labelled_pair(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """Image uint8 (H, W, 3) and true mask bool (H, W) of a labelled sample.

    Raises:
        ValueError: the sample has no mask, or a file cannot be read.
    """
    image, truth = sample.load_image(), sample.load_mask()
    if truth is None:
        raise ValueError(f"sample {sample.sample_id} has no mask; step 1 learns from labelled images")
    return image, truth
