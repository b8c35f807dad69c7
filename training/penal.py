"""The penal connection: train a model as if ``tau/2 * sum_l ||z_l||^2`` were added to its loss.

Only the gradient changes, not outputs, parameters or ``state_dict``. Second derivatives are
refused. If autograd keeps ``x_l`` and ``x_{l-1}`` anyway (a norm layer reads them), ``z_l = x_l -
x_{l-1}`` needs no memory; it needs none either if the branch ends in a norm, which can be
recomputed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from numbers import Real
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from pathspace.diagnostics.chain.addition_hooks import Addition, Site, Sites, plus
from pathspace.diagnostics.chain.chain import ChainNode, MarkovChain
from pathspace.diagnostics.chain.check_traced import Traced
from pathspace.diagnostics.chain.nodes import Place, run_noting, unwrapped
from pathspace.diagnostics.chain.penalty_disabled import PENAL
from pathspace.errors import SEED, InputError, UnsupportedError, expect_arguments, expect_numbers
from pathspace.models.nested import leaves

from .norms_again import NORMS, NormsAgain
from .penal_gradients import Again, learns, penalised, penalised_sum, penalised_zero, transforming

Model = TypeVar("Model", bound=nn.Module)
Tau = float | Mapping[str, float | Callable[[int], float]] | Callable[[int], float]


def penal(direction: Tensor, tau: float) -> Tensor:
    """Mark a predicted direction in a hand-written model.

    Write ``x = x + penal(self.block(x), tau)``. The value is unchanged; the gradient with respect
    to ``direction`` becomes ``g + tau * direction``.

    Args:
        direction: ``z_l``, any shape.
        tau: strength of the penalty ``tau/2 * ||z_l||^2``.

    Returns:
        A tensor equal to ``direction``.

    Example:
        >>> z = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> penal(z, 0.5).sum().backward()
        >>> z.grad
        tensor([1.5000, 2.0000])

    Reference:
        Learnable Markov chain paper, Algorithm 1.
    """
    if not learns(direction):
        return direction
    return penalised(direction, tau)


def penal_add(stream: Tensor, direction: Tensor, tau: float) -> Tensor:
    """``stream + direction`` with the penal connection, without extra memory in pre-norm blocks.

    Args:
        stream: ``x_{l-1}``.
        direction: ``z_l``, of the same shape.
        tau: strength of the penalty ``tau/2 * ||z_l||^2``.

    Returns:
        ``x_l``; do not overwrite it in place (use :func:`penal` there, autograd raises otherwise).

    Example:
        >>> x, z = torch.zeros(2), torch.tensor([1.0, 2.0], requires_grad=True)
        >>> penal_add(x, z, 0.5).sum().backward()
        >>> z.grad
        tensor([1.5000, 2.0000])
    """
    if not learns(direction):
        return stream + direction
    return penalised_sum(stream, direction, 1.0, tau)


class PenalConnection:
    """The penal connection of a model, at ``model.penal_connection`` after :func:`penalise_`.

    Attributes:
        chain: the traced chain.
        tau: the current setting; assign a number, a function of the step, or a mapping
            from node names to either.
        step: the argument of a function of the step; increased by :meth:`advance`
            or by the given optimizer.
    """

    def __init__(
        self,
        chain: MarkovChain,
        tau: Tau,
        per: str,
        scale: float | Callable[[], float],
        batch_dim: int = 0,
    ) -> None:
        self.nodes, self.per, self.scale, self.step = chain.nodes, per, scale, 0
        self.tau = tau
        # (without the number of the call, unless calls differ: some calls may be left out)
        self.by_place, self.by_site = chain.by_place(), chain.by_site()
        self.differing = chain.differing()
        self.batch, self.batch_dim, self.met = 1, batch_dim, 0
        self.overwritten = _overwritten(chain)
        self.traced = Traced(chain)
        self.norms = NormsAgain()
        others: dict[Any, Any] = dict.fromkeys(NORMS, self.norms.run)
        self.sites = Sites(
            self._meet, end=self.traced.check, compiled=True, others=others, moment=self._moment
        )
        self.handles: list[Any] = []
        self.of_optimizer: list[Any] = []

    @property
    def tau(self) -> Tau:
        """The current setting."""
        return self._tau

    @tau.setter
    def tau(self, value: Tau) -> None:
        names = {node.name for node in self.nodes}
        if isinstance(value, Mapping):
            unknown = sorted(set(value) - names)
            if unknown:
                raise InputError(
                    f"tau names the node {unknown[0]!r}, which is none of {sorted(names)}; choose"
                    " among these."
                )
        for number in value.values() if isinstance(value, Mapping) else [value]:
            if not callable(number) and not (isinstance(number, Real) and math.isfinite(number)):
                raise InputError(
                    f"tau = {number!r}, expected a finite number; 0 switches the penal connection"
                    " off."
                )
        self._tau = value

    def advance(self) -> None:
        """Go to the next step of a schedule."""
        self.step += 1

    def remove(self) -> None:
        """Restore the model before :func:`penalise_`."""
        self.sites.detach()
        for handles in (self.handles, self.of_optimizer):
            for handle in handles:
                handle.remove()
            handles.clear()
        _compile_again()

    def __getstate__(self) -> dict[str, Any]:
        """Copies, also those in files, are not advanced by the steps of
        the original's optimizer.
        """
        return {**self.__dict__, "of_optimizer": []}

    def coefficient(self, node: ChainNode) -> float:
        """The current factor of ``z_l``: tau, divided by the batch size and scaled if
        the penalty is per sample.
        """
        tau = self._tau
        by_name = tau.get(node.name, 0.0) if isinstance(tau, Mapping) else tau
        value = by_name(self.step) if callable(by_name) else by_name
        if callable(by_name):
            _expect_finite("tau", value)
        if self.per == "sample":
            value = value / self.batch * self._factor()
        return float(value)

    def _factor(self) -> float:
        """The current factor on the loss."""
        if not callable(self.scale):
            return self.scale
        factor = self.scale()
        _expect_finite("scale", factor)
        return factor

    def _moment(self) -> Callable[[], AbstractContextManager[None]]:
        """Store what coefficients depend on, for a part of this forward that is recomputed."""
        factor = self._factor() if self.per == "sample" else self.scale
        return partial(self._again_at, self.batch, self.step, self._tau, factor)

    @contextmanager
    def _again_at(self, *then: Any) -> Iterator[None]:
        now = self.batch, self.step, self._tau, self.scale
        self.batch, self.step, self._tau, self.scale = then
        try:
            yield
        finally:
            self.batch, self.step, self._tau, self.scale = now

    def _pick(self, site: Site) -> tuple[ChainNode, float] | None:
        if site.place in self.differing:
            self.traced.differs(site)
            node = self.by_site.get(site)
            return None if node is None else (node, self.coefficient(node))
        nodes = self.by_place.get(site.place)
        if not nodes:
            return None
        values = {self.coefficient(node) for node in nodes}
        if len(values) > 1:
            raise UnsupportedError(
                f"The nodes {[node.name for node in nodes]} are calls of one module and have"
                " different tau; give them the same."
            )
        return nodes[0], values.pop()

    def attach(self, model: nn.Module) -> None:
        """Follow every call of the model until ``remove()``."""
        self.handles.append(model.register_forward_pre_hook(self._begin, with_kwargs=True))
        self.handles.append(model.register_forward_hook(self._end))
        self.sites.attach(model, outermost=True)

    def _end(self, module: nn.Module, _args: Any, _output: Any) -> None:
        # a compiler may ignore hooks and modes: a step without the penalty must raise an error
        if (
            torch.compiler.is_compiling()
            and torch.is_grad_enabled()
            and self.met < len(self.by_place)
        ):
            raise UnsupportedError(
                f"torch.compile met {self.met} of the {len(self.by_place)} additions of"
                f" {type(module).__name__} that are chain nodes; run the model uncompiled, or write"
                " x + penal(z, tau) in it."
            )

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self.met = 0
        if not torch.compiler.is_compiling():
            self._expect_modules(model)
        if self.per != "sample":
            return
        for value in (*args, *kwargs.values()):
            if (size := _samples(value, self.batch_dim)) is not None:
                self.batch = size
                return
        raise UnsupportedError(
            f"penalise_(per='sample') found no tensor with a dimension {self.batch_dim} among the"
            " inputs, expected one, whose size there is the number of samples; pass such a tensor,"
            " another batch_dim, or per='sum'."
        )

    def _expect_modules(self, model: nn.Module) -> None:
        """Refuse a model in which a module that adds was replaced by one that is not followed."""
        for name in dict.fromkeys(node.site.module for node in self.nodes):
            try:
                module = model.get_submodule(name)
            except AttributeError:
                # (left out, as by stochastic depth, or renamed by a wrapper)
                continue
            if not self.sites.follows(module):
                raise UnsupportedError(
                    f"The module {name!r} of {type(model).__name__} was replaced after penalise_,"
                    " so its additions would have no penalty, expected the modules that were there;"
                    " call model.penal_connection.remove(), and penalise_ again."
                )

    def _meet(self, addition: Addition) -> Tensor:
        found = self._pick(addition.site)
        if found is None:
            self.traced.check_addition(addition)
            return addition.run()
        self.met += 1
        node, coefficient = found
        stream, branch = node.split(addition)
        if branch.ndim != len(node.shape) or stream.shape != branch.shape:
            raise UnsupportedError(
                f"The addition number {addition.site.order} of module {addition.site.module!r}"
                f" joins shapes {tuple(stream.shape)} and {tuple(branch.shape)} and is not the node"
                f" {node.name!r} that was traced; call penalise_ in the mode, and with the kind of"
                " inputs, in which the model is trained."
            )
        if not coefficient or not learns(branch):
            return addition.run()
        again, rest = self._again(branch)
        exact = torch.float32 in (stream.dtype, branch.dtype) or torch.float64 in (
            stream.dtype,
            branch.dtype,
        )
        if addition.in_place:
            penalty = (coefficient * node.scale**2, again, *rest)
            return _in_place(addition, node, stream, branch, penalty)
        if node.direction == 0 and addition.alpha != 1:
            stream = (
                stream * addition.alpha
            )  # alpha belongs to the right operand, which is the stream here
        if exact and again is None and node.site.place not in self.overwritten:
            return penalised_sum(stream, branch, node.scale, coefficient)
        marked = penalised(branch, coefficient * node.scale**2, again, *rest)
        return plus(stream, marked, node.scale)

    def _again(self, branch: Tensor) -> tuple[Again | None, list[Tensor]]:
        """How to recompute a branch that ends in a norm, instead of keeping its output."""
        # (recomputed code must keep the same tensors in both runs)
        if self.sites.recomputed or torch.compiler.is_compiling() or transforming():
            return None, []
        return self.norms.recipe(branch) or (None, [])


def _samples(value: Any, dim: int) -> int | None:
    """The size in ``dim`` of the first tensor in an input that has this dimension."""
    # (an iterator can be read only once, by the model)
    held = [value] if isinstance(value, Tensor | Iterator) else leaves(value)
    sizes = (leaf.shape[dim] for leaf in held if isinstance(leaf, Tensor) and leaf.ndim > dim)
    return next(map(int, sizes), None)


def _expect_finite(what: str, found: Any) -> None:
    """Refuse a result of a function of the user's that is no number."""
    if isinstance(found, Tensor) and found.numel() == 1 and not torch.compiler.is_compiling():
        found = found.item()
    if not isinstance(found, Real | Tensor) or (
        not isinstance(found, Tensor) and not math.isfinite(found)
    ):
        raise InputError(
            f"The function {what} of the penal connection returned {found!r}, expected a finite"
            " number; correct the function."
        )


