"""PPO learns which operation suits which image, and a run that was cut off ends in the same weights."""

from pathlib import Path

import pytest
import torch

from rl_reward_network.post_processing.config import PostSettings, with_preset
from rl_reward_network.post_processing.policy import choose_operations
from rl_reward_network.post_processing.ppo import train_post_policy
from rl_reward_network.prompt_policy.callbacks import RolloutCheckpoint
from tests.post_processing.images import known_images

SETTINGS = {"n_envs": 4, "n_steps": 32, "batch_size": 64, "max_steps": 2}


def settings(steps: int):  # type: ignore[no-untyped-def]
    return with_preset(PostSettings(total_timesteps=steps, **SETTINGS), "quick")


def test_the_policy_repairs_new_masks(tmp_path: Path) -> None:
    model = train_post_policy(known_images(12), known_images(6, 12), settings(3000), tmp_path)
    new = known_images(8, 30)
    chosen = choose_operations(model, new, 2)
    before = sum(image.dice(()) for image in new) / 8
    after = sum(image.dice(operations) for image, operations in zip(new, chosen, strict=True)) / 8
    assert after > before + 0.05
    assert (tmp_path / "metrics.jsonl").exists()


class Cut(BaseException):
    pass


def test_a_run_that_was_cut_off_ends_in_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train_post_policy(known_images(6), known_images(4, 6), settings(600), tmp_path / "whole")
    start, count = RolloutCheckpoint._on_rollout_start, 0
    monkeypatch.setattr("rl_reward_network.prompt_policy.callbacks.CHECKPOINT_SECONDS", 0.0)

    def cut(self: RolloutCheckpoint) -> None:
        nonlocal count
        start(self)
        count += 1
        if count == 4:
            raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(RolloutCheckpoint, "_on_rollout_start", cut)
        with pytest.raises(Cut):
            train_post_policy(known_images(6), known_images(4, 6), settings(600), tmp_path / "cut")
    resumed = train_post_policy(known_images(6), known_images(4, 6), settings(600), tmp_path / "cut")
    for name, tensor in whole.policy.state_dict().items():
        assert torch.equal(tensor, resumed.policy.state_dict()[name]), name
    assert (tmp_path / "whole/metrics.jsonl").read_text() == (tmp_path / "cut/metrics.jsonl").read_text()
