"""Inputs of a run: data, split, frozen model and the bank of its masks."""
