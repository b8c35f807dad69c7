"""What a device needs of a step: nothing to wait for, one graph for a compiler, little memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.measure import held, tensors
from slow_names import slow_names
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from training_pairs import Problem, largest_difference

import pathspace as ps
from pathspace.training import GSGD, GAdam, GaugeFixed, init_skeleton_
from pathspace.training.experiments.models import RecurrentCNN
from pathspace.training.optim.tensors import CACHED

MEMBERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "gsgd": lambda m, s: GSGD(m.named_parameters(), lr=0.01, skeleton=s),
    "momentum": lambda m, s: GSGD(
        m.named_parameters(),
        lr=torch.tensor(0.002),
        momentum=0.9,
        nesterov=True,
        skeleton=s,
        max_multiplier=1.0,
    ),
    "decay": lambda m, s: GSGD(
        m.named_parameters(), lr=0.01, weight_decay=0.1, maximize=True, skeleton=s
    ),
    "gadam": lambda m, s: GAdam(
        m.named_parameters(), lr=torch.tensor(0.01), skeleton=s, foreach=False
    ),
    "bounded": lambda m, s: GAdam(m.named_parameters(), lr=0.01, skeleton=s, max_multiplier=0.5),
    "relative": lambda m, s: GAdam(m.named_parameters(), lr=0.01, skeleton=s, relative=True),
}
WAITS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "_unique2", "masked_select")


class NoWaiting(TorchDispatchMode):
    """Fails where a number would have to come back from the device, as
    in the capture of a graph.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in WAITS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "name",
    slow_names(
        ["rnn_op_2_layers", "residual_cnn", "transformer_block", "gated_product"],
        ["transformer_block"],
    ),
)
@pytest.mark.parametrize("member", MEMBERS)
def test_a_step_never_waits_for_the_device(
    member: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Problem(name, unit=True)
    optimizer = MEMBERS[member](case.model, case.skeleton(case.model))
    # (the start of a run is looked at once; what torch's own step does is torch's affair)
    case.step(case.model, optimizer)
    inner = optimizer._inner_steps

    def torchs_own() -> None:
        with _disable_current_modes():
            inner()

    monkeypatch.setattr(optimizer, "_inner_steps", torchs_own)
    for _ in range(2):
        optimizer.zero_grad()
        case.loss(case.model).backward()
        with NoWaiting():
            optimizer.step()
    with pytest.raises(AssertionError, match="waits"), NoWaiting():
        torch.ones(1).item()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gsgd", "gauge-fixed"])
def test_a_compiler_leaves_steps_of_many_tensors_as_they_are(kind: str) -> None:
    """It would compile the step anew for every set of weights."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(
        *(layer for _ in range(10) for layer in (nn.Linear(6, 6), nn.ReLU())), nn.Linear(6, 2)
    )
    x, twin, frames, hooks = torch.randn(4, 6), copy.deepcopy(model), [], []
    for one in (model, twin):
        graph = ps.trace(one, x)
        if kind == "gsgd":
            skeleton = graph.skeleton()
            init_skeleton_(one, skeleton)
            optimizer: torch.optim.Optimizer = GSGD(one.parameters(), lr=0.01, skeleton=skeleton)
        else:
            optimizer = GaugeFixed(torch.optim.AdamW(one.parameters(), lr=0.01), graph)
        optimizer.register_step_post_hook(lambda *_: hooks.append(1))
        move = (
            optimizer.step
            if one is twin
            else torch.compile(optimizer.step, backend=lambda f, _: frames.append(f) or f)
        )
        for _ in range(3):
            one.zero_grad()
            one(x).square().mean().backward()
            move()
    assert not frames and len(hooks) == 6
    assert largest_difference(model, twin) == 0


class Largest(TorchDispatchMode):
    """Notes the largest memory that any operation asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in tensors([args, kwargs])}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors(result):
            if tensor.untyped_storage().data_ptr() not in known:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "layers of 2,048 units": lambda: (
        nn.Sequential(
            *(part for _ in range(3) for part in (nn.Linear(2048, 2048, bias=False), nn.ReLU()))
        ),
        torch.randn(2, 2048),
    ),
    "recurrent convolutions of 96 channels": lambda: (
        RecurrentCNN(3, 96, 10),
        torch.randn(2, 3, 8, 8),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_memory_is_small_beside_the_weights(name: str) -> None:
    """Some vectors of one entry per unit or tap; working memory, gone after the step, for small
    tensors, and for a group of rows of a large one.
    """
    torch.manual_seed(0)
    model, x = MODELS[name]()
    skeleton = ps.trace(model, x).skeleton()
    init_skeleton_(model, skeleton)
    optimizer = GSGD(model.named_parameters(), lr=0.0, skeleton=skeleton)
    model(x).sum().backward()
    optimizer.param_groups[0]["lr"] = 1e-9
    with Largest() as largest:
        optimizer.step()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert held(optimizer, skeleton) < (0.02 if weights > 1e7 else 0.06) * weights
    assert not optimizer.state
    assert 0 < largest.bytes < max(0.025 * weights, 8 * CACHED)
