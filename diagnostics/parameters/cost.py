"""The cost of a training step: multiplications, activations, cached floats,
parameters; time and memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from pathspace.errors import expect_arguments, expect_numbers
from pathspace.inference.registry import Facts, facts_of
from pathspace.models.inputs import arranged, check_inputs
from pathspace.models.values import require_runnable
from pathspace.shown import Shown

from ..shared.model_calls import called, differentiating, main_output
from ..shared.real_tensors import is_real
from ..shared.unchanged import unchanged

_NONLINEAR = ("activation", "function")
_PRODUCTS = ("product", "quotient")
_VECTORS: Mapping[str, Callable[..., int]] = {
    "mv": lambda matrix, _vector, *_: matrix.numel(),
    "dot": lambda a, _b, *_: a.numel(),
    "addmv": lambda _bias, matrix, _vector, *_: matrix.numel(),
    "ger": lambda a, b, *_: a.numel() * b.numel(),
    # the attention kernel of the CPU; torch's registry has only those of other devices
    "_scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *_: (
        sdpa_flop_count(q.shape, k.shape, v.shape) // 2
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda g, q, k, v, *_: (
        sdpa_backward_flop_count(g.shape, q.shape, k.shape, v.shape) // 2
    ),
}


@dataclass(frozen=True)
class Cost(Shown):
    """The cost of one training step, counted and measured.

    Attributes:
        model: its name.
        parameters: number of scalars.
        multiplications: number in forward and backward pass, including the seed
            of the output's gradient.
        forward: number of multiplications in the forward pass.
        activations: number of values of activation functions.
        derivatives: number of derivatives of activation functions in the backward pass.
        cached: number of floats that a textbook backward pass stores: inputs of activations, and of
            products with weights or other activations, without model inputs and parameters.
        saved: number of floats that autograd stored, without parameters and inputs (it computes a
            ReLU's derivative from its output, so it may store fewer).
        seconds: median time of forward and backward pass; ``None`` if not measured.
        bytes: memory of ``saved``, of parameters, and of the gradients of those that are trained.
    """

    model: str
    parameters: int
    multiplications: int
    forward: int
    activations: int
    derivatives: int
    cached: int
    saved: int
    seconds: float | None
    bytes: int


class _Counter(TorchDispatchMode):
    """Counts the operations in torch's dispatcher, where all are elementary."""

    def __init__(self, excluded: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.excluded = excluded
        self.products = self.activations = self.slopes = 0
        self.cached: dict[tuple[int, ...], int] = {}
        self.kept: list[Tensor] = []
        self.backward = False

    def _keep(self, *values: Any) -> None:
        for value in values:
            if not is_real(value) or value.untyped_storage().data_ptr() in self.excluded:
                continue
            # kept alive, so that no later tensor has the same id
            self.kept.append(value)
            # (what is overwritten in place is another value in the same memory)
            storage, offset = value.untyped_storage().data_ptr(), int(value.storage_offset())
            key = (storage, offset, value.numel(), value._version)
            self.cached[key] = value.numel()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        name = packet.__name__.rstrip("_")
        facts = facts_of(name)
        if not self.backward and facts.kind in _NONLINEAR:
            # before the call, because an in-place activation overwrites its input
            self._keep(args[0])
        result = func(*args, **kwargs)
        if name == "convolution_backward":
            self.products += _of_convolution_gradients(args)
        elif packet in flop_registry:
            # every registered count is twice the number of multiply-adds
            self.products += flop_registry[packet](*args, **kwargs, out_val=result) // 2
            if not self.backward:
                self._keep(*tree_leaves(args))
        elif name in _VECTORS:
            self.products += _VECTORS[name](*args)
            if not self.backward:
                self._keep(*tree_leaves(args))
        elif facts.kind in _NONLINEAR and not self.backward:
            self.activations += args[0].numel()
        elif facts_of(name.removesuffix("_backward")).kind == "activation" and name.endswith(
            "_backward"
        ):
            first = next(value for value in tree_leaves(result) if isinstance(value, Tensor))
            self.slopes += first.numel()
            self.products += first.numel()
        elif _multiplies(facts) and is_real(result):
            self.products += result.numel()
            if not self.backward and all(isinstance(value, Tensor) for value in args[:2]):
                self._keep(*args[:2])
        return result


def _of_convolution_gradients(args: Sequence[Any]) -> int:
    """Products of the gradients by input and weight that are asked for: each as many as in the
    forward pass (torch's formula takes every input channel for one of every group).
    """
    slope, x, weight, *_, transposed = args[:8]
    wanted = args[-1]
    # each element of the result, or of the operand of a transposed one, meets one row of the kernel
    places = x if transposed else slope
    gradients: int = wanted[0] + wanted[1]
    return gradients * int(places.numel()) * (int(weight.numel()) // int(weight.shape[0]))


def _multiplies(facts: Facts) -> bool:
    """Whether an operation is one product for each element, such as a
    square, or a product and a sum.
    """
    return facts.kind in _PRODUCTS or (
        facts.elementwise and (facts.degree == (2,) or facts.bias is not None)
    )


@contextmanager
def _elementary() -> Iterator[None]:
    # torch.backends.mkldnn.flags sets more than this one, and warns
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def cost(
    model: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    name: str = "model",
    repeats: int = 0,
) -> Cost:
    """Count one training step of a model (forward, and backward by all
    parameters), and measure its time.

    Every operation is counted as it is executed: matrix products and convolutions by torch's own
    formulas, elementwise products and activations by the number of their results.

    Args:
        model: any module, in its current mode; it is not changed.
        *inputs: one batch.
        kwargs: keyword inputs.
        name: name of the model in the result.
        repeats: number of timed steps; 0 measures no time.

    Returns:
        The cost.

    Raises:
        CaptureError: the model fails on these inputs, or returns nothing that
            depends on its parameters.

    Example:
        >>> net = nn.Sequential(
        ...     nn.Linear(1, 200, bias=False), nn.Tanh(), nn.Linear(200, 1, bias=False), nn.Tanh()
        ... )
        >>> found = cost(net, torch.randn(1, 1))
        >>> found.parameters, found.activations, found.cached  # 2n, n + 1, 2n + 1
        (400, 201, 401)

    Reference:
        Evolution of neural network, section 3.5.
    """
    expect_arguments("cost", model=model)
    expect_numbers("cost", "a whole number from 0 to 1,000,000", repeats=repeats)
    require_runnable("cost", (*model.named_parameters(), *model.named_buffers()))
    inputs, kwargs = arranged(model, inputs, kwargs)
    check_inputs(model, inputs, kwargs)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    arguments = [value for value in tree_leaves((inputs, kwargs)) if isinstance(value, Tensor)]
    owned = {
        value.untyped_storage().data_ptr()
        for value in (*model.parameters(), *model.buffers(), *arguments)
    }
    saved: dict[tuple[int, int, int], tuple[int, Tensor]] = {}

    def step() -> Tensor:
        return main_output(model, called(model, inputs, kwargs))

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage().data_ptr()
        if storage not in owned:
            size = value.numel() * value.element_size()
            saved[storage, int(value.storage_offset()), value.numel()] = size, value.detach()
        return value

    counter = _Counter(owned)
    with unchanged(model), torch.enable_grad():
        with saved_tensors_hooks(pack, lambda value: value):
            step()
        sizes = [size for size, _ in saved.values()]
        kept = sum(tensor.numel() for _, tensor in saved.values())
        saved.clear()
        # without the kernel that runs a whole LSTM as one operation, whose
        # products cannot be counted
        with _elementary():
            with counter:
                output = step()
            forward = counter.products
            # operations of the backward pass store nothing in the textbook count
            counter.backward = True
            with differentiating(model), counter:
                torch.autograd.grad(output, parameters, torch.ones_like(output), allow_unused=True)
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            output = step()
            torch.autograd.grad(output, parameters, torch.ones_like(output), allow_unused=True)
            times.append(time.perf_counter() - begin)
    size, moving = (
        sum(parameter.numel() * parameter.element_size() for parameter in some)
        for some in (model.parameters(), parameters)
    )
    return Cost(
        name,
        sum(parameter.numel() for parameter in model.parameters()),
        counter.products,
        forward,
        counter.activations,
        counter.slopes,
        sum(counter.cached.values()),
        kept,
        statistics.median(times) if times else None,
        size + moving + sum(sizes),
    )
