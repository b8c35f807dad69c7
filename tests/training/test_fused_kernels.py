"""Fused kernels against the steps of whole tensors (in Triton's interpreter:
``training/test_optim_fused.py``).

Triton's kernels on a GPU, or interpreted; Numba's on a processor.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.measure import held
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from training_pairs import Problem, largest_difference

import pathspace as ps
from pathspace import UnsupportedError
from pathspace.training import GSGD, GAdam, init_skeleton
from pathspace.training.optim.fused import Fused
from tests.training.test_optim_device import MODELS, NoWaiting

# (compilers)
pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
SHORT = (
    ((torch.bfloat16, "momentum"), (torch.float16, "gadam"))
    if TRITON
    else ((torch.float32, "gadam"),)
)


def double(rate: float) -> Tensor:
    return torch.tensor(rate, dtype=torch.float64, device=DEVICE)


MEMBERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "gsgd": lambda m, **more: GSGD(m, lr=0.01, **more),
    "momentum": lambda m, **more: GSGD(
        m, lr=double(0.002), momentum=0.9, nesterov=True, max_multiplier=0.7, **more
    ),
    "decay": lambda m, **more: GSGD(
        m, lr=0.001, weight_decay=0.1, momentum=0.5, dampening=0.3, maximize=True, **more
    ),
    "gadam": lambda m, **more: GAdam(m, lr=double(0.01), weight_decay=0.1, **more),
    "bounded adam": lambda m, **more: GAdam(m, lr=0.01, max_multiplier=0.7, eps=1e-2, **more),
}
# rows and taps, tails by row, heads against their chain, tied weights, tensors outside path space
CASES = (
    ("gsgd", "residual_cnn"),
    ("momentum", "conv_depthwise"),
    ("momentum", "opposite_parents"),
    ("decay", "transformer_block"),
    ("gadam", "tied_transposed"),
    ("bounded adam", "opposite_parents"),
)


def pair(
    case: Problem, member: str, model: nn.Module
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer, nn.Module]:
    """The fused optimizer of a model, and one of a copy that works on whole tensors."""
    twin = copy.deepcopy(model)
    make, args = (
        MEMBERS[member],
        [ps.trace(m, *case.args).skeleton(case.rule, seed=6) for m in (model, twin)],
    )
    fused = make(model.named_parameters(), skeleton=args[0], fused=True)
    return fused, make(twin.named_parameters(), skeleton=args[1]), twin


def flat(one: Any, other: Any) -> list[tuple[Any, Any]]:
    """Pairs of tensors in two entries of a state."""
    return (
        [(one[key], value) for key, value in other.items()]
        if isinstance(other, dict)
        else [(one, other)]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("member", "name"), CASES)
def test_fused_steps_are_those_of_whole_tensors_in_four_launches(member: str, name: str) -> None:
    case = Problem(name, unit=name != "opposite_parents").to(DEVICE)
    fused, plain, twin = pair(case, member, case.model)
    for _ in range(2):
        case.step(case.model, fused)
        case.step(twin, plain)
    assert largest_difference(case.model, twin) < 1e-12
    assert fused._fused.launches == 8
    mine, theirs = fused.state_dict(), plain.state_dict()
    for number, buffers in theirs["state"].items():
        for key, value in buffers.items():
            for one, other in flat(mine["state"][number][key], value):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    # each goes on from the other's state, as it is
    fused.load_state_dict(theirs)
    plain.load_state_dict(mine)
    case.step(case.model, fused)
    case.step(twin, plain)
    assert largest_difference(case.model, twin) < 1e-12


@pytest.mark.parametrize(
    ("kind", "member"),
    [(torch.float32, "gsgd"), (torch.float32, "momentum"), *SHORT],
)
def test_other_types_are_rounded_once(kind: torch.dtype, member: str) -> None:
    """A step from rounded weights, gradients and moments of 0, within one rounding of the
    step in double precision.
    """
    case = Problem("residual_cnn", unit=True).to(DEVICE)
    for parameter in case.model.parameters():
        parameter.data = parameter.data.to(kind).double()
    low = copy.deepcopy(case.model).to(kind)
    graph = ps.trace(case.model, *case.args)
    skeleton = graph.skeleton(case.rule, seed=6)
    plain = MEMBERS[member](case.model.named_parameters(), skeleton=skeleton)
    fused = MEMBERS[member](low.named_parameters(), skeleton=skeleton, fused=True)
    case.loss(case.model).backward()
    for one, other in zip(case.model.parameters(), low.parameters(), strict=True):
        one.grad = (one.grad / 64).to(kind).double()
        other.grad = one.grad.to(kind)
    start = [parameter.detach().clone() for parameter in case.model.parameters()]
    plain.step()
    fused.step()
    moved = 0.0
    for one, other, before in zip(case.model.parameters(), low.parameters(), start, strict=True):
        assert other.dtype == kind
        # one rounding more where constants by head are kept in the type of the weights
        torch.testing.assert_close(
            other.double(), one.detach(), rtol=2 * torch.finfo(kind).eps, atol=1e-7
        )
        moved = max(moved, float((one.detach() - before).abs().max()))
    assert moved > 1e-3


class Operations(TorchDispatchMode):
    """Notes the operations that compute or copy."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name != "detach" and not name.startswith("_record_function"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "layers"), [(GSGD, 2), (GSGD, 9), (GAdam, 2)])
