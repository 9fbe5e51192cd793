"""A run that was cut off ends in the same weights."""

from pathlib import Path

import pytest
import torch

from rl_reward_network.ppo.checkpoint import RolloutCheckpoint
from rl_reward_network.ppo.post_ppo import train_post_policy
from tests.env.edited_images import known_images
from tests.ppo.test_post_ppo import settings


class Cut(BaseException):
    pass


def test_a_run_that_was_cut_off_ends_in_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train_post_policy(known_images(6), known_images(4, 6), settings(600), tmp_path / "whole")
    start, count = RolloutCheckpoint._on_rollout_start, 0
    monkeypatch.setattr("rl_reward_network.ppo.checkpoint.CHECKPOINT_SECONDS", 0.0)

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
