"""A reward network that is fitted again while Sa2VA trains on its score.

A model that is trained on the score of a frozen network moves to masks that the network never saw, where the score may
be wrong. So every few optimisation steps each member trains a little more: half of its windows are of the labelled
images that it knows, half of images that the model, Sa2VA with its current weights, has segmented. Of these masks only
those count on which the members agree and whose score is not low. The re-fitted network takes the earlier one's place
only if its own segmentation of the labelled validation images is not worse than that of the network that the run began
with; otherwise nothing changes.

The level curves stay as they were calibrated: a new calibration needs the mask bank of the frozen segmenter, which a
GRPO run does not open. The intervals of the Dice were of the earlier weights, so a saved re-fitted network has none.

Source: RL4Seg (MICCAI 2024, arXiv 2406.17902) alternates between the policy and a reward network that is trained anew
on the policy's segmentations; it takes those that anatomical metrics find valid, and predicts errors of a mask, where
ours are those that an ensemble agrees on, and the members segment. TEMPO (arXiv 2604.19295) calibrates its critic again
on labelled data between rounds; the labelled half of each batch is this step here.
Axes: N masks, K members, H W image.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback

from rl_reward_network.data.splits import select, spread
from rl_reward_network.data.windows import WINDOW, LabelledImages, draw_batch, window_side
from rl_reward_network.grpo.image_context import Mask, open_batch
from rl_reward_network.grpo.inputs import GRPOInputs, check_prompts, count_images, validation_prompts
from rl_reward_network.grpo.measure import batch_size
from rl_reward_network.grpo.prompts import GRPOPrompt
from rl_reward_network.grpo.ranks import from_first_rank
from rl_reward_network.grpo.trainable import mixed_precision
from rl_reward_network.grpo.trainer import Sa2VAGRPOTrainer
from rl_reward_network.inputs.config import pick_fields
from rl_reward_network.models.reward_network import RewardNetwork, UNet
from rl_reward_network.reward_training.train import RewardTrainingConfig, own_scores, train_step
from rl_reward_network.rewards.learned import ForegroundMaps, device_of
from rl_reward_network.run import clock

MOST_PROMPTS = 64  # that the model segments for one re-fit
STEPS = 40  # optimiser steps of each member in one re-fit, a fifth of a quick training
RATE = 0.1  # share of the peak learning rate: the members are trained already
TOLERANCE = 0.005  # Dice that it may lose against the initial network: less is noise of a few images
NEEDED = ("settings", "seed", "train_groups")  # of a network's training_info


@dataclass(frozen=True)
class RefitPrompts:
    """The labelled images of a re-fit, which are read again for each one.

    Args:
        labelled: those that the network was trained on.
        val: those that decide whether the re-fitted network is kept.
    """

    labelled: list[GRPOPrompt]
    val: list[GRPOPrompt]


def refit_prompts(inputs: GRPOInputs, network: RewardNetwork) -> RefitPrompts:
    """The images that the network was trained on, within its budget of labels, and the labelled validation images.

    Raises:
        ValueError: there are none of a kind, one cannot be read, or the network does not say what it was trained on.
    """
    info = network.training_info
    if missing := [name for name in NEEDED if name not in info]:
        raise ValueError(f"refit_steps: the reward network has no {missing[0]} in its config.json; train one anew")
    own = select([prompt for prompt in inputs.prompts if prompt.labelled], inputs.split, "reward")
    own = spread(own, info["settings"]["images"], info["seed"])  # as its training picked them
    known = set(info["train_groups"])
    prompts = RefitPrompts(
        [prompt for prompt in own if prompt.group_id in known],
        [prompt for prompt in validation_prompts(inputs) if prompt.labelled],
    )
    for split, found in (("reward", prompts.labelled), ("val", prompts.val)):
        if not found:
            raise ValueError(
                f"refit_steps: the reward network knows no labelled image of the {split} split; train it on these data "
                "(sa2va-rl reward quick), annotate some, or leave refit_steps out"
            )
    check_prompts([*prompts.labelled, *prompts.val])
    return prompts


def labelled_images(prompts: Sequence[GRPOPrompt]) -> LabelledImages:
    """Labelled prompts in memory.

    Raises:
        ValueError: a file cannot be read.
    """
    images, truths = zip(*(prompt.load() for prompt in prompts), strict=True)
    known = [truth for truth in truths if truth is not None]
    return LabelledImages(list(images), known, [prompt.group_id for prompt in prompts])


@torch.no_grad()
def student_masks(trainer: Sa2VAGRPOTrainer, prompts: Sequence[GRPOPrompt]) -> tuple[list[np.ndarray], list[Mask]]:
    """Images uint8 (H, W, 3) and the model's masks of them, bool (H, W); None for an answer without `[SEG]`."""
    model, cache = trainer.sa2va, trainer.rollout_generator.cache
    images: list[np.ndarray] = []
    masks: list[Mask] = []
    size = batch_size(model.config, cache.processor.max_tiles)
    with mixed_precision(model):
        for start in range(0, len(prompts), size):
            batch = open_batch(prompts[start : start + size], cache)
            context, questions = batch.context(model, trainer.args.rows_at_once), [p.question for p in batch.prompts]
            images += batch.images
            masks += batch.masks(context, range(len(questions)), questions)
    return images, [None if mask is None else mask > 0.5 for mask in masks]


