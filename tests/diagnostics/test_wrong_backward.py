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
from pathspace.evidence.bench import Workbench
from pathspace.evidence.invariance import measure_invariance


def _raises(error: Exception) -> Any:
    raise error


BACKWARD: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda grad: grad[:, :1],
    "count": lambda grad: (grad, grad, grad),
    "type": lambda grad: "text",
    "own error": lambda grad: _raises(KeyError("missing")),
    "division": lambda grad: _raises(ZeroDivisionError("by zero")),
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


class Network(nn.Module):
    def __init__(self, back: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.back = nn.Linear(4, 5), nn.Linear(5, 3), back

    def forward(self, x: Tensor) -> Tensor:
        return self.down(Rectifier.apply(self.up(x), self.back))  # type: ignore[no-any-return, no-untyped-call]


LOOKS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "diagnose": lambda model, x: diagnostics.diagnose(model, x, targets=torch.zeros(6, 3)),
    "degeneracy": diagnostics.degeneracy,
    "jacobian": diagnostics.jacobian,
    "gradients": lambda model, x: diagnostics.gradients(
        model, nn.functional.mse_loss, [(x, torch.zeros(6, 3))]
    ),
}


@pytest.mark.parametrize("kind", BACKWARD)
def test_verify_says_that_gradients_do_not_apply(kind: str) -> None:
    certificate = ps.verify(Network(BACKWARD[kind]), torch.randn(6, 4), upper_bound=True)
    assert certificate.holds
    assert certificate.units == 5
    assert "backward pass" in certificate.upper_bound["evidence"]
    assert certificate.units_at_most is None


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("kind", BACKWARD)
def test_diagnostics_say_that_the_backward_pass_fails(kind: str, look: str) -> None:
    with pytest.raises(
        ps.PathspaceError, match=r"Network cannot be differentiated: .*backward pass"
    ) as told:
        LOOKS[look](Network(BACKWARD[kind]), torch.randn(6, 4))
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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "back", [None, lambda grad: grad, lambda grad: -grad, lambda grad: 0 * grad]
)
def test_gradients_of_another_function_refute_nothing_in_float32(
    back: Callable[[Tensor], Tensor] | None, seed: int
) -> None:
    """In a model that computes in float32 alone."""

    def single(net: Any, x: Tensor) -> Tensor:
        h = net.a(x.to(torch.float32)).relu()
        h = h if back is None else Rectifier.apply(h, back)
        return net.c(net.b(h).relu())

    torch.manual_seed(seed)
    model = network(single, a=nn.Linear(4, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 3))
    x = torch.randn(5, 4)
    evidence, _ = measure_invariance(Workbench(ps.trace(model, x), model, ((x,), {}), seed))
    assert evidence["holds"] and evidence["dtype"] == "float32", evidence["evidence"]
