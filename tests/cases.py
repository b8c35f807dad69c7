"""Small networks as data: `CASES[name]()` returns `(model, example_args)`, built from a fixed seed.

Seeded random networks, and the recurrent modules used here, are in `oracles.networks`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from oracles.networks import Case, LoopRNN, OpRNN, RNNWithState
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CASES: dict[str, Callable[[], Case]] = {}


def case(
    name: str, *shapes: tuple[int, ...]
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Register a model builder under `name`, with random example inputs of the given shapes."""

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def make() -> Case:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(sum(map(ord, name)))
                return build(), tuple(torch.randn(shape) for shape in shapes)

        CASES[name] = make
        return build

    return register


class Between(nn.Module):
    """A linear layer, an operation, and a linear layer to two outputs."""

    def __init__(
        self,
        operation: Callable[[Tensor], Tensor],
        features: int = 6,
        inputs: int = 4,
        units: int = 6,
    ) -> None:
        super().__init__()
        self.first, self.operation = nn.Linear(inputs, units), operation
        self.second = nn.Linear(features, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.operation(self.first(x)))


def network(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A module that holds these parts, with a forward pass that is a function of it."""
    model = type("Network", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(model, name, part)
    return model


def recomputed(
    function: Callable[..., Tensor], *given: Tensor, reentrant: bool | None = False
) -> Tensor:
    """A function that runs again in the backward pass, or does not if `reentrant` is ``None``."""
    if reentrant is None:
        return function(*given)
    return checkpoint(function, *given, use_reentrant=reentrant)


def mlp(*widths: int, bias: bool = True, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of the given widths with `act` between them."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b, bias=bias), act()]
    return nn.Sequential(*layers[:-1])


def _register_mlps() -> None:
    for widths in [
        (2, 1, 2, 1),
        (1, 2, 1, 2),
        (3, 4, 2),
        (2, 3, 5, 2),
        (4, 3, 2, 1),
        (1, 1, 1, 1),
        (3, 3, 3, 3),
        (2, 4, 1, 3, 2),
    ]:
        for bias in (True, False):
            label = "x".join(map(str, widths))
            case(f"mlp_{label}" + ("" if bias else "_nobias"), (2, widths[0]))(
                lambda widths=widths, bias=bias: mlp(*widths, bias=bias)  # type: ignore[misc]
            )
    case("mlp_single_linear", (2, 3))(lambda: nn.Linear(3, 2))
    case("mlp_leaky", (2, 3))(lambda: mlp(3, 4, 3, 2, act=lambda: nn.LeakyReLU(0.1)))
    case("mlp_prelu", (2, 3))(lambda: mlp(3, 4, 3, 2, act=nn.PReLU))
    case("mlp_prelu_channels", (2, 3))(lambda: mlp(3, 4, 4, 2, act=lambda: nn.PReLU(4)))
    case("mlp_gelu", (2, 3))(lambda: mlp(3, 4, 2, act=nn.GELU))
    case("mlp_tanh_then_relu", (2, 3))(
        lambda: nn.Sequential(
            nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)
        )
    )
    case("mlp_softmax", (2, 3))(lambda: nn.Sequential(*mlp(3, 4, 2), nn.Softmax(-1)))


_register_mlps()


class ResidualMLP(nn.Module):
    """Linear stem, blocks `x + W2 relu(W1 x)`, linear head."""

    def __init__(
        self,
        inputs: int,
        width: int,
        inner: Sequence[int],
        outputs: int,
        bias: bool = True,
        post: bool = False,
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(inputs, width, bias=bias)
        self.up = nn.ModuleList(nn.Linear(width, n, bias=bias) for n in inner)
        self.down = nn.ModuleList(nn.Linear(n, width, bias=bias) for n in inner)
        self.head = nn.Linear(width, outputs, bias=bias)
        self.post = post

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.relu(up(x)))
            x = F.relu(x) if self.post else x
        return self.head(x)


class DenseMLP(nn.Module):
    """Every layer reads the concatenation of all earlier features."""

    def __init__(self, inputs: int, growth: Sequence[int], outputs: int) -> None:
        super().__init__()
        widths = [inputs + sum(growth[:i]) for i in range(len(growth) + 1)]
        self.layers = nn.ModuleList(nn.Linear(w, g) for w, g in zip(widths, growth, strict=False))
        self.head = nn.Linear(widths[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, F.relu(layer(x))], -1)
        return self.head(x)


case("residual_mlp", (2, 3))(lambda: ResidualMLP(3, 4, (3, 2), 2))
case("residual_mlp_post", (2, 3))(lambda: ResidualMLP(3, 3, (2, 4), 2, post=True))
case("residual_mlp_nobias", (2, 2))(lambda: ResidualMLP(2, 3, (2, 5), 1, bias=False))
case("dense_mlp", (2, 2))(lambda: DenseMLP(2, (3, 2, 2), 2))


@case("residual_on_input", (2, 3))
class ResidualOnInput(nn.Module):
    """The residual stream is the input itself, so its scale is fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(x + self.down(F.relu(self.up(x)))))


