"""What the list of statements says of the chain paper's hook and penalty, tried
with the printed line itself.
"""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from cases import network
from torch import Tensor, nn

TAU = 0.1


class Chain(nn.Module):
    """Residual blocks with the printed line; ``keep`` is footnote 1: the
    hook holds ``z`` itself.
    """

    def __init__(self, keep: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.keep, self.seen = keep, []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            z = block(x)
            if self.keep:
                z.register_hook(lambda g, z=z: g + TAU * z)
            else:
                z.register_hook(lambda g, z=z.detach().clone(): g + TAU * z)  # noqa: B008 (as it is printed)
            self.seen.append(weakref.ref(z))
            x = x + z
        return x


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
def test_a_hook_that_keeps_its_own_tensor_leaks(keep: bool) -> None:
    model = Chain(keep)
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
    gc.collect()
    alive = [ref() for ref in model.seen]
    assert all(z is not None for z in alive) if keep else all(z is None for z in alive)
    for z in alive:
        if z is not None:
            z._backward_hooks.clear()


def test_the_printed_hook_needs_a_guard() -> None:
    model = Chain()
    with torch.no_grad(), pytest.raises(RuntimeError, match="doesn't require gradient"):
        model(torch.randn(2, 4))
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        model.requires_grad_(False)(torch.randn(2, 4))


def test_the_penalty_is_no_property_of_the_function() -> None:
    """Behind a norm the whole stream can be made smaller: the same outputs, a
    hundredth of the penalty.
    """

    def forward(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x, penalty = net.stem(x), torch.zeros(())
        for block in net.blocks:
            z = block(torch.relu(net.norm(x)))
            penalty = penalty + z.square().sum()
            x = x + z
        return net.read(net.norm(x)), penalty

    blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    parts = {"stem": nn.Linear(3, 8), "read": nn.Linear(8, 2), "norm": nn.LayerNorm(8, eps=0.0)}
    model, x = network(forward, blocks=blocks, **parts).double(), torch.randn(5, 3).double()
    small = copy.deepcopy(model)
    with torch.no_grad():
        for layer in (small.stem, *small.blocks):
            layer.weight *= 0.1
            layer.bias *= 0.1
        (outputs, penalty), (same, less) = model(x), small(x)
    torch.testing.assert_close(same, outputs)
    assert float(less / penalty) == pytest.approx(0.01)


def test_no_distance_has_the_lower_inequality_of_definition_2() -> None:
    """Half way between two points that are as far from a third lies that third point itself."""
    a, b, c = (torch.tensor(value) for value in (-1.0, 1.0, 0.0))
    for distance in (torch.dist, lambda x, y: (x - y).square(), lambda x, y: (x != y).double()):
        mixed = distance((a + b) / 2, c)
        assert distance(a, c) >= distance(b, c) >= mixed
        assert not mixed >= distance(b, c)


@pytest.mark.parametrize("nodes", [2, 6, 24])
def test_the_square_of_a_sum_over_nodes_keeps_the_sum(nodes: int) -> None:
    """Eq. (11) and (18) go from ``|sum_k s_k|^2`` to ``|s_l|^2``, where ``s_l = 1 - eta cos_l``:
    its derivative has the sum as a factor, so the printed one is too small by about the number
    of nodes.
    """
    eta, g = 0.01, torch.randn(nodes, 5).double()
    z = torch.randn(nodes, 5).double().requires_grad_()
    terms = 1 - eta * torch.cosine_similarity(z, g, dim=1)
    (exact,) = torch.autograd.grad(terms.sum().square(), z, retain_graph=True)
    (own,) = torch.autograd.grad(terms.sum(), z, retain_graph=True)
    printed = 2 * terms.detach()[:, None] * own
    assert torch.allclose(exact, 2 * terms.detach().sum() * own)
    ratio = (exact.norm(dim=1) / printed.norm(dim=1)).detach()
    assert torch.allclose(ratio, torch.full_like(ratio, nodes), rtol=0.03)
    # with the mean over nodes of eq. (4) in place of the sum, it is too large instead
    (mean,) = torch.autograd.grad(terms.mean().square(), z)
    assert torch.allclose(mean.norm(dim=1) / printed.norm(dim=1), 1 / ratio, rtol=0.03)
