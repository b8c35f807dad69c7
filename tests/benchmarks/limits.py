"""How much a task may take: counts, and ratios to what a user would take in its place, measured in
one run.

``PYTHONPATH=tests python -m benchmarks.limits [ROW ...]`` measures each row in a process of its
own, by processor time on one thread, keeps it in ``docs/data/limits.json`` and writes the table of
``docs/benchmarks.md``. Needs torchvision, transformers and torch-pruning.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import pathspace as ps
from benchmarks.checkpoint import TOKENS, weights
from benchmarks.dependency_graph import built
from benchmarks.figures import chosen, each, load, markdown, write
from benchmarks.measure import alone, stem_runs
from benchmarks.pruning import theirs

NAME, TURNS = "limits", 5
MEGABYTE = 1e6
LAYERS = (
    "import torch; from torch import nn, randn;"
    " model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)); "
)
TRACE = LAYERS + "import pathspace as ps; ps.trace(model, randn(1, 2))"
MAKE_FX = LAYERS + (
    "from torch.fx.experimental.proxy_tensor import make_fx;"
    " make_fx(model, pre_dispatch=True)(randn(1, 2))"
)


def in_turns(*tasks: Callable[[], object]) -> list[float]:
    """The shortest processor times of tasks that take turns, because other work on the machine can
    only add to them; the first turn is not counted.
    """
    times: list[list[float]] = [[] for _ in tasks]
    for turn in range(TURNS + 1):
        for task, own in zip(tasks, times, strict=True):
            start = time.process_time()
            task()
            if turn:
                own.append(time.process_time() - start)
    return [min(own) for own in times]


def pruned(name: str) -> float:
    """`channels` and `remove`, over Torch-Pruning with magnitudes, at 64 pixels."""
    model, x = built("torchvision", name), torch.randn(1, 3, 64, 64)
    ours, other = in_turns(
        lambda: ps.channels(model, x).remove(keep=0.5), lambda: theirs(model, ((x,), {}))
    )
    return ours / other


def recorded(name: str) -> float:
    """`make_fx` alone, over Torch-Pruning with magnitudes, at 64 pixels."""
    model, x = built("torchvision", name), torch.randn(1, 3, 64, 64)
    record = make_fx(model, pre_dispatch=True)
    ours, other = in_turns(lambda: record(x), lambda: theirs(model, ((x,), {})))
    return ours / other


def started(program: str) -> float:
    """A new process that runs a program, over one that imports torch."""

    def run(text: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", text], check=True, env=os.environ)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    times = [(run(program), run("import torch")) for _ in range(TURNS)]
    ours, other = (min(column) for column in zip(*times, strict=True))
    return ours / other


def llama(layers: int, **sizes: int) -> nn.Module:
    """A Llama without caches."""
    config = transformers.LlamaConfig(num_hidden_layers=layers, use_cache=False, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


def deeper() -> float:
    """A trace of 32 layers of a Llama, over one of 4 layers."""
    sizes = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    }  # fmt: skip
    deep, flat = in_turns(
        *(
            partial(ps.trace, llama(layers, **sizes), kwargs={"input_ids": TOKENS})
            for layers in (32, 4)
        )
    )
    return deep / flat


def balanced(dtype: torch.dtype) -> float:
    """Megabytes a second of wall time, of a Llama of 267 million weights in one file."""
    with torch.device("meta"):
        model = llama(
            12, vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_attention_heads=16
        )
    graph = ps.trace(model, kwargs={"input_ids": TOKENS})
    with tempfile.TemporaryDirectory() as folder:
        source, target = (Path(folder, name) for name in ("given.safetensors", "new.safetensors"))
        save_file({name: values.to(dtype) for name, values in weights(model)}, source)
        times = []
        for _ in range(TURNS):
            start = time.perf_counter()
            ps.balance_files(graph, source, target)
            times.append(time.perf_counter() - start)
        return source.stat().st_size / MEGABYTE / min(times)


def fitted() -> float:
    """Seconds that `fit_dtype` takes for a T5 of two layers."""
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, use_cache=False
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    ids = torch.randint(0, 64, (2, 8))
    inputs = {"input_ids": ids, "decoder_input_ids": ids}
    return in_turns(lambda: ps.fit_dtype(model, [inputs], torch.float16))[0]


def verified() -> float:
    """How often `verify` runs ResNet-18 at 64 pixels."""
    with stem_runs() as runs:
        ps.verify(built("torchvision", "resnet18"), torch.randn(1, 3, 64, 64))
    return len(runs)


def normed(name: str) -> float:
    """The path norm of a traced network, over a forward pass."""
    model, x = built("torchvision", name), torch.randn(1, 3, 224, 224)
    ours, other = in_turns(ps.trace(model, x).path_norm, torch.no_grad()(partial(model, x)))
    return ours / other


class Odd(nn.Module):
    """Two layers around code whose operations depend on the sizes of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)


