"""The laboratory's commands, called within the test's own process."""

from __future__ import annotations

import typer
from typer.testing import CliRunner, Result

import pathspace.training.experiments.cli
from pathspace.cli.errors import ErrorSentenceGroup

app = typer.Typer(cls=ErrorSentenceGroup, rich_markup_mode="rich")
pathspace.training.experiments.cli.register(app)


def call(*words: object) -> Result:
    """Run one command line."""
    return CliRunner().invoke(app, [str(word) for word in words])


def flat(text: str) -> str:
    """A text without line ends."""
    return " ".join(text.split())
