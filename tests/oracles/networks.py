"""Recurrent modules, and three seeded families of random networks.

A random network is built from a small specification of plain integers in which every choice of
integers is valid: `RandomDag`, `RandomConv`, `random_rnn`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Case = tuple[nn.Module, tuple[Tensor, ...]]


class OpRNN(nn.Module):
    """`nn.RNN` with ReLU and a linear read-out of the last step or of all steps."""

    def __init__(
        self,
        inputs: int,
        hidden: int,
        outputs: int,
        last: bool = True,
        out_bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.rnn = nn.RNN(inputs, hidden, nonlinearity="relu", **options)
        self.head = nn.Linear(hidden * (2 if self.rnn.bidirectional else 1), outputs, bias=out_bias)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        if self.last:
            y = y[:, -1] if self.rnn.batch_first else y[-1]
        return self.head(y)


class LoopRNN(nn.Module):
    """The same recurrence as a Python loop; layer l has the weights `w_x[l]`, `w_h[l]`."""

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        outputs: int,
        last: bool = True,
        bias: bool = True,
        zeros: bool = True,
        first_only: bool = False,
        out_bias: bool = True,
    ) -> None:
        super().__init__()
        widths = [inputs, *hidden]
        self.w_x = nn.ModuleList(
            nn.Linear(a, b, bias=bias) for a, b in zip(widths, hidden, strict=False)
        )
        self.w_h = nn.ModuleList(nn.Linear(b, b, bias=bias) for b in hidden)
        self.head = nn.Linear(widths[-1], outputs, bias=out_bias)
        self.widths, self.last, self.zeros, self.first_only = hidden, last, zeros, first_only

    def forward(self, x: Tensor) -> Tensor:
        state: list[Tensor | None] = [
            torch.zeros(x.shape[0], n, dtype=x.dtype) if self.zeros else None for n in self.widths
        ]
        outputs = []
        for t in range(x.shape[1]):
            below: Tensor | None = x[:, t] if t == 0 or not self.first_only else None
            for i, (w_x, w_h) in enumerate(zip(self.w_x, self.w_h, strict=True)):
                terms = [
                    w(value) for w, value in ((w_x, below), (w_h, state[i])) if value is not None
                ]
                below = state[i] = F.relu(terms[0] + terms[1] if len(terms) == 2 else terms[0])
            outputs.append(self.head(below))
        return outputs[-1] if self.last else torch.stack(outputs, 1)


class RNNWithState(nn.Module):
    """`nn.RNN` whose initial state is a parameter or an input, or whose last state is an output."""

    def __init__(self, kind: Literal["parameter", "input", "output"]) -> None:
        super().__init__()
        self.kind = kind
        self.rnn = nn.RNN(2, 3, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(3, 2)
        if kind == "parameter":
            self.start = nn.Parameter(torch.randn(1, 1, 3))

    def forward(self, x: Tensor, state: Tensor | None = None) -> Any:
        if self.kind == "parameter":
            state = self.start.expand(1, x.shape[0], 3)
        y, last = self.rnn(x, state)
        return (self.head(y), last) if self.kind == "output" else self.head(y.mean(1))


class RandomDag(nn.Module):
    """A random network of linear layers, additions and concatenations, with products and
    shared matrices if asked.

    Each node reads values made before it. `(0, source, width, bias)` is a linear layer with ReLU;
    `(1, a, b, _)` adds two values of equal width; `(2, a, b, _)` concatenates two (adds, where the
    result were wider than 6); `(3, a, b, _)` multiplies two; `(4, source, b, transposed)` uses the
    matrix of an earlier layer again, if one fits (else it makes one that maps the value to its own
    width). Sources count modulo the values there are, so that any integers will do. What nobody
    reads goes into the read-out.
    """

    def __init__(
        self, inputs: int, outputs: int, nodes: Sequence[tuple[int, int, int, int]], seed: int = 0
    ) -> None:
        super().__init__()
        self.inputs, self.layers, self.plan = inputs, nn.ModuleList(), []
        widths, unread = [inputs], {0}
        sizes: list[tuple[int, int]] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for kind, a, b, flag in nodes:
                a %= len(widths)
                fitting = [i for i, size in enumerate(sizes) if size[flag % 2] == widths[a]]
                if kind == 4 and fitting:
                    b = fitting[b % len(fitting)]
                    self.plan.append((4 + flag % 2, a, b))
                    widths.append(sizes[b][1 - flag % 2])
                elif kind in (0, 4):
                    b = widths[a] if kind == 4 else b
                    self.plan.append((0, a, len(sizes)))
                    self.layers.append(nn.Linear(widths[a], b, bias=bool(flag)))
                    sizes.append((widths[a], b))
                    widths.append(b)
                else:
                    mates = [i for i, w in enumerate(widths) if kind == 2 and w + widths[a] <= 6]
                    kind = 1 if kind == 2 and not mates else kind
                    mates = mates or [i for i, w in enumerate(widths) if w == widths[a]]
                    b = mates[b % len(mates)]
                    self.plan.append((kind, a, b))
                    widths.append(widths[a] + (widths[b] if kind == 2 else 0))
                    unread.discard(b)
                unread.discard(a)
                unread.add(len(widths) - 1)
            self.read = sorted(unread)
            self.head = nn.Linear(sum(widths[i] for i in self.read), outputs)

    def example(self) -> tuple[Tensor, ...]:
        return (torch.linspace(-1, 1, 2 * self.inputs).reshape(2, self.inputs),)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for kind, a, b in self.plan:
            if kind in (0, 4):
                values.append(F.relu(self.layers[b](values[a])))
            elif kind == 5:
                matrix: Any = self.layers[b].weight
                values.append(F.relu(F.linear(values[a], matrix.t())))
            elif kind == 2:
                values.append(torch.cat([values[a], values[b]], -1))
            else:
                values.append(values[a] + values[b] if kind == 1 else values[a] * values[b])
        return self.head(torch.cat([values[i] for i in self.read], -1))


class RandomConv(nn.Module):
    """A random convolutional network on 4x4 images.

    Each layer is `(kind, channels, kernel, bias)`: 0 convolution, 1 depthwise convolution (twice
    the channels when `channels` is even), 2 residual block, 3 concatenating layer, 4 pooling (max
    if `bias`, else average).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        layers: Sequence[tuple[int, int, int, int]],
        flat: bool,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.inputs, self.kinds, self.flat, self.convs = inputs, [], flat, nn.ModuleList()
        c, size = inputs, 4
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for kind, channels, kernel, bias in layers:
                if kind == 4:
                    if size == 4:
                        self.kinds.append(5 if bias else 4)
                        size = 2
                    continue
                kernel = 3 if kernel == 3 else 1
                groups = c if kind == 1 else 1
                out = {0: channels, 1: c * (1 + (channels % 2 == 0)), 2: c, 3: channels}[kind]
                self.kinds.append(kind)
                self.convs.append(
                    nn.Conv2d(c, out, kernel, padding=kernel // 2, groups=groups, bias=bool(bias))
                )
                c = c + out if kind == 3 else out
            self.head = nn.Linear(c * size * size if flat else c, outputs)

    def example(self) -> tuple[Tensor, ...]:
        return (torch.linspace(-1, 1, 16 * self.inputs).reshape(1, self.inputs, 4, 4),)

    def forward(self, x: Tensor) -> Tensor:
        convs = iter(self.convs)
        for kind in self.kinds:
            if kind >= 4:
                x = F.max_pool2d(x, 2) if kind == 5 else F.avg_pool2d(x, 2)
                continue
            y = F.relu(next(convs)(x))
            x = x + y if kind == 2 else torch.cat([x, y], 1) if kind == 3 else y
        return self.head(x.flatten(1) if self.flat else x.mean((2, 3)))


def random_rnn(
    inputs: int,
    hidden: Sequence[int],
    outputs: int,
    steps: int,
    bias: bool,
    last: bool,
    form: str,
    seed: int = 0,
) -> Case:
    """A stacked recurrent network; `form` is `"op"` (all widths
    `hidden[0]`), `"zeros"` or `"none"`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module
        if form == "op":
            model = OpRNN(
                inputs,
                hidden[0],
                outputs,
                last,
                num_layers=len(hidden),
                bias=bias,
                batch_first=True,
            )
        else:
            model = LoopRNN(inputs, hidden, outputs, last, bias=bias, zeros=form == "zeros")
        return model, (torch.randn(1, steps, inputs),)
