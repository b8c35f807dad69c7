"""The reduction graph with its public methods: skeletons, paths, reasons and path norms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .graph.structure import Structure
from .inference.reasons import Reason, reasons
from .inference.unrolled import unroll
from .paths.basis import Path
from .paths.norms import path_norm
from .paths.skeleton import Skeleton, choose
from .shown import Shown

if TYPE_CHECKING:
    from rich.table import Table


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
