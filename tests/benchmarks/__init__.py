"""Benchmarks: ratios to what a user would do otherwise, measured in one run."""
