"""Loaders of the papers' data, on small files in the genuine formats; what is missing
or damaged is one sentence.
"""

from __future__ import annotations

import gzip
import math
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pathspace.errors import InputError
from pathspace.training.experiments.models.translator import Translator
from pathspace.training.experiments.tasks import load_task
from pathspace.training.experiments.tasks.files import read_batch, read_idx
from pathspace.training.experiments.tasks.papers import cifar_splits, mnist_splits, tokens_of
from pathspace.training.experiments.tasks.translation import (
    english_words,
    german_words,
    read_catalogue,
)


def idx(array: np.ndarray, code: int) -> bytes:
    """Written by the format's own description, not by the reader."""
    header = struct.pack(">BBBB", 0, 0, code, array.ndim) + b"".join(
        struct.pack(">I", n) for n in array.shape
    )
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write_mnist(
    folder: Path, packed: bool = False, train: int = 24, test: int = 6, classes: int = 10
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    first = None
    for part, count in (("train", train), ("t10k", test)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % classes).astype(np.uint8)
        first = first or (images, labels)
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            data, path = idx(array, 8), folder / f"{part}-{name}-ubyte"
            if packed:
                path.with_suffix(".gz").write_bytes(gzip.compress(data))
            else:
                path.write_bytes(data)
    assert first is not None
    return first


def write_cifar(folder: Path, classes: int) -> np.ndarray:
    """Dictionaries with byte-string keys, protocol 2: what the original files hold."""
    rng = np.random.default_rng(0)
    names = (
        [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
        if classes == 10
        else ["train", "test"]
    )
    first = None
    for name in names:
        pixels = rng.integers(0, 256, (12, 3072), dtype=np.uint8)
        first = pixels if first is None else first
        labels = [int(label) for label in rng.integers(0, classes, 12)]
        batch = {
            b"data": pixels,
            b"labels" if classes == 10 else b"fine_labels": labels,
            b"batch_label": b"x",
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    assert first is not None
    return first


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_is_read_and_normalised_by_its_training_part(tmp_path: Path, packed: bool) -> None:
    images, labels = write_mnist(tmp_path, packed)
    train, valid, test = mnist_splits(tmp_path)
    assert (len(train), len(valid), len(test)) == (22, 2, 6)
    assert abs(train.inputs.mean()) < 1e-5 and abs(train.inputs.std(correction=0) - 1) < 1e-5
    kept = images[:22].astype(float)
    assert np.allclose(valid.inputs[1, 0], (images[23] - kept.mean()) / kept.std(), atol=1e-5)
    assert torch.equal(train.targets, torch.tensor(labels[:22].astype(int)))


@pytest.mark.parametrize(
    ("dtype", "code"), [("u1", 8), ("i1", 9), ("i2", 11), ("i4", 12), ("f4", 13), ("f8", 14)]
)
def test_idx_of_every_type(tmp_path: Path, dtype: str, code: int) -> None:
    array = (np.arange(12).reshape(3, 4) - 3).astype(dtype)
    (tmp_path / "x").write_bytes(idx(array, code))
    assert np.array_equal(read_idx(tmp_path / "x", "hint"), array)


@pytest.mark.parametrize("length", [0, 3, 7, 20, 27])
def test_truncated_idx_is_one_sentence(tmp_path: Path, length: int) -> None:
    (tmp_path / "x").write_bytes(idx(np.arange(16, dtype=np.uint8).reshape(4, 4), 8)[:length])
    with pytest.raises(InputError, match="idx file") as caught:
        read_idx(tmp_path / "x", "get it there")
    assert str(caught.value).endswith("get it there.") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "spoil", "sentence"),
    [
        ({"train": 0}, None, "has too few training images: 0, expected at least 2"),
        ({"test": 0}, None, "has too few test images: 0, expected at least 1"),
        ({"classes": 24}, None, "The training labels in .* go from 0 to 23, expected whole"),
        ({"packed": True}, lambda b: b[:20], "cannot be read, it may be cut off"),
        ({}, lambda b: idx(np.zeros(3, np.uint8), 8), "do not belong together"),
    ],
)
def test_images_that_are_none_are_one_sentence(
    tmp_path: Path, options: Any, spoil: Callable[[bytes], bytes] | None, sentence: str
) -> None:
    write_mnist(tmp_path, **options)
    (path,) = tmp_path.glob("train-labels*")
    if spoil is not None:
        path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(InputError, match=sentence):
        load_task("mnist-28", hidden=4, data=str(tmp_path))


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_is_read(tmp_path: Path, classes: int) -> None:
    """In the folder as it is unpacked."""
    name = "cifar-10-batches-py" if classes == 10 else "cifar-100-python"
    (tmp_path / name).mkdir()
    pixels = write_cifar(tmp_path / name, classes)
    train, valid, test = cifar_splits(tmp_path, classes)
    count = 60 if classes == 10 else 12
    held = count // 12
    assert (len(train), len(valid), len(test)) == (count - held, held, 12)
    assert train.inputs.shape[1:] == (3, 32, 32)
    assert torch.allclose(train.inputs.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    # the first 1024 numbers of a row are the red plane
    red = torch.tensor(pixels[0, :1024].reshape(32, 32).astype(np.float32))
    assert torch.corrcoef(torch.stack([red.flatten(), train.inputs[0, 0].flatten()]))[0, 1] > 0.9999
    assert load_task(f"cifar{classes}", hidden=2, depth=8, data=str(tmp_path)).make_model(0)


class Evil:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return (print, ("run",))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        pickle.dumps([1]),
        pickle.dumps({b"data": 1, b"labels": [1]}),
        pickle.dumps(Evil()),
    ],
)
def test_damaged_or_hostile_batches_are_one_sentence_and_run_nothing(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(InputError, match="is not a python batch with data and labels"):
        read_batch(tmp_path / "x", "labels", "hint")
    assert capsys.readouterr().out == ""


def test_tokens_are_numbered_by_the_training_text() -> None:
    (train, other), size = tokens_of(["the cat\nthe <unk>\n", "the dog"], words=True)
    assert size == 4 and train.tolist() == [1, 3, 0, 1, 2, 0] and other.tolist() == [1, 2, 0]
    (letters, new), size = tokens_of(["aab", "abc"], words=False)
    assert size == 3 and letters.tolist() == [0, 0, 1] and new.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("task", "files"),
    [
        ("ptb", "ptb.{}.txt"),
        ("ptb-characters", "ptb.char.{}.txt"),
        ("wikitext-2", "wiki.{}.tokens"),
    ],
)
def test_texts_are_read(tmp_path: Path, task: str, files: str) -> None:
    for part in ("train", "valid", "test"):
        (tmp_path / files.format(part)).write_text(" a b c a b \n = x = \n" * 20, encoding="utf-8")
    loaded = load_task(task, hidden=4, layers=1, length=10, data=str(tmp_path))
    assert torch.equal(loaded.train.inputs[:, 1:], loaded.train.targets[:, :-1])
    assert loaded.metric_name == ("bits" if task.endswith("characters") else "perplexity")


