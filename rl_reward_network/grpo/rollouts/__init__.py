"""The rollouts of GRPO with their rewards and advantages."""
