"""Tasks with data of ``pathspace data fetch``: Fashion-MNIST and the King James Bible."""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise
from pathlib import Path

from torch import Tensor
from torch.nn.functional import avg_pool2d

from ..data import bible_text, given
from ..task import Split, Task, register_task
from .digits import register_sequences
from .images import register_images
from .papers import mnist_splits, tokens_of
from .text import chunks, language_task


def fashion_splits(
    task: str, data: str | None = None, pool: int = 1, limit: int | None = None
) -> list[Split]:
    """Read Fashion-MNIST: images of shape (N, 1, 28 / pool, 28 / pool)."""
    train, *others = mnist_splits(given(task, data, "fashion-mnist"))
    parts = (Split(train.inputs[:limit], train.targets[:limit]), *others)
    return [Split(avg_pool2d(part.inputs, pool), part.targets) for part in parts]


FASHION = "Fashion-MNIST"
register_sequences(FASHION, partial(fashion_splits, pool=2), **{"fashion-14": 14})
register_sequences(FASHION, fashion_splits, **{"fashion-28": 28})
register_images("fashion-images", FASHION, fashion_splits, 16, "recurrent", 2)


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
    model = {"embedding": hidden, "hidden": hidden, "layers": layers}
    return language_task("bible-characters", "the King James Bible", parts, vocabulary, {**model})
