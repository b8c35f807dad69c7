"""The notebooks of the gallery: they run, print what they show, and hold what their sources say."""

from __future__ import annotations

import json
import runpy
import warnings
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOKS = runpy.run_path(str(DOCS / "notebooks.py"))
SOURCES = sorted((DOCS / "gallery").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_notebooks_print_what_they_show(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if absent := NOTEBOOKS["missing"](source.read_text()):
        pytest.skip(f"needs {', '.join(absent)}")
    monkeypatch.chdir(tmp_path)
    kept = json.loads(source.with_suffix(".ipynb").read_text())["cells"]
    with warnings.catch_warnings():
        found = list(NOTEBOOKS["run"](source.read_text()))
    assert NOTEBOOKS["texts"](found) == NOTEBOOKS["texts"](kept)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_notebooks_hold_what_their_sources_say(source: Path) -> None:
    kept = json.loads(source.with_suffix(".ipynb").read_text())
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in kept["cells"]]
    assert cells == list(NOTEBOOKS["cells"](source.read_text())), (
        "write it again: python docs/notebooks.py"
    )
    assert (kept["nbformat"], kept["nbformat_minor"]) == (4, 5)
    assert cells[0][1].startswith("# ") and cells[-1][1].startswith("Next: ")


def test_every_notebook_is_in_the_list() -> None:
    listed = (DOCS / "gallery" / "index.md").read_text()
    for source in SOURCES:
        assert f"]({source.stem}.ipynb)" in listed


def test_a_cell_shows_prints_values_and_figures() -> None:
    code = "# %%\nimport matplotlib.pyplot as plt\nprint(1)\nplt.figure()\n2 + 3\n# %%\n4;\n"
    source = f"# %% [markdown]\n# # Title\n{code}"
    title, first, second = NOTEBOOKS["run"](source)
    assert title["source"] == ["# Title"] and [one["output_type"] for one in first["outputs"]] == [
        "stream", "execute_result", "display_data"
    ]  # fmt: skip
    assert NOTEBOOKS["texts"]([first]) == ["1\n", "5", ""] and second["outputs"] == []
    page = NOTEBOOKS["markdown"](NOTEBOOKS["notebook"]([title, first, second]))
    assert (
        page.startswith("# Title\n\n```python\nimport")
        and "```text\n5\n```" in page
        and "data:image/png" in page
    )
