"""What a policy learns from: each image with the scores of its masks; as tables of a run and as contexts of others."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from rl_reward_network.atomic_io import read_json, write_json
from rl_reward_network.data.items import Sample
from rl_reward_network.env.mask_bank import MaskBank
from rl_reward_network.env.observation import EdgeFeatures, features_of, observe_image
from rl_reward_network.env.sa2va_finetune_env import PromptContext, prompt_rewards
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.inputs.loading import RunInputs, open_inputs
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.ppo import operations
from rl_reward_network.ppo.baselines import ridge_per_prompt
from rl_reward_network.report.metrics import SampleTable, measure_sample
from rl_reward_network.reward_training.stage import check_no_leak
from rl_reward_network.rewards.learned import ForegroundMaps, ImageScorer, in_domain
from rl_reward_network.rewards.metrics import dice
from rl_reward_network.rewards.table import IMAGE_REWARDS, MASK_REWARDS, PROMPT_REWARDS, RewardName, prompt_reward

TABLES = "tables.json"  # in the folder of a run
SEARCH = "search"  # the part of the tables on which sequences were searched: it trains the policy, and decides nothing
Tables = dict[str, list[PromptContext]]  # split, or `SEARCH` -> its images


@dataclass(frozen=True)
class Arms:
    """The masks of an image that a policy chooses from: one per prompt of the inputs, or per sequence of operations.

    Sequences, of which the first is empty, are applied to the mask of the default prompt. `vision_features`: whether
    the policy observes Sa2VA's pooled features.
    """

    inputs: RunInputs
    vision_features: bool
    sequences: tuple[operations.Edits, ...] = ()

    def of(self, image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The masks of an image, uint8 (H, W, 3), and what the policy observes: bool (P, H, W), float32 (F,)."""
        answer, guide = self.inputs.bank.answer(image), EdgeFeatures(image)
        soft = self.inputs.segmenter.upsample(answer.mask_logits, image.shape[:2])
        vision = answer.vision_features if self.vision_features else None
        if not self.sequences:
            return soft > 0.5, features_of(guide, vision)
        edited = operations.EditedImage(guide, soft[0])
        masks = np.stack([edited.mask(sequence) for sequence in self.sequences])
        return masks, features_of(guide, vision, soft[0])


def with_default_prompt(inputs: RunInputs) -> RunInputs:
    """The inputs with the default prompt alone, on whose mask operations are."""
    bank, prompts = inputs.bank, inputs.prompts[:1]
    return replace(inputs, prompts=prompts, bank=MaskBank(bank.folder, bank.segment, bank.fingerprint, prompts))


def search_sequences(
    inputs: RunInputs, samples: Sequence[Sample], maps: ForegroundMaps | None, reward: RewardName, length: int
) -> tuple[operations.Edits, ...]:
    """The sequences of operations that `find_sequences` finds on these samples, by a reward."""

    def edited(sample: Sample) -> operations.EditedImage:
        image, truth = sample.load_image(), sample.load_mask()
        scorer = None if maps is None else maps.scorer(image)
        return operations.EditedImage(
            EdgeFeatures(image),
            inputs.probabilities(image)[0],
            lambda mask: _reward_of(reward, mask, image, truth, scorer),
            sample.group_id,
        )

    images = [edited(sample) for sample in tqdm(samples, "images to search on", unit="image")]
    return operations.find_sequences(images, length)


def _reward_of(
    name: RewardName, mask: np.ndarray, image: np.ndarray, truth: np.ndarray | None, scorer: ImageScorer | None
) -> float:
    """The reward of one mask, bool (H, W); only what it consists of is measured."""
    columns, masks = PROMPT_REWARDS[name], mask[None]
    metrics = {column: of(masks, image) for column, of in IMAGE_REWARDS.items() if column in columns}
    if truth is not None:
        metrics |= {column: of(masks, truth[None]) for column, of in MASK_REWARDS.items() if column in columns}
    scores = np.zeros(1)
    if scorer is not None and "score" in columns:
        scores = scorer.quality(masks.astype(np.float32))["score"]
    return float(prompt_reward(name, scores, metrics)[0])


