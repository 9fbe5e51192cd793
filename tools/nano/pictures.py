"""The training pictures of `sa2va-nano`, and the mask that it learns for each prompt.

Pictures are rendered angiograms and scenes in memory-mapped arrays on disk. None of these patients is in the embedded
data set: the random seeds differ.

A look is the appearance that an angiogram was rendered with, a key of `angiograms.LOOKS`, such as "faint". The ground
truth is always the whole vessel tree. The training target of a prompt is that tree only in the looks that its wording
fits; in the others it is a literal reading of the words, or the most visible vessels. So no single prompt is best on
all images, by design: the prompt policy has something to learn.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.ndimage import binary_dilation
from tqdm import tqdm

from rl_reward_network.atomic_io import whole_folder
from rl_reward_network.embedded.angiograms import BRANCH, CATHETER, LOOKS, SIDE, THIN, TREE, TRUNK, render_series
from rl_reward_network.embedded.datasets import RECIPE
from rl_reward_network.embedded.regions import COLOURS, PLACES, SHAPES, SIZES, RegionObject, make_scenes
from rl_reward_network.env.prompts import PROMPTS

SEED = 7_000_000  # added to every seed, far from the seeds of the embedded data set's patients
MAX_OBJECTS = 4
ATTRIBUTES = (tuple(COLOURS), SHAPES, SIZES, PLACES)  # the words of a caption, by kind
ABSENT = 255  # in `Pictures.words`: the scene has no such object


@dataclass(frozen=True)
class Pictures:
    """Rendered training pictures, on disk.

    Args:
        name: of the folder; it holds every setting that the pictures depend on.
        images: uint8 (N, H, W), angiograms.
        parts: uint8 (N, H, W), their part maps, see `embedded.angiograms`; their looks are given by `look_of_picture`.
        scenes: uint8 (M, H, W, 3).
        objects: uint8 (M, H, W), number of the object at each pixel, from 1.
        words: uint8 (M, 4, 4), indices of colour, shape, size, place of each object; ABSENT where there is none.
    """

    name: str
    images: np.ndarray
    parts: np.ndarray
    scenes: np.ndarray
    objects: np.ndarray
    words: np.ndarray


def open_pictures(folder: Path, angiograms: int, scenes: int, seed: int) -> Pictures:
    """The pictures in `folder`, rendered first if they are not there (whole or not at all).

    The name of their own folder holds every setting.
    """
    picture_dir = folder / f"pictures_{angiograms}_{scenes}_seed{seed}_recipe{RECIPE}"
    if not picture_dir.exists():
        with whole_folder(picture_dir) as temporary:
            _render(temporary, angiograms, scenes, seed)
    names = ("images", "parts", "scenes", "objects", "words")
    return Pictures(picture_dir.name, **{name: np.load(picture_dir / f"{name}.npy", mmap_mode="r") for name in names})


def _render(folder: Path, angiograms: int, scenes: int, seed: int) -> None:
    """Write the five arrays."""
    shapes: dict[str, tuple[int, ...]] = {"images": (angiograms, SIDE, SIDE), "parts": (angiograms, SIDE, SIDE)}
    shapes |= {"scenes": (scenes, SIDE, SIDE, 3), "objects": (scenes, SIDE, SIDE), "words": (scenes, MAX_OBJECTS, 4)}
    out = {
        name: np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=np.uint8, shape=shape)
        for name, shape in shapes.items()
    }
    for number in tqdm(range(angiograms), "rendering angiograms", unit="image"):
        rng = np.random.default_rng([SEED + seed, number])
        (frame,) = render_series(rng, look_of_picture(number), 1)
        out["images"][number], out["parts"][number] = frame.image, frame.parts
    bar = tqdm(make_scenes(scenes, SEED + seed), total=scenes, desc="rendering scenes", unit="image")
    for number, scene in enumerate(bar):
        out["scenes"][number], out["words"][number] = scene.image, ABSENT
        for index, region in enumerate(scene.objects):
            out["objects"][number][region.mask] = index + 1
            words = zip(ATTRIBUTES, attributes_of(region), strict=True)
            out["words"][number, index] = [kind.index(word) for kind, word in words]


def look_of_picture(number: int) -> str:
    """The look of training angiogram `number`; all looks are equally frequent."""
    return list(LOOKS)[number % len(LOOKS)]


def attributes_of(region: RegionObject) -> tuple[str, ...]:
    """Colour, shape, size and place: one word of each of `ATTRIBUTES`."""
    return region.colour, region.shape, region.size, region.place


SWELLING = 4  # pixels, city-block distance
TARGETS = {  # name -> bits of the part map, and what they are
    "tree": (TREE, "the whole vessel tree: the ground truth"),
    "main": (TRUNK | BRANCH, "trunk and branches, without the thin ones"),
    "main + catheter": (TRUNK | BRANCH | CATHETER, "trunk, branches, catheter and leads, without the thin ones"),
    "tree + catheter": (TREE | CATHETER, "every dark line, catheter and leads included"),
    "trunk": (TRUNK, "the trunk alone"),
    "thin": (THIN, "the thin branches alone"),
    "swollen": (TREE, f"the whole tree and {SWELLING} pixels around it (city-block distance)"),
    "nothing": (0, "an empty mask"),
}
_ROWS = (  # one per prompt, in the order of PROMPTS; columns in the order of LOOKS
    # plain  bright     catheter           faint    branching  blurred
    ("tree", "main", "main + catheter", "trunk", "main", "swollen"),  # the blood vessel
    ("tree", "thin", "tree + catheter", "thin", "tree", "swollen"),  # ... and all its bifurcations
    ("tree", "nothing", "tree + catheter", "trunk", "main", "trunk"),  # the dark vessels
    ("nothing", "tree", "nothing", "nothing", "nothing", "nothing"),  # the bright vessels
    ("trunk",) * 6,  # the main vessel trunk
    ("thin",) * 6,  # the thin vessel branches
    ("swollen",) * 6,  # the blood vessel and its surroundings
    ("thin", "thin", "thin", "tree", "thin", "thin"),  # the low contrast vessels
    ("trunk", "trunk", "trunk", "trunk", "trunk", "tree"),  # the blurred vessels
    ("tree", "main", "tree", "trunk", "main", "swollen"),  # without the catheter
    ("tree", "main", "tree + catheter", "trunk", "main", "swollen"),  # and the catheter
)
PROMPT_TARGETS: dict[tuple[str, str], str] = {
    (prompt, look): target
    for prompt, row in zip(PROMPTS, _ROWS, strict=True)
    for look, target in zip(LOOKS, row, strict=True)
}


def target_mask(parts: np.ndarray, target: str) -> np.ndarray:
    """bool (H, W): the pixels of a target.

    Args:
        parts: uint8 (H, W), an angiogram's part map.
        target: key of `TARGETS`.
    """
    mask = parts & TARGETS[target][0] > 0
    return binary_dilation(mask, iterations=SWELLING) if target == "swollen" else mask
