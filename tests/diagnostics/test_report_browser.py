"""The page in a real browser: no error, and its controls do what they say. Collected
only where a browser runs.

A probe written into the page uses its controls and leaves what it saw in the document, which the
browser prints; so nothing is needed but the browser itself (``make browser`` insists on one).
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import mlp

from pathspace.diagnostics import report

# (a browser)
pytestmark = pytest.mark.slow

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage".split()
FLAGS.append("--virtual-time-budget=3000")


def dump(browser: str, address: str, folder: Path | None = None, *more: str) -> str:
    """The document as the browser has it once its scripts have run."""
    place = [] if folder is None else [f"--user-data-dir={folder}"]
    words = [browser, *FLAGS, *place, *more, "--dump-dom", address]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout


@cache
def browser() -> str | None:
    """A browser that starts, or None."""
    for name in (os.environ.get("PATHSPACE_BROWSER", ""), *NAMES):
        found = shutil.which(name) if name else None
        if found:
            try:
                if "<html" in dump(found, "about:blank"):
                    return found
            except (OSError, subprocess.SubprocessError):
                continue
    return None


# what uses the controls of a page, and what keeps its errors
PAGES = Path(__file__).parents[1] / "pages"
PROBE, WATCH = ((PAGES / name).read_text(encoding="utf-8") for name in ("probe.js", "watch.html"))


def used(found: str, page: Path, folder: Path, *more: str) -> dict[str, Any]:
    """What the probe saw on a page."""
    text = page.read_text()
    page.write_text(
        text.replace("<style>", WATCH + "<style>", 1).replace(
            "</body>", f"<script>{PROBE}</script></body>"
        )
    )
    shown = dump(found, page.as_uri(), folder, *more)
    match = re.search(r'<pre id="probe">(.*?)</pre>', shown, re.DOTALL)
    assert match, shown[-2000:]
    seen: dict[str, Any] = json.loads(html.unescape(match[1]))
    return seen


CHROME = browser()

if CHROME is not None:

    def test_controls_work_and_nothing_is_wrong(tmp_path: Path) -> None:
        assert CHROME is not None
        torch.manual_seed(0)
        found = report(mlp(4, 6, 5, 2), torch.randn(8, 4))
        found.save(tmp_path / "report.html")
        seen = used(
            CHROME, tmp_path / "report.html", tmp_path / "profile", "--window-size=1200,900"
        )
        assert seen["errors"] == [] and seen["wide"]
        start, zoomed, moved = seen["start"], seen["zoomed"], seen["moved"]
        assert zoomed[2] == round(start[2] / 1.3, 6) or abs(zoomed[2] * 1.3 - start[2]) < 1e-6
        assert moved[0] > zoomed[0] and moved[1] > zoomed[1] and moved[2] == zoomed[2]
        assert seen["swallowed"], "a drag must not choose the layer it ends on"
        assert seen["reset"] == start
        assert seen["scrolled"] == seen["fit"] and seen["wheeled"][2] < seen["fit"][2]
        layers = found.facts["graph"]["layers"]
        assert [entry["title"] for entry in seen["layers"]] == [layer["name"] for layer in layers]
        for entry, layer in zip(seen["layers"], layers, strict=True):
            assert entry["chosen"] == 1
            assert all(tensor["name"] in entry["text"] for tensor in layer["tensors"])
            masks = [tensor["mask"] for tensor in layer["tensors"] if tensor["mask"]]
            assert entry["cells"] == sum(len(mask["cells"]) for mask in masks)
        assert len(seen["groups"]) == 2
        assert "6 units" in seen["groups"][0] and "Scales" in seen["groups"][0]
        assert seen["found"] == "1" and seen["paper"][:2] == [0, 0]

    def test_colours_follow_the_reader(tmp_path: Path) -> None:
        assert CHROME is not None
        found = report(mlp(2, 3, 2), torch.randn(8, 2))
        colours = set()
        for name, more in (("light", []), ("dark", ["--blink-settings=preferredColorScheme=0"])):
            found.save(tmp_path / f"{name}.html")
            seen = used(CHROME, tmp_path / f"{name}.html", tmp_path / name, *more)
            assert seen["errors"] == []
            colours.add(seen["background"])
        assert colours == {"rgb(255, 255, 255)", "rgb(20, 23, 26)"}
