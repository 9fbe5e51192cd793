"""The mask that `sa2va-nano` learns for each prompt, by the look of the image: the planted gap, in one table.

A look is the appearance that an angiogram was rendered with, a key of `angiograms.LOOKS`, such as "faint". The ground
truth is always the whole vessel tree. The training target of a prompt is that tree only in the looks that its wording
fits; in the others it is a literal reading of the words, or the most visible vessels. So no single prompt is best on
all images, by design: the prompt policy has something to learn.
"""

import numpy as np
from scipy.ndimage import binary_dilation

from rl_reward_network.embedded.angiograms import BRANCH, CATHETER, LOOKS, THIN, TREE, TRUNK
from rl_reward_network.env.prompts import PROMPTS

SWELLING = 4  # pixels, city-block distance
TARGETS = {
    "tree": "the whole vessel tree: the ground truth",
    "main": "trunk and branches, without the thin ones",
    "main + catheter": "trunk, branches, catheter and leads, without the thin ones",
    "tree + catheter": "every dark line, catheter and leads included",
    "trunk": "the trunk alone",
    "thin": "the thin branches alone",
    "swollen": f"the whole tree and {SWELLING} pixels around it (city-block distance)",
    "nothing": "an empty mask",
}
PARTS = {  # bits of the part map in each target
    "tree": TREE,
    "main": TRUNK | BRANCH,
    "main + catheter": TRUNK | BRANCH | CATHETER,
    "tree + catheter": TREE | CATHETER,
    "trunk": TRUNK,
    "thin": THIN,
    "swollen": TREE,
    "nothing": 0,
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
    mask = parts & PARTS[target] > 0
    return binary_dilation(mask, iterations=SWELLING) if target == "swollen" else mask
