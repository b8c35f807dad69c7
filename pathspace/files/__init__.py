"""Bytes on disk: whole files or none, tensors, checkpoints of many files."""