class Compares(Odd):
    """Compares sizes."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        return self.last(hidden if len(x) > 2 else hidden.double())


class Twice(Odd):
    """Is given one tensor twice."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.last(self.first(x).relu()) + (x if y is None else y)


class Slices(Odd):
    """Writes into slices."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(len(x), 8)
        hidden[:, :4] = self.first(x)[:, :4].relu()
        hidden[:, 4:] = self.first(x)[:, 4:]
        return self.last(hidden)


def sized(model: type[Odd]) -> float:
    """A trace at any sizes, over one at the given sizes."""
    made, x = model(), torch.randn(5, 4)
    inputs = (x, x) if model is Twice else (x,)
    every, given = in_turns(
        lambda: [ps.trace(made, *inputs) for _ in range(10)],
        lambda: [ps.trace(made, *inputs, sizes="given") for _ in range(10)],
    )
    return every / given


AT_MOST, AT_LEAST = "at most", "at least"
Row = tuple[str, str, float, Callable[[], float]]
BALANCED = "`ps.balance_files` of a Llama in {}: MB a second of wall time"
# row -> the figure, its limit, and how it is measured
ROWS: dict[str, Row] = {
    "llama": ("`ps.trace` of 32 layers of a Llama, over 4 layers", AT_MOST, 7, deeper),
    **{
        kind.__name__: (f"`ps.trace` of code that {what}, over `sizes=\"given\"`", AT_MOST, 1.2,
                        partial(sized, kind))
        for kind, what in (
            (Compares, "compares sizes"), (Twice, "is given one tensor twice"),
            (Slices, "writes into slices"),
        )
    },
    "verify": ("`ps.verify` of ResNet-18: forward passes", AT_MOST, 60,
               verified),
    **{
        f"norm of {name}": (f"`graph.path_norm()` of {name}, over a forward pass", AT_MOST, 6,
                            partial(normed, name))
        for name in ("alexnet", "vgg11_bn", "resnet50", "densenet121")
    },
    **{
        name: (f"`ps.channels` and `remove` of {name}, over Torch-Pruning", AT_MOST, 3,
               partial(pruned, name))
        for name in ("resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_small")
    },
    **{
        f"make_fx of {name}": (f"`make_fx` of torch alone on {name}, over Torch-Pruning", AT_MOST,
                               3, partial(recorded, name))
        for name in ("mobilenet_v2", "mobilenet_v3_small")
    },
    **{
        kind: (BALANCED.format(kind), AT_LEAST, 300, partial(balanced, getattr(torch, kind)))
        for kind in ("bfloat16", "float32")
    },
    "t5": ("`ps.fit_dtype` of a tiny T5: seconds", AT_MOST, 3, fitted),
    "trace": ("first `ps.trace` of a process, over `import torch`", AT_MOST, 1.5,
              partial(started, TRACE)),
    "make_fx": ("first `make_fx` of torch alone, over `import torch`", AT_MOST, 1.5,
                partial(started, MAKE_FX)),
}  # fmt: skip


def measured(name: str) -> float:
    """The figure of a row, by one thread."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    return round(ROWS[name][3](), 2)


def table(held: dict[str, float]) -> str:
    """The figures as they stand on the page."""
    lines = []
    for name, (what, side, limit, _) in ROWS.items():
        figure = held.get(name, float("nan"))
        kept = figure <= limit if side == AT_MOST else figure >= limit
        lines.append([what, f"{figure:,.4g}", f"{side} {limit:g}", "yes" if kept else "**no**"])
    return markdown("figure | measured | limit | kept", lines)


def main(names: list[str]) -> None:
    """Measure, keep, write the page."""
    held = {"rows": {}} | load(NAME)
    each(NAME, held, "rows", chosen(names, ROWS), partial(alone, measured))
    write("benchmarks.md", NAME, table(held["rows"]))


if __name__ == "__main__":
    main(sys.argv[1:])
