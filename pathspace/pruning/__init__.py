"""Channels: removed, permuted, matched between networks, and compared."""
