"""Whether the outputs of a model are unchanged after the rescalings of a document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .bench import (
    call_arguments,
    duplicate,
    is_bare,
    numbers_of,
    redrawn_values,
    scale_exponents,
    states_kept,
    times_size,
    with_tiny_eps,
)
from .document import Rejected, Tensor, integers, read_products, require

# factors of the inputs, each with all weights redrawn
SIZES = (1.0, 100.0, 0.01)


def compare_tensors(
    document: Mapping[str, Any], blocks: list[Tensor], tensors: Mapping[str, Any]
) -> None:
    """Check a model's tensors one by one: their shapes and, if they have values,
    that tree weights are not 0.
    """
    sides = [document["trees"][side] for side in ("in", "out")]
    units = document["units"]
    trees = [
        tuple(integers(tree[key], "a tree", units) for key in ("tensor", "index")) for tree in sides
    ]
    for number, block in enumerate(blocks):
        require(block.name in tensors, f"the model has no tensor {block.name}")
        value = tensors[block.name]
        require(tuple(value.shape) == block.shape, f"{block.name} has another shape in the model")
        if is_bare(value):
            continue
        flat = (
            value.detach().reshape(-1)
            if hasattr(value, "detach")
            else np.asarray(value).reshape(-1)
        )
        for tensor, index in trees:
            places = index[tensor == number].tolist()
            alive = not places or bool((flat[places] + block.shift != 0).all())
            require(alive, f"a tree weight of {block.name} is zero")


def rescale_copy(
    document: Mapping[str, Any],
    blocks: list[Tensor],
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tolerance: float,
) -> str:
    """Check that random combinations of all generators, by powers of two, do not
    change the outputs of a copy.

    Returns:
        Why no change could be visible, or ``""``.
    """
    bench = _Bench(document, blocks, model, args, kwargs)
    first = bench.run()
    if not first.any():
        bench.fill_heads()
        first = bench.run()
    require(not first.isnan().any(), "some outputs of the model are not numbers on these inputs")
    if not _seen(first):
        return "all outputs are 0" if len(first) else "there are no floating point outputs"
    numbers = numbers_of(bench.model)
    kept = [value.detach().clone() for _, value in numbers]
    # sums with a constant are rounded; powers of two alone are not
    coarse = any(value.element_size() < 8 for _, value in numbers) if bench.shifts else False
    largest, tolerance = (2, max(tolerance, 1e-4)) if coarse else (8, tolerance)
    # first the unchanged model; then with redrawn values, because no scale changes a 0
    # (a bias, a running mean)
    for size, seed in ((1.0, 0), *((size, seed) for seed, size in enumerate(SIZES, 1))):
        for gentle in (False, True) if seed else (True,):
            for (name, value), own in zip(numbers, kept, strict=True):
                value.data.copy_(redrawn_values(name, own, seed, gentle) if seed else own)
            before = bench.outputs(size, must_run=not seed)
            if before is not None:
                bench.compare(before, size, largest, tolerance, times=1 if seed else 3)
                break
    return ""


def _seen(outputs: Any) -> bool:
    """Whether an output is finite and not 0."""
    return bool(outputs[outputs.isfinite()].any())


def _leaves(value: Any) -> Iterator[Any]:
    """The tensors in nested outputs."""
    if hasattr(value, "is_floating_point"):
        yield value
    elif isinstance(value, Mapping):
        yield from _leaves(list(value.values()))
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _leaves(entry)


class _Bench:
    """A copy of a model, its inputs, and the entries of a document for its tensors.

    Raises:
        Rejected: the document does not list a parameter, or lists a tensor that
            the model does not have.
    """

    def __init__(
        self,
        document: Mapping[str, Any],
        blocks: list[Tensor],
        model: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        import torch

        try:
            copy = duplicate(model)
        except Exception as error:
            raise Rejected(
                f"the model cannot be copied: {type(error).__name__} ({error})"
            ) from error
        self.model, self.args, self.kwargs = with_tiny_eps(
            copy, *call_arguments(model, args, kwargs)
        )
        self.named = {
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **dict(self.model.named_buffers()),
        }
        # (name, units, power): the tensor is multiplied by this power of the factors of these units
        self.sides: list[tuple[str, np.ndarray, int]] = []
        self._take_blocks(blocks)
        self._take_statistics(document)
        self._see_all_parameters(
            [block.name for block in blocks] + document["pinned"] + document["unused"]
        )
        masks = [
            (block.name, torch.from_numpy(block.unused))
            for block in blocks
            if block.unused is not None
        ]
        alone = [
            (name, torch.ones(1, dtype=torch.bool))
            for name in document["unused"]
            if name in self.named
        ]
        self.masks = masks + alone
        self.products, self.units = read_products(document), document["units"]
        self.shifts = {block.name: block.shift for block in blocks if block.shift}
        # a normalisation divides by the running variance plus its epsilon: the sum is rescaled
        statistics = (
            entry for entry in document["statistics"] if entry["var"] and entry.get("eps")
        )
        self.shifts |= {entry["var"]: entry["eps"] for entry in statistics}
        self.exponents = np.random.default_rng(0)
        self.generator = torch.Generator().manual_seed(0)

    def _take_blocks(self, blocks: list[Tensor]) -> None:
        for block in blocks:
            require(block.name in self.named, f"the model has no parameter {block.name}")
            same = tuple(self.named[block.name].shape) == block.shape
            require(same, f"{block.name} has another shape in the model")
            self.sides += [(block.name, block.head, 1), (block.name, block.tail, -1)]

    def _take_statistics(self, document: Mapping[str, Any]) -> None:
        for entry in document["statistics"]:
            ids = np.array(entry["units"], np.int64)
            for name, power in ((entry["mean"], 1), (entry["var"], 2)):
                if name is not None:
                    fits = name in self.named and self.named[name].numel() == len(ids)
                    require(fits, f"the model has no buffer {name} like that")
                    self.sides.append((name, ids, power))
        for name, _, _ in self.sides:
            real = self.named[name].is_floating_point()
            require(real, f"{name} holds whole numbers in the model, which have no scale")

    def _see_all_parameters(self, listed: list[str]) -> None:
        known = {id(self.named[name]) for name in listed if name in self.named}
        for name, parameter in self.model.named_parameters():
            said = id(parameter) in known or not parameter.is_floating_point()
            require(said, f"the document says nothing of the parameter {name}")

    def fill_heads(self) -> None:
        """Draw parameters that are 0, because a head of zeros hides everything before it."""
        import torch

        for parameter in self.model.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=self.generator))

    def run(self, size: float = 1.0) -> Any:
        """All outputs in one vector, for inputs multiplied by ``size``."""
        import torch

        try:
            with torch.no_grad(), states_kept(0):
                outputs = self.model(*times_size(self.args, size), **times_size(self.kwargs, size))
        except Exception as error:
            raise Rejected(
                f"the model fails on these inputs: {type(error).__name__} ({error})"
            ) from error
        found = [leaf.double().reshape(-1) for leaf in _leaves(outputs) if leaf.is_floating_point()]
        return torch.cat(found) if found else torch.zeros(0)

    def outputs(self, size: float, must_run: bool) -> Any:
        """The outputs with the current values; ``None`` if the model fails with them."""
        try:
            found = self.run(size)
        except Rejected:
            if must_run:
                raise
            return None
        return found if not found.isnan().any() and _seen(found) else None

    def compare(self, before: Any, size: float, largest: int, tolerance: float, times: int) -> None:
        """Redraw unused scalars, then rescale at random: the outputs must not change."""
        import torch

        for name, mask in self.masks:
            drawn = torch.randn(self.named[name].shape, generator=self.generator).to(
                self.named[name]
            )
            self.named[name].data = torch.where(mask.to(drawn.device), drawn, self.named[name].data)
        if self.masks:
            _require_same(before, self.run(size), tolerance, "scalars said to be unused change")
        # two units may have equal random scales once, but hardly three times
        for _ in range(times):
            _require_same(before, self._rescaled(size, largest), tolerance, "rescaling changes")

    def _rescaled(self, size: float, largest: int) -> Any:
        """Outputs under one random combination of all generators, which is undone."""
        import torch

        own = {name: self.named[name].data.clone() for name in self.shifts}
        phi = scale_exponents(self.products, self.units, self.exponents, largest)
        after = None
        for direction in (1, -1):
            for name, ids, power in self.sides:
                factor = torch.from_numpy(
                    np.exp2(direction * power * np.sign(ids) * phi[np.abs(ids)])
                )
                shift = self.shifts.get(name, 0.0)
                self.named[name].data.add_(shift).mul_(factor.to(self.named[name])).sub_(shift)
            if direction == 1:
                after = self.run(size)
        for name, value in own.items():
            self.named[name].data.copy_(value)
        return after


def _require_same(before: Any, after: Any, tolerance: float, what: str) -> None:
    # masked entries may be infinite, and must remain so
    gap = float((after - before).abs().masked_fill(after == before, 0).max())
    size = float(before[before.isfinite()].abs().max())
    require(gap <= tolerance * size, f"{what} the model's outputs by {gap / size:.1e}")
