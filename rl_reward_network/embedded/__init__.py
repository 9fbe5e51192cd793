"""The rendered world that comes with the project: angiograms, regions with captions, and the model trained on them."""
