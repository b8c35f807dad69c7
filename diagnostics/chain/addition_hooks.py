"""The additions of two tensors in a running model, which correspond to the
additions of a captured graph.

Hooks on every module record whose ``forward`` is running, and a ``TorchFunctionMode``, active
while the outermost module runs, intercepts each addition in a ``forward``. An addition is
identified by the path of the module, the number of the call of this module, and the number of
earlier additions in the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pathspace.errors import UnsupportedError

from ..shared.recomputation import start_following, stop_following

ADDITIONS = frozenset(
    ["add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__isub__", "lerp"]
)
_MINUS = frozenset(["sub", "sub_", "__sub__", "__isub__"])
_IN_PLACE = frozenset(["add_", "__iadd__", "sub_", "__isub__"])


class Site(NamedTuple):
    """One addition of a running model: number ``order`` in call ``call`` of
    ``module``, both counted from 0.
    """

    module: str
    call: int
    order: int

    @property
    def place(self) -> tuple[str, int]:
        """The addition in the code of the module, whatever the call."""
        return self.module, self.order


class Addition(NamedTuple):
    """An addition before it runs, ``left + alpha * right`` (a subtraction has a negative alpha);
    of ``lerp(x, y, weight)`` the operands are ``x`` and ``weight * (y - x)``.
    """

    site: Site
    left: Tensor
    right: Tensor
    alpha: float
    in_place: bool
    run: Callable[[], Tensor]


def plus(left: Tensor, right: Tensor, alpha: float = 1.0, in_place: bool = False) -> Tensor:
    """``left + alpha * right``, an addition that a handler makes, so that no mode intercepts it.

    A handler runs without the mode, but while ``torch.compile`` traces it, its additions become
    part of a graph, and some backends run this graph in Python under the mode. So they are written
    there as operators of another name.

    Args:
        left: the first operand.
        right: the second operand.
        alpha: factor of ``right``.
        in_place: overwrite ``left``.

    Example:
        >>> plus(torch.ones(2), torch.ones(2), -0.5)
        tensor([0.5000, 0.5000])
    """
    factor: dict[str, Any] = {} if alpha == 1 else {"alpha": alpha}
    if torch.compiler.is_compiling():
        overload = torch.ops.aten.add_.Tensor if in_place else torch.ops.aten.add.Tensor
        return overload(left, right, **factor)  # type: ignore[no-any-return]
    return left.add_(right, **factor) if in_place else torch.add(left, right, **factor)


Handler = Callable[[Addition], Tensor]
# The additions of one call, in order: number of dimensions of both operands, and alpha.
Kinds = tuple[tuple[int, int, float], ...]
# A module's path, the additions of its call, and how often each module has been called so far.
# The inputs of the whole model, positional and by keyword.
Start = Callable[[tuple[Any, ...], dict[str, Any]], None]
End = Callable[[str, Kinds, Mapping[str, int]], None]
# Stores what a handler depends on, and returns a maker of contexts in which it does so again.
Moment = Callable[[], Callable[[], AbstractContextManager[None]]]


def unchanging() -> Callable[[], AbstractContextManager[None]]:
    """The moment of a handler that always does the same."""
    return nullcontext


def module_names(model: nn.Module) -> dict[str, str]:
    """Every module path -> the first path of the same module."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(module), name)
        for name, module in model.named_modules(remove_duplicate=False)
    }


def _adds_nothing(module: nn.Module) -> bool:
    """Whether a module needs no hooks: torch's own layers without children
    make no visible additions.
    """
    own = type(module).__module__.startswith("torch.nn.modules.")
    return own and next(module.children(), None) is None and "forward" not in module.__dict__


