"""Run folders: settings, checkpoints, curves, the stop rule and what `--resume` finds."""
