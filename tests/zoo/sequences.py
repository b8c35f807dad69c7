"""Recurrent networks, decoders and other sequence models."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from cases import network
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from zoo.entry import zoo


def tokens(batch: int = 2, length: int = 7, vocabulary: int = 23) -> Tensor:
    """Random token numbers."""
    return torch.randint(0, vocabulary, (batch, length))


# --- recurrent layers


def tagger(kind: str, **options: Any) -> nn.Module:
    """Embedding, recurrent layers, linear head at every step."""
    wide = (options.get("proj_size") or 12) * (2 if options.get("bidirectional") else 1)
    return network(
        lambda net, x: net.head(net.rnn(net.embedding(x))[0]),
        embedding=nn.Embedding(23, 8),
        rnn=getattr(nn, kind)(8, 12, batch_first=True, **options),
        head=nn.Linear(wide, 5),
    )


LAYERS: list[tuple[str, str, dict[str, Any]]] = [
    ("rnn_relu", "RNN", {"nonlinearity": "relu", "num_layers": 2}),
    ("rnn_tanh", "RNN", {"num_layers": 2, "bidirectional": True}),
    ("lstm", "LSTM", {"num_layers": 2, "dropout": 0.1}),
    ("lstm_bidirectional", "LSTM", {"bidirectional": True}),
    ("lstm_projected", "LSTM", {"num_layers": 2, "proj_size": 6, "bidirectional": True}),
    ("lstm_nobias", "LSTM", {"bias": False}),
    ("gru", "GRU", {"num_layers": 2, "bidirectional": True}),
]
for label, kind, options in LAYERS:
    zoo(label, "sequence", fast=label in ("rnn_relu", "lstm_projected", "gru"))(
        lambda kind=kind, options=options: (tagger(kind, **options), tokens())  # type: ignore[misc]
    )


def packed(kind: str, **options: Any) -> tuple[Any, ...]:
    """A recurrent layer over sequences of several lengths."""
    model = network(
        lambda net, data, sizes: net.head(net.rnn(PackedSequence(data, sizes))[0].data),
        rnn=getattr(nn, kind)(5, 6, **options),
        head=nn.Linear(6, 3),
    )
    return model, torch.randn(6, 5), torch.tensor([3, 2, 1])


zoo("packed_relu", "sequence")(partial(packed, "RNN", nonlinearity="relu"))
zoo("packed_lstm", "sequence")(partial(packed, "LSTM"))
zoo("packed_gru", "sequence")(partial(packed, "GRU"))


@zoo("cells", "sequence")
def cells() -> tuple[Any, ...]:
    """Cells stepped by hand."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h, c = (x.new_zeros(x.shape[0], 5) for _ in range(2))
        g, r = x.new_zeros(x.shape[0], 6), x.new_zeros(x.shape[0], 7)
        for step in range(x.shape[1]):
            h, c = net.lstm(x[:, step], (h, c))
            g = net.gru(h, g)
            r = net.rnn(g, r)
        return net.head(r)

    lstm, gru = nn.LSTMCell(4, 5), nn.GRUCell(5, 6)
    rnn, head = nn.RNNCell(6, 7, nonlinearity="relu"), nn.Linear(7, 2)
    return network(forward, lstm=lstm, gru=gru, rnn=rnn, head=head), torch.randn(2, 3, 4)


@zoo("gru_translator", "sequence")
def gru_translator(dim: int = 10) -> tuple[Any, ...]:
    """GRU encoder and decoder with additive attention; the output layer is the embedding."""

    def forward(net: Any, x: Tensor, y: Tensor) -> Tensor:
        memory, state = net.encoder(net.source(x))
        state, steps = state[0], []
        for word in net.target(y).unbind(1):
            energy = net.v(torch.tanh(net.wq(state).unsqueeze(1) + net.wk(memory)))
            context = (energy.softmax(1) * memory).sum(1)
            state = net.decoder(torch.cat([word, context], -1), state)
            steps.append(F.linear(state, net.target.weight))
        return torch.stack(steps, 1)

    source, target = nn.Embedding(23, dim), nn.Embedding(23, dim)
    parts = {"encoder": nn.GRU(dim, dim, batch_first=True), "decoder": nn.GRUCell(2 * dim, dim)}
    parts |= {"wq": nn.Linear(dim, dim, bias=False), "wk": nn.Linear(dim, dim)}
    parts |= {"v": nn.Linear(dim, 1, bias=False)}
    return network(forward, source=source, target=target, **parts), tokens(), tokens(length=4)


