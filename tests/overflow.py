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
PROBE = """<!doctype html><meta charset="utf-8"><pre id="found"></pre><iframe id="page" height="900"></iframe><script>
const pages = %s, widths = %s, found = [], frame = document.getElementById("page");
const scrolls = (one, root) => {
  for (; one && one !== root; one = one.parentElement)
    if (/auto|scroll|hidden|clip/.test(getComputedStyle(one).overflowX)) return true;
  return false;
};
const seen = (one, box) => box.width && box.height && getComputedStyle(one).visibility !== "hidden";
const look = (page, width) => {
  const root = frame.contentDocument.documentElement, body = frame.contentDocument.body;
  const out = [...body.querySelectorAll("*")].filter((one) => {
    const box = one.getBoundingClientRect();
    return seen(one, box) && box.right > width + 1 && box.left < width && !scrolls(one.parentElement, body);
  });
  if (root.scrollWidth > width || out.length)
    found.push([page, width, root.scrollWidth, out.slice(0, 3).map((one) => one.tagName + "." + one.className)]);
};
const next = (number) => {
  if (number === pages.length) {
    document.getElementById("found").textContent = JSON.stringify({ pages: number, found });
    frame.remove();
    return;
  }
  frame.onload = () => {
    const still = frame.contentDocument.createElement("style");
    still.textContent = "* { transition: none !important }";
    frame.contentDocument.head.append(still);
    for (const width of widths) { frame.width = width; look(pages[number], width); }
    next(number + 1);
  };
  frame.src = pages[number];
};
next(0);
</script>"""  # noqa: E501


def overflow(pages: list[Path], dark: bool) -> list[tuple[str, int, int, list[str]]]:
    """Page, width, width that it takes, and elements that stick out, for pages that do not fit.

    Raises:
        RuntimeError: there is no browser, or it did not come to the end.
    """
    chrome = browser()
    if chrome is None:
        raise RuntimeError("found no browser: install chromium, or set PATHSPACE_BROWSER")
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder, "probe.html")
        probe.write_text(
            PROBE % (json.dumps([page.as_uri() for page in pages]), json.dumps(WIDTHS)),
            encoding="utf-8",
        )
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        files = [
            "--allow-file-access-from-files",
            "--disable-web-security",
            "--window-size=1500,1000",
        ]
        text = dump(
            chrome,
            probe.as_uri(),
            Path(folder),
            *files,
            scheme,
            f"--virtual-time-budget={len(pages) * 2000}",
        )
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
