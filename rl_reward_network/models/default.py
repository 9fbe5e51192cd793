"""The name of the embedded model, apart from the code that loads it, so that `--help` needs no torch."""

DEFAULT_MODEL = "sa2va-nano"
