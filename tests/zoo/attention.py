"""Vision models built on attention, token mixing and layer norm."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from cases import network
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import zoo
from zoo.vision import Residual, SqueezeExcite, conv_bn, head, image, inverted


def perceptron(dim: int, inner: int, act: Any = nn.GELU) -> nn.Sequential:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(dim, inner), act(), nn.Linear(inner, dim))


def relative_index(side: int) -> Tensor:
    """The row of a table of relative positions for each pair of places in a square."""
    places = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    coords = torch.stack(places).flatten(1)
    relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + side - 1
    return relative[..., 0] * (2 * side - 1) + relative[..., 1]


class EncoderBlock(nn.Module):
    """Pre-norm transformer block on `nn.MultiheadAttention`, as in torchvision."""

    def __init__(self, dim: int, heads: int, inner: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        up, down = nn.Linear(dim, inner), nn.Linear(inner, dim)
        self.mlp = nn.Sequential(up, nn.GELU(), nn.Dropout(0.0), down)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class VisionTransformer(nn.Module):
    """A vision transformer with a class token; `grid` interpolates its table of positions."""

    def __init__(
        self, size: int, patch: int, depth: int, heads: int, dim: int, inner: int,
        classes: int = 1000, table: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.grid, self.table = size // patch, table
        self.proj = nn.Conv2d(3, dim, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.position = nn.Parameter(torch.randn(1, 1 + (table or self.grid) ** 2, dim) * 0.02)
        self.blocks = nn.Sequential(*(EncoderBlock(dim, heads, inner) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, classes)

    def positions(self) -> Tensor:
        if self.table is None:
            return self.position
        old = self.position[:, 1:].reshape(1, self.table, self.table, -1).permute(0, 3, 1, 2)
        new = F.interpolate(old, size=(self.grid, self.grid), mode="bicubic", align_corners=False)
        return torch.cat([self.position[:, :1], new.permute(0, 2, 3, 1).flatten(1, 2)], 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions()
        return self.head(self.norm(self.blocks(x))[:, 0])


# stream: 1; query-key and value features, two norms per block; the last norm
zoo("vit_b_16", "attention", weights=86_567_656, units=1 + 12 * 4 * 768 + 768)(
    lambda: (VisionTransformer(224, 16, 12, 12, 768, 3072), image(1, 224))
)
zoo("vit_small", "attention", units=1 + 2 * 4 * 48 + 48, fast=True)(
    lambda: (VisionTransformer(32, 8, 2, 3, 48, 96, 10), image(size=32))
)
zoo("vit_interpolated_table", "attention", units=1 + 2 * 4 * 48 + 48, fast=True)(
    lambda: (VisionTransformer(32, 8, 2, 3, 48, 96, 10, table=3), image(size=32))
)


# --- windows


class WindowAttention(nn.Module):
    """Swin's shifted windows with a table of relative positions; `cosine`: its second version."""

    def __init__(self, dim: int, heads: int, window: int, shift: int, cosine: bool = False) -> None:
        super().__init__()
        self.heads, self.window, self.shift, self.cosine = heads, window, shift, cosine
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.register_buffer("index", relative_index(window).flatten())
        if cosine:
            self.scale = nn.Parameter(torch.log(10 * torch.ones(heads, 1, 1)))
            hidden = nn.Linear(2, 16)
            self.cpb = nn.Sequential(hidden, nn.ReLU(True), nn.Linear(16, heads, bias=False))
            steps = torch.arange(-(window - 1), window, dtype=torch.float32)
            table = torch.stack(torch.meshgrid(steps, steps, indexing="ij")).permute(1, 2, 0)
            self.register_buffer("coords", (table.contiguous() / window).unsqueeze(0))
        else:
            self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        window, heads, n = self.window, self.heads, self.window**2
        shift = 0 if self.window >= h else self.shift
        if shift:
            x = torch.roll(x, shifts=(-shift, -shift), dims=(1, 2))
        x = x.view(b, h // window, window, w // window, window, c)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(-1, n, c)
        q, k, v = self.qkv(x).reshape(x.shape[0], n, 3, heads, c // heads).permute(2, 0, 3, 1, 4)
        if self.cosine:
            scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
            scores = scores * torch.clamp(self.scale, max=4.6).exp()
            bias = self.cpb(self.coords).view(-1, heads)[self.index].view(n, n, heads)
            scores = scores + 16 * torch.sigmoid(bias.permute(2, 0, 1)).unsqueeze(0)
        else:
            scores = q * (c // heads) ** -0.5 @ k.transpose(-2, -1)
            bias = self.table[self.index].view(n, n, heads).permute(2, 0, 1)
            scores = scores + bias.contiguous().unsqueeze(0)
        if shift:
            mask = x.new_zeros((h, w))
            parts = slice(0, -window), slice(-window, -shift), slice(-shift, None)
            for count, (rows, columns) in enumerate(product(parts, parts)):
                mask[rows, columns] = count
            mask = mask.view(h // window, window, w // window, window)
            mask = mask.permute(0, 2, 1, 3).reshape(-1, n)
            mask = mask.unsqueeze(1) - mask.unsqueeze(2)
            mask = mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)
            scores = scores.view(b, -1, heads, n, n) + mask.unsqueeze(1).unsqueeze(0)
            scores = scores.view(-1, heads, n, n)
        x = (F.softmax(scores, -1) @ v).transpose(1, 2).reshape(-1, n, c)
        x = self.proj(x).view(b, h // window, w // window, window, window, c)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return torch.roll(x, shifts=(shift, shift), dims=(1, 2)) if shift else x


class SwinBlock(nn.Module):
    """Windows and an MLP, norms before (first version) or after (second version)."""

    def __init__(self, dim: int, heads: int, window: int, shift: int, cosine: bool) -> None:
        super().__init__()
        self.after = cosine
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = WindowAttention(dim, heads, window, shift, cosine)
        self.mlp = perceptron(dim, 4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        if self.after:
            x = x + self.n1(self.attention(x))
            return x + self.n2(self.mlp(x))
        x = x + self.attention(self.n1(x))
        return x + self.mlp(self.n2(x))


class PatchMerging(nn.Module):
    """Four neighbours concatenated, normalised and projected."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * dim), nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        parts = [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]]
        return self.reduction(self.norm(torch.cat(parts, -1)))


class Swin(nn.Module):
    def __init__(
        self, dim: int, depths: Sequence[int], heads: Sequence[int], window: int, cosine: bool
    ) -> None:
        super().__init__()
        self.patch, self.norm0 = nn.Conv2d(3, dim, 4, 4), nn.LayerNorm(dim)
        layers: list[nn.Module] = []
        for stage, (depth, head_count) in enumerate(zip(depths, heads, strict=True)):
            shifts = [i % 2 * (window // 2) for i in range(depth)]
            layers += [SwinBlock(dim, head_count, window, shift, cosine) for shift in shifts]
            if stage < len(depths) - 1:
                layers.append(PatchMerging(dim))
                dim *= 2
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.norm0(self.patch(x).permute(0, 2, 3, 1)))
        return self.head(self.norm(x).mean((1, 2)))


zoo("swin_t", "attention", weights=28_288_354)(
    lambda: (Swin(96, (2, 2, 6, 2), (3, 6, 12, 24), 7, False), image(1, 224))
)
zoo("swin_small", "attention", fast=True)(
    lambda: (Swin(24, (2, 2), (2, 4), 4, False), image(1, 32))
)
zoo("swin_v2_small", "attention", fast=True)(
    lambda: (Swin(24, (2, 2), (2, 4), 4, True), image(1, 32))
)


class RelativeAttention(nn.Module):
    """Attention in MaxViT's blocks and grids, with a two-dimensional bias."""

    def __init__(self, dim: int, heads: int, side: int, grid: bool) -> None:
        super().__init__()
        self.heads, self.side, self.grid = heads, side, grid
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm2, self.mlp = nn.LayerNorm(dim), perceptron(dim, 2 * dim)
        self.bias = nn.Parameter(torch.randn((2 * side - 1) ** 2, heads) * 0.1)
        self.register_buffer("index", relative_index(side))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        side, heads = self.side, self.heads
        if self.grid:
            y = x.reshape(b, c, side, h // side, side, w // side).permute(0, 3, 5, 2, 4, 1)
        else:
            y = x.reshape(b, c, h // side, side, w // side, side).permute(0, 2, 4, 3, 5, 1)
        shape = y.shape
        y = y.reshape(-1, side * side, c)
        parts = self.qkv(self.norm(y)).view(*y.shape[:2], 3, heads, c // heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.bias[self.index.flatten()].view(side**2, side**2, heads).permute(2, 0, 1)
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        y = y + self.out(read.transpose(1, 2).reshape(y.shape))
        y = (y + self.mlp(self.norm2(y))).view(shape)
        y = y.permute(0, 5, 3, 1, 4, 2) if self.grid else y.permute(0, 5, 1, 3, 2, 4)
        return y.reshape(b, c, h, w)


@zoo("maxvit_small", "attention")
def maxvit() -> tuple[Any, ...]:
    body = [inverted(24, 48, 24, 3, 1, nn.GELU, SqueezeExcite(48, 6, nn.SiLU))]
    body += [RelativeAttention(24, 2, 4, False), RelativeAttention(24, 2, 4, True)]
    return nn.Sequential(conv_bn(3, 24, 3, 2, act=nn.GELU), *body, *head(24, 10)), image(size=32)


# --- attention over channels and over class tokens


class CrossCovariance(nn.Module):
    """XCiT: attention between channels of normalised queries and keys, with a temperature."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.temperature = heads, nn.Parameter(torch.ones(heads, 1, 1))
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.gamma = nn.Parameter(torch.full((dim,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        parts = self.qkv(self.norm(x)).reshape(b, n, 3, self.heads, c // self.heads)
        q, k, v = parts.permute(2, 0, 3, 4, 1).unbind(0)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        scores = scores * self.temperature
        y = (scores.softmax(-1) @ v).permute(0, 3, 1, 2).reshape(b, n, c)
        return x + self.gamma * self.proj(y)


class ClassAttention(nn.Module):
    """CaiT: only the class token asks; talking heads mix scores before and after the softmax."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(dim)
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.before = nn.Linear(heads, heads)
        self.after = nn.Linear(heads, heads)
        self.proj = nn.Linear(dim, dim)
        self.gamma = nn.Parameter(torch.full((dim,), 0.1))
        self.token = nn.Parameter(torch.randn(1, 1, dim))

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.expand(x.shape[0], -1, -1)
        y = self.norm(torch.cat([token, x], 1))
        b, n, c = y.shape
        shape = self.heads, c // self.heads
        q = self.q(y[:, 0]).unsqueeze(1).reshape(b, 1, *shape).permute(0, 2, 1, 3)
        k, v = (f(y).reshape(b, n, *shape).permute(0, 2, 1, 3) for f in (self.k, self.v))
        scores = self.before((q * 0.25 @ k.transpose(-2, -1)).permute(0, 2, 3, 1)).softmax(-2)
        y = self.after(scores).permute(0, 3, 1, 2) @ v
        return (token + self.gamma * self.proj(y.transpose(1, 2).reshape(b, 1, c)))[:, 0]


class Patches(nn.Module):
    """Non-overlapping patches as tokens."""

    def __init__(self, dim: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


@zoo("xcit_cait", "attention")
def xcit() -> tuple[Any, ...]:
    body = [CrossCovariance(24, 3), CrossCovariance(24, 3), ClassAttention(24, 3)]
    return nn.Sequential(Patches(24, 8), *body, nn.LayerNorm(24), nn.Linear(24, 10)), image(size=32)


# --- without attention


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int, scale: float = 1e-6) -> None:
        super().__init__()
        self.dw = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.layer_scale = nn.Parameter(torch.full((dim, 1, 1), scale))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(self.dw(x).permute(0, 2, 3, 1)))))
        return x + self.layer_scale * y.permute(0, 3, 1, 2)


def convnext(dims: Sequence[int], depths: Sequence[int], classes: int = 1000) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, dims[0], 4, 4), LayerNorm2d(dims[0], eps=1e-6)]
    for stage, depth in enumerate(depths):
        if stage:
            before = dims[stage - 1]
            layers += [LayerNorm2d(before, eps=1e-6), nn.Conv2d(before, dims[stage], 2, 2)]
        layers += [ConvNeXtBlock(dims[stage]) for _ in range(depth)]
    tail = [nn.AdaptiveAvgPool2d(1), LayerNorm2d(dims[-1], eps=1e-6), nn.Flatten()]
    tail.append(nn.Linear(dims[-1], classes))
    return nn.Sequential(*layers, *tail)


zoo("convnext_tiny", "attention", weights=28_589_128)(
    lambda: (convnext((96, 192, 384, 768), (3, 3, 9, 3)), image())
)
zoo("convnext_small_replica", "attention", fast=True)(
    lambda: (convnext((16, 32), (1, 2), 10), image(size=32))
)


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, dim: int, token_dim: int, channel_dim: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens, self.channels = perceptron(tokens, token_dim), perceptron(dim, channel_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.n2(x))


class Mean(nn.Module):
    """Mean over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def mixer(depth: int, *sizes: int) -> list[nn.Module]:
    """Blocks of these sizes, a norm, and the mean of all tokens."""
    blocks = [MixerBlock(*sizes) for _ in range(depth)]
    return [*blocks, nn.LayerNorm(sizes[1]), Mean()]


@zoo("mixer_s_16", "attention", weights=18_528_264)
def mixer_s_16() -> tuple[Any, ...]:
    layers = [Patches(512, 16), *mixer(8, 196, 512, 256, 2048), nn.Linear(512, 1000)]
    return nn.Sequential(*layers), image(1, 224)


@zoo("mixer_small", "attention", fast=True)
def mixer_small() -> tuple[Any, ...]:
    return nn.Sequential(Patches(24, 8), *mixer(2, 16, 24, 12, 48)), image(size=32)


class Affine(nn.Module):
    """ResMLP's normalisation-free affine map."""

    def __init__(self, dim: int, scale: float = 1.0) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1, 1, dim), scale))
        self.beta = nn.Parameter(torch.zeros(1, 1, dim))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.beta, self.alpha, x)


