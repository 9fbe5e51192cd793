"""Training: joins data, models, rewards and the environment."""
