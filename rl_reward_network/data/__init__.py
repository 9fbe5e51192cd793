"""Data: one Sample type, one reader per on-disk format, group-aware splits."""