class ResMLPBlock(nn.Module):
    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.n1, self.n2, self.mix = Affine(dim), Affine(dim), nn.Linear(tokens, tokens)
        self.mlp = perceptron(dim, 4 * dim, nn.ReLU)
        self.s1, self.s2 = nn.Parameter(0.1 * torch.ones(dim)), nn.Parameter(0.1 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.s1 * self.mix(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.s2 * self.mlp(self.n2(x))


@zoo("resmlp", "attention")
def resmlp() -> tuple[Any, ...]:
    body = [Patches(24, 8), ResMLPBlock(16, 24), ResMLPBlock(16, 24), Affine(24), Mean()]
    return nn.Sequential(*body, nn.Linear(24, 10)), image(size=32)


class PoolFormerBlock(nn.Module):
    """Average pooling as the token mixer, group norm, layer scale."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.GroupNorm(1, dim), nn.GroupNorm(1, dim)
        self.s1, self.s2 = (nn.Parameter(1e-2 * torch.ones(dim, 1, 1)) for _ in range(2))
        self.mlp = nn.Sequential(nn.Conv2d(dim, 4 * dim, 1), nn.GELU(), nn.Conv2d(4 * dim, dim, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.n1(x)
        x = x + self.s1 * (F.avg_pool2d(y, 3, 1, 1, count_include_pad=False) - y)
        return x + self.s2 * self.mlp(self.n2(x))


@zoo("poolformer", "attention")
def poolformer() -> tuple[Any, ...]:
    layers = [nn.Conv2d(3, 16, 7, 4, 2), PoolFormerBlock(16)]
    layers += [nn.Conv2d(16, 32, 3, 2, 1), PoolFormerBlock(32)]
    return nn.Sequential(*layers, nn.GroupNorm(1, 32), *head(32, 10)), image(size=32)


@zoo("detr", "attention")
def detr(dim: int = 32) -> tuple[Any, ...]:
    """Convolutional trunk, `nn.Transformer`, learned queries and positions, two heads."""

    def forward(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = net.project(net.trunk(x))
        h, w = y.shape[-2:]
        columns = net.columns[:w].unsqueeze(0).repeat(h, 1, 1)
        rows = net.rows[:h].unsqueeze(1).repeat(1, w, 1)
        position = torch.cat([columns, rows], -1).flatten(0, 1).unsqueeze(1)
        queries = net.queries.unsqueeze(1).expand(-1, x.shape[0], -1)
        y = net.transformer(position + 0.1 * y.flatten(2).permute(2, 0, 1), queries)
        y = y.transpose(0, 1)
        return net.classes(y), net.box(y).sigmoid()

    middle = Residual(conv_bn(16, 16, 3, act=None), act=nn.ReLU())
    parts = {"trunk": nn.Sequential(conv_bn(3, 16, 3, 2), middle, conv_bn(16, 32, 3, 2))}
    parts |= {"project": nn.Conv2d(32, dim, 1)}
    parts |= {"transformer": nn.Transformer(dim, 4, 1, 1, 48, 0.0), "classes": nn.Linear(dim, 7)}
    parts |= {"box": nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 4))}
    queries = nn.Parameter(torch.rand(5, dim))
    rows, columns = (nn.Parameter(torch.rand(20, dim // 2)) for _ in range(2))
    return network(forward, **parts, queries=queries, rows=rows, columns=columns), image(size=32)
