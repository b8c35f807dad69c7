"""Graphs, points, fields, tables, tied and parametrised weights, odd gates."""

from __future__ import annotations

from typing import Any

import torch
from cases import mlp, network
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from zoo.entry import zoo


class Lambda(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


# --- tables and graphs


@zoo("dlrm", "assorted", fast=True)
def dlrm() -> tuple[Any, ...]:
    """Embedding bags, dense features, pairwise dot products, top MLP."""

    def forward(net: Any, dense: Tensor, sparse: Tensor) -> Tensor:
        x = F.relu(net.bottom(dense))
        features = torch.stack([x, *(bag(sparse[:, i]) for i, bag in enumerate(net.bags))], 1)
        products = torch.bmm(features, features.transpose(1, 2))[:, net.rows, net.columns]
        return torch.sigmoid(net.top(torch.cat([x, products], 1)))

    bags = nn.ModuleList(nn.EmbeddingBag(9, 6, mode=mode) for mode in ("sum", "mean", "max"))
    model = network(forward, bags=bags, bottom=mlp(5, 8, 6), top=mlp(6 + 6, 8, 1))
    model.register_buffer("rows", torch.tensor([1, 2, 2, 3, 3, 3]))
    model.register_buffer("columns", torch.tensor([0, 0, 1, 0, 1, 2]))
    return model, torch.randn(4, 5), torch.randint(0, 9, (4, 3, 2))


class GraphNetwork(nn.Module):
    """Message passing: `"gcn"`, `"gin"` (scatter_add), `"gat"` (segment softmax), `"dense"`."""

    def __init__(self, kind: str, dim: int = 6) -> None:
        super().__init__()
        self.kind, self.embed = kind, nn.Linear(4, dim)
        self.w1, self.w2, self.head = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, 3)
        self.eps, self.attend = nn.Parameter(torch.zeros(1)), nn.Linear(2 * dim, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = F.relu(self.embed(x))
        source, target = edges
        for layer in (self.w1, self.w2):
            if self.kind == "dense":
                ones = x.new_ones(source.shape[0])
                adjacency = torch.zeros(x.shape[0], x.shape[0], dtype=x.dtype)
                x = F.relu(layer(adjacency.index_put((target, source), ones) @ x))
                continue
            messages = x[source]
            if self.kind == "gat":
                pairs = torch.cat([messages, x.index_select(0, target)], -1)
                score = F.leaky_relu(self.attend(pairs), 0.2).exp()
                total = torch.zeros(x.shape[0], 1, dtype=x.dtype).index_add(0, target, score)
                messages = messages * (score / total[target])
            if self.kind == "gin":
                index = target.unsqueeze(-1).expand_as(messages)
                gathered = torch.zeros_like(x).scatter_add(0, index, messages)
                x = F.relu(layer((1 + self.eps) * x + gathered))
            else:
                x = F.relu(layer(torch.zeros_like(x).index_add(0, target, messages)))
        return self.head(x.sum(0))


RING = torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 2, 0]])
for kind in ("gcn", "gin", "gat", "dense"):
    zoo(f"graph_{kind}", "assorted", fast=kind == "gin")(
        lambda kind=kind: (GraphNetwork(kind), torch.randn(5, 4), RING)  # type: ignore[misc]
    )


@zoo("pointnet", "assorted", fast=True)
def pointnet() -> tuple[Any, ...]:
    """Shared MLP on points, an input transform predicted from the data, maximum over points."""

    def forward(net: Any, x: Tensor) -> Tensor:
        matrix = net.matrix(net.transform(x).max(2).values).view(-1, 3, 3)
        x = torch.bmm(x.transpose(2, 1), matrix + torch.eye(3, dtype=x.dtype)).transpose(2, 1)
        return F.log_softmax(net.head(F.relu(net.body(x)).amax(-1)), -1)

    model = network(
        forward,
        transform=nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU()),
        matrix=nn.Linear(8, 9),
        body=nn.Sequential(nn.Conv1d(3, 12, 1), nn.ReLU(), nn.Conv1d(12, 16, 1)),
        head=mlp(16, 8, 4),
    )
    return model, torch.randn(3, 3, 10)


