"""Arguments in the wrong order end in one sentence, and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pathspace as ps
from pathspace import diagnostics, training

Case = Callable[[nn.Module, ps.ReductionGraph, torch.Tensor, str], Any]

WRONG: dict[str, Case] = {
    "trace": lambda m, g, x, path: ps.trace(x, m),  # type: ignore[arg-type]
    "verify": lambda m, g, x, path: ps.verify(x, m),  # type: ignore[arg-type]
    "channels": lambda m, g, x, path: ps.channels(x, m),  # type: ignore[arg-type]
    "rescale": lambda m, g, x, path: ps.rescale_(g, m, torch.zeros(3)),  # type: ignore[type-var, arg-type]
    "rescale, phi": lambda m, g, x, path: ps.rescale_(m, torch.zeros(3), g),  # type: ignore[arg-type]
    "balance": lambda m, g, x, path: ps.balance_(g, m),  # type: ignore[type-var, arg-type]
    "balancing": lambda m, g, x, path: ps.balancing(g, m),  # type: ignore[arg-type]
    "canonicalise": lambda m, g, x, path: ps.canonicalise_(g.skeleton(), m),  # type: ignore[type-var, arg-type]
    "equalise": lambda m, g, x, path: ps.equalise(g, m),  # type: ignore[arg-type]
    "fit_dtype": lambda m, g, x, path: ps.fit_dtype(x, m),  # type: ignore[arg-type]
    "choose_gauge": lambda m, g, x, path: ps.choose_gauge(g, m, ps.Balance()),  # type: ignore[arg-type]
    "compare": lambda m, g, x, path: ps.compare(g, m, m),  # type: ignore[arg-type]
    "lift_clips": lambda m, g, x, path: ps.lift_clips(x, m),  # type: ignore[arg-type]
    "fold_norms": lambda m, g, x, path: ps.fold_norms(x, m),  # type: ignore[arg-type]
    "save_masks": lambda m, g, x, path: ps.save_masks(path, g.skeleton()),  # type: ignore[arg-type]
    "save_masks, model": lambda m, g, x, path: ps.save_masks(g.skeleton(), m),  # type: ignore[arg-type]
    "draw": lambda m, g, x, path: ps.draw(path, g.skeleton()),  # type: ignore[arg-type]
    "draw, model": lambda m, g, x, path: ps.draw(g.skeleton(), m),  # type: ignore[arg-type]
    "proof": lambda m, g, x, path: ps.proof(m),  # type: ignore[arg-type]
    "symbolic": lambda m, g, x, path: ps.symbolic(m),  # type: ignore[arg-type]
    "rescale_files": lambda m, g, x, path: ps.rescale_files(path, path, g, x),  # type: ignore[arg-type]
    "balance_files": lambda m, g, x, path: ps.balance_files(path, path, g),  # type: ignore[arg-type]
    "compare, second model": lambda m, g, x, path: ps.compare(m, g, m),  # type: ignore[arg-type]
    "load_masks": lambda m, g, x, path: ps.load_masks(m),  # type: ignore[arg-type]
    "balance_files, model": lambda m, g, x, path: ps.balance_files(g, m, path),  # type: ignore[arg-type]
    "path_norm": lambda m, g, x, path: ps.path_norm(g, x),
    "path_statistics": lambda m, g, x, path: ps.path_statistics(x, m),  # type: ignore[arg-type]
    "smoothing_recipe": lambda m, g, x, path: ps.smoothing_recipe(g),  # type: ignore[arg-type]
    "GSGD": lambda m, g, x, path: training.GSGD(m, skeleton=g.skeleton()),  # type: ignore[arg-type]
    "GSGD, graph": lambda m, g, x, path: training.GSGD(m.parameters(), skeleton=g),  # type: ignore[arg-type]
    "GAdam": lambda m, g, x, path: training.GAdam(g, skeleton=g.skeleton()),  # type: ignore[arg-type]
    "PathSGD": lambda m, g, x, path: training.PathSGD(m, model=m, example=(x,)),  # type: ignore[arg-type]
    "GaugeFixed": lambda m, g, x, path: training.GaugeFixed(g, m),  # type: ignore[arg-type]
    "init_skeleton": lambda m, g, x, path: training.init_skeleton_(g.skeleton(), m),  # type: ignore[arg-type]
    "suggest": lambda m, g, x, path: training.suggest(g, m),  # type: ignore[arg-type]
    "conserved": lambda m, g, x, path: diagnostics.conserved(m),  # type: ignore[arg-type]
    "gradients": lambda m, g, x, path: diagnostics.gradients(x, m, []),  # type: ignore[arg-type]
    "cost, graph": lambda m, g, x, path: diagnostics.cost(m, g),
    "spectrum": lambda m, g, x, path: diagnostics.spectrum(m),  # type: ignore[arg-type]
    "top_singular": lambda m, g, x, path: diagnostics.top_singular(m),  # type: ignore[arg-type]
    "trace_k": lambda m, g, x, path: diagnostics.trace_k(x),  # type: ignore[arg-type]
    "versus": lambda m, g, x, path: diagnostics.versus(m, m),  # type: ignore[arg-type]
    "watching": lambda m, g, x, path: diagnostics.watching(x),  # type: ignore[arg-type]
    "degeneracy": lambda m, g, x, path: diagnostics.degeneracy(x, m),  # type: ignore[arg-type]
    "suggest, loss": lambda m, g, x, path: training.suggest(m, g, loss="x"),  # type: ignore[arg-type]
    "diagnose, loss": lambda m, g, x, path: diagnostics.diagnose(m, x, loss=3),  # type: ignore[arg-type]
    "diagnose, names": lambda m, g, x, path: diagnostics.diagnose(m, x, names=3),  # type: ignore[arg-type]
    "diagnose, seed": lambda m, g, x, path: diagnostics.diagnose(m, x, seed="x"),  # type: ignore[arg-type]
    "diagnose, checkpoint": lambda m, g, x, path: diagnostics.diagnose(m, x, checkpoint=3),  # type: ignore[arg-type]
    "diagnose, progress": lambda m, g, x, path: diagnostics.diagnose(m, x, progress="x"),  # type: ignore[arg-type]
    "diagnose, model": lambda m, g, x, path: diagnostics.diagnose(x, m),  # type: ignore[arg-type]
    "report, checkpoint": lambda m, g, x, path: diagnostics.report(m, x, checkpoint=3),  # type: ignore[arg-type]
    "report, progress": lambda m, g, x, path: diagnostics.report(m, x, progress=3),  # type: ignore[arg-type]
    "report, loss": lambda m, g, x, path: diagnostics.report(m, x, loss_fn=3),  # type: ignore[arg-type]
    "report, seed": lambda m, g, x, path: diagnostics.report(m, x, seed=None),  # type: ignore[arg-type]
    "signal, names": lambda m, g, x, path: diagnostics.signal(m, x, names=[3]),  # type: ignore[list-item]
    "signal, types": lambda m, g, x, path: diagnostics.signal(m, x, types=3),  # type: ignore[arg-type]
    "signal, seed": lambda m, g, x, path: diagnostics.signal(m, x, seed="x"),  # type: ignore[arg-type]
    "gradients, names": lambda m, g, x, path: diagnostics.gradients(m, F.mse_loss, [], names=3),  # type: ignore[arg-type]
    "degeneracy, graph": lambda m, g, x, path: diagnostics.degeneracy(m, x, graph="x"),  # type: ignore[arg-type]
    "spectrum, steps": lambda m, g, x, path: diagnostics.spectrum(
        diagnostics.jacobian(m, x), steps=True
    ),
    "top_singular, count": lambda m, g, x, path: diagnostics.top_singular(
        diagnostics.jacobian(m, x), count=True
    ),
    "verify, seed": lambda m, g, x, path: ps.verify(m, x, seed=True),
    "match, seed": lambda m, g, x, path: ps.channels(m, x).match(m, seed="x"),  # type: ignore[arg-type]
    "rescale, optimizer": lambda m, g, x, path: ps.rescale_(m, g, torch.ones(3), "x"),  # type: ignore[arg-type]
    "balance, optimizer": lambda m, g, x, path: ps.balance_(m, g, optimizer="x"),  # type: ignore[arg-type]
    "canonicalise, optimizer": lambda m, g, x, path: ps.canonicalise_(
        m,
        g.skeleton(),
        optimizer="x",  # type: ignore[arg-type]
    ),
    "equalise, gauges": lambda m, g, x, path: ps.equalise(m, g, gauges=3),  # type: ignore[arg-type]
    "equalise, gauges of numbers": lambda m, g, x, path: ps.equalise(m, g, gauges=[3]),  # type: ignore[list-item]
    "penalize": lambda m, g, x, path: training.penalise_(x, m, tau=0.1),  # type: ignore[type-var]
    "penalize, optimizer": lambda m, g, x, path: training.penalise_(m, x, tau=0.1, optimizer="x"),  # type: ignore[arg-type]
    "cost": lambda m, g, x, path: diagnostics.cost(x, m),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_order_is_one_sentence(name: str, tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.randn(2, 2)
    graph, before = ps.trace(model, x), [p.clone() for p in model.parameters()]
    with pytest.raises(ps.PathspaceError) as caught:
        WRONG[name](model, graph, x, str(tmp_path / "file"))
    said = str(caught.value)
    assert said.endswith(".")
    assert "\n" not in said
    assert "object has no attribute" not in said
    assert "object is not" not in said
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not list(tmp_path.iterdir())
