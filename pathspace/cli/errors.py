"""Each failure of a command in one sentence on standard error, with an exit code for its kind."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from typer import Abort
from typer.core import TyperGroup

from ..errors import PathspaceError, on_one_line

FAILED, BAD_INPUT, NOT_COMPARED, INTERRUPTED = 1, 2, 3, 130
# a full disk, a broken device, a closed file
UNWRITABLE = (errno.ENOSPC, errno.EIO, errno.EBADF)
_debugging: ContextVar[bool] = ContextVar("debugging", default=False)


def debugging() -> bool:
    """Tell whether the command that runs was given ``--debug``."""
    return _debugging.get()


class ErrorSentenceGroup(TyperGroup):
    """A command group in which every failure is one sentence on standard error."""

    def main(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line and exit; ``--debug`` is understood at any place before ``--``."""
        given = list(sys.argv[1:] if args is None else args)
        end = given.index("--") if "--" in given else len(given)
        debug = "--debug" in given[:end]
        given = [word for word in given[:end] if word != "--debug"] + given[end:]

        token = _debugging.set(debug)
        try:
            code = super().main(given, prog_name, standalone_mode=False, **extra)
            code = code if isinstance(code, int) else 0
            # (there is none if it was closed before)
            if sys.stdout is not None:
                sys.stdout.flush()
        except (Exception, KeyboardInterrupt) as error:
            code = tell_failure(error)
        finally:
            _debugging.reset(token)
        if standalone_mode:
            sys.exit(code)
        return code

    def invoke(self, ctx: Any) -> Any:
        """Run one command; an interrupt is kept from typer, which would print nothing."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Abort from error


def tell_failure(error: BaseException) -> int:
    """Say in one sentence why a command failed, and return its exit code: 2 after any error, 130
    after an interrupt. With ``--debug`` the traceback is above the sentence.
    """
    sentence, code = _sentence(error), FAILED if isinstance(error, BrokenPipeError) else BAD_INPUT
    if _began_with_an_interrupt(error):
        sentence, code = "Interrupted before the end.", INTERRUPTED
    if debugging():
        traceback.print_exception(error, file=sys.stderr)
    if sentence:
        say("Error", "red", sentence)
    return code


def _began_with_an_interrupt(error: BaseException | None) -> bool:
    """Whether an interrupt led to an error; libraries fail in other ways as they load."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _sentence(error: BaseException) -> str:
    """What went wrong: also wrong usage, an output that cannot be written, or a defect."""
    if isinstance(error, PathspaceError):
        return str(error)
    if isinstance(error, BrokenPipeError):
        # whoever reads has seen enough, as typer also takes it
        _write_nowhere()
        return ""
    if hasattr(error, "format_message"):  # of typer, whose module differs between versions
        usage = re.sub(r"\. Did you mean (.*)\?$", r" (did you mean \1?)", error.format_message())
        usage = usage.replace("Value error, ", "")
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "pathspace"
        # empty after the help was shown
        return f"{on_one_line(usage)}; see '{path} --help'." if usage else ""
    if isinstance(error, OSError) and error.errno in UNWRITABLE and not error.filename:
        _write_nowhere()
        return f"Cannot write to standard output: {error.strerror}; send it to another place."
    # (torch has an error of its own for devices, and none for processors)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "The memory is exhausted: give smaller inputs or a smaller model."
    return (
        f"Internal error, {type(error).__name__} ({on_one_line(str(error))}): unless the memory"
        " is exhausted, this is a defect of pathspace, not of your input; run again with --debug"
        " and report what it shows."
    )


def _write_nowhere() -> None:
    """Discard what is buffered for standard output: it would fail again at the end."""
    with contextlib.suppress(OSError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(label: str, style: str, sentence: str) -> None:
    """Print a label in a style of rich and one sentence, on one line of standard error."""
    # (not at the top: its import draws one of Python's random numbers)
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True)
    console.print(f"[bold {style}]{label}:[/]", end=" ")
    console.print(" ".join(sentence.split()), markup=False, highlight=False)
