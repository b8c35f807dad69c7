"""An independent judge of proof documents: it imports nothing from this library and believes nothing it can compute.

The argument it checks, in time linear in the ids the document lists:

* *Upper bound.* The logarithm of weight ``e`` moves by ``phi(head e) - phi(tail e)`` under a gauge transformation: an
  integer row per edge. Ordered as the tree ``T_in`` says, the rows of its edges are triangular with ``+-1`` on the
  diagonal, so the ``H`` generators are independent; every closed walk is orthogonal to all of them, hence
  ``rank <= m - H``.
* *Lower bound.* Every edge in neither tree occurs in exactly one basis path, once. The edges in both trees are a
  forest, which joins units into chains; each chain away from the root is entered by exactly one edge of ``T_in`` that
  is not in ``T_out``. Without the columns of ``T_out`` the basis is therefore triangular, and its ``m - H`` paths are
  independent.
* *The model.* Given its tensors, shapes are compared and tree weights must not vanish. Given the model and a batch,
  all its parameters must be accounted for, and two things are done to a copy: scalars said to be unused are drawn anew,
  and every weight is rescaled by random combinations of all generators, by powers of two, which floating point carries
  out without rounding; the outputs must stay what they were. This is done for the model as it stands, and again with
  all parameters and running statistics drawn anew and inputs of several sizes, as zeros hide where they are. So the
  outputs depend on at most ``m - H`` independent values of the listed weights. Whether the model has symmetries that
  the document does not list is not tried.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

STATEMENT = (
    "w_e <- w_e exp(phi(head e) - phi(tail e)), phi(root) = 0, acts by as many independent generators as there are "
    "units; the basis paths of the two trees are as many as weights less units, and independent"
)
FIELDS = {
    "format": str,
    "version": int,
    "model": str,
    "statement": str,
    "weights": int,
    "units": int,
    "dimension": int,
    "tensors": list,
    "products": list,
    "statistics": list,
    "pinned": list,
    "unused": list,
    "trees": dict,
    "shared_edges": int,
    "chains": int,
    "basis_paths": int,
    "digest": str,
}


# inputs are multiplied by these, one after the other, with all weights drawn anew each time
SIZES = (1.0, 100.0, 0.01)
# models of more weights than this are compared in their own precision, smaller ones in float64
LARGE = 30_000_000
# longer lists are not judged
MOST_NUMBERS = 1 << 29


class Rejected(Exception):
    """The document does not prove what it states; the message says why."""


@dataclass(frozen=True)
class Judgement:
    """What the checker found.

    Attributes:
        accepted: whether the document proves its statement (and fits the model, where one was given).
        reason: why not, or why nothing was seen of the outputs (all 0, whole numbers, no numbers); else empty.
        weights: ``m`` as counted by the checker.
        units: ``H``.
        dimension: ``m - H``, the proven dimension of the graph that is stated; ``None`` when rejected. Compared with
            outputs, it bounds from above how many independent values of the listed weights they depend on.
        compared: what the document was compared with: ``"nothing"``, ``"shapes"`` (of tensors without numbers),
            ``"tensors"`` or ``"outputs"``.
        seconds: time taken.
    """

    accepted: bool
    reason: str
    weights: int
    units: int
    dimension: int | None
    compared: str
    seconds: float


@dataclass(frozen=True)
class Tensor:
    """Ends of the edges of one weight tensor, read from the document."""

    name: str
    shape: tuple[int, ...]
    tail: np.ndarray
    head: np.ndarray
    unused: np.ndarray | None
    edges: int
    # what the model adds to the tensor wherever it uses it: the sum scales
    shift: float = 0.0

    def at(self, ids: np.ndarray, flat: np.ndarray) -> np.ndarray:
        """Entries of a broadcast table at flat positions of the tensor."""
        index = np.unravel_index(flat, self.shape) if self.shape else ()
        return np.asarray(ids[tuple(i if n > 1 else i * 0 for i, n in zip(index, ids.shape, strict=True))])


def check(
    document: Mapping[str, Any] | str | Path,
    tensors: Mapping[str, Any] | None = None,
    model: Any = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    tolerance: float = 1e-6,
) -> Judgement:
    """Accept or reject a proof document.

    Args:
        document: the document, or the path of its file.
        tensors: name -> array or tensor; shapes must be those stated, and tree weights must not be zero. They are
            looked at one by one. A module stands for its tensors, or with inputs for ``model``.
        model: a ``torch.nn.Module`` to rescale, on a copy.
        args: example inputs of the model.
        kwargs: example inputs by keyword.
        tolerance: largest relative change of the outputs that is put down to rounding.

    Returns:
        The judgement; a malformed document, a file that cannot be read and a model that fails on its inputs are
        rejected, never raised about.

    Example:
        >>> check({"format": "pathspace-proof"}).reason
        "the document lacks 'version'"
    """
    start = time.perf_counter()
    weights = units = 0
    compared, blind = "nothing", ""
    try:
        loaded = _load(document)
        blocks = list(_tensors(loaded))
        weights, units = sum(block.edges for block in blocks), loaded["units"]
        _judge(loaded, blocks, weights, units)
        tensors, model = _compared(tensors, model, bool(args or kwargs))
        if model is not None and any(map(_is_bare, model.parameters())):
            blind = "the model has no numbers, so only shapes were compared"
            tensors, model = dict(model.named_parameters(remove_duplicate=False)), None
        if tensors is not None:
            compared = "shapes" if any(map(_is_bare, tensors.values())) else "tensors"
            _compare(loaded, blocks, tensors)
        if model is not None:
            compared = "outputs"
            blind = _rescale(loaded, blocks, model, args, kwargs or {}, tolerance)
            compared = "tensors" if blind else compared
    except Rejected as rejection:
        return Judgement(False, str(rejection), weights, units, None, compared, time.perf_counter() - start)
    except RecursionError:
        reason = "the document is nested too deeply"
        return Judgement(False, reason, weights, units, None, compared, time.perf_counter() - start)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"the document is malformed: {type(error).__name__} ({error})"
        return Judgement(False, reason, weights, units, None, compared, time.perf_counter() - start)
    return Judgement(True, blind, weights, units, weights - units, compared, time.perf_counter() - start)


def _compared(tensors: Any, model: Any, inputs: bool) -> tuple[Mapping[str, Any] | None, Any]:
    """Tensors and model to compare with, wherever the model was written."""
    if hasattr(tensors, "named_parameters"):
        if inputs and model is None:
            tensors, model = None, tensors
        else:
            tensors = dict(tensors.named_parameters(remove_duplicate=False))
    _require(
        tensors is None or isinstance(tensors, Mapping),
        f"the tensors are a {type(tensors).__name__}, expected a mapping from names to tensors",
    )
    _require(
        model is None or hasattr(model, "named_parameters"),
        f"the model is a {type(model).__name__}, expected a module; write check(document, model=model, args=inputs)",
    )
    return tensors, model


def _require(condition: Any, reason: str) -> None:
    if not condition:
        raise Rejected(reason)


def _load(document: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    if isinstance(document, str | Path):
        try:
            text = Path(document).read_text(encoding="utf-8")
        except OSError as error:
            raise Rejected(f"the file {str(document)!r} cannot be read ({error.strerror})") from error
        document = json.loads(text)
    _require(isinstance(document, Mapping), "the document is no JSON object")
    assert isinstance(document, Mapping)
    for field, kind in FIELDS.items():
        _require(field in document, f"the document lacks {field!r}")
        _require(type(document[field]) is kind, f"{field!r} is no {kind.__name__}")
    _require(set(document) == set(FIELDS), "the document has fields that do not belong there")
    _require(document["format"] == "pathspace-proof" and document["version"] == 3, "the format is not known")
    _require(document["statement"] == STATEMENT, "the statement is not the one that is proven here")
    body = {key: value for key, value in document.items() if key != "digest"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    _require(hashlib.sha256(text.encode()).hexdigest() == document["digest"], "the digest is another document's")
    return document


def _whole(values: Any, what: str, length: int | None = None) -> np.ndarray:
    """Whole numbers: a list, or runs ``[first, step, count]`` that are ``length`` numbers in all."""
    if isinstance(values, dict) and length is not None:
        _require(set(values) == {"runs"}, f"{what} is no list")
        runs = [_whole(run, what) for run in values["runs"]]
        _require(all(len(run) == 3 and run[2] >= 1 for run in runs), f"{what} has a malformed run")
        _require(sum(int(run[2]) for run in runs) == length <= MOST_NUMBERS, f"{what} has the wrong length")
        ends = (abs(int(run[0])) + abs(int(run[1])) * int(run[2]) for run in runs)
        _require(max(ends, default=0) < 1 << 62, f"{what} holds numbers that are too large")
        parts = [run[0] + run[1] * np.arange(run[2]) for run in runs]
        return np.concatenate([np.zeros(0, np.int64), *parts])
    _require(isinstance(values, list), f"{what} is no list")
    _require(all(type(value) is int for value in values), f"{what} holds something else than whole numbers")
    return np.array(values, dtype=np.int64)


def _table(entry: Any, shape: tuple[int, ...], what: str) -> np.ndarray:
    own = tuple(_whole(entry["shape"], what).tolist())
    fits = len(own) == len(shape) and all(n in (1, size) for n, size in zip(own, shape, strict=True))
    _require(fits, f"{what} of shape {own} does not broadcast to {shape}")
    values = _whole(entry["values"], what, math.prod(own))
    _require(len(values) == math.prod(own), f"{what} has the wrong length")
    return values.reshape(own)


def _tensors(document: Mapping[str, Any]) -> Iterator[Tensor]:
    """Read the tensors one by one; every id must name the root, a unit or a product of units."""
    largest = document["units"] + len(document["products"])
    names: set[str] = set()
    for entry in document["tensors"]:
        name, shape = entry["name"], tuple(_whole(entry["shape"], "a shape").tolist())
        _require(isinstance(name, str) and name not in names, f"the tensor {name!r} is listed twice")
        _require(min(shape, default=1) >= 1, f"the tensor {name!r} is empty")
        # in whole numbers of any size: a product of shapes that overflows would miscount the edges
        size = math.prod(shape)
        names.add(name)
        tail, head = (_table(entry[side], shape, f"the {side} of {name}") for side in ("tail", "head"))
        for ids in (tail, head):
            _require(-largest <= int(ids.min()) and int(ids.max()) <= largest, f"{name} names an unknown unit")
        unused, dead = None, 0
        if entry["unused"] is not None:
            table = _table(entry["unused"], shape, f"the unused scalars of {name}")
            _require(np.isin(table, (0, 1)).all(), f"the unused scalars of {name} are not marked by 0 and 1")
            unused = table.astype(bool)
            dead = int(table.sum()) * size // table.size
        edges = size - dead
        _require(entry["edges"] == edges and type(entry["edges"]) is int, f"{name} has {edges} edges, not as stated")
        shift = entry.get("shift", 0.0)
        _require(type(shift) in (int, float) and math.isfinite(shift), f"the shift of {name} is no number")
        yield Tensor(name, shape, tail, head, unused, edges, float(shift))


def _products(document: Mapping[str, Any]) -> list[dict[int, int]]:
    result = []
    for row in document["products"]:
        product: dict[int, int] = {}
        for unit, times in row:
            _require(type(unit) is int and type(times) is int and times != 0, "a product is no list of powers")
            _require(1 <= unit <= document["units"] and unit not in product, "a product names an unknown unit")
            product[unit] = times
        result.append(product)
    return result


def _rest(document: Mapping[str, Any], blocks: list[Tensor]) -> None:
    """What is listed beside the tensors: running statistics, each once, and parameters outside of the path space."""
    largest = document["units"] + len(document["products"])
    names = [block.name for block in blocks]
    for entry in document["statistics"]:
        fields = set(entry) - {"eps"} if isinstance(entry, dict) else set()
        _require(fields == {"mean", "var", "units"}, "a statistic is malformed")
        eps = entry.get("eps", 0.0)
        _require(type(eps) in (int, float) and 0 <= eps < math.inf, "the eps of a statistic is no number")
        buffers = [entry[key] for key in ("mean", "var") if entry[key] is not None]
        _require(buffers and all(isinstance(name, str) for name in buffers), "a statistic names no buffer")
        names += buffers
        ids = _whole(entry["units"], "the units of a statistic").tolist()
        _require(all(-largest <= unit <= largest for unit in ids), "a statistic names an unknown unit")
    for key in ("pinned", "unused"):
        _require(all(isinstance(name, str) for name in document[key]), f"{key!r} is no list of names")
        names += document[key]
    _require(len(set(names)) == len(names), "a tensor is listed twice")


def _judge(document: Mapping[str, Any], blocks: list[Tensor], weights: int, units: int) -> None:
    """The two bounds."""
    _require(units >= 0 and document["weights"] == weights, f"there are {weights} weights, not as stated")
    _require(document["dimension"] == weights - units, f"the dimension is {weights - units}, not as stated")
    products = _products(document)
    _rest(document, blocks)
    _require(set(document["trees"]) == {"in", "out"}, "there are not two trees")
    trees = [_tree(document["trees"][side], blocks, products, units, side) for side in ("in", "out")]
    shared = np.intersect1d(trees[0].edge, trees[1].edge)
    _require(document["shared_edges"] == len(shared), f"the trees share {len(shared)} edges, not as stated")
    if products:
        same = np.array_equal(trees[0].edge, trees[1].edge)
        _require(same, "with products of scales one tree has to serve both ways")
        chains = 0
    else:
        chains = _chains(trees[0], shared, units)
    _require(document["chains"] == chains, f"there are {chains} chains, not as stated")
    count = chains + weights - (2 * units - len(shared))
    _require(document["basis_paths"] == count, f"there are {count} basis paths, not as stated")
    _require(count == weights - units, f"{count} basis paths are not as many as weights less units")


@dataclass(frozen=True)
class Tree:
    """One edge for every unit, in the order of units.

    Attributes:
        edge: numbers that tell edges apart.
        tail: units (or products) at the tails, without their signs.
        head: those at the heads.
    """

    edge: np.ndarray
    tail: np.ndarray
    head: np.ndarray


def _tree(entry: Any, blocks: list[Tensor], products: list[dict[int, int]], units: int, side: str) -> Tree:
    """Walk a tree: every edge must join its unit, with coefficient +-1, to units reached before."""
    order, tensor, index = (_whole(entry[key], f"tree {side}", units) for key in ("order", "tensor", "index"))
    _require(len(order) == len(tensor) == len(index) == units, f"tree {side} has not one edge for every unit")
    _require(np.array_equal(np.sort(order), np.arange(1, units + 1)), f"tree {side} does not reach every unit once")
    _require(units == 0 or (tensor.min() >= 0 and tensor.max() < len(blocks)), f"tree {side} names unknown tensors")
    tails, heads = np.zeros(units, np.int64), np.zeros(units, np.int64)
    for number in np.unique(tensor):
        block, here = blocks[int(number)], np.flatnonzero(tensor == number)
        flat = index[here]
        inside = flat.min() >= 0 and int(flat.max()) < math.prod(block.shape)
        _require(inside, f"tree {side} leaves the tensor {block.name}")
        if block.unused is not None:
            _require(not block.at(block.unused, flat).any(), f"tree {side} uses an unused scalar of {block.name}")
        tails[here], heads[here] = block.at(block.tail, flat), block.at(block.head, flat)
    # when each unit is reached, the root before all others
    time_of = np.full(units + 1, -1)
    time_of[order] = np.arange(units)
    plain = (np.abs(tails) <= units) & (np.abs(heads) <= units)
    _plain_walk(order[plain], np.abs(tails[plain]), np.abs(heads[plain]), time_of, side)
    for place in np.flatnonzero(~plain).tolist():
        _walk_of_products(int(order[place]), int(tails[place]), int(heads[place]), products, time_of, side)
    fits = len(blocks) < 1 << 22 and int(index.max(initial=0)) < 1 << 40
    _require(fits, "the tensors are too many or too large to be judged")
    by_unit = np.argsort(order)
    return Tree((tensor << 40 | index)[by_unit], np.abs(tails)[by_unit], np.abs(heads)[by_unit])


def _plain_walk(order: np.ndarray, tails: np.ndarray, heads: np.ndarray, time_of: np.ndarray, side: str) -> None:
    """Edges between units: one end is the unit itself, the other one was reached before."""
    once = (heads == order) != (tails == order)
    wrong = order[~once][:1].tolist()
    _require(not wrong, f"an edge of tree {side} does not move the scale of unit {sum(wrong)} once")
    others = np.where(heads == order, tails, heads)
    late = order[time_of[others] >= time_of[order]][:1].tolist()
    _require(not late, f"an edge of tree {side} joins unit {sum(late)} to a unit not reached before")


def _walk_of_products(
    unit: int, tail: int, head: int, products: list[dict[int, int]], time_of: np.ndarray, side: str
) -> None:
    """An edge with an end that is a product of units: all of them but one were reached before."""
    units = len(time_of) - 1
    row: dict[int, int] = {}
    for end, sign in ((head, 1), (tail, -1)):
        sign = -sign if end < 0 else sign
        factors = products[abs(end) - units - 1] if abs(end) > units else {abs(end): 1}
        for factor, times in factors.items():
            row[factor] = row.get(factor, 0) + sign * times
    _require(abs(row.pop(unit, 0)) == 1, f"an edge of tree {side} does not move the scale of unit {unit} once")
    row.pop(0, None)
    late = [other for other, times in row.items() if times and time_of[other] >= time_of[unit]]
    _require(not late, f"an edge of tree {side} joins unit {unit} to a unit not reached before")


def _chains(tree: Tree, shared: np.ndarray, units: int) -> int:
    """Count the chains, and see that each is entered by exactly one edge of ``T_in`` outside ``T_out``."""
    leader = list(range(units + 1))

    def find(unit: int) -> int:
        while leader[unit] != unit:
            leader[unit] = leader[leader[unit]]
            unit = leader[unit]
        return unit

    both = np.isin(tree.edge, shared)
    for tail, head in zip(tree.tail[both].tolist(), tree.head[both].tolist(), strict=True):
        one, other = find(tail), find(head)
        _require(one != other, "the edges in both trees close a circle")
        leader[max(one, other)] = min(one, other)
    entered = [find(unit) for unit in (np.flatnonzero(~both) + 1).tolist()]
    chains = {find(unit) for unit in range(1, units + 1)} - {find(0)}
    _require(sorted(entered) == sorted(chains), "a chain is not entered by exactly one edge")
    return len(chains)


def _compare(document: Mapping[str, Any], blocks: list[Tensor], tensors: Mapping[str, Any]) -> None:
    """Stream over a model's tensors: shapes, and tree weights that do not vanish, where there are numbers."""
    sides = [document["trees"][side] for side in ("in", "out")]
    units = document["units"]
    trees = [tuple(_whole(tree[key], "a tree", units) for key in ("tensor", "index")) for tree in sides]
    for number, block in enumerate(blocks):
        _require(block.name in tensors, f"the model has no tensor {block.name}")
        value = tensors[block.name]
        _require(tuple(value.shape) == block.shape, f"{block.name} has another shape in the model")
        if _is_bare(value):
            continue
        flat = value.detach().reshape(-1) if hasattr(value, "detach") else np.asarray(value).reshape(-1)
        for tensor, index in trees:
            places = index[tensor == number].tolist()
            alive = not places or bool((flat[places] + block.shift != 0).all())
            _require(alive, f"a tree weight of {block.name} is zero")


