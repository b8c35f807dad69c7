"""`python -m golden write` and `python -m golden compare`, from `tests/`."""

from __future__ import annotations

import argparse
import fnmatch
import sys

from golden.differences import differences, report
from golden.rows import read, rows_of, write
from golden.targets import targets


def main() -> int:
    """Write or compare; 1 if an answer has changed."""
    parser = argparse.ArgumentParser(prog="python -m golden", description=__doc__)
    parser.add_argument("action", choices=["write", "compare"])
    parser.add_argument("--only", default="*", metavar="PATTERN", help="part of a name, * allowed")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes")
    parser.add_argument("--new", action="store_true", help="only models that have no row yet")
    options = parser.parse_args()
    pattern = f"*{options.only}*"
    kept = read()
    names = [
        name for name in fnmatch.filter(targets(), pattern) if not (options.new and name in kept)
    ]
    found = rows_of(names, options.jobs)
    if options.action == "write":
        others = {name: row for name, row in kept.items() if name in targets()}
        write(others | found)
        print(f"wrote {len(found):,} rows")
        return 0
    before = {} if options.new else {n: kept[n] for n in fnmatch.filter(kept, pattern)}
    changed = differences(before, found)
    print(report(changed, len(found)))
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
