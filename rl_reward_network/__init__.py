"""Reinforcement learning for Sa2VA: a reward network, a prompt environment, PPO, GRPO and their evaluation.

Importing the package registers the environment `ENV_ID` with Gymnasium; nothing heavy (torch, transformers) is loaded.

`load`, `improve`, `RewardNetwork` and `Segmentation` (`api.py`) are imported when they are first asked for.

Letters of array axes, the same everywhere: B images of a batch, P prompts, K masks of one answer, T tokens, N samples,
H W original pixels, S side of a model's square input, h w pixels of the mask decoder's grid.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import gymnasium

if TYPE_CHECKING:
    from rl_reward_network.api import MaskJudge as RewardNetwork
    from rl_reward_network.api import Segmentation, improve, load

__all__ = ["ENV_ID", "RewardNetwork", "Segmentation", "__version__", "improve", "load"]
__version__ = "1.0.0rc4"
NAMES = {"RewardNetwork": "MaskJudge"}  # in `api.py`, where they differ
ENV_ID = "rl_reward_network/Sa2VAFinetune-v0"

gymnasium.register(ENV_ID, entry_point="rl_reward_network.env.sa2va_finetune_env:Sa2VAFinetuneEnv")


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("rl_reward_network.api"), NAMES.get(name, name))
    raise AttributeError(f"module 'rl_reward_network' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
