"""Survey every model of the zoo: is it answered, and is the answer sound?

`python -m zoo.survey [NAME or FAMILY ...] [--library timm]` from `tests/` writes rows and the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import torch
import typer

from pathspace.capture.capture import capture
from pathspace.errors import first_line
from pathspace.inference.interpreter import interpret
from pathspace.inference.scales import Scales
from pathspace.inference.units import build_graph
from zoo.entry import Entry, load
from zoo.page import DATA, PAGE, keep, render
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


def survey(entry: Entry, mode: str) -> dict[str, Any]:
    """One model in one mode, in its own precision and, up to a size, measured on a float64 copy
    with lively weights; an exception becomes part of the row.
    """
    row: dict[str, Any] = {"name": entry.name, "family": entry.family, "mode": mode}
    row |= dict.fromkeys(("scalars", "weights", "units", "rescaling", "balance"), None)
    try:
        model, args, kwargs = entry.make(mode)
        row["scalars"] = sum(parameter.numel() for parameter in model.parameters())
        captured = capture(model, args, kwargs)
        graph = build_graph(captured, interpret(captured, Scales)[0])
        row |= {"weights": graph.num_weights, "units": graph.num_units}
        if row["scalars"] <= LARGE:
            model, args, kwargs = entry.make(mode, small=True)
            graph, runner = trace_double(spread(model), args, kwargs)
            row |= {"rescaling": rescaled(graph, runner), "balance": unbalanced(graph, runner)}
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"[:300]
        return {**row, "error": why.split(" (at ")[0]}
    return {**row, "error": ""}


def main(
    wanted: Annotated[list[str] | None, typer.Argument(help="Names, families or prefixes.")] = None,
    library: Annotated[str, typer.Option(help="Models of this installed library instead.")] = "",
) -> None:
    """Survey models, and write data and page; what was measured before stays."""
    torch.set_num_threads(1)
    found = {(row["family"], row["name"], row["mode"]): row for row in json.loads(DATA.read_text())}
    for entry in LIBRARIES[library]() if library else load().values():
        if wanted and not any(entry.family == w or entry.name.startswith(w) for w in wanted):
            continue
        for mode in entry.modes:
            row = found[entry.family, entry.name, mode] = survey(entry, mode)
            print(row, flush=True)
            keep(found.values(), DATA, PAGE, render(found.values()))


if __name__ == "__main__":
    typer.run(main)
