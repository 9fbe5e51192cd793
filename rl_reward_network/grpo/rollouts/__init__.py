"""What GRPO samples, and the rewards and advantages of the samples."""
