"""How the embedded model is taught to read each prompt in each look: the planted gap, in one table.

The ground truth is always the whole tree. A prompt is answered with it only where its wording fits; elsewhere the model
takes the words literally or sees only what stands out. So no single prompt is best everywhere, on purpose.
"""

import numpy as np
from scipy.ndimage import binary_dilation

from rl_reward_network.embedded.angiograms import LOOKS, TREE
from rl_reward_network.embedded.vessel_tree import BRANCH, CATHETER, THIN, TRUNK
from rl_reward_network.env.prompts import PROMPTS

SWELLING = 4  # pixels along rows and columns
READINGS = {
    "tree": "the whole vessel tree: the ground truth",
    "main": "trunk and branches, without the thin ones",
    "main + catheter": "trunk, branches, catheter and leads, without the thin ones",
    "tree + catheter": "every dark line, catheter and leads included",
    "trunk": "the trunk alone",
    "thin": "the thin branches alone",
    "swollen": f"the whole tree and {SWELLING} pixels around it, counted along rows and columns",
    "nothing": "an empty mask",
}
BITS = {
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
TABLE: dict[tuple[str, str], str] = {
    (prompt, look): reading
    for prompt, row in zip(PROMPTS, _ROWS, strict=True)
    for look, reading in zip(LOOKS, row, strict=True)
}


def target(parts: np.ndarray, reading: str) -> np.ndarray:
    """bool (H, W): what a reading asks for.

    Args:
        parts: uint8 (H, W), an angiogram's part map.
        reading: key of `READINGS`.
    """
    mask = parts & BITS[reading] > 0
    return binary_dilation(mask, iterations=SWELLING) if reading == "swollen" else mask