def test_enwik8_has_the_papers_alphabet(tmp_path: Path) -> None:
    (tmp_path / "enwik8").write_bytes("<mediaWiki>é".encode() * 400)
    options = {"hidden": 4, "layers": 1, "length": 20, "data": str(tmp_path)}
    task = load_task("enwik8", **options)
    # a blank and nine letters, 400 times, and a blank at the end
    assert (len(task.train), len(task.valid), len(task.test)) == (179, 9, 10)
    word = [task.train.inputs[0, i : i + 10] for i in (0, 10)]
    assert torch.equal(*word) and task.hopeless == math.log2(8), "a blank, m, e, d, i, a, w and k"
    (tmp_path / "text8").write_bytes(b" abcdefghijklmnopqrstuvwxyz" * 400)
    assert load_task("enwik8", **options).hopeless == math.log2(27)


def test_parallel_text_is_read_and_must_be_parallel(tmp_path: Path) -> None:
    for part in ("train", "valid", "test"):
        (tmp_path / f"{part}.en").write_text("a cat\ntwo dogs\n")
        (tmp_path / f"{part}.de").write_text("eine Katze\nzwei Hunde\n")
    task = load_task("wmt16", hidden=8, layers=1, data=str(tmp_path))
    assert len(task.train) == 2 and isinstance(task.make_model(0), Translator)
    (tmp_path / "test.de").write_text("eine Katze\n")
    with pytest.raises(InputError, match="have 2 and 1 lines"):
        load_task("wmt16", data=str(tmp_path))


