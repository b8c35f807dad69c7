"""Steps of random networks without matrices: norms, reductions, activations, movements of data,
constants and writes; and the list of all steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from composed_steps import (
    EPS,
    MAPS,
    Setting,
    Step,
    attention,
    back,
    gain,
    last,
    merged,
    parted,
    recurrence,
)
from torch import Tensor, nn
from torch.nn import functional as F


def layer_norm(s: Setting) -> Step:
    norm = nn.LayerNorm(s.channels, elementwise_affine=s.draw.random() < 0.6)
    if s.draw.random() < 0.5:
        return Step(lambda self, x: back(self.norm(last(x, s.image)), s.image), norm=norm)
    return Step(
        lambda self, x: back(F.layer_norm(last(x, s.image), (s.channels,), eps=self.eps), s.image)
    )


def group_norm(s: Setting) -> Step:
    groups = s.groups(s.channels // 2)
    if s.draw.random() < 0.3:
        norm: nn.Module = (
            nn.InstanceNorm2d(s.channels) if s.image else nn.InstanceNorm1d(s.channels)
        )
    else:
        norm = nn.GroupNorm(groups, s.channels, affine=s.draw.random() < 0.6)
    if s.image:
        return Step(lambda self, x: self.norm(x), norm=norm)
    return Step(lambda self, x: self.norm(x.transpose(1, 2)).transpose(1, 2), norm=norm)


def batch_norm(s: Setting) -> Step:
    if s.draw.random() < 0.3:

        def by_data(self: Any, x: Tensor) -> Tensor:
            # (torch refuses 0 here)
            y = back(x, not s.image)
            y = F.batch_norm(y, None, None, training=True, eps=self.eps or 1e-300)
            return y if s.image else last(y, True)

        return Step(by_data)
    norm = nn.BatchNorm2d(s.channels) if s.image else nn.BatchNorm1d(s.channels)
    norm.running_mean, norm.running_var = torch.randn(s.channels), torch.rand(s.channels) + 0.5
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    if s.image:
        return Step(lambda self, x: self.norm(x), norm=norm)
    return Step(lambda self, x: self.norm(x.transpose(1, 2)).transpose(1, 2), norm=norm)


def rms_norm(s: Setting) -> Step:
    """The module, the function, and forms written by hand, over all channels or groups of them."""
    groups = s.draw.choice([1, s.groups(), s.groups()])
    form = s.draw.choice(["module", "function", "rsqrt", "pow", "norm", "normalize", "l1"])
    if form in ("module", "function"):
        norm = nn.RMSNorm(s.channels, eps=EPS)

        def run(self: Any, x: Tensor) -> Tensor:
            y = last(x, s.image)
            if form == "module":
                return back(self.norm(y), s.image)
            return back(F.rms_norm(y, (s.channels,), eps=self.eps), s.image)

        return Step(run, norm=norm)
    axis = 2 if s.image else -1

    def by_hand(self: Any, x: Tensor) -> Tensor:
        y = parted(x, groups, s.dim)
        if form == "rsqrt":
            y = y * torch.rsqrt((y * y).mean(axis, keepdim=True) + self.eps)
        elif form == "pow":
            y = y / (y.pow(2).mean(axis, keepdim=True) + self.eps).sqrt()
        elif form == "norm":
            y = y / (y.norm(dim=axis, keepdim=True) + self.eps)
        elif form == "l1":
            y = y / (y.abs().sum(axis, keepdim=True) + self.eps)
        else:
            y = F.normalize(y, dim=axis, eps=self.eps)
        return merged(y, s.dim) * self.gain

    return Step(by_hand, gain=s.vector())


NORMS: tuple[Callable[[Setting], Step], ...] = (
    layer_norm,
    group_norm,
    group_norm,
    batch_norm,
    rms_norm,
    rms_norm,
)


# reductions and movements of data


def grouped_reduction(s: Setting) -> Step:
    """A number per group, which comes back to all channels of the group."""
    groups, axis = s.groups(), 2 if s.image else -1
    reduce = s.draw.choice(
        [
            lambda y: y.mean(axis, keepdim=True),
            lambda y: y.amax(axis, keepdim=True),
            lambda y: y.norm(dim=axis, keepdim=True),
            lambda y: y.sum(axis, keepdim=True),
            lambda y: y.square().mean(axis, keepdim=True).sqrt(),
            lambda y: y.abs().amax(axis, keepdim=True),
        ]
    )
    join = s.draw.choice(
        [
            lambda y, r: y + r,
            lambda y, r: y - r,
            lambda y, r: torch.maximum(y, r),
            lambda y, r: y * r,
            lambda y, r: y * r.sigmoid(),
            lambda y, r: r.expand_as(y),
            lambda y, r: torch.where(y > 0, y, r),
        ]
    )

    def run(self: Any, x: Tensor) -> Tensor:
        y = parted(x, groups, s.dim)
        return merged(join(y, reduce(y)), s.dim)

    return Step(run)


def pool(s: Setting) -> Step:
    form = s.draw.choice(["max", "average", "mean", "gate"])

    def run(self: Any, x: Tensor) -> Tensor:
        dims = (2, 3) if s.image else (1,)
        if form == "mean":
            return x - x.mean(dims, keepdim=True)
        if form == "gate":
            return x * x.mean(dims, keepdim=True).sigmoid()
        y = x if s.image else x.transpose(1, 2)
        function: Any = (F.max_pool2d, F.avg_pool2d) if s.image else (F.max_pool1d, F.avg_pool1d)
        y = function[form == "average"](y, 3, stride=1, padding=1)
        return y if s.image else y.transpose(1, 2)

    return Step(run)


def activate(s: Setting) -> Step:
    if s.draw.random() < 0.15:
        act = nn.PReLU(s.draw.choice([1, s.channels]))
        if s.image:
            return Step(lambda self, x: self.act(x), act=act)
        return Step(lambda self, x: self.act(x.transpose(1, 2)).transpose(1, 2), act=act)
    function = s.pointwise()
    return Step(lambda self, x: function(x))


def move(s: Setting) -> Step:
    """Shuffles, flips, shifts and pieces put together again."""
    groups, k, dim = s.groups(), s.draw.randint(1, s.channels - 1), s.dim
    form = s.draw.choice(
        [
            lambda self, x: merged(
                parted(x, groups, dim).transpose(*((1, 2) if s.image else (-2, -1))), dim
            ),
            lambda self, x: x.flip(dim),
            lambda self, x: x.roll(k, dim),
            lambda self, x: torch.cat(x.split([k, s.channels - k], dim)[::-1], dim),
            lambda self, x: x.roll(1, 2 if s.image else 1),
            lambda self, x: torch.stack(x.unbind(dim), dim),
            lambda self, x: x.narrow(dim, 0, 1) + x,
            lambda self, x: x + x.flip(dim),
            lambda self, x: torch.cat(
                [x.narrow(dim, 0, k), x.narrow(dim, k, s.channels - k).relu()], dim
            ),
            lambda self, x: x.index_select(dim, self.order),
        ]
    )
    return Step(form, order=torch.randperm(s.channels))


def halves(s: Setting) -> Step:
    """Two parts of the channels act on each other."""
    dim, half = s.dim, s.channels // 2
    form = s.draw.choice(
        [
            lambda a, b: (a, b * a.sigmoid()),
            lambda a, b: (a, a + b),
            lambda a, b: (a * b, b),
            lambda a, b: (torch.maximum(a, b), a),
            lambda a, b: (a - b, a + b),
            lambda a, b: (a, F.relu(b)),
            lambda a, b: (b / (1 + a.abs()), a),
        ]
    )

    def run(self: Any, x: Tensor) -> Tensor:
        a, b, rest = x.split([half, half, s.channels - 2 * half], dim)
        return torch.cat([*form(a, b), rest], dim)

    return Step(run)


def constants(s: Setting) -> Step:
    """Constants added and multiplied, masks and margins."""
    image = s.image
    mask = (torch.rand(s.channels) < 0.6).double()
    mask = mask[:, None, None] if image else mask
    form = s.draw.choice(
        [
            lambda self, x: x + 0.5,
            lambda self, x: x + self.table,
            lambda self, x: x * 1.5,
            lambda self, x: x * self.table,
            lambda self, x: x * self.mask,
            lambda self, x: x.masked_fill(self.mask == 0, 0.0),
            lambda self, x: x.masked_fill(self.mask == 0, 0.3),
            lambda self, x: torch.where(self.mask == 0, x, torch.relu(x)),
            lambda self, x: F.pad(x, (0, 0, 1, 0))[..., :-1, :],
            lambda self, x: F.pad(x, (0, 0, 1, 0), value=0.7)[..., :-1, :],
            lambda self, x: x.clamp(min=0.0),
            lambda self, x: x.clamp(-2.0, 2.0),
        ]
    )
    return Step(form, mask=mask, table=torch.randn(mask.shape))


def write(s: Setting) -> Step:
    """Writes into a copy of the stream."""
    dim, k = s.dim, s.draw.randint(1, s.channels // 2)
    form = s.draw.choice(
        [
            lambda a, b: a.mul_(2.0),
            lambda a, b: a.add_(b),
            lambda a, b: a.copy_(b),
            lambda a, b: a.relu_(),
            lambda a, b: a.zero_(),
            lambda a, b: a.mul_(b),
            lambda a, b: a.fill_(0.4),
            lambda a, b: a.copy_(b.tanh()),
        ]
    )

    def run(self: Any, x: Tensor) -> Tensor:
        y = x.clone()
        form(y.narrow(dim, 0, k), x.narrow(dim, s.channels - k, k))
        return y

    return Step(run)


MOVES = (move, halves, write, constants, pool)
STEPS: tuple[Callable[[Setting], Step], ...] = (
    *MAPS,
    *MAPS,
    gain,
    gain,
    recurrence,
    attention,
    attention,
    *NORMS,
    *NORMS,
    grouped_reduction,
    grouped_reduction,
    grouped_reduction,
    activate,
    activate,
    *MOVES,
)
