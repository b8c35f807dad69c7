"""Batch norms folded into what precedes them: the same function, and
only where that is possible.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from zoo.trained import load, params

import pathspace as ps


def trained_norms(model: nn.Module) -> nn.Module:
    """Statistics and weights as training leaves them."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.1, 3.0)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    return model.eval()


class Branches(nn.Module):
    """One norm that can be folded; one whose input goes elsewhere, too; one that
    stands before; one used twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.b, self.nb = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.before, self.c = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.d, self.nd = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.na(self.a(x)))
        y = self.b(x)
        x = self.c(self.before(torch.relu(self.nb(y) + y)))
        return self.nd(self.d(self.nd(self.d(x))))


LAYERS = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), (3, 5)),
    "no affine": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4, affine=False)),
        (3, 2, 7),
    ),
    "grouped": (
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3, groups=2, bias=False), nn.BatchNorm2d(6)),
        (2, 4, 5, 5),
    ),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm2d(6)),
        (2, 4, 5, 5),
    ),
    "several processes": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.SyncBatchNorm(4)),
        (2, 2, 5, 5),
    ),
    "depth": (lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3)), (2, 2, 4, 4, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_folded_layers_are_the_same_function(name: str) -> None:
    make, size = LAYERS[name]
    model, x = trained_norms(make()).double(), torch.randn(size).double()
    before = copy.deepcopy(model.state_dict())
    folded = ps.fold_norms(model, x)
    assert isinstance(folded[1], nn.Identity) and not isinstance(model[1], nn.Identity)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-12, atol=1e-12)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key])


def test_only_norms_that_can_be_folded_are() -> None:
    model, x = trained_norms(Branches()).double(), torch.randn(2, 3, 6, 6).double()
    folded = ps.fold_norms(model, x)
    kept = [
        name
        for name in ("na", "nb", "before", "nd")
        if not isinstance(getattr(folded, name), nn.Identity)
    ]
    assert kept == ["nb", "before", "nd"]
    torch.testing.assert_close(folded(x), model(x))


def test_features_of_tokens_are_no_channels() -> None:
    model = trained_norms(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(7)))
    with pytest.raises(ps.InputError, match="found 1 batch norms, 0 of them in training mode"):
        ps.fold_norms(model, torch.randn(2, 7, 5))
    with pytest.raises(ps.InputError, match="1 of them in training mode"):
        ps.fold_norms(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)))


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", params("efficientnet-lite0"))
def test_a_trained_network_without_norms(name: str) -> None:
    model, (x,), _ = load(name)
    folded = ps.fold_norms(model)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    torch.testing.assert_close(
        folded(x), model(x), rtol=1e-5, atol=1e-5 * float(model(x).abs().max())
    )


def test_other_modules_in_training_mode_stay_as_they_are() -> None:
    """Dropout, or a norm that goes on learning, beside norms that are frozen."""
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4), nn.BatchNorm1d(4)
    model, x = trained_norms(nn.Sequential(*layers)).double(), torch.randn(5, 3).double()
    for number in (2, 4):
        model[number].train()
    before = copy.deepcopy(model.state_dict())
    folded = ps.fold_norms(model, x)
    assert isinstance(folded[1], nn.Identity) and folded[2].training and folded[4].training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(folded.eval()(x), model.eval()(x))


class Reads(nn.Module):
    """Code that looks at its norm, or at the weights before it."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.norm, self.what = nn.Linear(3, 4), nn.BatchNorm1d(4), what

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.first(x)
        if self.what == "weight":
            return self.norm(x), self.first.weight
        if self.what == "size":
            return self.norm(x) * self.norm.num_features
        norm = self.norm
        return nn.functional.batch_norm(
            x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.1, norm.eps
        )


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("weight", ps.InputError, "that nothing else reads"),
        ("size", ps.UnsupportedError, "no attribute 'num_features'"),
        ("statistics", ps.UnsupportedError, "no attribute 'running_mean'"),
    ],
)
def test_code_that_reads_a_norm_is_one_sentence(
    what: str, kind: type[Exception], words: str
) -> None:
    model = trained_norms(Reads(what)).double()
    with pytest.raises(kind, match=words):
        ps.fold_norms(model, torch.randn(5, 3).double())
