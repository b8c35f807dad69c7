"""Ensembles by vmap, functional calls, sparse products, experts of transformers; what
cannot be followed says so.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from oracles.scales import at_most, outputs
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, stack_module_state, vmap

import pathspace as ps
from pathspace.errors import CaptureError, InputError, PathspaceError

WIDTH, HIDDEN, OUT = 3, 4, 2


def vectors(rows: int = 8) -> Tensor:
    return torch.randn(rows, WIDTH).double() * 10 ** (4 * torch.rand(rows, 1).double() - 2)


def unchanged(model: nn.Module, graph: ps.ReductionGraph, samples: list[Tensor]) -> bool:
    generator = torch.Generator().manual_seed(2)
    phi = torch.randn(graph.num_units, generator=generator, dtype=torch.float64)
    other = ps.rescale_(copy.deepcopy(model), graph, phi)
    with torch.no_grad():
        pairs = [(outputs(model(x)), outputs(other(x))) for x in samples]
    return all(
        bool(torch.allclose(a, b, rtol=1e-9, atol=1e-9 * float(a.abs().max()))) for a, b in pairs
    )


class Ensemble(nn.Module):
    """Two networks in one, by stacked states."""

    def __init__(self) -> None:
        super().__init__()
        members = [
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUT))
            for _ in range(2)
        ]
        stacked, _ = stack_module_state(members)
        self.names = list(stacked)
        self.states = nn.ParameterList([nn.Parameter(value.detach()) for value in stacked.values()])
        self.__dict__["member"] = copy.deepcopy(members[0]).to("meta")

    def forward(self, x: Tensor) -> Tensor:
        states = dict(zip(self.names, self.states, strict=True))
        return vmap(lambda state, y: functional_call(self.member, state, (y,)), (0, None))(
            states, x
        )


class Mapped(nn.Module):
    """A network applied to one sample at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return vmap(lambda y: self.b(self.a(y).relu()))(x)


class Graph(Mapped):
    """A layer of a graph network with a sparse adjacency matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "adjacency", (torch.eye(8) + torch.ones(8, 8).triu(6)).double().to_sparse()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.sparse.mm(self.adjacency, self.a(x)).relu())


def test_sparse_constants_are_followed() -> None:
    torch.manual_seed(0)
    model = Graph().double()
    samples = [vectors() for _ in range(8)]
    graph = ps.trace(model, samples[0])
    stacks = [f"states.{i}" for i in range(4)]
    assert graph.num_units == HIDDEN == at_most(model, [(x,) for x in samples], stacks)
    assert unchanged(model, graph, samples)


class Packed(nn.Module):
    """Reads lengths from their tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(WIDTH, HIDDEN, nonlinearity="relu", batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths.tolist(), batch_first=True, enforce_sorted=False
        )
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


class Jagged(Mapped):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([x, y], layout=torch.jagged)
        return self.b(self.a(rows).relu()).to_padded_tensor(0.0)


class Force(Mapped):
    """The gradient of an energy, inside forward."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.functional = functional

    def energy(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()).sum()

    def forward(self, x: Tensor) -> Tensor:
        if self.functional:
            return vmap(grad(self.energy))(x)
        x = x.detach().requires_grad_(True)
        with torch.enable_grad():
            return torch.autograd.grad(self.energy(x), x, create_graph=True)[0]


class Tuned(Mapped):
    """One step of gradient descent on the weights, and a derivative by a weight, inside forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.named_parameters())
        if self.how == "weight":
            return torch.autograd.grad(
                self.b(self.a(x).relu()).sum(), self.a.weight, create_graph=True
            )[0]
        if self.how == "dual":
            # (the sum over the features of the tangent ties their scales)
            with forward_ad.dual_level():
                hidden = self.a(forward_ad.make_dual(x, torch.ones_like(x))).relu()
                primal, tangent = forward_ad.unpack_dual(hidden)
                return self.b(primal) + tangent.sum(-1, keepdim=True)
        if self.how == "inputs":
            return jacfwd(lambda v: self.b(self.a(v).relu()).sum())(x)
        slopes = grad(lambda w: functional_call(self.a, w, x).square().sum())(
            {"weight": weights["a.weight"]}
        )
        return functional_call(self.a, {"weight": weights["a.weight"] - 0.1 * slopes["weight"]}, x)


class SparseWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(WIDTH).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.w, x.T)


REFUSED: dict[str, tuple[nn.Module, tuple[Tensor, ...], type[PathspaceError], str]] = {
    "ensemble": (Ensemble(), (torch.randn(4, WIDTH),), CaptureError, "cannot be captured"),
    "mapped": (Mapped(), (torch.randn(4, WIDTH),), CaptureError, "cannot be captured"),
    "packed": (
        Packed(),
        (torch.randn(3, 5, WIDTH), torch.tensor([5, 2, 4])),
        CaptureError,
        "depends on the values of tensors",
    ),
    "jagged": (
        Jagged(),
        (torch.randn(3, WIDTH), torch.randn(2, WIDTH)),
        CaptureError,
        "cannot be captured",
    ),
    "grad": (Force(True), (torch.randn(4, WIDTH),), CaptureError, "gradients inside forward"),
    "autograd": (Force(False), (torch.randn(4, WIDTH),), CaptureError, "gradients inside forward"),
    "step": (Tuned("step"), (torch.randn(4, WIDTH),), CaptureError, "gradients inside forward"),
    "weight": (Tuned("weight"), (torch.randn(4, WIDTH),), CaptureError, "gradients inside forward"),
    "forward": (
        Tuned("inputs"),
        (torch.randn(4, WIDTH),),
        CaptureError,
        "gradients inside forward",
    ),
    "dual": (Tuned("dual"), (torch.randn(4, WIDTH),), CaptureError, "gradients inside forward"),
    "sparse": (SparseWeight(), (torch.randn(4, WIDTH),), InputError, "sparse parameter 'w'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_in_a_sentence(name: str) -> None:
    model, inputs, kind, words = REFUSED[name]
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