@zoo("nerf", "assorted", fast=True)
def nerf() -> tuple[Any, ...]:
    """Encoded positions, a skip by concatenation, density and colour."""

    def forward(net: Any, x: Tensor, direction: Tensor) -> Tensor:
        waves = [f(2.0**i * x) for i in range(2) for f in (torch.sin, torch.cos)]
        code = torch.cat([x, *waves], -1)
        y = F.relu(net.first(code))
        y = F.relu(net.second(torch.cat([y, code], -1)))
        colour = torch.sigmoid(net.colour(torch.cat([net.feature(y), direction], -1)))
        return torch.cat([colour, F.relu(net.density(y))], -1)

    model = network(
        forward, first=mlp(15, 12, 12), second=mlp(27, 12, 12), density=nn.Linear(12, 1),
        feature=nn.Linear(12, 12), colour=mlp(15, 8, 3),
    )  # fmt: skip
    return model, torch.randn(6, 3), torch.randn(6, 3)


zoo("siren", "assorted")(
    lambda: (mlp(2, 8, 8, 3, act=lambda: Lambda(torch.sin)), torch.randn(5, 2))
)
zoo("softplus_field", "assorted")(lambda: (mlp(3, 8, 8, 1, act=nn.Softplus), torch.randn(5, 3)))


# --- encoders


@zoo("variational", "assorted")
def variational() -> tuple[Any, ...]:
    """A variational autoencoder: its noise is scaled by an exponential."""

    def forward(net: Any, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = F.relu(net.encoder(x))
        mean, logvar = net.mean(y), net.logvar(y)
        return torch.sigmoid(net.decoder(mean + noise * torch.exp(0.5 * logvar))), mean, logvar

    model = network(
        forward, encoder=nn.Linear(6, 8), mean=nn.Linear(8, 3), logvar=nn.Linear(8, 3),
        decoder=mlp(3, 8, 6),
    )  # fmt: skip
    return model, torch.randn(4, 6), torch.randn(4, 3)


@zoo("tied_autoencoder", "assorted", fast=True)
def tied_autoencoder() -> tuple[Any, ...]:
    """Two layers down, and up again with their transposes."""

    def forward(net: Any, x: Tensor) -> Tensor:
        code = F.relu(F.linear(F.relu(F.linear(x, net.a)), net.b))
        return F.relu(code @ net.b) @ net.a

    a, b = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(3, 8))
    return network(forward, a=a, b=b), torch.randn(4, 6)


@zoo("dual_encoder", "assorted", units=8 + 7 + 2, fast=True)
def dual_encoder() -> tuple[Any, ...]:
    """CLIP: normalised embeddings of two towers, a temperature, a matrix of similarities."""

    def forward(net: Any, x: Tensor, y: Tensor) -> Tensor:
        a, b = net.left(x), F.normalize(net.right(y), dim=-1)
        a = a / a.norm(dim=-1, keepdim=True)
        return net.scale.exp() * a @ b.t()

    scale = nn.Parameter(torch.tensor(1.0))
    model = network(forward, left=mlp(5, 8, 6), right=mlp(4, 7, 6), scale=scale)
    return model, torch.randn(4, 5), torch.randn(4, 4)


@zoo("cosine_head", "assorted", units=8 + 1 + 4, fast=True)
def cosine_head() -> tuple[Any, ...]:
    """ArcFace-like: both the features and the rows of the last matrix are normalised."""
    model = network(
        lambda net, x: F.linear(F.normalize(net.body(x)), F.normalize(net.weight)) * 16,
        body=mlp(5, 8, 6),
        weight=nn.Parameter(torch.randn(4, 6)),
    )
    return model, torch.randn(4, 5)


def pair(function: Any) -> nn.Module:
    """Two towers whose outputs meet in a function."""
    left, right = mlp(5, 8, 6), mlp(5, 7, 6)
    return network(lambda net, x, y: function(net.left(x), net.right(y)), left=left, right=right)


zoo("cosine_similarity", "assorted")(
    lambda: (pair(lambda a, b: F.cosine_similarity(a, b)), torch.randn(4, 5), torch.randn(4, 5))
)
zoo("distances", "assorted")(lambda: (pair(torch.cdist), torch.randn(4, 5), torch.randn(3, 5)))


# --- weights computed from parameters


def parametrised(wrap: Any) -> tuple[Any, ...]:
    first, second = wrap(nn.Linear(5, 8)), wrap(nn.Linear(8, 6))
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(6, 3)), torch.randn(4, 5)


