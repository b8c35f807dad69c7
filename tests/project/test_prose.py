"""The reader of prose finds what has to go and leaves plain sentences alone."""

from __future__ import annotations

import pytest

pytest.importorskip("proselint")

import prose

HARD = [
    "The library proves how many independent path values describe it.",
    "Give it a Python that knows the library.",
    "Gates are pinned. Pinning is what they are.",
    "The operator R is no Markov chain.",
    "What a batch is good for depends on its size.",
    "The buffers are drawn anew.",
    "There are a very unique set of weights.",
    " ".join(["The step of the optimizer"] + ["moves the weight of the unit"] * 9) + ".",
]
PLAIN = [
    "The operator R is not a Markov chain.",
    "There is no such file; give the path of a model.",
    "The bound is no longer than needed.",
    "A unit can be rescaled without changing the function.",
    "It lists " + ", ".join(["a weight and its unit"] * 12) + ".",
]


@pytest.mark.parametrize("sentence", HARD)
def test_hard_sentences_are_found(sentence: str) -> None:
    assert list(prose.findings(sentence))


@pytest.mark.parametrize("sentence", PLAIN)
def test_plain_sentences_are_left_alone(sentence: str) -> None:
    assert list(prose.findings(sentence)) == []


def test_code_and_formulas_are_not_prose() -> None:
    page = "Say `is no value` and $x$ is no\n```python\n# is no code anew\n```\nend."
    text = prose.blank(prose.CODE, page)
    assert len(text) == len(page) and text.count("\n") == page.count("\n")
    assert "value" not in text and "anew" not in text and text.startswith("Say ")
    assert "2.0" not in prose.blank(prose.EXAMPLE, "    >>> f(1)\n    2.0\n\nMore.")
