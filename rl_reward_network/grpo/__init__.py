"""GRPO on Sa2VA's LoRA weights in two loops: mask -> caption -> mask', and caption -> mask -> caption'."""
