"""Autograd functions with a wrong backward pass, and models that raise: one sentence,
without torch's own words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import network
from torch import Tensor, nn

import pathspace as ps
from pathspace import diagnostics


def _raises(error: Exception) -> Any:
    raise error


BACKWARD: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda grad: grad[:, :1],
    "own error": lambda grad: _raises(KeyError("missing")),
}


class Rectifier(torch.autograd.Function):
    """A rectifier whose backward pass is handed in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, back: Callable[[Tensor], Any]) -> Tensor:
        ctx.back = back
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = ctx.back(grads[0])
        return (*found, None) if isinstance(found, tuple) else (found, None)


def rectified(back: Callable[[Tensor], Any]) -> nn.Module:
    return network(
        lambda net, x: net.down(Rectifier.apply(net.up(x), back)),
        up=nn.Linear(4, 5),
        down=nn.Linear(5, 3),
    )


LOOKS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "diagnose": lambda model, x: diagnostics.diagnose(model, x, targets=torch.zeros(6, 3)),
    "degeneracy": diagnostics.degeneracy,
    "jacobian": diagnostics.jacobian,
    "gradients": lambda model, x: diagnostics.gradients(
        model, nn.functional.mse_loss, [(x, torch.zeros(6, 3))]
    ),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("kind", BACKWARD)
def test_diagnostics_say_that_the_backward_pass_fails(kind: str, look: str) -> None:
    with pytest.raises(
        ps.PathspaceError, match=r"Network cannot be differentiated: .*backward pass"
    ) as told:
        LOOKS[look](rectified(BACKWARD[kind]), torch.randn(6, 4))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "look",
    [ps.trace, ps.verify, diagnostics.degeneracy, diagnostics.diagnose, diagnostics.jacobian],
)
@pytest.mark.parametrize(
    ("model", "given"),
    [
        (network(lambda net, x: {}["missing"], up=nn.Linear(4, 5)), torch.randn(6, 4)),
        (nn.Bilinear(4, 4, 2), torch.randn(6, 4)),
        (nn.Linear(4, 2), (x for x in torch.randn(6, 4))),
        (nn.Linear(4, 2), torch.randn(6, 4).numpy()),
    ],
    ids=["raises", "another signature", "a generator", "a numpy array"],
)
def test_models_that_do_not_run_are_refused_in_a_sentence(
    look: Any, model: nn.Module, given: Any
) -> None:
    with pytest.raises(ps.PathspaceError) as told:
        look(model, given)
    assert type(model).__name__ in str(told.value)
    assert str(told.value).endswith(".")
    assert "\n" not in str(told.value)
