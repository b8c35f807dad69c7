"""The gallery: notebooks made by running plain sources, ``docs/gallery/NAME.py`` with cells that begin with ``# %%``.

``python docs/notebooks.py [NAME ...]`` runs sources and writes ``NAME.ipynb`` with their outputs; the tests run the
sources again and compare. A first line ``# needs: PACKAGE ...`` names packages beyond those of the library.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import importlib.util
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GALLERY = Path(__file__).parent / "gallery"
MARK = re.compile(r"^# %%(?P<kind>[^\n]*)\n", re.MULTILINE)
NEEDS = re.compile(r"\A# needs: (.*)\n")


def missing(source: str) -> list[str]:
    """Packages that a source needs and that are not installed."""
    found = NEEDS.match(source)
    return (
        [name for name in found[1].split() if importlib.util.find_spec(name) is None]
        if found
        else []
    )


def cells(source: str) -> Iterator[tuple[str, str]]:
    """``("markdown" or "code", text)`` of each cell."""
    parts = MARK.split(NEEDS.sub("", source))
    for kind, text in zip(parts[1::2], parts[2::2], strict=True):
        if "[markdown]" in kind:
            yield "markdown", re.sub(r"^# ?", "", text, flags=re.MULTILINE).strip()
        else:
            yield "code", text.strip()


def run(source: str) -> Iterator[dict[str, Any]]:
    """Run the cells of a source in order; yield each as a notebook keeps it, outputs included."""
    import matplotlib
    import torch

    matplotlib.use("Agg")
    torch.manual_seed(0)
    space: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for number, (kind, text) in enumerate(cells(source)):
        cell = {
            "cell_type": kind,
            "id": f"cell-{number}",
            "metadata": {},
            "source": text.splitlines(keepends=True),
        }
        if kind == "code":
            count += 1
            cell |= {"execution_count": count, "outputs": outputs(text, space, count)}
        yield cell


def outputs(code: str, space: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Run one cell: what it prints, the value of its last expression, and the figures it leaves."""
    tree, printed, found = ast.parse(code), io.StringIO(), []
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), space)
        value = eval(compile(last, "<cell>", "eval"), space) if last is not None else None
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        found.append({"output_type": "stream", "name": "stdout", "text": lines})
    if value is not None and not code.endswith(";"):
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
        found.append(
            {
                "output_type": "execute_result",
                "execution_count": count,
                "metadata": {},
                "data": data,
            }
        )
    return found + figures()


def figures() -> list[dict[str, Any]]:
    """Pictures of all open figures, which are closed."""
    from matplotlib import pyplot

    found = []
    for number in pyplot.get_fignums():
        picture = io.BytesIO()
        pyplot.figure(number).savefig(picture, dpi=100, format="png", metadata={"Software": None})
        data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
        found.append({"output_type": "display_data", "metadata": {}, "data": data})
    pyplot.close("all")
    return found


def texts(cells_run: list[dict[str, Any]]) -> list[str]:
    """What cells print and return, as text: what two runs are compared by."""
    each = (output for cell in cells_run for output in cell.get("outputs", []))
    return ["".join(one.get("text", []) or one["data"].get("text/plain", [])) for one in each]


def notebook(found: list[dict[str, Any]]) -> str:
    """A notebook file of these cells."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": found, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def markdown(text: str) -> str:
    """A notebook as a page: its Markdown, its code, and what that printed, returned and drew."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(
                    f'<img alt="What the cell draws" src="data:image/png;base64,{data["image/png"]}">'
                )
            elif "text/html" in data:
                parts.append(
                    '<div class="output" markdown="0">' + "".join(data["text/html"]) + "</div>"
                )
            else:
                plain = "".join(output.get("text", []) or data["text/plain"]).rstrip("\n")
                parts.append(f"```text\n{plain}\n```")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    for path in [GALLERY / f"{name}.py" for name in sys.argv[1:]] or sorted(GALLERY.glob("*.py")):
        if absent := missing(path.read_text()):
            print(f"{path.name} is left as it was: it needs {', '.join(absent)}")
            continue
        path.with_suffix(".ipynb").write_text(notebook(list(run(path.read_text()))))
        print(f"wrote {path.with_suffix('.ipynb').name}")
