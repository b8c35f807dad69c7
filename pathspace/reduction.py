"""The reduction graph with its public methods: skeletons, paths, reasons and path norms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .graph.structure import LOG_2, Structure
from .inference.reasons import Reason, reasons
from .inference.unrolled import unroll
from .paths.basis import Path
from .paths.norms import path_norm
from .paths.skeleton import Skeleton, choose
from .shown import Shown

if TYPE_CHECKING:
    from rich.table import Table

# powers of random scales stay within 2^-64 and 2^64
MOST_POWER = 64


class ReductionGraph(Shown, Structure):
    """The reduction graph with its public methods."""

    __doc__ = Structure.__doc__

    def skeleton(self, rule: str = "modulo", seed: int = 0) -> Skeleton:
        """Choose two spanning trees; see :func:`pathspace.paths.skeleton.choose`."""
        return choose(self, rule=rule, seed=seed)

    def paths(self, max_steps: int | None = None) -> Iterator[Path]:
        """Iterate over the network's paths (Definition 1), with recurrent layers unrolled.

        Args:
            max_steps: largest number of recurrent steps to unroll; by default the
                length of the example input.

        Yields:
            Paths with their counting vectors; each sequence of weights once.

        Raises:
            UnsupportedError: the unrolled network is too large to enumerate.

        Example:
            >>> import torch, pathspace as ps
            >>> rnn = torch.nn.RNN(1, 1, nonlinearity="relu", bias=False)
            >>> graph = ps.trace(rnn, torch.randn(3, 1, 1))
            >>> [str(path) for path in graph.paths()]
            ['weight_ih_l0[0,0]', 'weight_ih_l0[0,0] weight_hh_l0[0,0]', 'weight_ih_l0[0,0] weight_hh_l0[0,0]^2']
        """  # noqa: E501
        unrolled = unroll(self, max_steps)
        for walk in unrolled.walks():
            yield Path.from_edges(self, unrolled.edges(walk))

    def reasons(self) -> tuple[Reason, ...]:
        """For every fixed scale, the shortest chain of operations to the root
        (:func:`pathspace.inference.reasons.reasons`).
        """
        return reasons(self)

    def path_norm(
        self,
        p: float = 1,
        log: bool = False,
        batch_dim: int | None = 0,
        until: str | None = None,
        bound: bool = False,
    ) -> float:
        """``(sum over paths |v|^p)^(1/p)``, or its logarithm; see :func:`pathspace.path_norm`."""
        return path_norm(self, p, log, batch_dim, until=until, bound=bound)

    def random_powers(self, seed: int, largest: int = 12) -> Tensor:
        """Log-scales of random powers of two between ``2^-largest`` and ``2^largest``, which no
        type has to round.

        Scales of which weights meet high powers are drawn so much closer to 1 that these powers
        stay below ``2^64``: by fractional powers of two, where nothing else is left.

        Args:
            seed: seed of the draws.
            largest: the largest exponent of two.

        Returns:
            The log-scales, shape ``(num_units,)``.

        Example:
            >>> import torch, pathspace as ps
            >>> model = torch.nn.Sequential(
            ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
            ... )
            >>> phi = ps.trace(model, torch.randn(1, 2)).random_powers(seed=0, largest=2)
            >>> len(phi), bool(phi.exp().log2().abs().max() <= 2)
            (3, True)
        """
        generator = torch.Generator().manual_seed(seed)
        units = (self.num_units,)
        exponents = torch.randint(-largest, largest + 1, units, generator=generator).double()
        if self.forms.shape[0]:
            sizes = abs(self.forms.astype(np.float64))
            # what the most demanding of the products that a unit takes part in allows it
            most = np.ones(self.num_units)
            np.maximum.at(most, sizes.indices, np.repeat(sizes.sum(1), np.diff(sizes.indptr)))
            room = torch.from_numpy(MOST_POWER / most)
            fraction = 2 * torch.rand(units, generator=generator, dtype=torch.float64) - 1
            closer = (fraction * (room.floor() + 0.5)).round()
            closer = torch.where(room < 1, fraction * room, closer)
            exponents = torch.where(room < largest, closer, exponents)
        return exponents * LOG_2

    def __rich__(self) -> Table:
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        table = Table(
            box=box.SIMPLE, title="Reduction graph", title_justify="left", show_header=False
        )
        table.add_column(style="bold")
        table.add_column(justify="right")
        table.add_column(overflow="fold")
        table.add_row("weights", f"{self.num_weights:,}", f"in {len(self.blocks)} tensors")
        table.add_row(
            "units",
            f"{self.num_units:,}",
            f"free scales; {self.num_exact_units:,} exact, every eps included",
        )
        table.add_row(
            "dimension", f"{self.dimension:,}", "independent path values: weights less units"
        )
        pins = Counter(pin.op for pin in self.pinned)
        words = ", ".join(
            f"{op} ({count})" if count > 1 else op for op, count in pins.most_common(4)
        )
        table.add_row(
            "pins", f"{len(self.pinned):,}", escape(words + (", ..." if len(pins) > 4 else ""))
        )
        table.add_row(
            "next",
            "",
            "graph.skeleton(), ps.verify(model, x), ps.explain(model, x), ps.balance(model, graph)",
        )
        return table