class Sites:
    """Follows a model's forward and passes every addition of two floating-point tensors,
    except scalars, to a handler.

    Args:
        handler: called with the addition, returns its result; ``addition.run()``
            returns the unchanged result.
        start: called with the inputs when the whole model starts to run.
        end: called after a module has run, with its path, its additions, and the number of
            calls of every module.
        compiled: let ``torch.compile`` trace the handler, too; otherwise a
            compiled model is not followed.
        others: function -> a replacement, called with the function and its arguments.
        moment: called when a checkpointed function first runs; returns what makes a context in
            which it runs again later, with all that the handler depended on then.

    Example:
        >>> block = nn.Module()
        >>> block.forward = lambda x: x + torch.relu(x)
        >>> seen = []
        >>> sites = Sites(lambda addition: (seen.append(addition.site), addition.run())[1])
        >>> with sites.following(block):
        ...     _ = block(torch.ones(2))
        >>> seen
        [Site(module='', call=0, order=0)]
    """

    def __init__(
        self,
        handler: Handler,
        start: Start | None = None,
        end: End | None = None,
        compiled: bool = False,
        others: Mapping[Callable[..., Any], Callable[..., Any]] | None = None,
        moment: Moment = unchanging,
    ) -> None:
        self.handler = handler
        self.moment = moment
        self.end = end
        self.compiled = compiled
        # (what torch.compile may trace is part of the model; what measures is not, and
        # safe_deepcopy leaves it out)
        self.stays_behind = not compiled
        self.copied = False
        self.others = others or {}
        self.recomputed = 0
        self.start = start
        self.stack: list[list[Any]] = []
        self.thread = 0
        self.calls: dict[str, int] = {}
        self.mode: _Mode | None = None
        self.handles: list[Any] = []

    def attach(self, model: nn.Module, outermost: bool = False) -> None:
        """Register the hooks; :meth:`detach` removes them.

        Args:
            model: the model to follow.
            outermost: receive the results of other followers of the same model, instead of
                the model's own additions.
        """
        for name, module in model.named_modules():
            if name and _adds_nothing(module):
                continue
            before, after = partial(self._enter, name), partial(self._leave, name)
            self.handles.append(
                module.register_forward_pre_hook(before, prepend=outermost, with_kwargs=True)
            )
            self.handles.append(
                module.register_forward_hook(after, always_call=True, prepend=not outermost)
            )

    def follows(self, module: nn.Module) -> bool:
        """Whether a module, or a part of it, has hooks of this follower."""
        hooks = (
            hook
            for part in module.modules()
            for hook in part._forward_hooks.values()  # noqa: SLF001
        )
        return any(getattr(getattr(hook, "func", None), "__self__", None) is self for hook in hooks)

    def detach(self) -> None:
        """Remove every hook, and the mode if an exception left it active."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self._close()

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[Sites]:
        """Follow ``model`` inside a ``with`` block, in which parts that are
        compiled run uncompiled.
        """
        self.attach(model)
        try:
            with _uncompiled(model):
                yield self
        finally:
            self.detach()

    def _enter(self, name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.copied or (torch.compiler.is_compiling() and not self.compiled):
            return
        if self.stack and self._elsewhere():
            raise UnsupportedError(
                "A model whose additions are followed, such as a penalised one, was called by a"
                " thread while another thread ran it, expected one at a time; give each thread a"
                " copy of the model."
            )
        if not self.stack:
            self.recomputed = 0
            if not name:
                self.calls.clear()
                if self.start is not None:
                    self.start(args, kwargs)
            self._open()
        self.stack.append([name, self.calls.get(name, 0), 0, []])
        self.calls[name] = self.stack[-1][1] + 1

    def _leave(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        if self.copied or (torch.compiler.is_compiling() and not self.compiled):
            return
        # another hook may have raised an exception before this one was entered
        if not self.stack or self.stack[-1][0] != name or self._elsewhere():
            return
        kinds = self.stack.pop()[3]
        if not self.stack:
            self._close()
        # after an exception there is no output; do not hide it by another exception
        if self.end is not None and (torch.compiler.is_compiling() or output is not None):
            self.end(name, tuple(kinds), self.calls)

    @contextmanager
    def resumed(self, name: str, call: int, order: int, calls: Mapping[str, int]) -> Iterator[None]:
        """Continue a call at a position, for a part of it that is
        recomputed in the backward pass; ``calls`` is the number of calls of every module then.
        """
        self._open()
        self.stack.append([name, call, order, []])
        latest, self.calls = self.calls, dict(calls)
        try:
            yield
        finally:
            self.calls = latest
            self._close()

    def _elsewhere(self) -> bool:
        """Whether another thread than this one runs the model now."""
        return not torch.compiler.is_compiling() and self.thread != get_ident()

    def _open(self) -> None:
        self.mode = _Mode(self)
        self.mode.__enter__()  # type: ignore[no-untyped-call]
        if not torch.compiler.is_compiling():
            self.thread = get_ident()
            start_following(self)

    def _close(self) -> None:
        self.stack.clear()
        if not torch.compiler.is_compiling():
            stop_following(self)
        if self.mode is not None:
            mode, self.mode = self.mode, None
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def add(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Number an addition and pass it to the handler; operands other than two
        floating-point tensors just run.
        """
        named = ("input", "other", "end", "weight")
        operands = (*args, *(kwargs[key] for key in named if key in kwargs))
        run, name = partial(func, *args, **kwargs), func.__name__
        if name == "lerp":
            start, end, weight = operands
            operands = (start, weight * (end - start))
        floating = [
            isinstance(value, Tensor) and value.is_floating_point() for value in operands[:2]
        ]
        if len(operands) != 2 or not all(floating) or "out" in kwargs or not self.stack:
            return run()
        if not (operands[0].ndim or operands[1].ndim):
            # a sum of scalars is a loss, which a model may or may not compute
            return run()
        frame = self.stack[-1]
        frame[2] += 1
        alpha = float(kwargs.get("alpha", 1)) * (-1 if name in _MINUS else 1)
        left, right = operands if name != "__radd__" else operands[::-1]
        frame[3].append((left.ndim, right.ndim, alpha))
        if torch.compiler.is_compiling():
            # (the graph runs it under the mode, which must not number it again)
            run = partial(plus, left, right, alpha, name in _IN_PLACE)
        site = Site(frame[0], frame[1], frame[2] - 1)
        return self.handler(Addition(site, left, right, alpha, name in _IN_PLACE, run))

    def __getstate__(self) -> dict[str, Any]:
        """Reset the state in copies of a followed model, which are not inside a
        forward; copies measure nothing.
        """
        if self.stays_behind:
            return {"stays_behind": True, "copied": True}
        return {**self.__dict__, "stack": [], "calls": {}, "mode": None}


def _uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
    compiled = any(vars(module).get("_compiled_call_impl") for module in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


class _Mode(TorchFunctionMode):
    def __init__(self, sites: Sites) -> None:
        super().__init__()
        self.sites = sites

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ADDITIONS:
            return self.sites.add(func, args, kwargs or {})
        if func in self.sites.others:
            return self.sites.others[func](func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


__all__ = [
    "ADDITIONS",
    "Addition",
    "End",
    "Handler",
    "Kinds",
    "Site",
    "Sites",
    "module_names",
    "plus",
]
