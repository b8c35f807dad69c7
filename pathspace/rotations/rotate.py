"""A change of basis, applied to the weights of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import InputError
from ..models.copies import set_parameters
from ..models.finite import count_nonfinite
from ..models.values import require_runnable
from ..models.walk import every_tensor
from .elements import checked, hadamard, random_element
from .space import FeatureSlice, FeatureSpaces, Space

M = TypeVar("M", bound=nn.Module)
Element = Tensor | str


def rotate_(
    model: M, spaces: FeatureSpaces, elements: Mapping[str, Element] | str, seed: int = 0
) -> M:
    """Change the basis of feature spaces in place; the model computes the same function.

    Writers become ``A w`` (and biases ``A b``), readers ``w A^-1``. Gains of norms between them
    move into the readers and become 1; a parameter with two names becomes two if both need
    different numbers, and ``config.tie_word_embeddings`` follows. Numbers are computed in float64.

    Args:
        model: the model of the spaces.
        spaces: from :func:`pathspace.spaces`.
        elements: name of a space -> a matrix of its group, of shape ``(size, size)`` or
            ``(count, size, size)``; for pairs behind a rotary embedding also complex numbers of
            shape ``(count,)``; ``"random"`` or ``"hadamard"`` (with random signs). One of these
            words alone takes it for every space, ``"hadamard"`` for those with orthogonal
            matrices.
        seed: of the random numbers.

    Returns:
        The model.

    Raises:
        InputError: a space is unknown or rigid, a matrix is not in its group, or a gain is 0.

    Example:
        >>> import torch, pathspace as ps
        >>> model, x = (
        ...     torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 2)),
        ...     torch.ones(3),
        ... )
        >>> before = model(x)
        >>> _ = ps.rotate_(model, ps.spaces(model, x), "random")
        >>> torch.allclose(model(x), before, atol=1e-5)
        True
    """
    change = BasisChange(spaces, matrices(spaces, elements, seed), lambda name: own[name])
    own = {
        name: parameter.detach() for name, parameter in every_tensor(model, "_parameters").items()
    }
    spaces.expect_own("rotate_", own)
    require_runnable("rotate_", own.items())
    # (names of a tie that was not cut follow the first one)
    places = {name: name if name in spaces.sizes else spaces.ties[name] for name in own}
    new = {name: change.of(place) for name, place in places.items() if place in change.names}
    set_parameters(model, new)
    return model


def matrices(
    spaces: FeatureSpaces, elements: Mapping[str, Element] | str, seed: int = 0
) -> dict[str, Tensor]:
    """Name of a space -> its matrices, shape ``(count, size, size)``."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(elements, str):
        some = spaces.free
        if elements == "hadamard":
            some = [space for space in some if space.group in ("O", "GL") and space.size > 1]
        elements = {space.name: elements for space in some}
    found = {}
    known = {space.name: space for space in spaces.free}
    for name, element in elements.items():
        if name not in known:
            rigid = next((space for space in spaces.rigid if space.name == name), None)
            why = f"it is rigid ({rigid.reason})" if rigid else f"expected one of {list(known)[:3]}"
            raise InputError(f"rotate_ found the space {name!r}: {why}.")
        found[name] = _element(known[name], element, generator)
    return found


def _element(space: Space, element: Element, generator: torch.Generator) -> Tensor:
    if not isinstance(element, str):
        return checked(space, element)
    if element == "random":
        return random_element(space, generator)
    if element != "hadamard":
        raise InputError(
            f"rotate_ found {element!r} for {space.name!r}, expected a matrix, 'random' or"
            " 'hadamard'."
        )
    if space.group not in ("O", "GL"):
        raise InputError(
            f"rotate_ found 'hadamard' for {space.name!r}, whose group is {space.group}, expected"
            " O or GL; take 'random'."
        )
    return torch.stack([hadamard(space.size, generator) for _ in range(space.count)])


