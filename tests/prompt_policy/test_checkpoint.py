import numpy as np
import pytest
import torch

from rl_reward_network.env.vector_env import make_vector_env
from rl_reward_network.prompt_policy import callbacks
from rl_reward_network.prompt_policy.callbacks import RolloutCurves
from rl_reward_network.prompt_policy.checkpoint import ppo_state, restore_ppo
from rl_reward_network.prompt_policy.config import PromptPPOConfig
from rl_reward_network.prompt_policy.policy import architecture
from rl_reward_network.prompt_policy.ppo import new_ppo
from rl_reward_network.runs.checkpoints import load_checkpoint, save_checkpoint
from tests.prompt_policy.test_ppo import curves, toy_contexts, train


def test_a_restored_model_learns_the_same(tmp_path):
    """From a file, and whatever the random states were."""
    contexts, config = toy_contexts(8, 0), PromptPPOConfig(total_timesteps=64)

    def model(seed):
        return new_ppo(make_vector_env(contexts, config.n_envs, seed, max_steps=1), architecture(contexts), config)

    first, second = model(0), model(9)
    first.learn(16)
    save_checkpoint(tmp_path / "checkpoint.pt", ppo_state(first))
    first.learn(32, reset_num_timesteps=False)
    second.learn(8)
    restore_ppo(second, load_checkpoint(tmp_path / "checkpoint.pt"))
    second.learn(32, reset_num_timesteps=False)
    assert second.num_timesteps == first.num_timesteps == 48
    for name, value in first.policy.state_dict().items():
        assert torch.equal(value, second.policy.state_dict()[name]), name


class Killed(Exception):
    """Stands for a process that is gone."""


@pytest.mark.parametrize(("max_steps", "rollout", "stop"), [(1, 0, False), (1, 5, False), (3, 3, False), (3, 3, True)])
@pytest.mark.parametrize("moment", ["_on_step", "_on_rollout_end", "_on_training_end"])
def test_a_run_that_was_cut_off_ends_in_the_same_weights_and_curves(
    tmp_path, monkeypatch, max_steps, rollout, stop, moment
):
    contexts, val = toy_contexts(8, 0), toy_contexts(6, 1)
    settings = {"total_timesteps": 300, "max_steps": max_steps, "stop": stop, "reward": "dice" if stop else "net"}
    whole = train(tmp_path / "whole", contexts, val, **settings)
    monkeypatch.setattr(callbacks, "CHECKPOINT_SECONDS", 0.0)
    original, calls = getattr(RolloutCurves, moment), iter(range(10_000))

    def killed(self):
        late = len(self.curves.rows) >= rollout if moment != "_on_step" else next(calls) == 7 + 18 * rollout
        if late or moment == "_on_training_end":
            raise Killed
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(RolloutCurves, moment, killed)
        with pytest.raises(Killed):
            train(tmp_path / "cut", contexts, val, **settings)
    np.random.seed(99)
    torch.manual_seed(99)  # another process begins anywhere
    resumed = train(tmp_path / "cut", contexts, val, **settings)
    assert resumed.num_timesteps == whole.num_timesteps
    for name, value in whole.policy.state_dict().items():
        assert torch.equal(value, resumed.policy.state_dict()[name]), name
    first, second = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "cut"))
    assert first == second
    curve = curves(tmp_path / "cut")["custom/val_score"]
    assert curve == curves(tmp_path / "whole")["custom/val_score"], "nothing of the lost rollout stays on the board"