# --- transformers


class TorchTransformer(nn.Module):
    """`nn.TransformerEncoder` as a language model, with a causal mask and sinusoidal positions."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, **options)
        self.embedding, self.head = nn.Embedding(23, 16), nn.Linear(16, 23, bias=False)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        rates = torch.exp(torch.arange(0, 16, 2) * (-math.log(100.0) / 16))
        angle = torch.arange(7)[:, None] * rates
        self.register_buffer("position", torch.stack([angle.sin(), angle.cos()], -1).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y = self.embedding(x) * 4.0 + self.position
        return self.head(self.encoder(y, mask=mask, is_causal=True))


zoo("torch_encoder_relu", "sequence", fast=True)(lambda: (TorchTransformer(), tokens()))
zoo("torch_encoder_prenorm_gelu", "sequence")(
    lambda: (TorchTransformer(norm_first=True, activation="gelu"), tokens())
)
zoo("torch_transformer", "sequence")(
    lambda: (
        nn.Transformer(16, 2, 1, 1, 24, 0.1, batch_first=True, norm_first=True),
        torch.randn(2, 5, 16),
        torch.randn(2, 4, 16),
        {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(4)},
    )
)


class RMSNorm(nn.Module):
    """Root mean square norm, written out."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary position embedding."""
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        cos, sin = cos[..., : a.shape[-1]], sin[..., : a.shape[-1]]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class DecoderBlock(nn.Module):
    """Grouped-query attention with rotary positions and a gated MLP.

    `gate`: `"silu"` (SwiGLU), `"relu"` (ReGLU), `"bilinear"`, `"relu2"` (squared ReLU,
    ungated); `qk_norm` normalises queries and keys per head; `written` spells the attention
    out; `softcap` squashes scores.
    """

    def __init__(
        self, dim: int, heads: int, groups: int, inner: int, gate: str = "silu", **how: Any
    ) -> None:
        super().__init__()
        norm = RMSNorm if how.get("own_norm", True) else nn.RMSNorm
        self.heads, self.groups, self.gate, self.how = heads, groups, gate, how
        size = dim // heads
        self.q = nn.Linear(dim, heads * size, bias=False)
        self.k = nn.Linear(dim, groups * size, bias=False)
        self.v = nn.Linear(dim, groups * size, bias=False)
        self.o = nn.Linear(heads * size, dim, bias=False)
        self.n1, self.n2 = norm(dim), norm(dim)
        self.qn, self.kn = (norm(size) if how.get("qk_norm") else nn.Identity() for _ in range(2))
        self.up, self.down = nn.Linear(dim, inner, bias=False), nn.Linear(inner, dim, bias=False)
        self.gated = nn.Linear(dim, inner, bias=False) if gate != "relu2" else None

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.qn(self.q(x).view(b, n, self.heads, -1)).transpose(1, 2)
        k = self.kn(self.k(x).view(b, n, self.groups, -1)).transpose(1, 2)
        v = self.v(x).view(b, n, self.groups, -1).transpose(1, 2)
        q, k = (rotated(t, cos, sin, self.how.get("interleaved", False)) for t in (q, k))
        repeats = self.heads // self.groups
        if self.how.get("written"):
            k, v = (
                t[:, :, None].expand(-1, -1, repeats, -1, -1).reshape(b, self.heads, n, -1)
                for t in (k, v)
            )
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            if self.how.get("softcap"):
                scores = 5 * torch.tanh(scores / 5)
            mask = torch.full((n, n), float("-inf")).triu(1)
            y = (scores + mask).softmax(-1) @ v
        elif self.how.get("flex"):
            k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
            mask = torch.ones(n, n, dtype=torch.bool).tril()
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=repeats > 1)
        return self.o(y.transpose(1, 2).reshape(b, n, -1))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attend(self.n1(x), cos, sin)
        y = self.n2(x)
        if self.gated is None:
            return x + self.down(F.relu(self.up(y)).square())
        function = {"silu": F.silu, "relu": F.relu, "bilinear": lambda t: t}[self.gate]
        return x + self.down(function(self.gated(y)) * self.up(y))


