"""The module of a user: its tensors, copies of it, its inputs, and runs."""
