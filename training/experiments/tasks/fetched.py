"""Tasks with data of ``pathspace data fetch``: four with Fashion-MNIST, and one with the King James
Bible.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import avg_pool2d

from ..data import bible_text, given
from ..task import Split, Task, register_task
from .digits import sequence_task
from .images import image_task
from .papers import mnist_splits, tokens_of
from .text import chunks, language_task


def fashion_splits(
    task: str, pool: int = 1, limit: int | None = None, data: str | None = None
) -> list[Split]:
    """Read Fashion-MNIST: images of shape (N, 1, 28 / pool, 28 / pool)."""
    train, *others = mnist_splits(given(task, data, "fashion-mnist"))
    parts = (Split(train.inputs[:limit], train.targets[:limit]), *others)
    return [Split(avg_pool2d(part.inputs, pool), part.targets) for part in parts]


def _rows(
    name: str,
    pool: int,
    permuted: bool,
    hidden: int = 100,
    limit: int | None = None,
    data: str | None = None,
) -> Task:
    parts = fashion_splits(name, pool, limit, data)
    return sequence_task(name, "Fashion-MNIST", parts, 28 // pool, permuted, hidden)


register_task("fashion-14")(partial(_rows, "fashion-14", 2, False))
register_task("fashion-28")(partial(_rows, "fashion-28", 1, False))
register_task("fashion-28-permuted")(partial(_rows, "fashion-28-permuted", 1, True))


@register_task("fashion-images")
def fashion_images(
    hidden: int = 16,
    network: str = "recurrent",
    depth: int = 2,
    limit: int | None = None,
    pool: int = 1,
    scale: float | None = None,
    drop: float = 0.0,
    activity: float = 0.0,
    data: str | None = None,
) -> Task:
    """Build the task: images of clothes in ten classes, by a convolutional network."""
    parts = fashion_splits("fashion-images", pool, limit, data)
    blocks: dict[str, Any] = {"scale": scale, "drop": drop, "activity": activity}
    return image_task("fashion-images", "Fashion-MNIST", parts, network, hidden, depth, **blocks)


def bible_tokens(folder: Path) -> tuple[list[Tensor], int]:
    """The characters of the King James Bible as numbers: 90 %, 5 % and 5 %."""
    # without book, chapter and number before the words of each verse
    verses = [
        re.sub(r"^\S+:\d+ ", "", line)
        for line in bible_text(folder / "bible.data").splitlines()[1:]
    ]
    cuts = [int(len(verses) * share) for share in (0.0, 0.9, 0.95, 1.0)]
    parts = ["\n".join(verses[a:b]) for a, b in pairwise(cuts)]
    return tokens_of(parts, words=False)


@register_task("bible-characters")
def bible_characters(
    hidden: int = 128,
    layers: int = 2,
    length: int = 64,
    limit: int | None = None,
    data: str | None = None,
) -> Task:
    """Build the task: the next character of the King James Bible."""
    tokens, vocabulary = bible_tokens(given("bible-characters", data, "bible"))
    parts = [chunks(part, length, limit if i == 0 else None) for i, part in enumerate(tokens)]
    model: dict[str, float | int] = {"embedding": hidden, "hidden": hidden, "layers": layers}
    return language_task("bible-characters", "the King James Bible", parts, vocabulary, model)
