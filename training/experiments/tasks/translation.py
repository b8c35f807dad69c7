"""``number-words``, English numerals, and ``catalogues``, messages: both into German."""

from __future__ import annotations

import gettext
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pathspace.errors import InputError

from ..data import given
from ..models.translator import Translator
from ..task import Split, Task, register_task, seeded
from .text import token_loss

PAD, START, END, UNKNOWN = 0, 1, 2, 3
SPECIAL = ("<pad>", "<start>", "<end>", "<unknown>")
SPLIT_SEED = 0
# the most frequent words that a task knows, unless it says otherwise
TOKENS = 8000

_ENGLISH = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen
""".split()
_ENGLISH_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_GERMAN = """
null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn
sechzehn siebzehn achtzehn neunzehn
""".split()
_GERMAN_TENS = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()


def english_words(number: int) -> list[str]:
    """Write a number from 0 to 999999 in English."""
    for size, word in ((1000, "thousand"), (100, "hundred")):
        many, rest = divmod(number, size)
        if many:
            return [*english_words(many), word, *(english_words(rest) if rest else [])]
    if number < len(_ENGLISH):
        return [_ENGLISH[number]]
    tens, units = divmod(number, 10)
    return [_ENGLISH_TENS[tens - 2], *([_ENGLISH[units]] if units else [])]


def german_words(number: int, last: bool = True) -> list[str]:
    """Write a number from 0 to 999999 in German; where nothing follows, one is "eins"."""
    for size, word in ((1000, "tausend"), (100, "hundert")):
        many, rest = divmod(number, size)
        if many:
            following = german_words(rest, last) if rest else []
            return [*german_words(many, last=False), word, *following]
    if number < len(_GERMAN):
        return ["eins" if number == 1 and last else _GERMAN[number]]
    tens, units = divmod(number, 10)
    return [*([_GERMAN[units], "und"] if units else []), _GERMAN_TENS[tens - 2]]


def token_accuracy_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of wrong target tokens without padding: one minus the paper's accuracy."""
    counts = targets >= 0
    return ((outputs.argmax(-1) != targets) & counts).float().sum() / counts.sum().clamp(min=1)


def encode_pairs(
    pairs: Sequence[tuple[Sequence[str], Sequence[str]]],
    vocabulary: dict[str, int],
    source: int,
    target: int,
) -> Split:
    """Turn pairs of sentences into rows of tokens."""
    inputs = torch.zeros(len(pairs), source + target, dtype=torch.int64)
    targets = torch.full((len(pairs), target), -1, dtype=torch.int64)
    for row, (first, second) in enumerate(pairs):
        left = [vocabulary.get(word, UNKNOWN) for word in first][:source]
        right = [vocabulary.get(word, UNKNOWN) for word in second][: target - 1]
        inputs[row, : len(left)] = torch.tensor(left)
        inputs[row, source : source + len(right) + 1] = torch.tensor([START, *right])
        targets[row, : len(right) + 1] = torch.tensor([*right, END])
    return Split(inputs, targets)


def heads_of(width: int) -> int:
    """Return the heads of a width: eight, or fewer of less than eight features each."""
    return next(
        heads for heads in (8, 4, 2, 1) if width % heads == 0 and width // heads >= min(8, width)
    )


def translation_task(
    name: str,
    what: str,
    parts: Sequence[Sequence[tuple[Sequence[str], Sequence[str]]]],
    width: int,
    layers: int,
    longest: int = 32,
    vocabulary_size: int = TOKENS,
    dropout: float = 0.0,
    smoothing: float = 0.0,
    inner: int | None = None,
    original: bool = False,
) -> Task:
    """Build the task of translating with an encoder-decoder transformer."""
    frequency = Counter(word for pair in parts[0] for word in (*pair[0], *pair[1]))
    known = sorted(frequency, key=lambda word: (-frequency[word], word))
    known = known[: vocabulary_size - len(SPECIAL)]
    vocabulary = {word: token for token, word in enumerate((*SPECIAL, *known))}
    source = min(longest, max(len(pair[0]) for part in parts for pair in part))
    target = min(longest, max(len(pair[1]) for part in parts for pair in part) + 1)
    sizes = width, heads_of(width), inner or 2 * width, layers, max(source, target)
    return Task.of(
        name,
        f"{what}, {len(vocabulary)} words",
        [encode_pairs(part, vocabulary, source, target) for part in parts],
        "pairs",
        make_model=seeded(lambda: Translator(len(vocabulary), source, *sizes, dropout, original)),
        loss=partial(token_loss, smoothing=smoothing),
        metric=token_accuracy_error,
        metric_name="error",
        hopeless=0.9,
    )


@register_task("number-words")
def number_words(
    hidden: int = 32,
    layers: int = 1,
    limit: int = 1200,
    tests: int | None = None,
    dropout: float = 0.0,
) -> Task:
    """Build the task: a number below a million in English words, translated into German."""
    if hidden % 2:
        raise InputError(f"Task 'number-words' got hidden = {hidden}; give an even number.")
    quarter = limit // 4
    tests = quarter if tests is None else tests
    numbers = np.random.default_rng(SPLIT_SEED).permutation(1_000_000)
    drawn = numbers[: limit + quarter + tests].tolist()
    pairs = [(english_words(number), german_words(number)) for number in drawn]
    parts = [pairs[:limit], pairs[limit : limit + quarter], pairs[limit + quarter :]]
    what = "numbers below a million, English to German"
    return translation_task("number-words", what, parts, hidden, layers, dropout=dropout)


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
