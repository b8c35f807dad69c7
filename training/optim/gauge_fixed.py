"""Any optimizer in the canonical gauge: rescaled copies of a network take the same steps."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pathspace.errors import InputError, InputTypeError, UnsupportedError, expect_arguments
from pathspace.gauge.transport import expect_transport
from pathspace.graph.structure import Structure

from .canonical_gauge import BALANCED, KEPT, Canonical, canonical, entries, incidence, sides
from .gauge_moves import GaugeMoves, written
from .matching import find_places, find_tensors, movable
from .settings import expect_order, expect_shapes
from .shell import Closure
from .tensors import refuse_shards

RETURNS = ("canonical", "user")


class GaugeFixed(GaugeMoves):
    r"""Run an optimizer in the canonical gauge, so that rescaled copies of a network
    have identical trajectories.

    At construction the network is rescaled to the balanced representative of its orbit, with fixed
    norms for scales before a normalisation; its function does not change (up to the ``eps`` of
    norms by statistics of the data). Every step is a step of the given optimizer, followed at every
    third step by a sweep over all units::

        phi_k += 1/8 log(squares leaving k / squares entering k)

    which divides first moments by the factor of their weight and second moments by
    its square. Weight decay and ``clip_grad_norm_`` are invariant too, because they
    act on the canonical weights.

    The start is exact to rounding; the sweeps maintain the balance approximately, equally for all
    copies. A rescaling by other code during training is undone over several sweeps.

    Args:
        optimizer: any optimizer of ``torch.optim`` whose buffers are known
            (:func:`pathspace.register_transport`), or a list of several that share the parameters,
            such as ``Muon`` for matrices and ``AdamW`` for the rest.
        graph: the reduction graph of the model. Weights outside the optimizer, or without
            ``requires_grad``, keep their values: only the gauge of the others is used.
        norms: the fixed norms for scales on which the loss does not depend (and for units whose
            weights on one side are all 0, as in fresh adapters): ``"unit"``, the norm of each unit,
            at its expectation under torch's default initialisation (4 times that before weights
            that are all 0); ``"tensor"``, the norm of each tensor; ``"initial"``, each unit's norm
            at construction. Only with ``"unit"`` are copies equal whose scales before
            normalisations differ at the start.
        return_to: ``"canonical"``: the model remains in the canonical gauge. ``"user"``: between
            steps it has its original gauge.
        model: the model, if it is a copy of the traced one.

    Raises:
        InputTypeError: the optimizer or the graph has a wrong type.
        InputError: a setting is unknown, or a parameter of the graph is missing.
        UnsupportedError: parameters are sharded, or a buffer has an unknown scaling rule.

    Example:
        >>> import copy, torch, pathspace as ps
        >>> from pathspace.training import GaugeFixed
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        ... ).double()
        >>> x, y = torch.randn(64, 4).double(), torch.randn(64, 1).double()
        >>> twin = copy.deepcopy(model)
        >>> _ = ps.rescale_(twin, ps.trace(twin, x), 3 * torch.randn(8).double())
        >>> losses = []
        >>> for one in (model, twin):
        ...     optimizer = GaugeFixed(
        ...         torch.optim.AdamW(one.parameters(), lr=0.01), ps.trace(one, x)
        ...     )
        ...     for _ in range(50):
        ...         optimizer.zero_grad()
        ...         loss = torch.nn.functional.mse_loss(one(x), y)
        ...         loss.backward()
        ...         _ = optimizer.step()
        ...     losses.append(loss.item())
        >>> abs(losses[0] / losses[1] - 1) < 1e-9
        True
    """

    _own: ClassVar[str] = "gauge"

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        graph: Structure,
        *,
        norms: str = "unit",
        return_to: str = "canonical",
        model: nn.Module | None = None,
    ) -> None:
        expect_arguments("GaugeFixed", graph=graph)
        expect_arguments("GaugeFixed", or_none=True, model=model)
        if return_to not in RETURNS:
            raise InputError(
                f"GaugeFixed found return_to={return_to!r}, expected one of {', '.join(RETURNS)}."
            )
        super().__init__(optimizer)
        for one in self.optimizers:
            if isinstance(one, GaugeFixed):
                raise InputTypeError(
                    "GaugeFixed found a GaugeFixed as its optimizer, expected a plain one; pass"
                    " gauge_fixed.unwrap()."
                )
            expect_transport("GaugeFixed", one)
        self.norms, self.return_to = norms, return_to
        self._tensors = find_tensors("GaugeFixed", graph, model, self.param_groups)
        self._places = find_places(graph, model)
        refuse_shards(
            "GaugeFixed",
            list(self._tensors.values()),
            "a sweep goes from layer to layer; use DistributedDataParallel, or GSGD and GAdam,"
            " which take shards.",
        )
        given = {id(p) for group in self.param_groups for p in group["params"]}
        self._asked = {
            block.name: self._tensors[block.name].requires_grad
            for block in graph.blocks
            if id(self._tensors[block.name]) in given
        }
        alone = [
            block.name
            for block in graph.blocks
            if self._tensors[block.name].requires_grad and block.name not in self._asked
        ]
        if graph.blocks and not self._asked:
            raise InputError(
                "GaugeFixed found no weight of the reduction graph among the parameters of its"
                " optimizer, expected the model that is trained; pass it as model=."
            )
        self._graph, self._turn = movable(
            graph, {name for name, asked in self._asked.items() if asked}
        )
        devices = {self._tensors[block.name].device for block in self._graph.blocks}
        if len(devices) > 1:
            raise InputError(
                f"GaugeFixed found weights on {', '.join(sorted(map(str, devices)))}, expected one"
                " device; give every device a model of its own."
            )
        self._canonical = canonical(self._graph, self._tensors, norms)
        if alone:
            warnings.warn(
                f"GaugeFixed found {len(alone)} trained parameters that no optimizer has (first:"
                f" {alone[0]!r}), which keep their values, and so do the scales at them: rescaled"
                " copies may train differently; give them to an optimizer of the list, such as"
                " AdamW for biases, or freeze them with requires_grad_(False).",
                stacklevel=2,
            )
        self._warn_of_kept()
        self._device = next(iter(devices), torch.device("cpu"))
        # log-scales from the user's gauge to the canonical one
        self._phi = torch.from_numpy(self._canonical.phi).to(self._device)
        self._find_sweep()
        self._turns = 0
        # (raises an error before anything is changed)
        for block in self._graph.blocks:
            list(self._buffers_of(self._tensors[block.name]))
        with torch.no_grad():
            self._wrap()
            # until the first step, for states that belong to the weights as they were
            stays = return_to == "canonical"
            self._given = {n: t.clone() for n, t in self._tensors.items()} if stays else {}
            # (gradients too: a backward pass may have come before)
            self._move(self._phi, True, weights=stays, gradients=stays, statistics=stays)
            self._written = {name: written(self._tensors[name]) for name in self._given}

    # --- the interface of optimizers

    def _let_go(self) -> None:
        """Move the states to the gauge of the weights."""
        if self.return_to == "user":
            self._move(-self._phi, True)

    def _published(self) -> dict[str, Any]:
        """The gauge, as it stands in a state."""
        return {
            "phi": self._phi.clone(),
            "turns": self._turns,
            "kinds": torch.from_numpy(self._canonical.kinds.copy()),
            "targets": torch.from_numpy(self._canonical.targets.copy()),
            "norms": self.norms,
            "return_to": self.return_to,
        }

    def _fits(self, gauge: Mapping[str, Any]) -> bool:
        """Whether the gauge of a state has all parts, in the sizes of this model."""
        own = self._published()
        return (
            all(
                getattr(gauge.get(key), "shape", None) == own[key].shape
                for key in ("phi", "kinds", "targets")
            )
            and isinstance(gauge.get("turns"), int)
            and {"norms", "return_to"} <= gauge.keys()
        )

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; weights are loaded into the model as usual, at any
        time before the next step.
        """
        state_dict, gauge = self._without_own(state_dict)
        if not isinstance(gauge, Mapping) or not self._fits(gauge):
            raise InputError(
                "GaugeFixed found a state without the gauge of this model, expected what"
                " GaugeFixed.state_dict() returned; load the state of a plain optimizer into that"
                " one, before wrapping it."
            )
        if (gauge["norms"], gauge["return_to"]) != (self.norms, self.return_to):
            raise InputError(
                f"GaugeFixed found a state with norms={gauge['norms']!r},"
                f" return_to={gauge['return_to']!r}, expected {self.norms!r} and"
                f" {self.return_to!r}; use the settings it was saved with."
            )
        mine = {id(self._tensors[block.name]) for block in self._graph.blocks}
        given = [p for group in self.param_groups for p in group["params"]]
        expect_order("GaugeFixed", state_dict, self.param_groups)
        expect_shapes("GaugeFixed", state_dict, [p if id(p) in mine else None for p in given])
        super()._load(state_dict)
        found = self._canonical
        self._follow()
        phi, turns = gauge["phi"].to(self._device, copy=True), int(gauge["turns"])
        # (a wrapper may save this state and load it again)
        if turns != self._turns or not torch.equal(phi, self._phi):
            self._give_back(torch.from_numpy(found.phi))
        self._phi, self._turns = phi, turns
        kinds, targets = (gauge[key].cpu().numpy().copy() for key in ("kinds", "targets"))
        self._canonical = Canonical(kinds, found.phi, targets)
        self._find_sweep()

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles, without the traced model."""
        graph = replace(self._graph, captured=None, parameters={}, modules={})  # type: ignore[arg-type]
        return {
            **{key: value for key, value in super().__getstate__().items() if key != "sweep"},
            "_graph": graph,
            # (weak references have no copies)
            "_places": {name: (module(), own) for name, (module, own) in self._places.items()},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle."""
        super().__setstate__(state)
        self._places = {
            name: (ref(module), own) for name, (module, own) in state["_places"].items() if module
        }
        self._find_sweep()

    # --- the gauge

    def _warn_of_kept(self) -> None:
        """Warn about units with weights whose scale no gauge fixes."""
        every = sides(self._graph)
        if not every or not (self._canonical.kinds == KEPT).any():
            return
        squares = torch.cat([s.squares(self._tensors[s.name]).detach().reshape(-1) for s in every])
        unit, entry, _ = incidence(self._graph, every)
        some = (self._canonical.kinds[unit] == KEPT) & (squares.cpu().numpy()[entry] > 0)
        if some.any():
            names = {every[number].name for number in entries(self._graph)[0][entry[some]]}
            warnings.warn(
                f"GaugeFixed leaves the scales of {len(set(unit[some]))} of {self._graph.num_units}"
                f" units as they are (at {min(names)!r}; see fixed_units['nothing']), because"
                " weights only enter or only leave them: rescaled copies may train differently"
                " there.",
                stacklevel=3,
            )

    @property
    def phi(self) -> Tensor:
        """Log-scales of the graph's units, from the original to the canonical gauge, ``(H,)``."""
        return torch.from_numpy(self._turn @ self._phi.cpu().numpy())

    @property
    def fixed_units(self) -> dict[str, np.ndarray]:
        """Kind -> ids of the units: ``balanced``, ``norm`` (fixed) or ``nothing``
        (their scale is not changed).
        """
        kinds = np.full(self._turn.shape[0], KEPT)
        units, joined = self._turn.nonzero()
        kinds[units] = self._canonical.kinds[joined]
        chosen = {"balanced": kinds == BALANCED, "nothing": kinds == KEPT}
        return {
            **{name: np.flatnonzero(mask) + 1 for name, mask in chosen.items()},
            "norm": np.flatnonzero(~chosen["balanced"] & ~chosen["nothing"]) + 1,
        }

    def _take(self, closure: Closure | None) -> Any:
        self._look_at_model()
        if self.return_to == "user":
            return self._take_and_return(closure)
        rests = self._rests() and self._without_gradients()
        loss = self._inner_steps(closure)
        if not rests:
            self._sweep()
        return loss

    def _take_and_return(self, closure: Closure | None) -> Any:
        """A step that leaves the model in the user's gauge, whatever ends it."""
        runs = closure is not None
        rests = self._rests() and self._without_gradients()

        def dense() -> Any:
            loss = closure() if closure else None
            self._refuse_sparse()
            return loss

        own = self._copies()
        # (a closure runs the model, which needs running statistics in the gauge of its weights)
        self._move(self._phi, weights=True, gradients=True, statistics=runs)
        there, ends = self._copies(), own
        try:
            try:
                loss = self._inner_steps(dense if runs else None)
            finally:
                ends = self._carried_back(own, there)
                self._move(-self._phi, gradients=True, statistics=runs)
            if not rests:
                self._sweep()
        finally:
            for name, end in ends.items():
                self._tensors[name].copy_(end)
        return loss

    def _without_gradients(self) -> bool:
        """Whether all gradients are 0, as in a step that loaders take to make the state."""
        every = [p.grad for group in self.param_groups for p in group["params"]]
        return not any(bool(grad.any()) for grad in every if grad is not None)

    def _look_at_model(self) -> None:
        """Follow what other code has done to the model since the last step."""
        self._given = {}
        self._refuse_unwrapped()
        self._follow()
        self._refuse_sparse()
        for name, asked in self._asked.items():
            if self._tensors[name].requires_grad is not asked:
                change = "frozen" if asked else "released"
                raise InputError(
                    f"GaugeFixed found parameter {name!r} {change} since it was made, which changes"
                    " the free scales; go on with GaugeFixed(gauge_fixed.unwrap(), graph), which"
                    " keeps the state."
                )

    def _refuse_sparse(self) -> None:
        for name in self._asked if self.return_to == "user" else ():
            grad = self._tensors[name].grad
            if grad is not None and grad.is_sparse:
                raise UnsupportedError(
                    f"GaugeFixed found a sparse gradient of {name!r} with return_to='user',"
                    " expected dense ones: rows that are not there cannot be rescaled; use"
                    " return_to='canonical' or an embedding without sparse=True."
                )
