"""Every public diagnostic on models that no other test of the diagnostics uses,
unmodified and in single precision.

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
from zoo import load

from pathspace import diagnostics

PLAIN = {"chain": "not a Markov chain", "attention": "No attention ran"}
ONE_LAYER = {"criticality": "expected at least two places"}
RESHAPED = {"control": "expected equal shapes"}
# model -> the diagnostics that decline it, and a part of the sentence they say
HELD_OUT: dict[str, dict[str, str]] = {
    "unet_transpose": {**PLAIN, "growth": "too large"},
    "feature_pyramid": {**PLAIN, "growth": "too large"},
    "lstm_bidirectional": {**PLAIN, **RESHAPED},
    "cells": {**PLAIN, **RESHAPED},
    "torch_transformer": ONE_LAYER,
    "decoder_swiglu": {},
    "experts_soft": {**ONE_LAYER, "attention": "No attention ran"},
    "state_space": {**PLAIN, **RESHAPED},
    "graph_gat": PLAIN,
    "tied_autoencoder": {**PLAIN, "criticality": "no linear, convolutional or recurrent layer"},
    "hypernetwork": {**PLAIN, **RESHAPED, **ONE_LAYER},
    "capsules": {
        **PLAIN,
        **RESHAPED,
        **ONE_LAYER,
        **dict.fromkeys(("optimizer", "spectra", "degeneracy", "growth"), "not finite"),
    },
    "locally_connected": {**PLAIN, **RESHAPED, **ONE_LAYER},
    "batchnorm_mlp": {**PLAIN, **ONE_LAYER, "growth": "expected Linear"},
    "hf_resnet": {"attention": "No attention ran"},
    "hf_regnet": {"attention": "No attention ran"},
    "hf_clip": {},
    "hf_mamba": {"attention": "No attention ran", "growth": "too large"},
}
# a page takes as long as all the rest
PAGES = ("cells", "tied_autoencoder", "hypernetwork")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small matrices are not work for many."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["batchnorm_mlp", "hf_resnet", "decoder_swiglu"])
def test_in_train_mode(name: str) -> None:
    """Batch statistics and dropout: running statistics and random state stay."""
    subject = Subject(*load()[name].make("train"))
    for check in ("signal", "gradients", "cost", "chain", "tables"):
        diagnose(subject, check)


def test_every_public_function_is_among_the_checks() -> None:
    """Functions of a model; records and classes are what these return."""
    text = Path(inspect.getfile(diagnose)).read_text()
    functions = [
        name for name in diagnostics.__all__ if inspect.isfunction(getattr(diagnostics, name))
    ]
    missing = [name for name in functions if f"dx.{name}(" not in text]
    # a function of two reports, what watches a training loop, and what
    # puts the others together
    elsewhere = [
        "diagnose",
        "fabric_callback",
        "lightning_callback",
        "transformers_callback",
        "versus",
    ]
    assert missing == [*elsewhere, "watching"]


class Cheat(nn.Module):
    """Keeps a tally, which a diagnostic that runs it must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("tally", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.tally.add_(1)


def test_the_oracle_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is wrong, and a model that is left changed, are found out."""
    subject = Subject(Cheat(), (torch.randn(4, 3),), {})
    assert diagnose(subject, "cost")[0]
    monkeypatch.setitem(CHECKS, "cost", lambda subject: str(subject.model(*subject.args)))
    with pytest.raises(AssertionError, match="changed values"):
        diagnose(subject, "cost")
    monkeypatch.setitem(
        CHECKS, "cost", lambda subject: str(subject.model.register_forward_hook(print))
    )
    with pytest.raises(AssertionError, match="changed hooks"):
        diagnose(subject, "cost")
    honest = diagnostics.gradients
    monkeypatch.setattr(
        diagnostics, "gradients", lambda model, loss, batches: honest(model, loss, batches[:1])
    )
    with pytest.raises(AssertionError):
        diagnose(Subject(nn.Linear(3, 3), (torch.randn(4, 3),), {}), "gradients")
