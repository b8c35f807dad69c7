"""Convolutional classifiers: compact replicas with the parameter shapes of the originals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from cases import network
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import zoo

Act = Callable[[], nn.Module]


def image(batch: int = 2, size: int = 64, channels: int = 3) -> Tensor:
    """A random batch of images."""
    return torch.randn(batch, channels, size, size)


def conv_bn(
    i: int,
    o: int,
    k: int = 1,
    s: int = 1,
    groups: int = 1,
    act: Act | None = nn.ReLU,
    norm: Any = nn.BatchNorm2d,
) -> nn.Sequential:
    """Convolution, normalisation and activation."""
    layers: list[nn.Module] = [nn.Conv2d(i, o, k, s, k // 2, groups=groups, bias=False), norm(o)]
    return nn.Sequential(*layers, *([act()] if act else []))


class Residual(nn.Module):
    """`act(shortcut(x) + body(x))`."""

    def __init__(
        self, body: nn.Module, shortcut: nn.Module | None = None, act: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.body, self.shortcut, self.act = body, shortcut or nn.Identity(), act or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.shortcut(x) + self.body(x))


class SqueezeExcite(nn.Module):
    """Channels weighted by a gate computed from their means."""

    def __init__(
        self, channels: int, inner: int, act: Act = nn.ReLU, gate: Act = nn.Sigmoid
    ) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)
        self.act, self.gate = act(), gate()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.up(self.act(self.down(F.adaptive_avg_pool2d(x, 1)))))


class StochasticDepth(nn.Module):
    """Drop a residual branch for some samples of the batch."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        keep = torch.empty([x.shape[0]] + [1] * (x.ndim - 1), dtype=x.dtype).bernoulli_(1 - self.p)
        return x * keep.div_(1 - self.p)


def head(channels: int, classes: int = 1000) -> list[nn.Module]:
    """Global pooling and a linear classifier."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


# --- plain stacks


VGG11 = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)


def vgg(widths: Sequence[int], norms: bool = False) -> nn.Sequential:
    """VGG with these channels of its convolutions, where 0 is a pooling."""
    layers: list[nn.Module] = []
    i = 3
    for o in widths:
        if not o:
            layers.append(nn.MaxPool2d(2))
            continue
        norm = [nn.BatchNorm2d(o)] if norms else []
        layers += [nn.Conv2d(i, o, 3, padding=1), *norm, nn.ReLU(True)]
        i = o
    wide = [
        layer
        for inputs in (512 * 49, 4096)
        for layer in (nn.Linear(inputs, 4096), nn.ReLU(True), nn.Dropout())
    ]
    tail = [nn.AdaptiveAvgPool2d(7), nn.Flatten(), *wide, nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, *tail)


zoo("vgg11", "vision", weights=132_863_336, units=10_944, modes=("train",))(
    lambda: (vgg(VGG11), image(1, 224))
)


# inputs, outputs, kernel, stride, padding, whether a pooling follows
ALEXNET = [(3, 64, 11, 4, 2, True), (64, 192, 5, 1, 2, True), (192, 384, 3, 1, 1, False)]
ALEXNET += [(384, 256, 3, 1, 1, False), (256, 256, 3, 1, 1, True)]


@zoo("alexnet", "vision", weights=61_100_840, modes=("eval",),
     units=sum(row[1] for row in ALEXNET) + 2 * 4096)  # fmt: skip
def alexnet() -> tuple[Any, ...]:
    layers: list[nn.Module] = []
    for i, o, k, s, padding, pools in ALEXNET:
        layers += [nn.Conv2d(i, o, k, s, padding), nn.ReLU(True)]
        layers += [nn.MaxPool2d(3, 2)] if pools else []
    layers += [nn.AdaptiveAvgPool2d(6), nn.Flatten()]
    for i in (9216, 4096):
        layers += [nn.Dropout(), nn.Linear(i, 4096), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.Linear(4096, 1000)), image(1, 224)


class Fire(nn.Module):
    """SqueezeNet's squeeze and two expansions, concatenated."""

    def __init__(self, i: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(i, squeeze, 1)
        self.one = nn.Conv2d(squeeze, expand, 1)
        self.three = nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.one(x)), F.relu(self.three(x))], 1)


FIRES = [(64, 16, 64), (128, 16, 64), 0, (128, 32, 128), (256, 32, 128), 0]
FIRES += [(256, 48, 192), (384, 48, 192), (384, 64, 256), (512, 64, 256)]


