"""``text-masked-words``: guess a hidden word from its neighbours, in real English text;
it gives word vectors, too.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from pathspace.errors import InputError

from ..task import Split, Task, error_rate, register_task, seeded
from .text import topics_text

MASK, UNKNOWN = 0, 1
SHARES = (0.8, 0.9)


class MaskedWords(nn.Module):
    """One attention of the hidden place on its neighbours: ``x^ = sum_t q_t
    V x_t``, scores ``E x^``.

    ``q`` is the softmax of ``x_mask Q K x_t``, that is, the mean of the neighbours under a
    distribution that depends on them. The read-out is the embedding ``E`` itself, so that words
    with like neighbours get like vectors.

    Args:
        vocabulary: number of words, the mask included.
        width: features per word.
        places: words of an example, the hidden one in the middle.

    Reference:
        Evolution of neural network, section 4.1.

    Example:
        >>> MaskedWords(9, 4, 3)(torch.tensor([[5, 0, 7]])).shape
        torch.Size([1, 9])
    """

    def __init__(self, vocabulary: int, width: int, places: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.places = nn.Parameter(0.1 * torch.randn(places, width))
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, words: Tensor) -> Tensor:
        """Map words of shape (B, places) to scores of the hidden word, shape (B, vocabulary)."""
        states = self.embedding(words) + self.places
        middle = words.shape[1] // 2
        weights = (
            self.query(states[:, middle : middle + 1])
            @ self.key(states).mT
            / states.shape[2] ** 0.5
        ).softmax(2)
        mean = (weights @ self.value(states)).squeeze(1)
        result: Tensor = mean @ self.embedding.weight.T + self.bias
        return result


@cache
def vocabulary_of(size: int) -> tuple[str, ...]:
    """Return the ``size`` most frequent words of the text, after the mask and the unknown word.

    Example:
        >>> vocabulary_of(4)[:3]
        ('<mask>', '<unknown>', 'the')
    """
    frequency = Counter(_words())
    known = sorted(frequency, key=lambda word: (-frequency[word], word))[: size - 2]
    return ("<mask>", "<unknown>", *known)


@cache
def _words() -> tuple[str, ...]:
    return tuple(re.findall(r"[a-z]+(?:'[a-z]+)?", topics_text().lower()))


@register_task("text-masked-words")
def text_masked_words(
    hidden: int = 32, words: int = 1000, reach: int = 3, limit: int = 20_000
) -> Task:
    """Build the task: the word in the middle of ``2 reach + 1``, from the others.

    Example:
        >>> task = text_masked_words(8, limit=100)
        >>> task.train.inputs.shape, bool((task.train.inputs[:, 3] == MASK).all())
        (torch.Size([100, 7]), True)
    """
    for what, value, least in (
        ("hidden", hidden, 1),
        ("words", words, 3),
        ("reach", reach, 1),
        ("limit", limit, 10),
    ):
        if value < least:
            raise InputError(
                f"Task 'text-masked-words' got {what} = {value}; give at least {least}."
            )
    known = vocabulary_of(words)
    place = {word: token for token, word in enumerate(known)}
    tokens = torch.tensor([place.get(word, UNKNOWN) for word in _words()])
    cuts = [0, *(int(len(tokens) * share) for share in SHARES), len(tokens)]
    train, valid, test = (
        _examples(tokens[cuts[i] : cuts[i + 1]], reach, limit if i == 0 else limit // 10)
        for i in range(3)
    )

    return Task(
        name="text-masked-words",
        description=(
            f"a hidden word of Python's documentation topics, {reach} known on either side,"
            f" {len(known)} words; {len(train)} training, {len(valid)} validation and {len(test)}"
            " test examples"
        ),
        train=train,
        valid=valid,
        test=test,
        make_model=seeded(lambda: MaskedWords(len(known), hidden, 2 * reach + 1)),
        loss=functional.cross_entropy,
        metric=error_rate,
        metric_name="error",
        hopeless=0.99,
    )


def _examples(tokens: Tensor, reach: int, limit: int) -> Split:
    windows = tokens.unfold(0, 2 * reach + 1, 1)
    # An unknown word is not worth guessing.
    windows = windows[windows[:, reach] != UNKNOWN]
    if len(windows) > limit:
        windows = windows[torch.linspace(0, len(windows) - 1, limit).long()]
    inputs = windows.clone()
    inputs[:, reach] = MASK
    return Split(inputs, windows[:, reach].clone())


def nearest_words(model: MaskedWords, word: str, count: int = 5) -> list[tuple[str, float]]:
    """Return the words whose vectors point most nearly where that of a word does.

    Example:
        >>> model = text_masked_words(8, limit=100).make_model(0)
        >>> len(nearest_words(model, "the", 3))
        3
    """
    known = vocabulary_of(model.embedding.num_embeddings)
    if word not in known[2:]:
        raise InputError(
            f"The word '{word}' is not among the {len(known) - 2} that the model knows; try"
            " 'function'."
        )
    vectors = functional.normalize(model.embedding.weight.detach(), dim=1)
    cosines = vectors @ vectors[known.index(word)]
    order = [
        i for i in cosines.argsort(descending=True).tolist() if i > UNKNOWN and known[i] != word
    ][:count]
    return [(known[i], cosines[i].item()) for i in order]