@case("dense_conv", (1, 2, 4, 4))
class DenseConv(nn.Module):
    """DenseNet-like: concatenated feature maps, a 1x1 transition, average pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 2, 3, padding=1)
        self.second = nn.Conv2d(4, 2, 3, padding=1, bias=False)
        self.transition, self.head = nn.Conv2d(6, 3, 1), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, F.relu(self.first(x))], 1)
        x = torch.cat([x, F.relu(self.second(x))], 1)
        x = F.avg_pool2d(F.relu(self.transition(x)), 2)
        return self.head(x.mean((2, 3)))


def _register_convs() -> None:
    case("conv_gap", (1, 2, 5, 5))(
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 3, stride=2, padding=1),
            nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2),
        )
    )  # fmt: skip
    case("conv_flatten", (1, 1, 4, 4))(
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 2, 2),
            nn.LeakyReLU(), nn.Flatten(), nn.Linear(2, 2),
        )
    )  # fmt: skip
    case("conv_flatten_spatial", (2, 1, 4, 4))(
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, 3)
        )
    )
    case("conv_groups", (1, 4, 4, 4))(
        lambda: nn.Sequential(
            nn.Conv2d(4, 4, 3, groups=2, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 1, groups=2),
            nn.ReLU(), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(24, 2),
        )
    )  # fmt: skip
    case("conv_depthwise", (1, 3, 4, 4))(
        lambda: nn.Sequential(
            nn.Conv2d(3, 3, 3, groups=3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 1), nn.ReLU(),
            nn.Conv2d(4, 8, 3, groups=4, padding=1, bias=False), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(8, 2),
        )
    )  # fmt: skip
    case("conv_fully", (2, 2, 4, 4))(
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, (3, 1), padding=(1, 0)), nn.ReLU(), nn.Conv2d(3, 2, (1, 2), stride=2)
        )
    )
    case("conv_dead_taps", (2, 2, 4, 1))(
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 3, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(8, 2),
        )
    )  # fmt: skip
    case("conv1d", (2, 2, 7))(
        lambda: nn.Sequential(
            nn.Conv1d(2, 3, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(3, 4, 2),
            nn.ReLU(), nn.Flatten(), nn.Linear(4, 2),
        )
    )  # fmt: skip
    case("conv1d_dilated_groups", (2, 4, 8))(
        lambda: nn.Sequential(
            nn.Conv1d(4, 4, 3, dilation=2, padding=2, groups=4), nn.PReLU(4), nn.Conv1d(4, 2, 1),
            nn.ReLU(), nn.AdaptiveAvgPool1d(3), nn.Flatten(), nn.Linear(6, 2),
        )
    )  # fmt: skip


_register_convs()


@case("residual_cnn", (1, 2, 4, 4))
class ResidualCNN(nn.Module):
    """One identity block, one block with a strided projection shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 2, 1)
        self.a1, self.a2 = nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.Conv2d(2, 2, 1)
        self.b1, self.b2 = nn.Conv2d(2, 2, 3, stride=2, padding=1), nn.Conv2d(2, 3, 1, bias=False)
        self.shortcut, self.head = nn.Conv2d(2, 3, 1, stride=2), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(x + self.a2(F.relu(self.a1(x))))
        x = F.relu(self.shortcut(x) + self.b2(F.relu(self.b1(x))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


@case("channel_shuffle", (1, 4, 3, 3))
class ChannelShuffle(nn.Module):
    """ShuffleNet's reshuffling of channels between two grouped convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 6, 1, groups=2)
        self.second = nn.Conv2d(6, 4, 3, groups=2, padding=1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        b, c, h, w = x.shape
        x = x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
        return self.head(F.relu(self.second(x)).mean((2, 3)))


@case("split_branches", (2, 3))
class SplitBranches(nn.Module):
    """Features are split in two, processed apart, one half skips ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.head = nn.Linear(3, 5), nn.Linear(2, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        left, right = F.relu(self.stem(x)).split([2, 3], dim=-1)
        return self.head(torch.cat([right, F.relu(self.left(left))], -1))


@case("chunk_add", (2, 3))
class ChunkAdd(nn.Module):
    """Two halves of a layer are added, so their units share scales in pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 6), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.stem(x).chunk(2, dim=-1)
        return self.head(F.relu(a) - F.leaky_relu(b, 0.2))


@case("permute_tokens", (2, 3, 2))
class PermuteTokens(nn.Module):
    """MLP-mixer like: a linear map over positions, then one over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.embed(x))
        x = F.relu(self.mix(x.permute(0, 2, 1)))
        return self.head(x.reshape(x.shape[0], -1))


@case("slices_and_flip", (2, 3))
class SlicesAndFlip(nn.Module):
    """Slices of one layer meet in additions: units 0 and 3, 1 and 2 share a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 5), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return self.head(torch.cat([x[:, :2] + x[:, 2:4].flip(-1), x[:, 4:]], -1))


@case("gated_product", (2, 3))
class GatedProduct(nn.Module):
    """The product of two branches: scales of the factors add up."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.a(x)) * self.b(x))


def _register_rnns() -> None:
    case("rnn_op", (2, 3, 2))(lambda: OpRNN(2, 3, 2, batch_first=True))
    case("rnn_op_nobias", (2, 3, 2))(
        lambda: OpRNN(2, 3, 2, batch_first=True, bias=False, out_bias=False)
    )
    case("rnn_op_time_first_all", (3, 2, 2))(lambda: OpRNN(2, 3, 2, last=False))
    case("rnn_op_2_layers", (2, 3, 2))(lambda: OpRNN(2, 2, 2, batch_first=True, num_layers=2))
    case("rnn_op_3_layers_all", (1, 3, 2))(
        lambda: OpRNN(2, 2, 2, last=False, batch_first=True, num_layers=3, bias=False)
    )
    case("rnn_op_2_layers_time_first", (3, 2, 1))(lambda: OpRNN(1, 3, 2, num_layers=2))
    case("rnn_op_bidirectional", (2, 3, 2))(
        lambda: OpRNN(2, 2, 2, last=False, batch_first=True, bidirectional=True)
    )
    case("rnn_op_bidirectional_2_layers", (3, 2, 1))(
        lambda: OpRNN(1, 2, 1, last=False, bidirectional=True, num_layers=2)
    )
    case("rnn_loop", (2, 3, 2))(lambda: LoopRNN(2, [3], 2))
    case("rnn_loop_nobias", (2, 3, 2))(lambda: LoopRNN(2, [3], 2, bias=False, out_bias=False))
    case("rnn_loop_all", (2, 3, 2))(lambda: LoopRNN(2, [3], 2, last=False))
    case("rnn_loop_none_state", (2, 3, 2))(lambda: LoopRNN(2, [3], 2, zeros=False))
    case("rnn_loop_2_layers", (2, 3, 2))(lambda: LoopRNN(2, [2, 2], 2))
    case("rnn_loop_3_layers_all", (1, 3, 2))(
        lambda: LoopRNN(2, [2, 2, 2], 2, last=False, bias=False)
    )
    case("rnn_loop_unequal", (2, 3, 1))(lambda: LoopRNN(1, [1, 2], 1, bias=False, out_bias=False))
    case("rnn_loop_unequal_none_state", (2, 3, 2))(
        lambda: LoopRNN(2, [3, 1, 2], 2, zeros=False, last=False)
    )
    case("rnn_first_input", (2, 3, 2))(lambda: LoopRNN(2, [2], 2, zeros=False, first_only=True))
    case("rnn_first_input_nobias", (2, 3, 2))(
        lambda: LoopRNN(2, [2], 2, zeros=False, first_only=True, bias=False, out_bias=False)
    )
    case("rnn_first_input_nobias_all", (2, 3, 2))(
        lambda: LoopRNN(
            2, [2], 2, zeros=False, first_only=True, bias=False, out_bias=False, last=False
        )
    )
    case("rnn_loop_2_steps", (2, 2, 2))(lambda: LoopRNN(2, [3], 2))


_register_rnns()


case("rnn_op_learned_state", (2, 3, 2))(lambda: RNNWithState("parameter"))
case("rnn_op_given_state", (2, 3, 2), (1, 2, 3))(lambda: RNNWithState("input"))
case("rnn_op_state_is_output", (2, 3, 2))(lambda: RNNWithState("output"))
case("rnn_op_tanh", (2, 3, 2))(lambda: nn.RNN(2, 3, nonlinearity="tanh"))
case("rnn_op_one_step", (2, 1, 2))(lambda: OpRNN(2, 3, 2, batch_first=True))
case("rnn_loop_one_step", (2, 1, 2))(lambda: LoopRNN(2, [3], 2))
case("rnn_op_bidirectional_last", (2, 3, 2))(
    lambda: OpRNN(2, 2, 2, batch_first=True, bidirectional=True)
)

OP_AND_LOOP = [
    ("rnn_op", "rnn_loop"),
    ("rnn_op", "rnn_loop_none_state"),
    ("rnn_op_nobias", "rnn_loop_nobias"),
    ("rnn_op_time_first_all", "rnn_loop_all"),
    ("rnn_op_2_layers", "rnn_loop_2_layers"),
    ("rnn_op_3_layers_all", "rnn_loop_3_layers_all"),
]


class Tied(nn.Module):
    """One matrix at two call sites: the same way (`"twice"`), or transposed
    (`"transposed"`, `"decoder"`).
    """

    def __init__(self, kind: Literal["twice", "transposed", "decoder"]) -> None:
        super().__init__()
        self.kind = kind
        self.shared = nn.Linear(3, 3, bias=kind == "twice")
        if kind != "decoder":
            self.stem, self.head = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "decoder":
            return F.linear(F.relu(self.shared(x)), self.shared.weight.t())
        if self.kind == "transposed":
            x = F.relu(self.shared(F.relu(self.stem(x))))
            return self.head(F.relu(F.linear(x, self.shared.weight.t())))
        return self.head(F.relu(self.shared(F.relu(self.shared(F.relu(self.stem(x)))))))


class DepthShared(nn.Module):
    """A shared matrix applied in depth; `inject` feeds the embedded input
    again at every application.
    """

    def __init__(self, inject: bool, steps: int = 3) -> None:
        super().__init__()
        self.inject, self.steps = inject, steps
        self.embed = nn.Linear(2, 3)
        self.shared = nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        start = self.embed(x)
        h = F.relu(start)
        for _ in range(self.steps):
            h = F.relu(self.shared(h) + start) if self.inject else F.relu(self.shared(h))
        return self.head(h)


case("tied_twice", (2, 2))(lambda: Tied("twice"))
case("tied_transposed", (2, 2))(lambda: Tied("transposed"))
case("tied_autoencoder", (2, 3))(lambda: Tied("decoder"))


class Autoencoder(nn.Module):
    """A layer and its transpose: the scale of the units between them counts twice."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layer(x)) @ self.layer.weight


case("tied_autoencoders", (2, 2))(
    lambda: nn.Sequential(nn.Linear(2, 3), Autoencoder(3, 2), Autoencoder(3, 4), nn.Linear(3, 2))
)
case("tied_depth_injected", (2, 2))(lambda: DepthShared(True))
case("tied_depth", (2, 2))(lambda: DepthShared(False))


@case("tied_names", (2, 3))
class TiedNames(nn.Module):
    """One Parameter under two names, used at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.b(F.relu(self.a(x)))))


