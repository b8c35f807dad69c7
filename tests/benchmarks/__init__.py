"""Benchmarks: ratios against what a user would do otherwise, measured in one run.
Never part of the timed tests.
"""