def trusted(scores: np.ndarray, spreads: np.ndarray) -> np.ndarray:
    """Which masks become pseudo-labels, bool (N,).

    Args:
        scores: float (N,), of the network; those below the median are left out.
        spreads: float (N,), standard deviation between the members' scores; those above the median are left out.
    """
    if not len(scores):
        return np.zeros(0, dtype=bool)
    chosen: np.ndarray = (spreads <= np.median(spreads)) & (scores >= np.median(scores))
    return chosen


def pseudo_labelled(maps: ForegroundMaps, images: Sequence[np.ndarray], masks: Sequence[Mask]) -> LabelledImages:
    """The images uint8 (H, W, 3) whose masks bool (H, W) are trusted, with these masks.

    Missing and empty masks have no part: those of a model that has collapsed would agree with each other. Nor have
    images outside the network's domain, whose scores are NaN: re-fitted weights see other things than the first ones.
    """
    pairs = [(image, mask) for image, mask in zip(images, masks, strict=True) if mask is not None and mask.any()]
    quality = [maps.scorer(image).quality(mask[None].astype(np.float32)) for image, mask in pairs]
    known = [not np.isnan(one["score"][0]) for one in quality]
    pairs, quality = list(compress(pairs, known)), list(compress(quality, known))
    scores = np.array([one["score"][0] for one in quality])
    spreads = np.array([one["member_scores"][0].std() for one in quality])
    kept = [pair for pair, join in zip(pairs, trusted(scores, spreads), strict=True) if join]
    return LabelledImages([image for image, _ in kept], [mask for _, mask in kept])


def fitted_again(
    network: RewardNetwork,
    labelled: LabelledImages,
    pseudo: LabelledImages,
    config: RewardTrainingConfig,
    seed: Sequence[int],
) -> RewardNetwork:
    """A copy of the network after a few steps on batches of both kinds, half of each; the network stays as it is.

    Loss, windows, optimiser and BatchNorm are those of its training, at full resolution and a tenth of the peak
    learning rate. The optimiser begins anew, so that a batch and its step depend on weights and seed alone.

    Args:
        network: frozen.
        labelled, pseudo: at least one image each.
        config: of its training, with the device.
        seed: of the windows, also of this round.

    Raises:
        ValueError: the loss is not finite.
    """
    copy = deepcopy(network).requires_grad_(True)
    side, half = window_side(labelled.images + pseudo.images, WINDOW, 2 * network.config.stride), config.batch_size // 2
    for index, member in enumerate(copy.members):
        assert isinstance(member, UNet)
        rate = RATE * config.learning_rate
        optimizer = torch.optim.AdamW(member.parameters(), lr=rate, weight_decay=config.weight_decay)
        for step in range(1, STEPS + 1):
            rng = np.random.default_rng([*seed, index, step])
            parts = [draw_batch(data, max(1, half), side, rng) for data in (labelled, pseudo)]
            images, truths = (torch.cat(both) for both in zip(*parts, strict=True))
            train_step(member, optimizer, (images, truths), config, step)
    return copy.eval().requires_grad_(False)


