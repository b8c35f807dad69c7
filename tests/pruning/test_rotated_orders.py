"""Models in another basis, with their heads and hidden units in another order, are recognised."""

from __future__ import annotations

import pytest
import torch
from zoo.entry import load

import pathspace as ps

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ["hf_llama_eager_tied", "hf_gpt2", "hf_qwen3"])
def test_another_basis_and_another_order(name: str) -> None:
    torch.manual_seed(0)
    model, args, kwargs = load()[name].make("eval", small=True)
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    groups = ps.channels(model, *args, kwargs=kwargs)
    spaces = ps.spaces(model, *args, kwargs=kwargs)
    graph = ps.trace(model, *args, kwargs=kwargs)
    orders = {group.name: torch.randperm(len(group)) for group in groups if not group.reason}
    other = ps.rotate_(groups.permute(orders), spaces, "random", seed=3)
    found = ps.compare(model, other, graph, spaces=spaces)
    assert found.same
    assert found.distance < 1e-9 < 1 < found.rescaled
    assert all(torch.equal(found.orders[key].argsort(), own) for key, own in orders.items())
    with torch.no_grad():
        list(other.parameters())[3].mul_(1.05)
    changed = ps.compare(model, other, graph, spaces=spaces)
    assert changed.same is False
    assert changed.differ