def prompt_tables(arms: Arms, samples: list[Sample], maps: ForegroundMaps | None, desc: str) -> list[PromptContext]:
    """Score each mask of each sample by the reward network, if any, and, where labelled, by all metrics.

    Masks are binary, as in deployment. A ValueError if no answer has a mask; `desc` names the progress bar.
    """
    tables = [_prompt_table(arms, sample, maps) for sample in tqdm(samples, desc=desc, unit="image")]
    arms.inputs.bank.check_masks()
    return tables


def _prompt_table(arms: Arms, sample: Sample, maps: ForegroundMaps | None) -> PromptContext:
    image, truth, own_dice = sample.load_image(), sample.load_mask(), None
    masks, features = arms.of(image)
    scores = np.full(len(masks), np.nan, dtype=np.float32)
    if maps is not None:
        scorer = maps.scorer(image)
        scores = scorer.quality(masks.astype(np.float32))["score"]
        if truth is not None and truth.any():
            own_dice = float(dice(scorer.own_mask[None], truth[None])[0])
    table = measure_sample(sample.sample_id, sample.group_id, scores, masks, truth)
    metrics = {**{name: of(masks, image) for name, of in IMAGE_REWARDS.items()}, **(table.metrics or {})}
    return PromptContext(table.sample_id, features, scores, metrics, table.group_id, bool(arms.sequences), own_dice)


def table_of(context: PromptContext) -> SampleTable:
    """Score and metrics of an image's masks, for the evaluation."""
    metrics = {name: context.metrics[name] for name in MASK_REWARDS if name in context.metrics}
    return SampleTable(context.sample_id, context.group_id, context.scores, metrics if context.labelled else None)


def training_images(tables: Tables) -> list[PromptContext]:
    """The images that train a policy."""
    return [*tables.get(SEARCH, []), *tables["policy"]]


def ridge_choices(train: Sequence[PromptContext], new: Sequence[PromptContext], reward: RewardName) -> np.ndarray:
    """int64 (M,): `ridge_per_prompt` on `new`, fitted to the images, observations and rewards of PPO's training."""
    rewards = np.stack([prompt_rewards(context, reward) for context in train])
    features, new_features = (np.stack([context.features for context in part]) for part in (train, new))
    return ridge_per_prompt(features, rewards, new_features)


def exchange_rewards(contexts: Sequence[PromptContext], seed: int) -> list[PromptContext]:
    """The same features, each with all numbers of another image's masks: a control, nothing can be learned.

    The mean reward of each arm over all images stays the same. Fewer than 2 images are a ValueError.
    """
    count = len(contexts)
    if count < 2:
        raise ValueError(f"--shuffle_rewards: {count} training image, expected 2 or more; give more data")
    order = np.random.default_rng(seed).permutation(count)
    donors = dict(zip(order.tolist(), np.roll(order, 1).tolist(), strict=True))
    return [replace(contexts[donors[index]], features=context.features) for index, context in enumerate(contexts)]


def save_tables(path: Path, tables: Tables) -> None:
    """Write features, scores and metrics of each mask on each image, by split; ids are hashes."""
    write_json(path, {name: [_to_json(context) for context in contexts] for name, contexts in tables.items()})


