"""Shapes that are known without a kernel are those of the kernel, and what
is refused is left to it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pathspace.capture.on_meta import META, Shapes
from pathspace.capture.result_shapes import result_shape
from pathspace.models.walk import every_module, every_path, every_tensor

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device=META, dtype=dtype)


def outcome(call: Any) -> Any:
    """Shape, type and memory layout of a result, or the class of the error; steps along
    dimensions of size 1 vary.
    """
    try:
        found = call()
    except Exception as error:
        return type(error)
    steps = [step for size, step in zip(found.shape, found.stride(), strict=True) if size != 1]
    return found.shape, found.dtype, steps if found.numel() else None


def check(func: Any, *args: Any) -> bool:
    """Compare with the kernel; say whether the shape was known without it."""
    shapes = Shapes(torch.device("cpu"))
    assert outcome(lambda: shapes.result(func, args, {})) == outcome(lambda: func(*args)), (
        func,
        args,
    )
    return result_shape(func, args) is not None


sizes = st.integers(0, 4)
types = st.sampled_from([torch.float32, torch.float32, torch.float64, torch.int64])


@given(data=st.data())
def test_convolutions(data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 3))
    groups, ins, outs = (data.draw(st.integers(1, 3)) for _ in range(3))
    wrong = data.draw(st.sampled_from([0, 0, 0, 1]))
    x = meta(
        data.draw(sizes), ins * groups + wrong, *(data.draw(st.integers(1, 9)) for _ in range(dims))
    )
    weight = meta(outs * groups, ins, *(data.draw(st.integers(1, 4)) for _ in range(dims)))
    bias = data.draw(st.sampled_from([None, meta(outs * groups), meta(outs * groups + 1)]))
    if len(x) and data.draw(st.booleans()):
        x = x[0]
    elif dims == 2 and data.draw(st.booleans()):
        x = x.contiguous(memory_format=torch.channels_last)
    options = [
        [data.draw(st.integers(low, 3)) for _ in range(data.draw(st.sampled_from([1, dims])))]
        for low in (0, 0, 0)
    ]
    func = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}[dims]
    check(func, *(x, weight, bias, *options, groups)[: data.draw(st.integers(2, 7))])


@given(data=st.data())
def test_other_operations(data: st.DataObject) -> None:
    shape = data.draw(st.lists(sizes, max_size=4))
    x = meta(*shape, dtype=data.draw(types))
    smaller = [
        data.draw(st.sampled_from([1, size, size, 2]))
        for size in shape[data.draw(st.integers(0, 4)) :]
    ]
    y = meta(*smaller, dtype=data.draw(types))
    if data.draw(st.booleans()) and x.dim() > 1:
        x = x.transpose(0, -1)
    for func in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor):
        check(func, *data.draw(st.permutations([x, y])))
    check(
        aten.mean.dim,
        x,
        data.draw(st.lists(st.integers(-3, 3), max_size=2)),
        data.draw(st.booleans()),
    )
    check(
        aten.cat.default,
        [x, *data.draw(st.lists(st.sampled_from([x, y]), max_size=2))],
        data.draw(st.integers(-3, 3)),
    )
    check(aten.linear.default, x, meta(3, data.draw(st.sampled_from([*shape[-1:], 2]))))
    if shape:
        check(aten.layer_norm.default, x, shape[-1:], meta(*shape[-1:]), meta(*smaller[-1:]))
    vectors = [data.draw(st.sampled_from([None, meta(*shape[1:2]), meta(2)])) for _ in range(2)]
    statistics = data.draw(
        st.sampled_from([(None, None), (meta(*shape[1:2]), meta(*shape[1:2])), (None, meta(2))])
    )
    check(
        aten.batch_norm.default,
        x,
        *vectors,
        *statistics,
        data.draw(st.booleans()),
        0.1,
        1e-5,
        False,
    )


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (
            aten.conv2d.default,
            (meta(2, 4, 9, 9), meta(6, 2, 3, 3), meta(6), [2, 1], [1], [2, 2], 2),
        ),
        (aten.linear.default, (meta(2, 5, 3), meta(4, 3), meta(4))),
        (aten.mul.Tensor, (meta(2, 5, 1, 1), meta(2, 5, 3, 3))),
        (aten.cat.default, ([meta(2, 5), meta(2, 1)], -1)),
        (aten.layer_norm.default, (meta(2, 5, 3), [5, 3], meta(5, 3))),
        (aten.mean.dim, (meta(2, 5, 3), [1, -1], True)),
        (
            aten.batch_norm.default,
            (meta(2, 5, 3), None, meta(5), meta(5), meta(5), False, 0.1, 1e-5, False),
        ),
    ],
)
def test_usual_operands_need_no_kernel(func: Any, args: tuple[Any, ...]) -> None:
    assert check(func, *args)
    with torch.autocast("cpu"):
        assert result_shape(func, args) is None


def test_modules_and_tensors_are_those_of_torch() -> None:
    shared = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = nn.ModuleDict(
        {"a": shared, "b": nn.ModuleList([shared, nn.ReLU()]), "c": nn.Linear(2, 2)}
    )
    model["c"].weight = shared[0].weight
    model["empty"] = None  # type: ignore[assignment]
    assert every_module(model) == list(model.modules())
    for repeated in (False, True):
        assert every_path(model, repeated) == list(
            model.named_modules(remove_duplicate=not repeated)
        )
    for kind, named in (("_parameters", model.named_parameters), ("_buffers", model.named_buffers)):
        found = every_tensor(model, kind)  # type: ignore[arg-type]
        expected = dict(named(remove_duplicate=False))
        assert list(found) == list(expected)
        assert all(found[name] is expected[name] for name in found)