class Round(NamedTuple):
    """The result of one re-fit.

    Args:
        before, after: Dice of the earlier and of the re-fitted network's own segmentation of validation images.
        pseudo_labels: number of pseudo-labelled images; with none there is no re-fit.
        weights: of the re-fitted network, on the CPU; None if the earlier one stays.
    """

    before: float
    after: float
    pseudo_labels: int
    weights: dict[str, Tensor] | None

    @property
    def curves(self) -> dict[str, float]:
        """Tag -> value."""
        return {
            "refit/val_dice_before": self.before,
            "refit/val_dice_after": self.after,
            "refit/accepted": float(self.weights is not None),
            "refit/pseudo_labels": float(self.pseudo_labels),
        }


class RefitCallback(TrainerCallback):
    """Fit the reward network again every `refit_steps` optimisation steps, but for the last one.

    Rewards, gradient, pairs and validation share the network, whose weights are replaced in place. The first process
    fits, and all take its weights.

    Args:
        trainer: whose model segments its own prompts.
        maps: of the reward network.
        prompts: with labels.
    """

    def __init__(self, trainer: Sa2VAGRPOTrainer, maps: ForegroundMaps, prompts: RefitPrompts) -> None:
        assert isinstance(maps.network, RewardNetwork)
        self.trainer, self.maps, self.network, self.prompts = trainer, maps, maps.network, prompts
        self.original = self.network.fingerprint
        self.initial = own_scores(self.network, labelled_images(prompts.val))["dice"]  # small losses must not add up
        own = {"seed": trainer.args.seed, "device": str(device_of(self.network))}
        self.config = pick_fields(RewardTrainingConfig, self.network.training_info["settings"] | own)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """One re-fit, if it is due and training goes on."""
        trainer, step = self.trainer, state.global_step
        if control.should_training_stop or step >= state.max_steps or step % args.refit_steps:
            return
        with clock(trainer.phases, "refit"):
            result = from_first_rank(trainer.accelerator, lambda: self._fit(step))
        if result.weights is not None:
            self.load_state_dict(result.weights)
        trainer.log_now(result.curves)

    def _fit(self, step: int) -> Round:
        """One re-fit; neither the model nor the network is changed."""
        seed, prompts = [self.trainer.args.seed, step], self.trainer.prompts
        order = np.random.default_rng(seed).permutation(len(prompts))[:MOST_PROMPTS]
        pseudo = pseudo_labelled(self.maps, *student_masks(self.trainer, [prompts[index] for index in order]))
        val = labelled_images(self.prompts.val)
        before, count = own_scores(self.network, val)["dice"], len(pseudo.images)
        if not count:
            return Round(before, before, 0, None)
        network = fitted_again(self.network, labelled_images(self.prompts.labelled), pseudo, self.config, seed)
        after = own_scores(network, val)["dice"]
        return Round(before, after, count, _weights(network) if after >= self.initial - TOLERANCE else None)

    def state_dict(self) -> dict[str, Tensor]:
        """The network's weights, for a checkpoint."""
        return _weights(self.network)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Give the network these weights, and drop its maps."""
        self.network.load_state_dict(state)
        self.maps.forget()

    @property
    def labels(self) -> dict[str, int]:
        """Split -> labelled images that a re-fit learns from."""
        return {"reward": count_images(self.prompts.labelled)}

    def save(self, folder: Path) -> None:
        """Write the re-fitted network, unless no re-fit was accepted.

        Its masks came from all patients of the training, so it counts as trained on them, and as chosen on those of the
        validation: no later run may take it for a judge of theirs.
        """
        if self.network.fingerprint == self.original:
            return
        info = dict(self.network.training_info)
        for name, used in (("train_groups", self.trainer.prompts), ("val_groups", self.prompts.val)):
            info[name] = sorted({*info.get(name, ()), *(prompt.group_id for prompt in used)})
        network = RewardNetwork(replace(self.network.config, intervals={}), info)
        network.load_state_dict(_weights(self.network))
        network.pictures = self.network.pictures
        network.save_pretrained(folder)


def _weights(network: RewardNetwork) -> dict[str, Tensor]:
    """Copies of the weights on the CPU, as safetensors can write them."""
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in network.state_dict().items()
    }