def _in_place(
    addition: Addition, node: ChainNode, stream: Tensor, branch: Tensor, penalty: tuple[Any, ...]
) -> Tensor:
    if node.direction == 1:
        return plus(stream, penalised(branch, *penalty), node.scale, in_place=True)
    # alpha multiplies the stream here, but must not multiply the gradient term of the direction
    streamed = stream * addition.alpha if addition.alpha != 1 else stream
    return plus(branch, plus(streamed, penalised_zero(branch, *penalty)), in_place=True)


def penalise_(
    model: Model,
    *inputs: Any,
    tau: Tau,
    kwargs: Mapping[str, Any] | None = None,
    per: Literal["sum", "sample"] = "sum",
    scale: float | Callable[[], float] = 1.0,
    optimizer: torch.optim.Optimizer | None = None,
    batch_dim: int = 0,
) -> Model:
    """Train a residual model as a learnable Markov chain.

    Its gradient becomes that of ``Loss + tau/2 * sum_l ||z_l||^2``, with ``z_l`` the predicted
    directions of :class:`pathspace.diagnostics.MarkovChain`. The term of a node is added when the
    gradient of its sum arrives: nodes on which the loss does not depend have none, and every
    backward pass through one forward pass adds it.

    There are two conventions of scale. ``per="sum"`` (default) is the paper's hook: the penalty is
    the sum over the batch, independent of the loss, so its weight relative to a mean loss grows
    with the batch, decreases with a loss scale, and depends on the number of processes.
    ``per="sample"`` is ``tau/2 * mean over samples``, and does not depend on batch size and data
    parallelism, nor, with ``scale``, on a loss scale or a division of the loss.

    Args:
        model: the model; hooks are attached to it and it is returned.
        *inputs: positional example inputs, for the trace only.
        tau: a number, a function of the step, or a mapping from node names
            to either (others get 0).
        kwargs: keyword example inputs.
        per: ``"sum"`` or ``"sample"``.
        scale: with ``per="sample"``, the factor on the loss, for instance ``lambda:
            scaler.get_scale() / 4`` when four micro-batches are accumulated; a function is
            called in every forward.
        optimizer: an optimizer whose steps advance a schedule.
        batch_dim: with ``per="sample"``, the dimension of the samples in the first input; 1 for
            inputs of shape (T, B, ...).

    Returns:
        The same model, with the same parameters and ``state_dict`` keys, for any batch size, in
        train and eval mode. Its ``penal_connection`` changes tau and removes the hooks.

    Raises:
        InputError: the chain has no nodes, the model is penalised already, or tau, ``per``
            or ``scale`` is not valid.
        CaptureError: the model cannot be captured.
        UnsupportedError: during training, if the model's additions differ from those on the example
            inputs (another number of steps, another mode), so that its nodes cannot be identified.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        >>> layer = penalise_(layer, torch.randn(2, 5, 8), tau=3e-4)
        >>> layer(torch.randn(7, 3, 8)).sum().backward()
        >>> [node.name for node in layer.penal_connection.nodes]
        ['self_attn', 'linear2']

    Reference:
        Learnable Markov chain paper, section 2.2, Algorithm 1.
    """
    expect_arguments("penalise_", model=model)
    expect_arguments("penalise_", or_none=True, optimizer=optimizer)
    expect_numbers("penalise_", SEED, batch_dim=batch_dim)
    if per not in ("sum", "sample"):
        raise InputError(
            f"per = {per!r}, expected 'sum' (the paper's hook) or 'sample' (survives scaling)."
        )
    if per == "sum" and scale != 1.0:
        raise InputError(
            "scale belongs to per='sample'; the paper's convention, per='sum', adds tau * z as"
            " it is."
        )
    if not callable(scale):
        expect_numbers("penalise_", "a number", scale=scale)
    inside = getattr(model, "_orig_mod", None)
    if isinstance(inside, nn.Module):
        # (the wrapper of torch.compile does not call its own hooks)
        penalise_(
            inside,
            *inputs,
            tau=tau,
            kwargs=kwargs,
            per=per,
            scale=scale,
            optimizer=optimizer,
            batch_dim=batch_dim,
        )
        return model
    if hasattr(model, PENAL):
        raise InputError(
            f"{type(model).__name__} is penalised already; change model.penal_connection.tau, or"
            " call its remove()."
        )
    if (part := _followed(model)) is not None:
        raise InputError(
            f"penalise_ found that additions of {part} belong to the penal connection of another"
            " module already, expected one connection for each addition; call remove() of the"
            " other, or give tau by the names of nodes."
        )
    with unwrapped(model):
        chain = MarkovChain.trace(model, *inputs, kwargs=kwargs)
        if not chain.nodes:
            raise InputError(
                f"{chain.sentence()[:-1]}, so there is nothing to penalise; choose a residual"
                " model."
            )
        connection = PenalConnection(chain, tau, per, scale, batch_dim)
        connection.attach(model)
    _compile_again()
    object.__setattr__(model, PENAL, connection)
    if optimizer is not None:
        connection.of_optimizer.append(
            optimizer.register_step_post_hook(lambda *_: connection.advance())
        )
    connection.handles.append(_Attribute(model))
    return model


