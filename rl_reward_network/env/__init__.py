"""The environment of prompt choice; it works on tables and needs neither weights nor a GPU."""

from rl_reward_network import ENV_ID
from rl_reward_network.env.sa2va_finetune_env import PromptContext, Sa2VAFinetuneEnv

__all__ = ["ENV_ID", "PromptContext", "Sa2VAFinetuneEnv"]
