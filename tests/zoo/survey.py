"""Survey every model of the zoo: is it answered, and is the answer sound?

`python -m zoo.survey [NAME or FAMILY ...] [--library timm] --json FILE` from `tests/` writes rows,
of which `zoo.page` makes the page.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from pathspace.capture.capture import capture
from pathspace.errors import first_line
from pathspace.files.writing import replacing
from pathspace.inference.interpreter import interpret
from pathspace.inference.scales import Scales
from pathspace.inference.units import build_graph
from zoo.entry import Entry, load
from zoo.libraries import LIBRARIES
from zoo.soundness import rescaled, spread, trace_double, unbalanced

LARGE = 30_000_000


def survey(entry: Entry, mode: str, large: int = LARGE) -> dict[str, Any]:
    """One model in one mode, in its own precision and, up to a size, measured on a float64 copy
    with lively weights; an exception becomes part of the row.
    """
    row: dict[str, Any] = {"name": entry.name, "family": entry.family, "mode": mode, "error": ""}
    try:
        model, args, kwargs = entry.make(mode)
        row["scalars"] = sum(parameter.numel() for parameter in model.parameters())
        captured = capture(model, args, kwargs)
        graph = build_graph(captured, interpret(captured, Scales)[0])
        row |= {"weights": graph.num_weights, "units": graph.num_units}
        if row["scalars"] <= large:
            model, args, kwargs = entry.make(mode, small=True)
            graph, runner = trace_double(spread(model), args, kwargs)
            row |= {"rescaling": rescaled(graph, runner), "balance": unbalanced(graph, runner)}
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {first_line(error)}"[:300]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "wanted", nargs="*", help="names, families or prefixes; everything by default"
    )
    parser.add_argument("--json", type=Path, required=True, help="write all rows here")
    parser.add_argument(
        "--library", choices=sorted(LIBRARIES), help="the models of an installed library instead"
    )
    parser.add_argument(
        "--large", type=int, default=LARGE, help="measure soundness up to this many weights"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for entry in LIBRARIES[options.library]() if options.library else load().values():
        if options.wanted and not any(
            entry.family == wanted or entry.name.startswith(wanted) for wanted in options.wanted
        ):
            continue
        for mode in entry.modes:
            rows.append(survey(entry, mode, options.large))
            print(rows[-1], flush=True)
            with replacing(options.json) as temporary:
                temporary.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