@pytest.mark.parametrize("task", ["mnist-28", "mnist-images", "cifar10", "ptb", "enwik8", "wmt16"])
def test_absent_data_is_one_sentence_with_the_way_out(tmp_path: Path, task: str) -> None:
    cases = {None: "--data DIR", str(tmp_path): "has no", str(tmp_path / "no"): "here is no folder"}
    for data, found in cases.items():
        with pytest.raises(InputError, match=found) as caught:
            load_task(task, data=data)
        assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_text_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    for content, words in ((b"\xff\xfe\x00", "not a text in UTF-8"), (b"  \n", "is empty")):
        for part in ("train", "valid", "test"):
            (tmp_path / f"ptb.{part}.txt").write_bytes(content)
        with pytest.raises(InputError, match=words):
            load_task("ptb", data=str(tmp_path))


# ---- translation ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "english", "german"),
    [
        (0, "zero", "null"),
        (17, "seventeen", "siebzehn"),
        (30, "thirty", "dreißig"),
        (71, "seventy one", "einundsiebzig"),
        (21_021, "twenty one thousand twenty one", "einundzwanzigtausendeinundzwanzig"),
        (
            987_654,
            "nine hundred eighty seven thousand six hundred fifty four",
            "neunhundertsiebenundachtzigtausendsechshundertvierundfünfzig",
        ),
    ],
)
def test_numbers_in_two_languages(number: int, english: str, german: str) -> None:
    assert " ".join(english_words(number)) == english and "".join(german_words(number)) == german


def test_no_number_is_in_two_splits_and_none_is_written_like_another() -> None:
    task = load_task("number-words", hidden=8, limit=400)
    rows = torch.cat([split.inputs for split in (task.train, task.valid, task.test)])
    assert len(rows.unique(dim=0)) == len(rows) == 600


def catalogue(messages: dict[str, str]) -> bytes:
    """A .mo file by the format's description: two tables of lengths and offsets, then the texts."""
    pairs = sorted((key.encode(), value.encode()) for key, value in messages.items())
    count, start = len(pairs), 28 + 16 * len(pairs)
    texts, tables = b"", ([], [])  # type: ignore[var-annotated]
    for place in range(2):
        for pair in pairs:
            tables[place].append(struct.pack("<II", len(pair[place]), start + len(texts)))
            texts += pair[place] + b"\0"
    head = struct.pack("<IIIIIII", 0x950412DE, 0, count, 28, 28 + 8 * count, 0, start)
    return head + b"".join(tables[0]) + b"".join(tables[1]) + texts


def test_catalogues_are_read(tmp_path: Path) -> None:
    messages = {"": "Content-Type: text/plain; charset=UTF-8\n", "_Open %s": "%s ö_ffnen"}
    messages |= {f"file {i}": f"Datei {i}" for i in range(30)}
    (tmp_path / "a.mo").write_bytes(catalogue(messages))
    pairs = read_catalogue(tmp_path / "a.mo")
    assert (["open", "%s"], ["%s", "öffnen"]) in pairs and len(pairs) == 31
    task = load_task("catalogues", hidden=8, layers=1, data=str(tmp_path))
    assert (len(task.train), len(task.valid), len(task.test)) == (25, 3, 3)
    latin = catalogue({"": "Last-Translator: Jörg\n"}).replace("ö".encode(), b"\xf6?")
    (tmp_path / "a.mo").write_bytes(latin)
    with pytest.raises(InputError, match="has text that is not UTF-8; use a folder without it"):
        load_task("catalogues", data=str(tmp_path))
    (tmp_path / "a.mo").write_bytes(catalogue(messages)[:300])
    with pytest.raises(InputError, match="is not a message catalogue, or it is cut off"):
        load_task("catalogues", data=str(tmp_path))