class Decoder(nn.Module):
    """A decoder-only language model; `tied` embedding and output, `shared` block over depth."""

    def __init__(self, dim: int = 16, heads: int = 4, groups: int = 2, depth: int = 2,
                 tied: bool = False, shared: bool = False, gate: str = "silu",
                 **how: Any) -> None:  # fmt: skip
        super().__init__()
        self.embedding, self.head = nn.Embedding(23, dim), nn.Linear(dim, 23, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        count = 1 if shared else depth
        self.depth, self.blocks = depth, nn.ModuleList(DecoderBlock(dim, heads, groups, 24, gate, **how) for _ in range(count))  # noqa: E501  # fmt: skip
        self.norm = RMSNorm(dim) if how.get("own_norm", True) else nn.RMSNorm(dim)
        size = dim // heads
        angle = torch.arange(7)[:, None] * 10.0 ** -(torch.arange(0, size, 2) / size)
        self.register_buffer("cos", torch.cat([angle.cos()] * 2, -1), persistent=False)
        self.register_buffer("sin", torch.cat([angle.sin()] * 2, -1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for i in range(self.depth):
            x = self.blocks[i % len(self.blocks)](x, self.cos, self.sin)
        return self.head(self.norm(x))


# stream 1; per block two norms of 16, 4 query-key pairs (rotated together, per group of heads), 8
# values, 24 gated features with SwiGLU (48 without an activation); last norm 16
DECODERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("swiglu", {"units": 1 + 2 * (2 * 16 + 4 + 8 + 24) + 16}, {}),
    (
        "reglu",
        {"units": 1 + 2 * (2 * 16 + 4 + 8 + 48) + 16},
        {"gate": "relu", "interleaved": True, "written": True},
    ),
    (
        "bilinear_tied",
        {"units": 2 * (2 * 16 + 4 + 8 + 48) + 1, "fast": False},
        {"gate": "bilinear", "tied": True, "own_norm": False},
    ),
    (
        "squared_relu",
        {"units": 1 + 2 * (2 * 16 + 4 + 8 + 24) + 16},
        {"gate": "relu2", "flex": True},
    ),
    ("qk_norm_softcap", {}, {"qk_norm": True, "written": True, "softcap": True}),
    ("shared_depth", {}, {"shared": True, "depth": 3}),
]
for label, facts, options in DECODERS:
    zoo(f"decoder_{label}", "sequence", **{"fast": True, **facts})(
        lambda options=options: (Decoder(**options), tokens())  # type: ignore[misc]
    )


class TransformerXL(nn.Module):
    """Relative multi-head attention with the shifting trick, and content and position biases."""

    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.size = heads, dim // heads
        self.embedding, self.out = nn.Embedding(23, dim), nn.Linear(dim, dim, bias=False)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.relative = nn.Linear(dim, dim, bias=False)
        self.u = nn.Parameter(torch.randn(heads, self.size))
        self.w = nn.Parameter(torch.randn(heads, self.size))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 23)
        self.register_buffer("position", torch.randn(7, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, self.heads, self.size) for t in self.qkv(x).chunk(3, -1))
        r = self.relative(self.position).view(n, self.heads, self.size)
        content = torch.einsum("bind,bjnd->bnij", q + self.u, k)
        place = torch.einsum("bind,jnd->bnij", q + self.w, r)
        padded = F.pad(place, (1, 0)).view(b, self.heads, n + 1, n)[:, :, 1:]
        scores = (content + padded.view_as(place)) * self.size**-0.5
        mask = torch.ones(n, n, dtype=torch.bool).triu(1)
        y = torch.einsum("bnij,bjnd->bind", scores.masked_fill(mask, -1e30).softmax(-1), v)
        return self.head(self.norm(x + self.out(y.reshape(b, n, -1))))


zoo("transformer_xl", "sequence")(lambda: (TransformerXL(), tokens()))


class Experts(nn.Module):
    """A layer of gated experts; the router picks two for every token (`soft`: mixes all)."""

    def __init__(self, dim: int = 12, inner: int = 16, count: int = 4, soft: bool = False) -> None:
        super().__init__()
        self.soft, self.router = soft, nn.Linear(dim, count, bias=False)
        self.embedding = nn.Embedding(23, dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 5)
        self.up = nn.Parameter(torch.randn(count, dim, inner))
        self.down = nn.Parameter(torch.randn(count, inner, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        y = self.norm(x)
        weights = self.router(y).softmax(-1)
        if not self.soft:
            best, chosen = weights.topk(2, -1)
            shares = best / best.sum(-1, keepdim=True)
            weights = torch.zeros_like(weights).scatter(-1, chosen, shares)
        hidden = F.relu(torch.einsum("bnd,edh->bneh", y, self.up))
        mixed = torch.einsum("bneh,ehd->bned", hidden, self.down)
        return self.head(x + (mixed * weights.unsqueeze(-1)).sum(-2))


zoo("experts_top2", "sequence", units=1 + 12 + 4 * 16, fast=True)(lambda: (Experts(), tokens()))
zoo("experts_soft", "sequence", units=1 + 12 + 4 * 16)(lambda: (Experts(soft=True), tokens()))


def linear_attention(feature: Callable[[Tensor], Tensor]) -> nn.Module:
    """Kernelised attention with a running sum, by a feature map."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.norm(net.embedding(x))
        q, k, v = feature(net.q(x)), feature(net.k(x)), net.v(x)
        state = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(1)
        return net.head(x + net.o(torch.einsum("bnd,bnde->bne", q, state)))

    embedding, norm = nn.Embedding(23, 12), nn.LayerNorm(12)
    q, k, v, o = (nn.Linear(12, 12) for _ in range(4))
    return network(
        forward, embedding=embedding, norm=norm, q=q, k=k, v=v, o=o, head=nn.Linear(12, 5)
    )


zoo("linear_attention_elu", "sequence")(
    lambda: (linear_attention(lambda x: F.elu(x) + 1), tokens())
)
zoo("linear_attention_relu2", "sequence")(
    lambda: (linear_attention(lambda x: F.relu(x) ** 2), tokens())
)


# --- convolutions over time


class Causal(nn.Conv1d):
    """A convolution that looks back only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, ((self.kernel_size[0] - 1) * self.dilation[0], 0)))


@zoo("wavenet", "sequence")
def wavenet(dim: int = 8) -> tuple[Any, ...]:
    """Gated dilated convolutions with residual and skip sums."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x, total = net.first(x), 0
        for filters, residual, skip in zip(net.filters, net.residual, net.skip, strict=True):
            a, b = filters(x).chunk(2, 1)
            y = torch.tanh(a) * torch.sigmoid(b)
            total, x = total + skip(y), x + residual(y)
        return net.last(total)

    model = network(
        forward,
        first=Causal(1, dim, 2),
        filters=nn.ModuleList(Causal(dim, 2 * dim, 2, dilation=2**i) for i in range(3)),
        residual=nn.ModuleList(nn.Conv1d(dim, dim, 1) for _ in range(3)),
        skip=nn.ModuleList(nn.Conv1d(dim, 12, 1) for _ in range(3)),
        last=nn.Sequential(nn.ReLU(), nn.Conv1d(12, 12, 1), nn.ReLU(), nn.Conv1d(12, 9, 1)),
    )
    return model, torch.randn(2, 1, 16)


class TemporalBlock(nn.Module):
    """A weight-normed causal residual block."""

    def __init__(self, i: int, o: int, dilation: int) -> None:
        super().__init__()
        norm = parametrizations.weight_norm
        self.c1 = norm(Causal(i, o, 3, dilation=dilation))
        self.c2 = norm(Causal(o, o, 3, dilation=dilation))
        self.shortcut = nn.Conv1d(i, o, 1) if i != o else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.c2(F.relu(self.c1(x))))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


# every normalised row has a free direction; what such a layer reads has one scale
zoo("tcn_weight_norm", "sequence", units=6 + 6 + 8 + 8 + 3 + 8, fast=True)(
    lambda: (
        nn.Sequential(TemporalBlock(3, 6, 1), TemporalBlock(6, 8, 2), nn.AdaptiveAvgPool1d(1),
                      nn.Flatten(), nn.Linear(8, 2)),
        torch.randn(2, 3, 12),
    )
)  # fmt: skip


class Conformer(nn.Module):
    """Half-step feed-forward, attention, convolution module with GLU and batch norm."""

    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.front = nn.Conv1d(6, dim, 3, 2, 1)
        self.f1, self.f2 = (
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 24), nn.SiLU(), nn.Linear(24, dim))
            for _ in range(2)
        )
        self.na, self.attention = nn.LayerNorm(dim), nn.MultiheadAttention(dim, 2, batch_first=True)
        self.nc, self.pointwise = nn.LayerNorm(dim), nn.Conv1d(dim, 2 * dim, 1)
        self.depthwise, self.bn = nn.Conv1d(dim, dim, 3, padding=1, groups=dim), nn.BatchNorm1d(dim)
        self.out = nn.Conv1d(dim, dim, 1)
        self.last = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x).transpose(1, 2)
        x = x + 0.5 * self.f1(x)
        y = self.na(x)
        x = x + self.attention(y, y, y)[0]
        y = F.glu(self.pointwise(self.nc(x).transpose(1, 2)), 1)
        x = x + self.out(F.silu(self.bn(self.depthwise(y)))).transpose(1, 2)
        return self.head(self.last(x + 0.5 * self.f2(x))).log_softmax(-1)


zoo("conformer", "sequence")(lambda: (Conformer(), torch.randn(2, 6, 16)))


@zoo("state_space", "sequence")
def state_space(dim: int = 6, states: int = 4) -> tuple[Any, ...]:
    """A diagonal state space layer, unrolled in the time domain, with a learned step and a gate."""

    def forward(net: Any, x: Tensor) -> Tensor:
        u, gate = net.embed(x), F.silu(net.gate(x))
        decay = torch.exp(-torch.exp(net.log_a))
        state, steps = u.new_zeros(u.shape[0], *decay.shape), []
        for t in range(u.shape[1]):
            state = decay * state + net.b * u[:, t].unsqueeze(-1)
            steps.append((state * net.c).sum(-1) + net.d * u[:, t])
        return net.out(torch.stack(steps, 1) * gate)

    embed, gate = nn.Linear(3, dim), nn.Linear(3, dim)
    log_a, b, c = (nn.Parameter(torch.randn(dim, states)) for _ in range(3))
    d, out = nn.Parameter(torch.randn(dim)), nn.Linear(dim, 2)
    model = network(forward, embed=embed, gate=gate, log_a=log_a, b=b, c=c, d=d, out=out)
    return model, torch.randn(2, 5, 3)


@zoo("pad_and_pack", "sequence")
def pad_and_pack() -> tuple[Any, ...]:
    """Packs inside forward with lengths known beforehand."""

    def forward(net: Any, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.tensor([4, 2]), batch_first=True)
        out, _ = net.rnn(packed)
        return net.head(pad_packed_sequence(out, batch_first=True)[0])

    rnn, head = nn.RNN(3, 4, nonlinearity="relu", batch_first=True), nn.Linear(4, 2)
    return network(forward, rnn=rnn, head=head), torch.randn(2, 4, 3)
