"""A parameter that a reduction adds up has one id a row; units are as with one id a scalar."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import network
from torch import Tensor, nn
from torch.nn import functional as F

import pathspace as ps
from pathspace.inference.parameter_scales import ParameterScales


def rows(weight: Tensor) -> Tensor:
    shape = weight.shape
    return F.batch_norm(weight.reshape(1, shape[0], -1), None, None, training=True).view(shape)


REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": rows,
    "columns": lambda w: w / w.abs().sum(0, keepdim=True),
    "whole": lambda w: w / w.norm(),
    "channels of kernels": lambda w: w / w.abs().sum((0, 2, 3), keepdim=True),
    "turned": lambda w: rows(w.transpose(0, 1)).transpose(0, 1),
    "twice": lambda w: rows(w) + w / w.abs().sum((1, 2, 3), keepdim=True),
    "then a scalar": lambda w: rows(w) * w.abs().sum((2, 3), keepdim=True),
    "scalars first": lambda w: w.square() * rows(w),
    "a part": lambda w: w / w[:2].norm(),
    "halves": lambda w: rows(w.view(4, 1, *w.shape[1:]).flatten(0, 1)),
    "in threes": lambda w: rows(w.reshape(2, -1)).view(w.shape),
}


@pytest.mark.parametrize("name", REDUCED)
def test_units_do_not_depend_on_the_number_of_ids(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(
        lambda net, x: net.second(F.relu(F.conv2d(x, REDUCED[name](net.weight), net.bias))),
        weight=nn.Parameter(torch.randn(4, 3, 3, 3)),
        bias=nn.Parameter(torch.randn(4)),
        second=nn.Conv2d(4, 2, 1),
    )
    x = torch.randn(2, 3, 6, 6)
    quick = ps.trace(model, x)
    monkeypatch.setattr(ParameterScales, "attach_reduced", lambda self, weight, dims: None)
    slow = ps.trace(model, x)
    assert quick.num_units == slow.num_units > 0
    assert [pin.reason for pin in quick.pinned] == [pin.reason for pin in slow.pinned]
    for one, other in zip(quick.blocks, slow.blocks, strict=True):
        for ids, expected in ((one.tail, other.tail), (one.head, other.head)):
            assert torch.equal(ids.expand(one.shape), expected.expand(one.shape)), one.name
