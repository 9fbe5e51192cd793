"""Contexts for the environment: of a model on a data folder, of a run, or of images, masks and scores."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rl_reward_network.env.observation import observe_image
from rl_reward_network.env.sa2va_finetune_env import PromptContext
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import open_inputs
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.ppo.tables import TABLES, PromptTable, load_tables, prompt_tables
from rl_reward_network.report.metrics import measure_sample
from rl_reward_network.reward_training.stage import check_no_leak
from rl_reward_network.rewards.learned import ForegroundMaps


def contexts_from_model(config: RunConfig, reward_net: str | Path, images: int = 20) -> list[PromptContext]:
    """The contexts that step 2 would train on: Sa2VA's mask of each prompt, scored by a reward network.

    Masks and the network's maps are stored below the output folder, and read from there the next time.

    Args:
        config: model, data, output folder and device.
        reward_net: folder of a reward network that was trained on other patients of these data.
        images: most images of the split `policy`.

    Raises:
        ValueError: as `open_inputs`; the reward network is missing, or knows the patients.
    """
    inputs, network = open_inputs(config), RewardNetwork.from_pretrained(reward_net)
    check_no_leak(inputs.split, network, Path(reward_net))
    maps = ForegroundMaps.beside(config.output_dir / "contexts", network.to(config.device))
    samples = inputs.pick("policy", images)
    return [entry.context for entry in prompt_tables(inputs, samples, maps, "scores", vision_features=True)]


def contexts_from_run(run_dir: str | Path, split: str = "policy") -> list[PromptContext]:
    """The contexts that a run of step 2 was trained (`policy`) or validated (`val`) on.

    Args:
        run_dir: run folder `sa2va_rl_finetune_<time>`; its tables.json is read, no model is loaded.
        split: `policy` or `val`.

    Raises:
        ValueError: tables.json is missing or damaged, or has no such split.
    """
    path = Path(run_dir) / TABLES
    tables = load_tables(path)
    if split not in tables:
        raise ValueError(f"split is {split!r}, expected one of {', '.join(tables)}, the splits in {path}")
    return [entry.context for entry in tables[split]]


def contexts_from_masks(
    images: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    scores: Sequence[np.ndarray] | np.ndarray,
    truths: Sequence[np.ndarray | None] | None = None,
) -> list[PromptContext]:
    """Contexts of N images, each with P candidate masks, one per action.

    Args:
        images: N arrays uint8 (H, W, 3), RGB.
        masks: N arrays bool (P, H, W).
        scores: float (N, P) in [0, 1], the reward of each mask without labels.
        truths: N arrays bool (H, W), or None for an unlabelled image; without them all images are unlabelled.

    Returns:
        N contexts, whose `sample_id` are `image 0`, `image 1`, ...

    Raises:
        ValueError: shapes, dtypes or ranges do not fit; names the image.

    Example:
        >>> import gymnasium, numpy as np
        >>> from rl_reward_network.ppo.contexts import contexts_from_masks
        >>> rng = np.random.default_rng(0)
        >>> images = rng.integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
        >>> masks = rng.random((4, 3, 64, 64)) > 0.5  # of 3 prompts
        >>> contexts = contexts_from_masks(images, masks, scores=rng.random((4, 3)))
        >>> env = gymnasium.make("rl_reward_network/Sa2VAFinetune-v0", contexts=contexts)
        >>> observation, info = env.reset(seed=0)
        >>> observation, reward, terminated, truncated, info = env.step(2)
        >>> terminated, 0 <= reward <= 1
        (True, True)
    """
    truths = [None] * len(images) if truths is None else truths
    counts = {"images": len(images), "masks": len(masks), "scores": len(scores), "truths": len(truths)}
    if len(set(counts.values())) > 1:
        raise ValueError(f"lengths are {counts}, expected one mask array, score row and truth per image")
    names = [f"image {index}" for index in range(len(images))]
    for name, image, candidates in zip(names, images, masks, strict=True):
        if candidates.shape[1:] != image.shape[:2]:
            raise ValueError(
                f"{name}: masks: got {candidates.shape}; expected (P, H, W) of the image, {image.shape[:2]}"
            )
    return [
        PromptTable(
            observe_image(image), measure_sample(name, name, np.asarray(row, dtype=np.float32), candidates, truth)
        ).context
        for name, image, candidates, row, truth in zip(names, images, masks, scores, truths, strict=True)
    ]
