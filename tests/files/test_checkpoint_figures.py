"""The page of large models says of balancing on disk what the record holds."""

from __future__ import annotations

from benchmarks import checkpoint
from benchmarks.figures import load, shows


def test_the_page_says_what_was_measured() -> None:
    figures = load("checkpoint")
    assert shows("large-models.md", "checkpoint", checkpoint.sentence(figures))
    assert figures["gigabytes"] >= 8 and figures["shards"] > 1
    assert figures["memory_gb"] < 1.5 and figures["change"] < 1e-4
