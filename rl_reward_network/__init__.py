"""Reinforcement learning for Sa2VA: a reward network, a prompt environment, PPO, GRPO and their evaluation.

Importing the package registers the environment `ENV_ID` with Gymnasium; nothing heavy (torch, transformers) is loaded.

Letters of array axes, the same everywhere: B images of a batch, P prompts, K masks of one answer, T tokens, N samples,
H W original pixels, S side of a model's square input, h w pixels of the mask decoder's grid.
"""

import gymnasium

__version__ = "1.0.0rc3"
ENV_ID = "rl_reward_network/Sa2VAFinetune-v0"

gymnasium.register(ENV_ID, entry_point="rl_reward_network.env.sa2va_finetune_env:Sa2VAFinetuneEnv")
