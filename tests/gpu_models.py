"""The library with models on a GPU: the answers of a processor, and no tensor on the wrong
device. Run by ``make gpu``; without a GPU both places are the processor.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, network
from torch import Tensor, nn
from training_cases import TRAINED
from zoo.entry import Entry, load

import pathspace as ps
from pathspace import diagnostics
from pathspace.training import (
    GSGD,
    GAdam,
    GaugeFixed,
    PathSGD,
    init_skeleton_,
    penalise_,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ENTRIES = [entry for entry in load().values() if entry.fast]
pytestmark = pytest.mark.filterwarnings("ignore")


def moved(value: Any, place: str = DEVICE, kind: torch.dtype | None = torch.float64) -> Any:
    """The tensors of nested containers on a device, those with digits in a type."""
    if isinstance(value, Tensor):
        return value.to(place, kind if value.is_floating_point() else None)
    if isinstance(value, dict):
        return {key: moved(item, place, kind) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(moved(item, place, kind) for item in value)
    return value


def numbers(value: Any) -> list[Tensor]:
    """All tensors with digits in an output."""
    if isinstance(value, Tensor):
        return [value.detach().double().cpu()] if value.is_floating_point() else []
    if isinstance(value, dict):
        return [one for item in value.values() for one in numbers(item)]
    if isinstance(value, list | tuple):
        return [one for item in value for one in numbers(item)]
    return []


def close(one: Any, other: Any, tolerance: float = 1e-8) -> None:
    mine, theirs = numbers(one), numbers(other)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


def facts(graph: ps.ReductionGraph) -> tuple[Any, ...]:
    return graph.num_weights, graph.num_units, len(graph.pinned), graph.unused, graph.range


def small(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """A case on the processor, in float64."""
    model, args = (CASES | TRAINED)[name]()
    return model.double(), moved(args, "cpu")


def expect_runs(model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None = None) -> None:
    """Skip a test of a model that fails on the device by itself."""
    try:
        with torch.no_grad():
            model(*args, **(kwargs or {}))
    except RuntimeError as error:
        pytest.skip(f"the model itself does not run there: {str(error)[:60]}")


def net() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 5), nn.ReLU(), nn.Linear(5, 3),
    )  # fmt: skip
    return model.double().eval(), torch.randn(8, 2, 8, 8).double()


@pytest.mark.parametrize("name", sorted({**CASES, **TRAINED}))
def test_answers_are_those_of_a_processor(name: str) -> None:
    model, args = small(name)
    here = ps.trace(model, *args)
    try:
        norm = ps.path_norm(model, *args)
    except ps.PathspaceError:
        norm = math.nan
    certificate = ps.verify(model, *args)
    there_model, there_args = copy.deepcopy(model).to(DEVICE), moved(args)
    expect_runs(there_model, there_args)
    there = ps.trace(there_model, *there_args)
    assert facts(here) == facts(there)
    for one, other in zip(here.blocks, there.blocks, strict=True):
        assert torch.equal(one.tail.cpu(), other.tail.cpu())
        assert torch.equal(one.head.cpu(), other.head.cpu())
    assert ps.verify(there_model, *there_args).holds == certificate.holds
    if not math.isnan(norm):
        assert math.isclose(ps.path_norm(there_model, *there_args), norm, rel_tol=1e-9)
    bases = [graph.skeleton().basis() for graph in (here, there)]
    close(*(basis.values() for basis in bases), 1e-7)
    if not model.training:
        signs = there.skeleton().signs()
        close(*(basis.rebuild(basis.values(), signs) for basis in bases), 1e-6)
    phi = torch.randn(there.num_units, dtype=torch.float64)
    before = there_model(*there_args)
    for scales in (phi, -phi.to(DEVICE)):
        ps.rescale_(there_model, there, scales, exact=True)
        close(there_model(*there_args), before)
    assert all(p.device.type == DEVICE for p in there_model.parameters())


def counted(model: nn.Module, args: tuple[Any, ...]) -> list[tuple[str, int]]:
    return [(group.name, len(group)) for group in ps.channels(model, *args)]


@pytest.mark.parametrize("name", sorted({**CASES, **TRAINED}))
def test_channels_are_those_of_a_processor(name: str) -> None:
    model, args = small(name)
    there = copy.deepcopy(model).to(DEVICE), moved(args)
    expect_runs(*there)
    assert counted(*there) == counted(model, args)


def test_channels_are_pruned_permuted_and_matched_there() -> None:
    model, x = net()
    results = []
    for place in ("cpu", DEVICE):
        twin, y = copy.deepcopy(model).to(place), x.to(place)
        groups = ps.channels(twin, y)
        name = groups[0].name
        orders = {name: torch.arange(len(groups[0])).roll(1)}
        moved_twin = groups.permute(orders)
        close(moved_twin(y), twin(y))
        match = groups.match(moved_twin)
        close(groups.interpolate(match)(y), twin(y))
        other = copy.deepcopy(twin)
        for p in other.parameters():
            p.data = p.data.flip(0)
        by_activations = groups.match(other, by="activations", inputs=(y,))
        assert ps.compare(twin, moved_twin, ps.trace(twin, y)).same
        results.append([
            groups.remove(keep=0.5)(y),
            groups.masked(keep=0.5)(y),
            groups.interpolate(by_activations)(y),
            *groups.importance().values(),
        ])  # fmt: skip
    close(*results)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_models_that_people_use(entry: Entry) -> None:
    model, args, kwargs = entry.make(entry.modes[-1], small=True)
    here = ps.trace(model, *args, kwargs=kwargs)
    try:
        there_model = copy.deepcopy(model).to(DEVICE)
    except RuntimeError:
        pytest.skip("cannot be copied")

    expect_runs(there_model, moved(args, kind=None), moved(kwargs, kind=None))
    there = ps.trace(there_model, *moved(args, kind=None), kwargs=moved(kwargs, kind=None))
    assert facts(here) == facts(there)


def test_gauges_are_those_of_a_processor() -> None:
    model, x = net()
    results = []
    for place in ("cpu", DEVICE):
        twin, y = copy.deepcopy(model).to(place), x.to(place)
        graph = ps.trace(twin, y)
        found: list[Any] = [ps.balancing(twin, graph).phi]
        for objective in (ps.Balance(), ps.Range(), ps.Noise(), ps.ActivationRange(),
                          ps.Smooth(), ps.Conditioning()):  # fmt: skip
            found.append(ps.choose_gauge(twin, graph, objective, y).phi)
        before = twin(y)
        better = ps.equalise(twin, graph, calibration=y, trials=4)
        close(better.model(y), before)
        fitted = ps.fit_dtype(twin, y)
        close(fitted.model(y.to(next(fitted.model.parameters()).dtype)), before, 0.02)
        close(ps.fold_norms(twin, y)(y), before)
        close(ps.canonicalise_(copy.deepcopy(twin), graph.skeleton())(y), before)
        close(ps.balance_(copy.deepcopy(twin), graph)(y), before)
        results.append(found)
    for one, other in zip(*results, strict=True):
        close(one, other, 1e-5)


MAKERS: dict[str, Callable[[nn.Module, ps.ReductionGraph, Tensor], torch.optim.Optimizer]] = {
    "gsgd": lambda m, g, x: GSGD(m.parameters(), lr=0.01, skeleton=g.skeleton(), max_multiplier=1),
    "gadam": lambda m, g, x: GAdam(m.parameters(), lr=0.01, skeleton=g.skeleton()),
    "fused gadam": lambda m, g, x: GAdam(
        m.parameters(), lr=0.01, skeleton=g.skeleton(), fused=True
    ),
    "path sgd": lambda m, g, x: PathSGD(m.parameters(), lr=0.01, model=m, example=(x,)),
    "fixed adamw": lambda m, g, x: GaugeFixed(torch.optim.AdamW(m.parameters(), lr=0.01), g),
    "fixed and fused": lambda m, g, x: GaugeFixed(
        torch.optim.AdamW(m.parameters(), lr=0.01, fused=True), g
    ),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_training_is_that_of_a_processor(maker: str, tmp_path: Path) -> None:
    model, x = net()
    if "path" in maker:
        model = nn.Sequential(*(m for m in model if not isinstance(m, nn.BatchNorm2d)))
    ends = []
    for place in ("cpu", DEVICE):
        twin, y = copy.deepcopy(model).train().to(place), x.to(place)
        graph = ps.trace(twin, y)
        optimizer = MAKERS[maker](twin, graph, y)
        for step in range(6):
            optimizer.zero_grad()
            loss = (twin(y) - y.mean((2, 3)).repeat(1, 2)[:, :3]).square().mean()
            loss.backward()
            optimizer.step()
            if step == 3:
                torch.save(optimizer.state_dict(), tmp_path / f"{place}.pt")
                again = torch.load(tmp_path / f"{place}.pt", weights_only=True, map_location="cpu")
                optimizer.load_state_dict(again)
        ends.append([p.detach() for p in twin.parameters()])
    close(*ends, 1e-7)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("maker", ["gsgd", "gadam", "fixed adamw", "fixed and fused"])
def test_mixed_precision_with_scaled_losses_trains(maker: str, kind: torch.dtype) -> None:
    model, x = net()
    model, x = model.float().train().to(DEVICE), x.float().to(DEVICE)
    optimizer = MAKERS[maker](model, ps.trace(model, x), x)
    scaler = torch.amp.GradScaler(DEVICE, enabled=kind == torch.float16)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, kind):
            loss = (model(x).float() - x.mean((2, 3)).repeat(1, 2)[:, :3]).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("maker", ["gsgd", "gadam", "fixed adamw", "fixed and fused"])
def test_compiled_models_and_other_layouts_of_memory(maker: str) -> None:
    model, x = net()
    model, x = model.train().to(DEVICE), x.to(DEVICE)
    ends = []
    for kind in ("plain", "compiled", "channels last"):
        layout = torch.channels_last if kind == "channels last" else torch.preserve_format
        twin, y = copy.deepcopy(model).to(memory_format=layout), x.clone(memory_format=layout)
        graph = ps.trace(twin, y)
        optimizer = MAKERS[maker](twin, graph, y)
        run = torch.compile(twin) if kind == "compiled" else twin
        for _ in range(3):
            optimizer.zero_grad()
            run(y).square().mean().backward()
            optimizer.step()
        ends.append([p.detach() for p in twin.parameters()])
    close(ends[0], ends[1], 1e-6)
    close(ends[0], ends[2], 1e-7)


def test_a_model_that_moves_after_the_trace() -> None:
    model, x = net()
    graph = ps.trace(model, x)
    skeleton = graph.skeleton()
    model, x = model.to(DEVICE), x.to(DEVICE)
    before = model(x)
    ps.rescale_(model, graph, torch.randn(graph.num_units).double())
    close(model(x), before)
    init_skeleton_(model, skeleton)
    for optimizer in (
        GSGD(model.parameters(), lr=0.01, skeleton=skeleton),
        GaugeFixed(torch.optim.AdamW(model.parameters()), graph),
    ):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        assert all(p.isfinite().all() for p in model.parameters())


def residual() -> nn.Module:
    torch.manual_seed(0)

    def forward(net: Any, x: Tensor) -> Tensor:
        x = x + torch.relu(net.first(net.norm(x)))
        return net.head(x + torch.relu(net.second(x)))

    first, second, head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
    return network(forward, first=first, second=second, norm=nn.LayerNorm(6), head=head).double()


def test_the_markov_chain_and_the_penal_connection() -> None:
    model, x = residual(), torch.randn(7, 6).double()
    ends, records = [], []
    for place in ("cpu", DEVICE):
        twin, y = copy.deepcopy(model).to(place), x.to(place)
        chain = diagnostics.MarkovChain.trace(twin, y)
        target = torch.zeros(7, 3, dtype=torch.float64, device=place)
        records.append(chain.observe(nn.functional.mse_loss, y, target).cosines)
        with chain.watch() as watch:
            nn.functional.mse_loss(twin(y), target).backward()
        assert len(watch.records) == 1
        twin.zero_grad()
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        penalised = penalise_(twin, y, tau=0.1, optimizer=optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            penalised(y).square().mean().backward()
            optimizer.step()
        ends.append([p.detach() for p in twin.parameters()])
    close(*records)
    close(*ends)


def test_diagnostics_are_those_of_a_processor(tmp_path: Path) -> None:
    model, x = residual(), torch.randn(7, 6).double()
    results = []
    for place in ("cpu", DEVICE):
        twin, y = copy.deepcopy(model).to(place), x.to(place)
        target = torch.zeros(7, 3, dtype=torch.float64, device=place)
        operator = diagnostics.jacobian(twin, y)
        found = {
            "variances": torch.tensor(diagnostics.signal(twin, y).column("variance")),
            "top": torch.tensor([one.value for one in diagnostics.top_singular(operator, 2)]),
                        "degeneracy": diagnostics.degeneracy(twin, y).rank,
            "cost": diagnostics.cost(twin, y).multiplications,
        }  # fmt: skip
        diagnostics.trace_k(operator, probes=4)
        diagnostics.spectrum(operator, probes=2, steps=5)
        diagnostics.cost(twin, y, repeats=2)
        diagnostics.gradients(twin, nn.functional.mse_loss, [(y, target)] * 4)
        diagnostics.conserved(ps.trace(twin, y))
        diagnosis = diagnostics.diagnose(
            twin, y, data=[(y, target)] * 4, loss=nn.functional.mse_loss
        )
        assert str(diagnosis)
        page = diagnostics.report(twin, y, data=[(y, target)] * 4, loss=nn.functional.mse_loss)
        assert "<html" in page.html
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
        with diagnostics.watching(twin, every=2, csv=tmp_path / f"{place}.csv"):
            for _ in range(6):
                optimizer.zero_grad()
                (twin(y) - target).square().mean().backward()
                optimizer.step()
        results.append(found)
    one, other = results
    for key in ("top", "variances"):
        close(one.pop(key), other.pop(key), 1e-6)
    assert one == other
