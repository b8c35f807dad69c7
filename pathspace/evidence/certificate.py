"""The result of :func:`pathspace.verify`: verdicts with their evidence, as a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..shown import Shown, text_table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

FORMAT = "pathspace-certificate/1"
MARKS = {True: ("holds", "green"), False: ("fails", "red"), None: ("not applicable", "yellow")}


@dataclass(frozen=True)
class Certificate(Shown):
    """Verdicts on one model.

    Attributes:
        model: class of the model.
        weights: ``m``, scalar weights in path space.
        units: ``H``, units with a free scale, at ``eps = 0``.
        dimension: ``m - H``.
        basis_paths: how many basis paths the two trees give.
        rank: exact rank of the path matrix, ``None`` where no matrix was formed.
        method: ``"exact"`` (a matrix was formed) or ``"certificate"`` (both
            bounds proven from structure).
        theorem1: unrolled paths from basis paths, with integer coefficients.
        theorem2: outputs and activations from path values and signs.
        theorem3: number and independence of basis paths.
        invariance: largest relative violations of the rescaling symmetry, and their tolerance.
        parameters: scalars in path space, pinned, and unused; they add up to the model's.
        units_exact: dimension of the gauge group that is exact for the unchanged
            model, every ``eps`` included.
        dimension_exact: ``m`` less ``units_exact``.
        approximate_units: ``units`` less ``units_exact``: free for ``eps = 0`` only.
        levels: both levels with the change of the outputs that was measured at stated rescalings,
            see :func:`pathspace.evidence.invariance.measure_levels`.
        pinned: operations that fixed a scale, with place and reason.
        unused: parameters that do not influence the outputs.
        range: the inputs for which all of this holds.
        skeleton: rule and seed.
        seconds: time taken.
        units_at_most: upper bound on the number of scale symmetries of rows and columns;
            ``None`` if it was not tested.
        upper_bound: evidence for it, or the reason why it was not tested; empty
            if it was not requested.
        spaces: the spaces of features, with verdict and evidence, see
            :func:`pathspace.evidence.invariance.measure_spaces`; empty if they were not given.
    """

    model: str
    weights: int
    units: int
    dimension: int
    basis_paths: int
    rank: int | None
    method: str
    theorem1: dict[str, Any]
    theorem2: dict[str, Any]
    theorem3: dict[str, Any]
    invariance: dict[str, Any]
    parameters: dict[str, int]
    units_exact: int = 0
    dimension_exact: int = 0
    approximate_units: int = 0
    levels: dict[str, Any] = field(default_factory=dict)
    pinned: list[dict[str, Any]] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    range: str = ""
    skeleton: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    units_at_most: int | None = None
    upper_bound: dict[str, Any] = field(default_factory=dict)
    spaces: dict[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether no theorem is refuted, and all measured changes are within tolerances."""
        parts = (self.theorem1, self.theorem2, self.theorem3, self.invariance, self.spaces)
        return all(part.get("holds") is not False for part in parts)

    @property
    def level(self) -> str:
        """At which level verdicts on all units hold: exactly, or at ``eps = 0`` only."""
        return "at eps = 0" if self.units_exact < self.units else "exactly"

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain Python values."""
        return {"format": FORMAT, "holds": self.holds, "level": self.level, **asdict(self)}

    def to_json(self, indent: int | None = 2) -> str:
        """Everything as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        kinds = ("pinned", "unused")
        others = {kind: self.parameters[kind] for kind in kinds if self.parameters.get(kind)}
        listed = ", ".join(f"{count:,} {kind}" for kind, count in others.items())
        total = f"{listed}; {self.parameters.get('total', 0):,} in total"
        bound, rule = self.upper_bound.get("evidence", ""), self.skeleton.get("rule", "")
        group = f"free scales ({self.level}): dimension of the gauge group"
        figures = (
            ("weights m", self.weights, "scalar weights on paths"),
            ("units H", self.units, group),
            ("units at most", self.units_at_most, bound),
            ("dimension m - H", self.dimension, "independent path values"),
            ("exact units", self.units_exact, "free in the unchanged model, every eps included"),
            ("exact dimension", self.dimension_exact, "weights less exact units"),
            ("basis paths", self.basis_paths, f"two trees, rule {rule}"),
            ("exact rank", self.rank, self.theorem3.get("matrix", "")),
            ("other scalars", sum(others.values()) or None, total),
        )
        # (a bound that was asked for and not found is said, too)
        rows = [
            (name, "" if number is None else f"{number:,}", words)
            for name, number, words in figures
            if number is not None or (bound and name == "units at most")
        ]
        verdicts = [
            (title, mark(entry["holds"], self.level), entry["evidence"])
            for title, entry in (
                ("Theorem 1: paths from basis paths", self.theorem1),
                ("Theorem 2: activations from path values", self.theorem2),
                ("Theorem 3: number and independence", self.theorem3),
                ("Rescaling keeps the function", self.invariance),
            )
        ]
        parts: list[Any] = [
            text_table(f"Path space of {self.model}", ("", "", ""), rows, right=(1,)),
            text_table("", ("statement", "verdict", "evidence"), verdicts),
            *self._spaces(),
        ]
        if self.pinned:
            pins = []
            for op, reason in dict.fromkeys((pin["op"], pin["reason"]) for pin in self.pinned):
                entries = [pin for pin in self.pinned if (pin["op"], pin["reason"]) == (op, reason)]
                modules = [entry["module"] or "(model)" for entry in entries[:3]]
                places = ", ".join([*dict.fromkeys(modules), *["..."] * (len(entries) > 3)])
                pins.append((op, str(len(entries)), places, entries[0]["source"], reason))
            columns = ("operation", "times", "module", "line", "reason")
            parts.append(text_table("Operations that fixed a scale", columns, pins))
        if self.unused:
            names = ", ".join(self.unused[:8] + ["..."] * (len(self.unused) > 8))
            parts.append(Text(f"Unused parameters: {names}"))
        if self.range:
            parts.append(Text(f"Valid for {self.range}."))
        return Group(*parts)

    def _spaces(self) -> list[RenderableType]:
        """A row for each free space, with the verdict on all."""
        from rich.text import Text

        if not self.spaces:
            return []
        title = Text("Changes of basis keep the function: ").append(mark(self.spaces["holds"]))
        rows = []
        for line in self.spaces["free"]:
            group = f"{line['group']}({line['size']}) x {line['count']:,}"
            change = line.get("change")
            measured = "not measured" if change is None else f"{change:.1e}"
            rows.append((line["name"], group, f"{line['dimension']:,}", measured))
        table = text_table(title, ("space", "group", "dimension", "outputs change by"), rows)
        rigid = f"{len(self.spaces['rigid']):,} further spaces are rigid."
        return [table, Text(f"Evidence: {self.spaces['evidence']}. {rigid}\n")]


def mark(holds: bool | None, level: str = "") -> Text:
    """A verdict as a coloured word, with the level at which it holds."""
    from rich.text import Text

    return Text.assemble(MARKS[holds], f" {level}" if holds and level else "")