@case("unused_parameter", (2, 3))
class UnusedParameter(nn.Module):
    """A layer that is never called and a parameter whose result is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.never, self.dropped = mlp(3, 4, 2), nn.Linear(2, 5), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        self.dropped(y)
        return y


@case("frozen_parameter", (2, 3))
def frozen_parameter() -> nn.Module:
    model = mlp(3, 4, 3, 2)
    model[2].weight.requires_grad_(False)
    return model


@case("siamese", (2, 3), (2, 3))
class Siamese(nn.Module):
    """The same encoder reads two inputs; the codes meet in a subtraction."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = mlp(3, 4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(F.relu(self.encoder(x) - self.encoder(y)))


@case("parameters_everywhere", (2, 3, 2))
class ParametersEverywhere(nn.Module):
    """Parameters added, concatenated, multiplied, sliced and used by `@`, as
    in a vision transformer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 4, 3))
        self.token = nn.Parameter(torch.randn(1, 1, 3))
        self.matrix, self.gamma = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(3))
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 3)
        self.fused = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x @ self.matrix], 1) + self.position
        x = x + self.gamma * self.down(F.relu(self.up(x)))
        left, right = F.linear(x, self.fused[:3]), F.linear(x, self.fused[3:])
        return torch.cat([F.relu(left[:, 0]), right.mean(1)], -1)


class BatchNormNet(nn.Module):
    """Batch norm in training mode: channels before it have a free scale and no leaving edge."""

    def __init__(self, residual: bool = False) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(n, 3, 3, padding=1, bias=False) for n in (2, 3))
        # torch refuses eps = 0 in training; this is nothing beside any variance
        self.norm, self.norm2 = (
            nn.BatchNorm2d(3, eps=1e-30, track_running_stats=False) for _ in range(2)
        )
        self.head, self.residual = nn.Linear(3, 2), residual

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        y = self.norm2(self.second(x))
        return self.head(F.relu(x + y if self.residual else y).mean((2, 3)))


case("batchnorm_conv", (3, 2, 4, 4))(BatchNormNet)
case("batchnorm_residual", (3, 2, 4, 4))(lambda: BatchNormNet(residual=True))

NORMALISED = ("batchnorm_conv", "batchnorm_residual")
"""Cases whose function is not a polynomial in the weights: their paths cannot be enumerated."""
