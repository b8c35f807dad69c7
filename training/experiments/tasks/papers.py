"""Tasks with the papers' own data in a folder of the user; nothing is downloaded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pathspace.errors import InputError

from ..task import Split, Task, register_task
from .digits import register_sequences
from .files import find, own_folder, read_batch, read_bytes, read_idx, read_text
from .images import register_images
from .text import chunks, language_task
from .translation import translation_task

MNIST = "MNIST's idx files come from yann.lecun.com/exdb/mnist or its mirrors"
CIFAR = "the python version of CIFAR comes from www.cs.toronto.edu/~kriz/cifar.html"
PTB = (
    "the Penn Treebank of Mikolov has ptb.train.txt, ptb.valid.txt and ptb.test.txt (ptb.char.*.txt"
    " for characters)"
)
WIKITEXT = "WikiText-2 has wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens"
ENWIK8 = "text8.zip and enwik8.zip come from mattmahoney.net/dc and hold the files text8 and enwik8"
WMT = "put one sentence per line into train.en, train.de, valid.en, valid.de, test.en and test.de"
# The original transformer's vocabulary has about 37,000 byte pairs of both languages.
WMT_TOKENS = 37_000
# One twelfth of the training images is the validation split, if the data have none.
HELD_OUT = 12


def standardised(train: np.ndarray, *others: np.ndarray) -> list[Tensor]:
    """Subtract mean and divide by standard deviation, per channel, of the training images."""
    axes = (0, 2, 3)
    mean = train.mean(axes, keepdims=True, dtype=np.float64)
    std = train.std(axes, keepdims=True, dtype=np.float64)
    std[std == 0] = 1.0
    return [torch.tensor((part - mean) / std, dtype=torch.float32) for part in (train, *others)]


def _parts(found: Sequence[np.ndarray], classes: int, folder: Path, hint: str) -> list[Split]:
    """Hold out the last twelfth of the training images; normalise all by the rest."""
    images, labels, test_images, test_labels = found
    for what, given, least in (("training", labels, 2), ("test", test_labels, 1)):
        if len(given) < least:
            raise InputError(
                f"The folder '{folder}' has too few {what} images: {len(given)}, expected at least"
                f" {least}; {hint}."
            )
        if not np.isin(given, np.arange(classes)).all():
            raise InputError(
                f"The {what} labels in '{folder}' go from {given.min()} to {given.max()}, expected"
                f" whole numbers from 0 to {classes - 1}; {hint}."
            )
    kept = len(images) - max(1, len(images) // HELD_OUT)
    inputs = standardised(images[:kept], images[kept:], test_images)
    targets = (labels[:kept], labels[kept:], test_labels)
    return [
        Split(a, torch.from_numpy(b.astype(np.int64))) for a, b in zip(inputs, targets, strict=True)
    ]


def mnist_splits(folder: Path) -> list[Split]:
    """Read MNIST's four idx files."""
    found = []
    for part in ("train", "t10k"):
        images = find(folder, (f"{part}-images-idx3-ubyte", f"{part}-images.idx3-ubyte"), MNIST)
        labels = find(folder, (f"{part}-labels-idx1-ubyte", f"{part}-labels.idx1-ubyte"), MNIST)
        pixels, classes = read_idx(images, MNIST), read_idx(labels, MNIST)
        if pixels.ndim != 3 or classes.ndim != 1 or len(pixels) != len(classes):
            raise InputError(
                f"The files '{images}' and '{labels}' do not belong together: their shapes are"
                f" {pixels.shape} and {classes.shape}; {MNIST}."
            )
        found += [pixels[:, None], classes]
    return _parts(found, 10, folder, MNIST)


def _mnist(name: str, data: str | None) -> list[Split]:
    return mnist_splits(own_folder(name, data, MNIST))


register_sequences("MNIST", _mnist, **{"mnist-28": 28, "mnist-98": 98})
register_images("mnist-images", "MNIST", _mnist, 32, "recurrent", 4)


def cifar_splits(folder: Path, classes: int) -> list[Split]:
    """Read CIFAR's python batches."""
    inner = folder / ("cifar-10-batches-py" if classes == 10 else "cifar-100-python")
    folder = inner if inner.is_dir() else folder
    labels = "labels" if classes == 10 else "fine_labels"
    names = [f"data_batch_{i}" for i in range(1, 6)] if classes == 10 else ["train"]
    batches = [read_batch(find(folder, (name,), CIFAR), labels, CIFAR) for name in names]
    last = "test_batch" if classes == 10 else "test"
    test = read_batch(find(folder, (last,), CIFAR), labels, CIFAR)
    images, targets = map(np.concatenate, zip(*batches, strict=True))
    return _parts((images, targets, *test), classes, folder, CIFAR)


