"""Path norms and statistics of path values, in logarithms: finite where the values themselves leave the floats."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from pathspace.basis import BasisPaths
from pathspace.capture import place
from pathspace.errors import InputError, UnsupportedError
from pathspace.log_prefix import log_prefixes, log_suffixes
from pathspace.structure import Structure
from pathspace.two_trees import TwoTrees
from pathspace.without_values import require_values


@dataclass(frozen=True)
class Sum:
    """Non-negative sums over the paths that reach each element: ``values * exp(log)``, the largest value being 1."""

    values: Tensor
    log: float

    @classmethod
    def of(cls, values: Tensor, log: float = 0.0) -> Sum:
        """Bring the largest value to 1."""
        size = float(values.max()) if values.numel() else 0.0
        return cls(values / size, log + math.log(size)) if size > 0 else cls(values, 0.0)

    def at(self, log: float) -> Tensor:
        """The values over ``exp(log)``."""
        return self.values * math.exp(min(self.log - log, 700.0))


def path_norm(graph: Structure, p: float = 1, log: bool = False, batch_dim: int | None = 0) -> float:
    """``(sum over paths |v_path|^p)^(1/p)``, by one forward pass of the network with weights ``|w|^p``.

    Paths are those of the network unrolled on the example input, from every input element and bias to every output
    element; coefficients of means and frozen normalisations count as weights, and a maximum as a sum. Sums are kept
    with a common logarithm, so that depth neither overflows nor vanishes.

    Args:
        graph: a traced reduction graph (its current weights are read).
        p: the exponent, positive.
        log: return the natural logarithm of the norm.
        batch_dim: dimension of the outputs that counts samples, which are all alike; ``None`` if there is none.

    Returns:
        The norm, or its logarithm (``-inf`` where every path vanishes).

    Raises:
        InputError: ``p`` is not positive, or the norm exceeds the largest float and ``log`` was not asked for.
        UnsupportedError: an operation is not positively homogeneous, so that path values have no meaning behind it, or
            it has no rule here.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.ReLU(), torch.nn.Linear(2, 1))
        >>> for parameter in model.parameters():
        ...     _ = torch.nn.init.constant_(parameter, -2.0)
        >>> round(path_norm(ps.trace(model, torch.randn(1, 2))), 9)  # four paths of value 4, and a bias of 2
        18.0

    Reference:
        Neyshabur, Tomioka, Srebro: Norm-based capacity control in neural networks (2015).
    """
    if not p > 0:
        raise InputError(f"path_norm found p={p!r}, expected a positive number.")
    interpreter = _Forward(graph, p)
    with torch.no_grad():
        outputs = interpreter.run(*interpreter.inputs())
    parts = []
    for leaf in pytree.tree_leaves(outputs, is_leaf=lambda value: isinstance(value, Sum)):
        if isinstance(leaf, Sum) or (isinstance(leaf, Tensor) and leaf.is_floating_point()):
            total = interpreter.sums(leaf)
            samples = 1 if batch_dim is None or total.values.dim() == 0 else total.values.shape[batch_dim]
            size = float(total.values.sum()) / samples
            parts.append(math.log(size) + total.log if size > 0 else -math.inf)
    result = float(np.logaddexp.reduce(parts)) / p if parts else -math.inf
    if log:
        return result
    if result > math.log(np.finfo(float).max):
        raise InputError(
            f"The path norm is about 10^{result / math.log(10):.0f}, beyond the largest float; ask for its logarithm "
            "with log=True."
        )
    return math.exp(result) if result > -math.inf else 0.0


_SAME = """
    relu relu_ leaky_relu leaky_relu_ dropout dropout_ feature_dropout alias clone contiguous detach detach_ neg abs to
    _to_copy lift_fresh_copy type_as
""".split()  # noqa: SIM905
_MOVED = """
    view reshape flatten unflatten permute transpose t squeeze unsqueeze expand expand_as repeat chunk split
    split_with_sizes narrow select unbind slice roll flip movedim swapaxes index_select pixel_shuffle view_as
    constant_pad_nd pad zero_pad2d