# a normalised row has a free direction; the units it reads have one scale
zoo("weight_norm_mlp", "assorted", units=8 + 1 + 6 + 6, fast=True)(
    lambda: parametrised(parametrizations.weight_norm)
)
# a matrix divided by its spectral norm is free as a whole
zoo("spectral_norm_mlp", "assorted", modes=("eval",))(
    lambda: parametrised(parametrizations.spectral_norm)
)
zoo("orthogonal_mlp", "assorted", modes=("eval",))(
    lambda: parametrised(parametrizations.orthogonal)
)


def old_weight_norm() -> nn.Module:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(
            nn.utils.weight_norm(nn.Conv1d(3, 6, 3, padding=1)), nn.ReLU(),
            nn.utils.weight_norm(nn.ConvTranspose1d(6, 4, 4, 2, 1), dim=1), nn.ReLU(),
            nn.Conv1d(4, 2, 1),
        )  # fmt: skip


zoo("weight_norm_hooks", "assorted", units=6 + 1 + 4 + 4)(
    lambda: (old_weight_norm(), torch.randn(2, 3, 8))
)


class LowRank(nn.Module):
    """LoRA: a frozen matrix and a trained product of two thin ones."""

    def __init__(self, i: int, o: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(i, o)
        self.base.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(rank, i)), nn.Parameter(torch.randn(o, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * (x @ self.down.T @ self.up.T)


zoo("lora", "assorted", units=2 + 8 + 2, fast=True)(
    lambda: (nn.Sequential(LowRank(5, 8), nn.ReLU(), LowRank(8, 3)), torch.randn(4, 5))
)


@zoo("lora_merged", "assorted", units=2 + 8)
def lora_merged() -> tuple[Any, ...]:
    """LoRA with the product merged into the matrix before use."""
    w, a, b = (nn.Parameter(torch.randn(*s)) for s in ((8, 5), (2, 5), (8, 2)))
    model = network(
        lambda net, x: net.head(F.relu(F.linear(x, net.w + net.b @ net.a))),
        w=w, a=a, b=b, head=nn.Linear(8, 3),
    )  # fmt: skip
    return model, torch.randn(4, 5)


@zoo("hypernetwork", "assorted", units=6 + 4)
def hypernetwork() -> tuple[Any, ...]:
    """A small network writes the weights of another."""

    def forward(net: Any, x: Tensor, z: Tensor) -> Tensor:
        weight = net.writer(z).view(-1, 4, 5)
        return net.head(F.relu(torch.bmm(weight, x.unsqueeze(-1)).squeeze(-1)))

    model = network(forward, writer=mlp(3, 6, 4 * 5), head=nn.Linear(4, 2))
    return model, torch.randn(3, 5), torch.randn(3, 3)


@zoo("stylegan_modulated", "assorted", fast=True)
def stylegan_modulated(i: int = 4, o: int = 6) -> tuple[Any, ...]:
    """StyleGAN2: a kernel that a style scales and demodulates, per sample, in one grouped call."""

    def forward(net: Any, z: Tensor) -> Tensor:
        n = z.shape[0]
        weight = net.weight.unsqueeze(0) * net.style(z).view(n, 1, i, 1, 1)
        weight = weight * torch.rsqrt(weight.pow(2).sum([2, 3, 4]) + 1e-8).view(n, o, 1, 1, 1)
        x = net.constant.expand(n, -1, -1, -1).reshape(1, n * i, 4, 4)
        x = F.conv2d(x, weight.view(n * o, i, 3, 3), padding=1, groups=n).view(n, o, 4, 4)
        return net.rgb(F.leaky_relu(x + net.bias.view(1, -1, 1, 1), 0.2))

    weight, style = nn.Parameter(torch.randn(o, i, 3, 3)), nn.Linear(3, i)
    constant, bias = nn.Parameter(torch.randn(1, i, 4, 4)), nn.Parameter(torch.randn(o))
    rest = {"constant": constant, "bias": bias, "rgb": nn.Conv2d(o, 3, 1)}
    return network(forward, weight=weight, style=style, **rest), torch.randn(2, 3)


# --- gates and products


@zoo("highway", "assorted", units=6)
def highway() -> tuple[Any, ...]:
    """`t h + (1 - t) x`."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = F.relu(net.first(x))
        t = torch.sigmoid(net.t(x))
        return net.last(t * F.relu(net.h(x)) + (1 - t) * x)

    first, h, t, last = (nn.Linear(*sizes) for sizes in ((4, 6), (6, 6), (6, 6), (6, 2)))
    return network(forward, first=first, h=h, t=t, last=last), torch.randn(3, 4)


@zoo("film", "assorted", units=6, fast=True)
def film() -> tuple[Any, ...]:
    """Features are scaled and shifted by functions of a condition."""

    def forward(net: Any, x: Tensor, c: Tensor) -> Tensor:
        gamma, beta = net.condition(c).chunk(2, -1)
        return net.last(F.relu((1 + gamma) * net.first(x) + beta))

    first, condition, last = nn.Linear(4, 6), nn.Linear(3, 12), nn.Linear(6, 2)
    model = network(forward, first=first, condition=condition, last=last)
    return model, torch.randn(3, 4), torch.randn(3, 3)


@zoo("bilinear", "assorted", units=5 + 6 + 4, fast=True)
def bilinear() -> tuple[Any, ...]:
    """`nn.Bilinear` between two encodings."""
    model = network(
        lambda net, x, y: net.last(F.relu(net.meet(F.relu(net.a(x)), F.relu(net.b(y))))),
        a=nn.Linear(4, 5), b=nn.Linear(3, 6), meet=nn.Bilinear(5, 6, 4), last=nn.Linear(4, 2),
    )  # fmt: skip
    return model, torch.randn(3, 4), torch.randn(3, 3)


# functions between two layers of eight features -> units, where they are counted
ACTIVATIONS: dict[str, tuple[Any, int | None]] = {
    "maxout": (lambda x: x.view(x.shape[0], -1, 2).amax(-1).repeat_interleave(2, 1), 4),
    "crelu": (lambda x: torch.cat([F.relu(x), F.relu(-x)], -1)[:, ::2], 4),
    "glu": (lambda x: F.glu(x).repeat(1, 2), 4),
    "threshold": (lambda x: F.threshold(x, 0.0, 0.0), 8),
    "threshold_moved": (lambda x: F.threshold(x, 0.1, 0.0), 0),
    "clamp_low": (lambda x: x.clamp(min=0), 8),
    "clamp_both": (lambda x: x.clamp(0, 1), 0),
    "where": (lambda x: torch.where(x > 0, x, 0.1 * x), 8),
    "masked": (lambda x: x * (x > 0), 8),
    "masked_float": (lambda x: x * (x > 0).to(x.dtype), 8),
    "abs": (torch.abs, 8),
    "square": (torch.square, 8),
    "relu2": (lambda x: F.relu(x) ** 2, 8),
    "sqrt": (lambda x: (F.relu(x) + 0.0).sqrt(), None),
    "hardtanh": (F.hardtanh, 0),
    "relu6": (F.relu6, 0),
    "elu": (F.elu, 0),
    "rrelu": (F.rrelu, 8),
    "prelu": (None, 8),
    "sort": (lambda x: x.sort(-1).values, 1),
    "topk": (lambda x: x * 1.0 + x.topk(1, -1).values, 1),
    "median": (lambda x: x + x.median(-1, keepdim=True).values, 1),
    "logsumexp": (lambda x: x + x.logsumexp(-1, keepdim=True), 0),
    "cumsum": (lambda x: x.cumsum(-1), 1),
    "cummax": (lambda x: x.cummax(-1).values, 1),
    "prod": (lambda x: x * x.prod(-1, keepdim=True), 8),
    "std": (lambda x: x / x.std(-1, keepdim=True), 1),
    "var_mean": (
        lambda x: (
            (x - torch.var_mean(x, -1, keepdim=True)[1])
            / torch.var_mean(x, -1, keepdim=True)[0].sqrt()
        ),
        1,
    ),
    "norm": (lambda x: x / x.norm(dim=-1, keepdim=True), 1),
    "norm_p1": (lambda x: F.normalize(x, p=1.0, dim=-1), 1),
    "softmax_gate": (lambda x: x * x.softmax(-1), 0),
    "sign": (lambda x: x.sign() * x, 8),
    "fft": (lambda x: torch.fft.fft(x, dim=-1).real, None),
    "unfold": (lambda x: x.unfold(1, 3, 1).sum(-1).repeat(1, 2)[:, : x.shape[1]], 1),
    "roll_flip": (lambda x: x.roll(1, -1) + x.flip(-1), 5),
    "gather": (
        lambda x: x.gather(1, torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]).expand(x.shape[0], -1)),
        4,
    ),
    "einsum": (
        lambda x: torch.einsum("bi,bi->b", x, x).unsqueeze(-1) + torch.einsum("...i->...i", x),
        0,
    ),
    "outer": (lambda x: torch.einsum("bi,bj->bij", x, x).sum(-1), 1),
    "triu": (lambda x: (x.unsqueeze(-1) * x.unsqueeze(-2)).tril().sum(-1), 1),
    "logit_scale": (lambda x: torch.exp(torch.log(x.abs())), None),
    "dropout": (lambda x: F.dropout(F.alpha_dropout(x, 0.0), 0.5, True), 8),
    "lerp": (lambda x: torch.lerp(x, x.flip(-1), 0.3), 4),
    "hypot": (lambda x: torch.hypot(x, x.flip(-1)), 4),
    "atan2": (lambda x: x * torch.atan2(x, x.flip(-1)), None),
    "softshrink": (lambda x: F.softshrink(x, 0.1), 0),
    "round": (torch.round, 0),
    "view_dtype": (
        lambda x: x.float().to(torch.bfloat16).to(x.dtype) if x.dtype == torch.float32 else x,
        None,
    ),
}


def activated(function: Any) -> nn.Module:
    """Two layers with a function in between."""
    return network(
        lambda net, x: net.second(net.function(net.first(x))),
        first=nn.Linear(5, 8), second=nn.Linear(8, 3), function=function or nn.PReLU(8),
    )  # fmt: skip


for name, (function, units) in ACTIVATIONS.items():
    facts = {} if units is None else {"units": units}
    zoo(f"act_{name}", "activation", fast=True, **facts)(
        lambda function=function: (activated(function), torch.randn(6, 5))  # type: ignore[misc]
    )


@zoo("involution", "assorted", fast=True)
def involution() -> tuple[Any, ...]:
    """A kernel per position, written by the image itself, applied to unfolded patches."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = F.relu(net.first(x))
        b, c, h, w = x.shape
        kernel = net.kernel(x).view(b, 2, 1, 9, h, w)
        patches = F.unfold(x, 3, padding=1).view(b, 2, c // 2, 9, h, w)
        return net.last((kernel * patches).sum(3).view(b, c, h, w))

    first, kernel, last = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 2 * 9, 1), nn.Conv2d(6, 2, 1)
    return network(forward, first=first, kernel=kernel, last=last), torch.randn(2, 3, 5, 5)


@zoo("unfold_fold", "assorted", fast=True)
def unfold_fold() -> tuple[Any, ...]:
    """Patches taken apart, a linear map on them, and put together again."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = F.relu(net.first(x))
        patches = F.relu(net.map(F.unfold(x, 2, stride=2).transpose(1, 2))).transpose(1, 2)
        return net.last(F.fold(patches, x.shape[-2:], 2, stride=2))

    first, map, last = nn.Conv2d(2, 3, 3, padding=1), nn.Linear(12, 12), nn.Conv2d(3, 2, 1)
    return network(forward, first=first, map=map, last=last), torch.randn(2, 2, 6, 6)


@zoo("fourier_operator", "assorted")
def fourier_operator() -> tuple[Any, ...]:
    """FNO: complex weights on the lowest frequencies."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.lift(x).transpose(1, 2)
        low = torch.fft.rfft(x)[..., :3]
        mixed = torch.einsum("bix,iox->box", low, torch.view_as_complex(net.spectral))
        y = torch.fft.irfft(mixed, n=x.shape[-1])
        return net.last(F.relu(y + net.local(x)).transpose(1, 2))

    lift, local, last = nn.Linear(2, 4), nn.Conv1d(4, 4, 1), nn.Linear(4, 1)
    spectral = nn.Parameter(torch.randn(4, 4, 3, 2))
    model = network(forward, lift=lift, local=local, last=last, spectral=spectral)
    return model, torch.randn(2, 8, 2)


def squash(x: Tensor) -> Tensor:
    size = (x**2).sum(-1, keepdim=True)
    return size / (1 + size) * x / size.sqrt()


@zoo("capsules", "assorted")
def capsules() -> tuple[Any, ...]:
    """Squashed capsules with two rounds of routing."""

    def forward(net: Any, x: Tensor) -> Tensor:
        u = squash(F.relu(net.conv(x)).view(x.shape[0], -1, 4))
        votes = torch.einsum("bid,kide->bkie", u, net.weight)
        logits = torch.zeros(votes.shape[:3], dtype=x.dtype)
        for _ in range(2):
            y = squash((logits.softmax(1).unsqueeze(-1) * votes).sum(2))
            logits = logits + (votes * y.unsqueeze(2)).sum(-1)
        return y.norm(dim=-1)

    conv, weight = nn.Conv2d(1, 8, 3), nn.Parameter(torch.randn(3, 18, 4, 4) * 0.3)
    return network(forward, conv=conv, weight=weight), torch.randn(2, 1, 5, 5)


@zoo("deep_and_cross", "assorted")
def deep_and_cross() -> tuple[Any, ...]:
    """Deep & cross: `x0 (w . x) + b + x`, next to a deep tower."""

    def forward(net: Any, dense: Tensor, sparse: Tensor) -> Tensor:
        x0 = torch.cat([dense, *(table(sparse[:, i]) for i, table in enumerate(net.tables))], -1)
        x = x0
        for w, b in zip(net.w, net.b, strict=True):
            x = x0 * (x @ w).unsqueeze(-1) + b + x
        return net.head(torch.cat([x, F.relu(net.deep(x0))], -1))

    tables = nn.ModuleList(nn.Embedding(7, 3) for _ in range(2))
    w, b = (nn.ParameterList(torch.randn(8) for _ in range(2)) for _ in range(2))
    model = network(forward, tables=tables, w=w, b=b, deep=mlp(8, 6, 4), head=nn.Linear(12, 1))
    return model, torch.randn(4, 2), torch.randint(0, 7, (4, 2))


@zoo("masked_weights", "assorted", units=3)
def masked_weights() -> tuple[Any, ...]:
    """MADE: weights times a constant mask; a masked mean of a padded batch."""

    def forward(net: Any, x: Tensor, keep: Tensor) -> Tensor:
        h = F.relu(F.linear(x, net.first.weight * net.m1, net.first.bias))
        h = (h * keep.unsqueeze(-1)).sum(1) / keep.sum(1, keepdim=True)
        return F.linear(h, net.m2 * net.second.weight, net.second.bias)

    model = network(forward, first=nn.Linear(4, 8), second=nn.Linear(8, 4))
    model.register_buffer("m1", torch.ones(8, 4).tril())
    model.register_buffer("m2", torch.ones(4, 8).tril(-1))
    return model, torch.randn(2, 3, 4), torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])


