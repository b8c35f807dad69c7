"""Translation pairs from gettext message catalogues (.mo files) that the user has.

``catalogue`` is a task over the catalogues in ``--data DIR``: messages are short sentences of real programs.
"""

from __future__ import annotations

import gettext
import re
from pathlib import Path

import numpy as np

from pathspace.errors import InputError
from training.tasks.task import Task, register_task
from training.tasks.translation import translation_task

HINT = "Linux systems keep German catalogues in /usr/share/locale/de/LC_MESSAGES"
Pair = tuple[list[str], list[str]]


def read_catalogue(path: Path) -> list[Pair]:
    """Read the messages of one catalogue and cut them into words; placeholders and marks are words, too.

    Args:
        path: a .mo file.

    Returns:
        Pairs of message and translation, in the catalogue's order; plural forms give a pair each.

    Raises:
        InputError: the file cannot be read or is no catalogue.
    """
    try:
        with open(path, "rb") as file:
            messages = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
    except Exception as error:
        raise InputError(f"The file '{path}' is no message catalogue, or it is cut off; {HINT}.") from error
    pairs = []
    for key, translated in messages.items():
        message = key[0] if isinstance(key, tuple) else key
        if message and isinstance(translated, str) and translated:
            pairs.append((words_of(message), words_of(translated)))
    return pairs


def words_of(message: str) -> list[str]:
    """Cut a message into lower-case words, placeholders and marks; underscores of menus are left out.

    Example:
        >>> words_of("_Open file %s?")
        ['open', 'file', '%s', '?']
    """
    return re.findall(r"%[\w$.-]*\w|\w+|[^\w\s]", message.replace("_", "").lower())


@register_task("catalogue")
def catalogue(
    hidden: int = 64, layers: int = 2, longest: int = 12, limit: int = 20_000, data: str | None = None
) -> Task:
    """Build the task: English messages of programs, translated.

    Args:
        hidden: features of the transformer, an even number.
        layers: encoder layers, and decoder layers.
        longest: longer messages or translations are left out.
        limit: at most so many pairs.
        data: folder with .mo files, all of one language.

    Returns:
        The task; a message is in one split only.

    Raises:
        InputError: there is no folder, no catalogue in it, or too few messages.
    """
    if data is None or not Path(data).is_dir():
        found = "none was given" if data is None else f"there is no folder '{data}'"
        raise InputError(f"Task 'catalogue' reads .mo files of yours, and {found}: give --data DIR; {HINT}.")
    files = sorted(Path(data).glob("*.mo"))
    if not files:
        raise InputError(f"The folder '{data}' holds no .mo file; {HINT}.")
    unique = {" ".join(first): (first, second) for file in files for first, second in read_catalogue(file)}
    pairs = [pair for pair in unique.values() if 0 < len(pair[0]) <= longest and 0 < len(pair[1]) < longest]
    if len(pairs) < 20:
        raise InputError(f"The catalogues in '{data}' hold {len(pairs)} short messages, expected at least 20; {HINT}.")
    order = np.random.default_rng(0).permutation(len(pairs))[:limit]
    pairs = [pairs[i] for i in order]
    tenth = len(pairs) // 10
    parts = [pairs[2 * tenth :], pairs[:tenth], pairs[tenth : 2 * tenth]]
    return translation_task("catalogue", "messages of programs, translated", parts, hidden, layers, longest)
