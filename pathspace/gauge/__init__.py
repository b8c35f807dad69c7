"""A gauge applied and balanced, in memory and on checkpoints."""
