"""Models that are moved into a smaller type, and gauges that would change the function."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pathspace as ps


def off(a, b):
    """Largest difference over the largest output; infinity if there is no number."""
    a, b = (each.detach().double() for each in (a, b))
    return float((a - b).abs().max() / b.abs().max()) if bool(a.isfinite().all()) else float("inf")


class Stream(nn.Module):
    """One block of a pre-norm language model without biases before the norms."""

    def __init__(self, norm, act=F.gelu):
        super().__init__()
        self.e, self.n, self.n2 = nn.Linear(8, 16), norm(16, eps=1e-6), norm(16, eps=1e-6)
        self.wi, self.wo = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        self.o, self.act = nn.Linear(16, 5), act

    def forward(self, x):
        x = self.e(x)
        x = x + self.wo(self.act(self.wi(self.n(x))))
        return self.o(self.n2(x))


def overflowing(norm):
    torch.manual_seed(0)
    model, x = Stream(norm).eval(), torch.randn(64, 8)
    with torch.no_grad():
        model.wo.weight.mul_(6e5)
    return model, x


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_residual_stream_is_moved_into_float16(norm):
    model, x = overflowing(norm)
    right, byhand = model(x), copy.deepcopy(model)
    with torch.no_grad():
        [p.mul_(2.0**-4) for p in (*byhand.e.parameters(), *byhand.wo.parameters())]
    assert off(byhand.half()(x.half()), right) < 2e-3
    fitted = ps.fit_dtype(model, x)
    assert off(copy.deepcopy(fitted.model).half()(x.half()), right) < 1e-2
    assert fitted.fits and fitted.error < 1e-2


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.n1, self.n2 = (nn.GroupNorm(4, width, eps=1e-6) for _ in range(2))
        self.c1, self.c2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return x + self.c2(F.silu(self.n2(self.c1(F.silu(self.n1(x))))))


class Decoder(nn.Module):
    """Like the decoder of an image VAE: two stages of blocks with grouped norms."""

    def __init__(self, first=1e5, second=1e5, between=1.0, width=16):
        super().__init__()
        self.i, self.a, self.b = nn.Conv2d(4, width, 3, padding=1), Block(width), Block(width)
        self.up = nn.Conv2d(width, width, 3, padding=1)
        self.n, self.o = nn.GroupNorm(4, width, eps=1e-6), nn.Conv2d(width, 3, 3, padding=1)
        with torch.no_grad():
            for conv, scale in ((self.a.c2, first), (self.b.c2, second), (self.up, between)):
                conv.weight.mul_(scale), conv.bias.mul_(scale)

    def forward(self, z):
        return self.o(F.silu(self.n(self.b(self.up(self.a(self.i(z)))))))


def byhand(model, power):
    """The decoder with its streams times 2 ** -power, which grouped norms read in the end."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for conv in (twin.i, twin.a.c2, twin.b.c2):
            conv.weight.mul_(2.0**-power), conv.bias.mul_(2.0**-power)
        twin.up.bias.mul_(2.0**-power)
    return twin


@torch.no_grad()
def test_a_decoder_with_grouped_norms_is_moved_into_float16():
    model, x = Decoder().eval(), torch.randn(4, 4, 8, 8)
    right = model(x)
    assert off(copy.deepcopy(model).half()(x.half()), right) == float("inf")
    assert off(byhand(model, 4).half()(x.half()), right) < 5e-3
    fitted = ps.fit_dtype(model, x)
    assert off(copy.deepcopy(fitted.model).half()(x.half()), right) < 2e-2


class UpcastNorm(nn.Module):
    """An RMS norm that computes in float32 in a half model too, as that of T5."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        v = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(v + 1e-6)).to(self.weight.dtype)


class Upcast(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.n, self.o = nn.Linear(8, 16), UpcastNorm(16), nn.Linear(16, 5)

    def forward(self, x):
        return self.o(self.n(self.e(x)))


def large_variance():
    torch.manual_seed(0)
    model, x = Upcast().eval(), torch.randn(64, 8)
    with torch.no_grad():
        [p.mul_(2e3) for p in model.e.parameters()]
    return model, x


@torch.no_grad()
def test_a_variance_computed_in_float32_does_not_count_as_float16():
    model, x = large_variance()
    largest = float(model.e(x).abs().max())
    assert 4 * largest < 65504 < 4 * float(model.e(x).square().mean(-1).max())
    assert off(copy.deepcopy(model).half()(x.half()), model(x)) < 5e-3
    assert ps.fit_dtype(model, x).fits


@torch.no_grad()
def test_a_stream_of_t5_that_overflows_is_moved():
    """Its feed-forward layers clamp infinities in float16, and give other numbers."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1}
    config = transformers.T5Config(**sizes, num_heads=4, use_cache=False, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    for name, tensor in model.named_parameters():
        if name.endswith("wo.weight"):
            tensor.mul_(3e4)
    tokens = torch.arange(14).reshape(2, 7)
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens[:, :5]}
    fitted = ps.fit_dtype(model, inputs)
    assert not fitted.fitted_before and fitted.fits and fitted.error < 5e-3 < fitted.error_before
    assert off(fitted.model(**inputs).logits, model(**inputs).logits) < 1e-3
