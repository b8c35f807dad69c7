"""Checkpoints that compute the same function in another order of channels."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import network
from torch import Tensor, nn

import pathspace as ps


def outputs(model: nn.Module, *inputs: Tensor) -> Any:
    with torch.no_grad():
        found = model(*inputs)
    return getattr(found, "logits", getattr(found, "last_hidden_state", found))


def judged(a: nn.Module, b: nn.Module, *inputs: Tensor) -> Any:
    """Comparison of two models with equal outputs (checked here) though their order differs."""
    before, after = outputs(a, *inputs), outputs(b, *inputs)
    assert float((before - after).abs().max()) <= 2e-6 * float(before.abs().max())
    assert any(not torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    return ps.compare(a, b, ps.trace(a, *inputs))


@torch.no_grad()
def reordered(model: nn.Module, rows: Sequence[str], columns: Sequence[str], order: Tensor) -> Any:
    """A copy with rows of some tensors (and with columns of others) in another order."""
    twin = copy.deepcopy(model)
    tensors = dict(twin.named_parameters())
    for names, dim in ((rows, 0), (columns, 1)):
        for name in names:
            tensors[name].copy_(tensors[name].index_select(dim, order))
    return twin


def test_outputs_of_a_grouped_convolution_may_change_places_inside_their_group() -> None:
    a = network(
        lambda net, x: net.o(F.relu(net.g(F.relu(net.a(x))))),
        a=nn.Conv2d(3, 12, 1),
        g=nn.Conv2d(12, 12, 3, padding=1, groups=3),
        o=nn.Conv2d(12, 4, 1),
    ).eval()
    order = torch.cat([torch.tensor([2, 0, 3, 1]) + 4 * group for group in range(3)])
    b = reordered(a, ["g.weight", "g.bias"], ["o.weight"], order)
    assert judged(a, b, torch.randn(2, 3, 6, 6)).same is not False


class Attention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4, shared: int = 4) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, shared * self.size) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        n, t, _ = x.shape
        q, k, v = (
            layer(x).view(n, t, -1, self.size).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        k, v = (each.repeat_interleave(self.heads // self.shared, 1) for each in (k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, -1))


def inside_heads(heads: int, size: int) -> Tensor:
    return torch.cat([torch.randperm(size) + size * head for head in range(heads)])


def test_value_features_may_change_places_inside_a_head() -> None:
    a = Attention().eval()
    b = reordered(a, ["v.weight", "v.bias"], ["o.weight"], inside_heads(4, 4))
    assert judged(a, b, torch.randn(2, 5, 16)).same


def test_query_and_key_features_may_change_places_inside_a_head() -> None:
    a = Attention().eval()
    b = reordered(a, ["q.weight", "q.bias", "k.weight", "k.bias"], [], inside_heads(4, 4))
    assert judged(a, b, torch.randn(2, 5, 16)).same


def test_query_heads_that_share_one_key_head_may_change_places() -> None:
    a = Attention(shared=2).eval()
    order = (torch.tensor([1, 0, 2, 3])[:, None] * 4 + torch.arange(4)).reshape(-1)
    b = reordered(a, ["q.weight", "q.bias"], ["o.weight"], order)
    assert judged(a, b, torch.randn(2, 5, 16)).same is not False


def mixed(net: Any, x: Tensor) -> Tensor:
    h = F.silu(torch.einsum("nd,edh->neh", x, net.u))
    return torch.einsum("ne,ehd,neh->nd", net.r(x).softmax(-1), net.w, h)


def experts() -> Any:
    """Four experts in tables, and their router."""
    u, w = nn.Parameter(torch.randn(4, 8, 6)), nn.Parameter(torch.randn(4, 6, 8))
    return network(mixed, r=nn.Linear(8, 4), u=u, w=w).eval()


def test_experts_may_change_places() -> None:
    a = experts()
    b = reordered(a, ["r.weight", "r.bias", "u", "w"], [], torch.tensor([2, 0, 3, 1]))
    assert judged(a, b, torch.randn(5, 8)).same is not False


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def test_the_residual_stream_of_a_llama_may_change_its_order() -> None:
    a = llama()
    with torch.no_grad():
        [p.copy_(torch.rand_like(p) + 0.5) for p in a.parameters() if p.dim() == 1]
    rows = [n for n, p in a.named_parameters() if p.dim() == 1 or "o_proj" in n or "down_proj" in n]
    columns = [n for n, _ in a.named_parameters() if n not in rows]
    b = reordered(a, rows, columns, torch.randperm(16))
    assert judged(a, b, torch.randint(0, 32, (2, 5))).same


def test_the_experts_of_a_mixtral_may_change_places() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=12, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
        use_cache=False,
    )  # fmt: skip
    a = transformers.MixtralForCausalLM(config).eval()
    rows = [n for n, _ in a.named_parameters() if "experts" in n or n.endswith("mlp.gate.weight")]
    b = reordered(a, rows, [], torch.tensor([2, 0, 3, 1]))
    assert judged(a, b, torch.randint(0, 32, (2, 5))).same is not False


def test_models_with_other_outputs_are_different() -> None:
    a, x = Attention().eval(), torch.randn(2, 5, 16)
    b = reordered(a, ["v.weight"], ["o.weight"], inside_heads(4, 4))
    found = ps.compare(a, b, ps.trace(a, x))
    assert found.same is False and found.outputs is not None and found.outputs > 1e-3


def test_orders_that_were_not_searched_are_named() -> None:
    a = experts()
    order = torch.randperm(6)
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.u[1], b.w[1] = a.u[1][:, order], a.w[1][order]
    found = judged(a, b, torch.randn(5, 8))
    assert found.same is None and found.outputs < 1e-6
    assert any(place.startswith("u, ") for place in found.unsearched)


class Grouped(nn.Module):
    def __init__(self, width: int = 12, groups: int = 3) -> None:
        super().__init__()
        self.a, self.o = nn.Conv2d(3, width, 1), nn.Conv2d(width, 4, 1)
        self.g = nn.Conv2d(width, width, 3, padding=1, groups=groups)

    def forward(self, x: Tensor) -> Any:
        return self.o(F.relu(self.g(F.relu(self.a(x)))))


def test_inputs_of_a_grouped_convolution_may_change_places_inside_their_group() -> None:
    a, inside = Grouped().eval(), torch.tensor([2, 0, 3, 1])
    order = torch.cat([inside + 4 * group for group in range(3)])
    b = reordered(a, ["a.weight", "a.bias"], [], order)
    with torch.no_grad():
        b.g.weight.copy_(a.g.weight[:, inside])
    assert judged(a, b, torch.randn(2, 3, 6, 6)).same is not False


class HandNorm(nn.Module):
    def __init__(self, width: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Any:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Stream(nn.Module):
    def __init__(self, norm: Any, width: int = 12) -> None:
        super().__init__()
        self.e, self.n, self.n2 = nn.Embedding(20, width), norm(width), norm(width)
        self.a, self.b = nn.Linear(width, 24), nn.Linear(24, width)
        self.o = nn.Linear(width, 20)

    def forward(self, x: Tensor) -> Any:
        x = self.e(x)
        x = x + self.b(F.gelu(self.a(self.n(x))))
        return self.o(self.n2(x))


def test_a_stream_with_a_hand_written_rms_norm_may_change_its_order() -> None:
    a = Stream(HandNorm).eval()
    rows = ["n.weight", "n2.weight", "b.weight", "b.bias"]
    columns = ["e.weight", "a.weight", "o.weight"]
    b = reordered(a, rows, columns, torch.randperm(12))
    assert judged(a, b, torch.randint(0, 20, (2, 5))).same


def test_channels_of_a_stream_with_a_hand_written_rms_norm_are_listed() -> None:
    sizes = [
        sorted(
            len(group) for group in ps.channels(Stream(norm).eval(), torch.randint(0, 20, (2, 5)))
        )
        for norm in (nn.RMSNorm, HandNorm)
    ]
    assert sizes[0] == sizes[1] and 12 in sizes[1]
