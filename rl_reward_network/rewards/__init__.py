"""Rewards: small pure functions from masks or captions to numbers in [0, 1]; they know neither data nor models."""
