"""Which additions are chain nodes: counted by hand on models people use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import network
from slow_names import slow_names
from torch import Tensor, nn
from zoo import load

from pathspace.capture.capture import capture
from pathspace.diagnostics import MarkovChain
from pathspace.diagnostics.chain.residual import Finder
from pathspace.errors import InputError, InputTypeError, UnsupportedError

# name: (identity, shortcut, parallel); the full-size models are captured
# only, which needs no forward
COUNTS = {
    "resnet50": (12, 4, 0),
    "vit_b_16": (24, 0, 0),
    "resnetv2_bit": (3, 3, 0),
    "mobilenet_v2": (10, 0, 0),
    "swin_v2_small": (8, 0, 0),
    "wavenet": (2, 0, 0),
    "tcn_weight_norm": (0, 2, 0),
    "feature_pyramid": (0, 0, 0),
    "variational": (0, 0, 0),
    "shufflenet_v2_x1_0": (0, 0, 0),
    "unet_transpose": (0, 0, 0),
    "highway": (0, 0, 0),
    "lora": (0, 0, 0),
    "state_space": (0, 0, 0),
    "conformer": (4, 0, 0),
    "hf_bert": (4, 0, 0),
    "hf_t5": (7, 0, 0),
    "hf_cohere": (2, 0, 2),
    "hf_llama": (4, 0, 0),
    "hf_mamba": (2, 0, 0),
}


@pytest.mark.parametrize(
    "name", slow_names(COUNTS, ["swin_v2_small", "vit_b_16", "conformer", "resnet50"])
)
def test_counts(name: str) -> None:
    model, args, kwargs = load()[name].make("eval")
    found = Finder(capture(model, args, kwargs)).found
    kinds = [residual.kind for residual in found]
    assert tuple(kinds.count(kind) for kind in ("identity", "shortcut", "parallel")) == COUNTS[name]


@pytest.mark.slow
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
    names = ["transformer.h.0.attn", "transformer.h.0.mlp"]
    assert [node.name for node in chain.nodes[:2]] == names


def test_sentences() -> None:
    joins = traced(lambda m, x: torch.cat([x, m.f(x)], 1))
    assert joins.sentence().endswith("by concatenation (1 time), and adds none.")
    both = traced(lambda m, x: torch.cat([m.f(x).sigmoid() * x + m.g(x).tanh(), x], 1))
    assert both.sentence().endswith(
        "(1 time), and no addition joins a stream and a branch computed from it."
    )
    assert "of 1 node (" in traced(lambda m, x: x + m.f(x)).sentence()
    vgg = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    chain = MarkovChain.trace(vgg, torch.ones(2, 3))
    assert len(chain) == 0 and chain.sentence().startswith("Sequential is not a Markov chain")
    with pytest.raises(InputTypeError):
        MarkovChain.trace("model", torch.ones(2, 3))  # type: ignore[arg-type]


def written(forward: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """A forward pass of layers, most of them of width 4."""
    f, g, h, k = (nn.Linear(4, 4) for _ in range(4))
    return network(
        forward, f=f, g=g, h=h, k=k, small=nn.Linear(2, 2), table=nn.Parameter(torch.randn(4)),
        up=nn.ConvTranspose2d(3, 3, 2, 2), valid=nn.Conv2d(3, 3, 3),
        down=nn.Conv2d(3, 3, 3, 2, 1), same=nn.Conv2d(3, 3, 3, 1, 1),
    )  # fmt: skip


def traced(forward: Callable[[Any, Tensor], Tensor], x: Tensor | None = None) -> MarkovChain:
    return MarkovChain.trace(written(forward).eval(), torch.randn(3, 4) if x is None else x)


def elman(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    for _ in range(4):
        h = (m.f(h) + m.g(x)).tanh()
    return h


def residual_elman(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    for _ in range(4):
        h = h + m.h((m.f(h) + m.g(x)).tanh())
    return h


def narrowed(m: Any, x: Tensor) -> Tensor:
    h = m.f(x)
    return x + m.h((h + m.k(m.g(x).relu())).tanh())


IMAGE = torch.randn(1, 3, 8, 8)


@pytest.mark.parametrize(
    ("forward", "x", "kinds"),
    [
        # however many linear maps are summed, in whatever order, they are one linear map
        (lambda m, x: m.f(x) + m.g(x) + m.h(x), None, []),
        (lambda m, x: m.f(x) + (m.g(x) + m.h(m.k(x)).chunk(1, 1)[0]), None, []),
        (lambda m, x: m.f(x) + m.g(x) + x, None, ["identity"]),
        (lambda m, x: m.f(x) + m.g(m.h(x).relu()), None, ["shortcut"]),
        # a part of the stream is a stream, unless the branch is made from the other parts alone
        (lambda m, x: x[:, :2] + m.f(m.g(x).relu())[:, :2], None, ["identity"]),
        (lambda m, x: x[:, :, 1:-1, 1:-1] + m.valid(x), IMAGE, ["identity"]),
        (lambda m, x: x[:, :2] + m.small(x[:, 2:]), None, []),
        # an input that is read again at every step is not a stream
        (elman, None, []),
        (residual_elman, None, ["identity"] * 4),
        (narrowed, None, ["shortcut", "identity"]),
        # resolution lost and found again, by whatever operation
        (lambda m, x: x + m.down(x).repeat_interleave(2, 2).repeat_interleave(2, 3), IMAGE, []),
        (lambda m, x: x + m.up(m.down(x).relu()), IMAGE, []),
        (lambda m, x: x + x * m.same(nn.functional.adaptive_avg_pool2d(x, 1)).sigmoid(), IMAGE,
         ["identity"]),
        # 0 + x, the start of Python's sum
        (lambda m, x: sum([x, m.f(m.g(x).relu())]), None, ["identity"]),
        (lambda m, x: x * x + m.f(m.g(x).relu()), None, []),
    ],
)  # fmt: skip
def test_additions_that_look_alike(forward: Any, x: Tensor | None, kinds: list[str]) -> None:
    assert [node.kind for node in traced(forward, x).nodes] == kinds


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda m, x: torch.addmm(x, m.f(x).relu(), m.g.weight), "fused product"),
        (lambda m, x: torch.stack([x, m.f(x).relu()]).sum(0), "stacked values"),
        (lambda m, x: torch.stack([x, m.f(x).relu()]).mean(0), "stacked values"),
    ],
)
def test_sums_made_by_one_operation_are_listed(forward: Any, reason: str) -> None:
    chain = traced(forward)
    assert len(chain) == 0 and [reason in item.reason for item in chain.dismissed] == [True]


def odd(m: Any, x: Tensor) -> Tensor:
    """Additions of many kinds; only the last one is a node."""
    x = x + m.table
    a, b = m.f(x).chunk(2, -1)
    y = torch.cat([a + m.g(torch.cat([b, b], -1))[..., :2].tanh(), b], -1)
    y = m.f(y).tanh() + m.g(y).tanh()
    y = y + 0.5 * y.pow(3)
    y = y + y.mean(0, keepdim=True)
    return y + m.g(y)


def test_reasons() -> None:
    chain = traced(odd)
    assert [(node.name, node.kind) for node in chain.nodes] == [("g", "identity")]
    reasons = " | ".join(item.reason for item in chain.dismissed)
    for part in ("does not depend on the input", "side by side", "different parts of a split",
                 "unchanged or by", "no learnable map", "broadcast"):  # fmt: skip
        assert part in reasons


def adding(**branch: nn.Module) -> nn.Module:
    """A branch, which has a name, added to its input."""
    ((name, module),) = branch.items()
    return network(lambda net, x: x + getattr(net, name)(x), **{name: module})


@pytest.mark.parametrize("size", [3, 16])
def test_a_margin_around_a_small_image_is_no_resolution(size: int) -> None:
    branch = nn.Sequential(nn.ReflectionPad2d(2), nn.Conv2d(2, 2, 5), nn.ReLU())
    chain = MarkovChain.trace(adding(branch=branch), torch.randn(1, 2, size, size))
    assert [node.name for node in chain.nodes] == ["branch"]


def test_nodes_inside_a_branch_are_named() -> None:
    inner = nn.Sequential(*(adding(f=nn.Linear(3, 3)) for _ in range(2)))
    chain = MarkovChain.trace(adding(body=inner), torch.ones(2, 3))
    assert [node.name for node in chain.nodes][:2] == ["body.0.f", "body.1.f"]
    assert chain.nodes[2].encloses == ("body.0.f", "body.1.f")


def test_shared_modules_and_sequence_first_batches() -> None:
    shared = network(
        lambda net, x: net.layer(net.layer(x.transpose(0, 1))).transpose(0, 1),
        layer=nn.TransformerEncoderLayer(4, 2, 8),
    )
    chain = MarkovChain.trace(shared.eval(), torch.randn(2, 6, 4))
    assert [node.name for node in chain.nodes][2:] == ["layer.self_attn@2", "layer.linear2@2"]
    assert [place.dim for place in chain.samples()] == [1, 1, 1, 1]


def test_models_without_values_are_refused_in_words() -> None:
    with torch.device("meta"):
        model = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    with pytest.raises(
        InputError, match=r"the Markov chain found 'self_attn.* and others without values"
    ):
        MarkovChain.trace(model, torch.ones(2, 3, 8))


@pytest.mark.slow
def test_a_compiled_model_has_the_chain_of_its_module() -> None:
    def block() -> nn.Module:
        return adding(f=nn.Linear(3, 3))

    model, x = nn.Sequential(block(), block()), torch.randn(2, 3)
    chain = MarkovChain.trace(torch.compile(model), x)
    assert [node.name for node in chain.nodes] == ["0.f", "1.f"]
    chain.observe(nn.functional.mse_loss, x, torch.zeros(2, 3))
    inside = nn.Sequential(block(), torch.compile(block()))
    with pytest.raises(UnsupportedError, match="before its blocks are compiled"):
        MarkovChain.trace(inside, x)


@pytest.mark.slow
def test_train_mode_finds_the_same_nodes() -> None:
    for name in ("resnet18", "efficientnet_b0", "hf_gpt2"):
        chains = []
        for mode in ("train", "eval"):
            model, args, kwargs = load()[name].make(mode)
            before = {key: value.clone() for key, value in model.state_dict().items()}
            chains.append(MarkovChain.trace(model, *args, kwargs=kwargs))
            assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert [n.name for n in chains[0].nodes] == [n.name for n in chains[1].nodes]
