"""Models in another basis, with their heads and hidden units in another order, are recognised."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from zoo.entry import load

import pathspace as ps
from pathspace.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["hf_llama_eager_tied", "hf_gpt2", "hf_qwen3"])
def test_another_basis_and_another_order(name: str) -> None:
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


def test_an_order_that_is_missed_is_not_called_different() -> None:
    model, args, kwargs = load()["hf_llama_eager_tied"].make("eval", small=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    spaces = ps.spaces(model, *args, kwargs=kwargs)
    graph = ps.trace(model, *args, kwargs=kwargs)
    other, size = deepcopy(model), model.config.head_dim
    attention = other.model.layers[0].self_attn
    heads = torch.arange(model.config.num_attention_heads).view(-1, 2).flip(1).reshape(-1, 1)
    order = (heads * size + torch.arange(size)).reshape(-1)
    with torch.no_grad():
        attention.q_proj.weight.copy_(attention.q_proj.weight[order])
        attention.o_proj.weight.copy_(attention.o_proj.weight[:, order])
    # (queries in another order inside of their key; caches are in another basis)
    other = ps.rotate_(other, spaces, "random")
    found = ps.compare(model, other, graph, spaces=spaces)
    assert found.same is not False
    assert found.outputs is not None
    assert found.outputs < 1e-5
    with pytest.raises(InputError, match=r"compare found .* without values"):
        ps.compare(model, other.to("meta"), graph, spaces=spaces)
    with pytest.raises(InputError, match=r"find_rotation found .* without values"):
        ps.find_rotation(model, other, spaces)
