"""The training commands, called within the test's own process."""

from __future__ import annotations

import typer
from typer.testing import CliRunner, Result

import pathspace.training.cli
from pathspace.cli_errors import ErrorSentenceGroup

app = typer.Typer(cls=ErrorSentenceGroup)
pathspace.training.cli.register(app)


def call(*words: object) -> Result:
    """Run one command line."""
    return CliRunner().invoke(app, [str(word) for word in words])
