"""Which additions are chain nodes: counted by hand on models people use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from zoo import load

from diagnostics import MarkovChain
from diagnostics.residual import Finder
from pathspace.capture import capture
from pathspace.errors import InputTypeError, UnsupportedError

# name: (identity, shortcut, parallel); the full-size models are captured only, which needs no forward
COUNTS = {
    "resnet50": (12, 4, 0),
    "vit_b_16": (24, 0, 0),
    "convnext_tiny": (18, 0, 0),
    "regnet_x_400mf": (18, 4, 0),
    "resnetv2_bit": (3, 3, 0),
    "mobilenet_v2": (10, 0, 0),
    "swin_v2_small": (8, 0, 0),
    "wavenet": (2, 0, 0),
    "tcn_weight_norm": (0, 2, 0),
    "feature_pyramid": (0, 0, 0),
    "variational": (0, 0, 0),
    "squeezenet1_1": (0, 0, 0),
    "shufflenet_v2_x1_0": (0, 0, 0),
    "unet_transpose": (0, 0, 0),
    "unet_bilinear": (0, 0, 0),
    "highway": (0, 0, 0),
    "lora": (0, 0, 0),
    "state_space": (0, 0, 0),
    "torch_encoder_relu": (4, 0, 0),
    "conformer": (4, 0, 0),
    "hf_bert": (4, 0, 0),
    "hf_t5": (7, 0, 0),
    "hf_bart": (5, 0, 0),
    "hf_gptj": (2, 0, 0),
    "hf_cohere": (2, 0, 2),
    "hf_llama": (4, 0, 0),
    "hf_mamba": (2, 0, 0),
    "hf_albert": (4, 0, 0),
    "hf_swin": (8, 0, 0),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str) -> None:
    model, args, kwargs = load()[name].make("eval")
    found = Finder(capture(model, args, kwargs)).found
    kinds = [residual.kind for residual in found]
    assert tuple(kinds.count(kind) for kind in ("identity", "shortcut", "parallel")) == COUNTS[name]


def test_swin_t_and_gpt2_have_24_nodes() -> None:
    import transformers
    from zoo.attention import Swin

    swin = Swin(12, (2, 2, 6, 2), (3, 6, 12, 24), 2, False).eval()
    assert len(Finder(capture(swin, (torch.randn(1, 3, 64, 64),))).found) == 24
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=24, n_layer=12, n_head=4)
    gpt2 = transformers.GPT2LMHeadModel(config).eval()
    kwargs = {"input_ids": torch.randint(0, 50, (2, 7)), "use_cache": False}
    chain = MarkovChain.trace(gpt2, kwargs=kwargs)
    assert len(chain) == 24
    assert [node.name for node in chain.nodes[:2]] == ["transformer.h.0.attn", "transformer.h.0.mlp"]


def test_train_mode_finds_the_same_nodes() -> None:
    for name in ("resnet18", "efficientnet_b0", "hf_gpt2"):
        chains = []
        for mode in ("train", "eval"):
            model, args, kwargs = load()[name].make(mode)
            before = {key: value.clone() for key, value in model.state_dict().items()}
            chains.append(MarkovChain.trace(model, *args, kwargs=kwargs))
            assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert [n.name for n in chains[0].nodes] == [n.name for n in chains[1].nodes]


def test_sentences() -> None:
    class Joins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, self.f(x)], 1)

    x = torch.ones(2, 3)
    assert "by concatenation (1 times)" in MarkovChain.trace(Joins(), x).sentence()
    vgg = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    chain = MarkovChain.trace(vgg, x)
    assert len(chain) == 0 and chain.sentence().startswith("Sequential is no Markov chain")
    with pytest.raises(InputTypeError):
        MarkovChain.trace("model", x)  # type: ignore[arg-type]


class Odd(nn.Module):
    """Additions of many kinds; only the one named last is a node."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g, self.table = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table
        a, b = self.f(x).chunk(2, -1)
        y = torch.cat([a + self.g(x)[..., :2].tanh(), b], -1)
        y = self.f(y).tanh() + self.g(y).tanh()
        y = y + 0.5 * y.pow(3)
        y = y + y.mean(0, keepdim=True)
        return y + self.g(y)


def test_reasons() -> None:
    chain = MarkovChain.trace(Odd(), torch.randn(3, 4))
    assert [(node.name, node.kind) for node in chain.nodes] == [("g", "identity")]
    reasons = " | ".join(item.reason for item in chain.dismissed)
    for part in ("does not depend on the input", "side by side", "different parts of a split", "unchanged or by",
                 "no learnable map", "broadcast"):  # fmt: skip
        assert part in reasons


def test_additive_unet_is_a_long_skip() -> None:
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Conv2d(2, 2, 2, 2), nn.ConvTranspose2d(2, 2, 2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.up(self.down(x).relu())

    chain = MarkovChain.trace(Long(), torch.randn(1, 2, 8, 8))
    assert len(chain) == 0 and "across resolutions" in chain.dismissed[0].reason


def test_nodes_inside_a_branch_are_named() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.f(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(Inner(), Inner())

        def forward(self, x: Tensor) -> Tensor:
            return x + self.body(x)

    chain = MarkovChain.trace(Outer(), torch.ones(2, 3))
    assert [node.name for node in chain.nodes][:2] == ["body.0.f", "body.1.f"]
    assert chain.nodes[2].encloses == ("body.0.f", "body.1.f")


def test_shared_modules_and_sequence_first_batches() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(4, 2, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x))

    class First(Shared):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.transpose(0, 1)).transpose(0, 1)

    chain = MarkovChain.trace(First().eval(), torch.randn(2, 6, 4))
    assert [node.name for node in chain.nodes][2:] == ["layer.self_attn@2", "layer.linear2@2"]
    assert chain.batch_dims() == (1, 1, 1, 1)


def test_a_model_that_runs_differently_is_refused() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.f(x)
            return x if torch.compiler.is_exporting() else x + self.f(x)

    with pytest.raises(UnsupportedError, match="2 additions"):
        MarkovChain.trace(Fickle(), torch.ones(2, 3))
