"""Slow, obvious programs that judge the library: they share no code with it."""
