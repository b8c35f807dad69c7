"""Are pages wider than a window? Every page of a folder at three widths, in light and
in dark, in a real browser.

``python tests/overflow.py site`` lists pages that scroll sideways and pages where something
sticks out of the window, with the elements that do. What scrolls in a box of its own (tables,
code) is as it should be.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from html import unescape
from pathlib import Path

from tests.diagnostics.test_report_browser import browser, dump

WIDTHS = (1400, 1200, 390)
PROBE = Path(__file__).parent / "pages" / "overflow.html"


def overflow(pages: list[Path], dark: bool) -> list[tuple[str, int, int, list[str]]]:
    """Page, width, width that it takes, and elements that stick out, for pages that do not fit.

    Raises:
        RuntimeError: there is no browser, or it did not come to the end.
    """
    chrome = browser()
    if chrome is None:
        raise RuntimeError("found no browser: install chromium, or set PATHSPACE_BROWSER")
    with tempfile.TemporaryDirectory() as folder:
        probe, text = Path(folder, "probe.html"), PROBE.read_text(encoding="utf-8")
        addresses = json.dumps([page.as_uri() for page in pages])
        text = text.replace("WIDTHS", json.dumps(WIDTHS)).replace("PAGES", addresses)
        probe.write_text(text, encoding="utf-8")
        options = "--allow-file-access-from-files --disable-web-security --window-size=1500,1000"
        options += f" --blink-settings=preferredColorScheme={0 if dark else 1}"
        options += f" --virtual-time-budget={len(pages) * 2000}"
        text = dump(chrome, probe.as_uri(), Path(folder), *options.split())
    said = re.search(r'id="found">(\{.*?\})</pre>', text, re.DOTALL)
    if said is None:
        raise RuntimeError("the browser did not come to the end of the pages")
    return [
        (page, wide, took, names)
        for page, wide, took, names in json.loads(unescape(said[1]))["found"]
    ]


def main(folder: str) -> int:
    """Look at all pages of a folder."""
    pages, wrong = sorted(Path(folder).resolve().rglob("*.html")), 0
    for dark in (False, True):
        for start in range(0, len(pages), 20):
            for page, width, took, names in overflow(pages[start : start + 20], dark):
                wrong += 1
                print(
                    f"{page} at {width} ({'dark' if dark else 'light'}): {took} wide;"
                    f" {', '.join(names)}",
                    flush=True,
                )
    print(
        f"{len(pages)} pages at {', '.join(map(str, WIDTHS))} pixels, light and dark: {wrong} do"
        " not fit"
    )
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) and 1)