def test_nothing_else_is_started_and_nothing_waits(
    kind: type[torch.optim.Optimizer], layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches do not depend on the number of tensors; from the third step on
    nothing is copied either.
    """
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(3, 3), nn.ReLU())]
    model = nn.Sequential(*parts, nn.Linear(3, 2)).double().to(DEVICE)
    x = torch.randn(4, 3).double().to(DEVICE)
    skeleton = ps.trace(model, x).skeleton()
    init_skeleton(model, skeleton)
    optimizer = kind(model.named_parameters(), lr=1e-3, skeleton=skeleton, fused=True)
    started: list[int] = []
    # the interpreter's own work is not that of a device
    monkeypatch.setattr(
        Fused, "_launch", lambda self, kernel, programs, *args, **sizes: started.append(programs)
    )
    model(x).square().sum().backward()
    for turn in range(3):
        started.clear()
        with Operations() as operations, NoWaiting():
            optimizer.step()
        assert len(started) == 4
        # moments are made in the first, and known to be there in the second
        assert turn < 2 or operations.names == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_memory_is_small_beside_the_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of one entry per unit or tree edge, and tables of one row per tensor or program."""
    torch.manual_seed(0)
    model, x = MODELS[name]()
    skeleton = ps.trace(model, x).skeleton()
    init_skeleton(model, skeleton)
    optimizer = GSGD(model.named_parameters(), lr=0.0, skeleton=skeleton, fused=True)
    monkeypatch.setattr(Fused, "_launch", lambda self, *args, **sizes: None)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert 0 < held(optimizer, skeleton) < 0.02 * weights
    assert not any(optimizer.state.values())


@pytest.mark.slow
def test_a_compiled_step_is_that_of_whole_tensors() -> None:
    case = Problem("residual_cnn", unit=True).to(DEVICE)
    case.model.float()
    case.args = tuple(x.float() for x in case.args)
    fused, plain, twin = pair(case, "gsgd", case.model)
    for model, step in (
        (case.model, torch.compile(fused.step, backend="aot_eager")),
        (twin, plain.step),
    ):
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = parameter.detach() / 8
            step()
    assert largest_difference(case.model, twin) < 1e-5


def test_frozen_and_outside_parameters_and_groups_are_as_with_whole_tensors() -> None:
    case = Problem("mlp_2x3x5x2", unit=True).to(DEVICE)
    ends = []
    for fused in (True, None):
        model = copy.deepcopy(case.model)
        extra, alone = (
            nn.Parameter(torch.tensor([[2.0, -1.0]]).double().to(DEVICE)) for _ in range(2)
        )
        named = list(model.named_parameters())
        named[1][1].requires_grad_(False)
        groups = [
            {"params": named[:2], "lr": 0.03, "momentum": 0.9},
            {
                "params": [*named[2:], ("extra", extra), ("alone", alone)],
                "weight_decay": 0.1,
                "maximize": True,
            },
        ]
        optimizer = GSGD(groups, lr=0.01, skeleton=case.skeleton(model), fused=fused)
        for _ in range(3):
            optimizer.zero_grad()
            (case.loss(model) + extra.square().sum()).backward()
            optimizer.step()
        assert torch.equal(named[1][1], dict(case.model.named_parameters())[named[1][0]])
        assert alone.tolist() == [[2.0, -1.0]]
        ends.append(
            [*(p.detach() for p in model.parameters()), extra.detach(), optimizer.clip_counts]
        )
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def test_what_kernels_cannot_walk_is_refused() -> None:
    case = Problem("mlp_2x3x5x2", unit=True).to(DEVICE)
    wide = torch.zeros(6, 4, dtype=torch.float64, device=DEVICE)
    first = case.model.get_parameter(next(name for name, _ in case.model.named_parameters()))
    gaps = copy.deepcopy(case.model)
    next(gaps.parameters()).data = wide[:: 6 // first.shape[0], :: 4 // first.shape[1]][
        : first.shape[0], : first.shape[1]
    ]
    next(gaps.parameters()).data.fill_(0.5)
    with pytest.raises(UnsupportedError, match="whose memory the kernels cannot walk"):
        GSGD(gaps.named_parameters(), skeleton=case.skeleton(gaps), fused=True)


@pytest.mark.skipif(TRITON, reason="kernels of a processor")
@pytest.mark.parametrize(("member", "name"), CASES)
def test_threads_share_a_step(member: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("pathspace.training.optim.numba_kernels"), "MANY", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    case = Problem(name, unit=name != "opposite_parents").to(DEVICE)
    fused, plain, twin = pair(case, member, case.model)
    for _ in range(2):
        case.step(case.model, fused)
        case.step(twin, plain)
    assert largest_difference(case.model, twin) < 1e-12


@pytest.mark.skipif(TRITON, reason="kernels of a processor")
def test_without_numba_kernels_are_refused_on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Problem("mlp_2x3x5x2", unit=True).to(DEVICE)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UnsupportedError, match=r"fused=True without Numba; install pathspace\[cpu\]"
    ):
        GSGD(case.model.named_parameters(), skeleton=case.skeleton(case.model), fused=True)
