"""Small training runs for tests of alarms: healthy ones, and the same broken on purpose."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from cases import network
from torch import Tensor, nn
from torch.nn import functional as F

from pathspace.diagnostics import watching


def pre_norm(width: int) -> nn.Module:
    """A residual block of a norm and two linear maps."""
    enter, leave = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
    return network(
        lambda net, x: x + net.leave(F.gelu(net.enter(net.norm(x)))),
        norm=nn.LayerNorm(width), enter=enter, leave=leave,
    )  # fmt: skip


def plain(width: int) -> nn.Module:
    """A residual block without a norm."""
    enter, leave = nn.Linear(width, width), nn.Linear(width, width)
    return network(lambda net, x: x + net.leave(torch.relu(net.enter(x))), enter=enter, leave=leave)


def recurrent() -> nn.Module:
    """A recurrent layer and a head on its last state."""
    rnn, head = nn.LSTM(4, 24, batch_first=True), nn.Linear(24, 3)
    return network(lambda net, x: net.head(net.rnn(x)[0][:, -1]), rnn=rnn, head=head)


def loud() -> nn.Module:
    """A layer whose output is multiplied by a large number in front of a norm."""
    return network(
        lambda net, x: net.head(torch.relu(net.norm(3e4 * net.enter(x)))),
        enter=nn.Linear(20, 32),
        norm=nn.LayerNorm(32),
        head=nn.Linear(32, 3),
    )


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


def residual(width: int = 32) -> nn.Sequential:
    """Pre-norm residual blocks."""
    body = pre_norm(width), pre_norm(width), nn.LayerNorm(width)
    return nn.Sequential(nn.Linear(20, width), *body, nn.Linear(width, 3))


def plain_residual(width: int = 32) -> nn.Sequential:
    """Residual blocks without norms."""
    return nn.Sequential(nn.Linear(20, width), plain(width), plain(width), nn.Linear(width, 3))


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
    "regression-tanh": Run(lambda: mlp(act=nn.Tanh), regression),
    "deep-mlp": Run(lambda: mlp((20, *[64] * 6, 3)), options={"lr": 3e-4}),
    "cnn": Run(cnn, images, **SGD, options={"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}),
    "residual": Run(residual),
    "plain-residual": Run(plain_residual, **SGD, options={"lr": 0.05}),
    "lstm": Run(recurrent, sequences, options={"lr": 3e-3}),
    "transformer": Run(Language, tokens, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
    "autoencoder": Run(
        lambda: mlp((20, 64, 8, 64, 20)), identity, torch.optim.Adagrad, {"lr": 1e-2}
    ),
    "brier": Run(lambda: squashed(nn.Softmax(-1)), loss=brier),
    "log-softmax": Run(lambda: squashed(nn.LogSoftmax(-1))),
    "binary": Run(mlp, loss=binary),
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


def broken(kind: str, place: str, *what: Any, **more: Any) -> tuple[str, str, Run]:
    """A run, the alarm that it must raise, and where."""
    return kind, place, Run(*what, **more)


SLOW = {**SGD, "options": {"lr": 1e-3}}
BROKEN: dict[str, tuple[str, str, Run]] = {
    "dead": broken("dead", "2", mlp, spoil=fill("2.bias", -30.0)),
    "exploding": broken("exploding", "2", mlp, spoil=scale("2.weight", 100), **SLOW),
    "exploding-residual": broken(
        "exploding", "1.leave", residual, spoil=scale("1.leave.weight", 60)
    ),
    "vanishing": broken("vanishing", "4", mlp, spoil=scale("4.weight", 1e-3)),
    "unbalanced": broken(
        "unbalanced", "0.weight", mlp, spoil=unbalance("0.weight", "2.weight", 300.0, "0.bias")
    ),
    "unbalanced-block": broken(
        "unbalanced",
        "1.enter.weight",
        plain_residual,
        spoil=unbalance("1.enter.weight", "1.leave.weight", 1 / 100, "1.enter.bias"),
        **SGD,
    ),
    "pulled": broken(
        "pulled back",
        "1.leave",
        lambda: nn.Sequential(plain(20), plain(20)),
        identity,
        spoil=scale("1.leave.weight", 6),
    ),
    "eps": broken(
        "eps", "1.norm", residual, spoil=lambda m: [p.mul_(1e-3) for p in m[0].parameters()]
    ),
    "overflow": broken("overflow", "norm", loud),
    "rate-adam": broken("rate", "", mlp, options={"lr": 0.5}),
    "rate-sgd": broken("rate", "", mlp, **SGD, options={"lr": 30.0}),
    "slow": broken("slow", "", mlp, options={"lr": 1e-10}),
    "decay": broken(
        "decay", "", mlp, vectors, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 30.0}
    ),
    "inputs": broken("input scale", "", mlp, inputs=255.0),
    "nan-inputs": broken("inputs not finite", "", mlp, inputs=float("nan"), steps=6),
    "copies": broken("copies", "2.weight", mlp, spoil=fill("2.weight", 0.05)),
    "stale": broken("stale gradients", "", mlp, zero=False),
    "eval": broken("evaluation mode", "", cnn, images, spoil=lambda m: m.eval() is None),
    "untrained": broken("untrained", "0.weight", mlp, chosen=lambda m: m[2:].parameters()),
    "rounded": broken(
        "rounded",
        "0.weight",
        lambda: mlp().bfloat16(),
        lambda: (vectors()[0].bfloat16(), torch.randint(0, 3, (512,))),
        options={"lr": 2e-5},
    ),
    "softmax-twice": broken("squashed twice", "", lambda: squashed(nn.Softmax(-1))),
    "softmax-in-loss": broken(
        "squashed twice", "", mlp, loss=lambda z, y: F.cross_entropy(z.softmax(-1), y)
    ),
    "sigmoid-twice": broken("squashed twice", "", lambda: squashed(nn.Sigmoid()), loss=binary),
    "smoothed-away": broken("uniform targets", "", mlp, loss=smoothed(1.0)),
    "repeated": broken("repeated batch", "", mlp, repeat=True),
    "broadcast": broken(
        "uniform targets",
        "",
        lambda: mlp((20, 48, 1)),
        lambda: (vectors()[0], vectors()[0].norm(dim=1)),
        loss=lambda z, y: (z - y).square().mean(),
    ),
    "negated": broken("negated loss", "", mlp, loss=lambda z, y: -F.cross_entropy(z, y)),
    "rectified": broken("rectified outputs", "", lambda: squashed(nn.ReLU())),
    "dropped": broken("dropped", "0", lambda: nn.Sequential(nn.Dropout(0.95), *mlp())),
    "clipped": broken("clipped", "", mlp, **SGD, options={"lr": 0.1}, clip=1e-4),
    "adam-eps": broken("optimizer eps", "", mlp, options={"lr": 1e-3, "eps": 1.0}),
    "no-loss": broken("no gradient", "", mlp, loss=lambda z, y: 0 * F.cross_entropy(z, y)),
    "copied": broken("untrained", "", mlp, chosen=lambda m: copy.deepcopy(m).parameters()),
    "saturated": broken("saturated", "1", lambda: mlp(act=nn.Tanh), spoil=fill("0.bias", 12.0)),
}
