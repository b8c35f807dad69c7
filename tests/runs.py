"""Small training runs for tests of alarms: healthy ones, and the same broken on purpose."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pathspace.diagnostics import watching


class PreNorm(nn.Module):
    """A residual block of a norm and two linear maps."""

    def __init__(self, width: int, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm(width)
        self.enter = nn.Linear(width, 2 * width)
        self.leave = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.leave(F.gelu(self.enter(self.norm(x))))


class Plain(nn.Module):
    """A residual block without a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.leave(torch.relu(self.enter(x)))


class ResBlock(nn.Module):
    """Two convolutions with batch norms and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Gated(nn.Module):
    """A residual block with a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.leave = nn.RMSNorm(width), nn.Linear(2 * width, width, bias=False)
        self.gate, self.enter = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.leave(F.silu(self.gate(y)) * self.enter(y))


class Depthwise(nn.Module):
    """A residual block of a convolution by channel, a norm, and two layers over channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depth = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm = nn.GroupNorm(1, width)
        self.enter, self.leave = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.leave(F.gelu(self.enter(self.norm(self.depth(x)))))


class Mixer(nn.Module):
    """Layers over time, then over features."""

    def __init__(self, steps: int = 15, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_time = nn.Sequential(nn.Linear(steps, 30), nn.GELU(), nn.Linear(30, steps))
        self.over_width = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_time(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_width(self.second(x))


class Recurrent(nn.Module):
    """A recurrent layer and a head on its last state."""

    def __init__(self, kind: type[nn.Module] = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.rnn, self.head = kind(4, 24, batch_first=True, **options), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Loud(nn.Module):
    """A layer whose output is multiplied by a large number in front of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.head = nn.Linear(20, 32), nn.LayerNorm(32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(3e4 * self.enter(x))))


class Language(nn.Module):
    """A small transformer over tokens."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(17, width)
        self.place = nn.Parameter(0.02 * torch.randn(12, width))
        nn.init.normal_(self.table.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, 0.1, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 17, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.table(ids) + self.place)))


def mlp(
    sizes: tuple[int, ...] = (20, 48, 48, 48, 3), act: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    """A perceptron."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def vectors(count: int = 512, width: int = 20) -> tuple[Tensor, Tensor]:
    """Clusters of three classes."""
    classes = torch.randint(0, 3, (count,))
    return torch.randn(count, width) + 1.5 * torch.randn(3, width)[classes], classes


def images(count: int = 256) -> tuple[Tensor, Tensor]:
    """Noise on three patterns."""
    classes = torch.randint(0, 3, (count,))
    return torch.randn(count, 3, 8, 8) + torch.randn(3, 3, 8, 8)[classes], classes


def sequences(count: int = 256) -> tuple[Tensor, Tensor]:
    """Which of three waves."""
    classes = torch.randint(0, 3, (count,))
    time = torch.arange(15.0)[None, :, None] * (1 + classes[:, None, None]) / 2
    return torch.sin(time + torch.randn(count, 1, 4)) + 0.3 * torch.randn(count, 15, 4), classes


def tokens(count: int = 256) -> tuple[Tensor, Tensor]:
    """Counting upwards from a random number, with random steps."""
    ids = (
        torch.randint(0, 17, (count, 1)) + torch.randint(1, 4, (count, 1)) * torch.arange(13)
    ) % 17
    return ids[:, :-1], ids[:, 1:]


def regression(count: int = 512) -> tuple[Tensor, Tensor]:
    """A smooth function of twenty numbers."""
    x = torch.randn(count, 20)
    return x, torch.sin(x[:, :3]) + 0.1 * torch.randn(count, 3)


