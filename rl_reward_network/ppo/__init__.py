"""Step 2: a PPO policy that chooses the prompt for each image."""
