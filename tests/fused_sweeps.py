"""Fused sweeps against those of whole tensors: on a GPU, or in Triton's interpreter
(``training/test_optim_fused.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pathspace as ps
from pathspace.training import GaugeFixed
from pathspace.training.experiments.models import ReluRNN

# (copies of recurrent layers have weights apart in memory, which torch says on a GPU)
pytestmark = pytest.mark.filterwarnings("ignore:RNN module weights:UserWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SWEPT: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "norms and running statistics": lambda: (
        nn.Sequential(
            nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 2),
            nn.ReLU(), nn.Flatten(), nn.Linear(27, 2),
        ),
        torch.randn(6, 2, 6, 6),
    ),
    "a recurrent network": lambda: (ReluRNN(3, 4, 2), torch.randn(5, 4, 3)),
}  # fmt: skip


@pytest.mark.parametrize(("name", "norms"), [*zip(SWEPT, ("tensor", "unit"), strict=True)])
def test_a_fused_sweep_is_the_sweep_in_three_launches(name: str, norms: str) -> None:
    torch.manual_seed(0)
    model, x = SWEPT[name]()
    model, x = model.double().to(DEVICE), x.double().to(DEVICE)
    ends = []
    for fused in (True, False):
        twin = copy.deepcopy(model)
        inner = torch.optim.AdamW(twin.parameters(), lr=0.01)
        optimizer = GaugeFixed(inner, ps.trace(twin, x), norms=norms, fused=fused)
        for _ in range(4):
            optimizer.zero_grad()
            twin(x).square().mean().backward()
            optimizer.step()
        state = [
            inner.state[p][key] for p in twin.parameters() for key in ("exp_avg", "exp_avg_sq")
        ]
        ends.append([*twin.parameters(), *twin.buffers(), optimizer.phi, *state])
        if fused:
            assert sum(kernels.launches for kernels in optimizer._kernels) == 3 * 4
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(("name", "norms"), [*zip(SWEPT, ("tensor", "unit"), strict=True)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_fused_sweep_in_other_types_is_the_sweep_but_for_two_roundings(
    name: str, norms: str, kind: torch.dtype
) -> None:
    """Each turn starts from the same weights and moments, so that roundings do not add up."""
    torch.manual_seed(0)
    model, x = SWEPT[name]()
    model, x = model.to(DEVICE, kind), x.to(DEVICE, kind)
    twins = (model, copy.deepcopy(model))
    fused, plain = (
        GaugeFixed(
            torch.optim.AdamW(m.parameters(), lr=0.01), ps.trace(m, x), norms=norms, fused=one
        )
        for m, one in zip(twins, (True, False), strict=True)
    )
    # out of balance, by powers of two, which are exact in every type
    for one, other in zip(*(m.parameters() for m in twins), strict=True):
        with torch.no_grad():
            one.mul_(
                2.0
                ** torch.arange(len(one), device=DEVICE)
                .remainder(3)
                .view(-1, *[1] * (one.dim() - 1))
            )
            other.copy_(one)
    moved = 0.0
    for _ in range(len(fused.sets) + 1):
        twins[1].load_state_dict(twins[0].state_dict())
        plain.load_state_dict(copy.deepcopy(fused.state_dict()))
        for m, optimizer in zip(twins, (fused, plain), strict=True):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
        pairs = [*zip(*(m.state_dict().values() for m in twins), strict=True)]
        for one, other in zip(*(m.parameters() for m in twins), strict=True):
            mine, theirs = (o.optimizers[0].state[p] for o, p in ((fused, one), (plain, other)))
            pairs += [(mine[key], theirs[key]) for key in ("exp_avg", "exp_avg_sq")]
        for one, other in pairs:
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=2 * torch.finfo(kind).eps, atol=1e-30)
        torch.testing.assert_close(fused.phi, plain.phi, rtol=1e-6, atol=1e-6)
        moved = max(moved, float(fused.phi.abs().max()))
    assert moved > 0.1


def test_fused_sweeps_are_refused_where_the_model_returns_to_its_own_gauge() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).to(DEVICE)
    graph = ps.trace(model, torch.ones(1, 2, device=DEVICE))
    with pytest.raises(ps.InputError, match="fused=True with return_to='user'"):
        GaugeFixed(torch.optim.SGD(model.parameters(), lr=0.1), graph, return_to="user", fused=True)
