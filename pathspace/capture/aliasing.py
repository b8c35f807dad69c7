"""Whether a captured graph that writes into tensors can be read as it is: nothing
else may see what it writes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn, strided

from ..models.values import has_values
from .captured import Captured

_UPDATE_STATISTICS = ("batch_norm", "instance_norm")
# In-place operations that the rules read as they are, where nothing else sees what they write. All
# others are functionalised away first.
_HARMLESS_IN_PLACE = frozenset(
    [
        "relu_",
        "leaky_relu_",
        "prelu_",
        "rrelu_",
        "add_",
        "sub_",
        "div_",
        "dropout_",
        "feature_dropout_",
        "silu_",
        "gelu_",
        "elu_",
        "selu_",
        "celu_",
        "mish_",
        "hardtanh_",
        "hardswish_",
        "hardsigmoid_",
        "sigmoid_",
        "tanh_",
        "clamp_",
        "clamp_min_",
        "clamp_max_",
        "relu6_",
        "neg_",
        "mul_",
        "detach_",
        "requires_grad_",
        "exp_",
        "sqrt_",
        "threshold_",
    ]
)
# operations that return views of an operand, or the operand itself, although torch's
# signatures do not say so
_UNTOLD = frozenset(
    [
        "dropout",
        "alpha_dropout",
        "feature_dropout",
        "feature_alpha_dropout",
        "type_as",
        "sum_to_size",
        "conj_physical",
        "atleast_1d",
        "atleast_2d",
        "atleast_3d",
        "unsafe_chunk",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "broadcast_tensors",
        "meshgrid",
        "lift",
    ]
)
# those that do with a single tensor
_UNTOLD_OF_ONE = frozenset(["einsum", "cartesian_prod", "chain_matmul"])


def writes_are_seen(module: fx.GraphModule) -> bool:
    """Whether a graph, or a region in it, writes into memory that is read under another name later.

    Args:
        module: a captured graph.

    Example:
        >>> import torch
        >>> def forward(x):
        ...     y = x + 1
        ...     y[:, 0].sqrt_()
        ...     return y
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> writes_are_seen(make_fx(forward)(torch.ones(2, 2)))
        True
    """
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    first = _first_names(module.graph)
    # the first name of a node's memory -> all its names
    names: dict[fx.Node, list[fx.Node]] = {}
    written: list[fx.Node] = []
    for node in order:
        names.setdefault(first[node], []).append(node)
        name = _name(node)
        if writes(node) and name not in _UPDATE_STATISTICS:
            if name not in _HARMLESS_IN_PLACE or node.target is torch.ops.aten.mul_.Tensor:
                return True
            written.append(node)
    for node in written:
        after = set()
        for other in names[first[node]]:
            # names that follow from the result have seen what was written
            if other is node or _shares_memory_with(other, first) in after:
                after.add(other)
            elif any(order[user] > order[node] for user in other.users):
                return True
    inner = (part for part in module.children() if isinstance(part, fx.GraphModule))
    return any(writes_are_seen(part) or written_placeholders(part.graph) for part in inner)


def _first_names(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For every node the first one that has its memory."""
    first: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = _shares_memory_with(node, first)
        first[node] = node if source is None else first[source]
    return first


def writes(node: fx.Node) -> bool:
    """Whether an operation writes into its operand."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _name(node: fx.Node) -> str:
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "")


def untold(node: fx.Node) -> bool:
    """Whether a node's results may share memory with its operands although its
    signature does not say so.
    """
    name = _name(node)
    return name in _UNTOLD or (name in _UNTOLD_OF_ONE and len(node.all_input_nodes) == 1)


def _shares_memory_with(node: fx.Node, known: Mapping[fx.Node, fx.Node]) -> fx.Node | None:
    """The operand whose memory a node's result may share."""
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    source = node.all_input_nodes[0]
    if node.target is operator.getitem:
        operands, number = source.args[:1], node.args[1]
        if untold(source) and isinstance(operands[0], list | tuple) and isinstance(number, int):
            part: Any = operands[0][number]
            return part if isinstance(part, fx.Node) else None
        # a part of what a view consists of; of other results, a tensor of its own
        return source if known[source] is not source else None
    schema = getattr(node.target, "_schema", None)
    shares = schema is not None and any(result.alias_info is not None for result in schema.returns)
    return source if (shares and source is node.args[0]) or untold(node) else None


