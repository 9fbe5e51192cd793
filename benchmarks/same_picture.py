"""How alike pictures of different patients are, and how alike changed copies: the table of docs/how-to/your-data.md.

    python -m benchmarks.same_picture arcade=DATA/arcade dca1=DATA/dca1 chase=DATA/chase_db1 embedded=data/angiograms

Each argument is a name and a data folder with groups; a plain folder of images, each of its own patient, is also read.
"""

import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from PIL import Image
from tqdm import tqdm

from rl_reward_network.cli.app import run
from rl_reward_network.data import identity
from rl_reward_network.data.identity import same_in_two_groups, thumbnail
from rl_reward_network.data.images import IMAGE_SUFFIXES, load_image
from rl_reward_network.data.readers import read_images

COPIES = 40  # images of each set that are changed, spread over all


@dataclass(frozen=True)
class Args:
    """Measure how alike pictures of different patients are, and changed copies."""

    sets: tyro.conf.Positional[tuple[str, ...]]
    """NAME=FOLDER of each set of images."""


def as_jpeg(quality: int) -> Callable[[Image.Image], Image.Image]:
    """Compression."""

    def changed(image: Image.Image) -> Image.Image:
        data = io.BytesIO()
        image.save(data, "JPEG", quality=quality)
        return Image.open(data)

    return changed


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "JPEG, quality 75": as_jpeg(75),
    "JPEG, quality 30": as_jpeg(30),
    "half the size": lambda image: image.resize((image.width // 2, image.height // 2)),
    "a quarter of the size": lambda image: image.resize((image.width // 4, image.height // 4)),
    "40 levels brighter": lambda image: image.point(lambda value: value + 40),
    "40 levels darker": lambda image: image.point(lambda value: value - 40),
    "0.6 of the contrast": lambda image: image.point(lambda value: 0.6 * value),
    "gamma 0.7": lambda image: image.point(lambda value: 255 * (value / 255) ** 0.7),
    "gamma 1.4": lambda image: image.point(lambda value: 255 * (value / 255) ** 1.4),
    "2 % cut off": lambda image: image.crop((image.width // 50, image.height // 50, image.width, image.height)),
}


def read(folder: Path) -> dict[Path, str]:
    """The images of a folder and their groups."""
    if (folder / "annotations.json").is_file():
        return {sample.image_path: sample.group_id for sample in read_images(folder)}
    return {path: path.name for path in sorted(folder.rglob("*")) if path.suffix.lower() in IMAGE_SUFFIXES}


def main(args: Args) -> None:
    """Print the limits of each set."""
    for argument in args.sets:
        name, folder = argument.split("=", 1)
        groups = read(Path(folder))
        start = time.process_time()
        small = np.stack([thumbnail(load_image(path)) for path in tqdm(groups, name, leave=False)])
        decoding, limit = time.process_time() - start, identity.SAME
        start = time.process_time()
        found = same_in_two_groups(small, list(groups.values()))
        comparing = time.process_time() - start
        identity.SAME = 0.3  # lists all pairs that are at all alike
        highest = same_in_two_groups(small, list(groups.values()))[:10]
        identity.SAME = limit
        print(f"{name}: {len(groups)} images of {len(set(groups.values()))} groups; {len(found)} pairs above {limit}")
        print(f"  highest between groups: {', '.join(f'{likeness:.3f}' for *_, likeness in highest)}")
        print(f"  CPU seconds: {decoding:.1f} to decode, {comparing:.2f} to compare")
        images = [Image.open(path).convert("RGB") for path in list(groups)[:: -(-len(groups) // COPIES)]]
        own = np.stack([thumbnail(np.asarray(image)) for image in images]).reshape(len(images), -1).astype(np.float64)
        for change, function in CHANGES.items():
            copies = [thumbnail(np.asarray(function(image))).ravel() for image in images]
            likeness = [np.corrcoef(one, copy)[0, 1] for one, copy in zip(own, copies, strict=True)]
            print(f"  {change}: lowest {min(likeness):.3f}, above {limit}: {np.mean(np.array(likeness) > limit):.0%}")


if __name__ == "__main__":
    run(main, Args)
