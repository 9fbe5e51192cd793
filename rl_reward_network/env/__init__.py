"""The prompt-choice environment; it is handed tables and needs neither weights nor a GPU.

Importing it registers `rl_reward_network/Sa2VAFinetune-v0` with Gymnasium.
"""

from rl_reward_network.env.sa2va_finetune_env import ENV_ID, PromptContext, Sa2VAFinetuneEnv

__all__ = ["ENV_ID", "PromptContext", "Sa2VAFinetuneEnv"]
