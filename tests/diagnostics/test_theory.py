"""What theory says of the gain of layers, against explicit Jacobians and against
models at initialisation.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.functional import jacobian as explicit
from zoo.attention import VisionTransformer, convnext
from zoo.vision import resnet

from pathspace.diagnostics import signal
from pathspace.diagnostics.signal.theory import is_elementwise

LINEAR = {
    "padded": (nn.Conv2d(2, 3, 3, padding=1), (2, 2, 4, 5)),
    "far": (nn.Conv2d(2, 3, 5, padding=3, stride=2), (1, 2, 5, 6)),
    "same": (nn.Conv2d(2, 2, (3, 4), padding="same"), (1, 2, 4, 5)),
    "circular": (nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), (2, 2, 6)),
    "transposed": (
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        (2, 4, 3, 4),
    ),
    "maximum": (nn.MaxPool2d(3, 2, 1), (2, 2, 6, 5)),
    "mean": (nn.AdaptiveAvgPool2d((2, 3)), (2, 2, 5, 7)),
}
# two taps may meet one entry: the gain is estimated with few samples
ESTIMATED = {
    "circular, short": (nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular"), (2, 2, 2)),
    "reflect": (nn.Conv1d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 2, 7)),
}


@pytest.mark.parametrize("name", LINEAR | ESTIMATED)
def test_borders_are_exact_or_estimated(name: str) -> None:
    layer, shape = (LINEAR | ESTIMATED)[name]
    x = torch.randn(shape).double()
    layer = layer.double()
    (row,) = signal(nn.Sequential(layer), x, names="0", probes=1, jvp=False)
    assert row.expected_gain == pytest.approx(
        float(explicit(layer, x).square().sum()) / x.numel(), rel=1e-9 if name in LINEAR else 0.5
    )


@pytest.mark.parametrize("name", ["group", "instance", "batch", "rms", "channels", "last"])
def test_norms_are_those_of_their_jacobians(name: str) -> None:
    class OverChannels(nn.LayerNorm):
        """As models of images write it."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.movedim(1, -1)).movedim(-1, 1)

    layer: nn.Module = {
        "group": nn.GroupNorm(2, 6, 1e-9), "instance": nn.GroupNorm(6, 6, 1e-9),
        "batch": nn.BatchNorm2d(6, 1e-9),
        "rms": nn.RMSNorm([6, 3, 4], 1e-9), "channels": OverChannels(6, 1e-9),
        "last": nn.LayerNorm(4, 1e-9),
    }[name].double()  # fmt: skip
    nn.init.constant_(layer.weight, 1.7)  # type: ignore[arg-type]
    x = torch.randn(5, 6, 3, 4).double() * 3
    (row,) = signal(nn.Sequential(layer), x, names="0", probes=1, jvp=False)
    assert row.expected_gain == pytest.approx(
        float(explicit(layer, x).square().sum()) / x.numel(), rel=1e-6
    )


def gpt2() -> tuple[nn.Module, torch.Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=100, n_positions=32)
    return GPT2LMHeadModel(config).eval(), torch.randint(0, 100, (4, 16))


def llama() -> tuple[nn.Module, torch.Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=100)
    return LlamaForCausalLM(config).eval(), torch.randint(0, 100, (4, 16))


MODELS = {
    "gpt2": gpt2,
    "llama": llama,
    "resnet": lambda: (resnet("basic", (1, 1, 1, 2)).eval(), torch.randn(2, 3, 64, 64)),
    "resnet in training": lambda: (resnet("basic", (1, 1, 1, 1)), torch.randn(4, 3, 64, 64)),
    "vit": lambda: (VisionTransformer(32, 8, 2, 4, 64, 128, 10).eval(), torch.randn(4, 3, 32, 32)),
    "convnext": lambda: (convnext((16, 32), (1, 2), 10).eval(), torch.randn(4, 3, 32, 32)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_at_initialisation(name: str) -> None:
    model, x = MODELS[name]()
    rows = signal(model, x, probes=8, jvp=False)
    compared = [row for row in rows if row.expected_gain is not None]
    assert len(compared) >= 0.9 * len(rows)
    for row in compared:
        assert row.vjp_gain is not None and row.expected_gain is not None
        # the tokens of one image are not independent; activations of finite
        # networks are not quite normal
        width = 0.35 if row.kind == "MultiheadAttention" else 0.1
        allowed = width * row.expected_gain + 5 * row.vjp_gain.error
        assert abs(row.expected_gain - row.vjp_gain.value) < allowed, row


def test_a_slope_for_each_channel_is_no_single_function() -> None:
    assert is_elementwise(nn.PReLU()) and not is_elementwise(nn.PReLU(2))
