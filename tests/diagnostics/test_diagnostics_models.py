"""Every public diagnostic on small networks of every kind, and on models that no other test of the
diagnostics uses, unmodified and in single precision.

A diagnostic gives finite numbers that agree with a slow oracle, or says in one sentence why it
does not apply; the model's tensors, modes, hooks and gradients, the inputs and the random state
are afterwards as they were.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from oracles.diagnosis import CHECKS, Subject, diagnose
from torch import nn
from training_cases import TRAINED
from zoo import load

from pathspace import diagnostics

PLAIN = {"chain": "not a Markov chain"}
NOTHING: dict[str, str] = {}
# model -> the diagnostics that decline it, and a part of the sentence they say
HELD_OUT = {
    **dict.fromkeys(
        ("unet_transpose", "feature_pyramid", "lstm_bidirectional", "cells", "state_space",
         "graph_gat", "tied_autoencoder", "hypernetwork", "locally_connected", "batchnorm_mlp"),
        PLAIN,
    ),
    "capsules": {**PLAIN, "spectra": "not finite", "degeneracy": "not finite"},
    **dict.fromkeys(
        ("torch_transformer", "decoder_swiglu", "experts_soft", "hf_resnet", "hf_regnet",
         "hf_clip", "hf_mamba"),
        NOTHING,
    ),
}  # fmt: skip
# a page takes as long as all the rest
PAGES = ("cells", "tied_autoencoder", "hypernetwork")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small matrices are not work for many."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


CHAINS = ("residual_mlp", "residual_cnn", "parameters_everywhere", "transformer_block")
OTHERS = (
    "mlp_gelu mlp_softmax conv_flatten conv_groups conv_depthwise conv1d_dilated_groups"
    " gated_product rnn_op_2_layers rnn_op_bidirectional tied_transposed batchnorm_conv"
    " frozen_parameter unused_parameter"
).split()


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*CHAINS, *OTHERS])
def test_small_networks(name: str) -> None:
    """In float64, where the oracle is exact."""
    model, args = TRAINED[name]()
    batch = tuple(torch.randn(5, *given.shape[1:]).double() for given in args)
    subject = Subject(model.double().eval(), batch, {})
    for check in CHECKS:
        if check != "page":
            applies, found = diagnose(subject, check)
            assert applies == (check != "chain" or name in CHAINS), found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HELD_OUT)
def test_held_out_models(name: str) -> None:
    model, args, kwargs = load()[name].make("eval")
    if name == "unet_transpose":
        args = (args[0][..., :16, :16],)
    subject = Subject(model, args, kwargs)
    declined = {}
    for check in CHECKS:
        if check != "page" or name in PAGES:
            applies, found = diagnose(subject, check)
            if not applies:
                declined[check] = found
    assert declined.keys() == HELD_OUT[name].keys(), declined
    for check, part in HELD_OUT[name].items():
        assert part in declined[check]


def test_every_public_function_is_among_the_checks() -> None:
    """Functions of a model; records and classes are what these return."""
    text = Path(inspect.getfile(diagnose)).read_text()
    functions = [
        name for name in diagnostics.__all__ if inspect.isfunction(getattr(diagnostics, name))
    ]
    missing = [name for name in functions if f"dx.{name}(" not in text]
    # functions of two reports, what watches a training loop, and what puts the others together
    callbacks = [f"{trainer}_callback" for trainer in ("fabric", "lightning", "transformers")]
    assert missing == ["diagnose", *callbacks, "versus", "watching"]


def test_the_oracle_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is wrong, and a model that is left changed, are found out."""
    subject = Subject(nn.Linear(3, 3), (torch.randn(4, 3),), {})
    assert diagnose(subject, "cost")[0] and diagnose(subject, "gradients")[0]
    cheats = {
        "values": lambda model: model.weight.data.add_(1),
        "hooks": lambda model: model.register_forward_hook(print),
    }
    for what, cheat in cheats.items():
        monkeypatch.setitem(CHECKS, "cost", lambda subject, cheat=cheat: str(cheat(subject.model)))
        with pytest.raises(AssertionError, match=f"changed {what}"):
            diagnose(subject, "cost")
    honest = diagnostics.gradients
    monkeypatch.setattr(diagnostics, "gradients", lambda m, loss, data: honest(m, loss, data[:1]))
    with pytest.raises(AssertionError):
        diagnose(Subject(nn.Linear(3, 3), (torch.randn(4, 3),), {}), "gradients")
