"""Rows that data choose: by masks, by positions of what is not zero, by the values they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import network
from rescaled import change, traced
from torch import Tensor, nn

import pathspace as ps
from pathspace.diagnostics import MarkovChain, degeneracy, report

Use = Callable[[Any, Tensor, Tensor], Tensor]


def written(model: Any, x: Tensor, m: Tensor) -> Tensor:
    out = torch.zeros(len(x), 2, dtype=x.dtype)
    out[m] = model.b(model.a(x).relu()[m])
    return out


def moved(model: Any, x: Tensor, m: Tensor) -> Tensor:
    x, other = x.clone(), x.flip(0)
    x[m] = other[m]
    return model.b(model.a(x).relu())


def own(model: Any, x: Tensor, _: Tensor) -> Tensor:
    h = model.a(x).relu()
    return model.b(h[h[:, 0] > 0])


# use, whether its path norm counts all rows that may be chosen
USES: dict[str, tuple[Use, bool]] = {
    "rows of the input": (lambda f, x, m: f.b(f.a(x[m]).relu()), True),
    "rows written": (written, True),
    "rows moved": (moved, True),
    "rows of the output": (lambda f, x, m: f.b(f.a(x).relu())[m].mean(0), True),
    "their largest": (lambda f, x, m: f.b(f.a(x).relu()[m].amax(0)), True),
    "by own values": (own, True),
    "positions": (lambda f, x, m: f.b(f.a(x).relu())[m.nonzero()[:, 0]], False),
    "positions by where": (lambda f, x, m: f.b(f.a(x).relu()[torch.where(m)[0]]).sum(0), False),
}


def masked(use: str) -> nn.Module:
    """A function of the input and of a mask that it gives."""
    return network(
        lambda net, x: USES[use][0](net, x, x[..., 0] > 0), a=nn.Linear(3, 8), b=nn.Linear(8, 2)
    ).double()


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_models_that_choose_rows_have_their_units(use: str) -> None:
    model, x = masked(use), torch.randn(6, 3, dtype=torch.float64)
    graph = traced(model, x, units=8)
    assert not graph.pinned and change(model, graph, torch.randn(9, 3).double()) < 1e-9
    assert ps.verify(model, x).holds
    groups = ps.channels(model, x)
    # (the channel that decides stays)
    kept = 4 + (use == "by own values")
    assert sum(p.numel() for p in groups.remove(keep=0.5).parameters()) == kept * (3 + 1 + 2) + 2
    assert report(model, x) and degeneracy(model, x).rank and not len(MarkovChain.trace(model, x))


@pytest.mark.parametrize("use", USES)
def test_a_path_norm_counts_every_row_or_is_refused(use: str) -> None:
    model, x = masked(use), torch.randn(6, 3, dtype=torch.float64)
    if USES[use][1]:
        assert ps.path_norm(model, x, batch_dim=None) > 1
    else:
        with pytest.raises(ps.UnsupportedError, match="how many positions there are"):
            ps.path_norm(model, x, batch_dim=None)
