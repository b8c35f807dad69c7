"""Stand-ins start again at each run, whatever a run leaves in them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import pathspace as ps
from pathspace.models.running import evaluate
from pathspace.models.stand_in import stand_in


class Hooked(nn.Module):
    """Installs a hook at its first run and remembers that it did, as transformers do
    to collect hidden states.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "installed", False):
            for layer in (self.first, self.second):
                layer.register_forward_hook(lambda _layer, _args, output: self.seen.append(output))
            self.installed = True
        self.seen.clear()
        self.second(self.first(x).relu())
        first, second = self.seen
        return self.third(second.relu()) + first.sum()


def hooks(model: nn.Module) -> list[int]:
    return [len(module._forward_hooks) for module in model.modules()]


def test_a_hook_that_a_run_installs_is_installed_once() -> None:
    model, x = Hooked(), torch.randn(2, 3)
    twin = stand_in(model, share_tensors=False)
    before = hooks(twin)
    outputs = [evaluate(twin, {}, (x,))[0] for _ in range(3)]
    assert hooks(twin) == before and all(torch.equal(output, outputs[0]) for output in outputs)
    assert torch.equal(outputs[0], model(x))


def test_such_a_model_is_bounded_from_above() -> None:
    certificate = ps.verify(Hooked().double(), torch.randn(4, 3).double(), upper_bound=True)
    assert certificate.holds and certificate.units_at_most == certificate.units
