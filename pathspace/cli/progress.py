"""What commands show: progress on a terminal, text, and results."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from json import dumps
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.markup import escape

from ..errors import CaptureError
from ..files.writing import STDOUT, write_text
from .errors import debugging

if TYPE_CHECKING:
    from .target import Target


@contextlib.contextmanager
def show_progress(what: str, target: str) -> Iterator[Callable[..., None]]:
    """Show the progress of a command on a terminal, by the name of a stage and the share that is
    done. What user's code and torch print appears on standard error at the end, or not at all after
    a failure, because torch prints whole graphs before some exceptions.
    """
    if debugging():
        with contextlib.redirect_stdout(sys.stderr):
            yield lambda _stage, _share=None: None
        return
    printed = io.StringIO()
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            Console(file=sys.stderr).status(f"{what} {escape(target)}") as status,
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):

            def show(stage: str, share: float | None = None) -> None:
                done = "" if share is None else f"{share:4.0%} "
                status.update(f"{done}{stage} {escape(target)}")

            yield show
    except SystemExit as error:
        raise CaptureError(
            f"The model of '{target}' ended the program, SystemExit ({error.code}), instead of"
            " returning: raise an exception in its forward, not sys.exit()."
        ) from error
    finally:
        logging.disable(disabled)
    sys.stderr.write(printed.getvalue())


@contextlib.contextmanager
def loading(
    target: str, inputs: Sequence[str] | None, stage: str, **options: Any
) -> Iterator[Target]:
    """Load a target with progress, and show a stage; options are those of ``load_target``."""
    from .target import load_target

    with show_progress("Loading", target) as status:
        loaded = load_target(target, inputs or (), **options)
        status(stage)
        yield loaded


def tell(shown: RenderableType, aside: bool = False, markup: bool = False) -> None:
    """Print text without breaking it into lines; on standard error ``aside`` of a result."""
    console = Console(stderr=aside)
    if isinstance(shown, str):
        console.print(shown, soft_wrap=True, markup=markup, highlight=False)
    else:
        console.print(shown)


def deliver(
    facts: Mapping[str, Any], json: str | None, shown: RenderableType, output: str | None = None
) -> None:
    """Write facts as JSON if asked; show them, and what was written, unless JSON is printed."""
    from ..shown import plain

    write_text(dumps(plain(facts), indent=2, allow_nan=False), json)
    if json != STDOUT:
        tell(shown, output == STDOUT)
        if output is not None:
            tell(f"Wrote {output}", output == STDOUT)
