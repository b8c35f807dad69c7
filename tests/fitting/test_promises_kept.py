"""Clips, pairs of modules, checkpoints and results of commands, where they are odd."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps
from pathspace import InputError, UnsupportedError


class Clipped(nn.Module):
    """A branch that clips what its shortcut reads, or holds one clip in several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2)
        clip = nn.ReLU6(inplace=kind == "in place")
        if kind == "hooked":
            clip.register_forward_hook(lambda _module, _given, out: 2 * out)
        if kind == "in a list":
            self.acts = nn.ModuleList([clip])
        elif kind == "in a sequence":
            self.act = nn.Sequential(clip)
        else:
            self.act = clip
        if kind == "two names":
            self.block = nn.Sequential(clip)
            self.again = self.block

    def forward(self, x: Tensor) -> Tensor:
        act = self.acts[0] if self.kind == "in a list" else self.act
        h = self.a(3 * x)
        y = self.b(act(h))
        if self.kind == "in place":
            return self.c(y) + h[:, :2]
        if self.kind == "two names":
            return self.c(self.again(self.block(y)))
        return self.c(act(y))


@pytest.mark.parametrize("kind", ["in a list", "in a sequence", "two names"])
def test_clips_that_are_shared_are_lifted_for_every_place(kind: str) -> None:
    model, x = Clipped(kind), torch.randn(7, 3)
    lifted = ps.lift_clips(model, x)
    for given in (x, x[:3], x):
        torch.testing.assert_close(lifted(given), model(given))
    graph = ps.trace(lifted, x)
    assert graph.num_units > ps.trace(model, x).num_units
    ps.rescale_(lifted, graph, torch.linspace(-1, 1, graph.num_units))
    torch.testing.assert_close(lifted(x), model(x), rtol=1e-4, atol=1e-5)


def test_clips_that_write_into_what_is_read_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="give it inplace=False"):
        ps.lift_clips(Clipped("in place"), torch.randn(7, 3))


class Streams(nn.Module):
    """Units that other tensors write, read or normalise, too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.gamma = kind, nn.Parameter(torch.ones(6))
        self.a, self.b, self.c, self.d = (
            nn.Linear(3, 6),
            nn.Linear(3, 6),
            nn.Linear(6, 2),
            nn.Linear(6, 2),
        )
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        if self.kind == "two writers of some":
            return self.c(torch.cat([b[:, :4] + a[:, :4], b[:, 4:]], 1)) + self.d(a)
        if self.kind == "a gain beside":
            h = F.relu(a)
            return self.c(h) + self.d(self.gamma * h)
        if self.kind == "a norm beside":
            return self.c(a) + self.d(F.relu(self.norm(a)))
        return self.c(F.relu(a)) + self.d(F.relu(b))


@pytest.mark.parametrize(
    ("kind", "exact"),
    [("two writers of some", False), ("a gain beside", False), ("a norm beside", False),
     ("apart", True)],
)  # fmt: skip
def test_pairs_are_exact_if_nothing_else_is_of_their_units(kind: str, exact: bool) -> None:
    model = Streams(kind).eval()
    with torch.no_grad():
        model.norm.running_mean.normal_()
    pairs = [p for p in ps.smoothing_pairs(ps.trace(model, torch.randn(5, 3))) if "a" in p.writers]
    assert pairs and all(pair.exact is exact for pair in pairs)
    x, factor = torch.randn(5, 3), torch.tensor([1.0, 2.0, 0.5, 4.0, 1.0, 0.25])
    before = model(x)
    with torch.no_grad():
        for writer in pairs[0].writers:
            module = model.get_submodule(writer)
            for tensor in (module.weight, module.bias):
                tensor.mul_(factor.reshape(-1, *[1] * (tensor.dim() - 1)))
        for reader in pairs[0].readers:
            model.get_submodule(reader).weight.div_(factor)
    assert torch.allclose(model(x), before, atol=1e-4) is exact


def test_files_are_not_taken_beyond_the_range_of_their_type(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    graph = ps.trace(model, torch.randn(1, 4))
    for dtype, phi in ((torch.float32, 95.0), (torch.float16, 14.0)):
        source, target = tmp_path / f"{phi}.safetensors", tmp_path / f"{phi}.out.safetensors"
        save_file({key: value.to(dtype) for key, value in model.state_dict().items()}, source)
        with pytest.raises(InputError, match=r"beyond the range of torch\.float"):
            ps.rescale_files(graph, torch.full((6,), phi), source, target)
        assert not target.exists()
        ps.rescale_files(graph, torch.full((6,), 2 * float(np.log(2))), source, target)
        assert all(bool(value.isfinite().all()) for value in load_file(target).values())
