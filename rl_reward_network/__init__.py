"""Reinforcement learning for Sa2VA: a reward network, a prompt environment, PPO, and an honest evaluation.

Letters used for array axes everywhere: B images of a batch, P prompts, K masks of one answer, T tokens,
N samples, H W original pixels, S side of a model's square input, h w pixels of the mask decoder's grid.
"""

__version__ = "0.7.0"
