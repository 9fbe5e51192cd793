"""Segment images with a model, or with what a run has made."""
