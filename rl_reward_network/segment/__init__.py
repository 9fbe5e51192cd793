"""Segment images with a checkpoint or a trained policy."""
