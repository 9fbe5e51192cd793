"""Models: the native Sa2VA, LoRA on it, and the reward network. They know nothing of the data."""