def written_placeholders(graph: fx.Graph) -> set[fx.Node]:
    """The placeholders into which a graph writes, themselves or views of them."""
    first = _first_names(graph)
    return {first[node] for node in graph.nodes if writes(node) and first[node].op == "placeholder"}


# elements up to which the places of all are compared
LARGEST = 1 << 22


def memory_of(tensor: Tensor) -> tuple[int, int, bool]:
    """The first byte of a tensor's elements, the byte after the last, and whether the tensor fills
    all memory between them; nothing (``0, 0, True``) for tensors without such memory.

    Example:
        >>> import torch
        >>> start, end, filled = memory_of(torch.zeros(3, 2).T[0])
        >>> end - start, filled
        (20, False)
    """
    if not storage_of(tensor) or not tensor.numel():
        return 0, 0, True
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size(), last + 1 == tensor.numel()


def storage_of(tensor: Tensor) -> int:
    """Where the memory of a tensor and of its views begins; 0 for tensors without such memory."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == strided
    return tensor.untyped_storage().data_ptr() if plain and has_values(tensor) else 0


def read_elsewhere(captured: Captured) -> frozenset[str]:
    """Names of parameters and buffers whose numbers a model reads in another way, too: as a
    constant or buffer in the same memory, or as a number that its code asks for.
    """
    held: dict[int, tuple[Tensor, list[str], bool]] = {}
    for name, tensor in (*captured.parameters.items(), *captured.buffers.items()):
        held.setdefault(id(tensor), (tensor, [], False))[1].append(name)
    for tensor in _read(captured):
        before = held.get(id(tensor), (tensor, [], True))
        held[id(tensor)] = (*before[:2], True)
    found: set[str] = set()
    for group in _sharing(held.values()):
        for one in (entry for entry in group if entry[2]):
            for other in group:
                if other is not one and share(one[0], other[0]):
                    found.update((*one[1], *other[1]))
    for start, end in captured.numbers:
        for tensor, names, _ in held.values():
            first, last, _ = memory_of(tensor)
            if first < end and start < last:
                found.update(names)
    return frozenset(found)


def share(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have an element in the same memory.

    Example:
        >>> import torch
        >>> base = torch.zeros(4, 3)
        >>> share(base[:, :2], base[:, 2:]), share(base[:, :2], base[:, 1:])
        (False, True)
    """
    (start, end, filled), (first, last, full) = memory_of(one), memory_of(other)
    if start >= last or first >= end:
        return False
    same = one.dtype == other.dtype and max(one.numel(), other.numel()) <= LARGEST
    if (filled and full) or not same:
        return True
    sizes = [tensor.element_size() for tensor in (one, other)]
    places = [
        torch.as_tensor(first // size + _offsets(tensor))
        for first, size, tensor in zip((start, first), sizes, (one, other), strict=True)
    ]
    return bool(torch.isin(*places).any())


def _offsets(tensor: Tensor) -> Tensor:
    """Places of a tensor's elements, counted from its first."""
    total = torch.zeros((), dtype=torch.long)
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        total = total.unsqueeze(-1) + torch.arange(size) * step
    return total.reshape(-1)


def _read(captured: Captured) -> Iterator[Tensor]:
    """Constants and buffers that the graph reads."""
    for node in captured.graph.graph.nodes:
        if node.op == "placeholder" and node.users:
            kind, name = captured.sources.get(node.name, ("", ""))
            if kind == "buffer" and name in captured.buffers:
                yield captured.buffers[name]
            elif node.name in captured.constants:
                yield captured.constants[node.name]


def _sharing(
    held: Iterable[tuple[Tensor, list[str], bool]],
) -> Iterator[list[tuple[Tensor, list[str], bool]]]:
    """Groups of tensors whose memory overlaps."""
    spans = sorted(
        ((*memory_of(entry[0])[:2], number, entry) for number, entry in enumerate(held)),
        key=lambda span: span[:3],
    )
    group: list[tuple[Tensor, list[str], bool]] = []
    reached = 0
    for start, end, _, entry in spans:
        if not start:
            continue
        if group and start >= reached:
            yield group
            group = []
        group.append(entry)
        reached = max(reached, end)
    if group:
        yield group
