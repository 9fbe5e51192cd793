"""Command lines over the package, run as `python -m scripts.<name>`."""
