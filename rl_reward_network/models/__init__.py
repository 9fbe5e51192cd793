"""Models: the native Sa2VA, LoRA on it, and the reward network. Nothing here imports the data."""