def _is_bare(value: Any) -> bool:
    """Whether a tensor has a shape and no numbers."""
    return bool(getattr(value, "is_meta", False)) or type(value).__name__ == "FakeTensor"


def _duplicate(model: Any) -> Any:
    """A copy on its own; tensors that a run has left in it are detached, and what cannot be copied is shared."""
    import copy

    memo: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = [model]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, type):
            continue
        seen.add(id(value))
        if hasattr(value, "is_leaf"):
            if not value.is_leaf:
                memo[id(value)] = value.detach().clone()
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple | set):
            waiting += value
        else:
            try:
                value.__reduce_ex__(4)
                waiting += getattr(value, "__dict__", {}).values()
            except Exception:
                memo[id(value)] = value
    return copy.deepcopy(model, memo)


def _arranged(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of a model; one mapping from the names of its inputs stands for all of them."""
    import inspect

    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
        try:
            inspect.signature(model.forward).bind(**args[0])
        except (TypeError, ValueError):
            return tuple(args), {}
        return (), dict(args[0])
    return tuple(args), dict(kwargs)


def _rescale(
    document: Mapping[str, Any],
    blocks: list[Tensor],
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tolerance: float,
) -> str:
    """Random combinations of all generators, by powers of two, leave a copy of the model with the same outputs.

    Returns:
        Why nothing could have been seen to change, or ``""``.
    """
    import torch

    def leaves(value: Any) -> Iterator[Any]:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from leaves(list(value.values()))
        elif isinstance(value, tuple | list):
            for entry in value:
                yield from leaves(entry)

    args, kwargs = _arranged(model, args, kwargs)

    def run(size: float = 1.0) -> Any:
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                outputs = bench(*_times(args, size), **_times(kwargs, size))
        except Exception as error:
            raise Rejected(f"the model fails on these inputs: {type(error).__name__} ({error})") from error
        found = [leaf.double().reshape(-1) for leaf in leaves(outputs) if leaf.is_floating_point()]
        return torch.cat(found) if found else torch.zeros(0)

    def compare(after: Any, what: str) -> None:
        # entries that a model masks out may be infinite, and have to stay so
        gap = float(torch.where(after == before, 0, (after - before).abs()).max())
        size = float(before[torch.isfinite(before)].abs().max())
        _require(gap <= tolerance * size, f"{what} the model's outputs by {gap / size:.1e}")

    try:
        bench = _duplicate(model)
    except Exception as error:
        raise Rejected(f"the model cannot be copied: {type(error).__name__} ({error})") from error
    bench, args, kwargs = _without_eps(bench, args, kwargs)
    named = {**dict(bench.named_parameters(remove_duplicate=False)), **dict(bench.named_buffers())}
    sides: list[tuple[str, np.ndarray, int]] = []
    for block in blocks:
        _require(block.name in named, f"the model has no parameter {block.name}")
        _require(tuple(named[block.name].shape) == block.shape, f"{block.name} has another shape in the model")
        sides += [(block.name, block.head, 1), (block.name, block.tail, -1)]
    for entry in document["statistics"]:
        ids = np.array(entry["units"], np.int64)
        for name, power in ((entry["mean"], 1), (entry["var"], 2)):
            if name is not None:
                _require(name in named and named[name].numel() == len(ids), f"the model has no buffer {name} like that")
                sides.append((name, ids, power))
    for name, _, _ in sides:
        _require(named[name].is_floating_point(), f"{name} holds whole numbers in the model, which have no scale")
    listed = [block.name for block in blocks] + document["pinned"] + document["unused"]
    known = {id(named[name]) for name in listed if name in named}
    for name, parameter in bench.named_parameters():
        said = id(parameter) in known or not parameter.is_floating_point()
        _require(said, f"the document says nothing of the parameter {name}")

    torch_generator = torch.Generator().manual_seed(0)
    before = run()
    if not before.any():
        # a head that starts at zero hides everything behind it
        for parameter in bench.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=torch_generator))
        before = run()
    _require(not before.isnan().any(), "some outputs of the model are not numbers on these inputs")
    if not before[torch.isfinite(before)].any():
        return "all outputs are 0" if len(before) else "there are no floating point outputs"

    masks = [(block.name, torch.from_numpy(block.unused)) for block in blocks if block.unused is not None]
    masks += [(name, torch.ones(1, dtype=torch.bool)) for name in document["unused"] if name in named]
    products, units = _products(document), document["units"]
    generator = np.random.default_rng(0)
    shifts = {block.name: block.shift for block in blocks if block.shift}
    # a normalisation divides by the running variance and its epsilon: their sum scales
    shifts |= {entry["var"]: entry["eps"] for entry in document["statistics"] if entry["var"] and entry.get("eps")}
    # sums with a constant are rounded, where powers of two alone are not
    coarse = any(value.element_size() < 8 for _, value in _numbers(bench)) if shifts else False
    largest, tolerance = (2, max(tolerance, 1e-4)) if coarse else (8, tolerance)
    numbers = _numbers(bench)
    kept = [value.detach().clone() for _, value in numbers]
    # as the model stands; then with other numbers, as what is 0 (a bias, a running mean) stays 0 whatever its scale
    for size, seed in ((1.0, 0), *((size, seed) for seed, size in enumerate(SIZES, 1))):
        for gentle in (False, True) if seed else (True,):
            for (name, value), own in zip(numbers, kept, strict=True):
                value.data.copy_(_redrawn(name, own, seed, gentle) if seed else own)
            try:
                before = run(size)
            except Rejected:
                if not seed:
                    raise
                continue
            if not before.isnan().any() and before[torch.isfinite(before)].any():
                break
        else:
            # this model does not work with such numbers
            continue
        for name, mask in masks:
            drawn = torch.randn(named[name].shape, generator=torch_generator).to(named[name])
            named[name].data = torch.where(mask.to(drawn.device), drawn, named[name].data)
        if masks:
            compare(run(size), "scalars said to be unused change")
        # two units may draw equal scales by chance, but hardly three times
        for _ in range(3 if not seed else 1):
            before_moving = {name: named[name].data.clone() for name in shifts}
            phi = _powers(products, units, generator, largest)
            for direction in (1, -1):
                for name, ids, power in sides:
                    factor = np.exp2(direction * power * np.sign(ids) * phi[np.abs(ids)])
                    shift = shifts.get(name, 0.0)
                    named[name].data.add_(shift).mul_(torch.from_numpy(factor).to(named[name])).sub_(shift)
                if direction == 1:
                    after = run(size)
            for name, own in before_moving.items():
                named[name].data.copy_(own)
            compare(after, "rescaling changes")
    return ""


def _without_eps(bench: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """A copy of a model in which normalisations have no epsilon, in float64 where it runs in it.

    The symmetry of a normalisation is exact without its epsilon, which torch wants to be positive. Normalisations by
    running statistics keep it, as the variance can be moved so that its sum with the epsilon scales.

    Returns:
        The model and its inputs, in one precision.
    """
    import torch

    for module in bench.modules():
        if isinstance(module, torch.nn.GroupNorm):
            module.register_forward_pre_hook(_alone)
        if getattr(module, "running_var", None) is not None and not module.training:
            continue
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 1e-30)
    if sum(parameter.numel() for parameter in bench.parameters()) > LARGE:
        return bench, args, kwargs
    try:
        fine = _duplicate(bench).double()
        inputs = _wide(args), _wide(kwargs)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            _duplicate(fine)(*inputs[0], **inputs[1])
    except Exception:
        # a model that insists on a precision of its own
        return bench, args, kwargs
    return fine, *inputs


def _alone(module: Any, args: tuple[Any, ...]) -> None:
    """One number less its mean is 0 whatever it is divided by; next to no epsilon would divide rounding errors."""
    module.eps = 1.0 if args[0][:1].numel() == module.num_groups else 1e-30


def _wide(value: Any) -> Any:
    """Inputs in float64, where they are floating point numbers."""
    if isinstance(value, Mapping):
        return {key: _wide(entry) for key, entry in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_wide(entry) for entry in value)
    real = hasattr(value, "is_floating_point") and value.is_floating_point()
    return value.double() if real else value


def _times(value: Any, size: float) -> Any:
    """Inputs multiplied by a number, where they are numbers that have a size."""
    if isinstance(value, Mapping):
        return {key: _times(entry, size) for key, entry in value.items()} if size != 1 else value
    if type(value) in (tuple, list):
        return type(value)(_times(entry, size) for entry in value)
    plain = hasattr(value, "is_floating_point") and "strided" in str(getattr(value, "layout", ""))
    if size == 1 or not plain or not value.is_floating_point() or not bool(value.isfinite().all()):
        return value
    return value * size


def _numbers(model: Any) -> list[tuple[str, Any]]:
    """Parameters and running statistics of a model, which can be drawn anew."""
    found = [("", parameter) for parameter in model.parameters()]
    for module in model.modules():
        held = ((name, getattr(module, name, None)) for name in ("running_mean", "running_var"))
        found += [(name, value) for name, value in held if hasattr(value, "is_floating_point")]
    return [(name, value) for name, value in found if value.is_floating_point() and value.numel()]


def _redrawn(name: str, value: Any, seed: int, gentle: bool) -> Any:
    """Other numbers of the same size; running variances stay positive, and so does everything of its sign if gentle."""
    import torch

    generator = torch.Generator().manual_seed(1_000 * seed + value.numel())
    noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
    spread = float(value.double().square().mean().sqrt()) or 0.1
    if name == "running_var" or gentle:
        return torch.where(value == 0, 0.1 * spread * noise.abs(), value * (0.5 * noise).exp())
    return value + (0.3 if name == "running_mean" else 0.5 * spread) * noise


def _powers(products: list[dict[int, int]], units: int, generator: np.random.Generator, largest: int) -> np.ndarray:
    """Exponents of two for the root, all units and products; units of which high powers are taken stay closer to 1."""
    phi = np.concatenate([np.zeros(1), generator.integers(-largest, largest + 1, units).astype(float)])
    most = np.ones(units + 1)
    for factors in products:
        total = float(sum(abs(times) for times in factors.values()))
        for unit in factors:
            most[unit] = max(most[unit], total)
    room = 64 / most
    fraction = generator.uniform(-1, 1, units + 1)
    closer = np.where(room < 1, fraction * room, np.round(fraction * np.floor(room)))
    phi = np.where(room < largest, closer, phi)
    derived = [sum(times * phi[unit] for unit, times in factors.items()) for factors in products]
    return np.concatenate([phi, np.array(derived, float)])
