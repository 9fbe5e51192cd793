"""Every method in one comparison: prompts, post-processing, fusion with the reward network, weights."""

from typing import Literal

Group = Literal["prompts", "post", "fusion", "weights", "combined"]
GROUPS: tuple[Group, ...] = ("prompts", "post", "fusion", "weights", "combined")
