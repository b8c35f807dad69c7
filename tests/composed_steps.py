"""Steps of random networks: each maps a stream to a stream of the same shape, with weights of its
own. Channels are dimension 1 of images and the last dimension of sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPS = 1e-5
WIDEST = 12


class Step(nn.Module):
    """A function of a stream and of its own parts.

    Attributes:
        eps: what the norms written out by hand add, if they add anything.
    """

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.function, self.eps = function, EPS
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Setting:
    """What the steps of one network have in common, and what they draw from.

    Attributes:
        channels: of the stream.
        image: images, or else sequences.
        dim: the dimension of the channels.
        usual: the usual number of groups; steps that group the same channels meet more often.
        smooth: how often activations are not homogeneous.
        shared: draws that are the same for all steps of a network.
    """

    def __init__(self, channels: int, image: bool, style: int, draw: Random) -> None:
        self.channels, self.image, self.draw = channels, image, draw
        self.dim = 1 if image else -1
        shared = Random(style)
        # (a norm of single numbers is a sign, behind which nothing has an effect)
        fit = [g for g in range(2, channels // 2 + 1) if channels % g == 0]
        self.usual = shared.choice(fit or [1])
        self.smooth = shared.choice([0.0, 0.1, 0.4])
        self.shared = shared

    def mixer(self, inputs: int, outputs: int, bias: bool | None = None) -> nn.Module:
        """A map of all channels at each position."""
        bias = self.draw.random() < 0.6 if bias is None else bias
        return (
            nn.Conv2d(inputs, outputs, 1, bias=bias)
            if self.image
            else nn.Linear(inputs, outputs, bias=bias)
        )

    def vector(self, spread: float = 1.0) -> nn.Parameter:
        """A parameter of one number per channel, which broadcasts to the stream."""
        shape = (self.channels, 1, 1) if self.image else (self.channels,)
        return nn.Parameter(1 + spread * torch.randn(shape))

    def groups(self, most: int = WIDEST) -> int:
        """A number that divides the channels, rarely 1."""
        if self.usual <= most and self.draw.random() < 0.7:
            return self.usual
        return self.draw.choice(
            [g for g in range(1, min(self.channels, most) + 1) if self.channels % g == 0]
        )

    def pointwise(self) -> Callable[[Tensor], Tensor]:
        return self.draw.choice(SMOOTH if self.draw.random() < self.smooth else HOMOGENEOUS)


def leaky(x: Tensor) -> Tensor:
    return F.leaky_relu(x, 0.2)


HOMOGENEOUS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.relu,
    torch.relu,
    leaky,
    torch.abs,
    torch.neg,
    torch.square,
)
SMOOTH: tuple[Callable[[Tensor], Tensor], ...] = (F.silu, F.gelu, torch.tanh, torch.sigmoid)


def parted(x: Tensor, groups: int, dim: int) -> Tensor:
    """A stream with a dimension of groups before that of the channels of each."""
    return x.unflatten(dim, (groups, x.shape[dim] // groups))


def merged(x: Tensor, dim: int) -> Tensor:
    return x.flatten(1, 2) if dim == 1 else x.flatten(-2)


def last(x: Tensor, image: bool) -> Tensor:
    return x.movedim(1, -1) if image else x


def back(x: Tensor, image: bool) -> Tensor:
    return x.movedim(-1, 1) if image else x


# maps with weights


def mix(s: Setting) -> Step:
    return Step(lambda self, x: self.map(x), map=s.mixer(s.channels, s.channels))


def convolve(s: Setting) -> Step:
    groups = s.draw.choice([1, s.groups(), s.channels])
    bias = s.draw.random() < 0.5
    if s.image:
        part: nn.Module = nn.Conv2d(s.channels, s.channels, 3, padding=1, groups=groups, bias=bias)
        return Step(lambda self, x: self.map(x), map=part)
    part = nn.Conv1d(s.channels, s.channels, 3, padding=1, groups=groups, bias=bias)
    return Step(lambda self, x: self.map(x.transpose(1, 2)).transpose(1, 2), map=part)


def perceptron(s: Setting) -> Step:
    hidden, act = s.draw.randint(2, 6), s.pointwise()
    return Step(
        lambda self, x: self.down(act(self.up(x))),
        up=s.mixer(s.channels, hidden),
        down=s.mixer(hidden, s.channels),
    )


def weight_norm(s: Setting) -> Step:
    map = nn.utils.parametrizations.weight_norm(s.mixer(s.channels, s.channels))
    return Step(lambda self, x: self.map(x), map=map)


def computed_weight(s: Setting) -> Step:
    """A matrix computed from parameters."""
    c = s.channels
    made = s.draw.choice(
        [
            lambda self: self.a @ self.b,
            lambda self: self.a * self.gain,
            lambda self: self.a / self.a.norm(dim=1, keepdim=True),
            lambda self: F.normalize(self.a, dim=0) * self.gain,
            lambda self: self.a + self.a.t(),
            lambda self: torch.cat([self.a[:1], self.b[1:]]),
            lambda self: F.softplus(self.a),
            lambda self: self.a * self.mask,
            lambda self: self.a - self.a.mean(1, keepdim=True),
            lambda self: self.a.abs(),
        ]
    )
    return Step(
        lambda self, x: back(F.linear(last(x, s.image), made(self)), s.image),
        a=nn.Parameter(torch.randn(c, c) / c**0.5),
        b=nn.Parameter(torch.randn(c, c) / c**0.5),
        gain=nn.Parameter(1 + torch.randn(c, 1)),
        mask=(torch.rand(c, c) < 0.6).double(),
    )


def tied(s: Setting) -> Step:
    """One module twice, or its transpose."""
    act = s.pointwise()
    if s.draw.random() < 0.5:
        return Step(lambda self, x: self.map(act(self.map(x))), map=s.mixer(s.channels, s.channels))
    return Step(
        lambda self, x: back(
            F.linear(act(F.linear(last(x, s.image), self.map)), self.map.t()), s.image
        ),
        map=nn.Parameter(torch.randn(s.draw.randint(2, 6), s.channels) / 2),
    )


def gain(s: Setting) -> Step:
    """A number per channel, multiplied or added."""
    form = s.draw.choice(
        [
            lambda self, x: x * self.gain,
            lambda self, x: x + self.gain,
            lambda self, x: x * self.gain.abs(),
            lambda self, x: x * self.gain.sigmoid(),
            lambda self, x: x / self.gain,
            lambda self, x: x * self.gain + self.shift,
            lambda self, x: x * (1 + self.gain),
            lambda self, x: torch.maximum(x, self.gain),
        ]
    )
    return Step(form, gain=s.vector(), shift=s.vector())


def recurrence(s: Setting) -> Step:
    """Along the positions of a sequence, or the rows of an image."""
    c, kind = s.channels, s.draw.choice(["relu", "gru", "loop"])

    def ordered(x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)[:, :5] if s.image else x

    def spread(x: Tensor, like: Tensor) -> Tensor:
        return like * x.mean(1)[..., None, None] if s.image else x

    if kind == "loop":

        def loop(self: Any, x: Tensor) -> Tensor:
            entries, state, states = ordered(x), None, []
            for entry in entries.unbind(1):
                new = self.read(entry)
                state = new if state is None else torch.relu(new + self.keep(state))
                states.append(state)
            return spread(torch.stack(states, 1), x)

        return Step(loop, read=nn.Linear(c, c), keep=nn.Linear(c, c, bias=False))
    cell: nn.Module = (
        nn.RNN(c, c, nonlinearity="relu", batch_first=True)
        if kind == "relu"
        else nn.GRU(c, c, batch_first=True)
    )
    return Step(lambda self, x: spread(self.cell(ordered(x))[0], x), cell=cell)


def attention(s: Setting) -> Step:
    """Attention of the positions, with heads and perhaps fewer heads of keys."""
    heads = s.draw.choice([h for h in (1, 2, 4) if s.channels % h == 0])
    wide = s.channels // heads
    shared = s.draw.choice([h for h in (1, 2, 4) if heads % h == 0])
    fused, normed, causal = s.draw.random() < 0.5, s.draw.random() < 0.3, s.draw.random() < 0.3

    def attend(self: Any, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2) if s.image else x
        q = self.q(tokens).unflatten(-1, (heads, wide)).transpose(1, 2)
        k, v = (
            part.unflatten(-1, (shared, wide))
            .transpose(1, 2)
            .repeat_interleave(heads // shared, dim=1)
            for part in self.kv(tokens).chunk(2, -1)
        )
        if normed:
            q, k = (
                y * (y.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.gain
                for y in (q, k)
            )
        if fused:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        else:
            scores = q @ k.transpose(-2, -1) / wide**0.5
            if causal:
                some = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
                scores = scores.masked_fill(~some, float("-inf"))
            out = scores.softmax(-1) @ v
        out = self.out(out.transpose(1, 2).flatten(2))
        return out.transpose(1, 2).unflatten(2, x.shape[2:]) if s.image else out

    return Step(
        attend,
        q=nn.Linear(s.channels, s.channels, bias=s.draw.random() < 0.5),
        kv=nn.Linear(s.channels, 2 * shared * wide, bias=s.draw.random() < 0.5),
        out=nn.Linear(s.channels, s.channels),
        gain=nn.Parameter(1 + torch.randn(wide)),
    )


MAPS = (mix, mix, convolve, convolve, perceptron, weight_norm, computed_weight, tied)