def _cifar(name: str, data: str | None) -> list[Split]:
    return cifar_splits(own_folder(name, data, CIFAR), int(name.removeprefix("cifar")))


for _classes in (10, 100):
    register_images(f"cifar{_classes}", f"CIFAR-{_classes}", _cifar, 16, "resnet", 20, _classes)


def tokens_of(texts: Sequence[str], words: bool) -> tuple[list[Tensor], int]:
    """Number the tokens of texts by those of the first; return also how many there are."""
    lists = [
        [t for line in text.splitlines() for t in (*line.split(), "<eos>")] if words else list(text)
        for text in texts
    ]
    unknown = "<unk>"
    frequency = Counter(lists[0])
    known = sorted(frequency, key=lambda token: (token != "<eos>", -frequency[token], token))
    if unknown not in known:
        known.append(unknown)
    place = {token: i for i, token in enumerate(known)}
    parts = [torch.tensor([place.get(t, place[unknown]) for t in tokens]) for tokens in lists]
    return parts, len(known)


# name -> (files of the splits, words rather than characters, where it comes from)
CORPORA = {
    "ptb": ("ptb.{}.txt", True, PTB),
    "ptb-characters": ("ptb.char.{}.txt", False, PTB),
    "wikitext-2": ("wiki.{}.tokens", True, WIKITEXT),
}
PARTS = ("train", "valid", "test")
# what the paper's language models leave out at random, appendix A.2 and Table 3
DROPPED = {
    "dropout": 0.4,
    "dropout_inputs": 0.4,
    "dropout_layers": 0.2,
    "dropout_words": 0.1,
    "weight_drop": 0.1,
}


def _model(hidden: int, layers: int) -> dict[str, float | int]:
    return {"embedding": 400, "hidden": hidden, "layers": layers, **DROPPED}


def _corpus(
    name: str, hidden: int = 1550, layers: int = 4, length: int = 70, data: str | None = None
) -> Task:
    file, words, hint = CORPORA[name]
    folder = own_folder(name, data, hint)
    texts = [read_text(find(folder, (file.format(part),), hint), hint) for part in PARTS]
    tokens, vocabulary = tokens_of(texts, words)
    parts = [chunks(part, length) for part in tokens]
    return language_task(name, name, parts, vocabulary, _model(hidden, layers), words)


for _name in CORPORA:
    register_task(_name)(partial(_corpus, _name))


@register_task("enwik8")
def enwik8(hidden: int = 1550, layers: int = 4, length: int = 100, data: str | None = None) -> Task:
    """Build the task: the next character of Wikipedia, one of 27: a to z and the blank.

    The paper's numbers describe the file ``text8``, which is read if it is there; of the file
    ``enwik8``, capitals become small letters, and every run of other bytes a blank.
    """
    file = find(own_folder("enwik8", data, ENWIK8), ("text8", "enwik8"), ENWIK8)
    content = re.sub(rb"[^a-z]+", b" ", read_bytes(file, ENWIK8).lower())
    codes, tokens = np.unique(np.frombuffer(content, np.uint8), return_inverse=True)
    cuts = [int(len(content) * share) for share in (0.0, 0.9, 0.95, 1.0)]
    whole = torch.from_numpy(tokens)
    parts = [chunks(whole[a:b], length) for a, b in pairwise(cuts)]
    return language_task("enwik8", "enwik8", parts, len(codes), _model(hidden, layers))


@register_task("wmt16")
def wmt16(
    hidden: int = 512,
    layers: int = 6,
    longest: int = 100,
    dropout: float = 0.0,
    smoothing: float = 0.0,
    inner: int = 2048,
    original: bool = True,
    reverse: bool = False,
    data: str | None = None,
) -> Task:
    """Build the task: sentences translated between English and German."""
    folder, languages = own_folder("wmt16", data, WMT), ("de", "en") if reverse else ("en", "de")
    parts = []
    for part in PARTS:
        paths = [find(folder, (f"{part}.{language}",), WMT) for language in languages]
        first, second = (
            [line.split() for line in read_text(path, WMT).splitlines()] for path in paths
        )
        if len(first) != len(second):
            raise InputError(
                f"The files '{paths[0]}' and '{paths[1]}' have {len(first)} and {len(second)}"
                f" lines, expected as many in both; {WMT}."
            )
        parts.append(list(zip(first, second, strict=True)))
    what = f"WMT-16, {' to '.join(languages)}"
    more: dict[str, Any] = {"smoothing": smoothing, "inner": inner, "original": original}
    return translation_task(
        "wmt16", what, parts, hidden, layers, longest, WMT_TOKENS, dropout, **more
    )
