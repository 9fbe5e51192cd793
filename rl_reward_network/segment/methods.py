"""Segment images by the method that a comparison has chosen."""

from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from rl_reward_network.bit_depth import Levels
from rl_reward_network.data.images import load_for_model
from rl_reward_network.methods.compare import DeployedMethod, load_deployed
from rl_reward_network.segment.files import Target, check_free, remove_mask, write_mask
from rl_reward_network.segment.maker import Segmented, image_levels


@dataclass(frozen=True)
class MethodMaker:
    """A method of a comparison, ready for new images.

    Args:
        method: the method.
        levels: of grey images above 8 bit; None: percentiles of the image.
    """

    method: DeployedMethod
    levels: Levels | None

    def __call__(self, target: Target) -> Segmented:
        """Make the mask of an image by the method, and write it; nothing where no answer has a `[SEG]`."""
        title = self.method.method.title
        check_free(target, title)
        image, note = load_for_model(target.image, self.levels)
        if note:
            tqdm.write(note)
        mask = self.method.mask(image)
        if mask is None:
            remove_mask(target)
            return Segmented(target, title, "", 0.0, 0, "")
        write_mask(target, image, mask, title)
        return Segmented(target, title, "", float(mask.mean()), None, "")


def load_method_maker(run: Path, device: str | None = None, bit_depth: int | None = None) -> MethodMaker:
    """Load the method in the folder best/ or cheapest/ of a comparison.

    Args:
        run: the folder.
        device: None is the first GPU if there is one, else the CPU.
        bit_depth: of grey images above 8 bit.

    Raises:
        ValueError: the folder holds no method, something that it needs is missing, or `bit_depth` is refused.
    """
    method = load_deployed(run, device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    print(f"method: {method.method.title}")
    return MethodMaker(method, image_levels(bit_depth, method.grey_levels))
