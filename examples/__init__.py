"""Programs that show what the package can do; run from a checkout."""
