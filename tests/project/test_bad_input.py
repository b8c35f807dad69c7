"""Tables of bad input: calls with the class of their error, and arguments in the wrong order. Every
error is one sentence, and the model that was given stays as it was.
"""

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
from pathspace.pruning.channels import ChannelGroups

VALUE, TYPE = ps.InputError, ps.InputTypeError


class Given:
    """What the calls are given: a small model, its input, its graph, its skeleton, its channels."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        self.x = torch.randn(5, 3)
        self.graph = ps.trace(self.model, self.x)
        self.skeleton = self.graph.skeleton()
        self.phi = torch.zeros(self.graph.num_units)
        self.other = nn.Linear(2, 2)

    def channels(self) -> ChannelGroups:
        return ps.channels(self.model, self.x)

    def sgd(self, **settings: Any) -> torch.optim.Optimizer:
        return training.GSGD(
            self.model.parameters(), **{"lr": 0.1, "skeleton": self.skeleton, **settings}
        )


Call = Callable[[Given], Any]
TABLE: list[tuple[str, Call, type[Exception]]] = [
    ("trace: a class", lambda g: ps.trace(nn.Linear, g.x), TYPE),
    ("trace: no inputs", lambda g: ps.trace(g.model), ps.CaptureError),
    ("trace: features", lambda g: ps.trace(g.model, torch.ones(2, 7)), ps.CaptureError),
    ("trace: norm_eps", lambda g: ps.trace(g.model, g.x, norm_eps="never"), VALUE),
    ("trace: kwargs", lambda g: ps.trace(g.model, g.x, kwargs=[1]), TYPE),
    ("skeleton: rule", lambda g: g.graph.skeleton(rule="largest"), VALUE),
    ("gauge: length", lambda g: g.graph.gauge(torch.zeros(2)), VALUE),
    ("gauge: a string", lambda g: g.graph.gauge("zeros"), TYPE),
    ("slices: unit", lambda g: g.graph.slices(99), VALUE),
    ("module: name", lambda g: g.graph.module("9.weight"), VALUE),
    ("rescale: length", lambda g: ps.rescale_(g.model, g.graph, torch.zeros(99)), VALUE),
    ("rescale: model", lambda g: ps.rescale_(g.other, g.graph, g.phi), VALUE),
    ("balance: model", lambda g: ps.balance_(g.other, g.graph), VALUE),
    ("canonicalise: tree", lambda g: ps.canonicalise_(g.model, g.skeleton, "up"), VALUE),
    ("choose_gauge: model", lambda g: ps.choose_gauge(g.other, g.graph, ps.Balance()), VALUE),
    ("equalise: per", lambda g: ps.equalise(g.model, g.graph, per="row"), VALUE),
    ("fit_dtype: dtype", lambda g: ps.fit_dtype(g.model, g.x, dtype=torch.int8), VALUE),
    ("channels: input", lambda g: ps.channels(g.model, torch.ones(1, 9)), ps.CaptureError),
    ("remove: share", lambda g: g.channels().remove(1.5), VALUE),
    ("remove: all", lambda g: g.channels().remove(1.0), VALUE),
    ("remove: group", lambda g: g.channels().remove(keep={"9.weight": 0.5}), VALUE),
    ("remove: both", lambda g: g.channels().remove(0.5, keep=0.5), TYPE),
    ("importance: by", lambda g: g.channels().importance(by="size"), VALUE),
    ("verify: no inputs", lambda g: ps.verify(g.model, graph=g.graph), ps.CaptureError),
    ("load_masks: file", lambda g: ps.load_masks("nowhere.safetensors"), VALUE),
    ("GSGD: lr", lambda g: g.sgd(lr=-1.0), VALUE),
    ("PathSpace: optimizer", lambda g: training.PathSpace("Adam", g.skeleton), TYPE),
    ("report: seed", lambda g: diagnostics.report(g.model, g.x, seed=-1), VALUE),
]


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
    "penalize": lambda m, g, x, path: training.penalise_(x, m, tau=0.1),  # type: ignore[type-var]
    "penalize, optimizer": lambda m, g, x, path: training.penalise_(m, x, tau=0.1, optimizer="x"),  # type: ignore[arg-type]
    "cost": lambda m, g, x, path: diagnostics.cost(x, m),  # type: ignore[arg-type]
}


def order(case: Case) -> Call:
    """A call with arguments in the wrong order."""
    return lambda g: case(g.model, g.graph, g.x, "file")


CALLS = [
    *(pytest.param(call, error, id=name) for name, call, error in TABLE),
    *(pytest.param(order(case), ps.PathspaceError, id=name) for name, case in WRONG.items()),
]


@pytest.mark.parametrize(("call", "error"), CALLS)
def test_bad_input_is_one_sentence_and_changes_nothing(
    call: Call, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = Given()
    before = {name: value.clone() for name, value in given.model.state_dict().items()}
    with pytest.raises(error) as caught:
        call(given)
    assert isinstance(caught.value, ps.PathspaceError)
    said = str(caught.value)
    assert said.endswith((".", ")")) and "\n" not in said
    assert "object has no attribute" not in said and "object is not" not in said
    assert all(torch.equal(value, before[name]) for name, value in given.model.state_dict().items())
    assert not list(tmp_path.iterdir())
