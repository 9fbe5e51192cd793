"""PPO learns which operation suits which image."""

from pathlib import Path

from rl_reward_network.ppo.post_config import PostSettings, with_preset
from rl_reward_network.ppo.post_policy import choose_operations
from rl_reward_network.ppo.post_ppo import train_post_policy
from tests.env.edited_images import known_images

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
