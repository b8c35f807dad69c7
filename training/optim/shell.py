"""One shell around optimizers of torch: their groups, settings and states are its own.

What a step does beside the steps of the inner optimizers is written by the subclasses: values of
paths in place of weights (:class:`pathspace.training.PathSpace`), or a gauge that is kept
(:class:`pathspace.training.GaugeFixed`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar
from weakref import ref

import torch
from torch.optim import Optimizer

from pathspace.errors import InputError, InputTypeError

from .settings import expect_order, expect_state

Closure = Callable[[], Any]


class Shell(Optimizer):
    """Several optimizers of one model as a single optimizer, with their groups and states.

    Schedulers may change the settings that all of the optimizers have:
    :attr:`defaults` holds no others.

    Args:
        optimizer: one optimizer of torch's kind, or several.
    """

    # the entry of a state dict that belongs to the shell, not to an inner optimizer
    _own: ClassVar[str] = ""

    def __init__(self, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
        self._several = isinstance(optimizer, list | tuple)
        self._stepping = False
        if not self.optimizers or not all(isinstance(one, Optimizer) for one in self.optimizers):
            raise InputTypeError(
                f"{self._owner} found an optimizer of type {type(optimizer).__name__},"
                " expected one of torch.optim, or a list of several."
            )
        held = [
            {id(p) for group in one.param_groups for p in group["params"]}
            for one in self.optimizers
        ]
        if len(set().union(*held)) < sum(map(len, held)):
            raise InputError(
                f"{self._owner} found a parameter in two of its optimizers, expected each"
                " in one; give every optimizer parameters of its own."
            )
        # a scheduler that finds a setting here, such as betas, changes it in every group:
        # all of them must have it
        first, *others = (one.defaults for one in self.optimizers)
        shared = {
            key: value for key, value in first.items() if all(key in other for other in others)
        }
        super().__init__(self.param_groups, shared)
        self._made = True

    @property
    def _owner(self) -> str:
        """The name of the class, for messages."""
        return type(self).__name__

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the inner optimizers (the same objects)."""
        if len(self.optimizers) == 1:
            result: list[dict[str, Any]] = self.optimizers[0].param_groups
            return result
        return list(chain.from_iterable(one.param_groups for one in self.optimizers))

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """No effect; torch's constructor assigns groups."""

    @property
    def state(self) -> Any:
        """The state of the inner optimizer (the same object), or of several together."""
        if len(self.optimizers) == 1:
            return self.optimizers[0].state
        return {key: value for one in self.optimizers for key, value in one.state.items()}

    @state.setter
    def state(self, state: Any) -> None:
        """No effect; torch's constructor assigns a state."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002
        """Refused: a new group belongs to one of the optimizers, and changes what is free.

        Raises:
            InputError: always after construction.
        """
        # (torch's constructor adds the groups, too)
        if "_made" in self.__dict__:
            raise InputError(
                f"{self._owner} found a parameter group after it was made, expected all of"
                " them before; add it to one of its optimizers, and wrap them again."
            )

    # --- steps

    def step(self, closure: Closure | None = None) -> Any:
        """One step; with a closure, the loss it returns."""
        # (the decorator of torch takes three microseconds more)
        with torch.no_grad():
            if torch.compiler.is_compiling():
                return _uncompiled(self._take, closure)
            return self._take(closure)

    def _take(self, closure: Closure | None) -> Any:
        """The step of a subclass, without gradients; here that of the inner optimizers."""
        return self._inner_steps(closure)

    @staticmethod
    def _loss(closure: Closure | None) -> Any:
        """The loss of a closure, which computes gradients."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def _inner_steps(self, closure: Closure | None = None) -> Any:
        """One step of each inner optimizer; returns the loss of the closure."""
        self._stepping = True
        try:
            if len(self.optimizers) == 1:
                one = self.optimizers[0]
                return one.step() if closure is None else one.step(closure)
            loss = self._loss(closure)
            for one in self.optimizers:
                one.step()
        finally:
            self._stepping = False
        return loss

    def _rests(self) -> bool:
        """Whether all learning rates are 0, so that no weight may change by rounding.

        Loaders of distributed checkpoints take such steps, to make the state.
        """
        return all(_is_zero(group["lr"]) for group in self.param_groups)

    # --- the inner optimizers

    def _wrap(self) -> None:
        """Take the inner optimizers over: a step of their own is then mentioned."""
        shell = ref(self)

        def mention(inner: Optimizer, *_: Any) -> None:
            if (outer := shell()) is not None:
                outer.notice_step(inner)

        for one in self.optimizers:
            if isinstance(before := one.__dict__.get("wrapper"), Shell):
                before.unwrap()
            one.__dict__["wrapper"] = self
            one.__dict__["_mention"] = one.register_step_pre_hook(mention)

    def notice_step(self, inner: Optimizer) -> None:
        """Warn of a step of an inner optimizer that this one has not asked for."""
        if not self._stepping:
            warnings.warn(
                f"{self._owner} found a step of its inner {type(inner).__name__}, which is a plain"
                f" step on the weights: call the step of the {self._owner}.",
                stacklevel=5,
            )

    def _wraps(self) -> bool:
        """Whether this shell is the last around its optimizers."""
        return all(one.__dict__.get("wrapper") is self for one in self.optimizers)

    def unwrap(self) -> Optimizer | tuple[Optimizer, ...]:
        """The inner optimizer, or all of them if a list was given, with their states; this
        shell takes no further step.

        Example:
            >>> import torch, pathspace as ps
            >>> from pathspace.training import GaugeFixed
            >>> model, x = (
            ...     torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)),
            ...     torch.randn(3, 4),
            ... )
            >>> wrapped = GaugeFixed(
            ...     torch.optim.SGD(model.parameters(), lr=0.1), ps.trace(model, x)
            ... )
            >>> _ = model[0].requires_grad_(False)
            >>> wrapped = GaugeFixed(wrapped.unwrap(), ps.trace(model, x))
        """
        if self._wraps():
            self._let_go()
            for one in self.optimizers:
                del one.__dict__["wrapper"]
                one.__dict__.pop("_mention").remove()
        return self.optimizers if self._several else self.optimizers[0]

    def _let_go(self) -> None:
        """What a subclass does to the states before the inner optimizers go on alone."""

    def _refuse_unwrapped(self) -> None:
        if not self._wraps():
            raise InputError(
                f"{self._owner} found a step after unwrap(), or after another {self._owner} has"
                " taken over its optimizer; step the one that has it now."
            )

    # --- states, copies and pickles

    def state_dict(self) -> dict[str, Any]:
        """All states as one state dict."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self._state()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; weights may be loaded before or after.

        Raises:
            InputError: the state belongs to other optimizers.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        expect_state(self._owner, state_dict)
        self._load(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _state(self) -> dict[str, Any]:
        state = join_states([one.state_dict() for one in self.optimizers])
        if not self._own:
            return state
        entries = self._without_own(state)[0]["state"]
        every = [number for group in state["param_groups"] for number in group["params"]]
        # (loaders of sharded states read only states of trained parameters)
        given = [p for group in self.param_groups for p in group["params"]]
        holder = next((i for i, p in enumerate(given) if p.requires_grad), 0)
        # (loaders of distributed states want an entry of every parameter)
        mark = {"holder": torch.tensor(holder)}
        state["state"] = {
            key: {
                **entries.get(key, {}),
                self._own: {**mark, **self._published()} if key == holder else mark,
            }
            for key in every
        }
        return state

    def _published(self) -> dict[str, Any]:
        """The shell's own entry of a state dict."""
        return {}

    def _without_own(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """A state without the shell's own entry, and this entry (empty: there is none)."""
        found: dict[str, Any] = {}
        entries: dict[Any, Any] = {}
        for key, entry in state["state"].items():
            if isinstance(entry, Mapping) and self._own in entry:
                if isinstance(own := entry[self._own], Mapping) and len(own) > 1:
                    found = {name: value for name, value in own.items() if name != "holder"}
                entry = {name: value for name, value in entry.items() if name != self._own}
                if not entry:
                    continue
            entries[key] = entry
        return {**state, "state": entries}, found

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        expect_order(self._owner, state_dict, self.param_groups)
        for one, part in zip(
            self.optimizers, split_state(state_dict, self.optimizers), strict=True
        ):
            one.load_state_dict(part)

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles, without hooks and without the step that a
        scheduler has put in its place.
        """
        kept = {
            key: value
            for key, value in self.__dict__.items()
            if "hook" not in key and key not in ("step", "_stepping")
        }
        return {**kept, "_last": bool(self._own) and self._wraps()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle."""
        self.__dict__.update(state)
        self._stepping = False
        self._patch_step_function()
        super().__setstate__({})
        if self.__dict__.pop("_last"):
            self._wrap()


def _is_zero(rate: Any) -> bool:
    """Whether a learning rate is 0, as far as one can see without waiting for a device."""
    if isinstance(rate, torch.Tensor):
        return rate.device.type == "cpu" and not rate.detach().numpy().any()
    return not rate


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _uncompiled(take: Callable[[Closure | None], Any], closure: Closure | None) -> Any:
    """A step that a compiler does not look into: it would compile one for every set of weights."""
    return take(closure)


def join_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state dict from several, with all groups and consecutive numbers of parameters."""
    if len(states) == 1:
        return dict(states[0])
    joined: dict[str, Any] = {"state": {}, "param_groups": []}
    first = 0
    for state in states:
        joined["state"] |= {first + key: value for key, value in state["state"].items()}
        joined["param_groups"] += [
            {**group, "params": [first + number for number in group["params"]]}
            for group in state["param_groups"]
        ]
        first += sum(len(group["params"]) for group in state["param_groups"])
    return joined


def split_state(state: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """The reverse of :func:`join_states`; ``torch.distributed.checkpoint`` puts names in the place
    of numbers.
    """
    if len(optimizers) == 1:
        return [dict(state)]
    groups, parts = iter(state["param_groups"]), []
    for one in optimizers:
        mine = [next(groups) for _ in one.param_groups]
        keys = [key for group in mine for key in group["params"]]
        number = {key: place for place, key in enumerate(keys)}
        entries = {number[key]: value for key, value in state["state"].items() if key in number}
        mine = [{**group, "params": [number[key] for key in group["params"]]} for group in mine]
        parts.append({"state": entries, "param_groups": mine})
    return parts
