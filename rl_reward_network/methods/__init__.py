"""Every road in one comparison: prompts, post-processing, fusion with the reward network, weights."""
