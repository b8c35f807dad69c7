"""Pages that are made when the site is built: one per public name under its public path, one per notebook."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
import runpy
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

HERE = Path(__file__).parent
PACKAGES = ("pathspace", "pathspace.diagnostics", "pathspace.training")
# what public functions return
RESULTS = (
    "pathspace.gauge.balance.Balancing",
    "pathspace.paths.basis.BasisPaths",
    "pathspace.pruning.groups.ChannelGroup",
    "pathspace.pruning.channels.ChannelGroups",
    "pathspace.evidence.claims.Claim",
    "pathspace.pruning.compare.Comparison",
    "pathspace.fitting.equalisation.Equalised",
    "pathspace.evidence.explain.Explanation",
    "pathspace.fitting.dtype_range.Fitted",
    "pathspace.fitting.choice.Gauge",
    "pathspace.fitting.choice.GaugeCertificate",
    "pathspace.paths.masks.Masks",
    "pathspace.pruning.matching.Matching",
    "pathspace.paths.basis.Path",
    "pathspace.graph.parts.Pin",
    "pathspace.fitting.smoothing.SmoothingPair",
    "pathspace.paths.symbolic.SymbolicSpace",
    "pathspace.graph.parts.WeightBlock",
)
SHIM = (
    "https://unpkg.com/iframe-worker/shim"  # what the theme loads to search pages opened from disk
)
COMMAND = re.compile(r"^## (`pathspace .*)$", re.MULTILINE)
# a checkout has notebooks where the site has pages
NOTEBOOK = re.compile(r"\]\(((?:\.\./)*(?:gallery/)?\w+)\.ipynb\)")
CODE = re.compile(r"`[^`\n]*`")
# long tables that would hide the pages that explain
TABLES = (
    "benchmarks brackets causes channel-figures claims claims-markov compare gpu matrix"
    " paper-recipes reproduction survey trained"
).split()
PAGE = "::: {target}\n    options:\n      heading: {path}\n      heading_level: 1\n      toc_label: {name}\n"


def sentence(found: object) -> str:
    """The first sentence of a docstring, with its references as code and links to nowhere left out."""
    text = " ".join((inspect.getdoc(found) or "").split("\n\n")[0].split())
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`").replace("|", "\\|")


def api() -> Iterator[tuple[str, str]]:
    """Address and Markdown of every page of the API; the first lists them all."""
    index, pages = (
        ["# API\n\nOne page for each public name, under the path by which it is imported.\n"],
        [],
    )
    for package in PACKAGES:
        module = importlib.import_module(package)
        index.append(
            f"\n## {package}\n\n{sentence(module)}\n\n| name | what it is |\n| --- | --- |\n"
        )
        entries = [(f"{package}.{name}", getattr(module, name)) for name in module.__all__]
        if package == "pathspace":
            entries += [(path, pkgutil.resolve_name(path)) for path in RESULTS]
        for path, found in entries:
            name = path.rpartition(".")[2]
            target = f"{found.__module__}.{found.__qualname__}"
            index.append(f"| [`{name}`]({path}.md) | {sentence(found)} |\n")
            pages.append((f"api/{path}.md", PAGE.format(target=target, path=path, name=name)))
    return iter([("api/index.md", "".join(index)), *pages])


def gallery() -> Iterator[tuple[str, str]]:
    """Address and Markdown of every notebook of the gallery, with a link to the notebook itself."""
    notebooks = runpy.run_path(str(HERE / "notebooks.py"))
    for file in sorted((HERE / "gallery").glob("*.ipynb")):
        text = notebooks["markdown"](file.read_text(encoding="utf-8"))
        title, rest = text.split("\n", 1)
        yield (
            f"gallery/{file.stem}.md",
            f"{title}\n\n[This page as a notebook]({file.name}).\n{rest}",
        )


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs with the pages on disk; those that are made join them."""
    from mkdocs.structure.files import File

    for address, text in [*api(), *gallery()]:
        files.append(File.generated(config, address, content=text))
    return files


@functools.cache
def command_line() -> dict[str, Any]:
    """Every command by name, those of diagnostics and training among them."""
    from typer import Typer
    from typer.main import get_command

    from pathspace.cli.main import app

    others = Typer()
    for point in entry_points(group="pathspace.commands"):
        point.load()(others)
    return get_command(app).commands | get_command(others).commands


def options(name: str) -> str:
    """All options of a command as a table that opens with a click; what ``--help`` says."""
    rows = ['\n??? note "All options"\n', "    | option | |\n    | --- | --- |"]
    for parameter in command_line()[name].params:
        flags = ", ".join(
            f"`{flag}`"
            for flag in [*parameter.opts, *parameter.secondary_opts]
            if flag.startswith("-")
        )
        says = " ".join(
            re.sub(r"\[/?\w*\]", "", getattr(parameter, "help", None) or "").split()
        ).replace("|", "\\|")
        rows.append(f"    | {flags or f'`{parameter.name.upper()}`'} | {says} |")
    return "\n".join(rows) + "\n"


def commands(text: str) -> list[str]:
    """The commands that have a section in the guide, in order."""
    return [
        name for title in COMMAND.findall(text) for name in re.findall(r"`pathspace (\w+)", title)
    ]


def plain_bars(markdown: str) -> str:
    """``|`` for the ``\\|`` that other readers of Markdown want of code in tables, and this one would show."""
    return re.sub(
        r"^ *\|.*$",
        lambda row: CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]),
        markdown,
        flags=re.M,
    )


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Called by mkdocs with each page: sections on commands end with all their options, and long tables
    are not searched.
    """
    if page.file.src_uri.removesuffix(".md") in TABLES:
        page.meta["search"] = {"exclude": True}
    if not page.file.src_uri.startswith("gallery/") or page.file.src_uri == "gallery/index.md":
        markdown = NOTEBOOK.sub(r"](\1.md)", markdown)
    if page.file.src_uri == "command-line.md":
        parts = re.split(r"^(?=## )", markdown, flags=re.MULTILINE)
        markdown = "".join(part + "".join(map(options, commands(part))) + "\n" for part in parts)
    return plain_bars(markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Called by mkdocs at the end: nothing is loaded from elsewhere."""
    for page in Path(config.site_dir).rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        if SHIM in text:
            up = "../" * (len(page.relative_to(config.site_dir).parts) - 1)
            page.write_text(text.replace(SHIM, f"{up}assets/iframe-worker.js"), encoding="utf-8")