@zoo("squeezenet1_1", "vision", weights=1_235_496, fast=True,
     units=64 + sum(f[1] + 2 * f[2] for f in FIRES if f))  # fmt: skip
def squeezenet() -> tuple[Any, ...]:
    pool = partial(nn.MaxPool2d, 3, 2, ceil_mode=True)
    body = [Fire(*fire) if fire else pool() for fire in FIRES]
    last = [nn.Dropout(), nn.Conv2d(512, 1000, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(nn.Conv2d(3, 64, 3, 2), nn.ReLU(), pool(), *body, *last), image()


# --- residual networks


def resnet(
    block: str, depths: Sequence[int], width: int = 64, groups: int = 1, classes: int = 1000
) -> nn.Sequential:
    """ResNet, ResNeXt and Wide ResNet of torchvision."""
    layers = [conv_bn(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, depth in enumerate(depths):
        planes = 64 * 2**stage
        for i in range(depth):
            s = 2 if stage and not i else 1
            if block == "basic":
                out = planes
                body = nn.Sequential(conv_bn(channels, out, 3, s), conv_bn(out, out, 3, act=None))
            else:
                inner, out = planes * width // 64 * groups, 4 * planes
                body = nn.Sequential(
                    conv_bn(channels, inner),
                    conv_bn(inner, inner, 3, s, groups),
                    conv_bn(inner, out, act=None),
                )
            shortcut = conv_bn(channels, out, 1, s, act=None) if s > 1 or channels != out else None
            layers.append(Residual(body, shortcut, nn.ReLU()))
            channels = out
    return nn.Sequential(*layers, *head(channels, classes))


RESNETS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "resnet18": (("basic", (2, 2, 2, 2)), {"weights": 11_689_512, "units": 7_680, "fast": True}),
    "resnet34": (("basic", (3, 4, 6, 3)), {"weights": 21_797_672}),
    "resnet50": (("bottleneck", (3, 4, 6, 3)), {"weights": 25_557_032}),
    "resnet152": (("bottleneck", (3, 8, 36, 3)), {"weights": 60_192_808, "modes": ("train",)}),
    "wide_resnet50_2": (
        ("bottleneck", (3, 4, 6, 3), 128),
        {"weights": 68_883_240, "modes": ("train",)},
    ),
    "resnext50_32x4d": (("bottleneck", (3, 4, 6, 3), 4, 32), {"weights": 25_028_904}),
}
for name, (sizes, facts) in RESNETS.items():
    zoo(name, "vision", **facts)(lambda sizes=sizes: (resnet(*sizes), image()))  # type: ignore[misc]


class StandardizedConv(nn.Conv2d):
    """A convolution with a standardised kernel: by hand, by `batch_norm`, with a gain."""

    def __init__(self, *args: Any, how: str = "hand", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.how, ones = how, torch.ones(self.out_channels, 1, 1, 1)
        self.gain = nn.Parameter(ones) if how == "gain" else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.how == "hand":
            mean = weight.mean((1, 2, 3), keepdim=True)
            std = weight.var((1, 2, 3), keepdim=True, unbiased=False)
            weight = (weight - mean) / torch.sqrt(std + 1e-10)
        else:
            scale = None if self.gain is None else (self.gain * weight[0].numel() ** -0.5).view(-1)
            flat = weight.reshape(1, self.out_channels, -1)
            options = {"training": True, "momentum": 0.0, "eps": 1e-10}
            weight = F.batch_norm(flat, None, None, weight=scale, **options)
            weight = weight.reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


GainConv = partial(StandardizedConv, how="gain")


class PreActivation(nn.Module):
    """Residual block of ResNet-V2 / BiT: group norm, ReLU, standardised convolutions."""

    def __init__(self, i: int, o: int, s: int, conv: Any) -> None:
        super().__init__()
        inner = o // 4
        self.n1 = nn.GroupNorm(8, i)
        self.n2 = nn.GroupNorm(8, inner)
        self.n3 = nn.GroupNorm(8, inner)
        self.c1, self.c2 = conv(i, inner, 1, bias=False), conv(inner, inner, 3, s, 1, bias=False)
        self.c3 = conv(inner, o, 1, bias=False)
        self.shortcut = conv(i, o, 1, s, bias=False) if i != o or s > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.n1(x))
        shortcut = self.shortcut(y) if self.shortcut is not None else x
        y = self.c1(y)
        return shortcut + self.c3(F.relu(self.n3(self.c2(F.relu(self.n2(y))))))


def bit(conv: Any, widths: Sequence[int] = (256, 512, 1024), depth: int = 2) -> nn.Sequential:
    layers: list[nn.Module] = [conv(3, 64, 7, 2, 3, bias=False), nn.MaxPool2d(3, 2, 1)]
    i = 64
    for stage, o in enumerate(widths):
        for n in range(depth):
            layers.append(PreActivation(i, o, 2 if stage and not n else 1, conv))
            i = o
    return nn.Sequential(*layers, nn.GroupNorm(8, i), nn.ReLU(), *head(i))


zoo("resnetv2_bit", "vision")(lambda: (bit(StandardizedConv), image()))
zoo("resnetv2_bit_batchnorm_weight", "vision")(
    lambda: (bit(partial(StandardizedConv, how="batch_norm")), image())
)


class NormFreeBlock(nn.Module):
    """NFNet: scaled activations, standardised convolutions, squeeze-excite, a skip gain."""

    def __init__(self, i: int, o: int, s: int, act: Act) -> None:
        super().__init__()
        inner = o // 2
        self.act, self.alpha, self.beta = act(), 0.2, 1.0
        self.c1 = GainConv(i, inner, 1)
        self.c2 = GainConv(inner, inner, 3, s, 1, groups=inner // 32)
        self.c3, self.se = GainConv(inner, o, 1), SqueezeExcite(o, o // 4)
        self.shortcut = GainConv(i, o, 1) if i != o else None
        self.pool = nn.AvgPool2d(2) if s > 1 else nn.Identity()
        self.skip_gain = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(x) * 1.7 * self.beta
        shortcut = self.shortcut(self.pool(y)) if self.shortcut is not None else x
        y = self.c3(self.act(self.c2(self.act(self.c1(y)) * 1.7)) * 1.7)
        return 2 * self.se(y) * self.skip_gain * self.alpha + shortcut


def nfnet(act: Act) -> nn.Sequential:
    stem = [GainConv(3, 16, 3, 2, 1), act(), GainConv(16, 64, 3, 2, 1)]
    sizes = (64, 128, 1), (128, 128, 1), (128, 256, 2)
    blocks = [NormFreeBlock(*size, act) for size in sizes]
    return nn.Sequential(*stem, *blocks, GainConv(256, 512, 1), act(), *head(512))


zoo("nfnet_relu", "vision", fast=True)(lambda: (nfnet(nn.ReLU), image()))
zoo("nfnet_gelu", "vision")(lambda: (nfnet(nn.GELU), image()))


# --- regularly designed and searched networks


def regnet(widths: Sequence[int], depths: Sequence[int], group: int, se: bool) -> nn.Sequential:
    layers: list[nn.Module] = [conv_bn(3, 32, 3, 2)]
    i = 32
    for o, depth in zip(widths, depths, strict=True):
        for n in range(depth):
            s = 1 if n else 2
            excite = [SqueezeExcite(o, round(0.25 * i))] if se else []
            body = nn.Sequential(
                conv_bn(i, o), conv_bn(o, o, 3, s, o // group), *excite, conv_bn(o, o, act=None)
            )
            shortcut = conv_bn(i, o, 1, s, act=None) if i != o or s > 1 else None
            layers.append(Residual(body, shortcut, nn.ReLU()))
            i = o
    return nn.Sequential(*layers, *head(i))


zoo("regnet_y_400mf", "vision", weights=4_344_144)(
    lambda: (regnet((48, 104, 208, 440), (1, 3, 6, 6), 8, True), image())
)
zoo("regnet_x_400mf", "vision", weights=5_495_976)(
    lambda: (regnet((32, 64, 160, 400), (1, 2, 7, 12), 16, False), image())
)


def inverted(
    i: int,
    inner: int,
    o: int,
    k: int,
    s: int,
    act: Act,
    excite: nn.Module | None = None,
    drop: float = 0.0,
) -> nn.Module:
    """Inverted residual: expand, depthwise, squeeze-excite, project without activation."""
    expand = [conv_bn(i, inner, act=act)] if inner != i else []
    middle = [conv_bn(inner, inner, k, s, inner, act), *([excite] if excite else [])]
    body = nn.Sequential(*expand, *middle, conv_bn(inner, o, act=None))
    if s > 1 or i != o:
        return body
    return Residual(nn.Sequential(*body, StochasticDepth(drop)) if drop else body)


def stages(
    i: int, rows: Sequence[tuple[int, ...]], act: Act, excited: bool = False, step: float = 0.0
) -> list[nn.Module]:
    """Inverted residuals by their expansion, channels, number, first stride and kernel; each drops
    out more often by a step than the one before.
    """
    layers: list[nn.Module] = []
    for t, c, n, s, k in rows:
        for repeat in range(n):
            excite = SqueezeExcite(i * t, max(1, i // 4), act) if excited else None
            drop = step * len(layers)
            layers.append(inverted(i, i * t, c, k, 1 if repeat else s, act, excite, drop))
            i = c
    return layers


V2 = [(1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 32, 3, 2, 3), (6, 64, 4, 2, 3), (6, 96, 3, 1, 3)]
V2 += [(6, 160, 3, 2, 3), (6, 320, 1, 1, 3)]
B0 = [(1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5)]
B0 += [(6, 192, 4, 2, 5), (6, 320, 1, 1, 3)]
MNAS = [(3, 24, 3, 2, 3), (3, 40, 3, 2, 5), (6, 80, 3, 2, 5), (6, 96, 2, 1, 3), (6, 192, 4, 2, 5)]
MNAS += [(6, 320, 1, 1, 3)]


@zoo("mobilenet_v2", "vision", weights=3_504_872, fast=True)
def mobilenet_v2() -> tuple[Any, ...]:
    layers = [conv_bn(3, 32, 3, 2, act=nn.ReLU6), *stages(32, V2, nn.ReLU6)]
    return nn.Sequential(*layers, conv_bn(320, 1280, act=nn.ReLU6), *head(1280)), image()


@zoo("efficientnet_b0", "vision", weights=5_288_548)
def efficientnet_b0() -> tuple[Any, ...]:
    layers = [conv_bn(3, 32, 3, 2, act=nn.SiLU), *stages(32, B0, nn.SiLU, True, 0.0125)]
    return nn.Sequential(*layers, conv_bn(320, 1280, act=nn.SiLU), *head(1280)), image()


@zoo("mnasnet1_0", "vision", weights=4_383_312)
def mnasnet() -> tuple[Any, ...]:
    layers = [conv_bn(3, 32, 3, 2), conv_bn(32, 32, 3, 1, 32), conv_bn(32, 16, act=None)]
    layers += stages(16, MNAS, nn.ReLU)
    return nn.Sequential(*layers, conv_bn(320, 1280), *head(1280)), image()


V3_LARGE = [
    (3, 16, 16, False, "R", 1), (3, 64, 24, False, "R", 2), (3, 72, 24, False, "R", 1),
    (5, 72, 40, True, "R", 2),
    (5, 120, 40, True, "R", 1), (5, 120, 40, True, "R", 1), (3, 240, 80, False, "H", 2),
    (3, 200, 80, False, "H", 1),
    (3, 184, 80, False, "H", 1), (3, 184, 80, False, "H", 1), (3, 480, 112, True, "H", 1),
    (3, 672, 112, True, "H", 1), (5, 672, 160, True, "H", 2), (5, 960, 160, True, "H", 1),
    (5, 960, 160, True, "H", 1),
]  # fmt: skip


@zoo("mobilenet_v3_large", "vision", weights=5_483_032)
def mobilenet_v3() -> tuple[Any, ...]:
    norm = partial(nn.BatchNorm2d, eps=0.001)
    layers, i = [conv_bn(3, 16, 3, 2, act=nn.Hardswish, norm=norm)], 16
    for k, inner, o, se, act, s in V3_LARGE:
        squeeze = max(8, int(inner / 4 + 4) // 8 * 8)
        squeeze += 8 if squeeze < 0.9 * inner / 4 else 0
        excite = SqueezeExcite(inner, squeeze, gate=nn.Hardsigmoid) if se else None
        layers.append(inverted(i, inner, o, k, s, nn.ReLU if act == "R" else nn.Hardswish, excite))
        i = o
    # (in this order, on which random weights depend)
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(960, 1280), nn.Hardswish()]
    layers += [conv_bn(i, 960, act=nn.Hardswish), *tail, nn.Dropout(0.2), nn.Linear(1280, 1000)]
    return nn.Sequential(*layers), image()


class Shuffle(nn.Module):
    """ShuffleNet-V2's unit: split or duplicate, two branches, concatenate, shuffle channels."""

    def __init__(self, i: int, o: int, s: int) -> None:
        super().__init__()
        half = o // 2
        first = i if s > 1 else half
        self.s = s
        self.left = nn.Sequential(conv_bn(i, i, 3, s, i, None), conv_bn(i, half)) if s > 1 else None
        self.right = nn.Sequential(
            conv_bn(first, half), conv_bn(half, half, 3, s, half, None), conv_bn(half, half)
        )

    def forward(self, x: Tensor) -> Tensor:
        left, right = (self.left(x), x) if self.left is not None else x.chunk(2, dim=1)
        x = torch.cat((left, self.right(right)), 1)
        b, c, h, w = x.shape
        return x.view(b, 2, c // 2, h, w).transpose(1, 2).contiguous().view(b, -1, h, w)


@zoo("shufflenet_v2_x1_0", "vision", weights=2_278_604, fast=True)
def shufflenet_v2() -> tuple[Any, ...]:
    layers, i = [conv_bn(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)], 24
    for o, n in (116, 4), (232, 8), (464, 4):
        layers += [Shuffle(i if not k else o, o, 1 if k else 2) for k in range(n)]
        i = o
    return nn.Sequential(*layers, conv_bn(i, 1024), *head(1024)), image()


# --- concatenating networks


class DenseLayer(nn.Module):
    """Norm, ReLU, 1x1, norm, ReLU, 3x3, appended to what came before."""

    def __init__(self, i: int, growth: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(i), nn.BatchNorm2d(4 * growth)
        self.conv1 = nn.Conv2d(i, 4 * growth, 1, bias=False)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        return torch.cat([x, y], 1)


@zoo("densenet121", "vision", weights=7_978_856)
def densenet() -> tuple[Any, ...]:
    layers: list[nn.Module] = [conv_bn(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    i = 64
    for stage, depth in enumerate((6, 12, 24, 16)):
        for _ in range(depth):
            layers.append(DenseLayer(i))
            i += 32
        if stage < 3:
            transition = nn.Conv2d(i, i // 2, 1, bias=False)
            layers += [nn.BatchNorm2d(i), nn.ReLU(), transition, nn.AvgPool2d(2)]
            i //= 2
    return nn.Sequential(*layers, nn.BatchNorm2d(i), nn.ReLU(), *head(i)), image()


class Branches(nn.Module):
    """Branches side by side, concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def inception(i: int, a: int, b: int, c: int, d: int, e: int, f: int) -> Branches:
    two, three = [conv_bn(i, b), conv_bn(b, c, 3)], [conv_bn(i, d), conv_bn(d, e, 3)]
    four = [nn.MaxPool2d(3, 1, 1, ceil_mode=True)]
    first = conv_bn(i, a)
    four.append(conv_bn(i, f))
    return Branches(first, *(nn.Sequential(*branch) for branch in (two, three, four)))


# what the branches of an inception block read and write, by the poolings between the blocks
INCEPTIONS = [
    [(192, 64, 96, 128, 16, 32, 32), (256, 128, 128, 192, 32, 96, 64)],
    [
        (480, 192, 96, 208, 16, 48, 64),
        (512, 160, 112, 224, 24, 64, 64),
        (512, 128, 128, 256, 24, 64, 64),
        (512, 112, 144, 288, 32, 64, 64),
        (528, 256, 160, 320, 32, 128, 128),
    ],
    [(832, 256, 160, 320, 32, 128, 128), (832, 384, 192, 384, 48, 128, 128)],
]


@zoo("googlenet", "vision", weights=6_624_904)
def googlenet() -> tuple[Any, ...]:
    pools = [nn.MaxPool2d(size, 2, ceil_mode=True) for size in (3, 3, 3, 2)]
    layers = [conv_bn(3, 64, 7, 2), pools[0], conv_bn(64, 64), conv_bn(64, 192, 3)]
    for pool, rows in zip(pools[1:], INCEPTIONS, strict=True):
        layers += [pool, *(inception(*row) for row in rows)]
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1024, 1000)]
    return nn.Sequential(*layers, *tail), image()


class CrossStage(nn.Module):
    """YOLO's cross stage partial block: chunk, residual bottlenecks, concatenate everything."""

    def __init__(self, i: int, o: int, n: int, act: Act) -> None:
        super().__init__()
        half = o // 2
        self.first, self.last = conv_bn(i, o, act=act), conv_bn((2 + n) * half, o, act=act)
        bottleneck = [
            nn.Sequential(conv_bn(half, half, 3, act=act), conv_bn(half, half, 3, act=act))
            for _ in range(n)
        ]
        self.inner = nn.ModuleList(Residual(body) for body in bottleneck)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.first(x).chunk(2, 1))
        for inner in self.inner:
            parts.append(inner(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Yolo(nn.Module):
    """A small detector: cross stages, pyramid pooling, upsampling, two heads."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_bn(3, 16, 3, 2, act=act), conv_bn(16, 32, 3, 2, act=act))
        self.c1, self.down = CrossStage(32, 32, 1, act), conv_bn(32, 64, 3, 2, act=act)
        self.c2, self.reduce = CrossStage(64, 64, 2, act), conv_bn(64, 32, act=act)
        self.spread, self.up = conv_bn(128, 64, act=act), CrossStage(96, 32, 1, act)
        self.heads = nn.ModuleList([nn.Conv2d(32, 3 * 15, 1), nn.Conv2d(64, 3 * 15, 1)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fine = self.c1(self.stem(x))
        coarse = self.reduce(self.c2(self.down(fine)))
        pooled = [coarse]
        for _ in range(3):
            pooled.append(F.max_pool2d(pooled[-1], 5, 1, 2))
        coarse = self.spread(torch.cat(pooled, 1))
        fine = self.up(torch.cat([F.interpolate(coarse, scale_factor=2, mode="nearest"), fine], 1))
        boxes = [head(y).view(y.shape[0], 3, 15, *y.shape[2:]) for head,
                 y in zip(self.heads, (fine, coarse), strict=True)]  # fmt: skip
        return boxes[0].permute(0, 1, 3, 4, 2), boxes[1].permute(0, 1, 3, 4, 2).sigmoid()


zoo("yolo_silu", "vision")(lambda: (Yolo(nn.SiLU), image()))
zoo("yolo_leaky", "vision", fast=True)(lambda: (Yolo(partial(nn.LeakyReLU, 0.1)), image()))


# --- dense prediction and generation


class UNet(nn.Module):
    """Contracting and expanding path with skips; upsampling learned or interpolated."""

    def __init__(self, widths: Sequence[int], up: str, norm: Any = nn.BatchNorm2d) -> None:
        super().__init__()
        self.up = up
        pairs = list(zip((3, *widths), widths, strict=False))
        self.down = nn.ModuleList(self.twice(i, o, norm) for i, o in pairs)
        back = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        how = {"transpose": (2, 2), "transpose_odd": (3, 2, 1, 1)}.get(up)
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(i, o, *how) if how else nn.Conv2d(i, o, 1) for i, o in back
        )
        self.merge = nn.ModuleList(self.twice(2 * o, o, norm) for _, o in back)
        self.last = nn.Conv2d(widths[0], 4, 1)

    @staticmethod
    def twice(i: int, o: int, norm: Any) -> nn.Sequential:
        return nn.Sequential(conv_bn(i, o, 3, norm=norm), conv_bn(o, o, 3, norm=norm))

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for n, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if n else x)
            skips.append(x)
        for grow, merge, skip in zip(self.grow, self.merge, skips[-2::-1], strict=True):
            if not self.up.startswith("transpose"):
                align = None if self.up == "nearest" else True
                x = F.interpolate(x, scale_factor=2, mode=self.up, align_corners=align)
            x = merge(torch.cat([skip, grow(x)], 1))
        return self.last(x)


for mode in ("transpose", "transpose_odd", "bilinear", "nearest", "bicubic"):
    zoo(f"unet_{mode}", "vision", fast=mode == "transpose_odd")(
        lambda mode=mode: (UNet((16, 32, 64), mode), image(size=32))  # type: ignore[misc]
    )
zoo("unet_instance_norm", "vision")(
    lambda: (
        UNet((8, 16, 32), "transpose", partial(nn.InstanceNorm2d, affine=True)),
        image(size=32),
    )
)


@zoo("dcgan_generator", "vision")
def dcgan() -> tuple[Any, ...]:
    layers: list[nn.Module] = []
    sizes = (100, 512, 1, 0), (512, 256, 2, 1), (256, 128, 2, 1), (128, 64, 2, 1)
    for i, o, stride, padding in sizes:
        grow = nn.ConvTranspose2d(i, o, 4, stride, padding, bias=False)
        layers += [grow, nn.BatchNorm2d(o), nn.ReLU()]
    last = nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False)
    return nn.Sequential(*layers, last, nn.Tanh()), torch.randn(2, 100, 1, 1)


@zoo("cyclegan_generator", "vision")
def cyclegan() -> tuple[Any, ...]:
    norm, act, pad = nn.InstanceNorm2d, nn.ReLU, nn.ReflectionPad2d
    layers: list[nn.Module] = [pad(3), nn.Conv2d(3, 32, 7), norm(32), act()]
    for i in (32, 64):
        layers += [nn.Conv2d(i, 2 * i, 3, 2, 1), norm(2 * i), act()]
    for _ in range(2):
        first = [pad(1), nn.Conv2d(128, 128, 3), norm(128), act()]
        layers.append(Residual(nn.Sequential(*first, pad(1), nn.Conv2d(128, 128, 3), norm(128))))
    for i in (128, 64):
        layers += [nn.ConvTranspose2d(i, i // 2, 3, 2, 1, 1), norm(i // 2), act()]
    return nn.Sequential(*layers, pad(3), nn.Conv2d(32, 3, 7), nn.Tanh()), image(size=32)


@zoo("deeplab", "vision")
def deeplab() -> tuple[Any, ...]:
    """Atrous spatial pyramid pooling on a dilated trunk."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.trunk(x)
        pooled = F.relu(net.pool(F.adaptive_avg_pool2d(y, 1)))
        pooled = F.interpolate(pooled, size=y.shape[-2:], mode="bilinear", align_corners=False)
        y = net.project(torch.cat([*(rate(y) for rate in net.rates), pooled], 1))
        return F.interpolate(net.last(y), size=x.shape[-2:], mode="bilinear", align_corners=False)

    trunk = nn.Sequential(conv_bn(3, 32, 3, 2), conv_bn(32, 64, 3, 2))
    dilated = [nn.Conv2d(64, 32, 3, padding=r, dilation=r, bias=False) for r in (1, 2, 4)]
    rates = [nn.Sequential(conv, nn.BatchNorm2d(32), nn.ReLU()) for conv in dilated]
    pool, project, last = nn.Conv2d(64, 32, 1), conv_bn(128, 32), nn.Conv2d(32, 5, 1)
    parts = {"rates": nn.ModuleList(rates), "pool": pool, "project": project, "last": last}
    return network(forward, trunk=trunk, **parts), image()


@zoo("feature_pyramid", "vision", fast=True)
def feature_pyramid() -> tuple[Any, ...]:
    """Lateral connections, nearest upsampling, one output per level."""

    def forward(net: Any, x: Tensor) -> dict[str, Tensor]:
        features = []
        for stage in net.stages:
            x = stage(x)
            features.append(x)
        top = net.lateral[-1](features[-1])
        results = [net.smooth[-1](top)]
        for i in (1, 0):
            lateral = net.lateral[i](features[i])
            top = lateral + F.interpolate(top, size=lateral.shape[-2:], mode="nearest")
            results.append(net.smooth[i](top))
        return {str(i): result for i, result in enumerate(results)}

    stages = nn.ModuleList(conv_bn(i, o, 3, 2) for i, o in ((3, 16), (16, 32), (32, 64)))
    lateral = nn.ModuleList(nn.Conv2d(i, 24, 1) for i in (16, 32, 64))
    smooth = nn.ModuleList(nn.Conv2d(24, 24, 3, padding=1) for _ in range(3))
    return network(forward, stages=stages, lateral=lateral, smooth=smooth), image()


@zoo("sub_pixel", "vision")
def sub_pixel() -> tuple[Any, ...]:
    """Super-resolution by pixel shuffle, with a global bicubic skip."""

    def forward(net: Any, x: Tensor) -> Tensor:
        start = net.first(x)
        grown = F.pixel_shuffle(net.last(start + net.body(start)), 2)
        return grown + F.interpolate(x, scale_factor=2, mode="bicubic")

    first, last = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 12, 3, padding=1)
    body = [nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.PReLU(),
                          nn.Conv2d(32, 32, 3, padding=1)) for _ in range(2)]  # fmt: skip
    body = nn.Sequential(*(Residual(block) for block in body))
    return network(forward, first=first, last=last, body=body), image(size=16)
