"""Rewards: small functions from masks or captions to numbers, mostly in [0, 1]; they know neither data nor models."""
