"""Training of `sa2va-nano`, the small Sa2VA that comes with the project."""
