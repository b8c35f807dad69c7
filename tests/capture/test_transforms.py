"""Sparse products and experts; what cannot be followed says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from cases import network
from oracles.scales import at_most
from rescaled import change, traced
from torch import Tensor, nn
from torch.func import grad, jacfwd, vmap

import pathspace as ps
from pathspace.errors import CaptureError, InputError

WIDTH, HIDDEN, OUT = 3, 4, 2


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, WIDTH).double() * 10 ** (4 * torch.rand(rows, 1).double() - 2)


def two(forward: Callable[..., Tensor]) -> nn.Module:
    return network(forward, a=nn.Linear(WIDTH, HIDDEN), b=nn.Linear(HIDDEN, OUT))


def mapped(net: Any, x: Tensor) -> Tensor:
    """A network applied to one sample at a time."""
    return vmap(lambda y: net.b(net.a(y).relu()))(x)


ADJACENCY = (torch.eye(8) + torch.ones(8, 8).triu(6)).double().to_sparse()


def test_sparse_constants_are_followed() -> None:
    """A layer of a graph network with a sparse adjacency matrix."""
    model = two(lambda net, x: net.b(torch.sparse.mm(net.adjacency, net.a(x)).relu())).double()
    model.register_buffer("adjacency", ADJACENCY)
    samples = [vectors() for _ in range(8)]
    graph = traced(model, samples[0], units=HIDDEN)
    assert at_most(model, [(x,) for x in samples]) == HIDDEN
    assert change(model, graph, *samples) < 1e-9


def packed(net: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """Reads lengths from their tensor."""
    rows = nn.utils.rnn.pack_padded_sequence(
        x, lengths.tolist(), batch_first=True, enforce_sorted=False
    )
    return nn.utils.rnn.pad_packed_sequence(net.rnn(rows)[0], batch_first=True)[0]


def jagged(net: Any, x: Tensor, y: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor([x, y], layout=torch.jagged)
    return net.b(net.a(rows).relu()).to_padded_tensor(0.0)


def energy(net: Any, x: Tensor) -> Tensor:
    return net.b(net.a(x).relu()).sum()


def force(net: Any, x: Tensor) -> Tensor:
    """The gradient of an energy, inside forward."""
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        return torch.autograd.grad(energy(net, x), x, create_graph=True)[0]


X = torch.randn(4, WIDTH)
CAPTURED, INSIDE = "cannot be captured", "gradients inside forward"
DERIVATIVES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "grad": lambda net, x: vmap(grad(lambda y: energy(net, y)))(x),
    "autograd": force,
    "forward": lambda net, x: jacfwd(lambda v: energy(net, v))(x),
}
REFUSED: dict[str, tuple[nn.Module, tuple[Tensor, ...], str]] = {
    "mapped": (two(mapped), (X,), CAPTURED),
    "packed": (
        network(packed, rnn=nn.RNN(WIDTH, HIDDEN, nonlinearity="relu", batch_first=True)),
        (torch.randn(3, 5, WIDTH), torch.tensor([5, 2, 4])),
        "depends on the values of tensors",
    ),
    "jagged": (two(jagged), (torch.randn(3, WIDTH), torch.randn(2, WIDTH)), CAPTURED),
    **{name: (two(forward), (X,), INSIDE) for name, forward in DERIVATIVES.items()},
    "sparse": (
        network(
            lambda net, x: torch.sparse.mm(net.w, x.T), w=nn.Parameter(torch.eye(WIDTH).to_sparse())
        ),
        (X,),
        "sparse parameter 'w'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_in_a_sentence(name: str) -> None:
    model, inputs, words = REFUSED[name]
    kind = InputError if name == "sparse" else CaptureError
    for read in (ps.trace, ps.spaces, ps.channels):
        with pytest.raises(kind, match=words) as caught:
            read(model, *inputs)
        said = str(caught.value)
        assert "\n" not in said and said.endswith(".")
        assert not any(word in said for word in ("aten", "Fake", "Proxy", "_export"))


def mixtral(experts: str, act: str = "silu") -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=7, hidden_size=4, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=2,
        intermediate_size=4, num_local_experts=3, num_experts_per_tok=2, rms_norm_eps=0.0,
        hidden_act=act, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).eval()
    model.set_experts_implementation(experts)
    return model


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize(("act", "units"), [("silu", 28), ("relu", 24)])
def test_experts_have_hidden_units(experts: str, act: str, units: int) -> None:
    model = mixtral(experts, act)
    tokens = torch.randint(0, 7, (2, 6))
    graph = ps.trace(model, kwargs={"input_ids": tokens, "use_cache": False})
    # (the numerical bound in float64 is 28, and 40: free gates share their scales over experts)
    assert graph.num_units == units
    assert model.config._experts_implementation == experts
    other = ps.rescale_(copy.deepcopy(model), graph, 0.5 * torch.randn(graph.num_units))
    for length in (3, 9):
        more = torch.randint(0, 7, (2, length))
        with torch.no_grad():
            before, after = model(more).logits, other(more).logits
        assert torch.allclose(before, after, atol=2e-4 * float(before.abs().max()))
