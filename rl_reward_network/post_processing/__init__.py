"""Experiment 2: a policy that edits the mask of Sa2VA by a few operations."""