@zoo("locally_connected", "assorted")
def locally_connected() -> tuple[Any, ...]:
    """A different kernel at every position."""

    def forward(net: Any, x: Tensor) -> Tensor:
        patches = F.unfold(x, 3).transpose(1, 2)
        y = torch.einsum("npk,pok->nop", patches, net.weight) + net.bias
        return net.last(F.relu(y).view(-1, 4, 4, 4))

    weight, bias = nn.Parameter(torch.randn(16, 4, 18)), nn.Parameter(torch.randn(4, 16))
    model = network(forward, weight=weight, bias=bias, last=nn.Conv2d(4, 2, 1))
    return model, torch.randn(2, 2, 6, 6)


zoo("conv3d", "assorted", units=4 + 6)(
    lambda: (
        nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2),
                      nn.ConvTranspose3d(4, 6, 2, 2), nn.ReLU(), nn.Conv3d(6, 1, 1)),
        torch.randn(1, 2, 4, 4, 4),
    )
)  # fmt: skip
zoo("batchnorm_mlp", "assorted", fast=True)(
    lambda: (
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
        torch.randn(6, 4),
    )
)
zoo("local_response_norm", "assorted")(
    lambda: (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.LocalResponseNorm(3),
                           nn.Conv2d(8, 2, 1)), torch.randn(2, 3, 6, 6))
)  # fmt: skip
