"""Python in a few lines: `load` what makes masks, `segment`, and let a `RewardNetwork` judge masks of any origin.

    from rl_reward_network import RewardNetwork, load

    model = load("sa2va-nano")                       # or a folder, a hub id, the folder of a run
    found = model.segment("image.png", "Please segment the blood vessel.")
    found.mask, found.soft, found.text, found.score  # bool (H, W), float32 (H, W), the answer, the predicted Dice
    found.save("mask.png")
    RewardNetwork.from_pretrained("outputs/RUN/best_reward_net").predict("image.png", "mask.png").dice
    load(improve("data/vessels", mode="quick")).segment("image.png")  # train what pays, use what is deployed

An image is a path, a picture of Pillow, an array or a tensor; see `data.images.as_image`. A mask is the same; see
`data.masks.as_mask`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from rl_reward_network.data.images import as_image
from rl_reward_network.data.masks import as_mask
from rl_reward_network.grpo.settings import Mode
from rl_reward_network.inputs.config import RunConfig
from rl_reward_network.methods.improve import make_improve_plan, open_improve_inputs, run_improve_stage, settings_of
from rl_reward_network.models.default import DEFAULT_MODEL
from rl_reward_network.models.reward_network import RewardNetwork
from rl_reward_network.report.overlays import AFTER, paint_mask
from rl_reward_network.rewards.learned import ImageScorer
from rl_reward_network.run import IMPROVE_RUN, Run
from rl_reward_network.segment.files import save_mask
from rl_reward_network.segment.maker import Maker, Predicted, load_maker, predicted_quality, trainable_model


@dataclass(frozen=True, eq=False)
class Segmentation:
    """The mask of one image."""

    image: np.ndarray  # uint8 (H, W, 3), as the model saw it
    mask: np.ndarray  # bool (H, W); empty where the answer has no `[SEG]`
    soft: np.ndarray  # float32 (H, W) in [0, 1]
    text: str  # the answer, special tokens kept; "" where no Sa2VA is asked by one prompt
    prompt: str  # that was used, or what stands in its place
    predicted: Predicted | None  # by the reward network, with interval and reason; None without one

    @property
    def score(self) -> float | None:
        """The predicted Dice in [0, 1]; None without a reward network, or where it can give no number."""
        return None if self.predicted is None else self.predicted.dice

    def save(self, path: str | Path) -> Path:
        """Write the mask as a PNG of 0 and 255, and return its path; a ValueError for a name of another kind."""
        path = Path(path)
        if path.suffix.lower() != ".png":
            raise ValueError(f"{path}: a mask is saved as PNG; give a name that ends in .png")
        save_mask(path, self.mask, self.prompt)
        return path

    def overlay(self) -> np.ndarray:
        """uint8 (H, W, 3): the image with the outline of the mask."""
        return paint_mask(self.image, self.mask, AFTER, opacity=0)


@dataclass(frozen=True)
class Model:
    """What `load` returns."""

    maker: Maker

    def segment(self, image: Any, prompt: str | None = None, threshold: float = 0.5) -> Segmentation:
        """Segment one image, see `as_image`, by a prompt, None: that of the model's training, or of its run.

        A pixel belongs to the mask where the soft mask is above `threshold`. ValueError for what is no image, or a
        prompt for a model whose masks do not depend on one.
        """
        if not 0 < threshold < 1:
            raise ValueError(f"threshold is {threshold}, expected a number between 0 and 1, such as 0.5")
        pixels = as_image(image, self.maker.grey)
        found = self.maker.answer(pixels, prompt)
        mask, predicted = found.soft > threshold, None
        if self.maker.network is not None and found.scorer is not None and found.segs != 0:
            predicted = predicted_quality(self.maker.network, found.scorer, mask, found.source)
        return Segmentation(pixels, mask, found.soft, found.answer, found.prompt, predicted)


def load(path: str | Path = DEFAULT_MODEL, device: str | None = None, **options: Any) -> Model:
    """Load what makes masks: a Sa2VA (folder, hub id), a reward network's folder, or the folder of a finished run.

    `device` is by default the first GPU if there is one. `options` are those of `segment.maker.load_maker`: reward_net,
    bit_depth, max_tiles, dtype and image_resize. Raises as it does.
    """
    return Model(load_maker(str(path), device=device, **options))


def improve(
    data_root: str | Path,
    unlabelled_root: str | Path | None = None,
    mode: Mode = "full",
    model_path: str | Path = DEFAULT_MODEL,
    **settings: Any,
) -> Path:
    """Improve the masks of own images, as `sa2va-rl improve`; returns the folder of the run, which `load` takes.

    `settings` are further fields of `RunConfig`, such as output_dir, seed or gpu. Raises as the command does; where
    nothing is better, eval.json of the run says so, and `load` finds no model there.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode is {mode!r}, expected {' or '.join(get_args(Mode))}")
    given = {"data_root": data_root, "unlabelled_root": unlabelled_root, "output_dir": RunConfig.output_dir} | settings
    paths = {name: given[name] and Path(given[name]) for name in ("data_root", "unlabelled_root", "output_dir")}
    config = RunConfig(model_path=trainable_model(str(model_path)), **given | paths)
    inputs = open_improve_inputs(config)
    plan = make_improve_plan(inputs, mode)
    run = Run.create(IMPROVE_RUN, config.output_dir, settings_of(inputs, plan))
    run_improve_stage(inputs, plan, run)
    return run.path


class MaskJudge(RewardNetwork):
    """`rl_reward_network.RewardNetwork`: the reward network, which also judges files, pictures and arrays."""

    def predict(self, image: Any, mask: Any) -> Predicted:
        """The predicted quality of a mask of an image, binary or soft, by any model; see `as_image` and `as_mask`.

        There is no interval: it would hold for masks of one model alone. ValueError for what is no image, or no mask of
        its size.
        """
        pixels = as_image(image)
        mask = as_mask(mask, (pixels.shape[0], pixels.shape[1]))
        return predicted_quality(self, ImageScorer(self, pixels), mask, None)
