"""A training run, watched: measured at a cadence, written down, and judged."""
