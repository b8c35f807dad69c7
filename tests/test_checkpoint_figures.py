"""The page of large models says of balancing on disk what the record holds."""

from __future__ import annotations

from benchmarks import checkpoint
from benchmarks.figures import DOCS, load, written


def test_the_page_says_what_was_measured() -> None:
    page, figures = "large-models.md", load("checkpoint")
    assert (DOCS / page).read_text() == written(page, "checkpoint", checkpoint.sentence(figures))
    assert figures["gigabytes"] >= 8 and figures["shards"] > 1
    assert figures["memory_gb"] < 1.5 and figures["change"] < 1e-4
