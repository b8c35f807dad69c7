"""``text-characters``: Python's own documentation, which differs a little by version."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from pathspace.errors import InputError

from ..models.recurrent import StackedReluLM
from ..task import Split, Task, register_task, seeded

# Of the text, in order: training, validation, test.
SHARES = (0.8, 0.1, 0.1)


@cache
def topics_text() -> str:
    """Return the documentation of the running Python: printable ASCII, blanks joined."""
    from pydoc_data.topics import topics

    whole = "\n".join(topics[name] for name in sorted(topics))
    lines = (" ".join(line.split()) for line in whole.splitlines())
    return "\n".join("".join(c for c in line if " " <= c <= "~") for line in lines if line)


def topics_tokens() -> tuple[list[Tensor], int]:
    """Return that text as numbers of characters, in three parts, and the size of its alphabet."""
    text = topics_text()
    place = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([place[character] for character in text])
    ends = [int(len(tokens) * share) for share in (SHARES[0], SHARES[0] + SHARES[1])]
    return list(tokens.tensor_split(ends)), len(place)


def token_loss(outputs: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy over tokens; targets below 0 do not count."""
    scores, tokens = outputs.flatten(0, 1), targets.flatten()
    return functional.cross_entropy(scores, tokens, ignore_index=-1, label_smoothing=smoothing)


def bits(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy in bits per token, the metric of character models."""
    return token_loss(outputs, targets) / math.log(2)


def perplexity(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return ``exp`` of the cross-entropy; a mean of batches bounds that of the whole."""
    return token_loss(outputs, targets).exp()


def chunks(tokens: Tensor, length: int, limit: int | None = None) -> Split:
    """Cut a text into examples: ``length`` tokens in, the same shifted by one out."""
    count = (len(tokens) - 1) // length
    if count < 1:
        raise InputError(
            f"A text of {len(tokens)} tokens is too short for examples of {length}; give a longer"
            " text."
        )
    inputs = tokens[: count * length].view(count, length)
    targets = tokens[1 : count * length + 1].view(count, length)
    if limit is not None and limit < count:
        kept = torch.linspace(0, count - 1, limit).long()
        inputs, targets = inputs[kept], targets[kept]
    return Split(inputs.contiguous(), targets.contiguous())


def language_task(
    name: str,
    what: str,
    parts: Sequence[Split],
    vocabulary: int,
    model: dict[str, float | int],
    words: bool = False,
) -> Task:
    """Build the task of predicting the next token with a stacked ReLU RNN."""
    length = parts[0].inputs.shape[1]
    return Task.of(
        name,
        f"{what}, {vocabulary} tokens, in pieces of {length}",
        parts,
        "pieces",
        make_model=seeded(lambda: StackedReluLM(vocabulary, **model)),  # type: ignore[arg-type]
        loss=token_loss,
        metric=perplexity if words else bits,
        metric_name="perplexity" if words else "bits",
        # the value for equal probabilities of all tokens
        hopeless=float(vocabulary) if words else math.log2(vocabulary),
    )


@register_task("text-characters")
def text_characters(hidden: int = 64, layers: int = 2, length: int = 32, limit: int = 2000) -> Task:
    """Build the task: the next character of Python's documentation topics."""
    tokens, size = topics_tokens()
    fifth = max(1, limit // 5)
    parts = [
        chunks(part, length, some) for part, some in zip(tokens, (limit, fifth, fifth), strict=True)
    ]
    model = {"embedding": max(1, hidden // 4), "hidden": hidden, "layers": layers}
    what = "Python's documentation topics"
    return language_task("text-characters", what, parts, size, {**model})
