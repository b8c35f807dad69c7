"""All paths of a network, enumerated by running its own forward pass on sets of
paths instead of numbers.

A path is written as the sorted tuple of the weights it uses (a weight used twice stands in it
twice), a tensor element is the set of all paths that reach it, and arithmetic becomes that of the
semiring of such sets: a sum is a union, a product joins every path of one factor with every path of
the other, a positively homogeneous function of one element changes nothing, a maximum is a union,
and a function that is not homogeneous ends every path that reaches it and starts new ones. Inputs
and non-zero constants hold the empty path, zeros hold none. The forward pass that runs is the
model's own Python code, so time loops, shared weights and reshapes need no description.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MOVEMENT = frozenset(
    "view reshape flatten unflatten permute transpose t squeeze unsqueeze expand expand_as"
    " repeat contiguous chunk split narrow select unbind cat concat stack roll flip movedim"
    " swapaxes new_zeros zeros_like clone detach split_with_sizes tile ravel".split()
)
HOMOGENEOUS = frozenset(
    "relu relu_ leaky_relu leaky_relu_ dropout feature_dropout neg abs to double".split()
)
INHOMOGENEOUS = frozenset(
    "gelu softmax tanh sigmoid silu elu exp log_softmax softplus cos sin".split()
)


class World:
    """The table of path sets: number 0 is the empty set, number 1 holds the empty path alone."""

    def __init__(self) -> None:
        self.sets: list[frozenset[tuple[int, ...]]] = []
        self.numbers: dict[frozenset[tuple[int, ...]], int] = {}
        self.products: dict[tuple[int, int], int] = {}
        self.finished: set[tuple[int, ...]] = set()
        self.intern(frozenset())
        self.intern(frozenset({()}))

    def intern(self, paths: frozenset[tuple[int, ...]]) -> int:
        number = self.numbers.setdefault(paths, len(self.sets))
        if number == len(self.sets):
            self.sets.append(paths)
        return number

    def union(self, numbers: list[int]) -> int:
        return self.intern(frozenset().union(*(self.sets[n] for n in set(numbers))))

    def product(self, a: int, b: int) -> int:
        if (a, b) not in self.products:
            joined = {tuple(sorted(p + q)) for p in self.sets[a] for q in self.sets[b]}
            self.products[a, b] = self.intern(frozenset(joined))
        return self.products[a, b]

    def dot(self, pairs: list[tuple[int, int]]) -> int:
        return self.union([self.product(a, b) for a, b in pairs])

    def finish(self, ids: Tensor) -> None:
        for number in set(ids.flatten().tolist()):
            self.finished |= self.sets[number]


class PathTensor:
    """A tensor whose elements are numbers of path sets; torch functions on it
    run in `ARITHMETIC` below.
    """

    dtype, device, is_cuda, requires_grad = torch.float32, torch.device("cpu"), False, True

    def __init__(self, world: World, ids: Tensor) -> None:
        self.world, self.ids = world, ids

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        world = next(leaf.world for leaf in leaves if isinstance(leaf, PathTensor))
        name = func.__name__.strip("_") if func.__name__.startswith("__") else func.__name__
        return apply(world, name, args, kwargs or {}, func)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("shape", "ndim", "T", "mT"):
            found = getattr(self.ids, name)
            return PathTensor(self.world, found) if isinstance(found, Tensor) else found
        func = getattr(torch.Tensor, name)
        return lambda *args, **kwargs: apply(self.world, name, (self, *args), kwargs, func)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> PathTensor:
        return PathTensor(self.world, self.ids[index])

    def __add__(self, other: Any) -> PathTensor:
        return apply(self.world, "add", (self, other), {}, None)

    def __mul__(self, other: Any) -> PathTensor:
        return apply(self.world, "mul", (self, other), {}, None)

    def __matmul__(self, other: Any) -> PathTensor:
        return apply(self.world, "matmul", (self, other), {}, None)

    def __neg__(self) -> PathTensor:
        return self

    __radd__ = __iadd__ = __sub__ = __rsub__ = __add__
    __rmul__ = __imul__ = __truediv__ = __mul__


def apply(world: World, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], func: Any) -> Any:
    """Run one torch function on path sets."""

    def ids(value: Any) -> Any:
        if isinstance(value, PathTensor):
            return value.ids
        return (value != 0).long() if isinstance(value, Tensor) else value

    args, kwargs = torch.utils._pytree.tree_map(ids, (args, kwargs))
    if name in MOVEMENT:
        result = func(*args, **kwargs)
    elif name in HOMOGENEOUS:
        result = args[0]
    elif name in INHOMOGENEOUS:
        world.finish(args[0])
        result = torch.ones_like(args[0])
    elif name in ARITHMETIC:
        result = ARITHMETIC[name](world, *args, **kwargs)
    else:
        # a case that needs it has to bring it: a wrong path set would make a wrong oracle
        raise LookupError(f"the path oracle has no rule for {name}")
    return torch.utils._pytree.tree_map(
        lambda t: PathTensor(world, t) if isinstance(t, Tensor) else t, result
    )


def tensor_of(numbers: list[int], shape: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.long).reshape(tuple(shape))


def add(world: World, a: Any, b: Any, alpha: Any = 1) -> Tensor:
    a, b = torch.broadcast_tensors(as_ids(a), as_ids(b))
    pairs = zip(a.flatten().tolist(), b.flatten().tolist(), strict=True)
    return tensor_of([world.union([p, q]) for p, q in pairs], a.shape)


def mul(world: World, a: Any, b: Any) -> Tensor:
    a, b = torch.broadcast_tensors(as_ids(a), as_ids(b))
    pairs = zip(a.flatten().tolist(), b.flatten().tolist(), strict=True)
    return tensor_of([world.product(p, q) for p, q in pairs], a.shape)


def as_ids(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(int(value != 0))


def matmul(world: World, a: Tensor, b: Tensor) -> Tensor:
    rows, columns = a.reshape(-1, a.shape[-1]).tolist(), b.mT.tolist()
    numbers = [world.dot(list(zip(row, column, strict=True))) for row in rows for column in columns]
    return tensor_of(numbers, (*a.shape[:-1], b.shape[-1]))


def linear(world: World, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = matmul(world, x, weight.mT)
    return y if bias is None else add(world, y, bias)


def prelu(world: World, x: Tensor, slope: Tensor) -> Tensor:
    shape = [1] * x.ndim
    if slope.numel() > 1:
        shape[1] = slope.numel()
    return add(world, x, mul(world, x, slope.reshape(shape)))


def spread(value: Any, dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value)


def windows(
    x: Tensor, kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any = 1
) -> tuple[list[Tensor], tuple[int, ...]]:
    """The patches `(batch, channels, *kernel)` of `x`, one per output position,
    zeros (no path) outside.
    """
    dims = len(kernel)
    stride, padding, dilation = spread(stride, dims), spread(padding, dims), spread(dilation, dims)
    x = nn.functional.pad(x, [p for size in reversed(padding) for p in (size, size)])
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    counts = tuple((n - r - 1) // s + 1 for n, r, s in zip(x.shape[2:], reach, stride, strict=True))
    patches = []
    for position in itertools.product(*(range(c) for c in counts)):
        cut = (
            slice(p * s, p * s + r + 1, d)
            for p, s, r, d in zip(position, stride, reach, dilation, strict=True)
        )
        patches.append(x[(slice(None), slice(None), *cut)])
    return patches, counts


def conv(
    world: World,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    patches, counts = windows(x, tuple(weight.shape[2:]), stride, padding, dilation)
    out, per_group = weight.shape[0], weight.shape[1]
    y = torch.zeros(x.shape[0], out, len(patches), dtype=torch.long)
    for (p, patch), o, b in itertools.product(enumerate(patches), range(out), range(x.shape[0])):
        first = (o // (out // groups)) * per_group
        inputs = patch[b, first : first + per_group].flatten().tolist()
        y[b, o, p] = world.dot(list(zip(inputs, weight[o].flatten().tolist(), strict=True)))
    y = y.reshape(x.shape[0], out, *counts)
    return y if bias is None else add(world, y, bias.reshape(1, -1, *(1 for _ in counts)))


def pool(dims: int) -> Any:
    def run(
        world: World,
        x: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        *rest: Any,
        **kw: Any,
    ) -> Tensor:
        kernel = spread(kernel_size, dims)
        patches, counts = windows(
            x, kernel, kernel if stride in (None, [], ()) else stride, padding
        )
        numbers = [
            [
                [world.union(patch[b, c].flatten().tolist()) for patch in patches]
                for c in range(x.shape[1])
            ]
            for b in range(x.shape[0])
        ]
        return torch.tensor(numbers, dtype=torch.long).reshape(*x.shape[:2], *counts)

    return run


def adaptive_pool(dims: int) -> Any:
    def run(world: World, x: Tensor, output_size: Any, *rest: Any, **kw: Any) -> Tensor:
        sizes = spread(output_size, dims)
        spans = [
            [(i * n // s, -(-(i + 1) * n // s)) for i in range(s)]
            for n, s in zip(x.shape[2:], sizes, strict=True)
        ]
        cells = [
            reduce(
                world,
                x[(slice(None), slice(None), *(slice(a, b) for a, b in span))],
                range(2, 2 + dims),
            )
            for span in itertools.product(*spans)
        ]
        return torch.stack(cells, -1).reshape(*x.shape[:2], *sizes)

    return run


def reduce(world: World, x: Tensor, dim: Any = None, keepdim: bool = False, **kw: Any) -> Tensor:
    """Union over dimensions: what sum, mean and amax do."""
    dims = (
        range(x.ndim)
        if dim is None
        else [d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)]
    )
    kept = [d for d in range(x.ndim) if d not in dims]
    moved = x.permute(*kept, *dims).reshape(*(x.shape[d] for d in kept), -1)
    numbers = [world.union(row) for row in moved.reshape(-1, moved.shape[-1]).tolist()]
    shape = (
        [1 if d in dims else x.shape[d] for d in range(x.ndim)]
        if keepdim
        else [x.shape[d] for d in kept]
    )
    return tensor_of(numbers, shape)


def maximum(world: World, a: Tensor, b: Tensor) -> Tensor:
    return add(world, a, b)


ARITHMETIC: dict[str, Any] = {
    "add": add,
    "add_": add,
    "radd": add,
    "iadd": add,
    "sub": add,
    "rsub": add,
    "maximum": maximum,
    "mul": mul,
    "rmul": mul,
    "div": mul,
    "truediv": mul,
    "matmul": matmul,
    "rmatmul": lambda world, a, b: matmul(world, b, a),
    "mm": matmul,
    "linear": linear,
    "prelu": prelu,
    "conv1d": conv,
    "conv2d": conv,
    "sum": reduce,
    "mean": reduce,
    "amax": reduce,
    "max_pool1d": pool(1),
    "max_pool2d": pool(2),
    "avg_pool1d": pool(1),
    "avg_pool2d": pool(2),
    "adaptive_avg_pool1d": adaptive_pool(1),
    "adaptive_max_pool1d": adaptive_pool(1),
    "adaptive_avg_pool2d": adaptive_pool(2),
    "adaptive_max_pool2d": adaptive_pool(2),
}


def unrolled_rnn(rnn: nn.RNN, x: Any, state: Any = None) -> tuple[Any, Any]:
    """`nn.RNN` by explicit loops over layers, directions and time steps."""
    inputs = x.transpose(0, 1) if rnn.batch_first else x
    last: list[Any] = []
    for layer in range(rnn.num_layers):
        outputs = []
        for way in ("", "_reverse")[: 2 if rnn.bidirectional else 1]:
            w_x, w_h = (getattr(rnn, f"weight_{kind}_l{layer}{way}") for kind in ("ih", "hh"))
            b_x, b_h = (
                getattr(rnn, f"bias_{kind}_l{layer}{way}") if rnn.bias else None
                for kind in ("ih", "hh")
            )
            h = (
                inputs.new_zeros(inputs.shape[1], rnn.hidden_size)
                if state is None
                else state[len(last)]
            )
            steps: dict[int, Any] = {}
            for t in reversed(range(len(inputs))) if way else range(len(inputs)):
                h = nn.functional.linear(inputs[t], w_x, b_x) + nn.functional.linear(h, w_h, b_h)
                h = h.relu() if rnn.nonlinearity == "relu" else h.tanh()
                steps[t] = h
            outputs.append(torch.stack([steps[t] for t in range(len(inputs))]))
            last.append(h)
        inputs = torch.cat(outputs, -1)
    return inputs.transpose(0, 1) if rnn.batch_first else inputs, torch.stack(last)


@dataclass(frozen=True)
class Enumeration:
    """The distinct counting vectors of all paths of a network.

    `columns[i]` is the (parameter name, flat index) of column i of `matrix`; paths
    without weights are left out.
    """

    columns: list[tuple[str, int]]
    matrix: np.ndarray

    def used(self) -> np.ndarray:
        """Which weights lie on some path."""
        return np.asarray(self.matrix.any(0))


def enumerate_paths(model: nn.Module, *args: Any) -> Enumeration:
    """Enumerate the paths of `model` unrolled on inputs of the shapes of `args`."""
    world, replaced = World(), {}
    columns: list[tuple[str, int]] = []
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        count = parameter.numel()
        ids = tensor_of(
            [world.intern(frozenset({(len(columns) + i,)})) for i in range(count)], parameter.shape
        )
        columns += [(names[id(parameter)], i) for i in range(count)]
        replaced[id(parameter)] = PathTensor(world, ids)
    # the copy keeps the very parameters of the original, so that they can be told by identity
    twin = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    for module in twin.modules():
        for name, held in list(module._parameters.items()):
            if held is not None:
                del module._parameters[name]
                module.__dict__[name] = replaced[id(held)]
        if isinstance(module, nn.RNN):
            module.forward = MethodType(unrolled_rnn, module)  # type: ignore[method-assign]
    inputs = [PathTensor(world, torch.ones(arg.shape, dtype=torch.long)) for arg in args]
    for leaf in torch.utils._pytree.tree_leaves(twin(*inputs)):
        world.finish(leaf.ids)
    paths = sorted(path for path in world.finished if path)
    matrix = np.zeros((len(paths), len(columns)), dtype=np.int64)
    for row, path in enumerate(paths):
        for weight, count in Counter(path).items():
            matrix[row, weight] = count
    return Enumeration(columns, matrix)
