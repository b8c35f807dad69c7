"""Survey every model of the zoo: is it answered, and is the answer sound?

`python -m zoo.survey [NAME or FAMILY ...] [--library timm] --json FILE` from `tests/` writes rows,
of which `zoo.page` makes the page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
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
from zoo.soundness import rescaled, spread, trace_double, unbalanced

# a batch of two has only +-1 after a batch norm on single pixels, where
# gradients vanish up to rounding
BATCH = 4
# parts of names by how much larger they say that a model is
SIZES = {
    9: "huge giant",
    8: "xlarge",
    7: "large",
    5: "_l",
    4: "base 152 200",
    3: "101 384 448 512",
    2: "_b",
    1: "small 256",
    -1: "_s _t 26",
    -2: "tiny _xs",
    -3: "nano pico femto 18",
    -4: "atto",
}


def torchvision_models() -> Iterator[Entry]:
    """All classification models."""
    import torchvision
    from torchvision.models import get_model, list_models

    for name in list_models(module=torchvision.models):

        def build(
            name: str = name, size: int = 299 if name == "inception_v3" else 224
        ) -> tuple[Any, ...]:
            options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
            return get_model(name, weights=None, **options), torch.randn(BATCH, 3, size, size)

        fixed = name.startswith(("vit", "maxvit", "swin", "inception"))
        small = None if fixed else partial(build, size=64)
        yield Entry(name, "torchvision", build, small=small)


def timm_models() -> Iterator[Entry]:
    """One or two models of every family (module), small ones by their names."""
    import timm

    def weight(name: str) -> tuple[int, int, str]:
        sizes = (size for size, parts in SIZES.items() for part in parts.split() if part in name)
        return sum(sizes), len(name), name

    for module in sorted(timm.list_modules()):
        names = sorted(timm.list_models(module=module), key=weight)
        for name in [*names[:1], *names[len(names) // 3 : len(names) // 3 + (len(names) > 6)]]:

            def build(name: str = name) -> tuple[Any, ...]:
                model = timm.create_model(name, pretrained=False)
                return model, torch.randn(BATCH, *model.default_cfg["input_size"])

            yield Entry(name, "timm", build)


LIBRARIES = {"torchvision": torchvision_models, "timm": timm_models}


# --- the survey


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
    wanted = "names, families or prefixes; everything by default"
    library, large = "the models of an installed library instead", "measure up to this many weights"
    parser.add_argument("wanted", nargs="*", help=wanted)
    parser.add_argument("--json", type=Path, required=True, help="write all rows here")
    parser.add_argument("--library", choices=sorted(LIBRARIES), help=library)
    parser.add_argument("--large", type=int, default=LARGE, help=large)
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