def _compile_again() -> None:
    """Drop what was compiled: it would run without hooks that came later, or with those that went,
    and nothing would say so.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _followed(model: nn.Module) -> str | None:
    """The part of a model whose additions belong to the penal connection of another module."""
    for name, module in model.named_modules():
        for hook in module._forward_hooks.values():  # noqa: SLF001
            sites = getattr(getattr(hook, "func", None), "__self__", None)
            owner = getattr(getattr(sites, "handler", None), "__self__", None)
            if isinstance(owner, PenalConnection):
                return f"module {name!r}" if name else type(module).__name__
    return None


class _Attribute:
    """A handle that removes ``penal_connection`` from the model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def remove(self) -> None:
        self.model.__dict__.pop(PENAL, None)


def _overwritten(chain: MarkovChain) -> set[Place]:
    """Additions after which the running model overwrites ``x_l`` or ``x_{l-1}``, in some call."""
    known = chain.by_site()
    held: list[tuple[Place, Tensor, int]] = []

    def note(addition: Addition) -> Tensor:
        result = addition.run()
        if addition.site in known:
            stream, _ = known[addition.site].split(addition)
            held.extend((addition.site.place, x, x._version) for x in (result, stream))
        return result

    run_noting(chain.model, chain.example, note)
    return {place for place, value, version in held if value._version != version}
