"""``catalogues``: messages of many programs, short sentences in gettext message catalogues (.mo
files), which ``pathspace data fetch`` brings.
"""

from __future__ import annotations

import gettext
import re
from pathlib import Path

import numpy as np

from pathspace.errors import InputError

from ..data import given
from ..task import Task, register_task
from .translation import translation_task

HINT = "Linux systems keep German catalogues in /usr/share/locale/de/LC_MESSAGES"
WHAT = "messages of programs, translated"
Pair = tuple[list[str], list[str]]


def read_catalogue(path: Path) -> list[Pair]:
    """Read the messages of one catalogue and cut them into words."""
    try:
        with open(path, "rb") as file:
            messages = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
    except UnicodeDecodeError as error:
        raise InputError(
            f"The catalogue '{path}' has text that is not UTF-8; use a folder without it, {HINT}."
        ) from error
    except Exception as error:
        raise InputError(
            f"The file '{path}' is not a message catalogue, or it is cut off; {HINT}."
        ) from error
    pairs = []
    for key, translated in messages.items():
        # (a plural's key has its number, and a message may stand behind its context)
        message = (key[0] if isinstance(key, tuple) else key).rpartition("\4")[2]
        if message and isinstance(translated, str) and translated:
            pairs.append((words_of(message), words_of(translated)))
    return pairs


def words_of(message: str) -> list[str]:
    """Cut a message into lower-case words, placeholders and marks, without ``_``."""
    return re.findall(r"%[\w$.-]*\w|\w+|[^\w\s]", message.replace("_", "").lower())


@register_task("catalogues")
def catalogues(
    hidden: int = 128,
    layers: int = 2,
    longest: int = 12,
    limit: int = 100_000,
    vocabulary: int = 8000,
    dropout: float = 0.0,
    data: str | None = None,
) -> Task:
    """Build the task: English messages of many programs, translated into German."""
    parts = _parts(given("catalogues", data, "catalogues"), longest, limit)
    return translation_task("catalogues", WHAT, parts, hidden, layers, longest, vocabulary, dropout)


def _parts(folder: Path, longest: int, limit: int) -> list[list[Pair]]:
    """The pairs of all catalogues to train, to choose and to test; a message is in one part."""
    unique = {
        " ".join(first): (first, second)
        for file in sorted(folder.glob("*.mo"))
        for first, second in read_catalogue(file)
    }
    pairs = [
        pair
        for pair in unique.values()
        if 0 < len(pair[0]) <= longest and 0 < len(pair[1]) < longest
    ]
    if len(pairs) < 20:
        raise InputError(
            f"The catalogues (.mo files) in '{folder}' contain {len(pairs)} short messages,"
            f" expected at least 20; {HINT}."
        )
    order = np.random.default_rng(0).permutation(len(pairs))[:limit]
    pairs = [pairs[i] for i in order]
    tenth = len(pairs) // 10
    return [pairs[2 * tenth :], pairs[:tenth], pairs[tenth : 2 * tenth]]
