"""The embedded data, rendered by the project: angiograms, regions with captions, and the model trained on them."""