def identity(count: int = 512) -> tuple[Tensor, Tensor]:
    """Inputs that are their own targets."""
    x = torch.randn(count, 20)
    return x, x


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of classes, the mean square of the difference otherwise."""
    if targets.is_floating_point():
        return F.mse_loss(outputs, targets)
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


@dataclass
class Run:
    """A run to be made: model, data, optimizer, and what is done to them."""

    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]] = vectors
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-3})
    spoil: Callable[[nn.Module], Any] = lambda model: None
    inputs: float = 1.0
    steps: int = 40
    batch: int = 64
    zero: bool = True
    chosen: Callable[[nn.Module], Any] = lambda model: model.parameters()
    loss: Callable[[Tensor, Tensor], Tensor] = loss_of
    repeat: bool = False
    clip: float = 0.0

    def watched(self, seed: int = 0, **options: Any) -> Any:
        """Train and watch."""
        torch.manual_seed(seed)
        x, y = self.data()
        model = self.model()
        with torch.no_grad():
            self.spoil(model)
        optimizer = self.optimizer(self.chosen(model), **self.options)
        with watching(model, every=10, batches=len(x) // self.batch, **options) as watch:
            for _ in range(self.steps):
                index = (
                    torch.arange(self.batch)
                    if self.repeat
                    else torch.randint(0, len(x), (self.batch,))
                )
                batch = x[index] * self.inputs if x.is_floating_point() else x[index]
                if self.zero:
                    optimizer.zero_grad()
                self.loss(model(batch), y[index]).backward()
                if self.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), self.clip)
                optimizer.step()
        return watch


def steps(
    optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor], count: int, model: nn.Module,
    before_step: Callable[[], Any] = lambda: None, **options: Any,
) -> Any:  # fmt: skip
    """Watch some steps down a loss, by default at every second one and without a trace."""
    with watching(model, **{"every": 2, "structure": False, **options}) as watch:
        for _ in range(count):
            optimizer.zero_grad()
            loss().backward()  # type: ignore[no-untyped-call]
            before_step()
            optimizer.step()
    return watch


def cnn() -> nn.Sequential:
    """Convolutions with batch norms."""
    return nn.Sequential(
        *(nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(12, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(16, 3)),
    )


def resnet() -> nn.Sequential:
    """Residual blocks with batch norms."""
    stem = (nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU())
    return nn.Sequential(
        *stem, ResBlock(12), ResBlock(12), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3)
    )


def residual(width: int = 32, norm: type[nn.Module] = nn.LayerNorm) -> nn.Sequential:
    """Pre-norm residual blocks."""
    return nn.Sequential(
        nn.Linear(20, width),
        PreNorm(width, norm),
        PreNorm(width, norm),
        norm(width),
        nn.Linear(width, 3),
    )


def plain_residual(width: int = 32) -> nn.Sequential:
    """Residual blocks without norms."""
    return nn.Sequential(nn.Linear(20, width), Plain(width), Plain(width), nn.Linear(width, 3))


def gated() -> nn.Sequential:
    """Gated residual blocks."""
    return nn.Sequential(nn.Linear(20, 32), Gated(32), Gated(32), nn.RMSNorm(32), nn.Linear(32, 3))


def depthwise() -> nn.Sequential:
    """Convolutions by channel in residual blocks."""
    body = (
        nn.Conv2d(3, 16, 2, stride=2),
        Depthwise(16),
        Depthwise(16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    return nn.Sequential(*body, nn.LayerNorm(16), nn.Linear(16, 3))


def mixer() -> nn.Sequential:
    """A mixer of sequences."""
    return nn.Sequential(
        nn.Linear(4, 16), Mixer(), Mixer(), nn.LayerNorm(16), nn.Flatten(), nn.Linear(240, 3)
    )


def grouped() -> nn.Sequential:
    """Convolutions with group norms."""
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU()]
    layers += [nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))


def squashed(function: nn.Module) -> nn.Sequential:
    """A classifier that ends in probabilities."""
    return mlp().append(function)


def binary(outputs: Tensor, targets: Tensor) -> Tensor:
    """Each class by itself: true or false."""
    return F.binary_cross_entropy_with_logits(outputs, F.one_hot(targets, 3).float())


def brier(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean square of probabilities' errors."""
    return F.mse_loss(outputs, F.one_hot(targets, 3).float())


