"""A table of bad input: a call, the class of its error. Every error is one sentence, and the model
that was given stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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
    ("trace: a string", lambda g: ps.trace("model", g.x), TYPE),
    ("trace: a class", lambda g: ps.trace(nn.Linear, g.x), TYPE),
    ("trace: no inputs", lambda g: ps.trace(g.model), ps.CaptureError),
    ("trace: features", lambda g: ps.trace(g.model, torch.ones(2, 7)), ps.CaptureError),
    ("trace: norm_eps", lambda g: ps.trace(g.model, g.x, norm_eps="never"), VALUE),
    ("trace: kwargs", lambda g: ps.trace(g.model, g.x, kwargs=[1]), TYPE),
    ("skeleton: rule", lambda g: g.graph.skeleton(rule="largest"), VALUE),
    ("skeleton: seed", lambda g: g.graph.skeleton(seed="one"), TYPE),
    ("skeleton: negative seed", lambda g: g.graph.skeleton(seed=-1), VALUE),
    ("gauge: length", lambda g: g.graph.gauge(torch.zeros(2)), VALUE),
    ("gauge: a string", lambda g: g.graph.gauge("zeros"), TYPE),
    ("slices: unit", lambda g: g.graph.slices(99), VALUE),
    ("module: name", lambda g: g.graph.module("9.weight"), VALUE),
    ("path_norm: p", lambda g: ps.path_norm(g.model, g.x, p=0), VALUE),
    ("path_norm: type of p", lambda g: ps.path_norm(g.model, g.x, p="one"), TYPE),
    ("rescale: length", lambda g: ps.rescale_(g.model, g.graph, torch.zeros(99)), VALUE),
    ("rescale: NaN", lambda g: ps.rescale_(g.model, g.graph, g.phi / 0), VALUE),
    ("rescale: model", lambda g: ps.rescale_(g.other, g.graph, g.phi), VALUE),
    ("rescale: graph", lambda g: ps.rescale_(g.model, g.skeleton, g.phi), TYPE),
    ("balance: p", lambda g: ps.balance_(g.model, g.graph, p=0), VALUE),
    ("balance: model", lambda g: ps.balance_(g.other, g.graph), VALUE),
    ("canonicalise: tree", lambda g: ps.canonicalise_(g.model, g.skeleton, "up"), VALUE),
    ("choose_gauge: objective", lambda g: ps.choose_gauge(g.model, g.graph, "best"), TYPE),
    ("choose_gauge: model", lambda g: ps.choose_gauge(g.other, g.graph, ps.Balance()), VALUE),
    ("equalise: bits", lambda g: ps.equalise(g.model, g.graph, bits=0), VALUE),
    ("equalise: per", lambda g: ps.equalise(g.model, g.graph, per="row"), VALUE),
    ("fit_dtype: dtype", lambda g: ps.fit_dtype(g.model, g.x, dtype=torch.int8), VALUE),
    ("fit_dtype: headroom", lambda g: ps.fit_dtype(g.model, g.x, headroom=0), VALUE),
    ("fold_norms: model", lambda g: ps.fold_norms("model"), TYPE),
    ("channels: model", lambda g: ps.channels(None, g.x), TYPE),
    ("channels: input", lambda g: ps.channels(g.model, torch.ones(1, 9)), ps.CaptureError),
    ("remove: share", lambda g: g.channels().remove(1.5), VALUE),
    ("remove: all", lambda g: g.channels().remove(1.0), VALUE),
    ("remove: group", lambda g: g.channels().remove(keep={"9.weight": 0.5}), VALUE),
    ("remove: both", lambda g: g.channels().remove(0.5, keep=0.5), TYPE),
    ("importance: by", lambda g: g.channels().importance(by="size"), VALUE),
    ("match: model", lambda g: g.channels().match("other"), TYPE),
    ("compare: model", lambda g: ps.compare(g.model, 3, g.x), TYPE),
    ("verify: model", lambda g: ps.verify(3, g.x), TYPE),
    ("verify: seed", lambda g: ps.verify(g.model, g.x, seed="a"), TYPE),
    ("verify: no inputs", lambda g: ps.verify(g.model, graph=g.graph), ps.CaptureError),
    ("symbolic: graph", lambda g: ps.symbolic("graph"), TYPE),
    ("load_masks: file", lambda g: ps.load_masks("nowhere.safetensors"), VALUE),
    ("GSGD: lr", lambda g: g.sgd(lr=-1.0), VALUE),
    ("GSGD: skeleton", lambda g: g.sgd(skeleton="modulo"), TYPE),
    ("PathSpace: optimizer", lambda g: training.PathSpace("Adam", g.skeleton), TYPE),
    ("signal: model", lambda g: diagnostics.signal("model", g.x), TYPE),
    ("report: seed", lambda g: diagnostics.report(g.model, g.x, seed=-1), VALUE),
]


@pytest.mark.parametrize(
    ("call", "error"), [pytest.param(call, error, id=name) for name, call, error in TABLE]
)
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
    assert all(torch.equal(value, before[name]) for name, value in given.model.state_dict().items())
    assert not list(tmp_path.iterdir())
