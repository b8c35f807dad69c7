"""What a device needs: no number that the host asks for (each makes it wait, and breaks a captured
graph), one graph for a compiler, little memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.measure import held, tensors
from cases import mlp, network
from slow_names import slow_names
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from training_pairs import Problem, maker

import pathspace as ps
from pathspace.diagnostics import MarkovChain
from pathspace.training import GSGD, GAdam, GaugeFixed, init_skeleton_, penalise_
from pathspace.training.experiments.models import RecurrentCNN
from pathspace.training.optim.tensors import CACHED

MEMBERS: dict[str, Callable[..., Any]] = {
    "gsgd": maker(GSGD, lr=0.01),
    "momentum": maker(
        GSGD, lr=torch.tensor(0.002), momentum=0.9, nesterov=True, max_multiplier=1.0
    ),
    "decay": maker(GSGD, lr=0.01, weight_decay=0.1, maximize=True),
    "gadam": maker(GAdam, lr=torch.tensor(0.01), foreach=False),
    "bounded": maker(GAdam, lr=0.01, max_multiplier=0.5),
    "relative": maker(GAdam, lr=0.01, relative=True),
}


def gauge_fixed(model: nn.Module, skeleton: ps.Skeleton) -> GaugeFixed:
    inner = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return GaugeFixed(inner, skeleton.graph, model=model)


# (``numpy`` refuses tensors of a device, so it never waits for one)
METHODS = ("item", "tolist", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__")
OPERATIONS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "_unique2", "masked_select")


class Reads(TorchFunctionMode):
    """Counts what the host asks of tensors, by methods and inside of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.looks = True
        self.inside = _Inside(self)

    def note(self, name: str, reads: bool) -> None:
        if self.looks and reads:
            self.found.append(name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        to_host = name == "to" and any(
            isinstance(a, str) and a == "cpu" for a in (*args[1:], *(kwargs or {}).values())
        )
        self.note(name, name in METHODS or to_host)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Reads:
        super().__enter__()
        self.inside.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.inside.__exit__(*exception)
        super().__exit__(*exception)


class _Inside(TorchDispatchMode):
    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        places = args[1] if name.startswith("index") and isinstance(args[1], list | tuple) else ()
        masks = any(place is not None and place.dtype == torch.bool for place in places)
        self.reads.note(name, name in OPERATIONS or masks)
        return func(*args, **(kwargs or {}))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name",
    slow_names(
        ["rnn_op_2_layers", "residual_cnn", "transformer_block", "gated_product"],
        ["transformer_block"],
    ),
)
@pytest.mark.parametrize("member", [*MEMBERS, "gauge_fixed"])
def test_a_step_never_waits_for_the_device(
    member: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Problem(name, unit=True)
    make = {**MEMBERS, "gauge_fixed": gauge_fixed}[member]
    optimizer = make(case.model, case.skeleton(case.model))
    # (the start of a run is looked at once; what torch's own step does is torch's affair)
    case.step(case.model, optimizer)
    inner, reads = optimizer._inner_steps, Reads()

    def torchs_own(*given: Any) -> Any:
        reads.looks = False
        loss = inner(*given)
        reads.looks = True
        return loss

    monkeypatch.setattr(optimizer, "_inner_steps", torchs_own)
    for _ in range(2):
        optimizer.zero_grad()
        case.loss(case.model).backward()
        with reads:
            optimizer.step()
    # (products along trees with opposite scales are made on the processor)
    there = name == "gated_product" and member != "gauge_fixed"
    assert reads.found == ["cpu"] * 2 * there


def block() -> nn.Module:
    return network(
        lambda net, x: x + net.branch(x), branch=nn.Sequential(nn.LayerNorm(6), *mlp(6, 8, 6))
    )


def residual(blocks: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), *(block() for _ in range(blocks)), nn.Linear(6, 2))


X = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
Y = torch.randn(5, 2, generator=torch.Generator().manual_seed(2))


def test_the_penal_connection_reads_nothing() -> None:
    model = penalise_(residual(2), X, tau=0.1)
    with Reads() as reads:
        nn.functional.mse_loss(model(X), Y).backward()
    assert reads.found == []


def test_a_watched_chain_is_read_once_a_step_and_an_observed_one_as_often_whatever_its_depth() -> (
    None
):
    counts = []
    for blocks in (2, 6):
        model = residual(blocks)
        chain = MarkovChain.trace(model, X)
        with chain.watch() as watch, Reads() as reads:
            for _ in range(2):
                nn.functional.mse_loss(model(X), Y).backward()
        assert len(watch.records) == 2
        assert len(reads.found) <= 2
        with Reads() as reads:
            chain.observe(nn.functional.mse_loss, X, Y)
        counts.append(len(reads.found))
    assert counts[0] == counts[1] <= 6


class Largest(TorchDispatchMode):
    """Notes the largest memory that any operation asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in tensors([args, kwargs])}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors(result):
            if tensor.untyped_storage().data_ptr() not in known:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "layers of 2,048 units": lambda: (
        mlp(*[2048] * 4, bias=False),
        torch.randn(2, 2048),
    ),
    "recurrent convolutions of 96 channels": lambda: (
        RecurrentCNN(3, 96, 10),
        torch.randn(2, 3, 8, 8),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_memory_is_small_beside_the_weights(name: str) -> None:
    """Some vectors of one entry per unit or tap; working memory, gone after the step, for small
    tensors, and for a group of rows of a large one.
    """
    model, x = MODELS[name]()
    skeleton = ps.trace(model, x).skeleton()
    init_skeleton_(model, skeleton)
    optimizer = GSGD(model.named_parameters(), lr=0.0, skeleton=skeleton)
    model(x).sum().backward()
    optimizer.param_groups[0]["lr"] = 1e-9
    with Largest() as largest:
        optimizer.step()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert held(optimizer, skeleton) < (0.02 if weights > 1e7 else 0.06) * weights
    assert not optimizer.state
    assert 0 < largest.bytes < max(0.025 * weights, 8 * CACHED)
