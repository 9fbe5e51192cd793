"""Programs that make what the package ships; run from a checkout."""