class BasisChange:
    """A change of basis, parameter by parameter.

    Args:
        spaces: all spaces.
        matrices: name of a space -> its matrices.
        read: the numbers of a parameter by name.
    """

    def __init__(
        self, spaces: FeatureSpaces, matrices: Mapping[str, Tensor], read: Callable[[str], Tensor]
    ) -> None:
        self.spaces, self.read = spaces, read
        self._parts: dict[str, list[tuple[FeatureSlice, Tensor]]] = {}
        self._folded: dict[str, list[np.ndarray]] = {}
        self._factors: np.ndarray | None = None
        chosen = dict(matrices) | _sharing_gains(spaces, matrices)
        for space in spaces.free:
            if space.name in chosen:
                own = chosen[space.name]
                # (of an orthogonal matrix both are the same)
                duals = own if space.keeps_length else torch.linalg.inv(own).mT
                for part in space.slices:
                    both = (part, duals if part.dual else own)
                    self._parts.setdefault(part.parameter, []).append(both)
                for name in space.gains:
                    self._folded.setdefault(name, []).append(spaces.gains_of(space, name))

    @property
    def names(self) -> set[str]:
        """The parameters that change."""
        return self._parts.keys() | self._folded.keys()

    def recipe(self, name: str) -> list[object]:
        """What happens to a parameter: names of a tensor with equal recipes stay one tensor."""
        parts = [
            (id(matrix), part.dim, part.positions.tolist(), self._gains(part).tolist())
            for part, matrix in self._parts.get(name, ())
        ]
        return [*parts, *(positions.tolist() for positions in self._folded.get(name, ()))]

    def of(self, name: str) -> Tensor:
        """The new numbers of a parameter, in its own type."""
        return self.turned(name).to(self.read(name))

    def turned(self, name: str) -> Tensor:
        """The new numbers of a parameter in float64."""
        old = self.read(name)
        new = old.detach().to("cpu", torch.float64, copy=True).contiguous()
        if bad := count_nonfinite(new):
            raise InputError(
                f"The change of basis found {bad} values in {name!r} that are NaN or infinite,"
                " expected finite numbers, because it spreads them; use a checkpoint from before it"
                " diverged."
            )
        for part, matrix in self._parts.get(name, ()):
            new = self._turned(new, part, matrix)
        for positions in self._folded.get(name, ()):
            new.view(-1)[torch.from_numpy(positions)] = 1.0 - self.spaces.shifts[name]
        return new

    def _turned(self, new: Tensor, part: FeatureSlice, matrix: Tensor) -> Tensor:
        """``A w / m`` for writers, ``A^-T w m`` for readers, along one dimension; ``m``: gains."""
        count, size = part.positions.shape
        rows = new.movedim(part.dim, 0)
        at = part.positions.reshape(-1)
        values = rows[at].reshape(count, size, -1)
        values = values * self._gains(part)[..., None]
        rows[at] = (matrix @ values).reshape(rows[at].shape)
        return rows.movedim(0, part.dim)

    def _gains(self, part: FeatureSlice) -> Tensor:
        """What each number is multiplied by before its basis changes."""
        if not self._folded:
            return torch.ones(part.positions.shape).double()
        factor = torch.from_numpy(self.factors[part.coordinates])
        duals = torch.from_numpy(self.spaces.solution.dual[part.coordinates])
        return torch.where(duals, factor, 1 / factor)

    @property
    def factors(self) -> np.ndarray:
        """How many times each coordinate is that of its basis."""
        if self._factors is None:
            self._factors = self.spaces.factors(self.read)
        return self._factors


def _sharing_gains(spaces: FeatureSpaces, chosen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Identities for other spaces with the same gains, whose readers have to take them in, too."""
    found: dict[str, Tensor] = {}
    folded = {space.name: spaces.solution.gains_of(space.classes) for space in spaces.free}
    waiting = list(chosen)
    while waiting:
        gains = folded[waiting.pop()]
        for space in spaces.free:
            known = space.name in chosen or space.name in found
            if not known and np.isin(folded[space.name], gains).any():
                found[space.name] = torch.eye(space.size).double().expand(space.count, -1, -1)
                waiting.append(space.name)
    return found