def smoothed(share: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross-entropy with targets that are shared out."""
    return lambda outputs, targets: F.cross_entropy(outputs, targets, label_smoothing=share)


SGD = {"optimizer": torch.optim.SGD}
HEALTHY = {
    "mlp-sgd": Run(mlp, **SGD, options={"lr": 0.1, "momentum": 0.9}),
    "mlp-adam-large": Run(mlp, options={"lr": 1e-2}),
    "regression-tanh": Run(lambda: mlp(act=nn.Tanh), regression),
    "deep-mlp": Run(lambda: mlp((20, *[64] * 6, 3)), options={"lr": 3e-4}),
    "cnn": Run(cnn, images, **SGD, options={"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}),
    "resnet": Run(resnet, images, torch.optim.AdamW, {"lr": 3e-3}),
    "residual": Run(residual),
    "rms-residual": Run(
        lambda: residual(24, nn.RMSNorm), regression, torch.optim.AdamW, {"lr": 2e-3}
    ),
    "plain-residual": Run(plain_residual, **SGD, options={"lr": 0.05}),
    "lstm": Run(Recurrent, sequences, options={"lr": 3e-3}),
    "gru": Run(lambda: Recurrent(nn.GRU), sequences),
    "transformer": Run(Language, tokens, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
    "gated": Run(gated, optimizer=torch.optim.NAdam, options={"lr": 2e-3}),
    "depthwise": Run(depthwise, images, torch.optim.RMSprop, {"lr": 1e-3}),
    "mixer": Run(mixer, sequences, torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.05}),
    "grouped": Run(grouped, images, **SGD, options={"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "autoencoder": Run(
        lambda: mlp((20, 64, 8, 64, 20)), identity, torch.optim.Adagrad, {"lr": 1e-2}
    ),
    "leaky": Run(lambda: mlp(act=nn.LeakyReLU), optimizer=torch.optim.ASGD, options={"lr": 0.1}),
    "elu": Run(lambda: mlp(act=nn.ELU), optimizer=torch.optim.Adamax, options={"lr": 5e-3}),
    "wide-head": Run(lambda: mlp((20, 256, 3)), **SGD, options={"lr": 0.3}),
    "brier": Run(lambda: squashed(nn.Softmax(-1)), loss=brier),
    "log-softmax": Run(lambda: squashed(nn.LogSoftmax(-1))),
    "nll": Run(lambda: squashed(nn.LogSoftmax(-1)), loss=F.nll_loss),
    "binary": Run(mlp, loss=binary),
    "sigmoid-brier": Run(lambda: squashed(nn.Sigmoid()), loss=brier),
    "smoothed": Run(mlp, loss=smoothed(0.3)),
    "clipped": Run(mlp, **SGD, options={"lr": 0.1}, clip=0.1),
    "column": Run(
        lambda: mlp((20, 48, 1)),
        lambda: (vectors()[0], vectors()[0].norm(dim=1, keepdim=True)),
        loss=lambda z, y: (z - y).square().mean(),
    ),
    "judge": Run(
        lambda: mlp((20, 48, 1)), loss=lambda z, _: (z - 1).square().mean(), options={"lr": 1e-4}
    ),
    "dropout": Run(lambda: nn.Sequential(nn.Dropout(0.5), *mlp())),
    "full-batch": Run(mlp, lambda: vectors(64), repeat=True),
}


def scale(name: str, factor: float) -> Callable[[nn.Module], Any]:
    """Multiply one parameter."""
    return lambda model: model.get_parameter(name).mul_(factor) is None


def unbalance(first: str, second: str, factor: float, bias: str = "") -> Callable[[nn.Module], Any]:
    """Rescale the units between two linear layers."""

    def spoil(model: nn.Module) -> None:
        model.get_parameter(first).mul_(factor)
        if bias:
            model.get_parameter(bias).mul_(factor)
        model.get_parameter(second).div_(factor)

    return spoil


def fill(name: str, value: float) -> Callable[[nn.Module], Any]:
    """Fill one parameter."""
    return lambda model: model.get_parameter(name).fill_(value) is None


BROKEN: dict[str, tuple[str, str, Run]] = {
    "dead": ("dead", "2", Run(mlp, spoil=fill("2.bias", -30.0))),
    "dead-bn": ("dead", "1", Run(cnn, images, spoil=fill("1.bias", -30.0))),
    "exploding": (
        "exploding",
        "2",
        Run(mlp, spoil=scale("2.weight", 100), **SGD, options={"lr": 1e-3}),
    ),
    "exploding-residual": (
        "exploding",
        "1.leave",
        Run(residual, spoil=scale("1.leave.weight", 60)),
    ),
    "vanishing": ("vanishing", "4", Run(mlp, spoil=scale("4.weight", 1e-3))),
    "unbalanced": (
        "unbalanced",
        "0.weight",
        Run(mlp, spoil=unbalance("0.weight", "2.weight", 300.0, "0.bias")),
    ),
    "unbalanced-block": (
        "unbalanced",
        "1.enter.weight",
        Run(
            plain_residual,
            spoil=unbalance("1.enter.weight", "1.leave.weight", 1 / 100, "1.enter.bias"),
            **SGD,
        ),
    ),
    "pulled": (
        "pulled back",
        "1.leave",
        Run(
            lambda: nn.Sequential(Plain(20), Plain(20)), identity, spoil=scale("1.leave.weight", 6)
        ),
    ),
    "eps": (
        "eps",
        "1.norm",
        Run(residual, spoil=lambda m: [p.mul_(1e-3) for p in m[0].parameters()]),
    ),
    "overflow": ("overflow", "norm", Run(Loud)),
    "rate-adam": ("rate", "", Run(mlp, options={"lr": 0.5})),
    "rate-sgd": ("rate", "", Run(mlp, **SGD, options={"lr": 30.0})),
    "rate-transformer": ("rate", "", Run(Language, tokens, options={"lr": 0.2})),
    "slow": ("slow", "", Run(mlp, options={"lr": 1e-10})),
    "decay": (
        "decay",
        "",
        Run(mlp, optimizer=torch.optim.AdamW, options={"lr": 1e-3, "weight_decay": 30.0}),
    ),
    "inputs": ("input scale", "", Run(mlp, inputs=255.0)),
    "nan-inputs": ("inputs not finite", "", Run(mlp, inputs=float("nan"), steps=6)),
    "copies": ("copies", "2.weight", Run(mlp, spoil=fill("2.weight", 0.05))),
    "stale": ("stale gradients", "", Run(mlp, zero=False)),
    "eval": ("evaluation mode", "", Run(cnn, images, spoil=lambda m: m.eval() is None)),
    "untrained": ("untrained", "0.weight", Run(mlp, chosen=lambda m: m[2:].parameters())),
    "gated-unbalanced": (
        "unbalanced",
        "1.enter",
        Run(gated, spoil=unbalance("1.enter.weight", "1.leave.weight", 200)),
    ),
    "depthwise-vanishing": (
        "vanishing",
        "1.leave",
        Run(depthwise, images, torch.optim.RMSprop, {"lr": 1e-5}, scale("1.leave.weight", 1e-3)),
    ),
    "autoencoder-dead": (
        "dead",
        "0",
        Run(
            lambda: mlp((20, 64, 8, 64, 20)),
            identity,
            torch.optim.Adagrad,
            {"lr": 1e-3},
            fill("0.bias", -20.0),
        ),
    ),
    "rounded": (
        "rounded",
        "0.weight",
        Run(
            lambda: mlp().bfloat16(),
            lambda: (vectors()[0].bfloat16(), torch.randint(0, 3, (512,))),
            options={"lr": 2e-5},
        ),
    ),
    "softmax-twice": ("squashed twice", "", Run(lambda: squashed(nn.Softmax(-1)))),
    "softmax-in-loss": (
        "squashed twice",
        "",
        Run(mlp, loss=lambda z, y: F.cross_entropy(z.softmax(-1), y)),
    ),
    "sigmoid-twice": ("squashed twice", "", Run(lambda: squashed(nn.Sigmoid()), loss=binary)),
    "smoothed-away": ("uniform targets", "", Run(mlp, loss=smoothed(1.0))),
    "repeated": ("repeated batch", "", Run(mlp, repeat=True)),
    "zero-inputs": ("input scale", "", Run(mlp, inputs=0.0)),
    "broadcast": (
        "uniform targets",
        "",
        Run(
            lambda: mlp((20, 48, 1)),
            lambda: (vectors()[0], vectors()[0].norm(dim=1)),
            loss=lambda z, y: (z - y).square().mean(),
        ),
    ),
    "negated": ("negated loss", "", Run(mlp, loss=lambda z, y: -F.cross_entropy(z, y))),
    "rectified": ("rectified outputs", "", Run(lambda: squashed(nn.ReLU()))),
    "dropped": ("dropped", "0", Run(lambda: nn.Sequential(nn.Dropout(0.95), *mlp()))),
    "clipped": ("clipped", "", Run(mlp, **SGD, options={"lr": 0.1}, clip=1e-4)),
    "adam-eps": ("optimizer eps", "", Run(mlp, options={"lr": 1e-3, "eps": 1.0})),
    "no-loss": ("no gradient", "", Run(mlp, loss=lambda z, y: 0 * F.cross_entropy(z, y))),
    "copied": ("untrained", "", Run(mlp, chosen=lambda m: copy.deepcopy(m).parameters())),
    "saturated": ("saturated", "1", Run(lambda: mlp(act=nn.Tanh), spoil=fill("0.bias", 12.0))),
}
