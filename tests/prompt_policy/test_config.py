import pytest

from rl_reward_network.prompt_policy.config import PromptPPOConfig


@pytest.mark.parametrize("n_envs", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("total", [64, 500, 2000, 10000])
def test_rollouts_are_at_least_eight_and_batches_nearly_equal(n_envs, total):
    config = PromptPPOConfig(total_timesteps=total, n_envs=n_envs)
    rollout = config.rollout_steps * n_envs
    assert config.whole_timesteps // rollout >= 8
    assert config.whole_timesteps % rollout == 0
    assert total <= config.whole_timesteps < total + rollout
    assert 2 <= config.even_batch <= 64
    assert rollout % config.even_batch in (0, *range(config.even_batch // 2, config.even_batch))


def test_published_settings_stay_what_they_are():
    config = PromptPPOConfig(total_timesteps=10000)
    assert (config.rollout_steps, config.even_batch) == (128, 64)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_envs": 0}, "n_envs: got 0; give 1 or more"),
        ({"n_steps": -5}, "n_steps: got -5; give 1"),
        ({"total_timesteps": -1}, "total_timesteps: got -1; give 1"),
        ({"total_timesteps": 15}, "total_timesteps: got 15; give 16 or more"),
        ({"batch_size": 257}, "batch_size: got 257; give at most 256"),
        ({"batch_size": 1}, "batch_size: got 1; give 2"),
        ({"learning_rate": 0.0}, "learning_rate: got 0.0; give a number above 0"),
        ({"learning_rate": float("nan")}, "learning_rate: got nan"),
        ({"gamma": 1.1}, "gamma: got 1.1; give a number from 0 to 1"),
        ({"max_steps": 200}, "n_steps: got 128; give max_steps = 200"),
        ({"seed": -1}, "seed: got -1"),
    ],
)
def test_bad_settings_name_field_value_and_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        PromptPPOConfig(**settings)
