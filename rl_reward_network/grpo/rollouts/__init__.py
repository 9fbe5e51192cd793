"""What GRPO samples and what it is paid."""
