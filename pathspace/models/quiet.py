"""Silence while torch traces, with the random states as they were."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

from .random_state import random_kept


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's own tracing (warnings, logs, graphs printed on errors), and keep
    the global random states of torch, Python and numpy.
    """
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            random_kept(),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
