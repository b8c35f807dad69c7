"""Costs of a training step against counts by hand."""

from __future__ import annotations

import pytest
import torch
from cases import mlp, network
from torch import nn
from torch.nn import functional as F

from pathspace.diagnostics.parameters.cost import cost


def chain(*widths: int) -> nn.Sequential:
    return nn.Sequential(*mlp(*widths, bias=False, act=nn.Tanh), nn.Tanh())


@pytest.mark.parametrize("n", [4, 20, 200])
def test_the_notes_example(n: int) -> None:
    """As many weights by depth and by width: section 3.5 of the notes."""
    m = n + n**2 // 2
    deep, wide = cost(chain(1, n, n, 1), torch.randn(1, 1)), cost(chain(1, m, 1), torch.randn(1, 1))
    assert deep.parameters == wide.parameters == 2 * n + n**2
    assert deep.activations == deep.derivatives == 2 * n + 1
    assert wide.activations == wide.derivatives == m + 1
    assert (deep.cached, wide.cached) == (4 * n + 1, 2 * m + 1)
    assert deep.multiplications == 3 * n**2 + 7 * n + 1
    # a general backward pass does not take f'(s) x out of the sum, which would need 5 m + 1
    assert wide.multiplications == 6 * m + 1
    assert deep.forward == n**2 + 2 * n and wide.forward == 2 * m


def test_figures_at_200() -> None:
    deep = cost(chain(1, 200, 200, 1), torch.randn(1, 1))
    wide = cost(chain(1, 20200, 1), torch.randn(1, 1))
    assert (deep.multiplications, deep.activations, deep.cached) == (121401, 401, 801)
    # with f'(s) x taken out of the sum one product less for every unit
    assert (wide.multiplications - 20200, wide.activations, wide.cached) == (101001, 20201, 40401)


def test_a_third_hidden_layer_needs_more_memory_than_width() -> None:
    """As many parameters from two hidden layers of 20: a third one, or 28 units in both."""
    deep = cost(chain(1, 20, 20, 20, 1), torch.randn(1, 1))
    wide = cost(chain(1, 28, 28, 1), torch.randn(1, 1))
    assert deep.parameters == wide.parameters == 840
    assert deep.cached > wide.cached and deep.activations > wide.activations


def test_convolutions_by_hand() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(4, 2, 3, bias=False)
    )
    found = cost(model, torch.randn(2, 3, 8, 8))
    first, second = 2 * 4 * 64 * 27, 2 * 2 * 36 * 36
    assert found.forward == first + second
    # the first layer needs no gradient by its input
    assert found.multiplications == 2 * first + 3 * second + 2 * 4 * 64
    assert found.activations == 2 * 4 * 64 and found.cached == 2 * 2 * 4 * 64
    # autograd keeps the output of the ReLU only, which is the next layer's input
    assert found.saved == 2 * 4 * 64


def test_functional_models_and_time() -> None:
    model = network(
        lambda net, x: net.b(F.relu(net.a(x), inplace=True)), a=nn.Linear(3, 5), b=nn.Linear(5, 2)
    )
    x = torch.randn(7, 3)
    found = cost(model, x, repeats=2)
    assert found.forward == 7 * (15 + 10) and found.activations == 35 and (found.seconds or 0) > 0
    assert found.bytes == 4 * (2 * found.parameters + found.saved)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_are_counted_step_by_step(kind: str) -> None:
    """An LSTM is one operation on the processor, and its products count all the same."""
    layer = getattr(nn, kind)(4, 6, bias=False)
    steps, batch = 5, 3
    gates = sum(p.numel() for p in layer.parameters()) * steps * batch
    found = cost(layer, torch.randn(steps, batch, 4))
    elementwise = {"LSTM": 3, "GRU": 1, "RNN": 0}[kind] * 6 * steps * batch
    assert gates + elementwise <= found.forward <= gates + 2 * elementwise
    assert found.activations == {"LSTM": 5, "GRU": 3, "RNN": 1}[kind] * 6 * steps * batch


def test_fused_attention_is_counted() -> None:
    """Two products of T x T x D a head, whichever kernel makes them."""
    attention = network(
        lambda net, x: F.scaled_dot_product_attention(net.q, x, x),
        q=nn.Parameter(torch.randn(2, 3, 7, 4)),
    )
    assert cost(attention, torch.randn(2, 3, 7, 4)).forward == 2 * 2 * 3 * 7 * 7 * 4
