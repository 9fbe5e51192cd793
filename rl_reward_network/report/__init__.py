"""Evaluation: metrics, baselines, intervals, and the report."""
