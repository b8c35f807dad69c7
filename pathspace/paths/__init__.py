"""Skeletons, basis paths, path values, norms over paths, symbols and pictures."""