""".split()  # noqa: SIM905


class _Forward(fx.Interpreter):
    """Run a captured graph on sums over paths; parameters stay as they are until they meet an activation."""

    def __init__(self, graph: Structure, p: float) -> None:
        super().__init__(graph.captured.graph)
        # messages are sentences of this library, without the graph's own names
        self.extra_traceback = False
        self.captured, self.p = graph.captured, p
        self.node: fx.Node | None = None
        self.chosen: set[fx.Node] = set()

    def inputs(self) -> list[Any]:
        """Ones for inputs, the model's own tensors for the rest."""
        values: list[Any] = []
        for node in self.captured.graph.graph.nodes:
            if node.op != "placeholder":
                continue
            kind, name = self.captured.sources.get(node.name, ("input", node.name))
            held: Any = {"parameter": self.captured.parameters, "buffer": self.captured.buffers}.get(kind, {})
            if kind == "constant":
                values.append(self.real(self.captured.constants[node.name]))
            elif name in held:
                values.append(self.real(held[name]))
            else:
                self.chosen.add(node)
                shown = node.meta.get("val")
                if not isinstance(shown, Tensor):
                    values.append(shown)
                elif shown.is_floating_point():
                    values.append(Sum(torch.ones(tuple(shown.shape), dtype=torch.float64), 0.0))
                else:
                    values.append(torch.zeros(tuple(shown.shape), dtype=shown.dtype))
        return values

    @staticmethod
    def real(value: Tensor) -> Tensor:
        """A tensor of the model, in float64."""
        require_values("path_norm", [("a tensor of the model", value)])
        value = value.detach().cpu()
        return value.double() if value.is_floating_point() else value

    def sums(self, value: Any) -> Sum:
        """Any operand as a sum over paths."""
        if isinstance(value, Sum):
            return value
        tensor = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
        return Sum.of(tensor.double().abs() ** self.p)

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        result = super().run_node(n)
        if n.op == "call_function" and any(node in self.chosen for node in n.all_input_nodes):
            self.chosen.add(n)
            if isinstance(result, Tensor) and result.is_floating_point():
                return self.picked(n, result)
        return result

    def picked(self, n: fx.Node, result: Tensor) -> Sum:
        """Rows of a table that whole numbers pick are weights on paths; other maps of whole numbers are none."""
        name = getattr(getattr(n.target, "overloadpacket", None), "__name__", str(n.target))
        if name not in ("embedding", "index", "index_select"):
            self.refuse(name)
        return self.sums(result)

    def refuse(self, name: str) -> NoReturn:
        """Say which operation has no paths, and where it is."""
        module, line = place(self.node) if self.node is not None else ("", "")
        raise UnsupportedError(
            f"path_norm cannot pass '{name}' (module {module or 'at the top'}, {line or 'unknown line'}): it is "
            "not positively homogeneous, or has no rule; norms of the part of the model before it can be taken."
        )

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Operations on parameters alone run as they are, all others by rule."""
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=lambda value: isinstance(value, Sum))
        if not any(isinstance(leaf, Sum) for leaf in leaves) or target is operator.getitem:
            if "dtype" in kwargs and isinstance(kwargs["dtype"], torch.dtype) and kwargs["dtype"].is_floating_point:
                kwargs = {**kwargs, "dtype": torch.float64}
            return super().call_function(target, args, kwargs)
        name = getattr(getattr(target, "overloadpacket", None), "__name__", str(target))
        if name in _SAME:
            return args[0]
        if name in _MOVED:
            # (a view asks for the memory of the captured tensor, which a sum need not have)
            others = [other.values if isinstance(other, Sum) else other for other in args[1:]]
            moved = target(args[0].values.contiguous(), *others, **kwargs)
            log = args[0].log
            return [Sum(part, log) for part in moved] if isinstance(moved, list | tuple) else Sum(moved, log)
        if name not in _RULES:
            self.refuse(name)
        return _RULES[name](self, *args, **kwargs)

    def linear(self, operation: Callable[..., Tensor], x: Any, weight: Any, bias: Any, channel: int) -> Sum:
        """A bilinear map of two sums, and a bias along a channel dimension."""
        one, two = self.sums(x), self.sums(weight)
        result = Sum.of(operation(one.values, two.values), one.log + two.log)
        if bias is None:
            return result
        more = self.sums(bias)
        if channel != -1:
            trailing = (1,) * (result.values.dim() - 1 - channel % result.values.dim())
            more = Sum(more.values.reshape(-1, *trailing), more.log)
        return self.add(result, more)

    def add(self, a: Any, b: Any, alpha: float = 1) -> Sum:
        """Sums add, signs do not matter."""
        one, two = self.sums(a), self.sums(b)
        shift = math.log(abs(alpha)) * self.p if alpha else -math.inf
        present = [s.log + extra for s, extra in ((one, 0.0), (two, shift)) if bool((s.values != 0).any())]
        top = max((log for log in present if log > -math.inf), default=0.0)
        second = two.values * math.exp(max(min(two.log + shift - top, 700.0), -745.0)) if alpha else two.values * 0
        return Sum.of(one.at(top) + second, top)

    def mul(self, a: Any, b: Any) -> Sum:
        """Paths through a product are pairs of paths."""
        one, two = self.sums(a), self.sums(b)
        return Sum.of(one.values * two.values, one.log + two.log)

    def div(self, a: Any, b: Any, **rounding: Any) -> Sum:
        """Division by a constant."""
        if isinstance(b, Sum) or rounding:
            raise UnsupportedError("path_norm cannot pass a division by an activation; it has no paths.")
        return self.mul(a, 1 / b)

    def prelu(self, x: Sum, slope: Any) -> Sum:
        """Paths go through unchanged, or by the slope."""
        slopes = self.sums(slope)
        values = slopes.values
        if values.dim() == 1 and x.values.dim() > 1:
            values = values.reshape(-1, *(1,) * (x.values.dim() - 2))
        return self.add(x, Sum(x.values * values, x.log + slopes.log))

    def join(self, parts: Sequence[Any], dim: int, function: Callable[..., Tensor]) -> Sum:
        """Concatenate at a common logarithm."""
        all_ = [self.sums(part) for part in parts]
        top = max(part.log for part in all_)
        return Sum.of(function([part.at(top) for part in all_], dim), top)

    def mean(self, x: Sum, dim: Any = None, keepdim: bool = False, **_: Any) -> Sum:
        """A mean over n has coefficients 1 / n."""
        total = self.total(x, dim, keepdim)
        count = x.values.numel() / max(1, total.values.numel())
        return Sum.of(total.values / count**self.p, total.log)

    def total(self, x: Sum, dim: Any = None, keepdim: bool = False, **_: Any) -> Sum:
        """A sum; a maximum selects one of the same paths."""
        dims = list(range(x.values.dim())) if dim is None or dim == [] else dim
        return Sum.of(x.values.sum(dims, keepdim=keepdim), x.log)

    def max_pool(self, dims: int, x: Sum, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
                 ceil_mode: bool = False) -> Sum:  # fmt: skip
        """A maximum over a window counts every path into it."""
        if set(_spread(dilation, dims)) != {1}:
            raise UnsupportedError("path_norm cannot pass a dilated max pooling; use an undilated one.")
        size = _spread(kernel, dims)
        pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[dims - 1]
        strides, widths = _spread(stride, dims) if stride else size, _spread(padding, dims)
        more = [0] * dims
        if ceil_mode:
            lengths = zip(x.values.shape[-dims:], size, strides, widths, strict=True)
            more = [_overhang(*numbers) for numbers in lengths]
        # (what a window meets beyond the edge adds nothing)
        pads = [
            n for width, right in zip(reversed(widths), reversed(more), strict=True) for n in (width, width + right)
        ]
        values = pool(F.pad(x.values, pads), size, strides)
        return Sum(values * math.prod(size), x.log)

    def avg_pool(self, dims: int, x: Sum, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
                 count_include_pad: bool = True, divisor_override: int | None = None) -> Sum:  # fmt: skip
        """An average over n has coefficients 1 / n."""
        if self.p != 1 and (not count_include_pad or divisor_override is not None):
            raise UnsupportedError("path_norm with p other than 1 cannot pass an average pooling over unequal windows.")
        summed = self.max_pool(dims, x, kernel, stride, padding, 1, ceil_mode)
        if ceil_mode and count_include_pad and divisor_override is None:
            plain = self.max_pool(dims, x, kernel, stride, padding)
            if plain.values.shape != summed.values.shape:
                raise UnsupportedError(
                    "path_norm cannot pass an average pooling with ceil_mode=True whose windows overhang."
                )
        if not count_include_pad or divisor_override is not None:
            ones = Sum(torch.ones_like(x.values), 0.0)
            held = self.max_pool(dims, ones, kernel, stride, padding, 1, ceil_mode)
            counts = held.values * math.exp(held.log) if divisor_override is None else float(divisor_override)
            return Sum.of(summed.values / counts, summed.log)
        return Sum.of(summed.values / math.prod(_spread(kernel, dims)) ** self.p, summed.log)

    def adaptive(self, dims: int, power: float, x: Sum, size: Any) -> Sum:
        """Adaptive windows of n elements with coefficients ``n^-power``."""
        pool = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[dims - 1]
        values = pool(x.values, size)
        counts = torch.ones((), dtype=torch.float64)
        for d in range(-dims, 0):
            n, k = x.values.shape[d], values.shape[d]
            held = [-(-(i + 1) * n // k) - i * n // k for i in range(k)]
            counts = counts * torch.tensor(held, dtype=torch.float64).reshape(-1, *(1,) * (-d - 1))
        return Sum.of(values * counts ** (1 - power), x.log)

    def batch_norm(self, x: Sum, weight: Any, bias: Any, mean: Any, var: Any, training: bool, _m: float, eps: float,
                   *_: Any) -> Sum:  # fmt: skip
        """A frozen normalisation is an affine map of each channel."""
        if training or mean is None:
            raise UnsupportedError("path_norm cannot pass a normalisation by batch statistics; use model.eval().")
        gain = (weight if weight is not None else torch.ones_like(var)) / (var + eps).sqrt()
        shift = (bias if bias is not None else torch.zeros_like(var)) - gain * mean
        shape = (-1, *(1,) * (x.values.dim() - 2))
        return self.add(self.mul(x, gain.reshape(shape)), shift.reshape(shape))

    def rnn(self, x: Any, state: Any, weights: Sequence[Any], biases: bool, layers: int, _dropout: float, _train: bool,
            both_ways: bool, batch_first: bool) -> tuple[Sum, Sum]:  # fmt: skip
        """A recurrent layer, step by step."""
        value, start = self.sums(x), self.sums(state)
        per, ways = (4 if biases else 2), (2 if both_ways else 1)
        steps = [Sum(part, value.log) for part in value.values.unbind(1 if batch_first else 0)]
        last = []
        for layer in range(layers):
            found: list[list[Sum]] = []
            for way in range(ways):
                number = layer * ways + way
                own = list(weights[number * per : (number + 1) * per])
                enter, stay = (own[2], own[3]) if biases else (None, None)
                hidden, seen = Sum(start.values[number], start.log), []
                for step in reversed(steps) if way else steps:
                    fed = self.linear(F.linear, step, own[0], enter, -1)
                    hidden = self.add(fed, self.linear(F.linear, hidden, own[1], stay, -1))
                    seen.append(hidden)
                last.append(hidden)
                found.append(seen[::-1] if way else seen)
            steps = [self.join(parts, -1, torch.cat) for parts in zip(*found, strict=True)]
        return self.join(steps, 1 if batch_first else 0, torch.stack), self.join(last, 0, torch.stack)


def _spread(value: Any, dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def _overhang(length: int, window: int, stride: int, padding: int) -> int:
    """By how much the last window of a pooling with ``ceil_mode=True`` reaches beyond the padded input."""
    held = length + 2 * padding
    count = -(-(held - window) // stride) + 1
    # a window that would start beyond the input is left out
    count -= (count - 1) * stride >= length + padding
    return max(0, (count - 1) * stride + window - held)


def _conv(dims: int) -> Callable[..., Sum]:
    function = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]

    def rule(run: _Forward, x: Any, weight: Any, bias: Any = None, *rest: Any) -> Sum:
        return run.linear(lambda a, w: function(a, w, None, *rest), x, weight, bias, -dims - 1)

    return rule


_RULES: dict[str, Callable[..., Any]] = {
    "linear": lambda run, x, w, b=None: run.linear(F.linear, x, w, b, -1),
    "addmm": lambda run, b, x, w: run.linear(torch.mm, x, w, b, -1),
    **{name: lambda run, a, b: run.linear(torch.matmul, a, b, None, -1) for name in ("mm", "bmm", "matmul")},
    **{f"conv{d}d": _conv(d) for d in (1, 2, 3)},
    **dict.fromkeys(("add", "add_", "sub", "sub_"), _Forward.add),
    **dict.fromkeys(("mul", "mul_"), _Forward.mul),
    **dict.fromkeys(("div", "div_"), _Forward.div),
    "cat": lambda run, parts, dim=0: run.join(parts, dim, torch.cat),
    "stack": lambda run, parts, dim=0: run.join(parts, dim, torch.stack),
    "prelu": _Forward.prelu,
    "mean": _Forward.mean,
    **dict.fromkeys(("sum", "amax"), _Forward.total),
    **dict.fromkeys(("maximum", "minimum"), _Forward.add),
    **{f"max_pool{d}d": lambda run, *a, d=d, **k: run.max_pool(d, *a, **k) for d in (1, 2, 3)},
    **{f"avg_pool{d}d": lambda run, *a, d=d, **k: run.avg_pool(d, *a, **k) for d in (1, 2, 3)},
    **{f"adaptive_avg_pool{d}d": lambda run, x, s, d=d: run.adaptive(d, run.p, x, s) for d in (1, 2, 3)},
    **{f"adaptive_max_pool{d}d": lambda run, x, s, d=d: (run.adaptive(d, 0, x, s), None) for d in (1, 2, 3)},
    "batch_norm": _Forward.batch_norm,
    "rnn_relu": _Forward.rnn,
}


@dataclass(frozen=True)
class PathStatistics:
    """Statistics of the absolute values of the basis paths, as natural logarithms.

    Attributes:
        count: number of basis paths.
        zeros: how many have the value 0; they are left out of the figures below.
        log_norm: logarithm of the basis-path norm ``(sum |v|^p)^(1/p)``.
        mean, std: of ``log |v|``.
        smallest, median, largest: of ``log |v|``.
        p: the exponent of the norm.
    """

    count: int
    zeros: int
    log_norm: float
    mean: float
    std: float
    smallest: float
    median: float
    largest: float
    p: float

    def to_dict(self) -> dict[str, float]:
        """Everything as plain numbers."""
        return asdict(self)


def path_statistics(skeleton: TwoTrees, p: float = 1) -> PathStatistics:
    """Statistics of the values of all basis paths, ``log |v_P(e)| = log |pre(tail)| + log |w_e| + log |suf(head)|``.

    Args:
        skeleton: the two trees.
        p: exponent of the basis-path norm, positive.

    Returns:
        The statistics.

    Raises:
        InputError: a skeleton weight is zero, or ``p`` is not positive.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.ReLU(), torch.nn.Linear(2, 1))
        >>> for parameter in model.parameters():
        ...     _ = torch.nn.init.constant_(parameter, -2.0)
        >>> statistics = path_statistics(ps.trace(model, torch.randn(1, 2)).skeleton())
        >>> statistics.count, round(statistics.log_norm, 6) == round(math.log(18), 6)
        (5, True)

    Reference:
        Zheng et al.: Capacity control of ReLU neural networks by basis-path norm (2019).
    """
    if not p > 0:
        raise InputError(f"path_statistics found p={p!r}, expected a positive number.")
    logs = np.concatenate([weights + scales for weights, scales in log_factors(skeleton)])
    kept = logs[np.isfinite(logs)]
    if not len(kept):
        nothing = -math.inf
        return PathStatistics(len(logs), len(logs), nothing, nothing, 0.0, nothing, nothing, nothing, p)
    top = float(kept.max())
    return PathStatistics(
        count=len(logs),
        zeros=len(logs) - len(kept),
        log_norm=top + math.log(float(np.exp(p * (kept - top)).sum())) / p,
        mean=float(kept.mean()),
        std=float(kept.std()),
        smallest=float(kept.min()),
        median=float(np.median(kept)),
        largest=top,
        p=p,
    )


def log_factors(skeleton: TwoTrees) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The two factors of every basis path value, ``log |w_e|`` and ``log |pre(tail) suf(head)|``, piece by piece.

    The sum of a pair is the logarithm of a path value; minus twice the second is that of the factor by which a step
    on path values multiplies the learning rate of ``w_e`` (of ``p_k`` itself, whose weight counts as 1).

    Args:
        skeleton: the two trees.

    Yields:
        Pairs of flat arrays: first the ``p_k`` of all chains, then the edges in neither tree, tensor by tensor.

    Raises:
        InputError: a skeleton weight is zero.

    Example:
        >>> import torch, pathspace as ps
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.ReLU(), torch.nn.Linear(2, 1))
        >>> skeleton = ps.trace(model, torch.randn(1, 2)).skeleton()
        >>> sum(len(weights) for weights, scales in log_factors(skeleton)) == len(skeleton.basis())
        True
    """
    graph = skeleton.graph
    prefix, suffix = log_prefixes(skeleton), log_suffixes(skeleton)
    positive = np.flatnonzero((skeleton.chain > 0) & (skeleton.chain_sign > 0))
    # the first unit of every chain stands for it
    first = positive[np.unique(skeleton.chain[positive], return_index=True)[1]]
    yield np.zeros(len(first)), prefix[first] + suffix[first]
    basis = BasisPaths(skeleton)
    for i, block in enumerate(graph.blocks):
        weight = block.values(graph.parameters[block.name].double()).cpu().abs().log()
        tail, head = (
            torch.from_numpy(np.asarray(np.sign(ids.numpy()) * table[ids.abs().numpy()]))
            for ids, table in ((block.tail, prefix), (block.head, suffix))
        )
        free = basis._free(i)
        yield weight.reshape(-1)[free].numpy(), (tail + head).expand(block.shape).reshape(-1)[free].numpy()