def load_tables(path: Path) -> Tables:
    """Read what `save_tables` wrote; a ValueError if the file is missing or not of this form."""
    try:
        return {name: [_from_json(entry) for entry in entries] for name, entries in read_json(path).items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a table of scores ({error!r}); run step 2 again") from error


def _to_json(context: PromptContext) -> dict[str, Any]:
    metrics = table_of(context).metrics
    return {
        "sample_id": context.sample_id,
        "group_id": context.group_id,
        "features": context.features.tolist(),
        "mask_features": context.mask_features,
        "scores": [None if np.isnan(score) else score for score in context.scores.tolist()],
        "own_dice": context.own_dice,
        "metrics": {name: values.tolist() for name, values in metrics.items()} if metrics else None,
        **{name: context.metrics[name].tolist() for name in IMAGE_REWARDS if name in context.metrics},
    }


def _from_json(entry: dict[str, Any]) -> PromptContext:
    metrics = {name: entry[name] for name in IMAGE_REWARDS if name in entry} | (entry["metrics"] or {})
    return PromptContext(
        entry["sample_id"],
        np.array(entry["features"], dtype=np.float32),
        np.array(entry["scores"], dtype=np.float32),  # None is NaN
        {name: np.array(values) for name, values in metrics.items()},
        entry["group_id"],
        entry.get("mask_features", False),
        entry["own_dice"],
    )


def contexts_from_model(config: RunConfig, reward_net: str | Path, images: int = 20) -> list[PromptContext]:
    """The contexts that step 2 would train on: Sa2VA's mask of each prompt, scored by a reward network.

    At most `images` images of the split `policy`; those outside the network's domain are left out, with a warning.
    Masks and the network's maps are stored below the output folder, and read from there the next time.

    Raises:
        ValueError: as `open_inputs`; the reward network is missing, or was trained on these patients.
    """
    inputs, network = open_inputs(config), RewardNetwork.from_pretrained(reward_net)
    check_no_leak(inputs.split, network, Path(reward_net), samples=inputs.samples)
    maps = ForegroundMaps.beside(config.output_dir / "contexts", network.to(config.device))
    samples = inputs.pick("policy", images)
    inside, check = in_domain(maps, (sample.load_image() for sample in samples))
    if check.outside:
        warnings.warn(check.sentence, stacklevel=2)
    samples = list(compress(samples, inside))
    return prompt_tables(Arms(inputs, vision_features=True), samples, maps, "scores")


def contexts_from_run(run_dir: str | Path, split: str = "policy") -> list[PromptContext]:
    """The contexts that a run of step 2, or of experiment 2, was trained (`policy`) or validated (`val`) on.

    Args:
        run_dir: `sa2va_rl_finetune_<time>` or `sa2va_post_process_<time>`; its tables.json is read, no model is loaded.
        split: `policy` or `val`, or, of experiment 2, `search`, the other training images.

    Raises:
        ValueError: tables.json is missing or damaged, or has no such split.
    """
    path = Path(run_dir) / TABLES
    tables = load_tables(path)
    if split not in tables:
        raise ValueError(f"split is {split!r}, expected one of {', '.join(tables)}, the splits in {path}")
    return tables[split]


def contexts_from_masks(
    images: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    scores: Sequence[np.ndarray] | np.ndarray,
    truths: Sequence[np.ndarray | None] | None = None,
) -> list[PromptContext]:
    """Contexts of N images, each with P candidate masks, one per action.

    Their `sample_id` are `image 0`, `image 1`, ...

    Args:
        images: N arrays uint8 (H, W, 3), RGB.
        masks: N arrays bool (P, H, W).
        scores: float (N, P) in [0, 1], the reward of each mask without labels.
        truths: N arrays bool (H, W), or None for an unlabelled image; without them all images are unlabelled.

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
    contexts = []
    for index, (image, candidates, row, truth) in enumerate(zip(images, masks, scores, truths, strict=True)):
        name, shape = f"image {index}", candidates.shape
        if shape[1:] != image.shape[:2]:
            raise ValueError(f"{name}: masks: got {shape}; expected (P, H, W) of the image, {image.shape[:2]}")
        table = measure_sample(name, name, np.asarray(row, dtype=np.float32), candidates, truth)
        features, metrics = observe_image(image), table.metrics or {}
        contexts.append(PromptContext(name, features, table.scores, metrics, name, image=image, masks=candidates))
    return contexts
