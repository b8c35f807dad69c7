"""Random compositions of the operations that share scales in different ways.

A network is a stream of 4 to 12 channels, which 2 to 4 motifs change in turn: residual sums, and
products, maxima or concatenations of two branches, whose steps are norms, reductions over groups,
attention, movements of data and others. Branches also read the stream as it was earlier. So pairs
of mechanisms meet often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from composed_moves import MOVES, NORMS, STEPS, grouped_reduction
from composed_steps import MAPS, Setting
from torch import Tensor, nn

import pathspace as ps

TOLERANCE = 1e-7
TOKENS = 5


@dataclass(frozen=True)
class Motif:
    """One change of the stream.

    Attributes:
        form: how its branches are put together.
        seed: what its steps are drawn from.
        steps: how many steps each branch has; a branch without steps is the stream itself.
        earlier: how many motifs ago the second branch reads the stream.
    """

    form: str
    seed: int
    steps: tuple[int, int]
    earlier: int


@dataclass(frozen=True)
class Plan:
    """A network as data, so that motifs can be left out of it."""

    seed: int
    kind: str
    channels: int
    motifs: tuple[Motif, ...]
    last_norm: bool


JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda a, b: a + b,
    "difference": lambda a, b: a - b,
    "maximum": torch.maximum,
    "product": lambda a, b: a * b,
    "gate": lambda a, b: a * b.sigmoid(),
    "swish": lambda a, b: a * torch.nn.functional.silu(b),
    "quotient": lambda a, b: a / (1 + b.abs()),
    "choice": lambda a, b: torch.where(a > 0, a, b),
    "mean": lambda a, b: torch.stack([a, b]).mean(0),
}
# forms with one branch
ALONE = ("chain", "residual", "block")
FORMS = ("block", "residual", "residual", "chain", "concatenation", "sum", *JOINS)


def planned(seed: int) -> Plan:
    """The plan of a seed."""
    draw = Random(seed)
    channels = draw.choice([4, 4, 4, 6, 6, 6, 8, 8, 12, 5, 9])
    # (blocks put a map behind a norm, and leave the scales of the stream free)
    blocks = draw.choice([0.0, 0.5, 0.9])
    motifs = tuple(
        Motif(
            form="block" if draw.random() < blocks else draw.choice(FORMS),
            seed=draw.getrandbits(31),
            steps=(draw.randint(1, 3), draw.choice([0, 0, 1, 2])),
            earlier=draw.choice([0, 0, 1, 2]),
        )
        for _ in range(draw.randint(2, 4))
    )
    kind = draw.choice(["image", "image", "sequence", "tokens"])
    return Plan(seed, kind, channels, motifs, draw.random() < 0.6)


class Branches(nn.Module):
    """A motif with its weights."""

    def __init__(self, motif: Motif, channels: int, image: bool, style: int) -> None:
        super().__init__()
        draw = Random(motif.seed)
        torch.manual_seed(motif.seed)
        setting = Setting(channels, image, style, draw)
        norm = setting.shared.choice(NORMS)
        self.form, self.earlier, self.dim = motif.form, motif.earlier, setting.dim
        # what ties channels and what moves them are drawn more often than the rest
        some = (*NORMS, grouped_reduction, grouped_reduction, *MOVES)
        self.first, self.second = (
            nn.ModuleList(
                draw.choice(some if draw.random() < 0.4 else STEPS)(setting) for _ in range(count)
            )
            for count in motif.steps
        )
        if self.form in ALONE:
            self.second = nn.ModuleList()
        if self.form == "block":
            self.first.insert(0, norm(setting))
            self.first.append(draw.choice(MAPS)(setting))
        if self.form == "concatenation":
            self.project = setting.mixer(2 * channels, channels)

    def forward(self, streams: list[Tensor]) -> Tensor:
        x = streams[-1]
        other = streams[max(0, len(streams) - 1 - self.earlier)]
        a, b = x, other
        for step in self.first:
            a = step(a)
        for step in self.second:
            b = step(b)
        if self.form == "chain":
            return a
        if self.form in ("residual", "block"):
            return x + a
        if self.form == "concatenation":
            return self.project(torch.cat([a, b], self.dim))
        return JOINS[self.form](a, b)


class Composition(nn.Module):
    """The network of a plan.

    Attributes:
        disguise: a function that changes no value, applied to the stream after each motif.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        draw, image = Random(plan.seed + 1), plan.kind == "image"
        torch.manual_seed(plan.seed)
        setting = Setting(plan.channels, image, plan.seed, draw)
        self.read: nn.Module = (
            nn.Embedding(TOKENS, plan.channels)
            if plan.kind == "tokens"
            else nn.Conv2d(2, plan.channels, 3, padding=1)
            if image
            else nn.Linear(3, plan.channels)
        )
        self.motifs = nn.ModuleList(
            Branches(motif, plan.channels, image, plan.seed) for motif in plan.motifs
        )
        self.norm = setting.shared.choice(NORMS)(setting) if plan.last_norm else None
        self.act = setting.pointwise()
        self.write = setting.mixer(plan.channels, 2)
        self.disguise: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        streams = [self.read(x)]
        for motif in self.motifs:
            new = motif(streams)
            streams.append(new if self.disguise is None else self.disguise(new))
        last = streams[-1] if self.norm is None else self.norm(streams[-1])
        return self.write(self.act(last))


def inputs(plan: Plan, magnitude: float = 1.0) -> Tensor:
    if plan.kind == "tokens":
        return torch.randint(TOKENS, (2, 4))
    shape = (2, 2, 4, 4) if plan.kind == "image" else (2, 4, 3)
    return magnitude * torch.randn(shape, dtype=torch.float64)


def built(plan: Plan) -> Composition:
    return Composition(plan).double().eval()


def without_eps(model: nn.Module) -> nn.Module:
    """A copy without the ``eps`` of norms, but those by running statistics."""
    copy = deepcopy(model)
    for module in copy.modules():
        if hasattr(module, "eps") and getattr(module, "running_var", None) is None:
            module.eps = 0.0
    return copy


def disguises(plan: Plan) -> dict[str, Callable[[Tensor], Tensor]]:
    """Functions that change no value of a stream."""
    dim = 1 if plan.kind == "image" else -1
    order = torch.randperm(plan.channels)
    return {
        "plus 0": lambda x: x + 0,
        "there and back": lambda x: x.index_select(dim, order).index_select(dim, order.argsort()),
        "cut and joined": lambda x: torch.cat(x.split([1, plan.channels - 1], dim), dim),
    }


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference relative to the largest number; what is not a number has to agree."""
    if not torch.equal(one.isfinite(), other.isfinite()):
        return float("inf")
    some, same = one[one.isfinite()], other[other.isfinite()]
    if not some.numel():
        return 0.0
    return float((some - same).abs().max() / some.abs().max().clamp_min(1e-300))


def rounding(model: nn.Module, x: Tensor) -> float:
    """How far the outputs move at most if the weights move by their last digits, in some trials:
    norms of single numbers are signs, which jump.
    """
    found = 0.0
    for _ in range(16):
        copy = deepcopy(model)
        with torch.no_grad():
            for parameter in copy.parameters():
                parameter.mul_(1 + 1e-13 * torch.randn_like(parameter))
        found = max(found, distance(model(x), copy(x)))
    return found


@dataclass
class Findings:
    """What is found of one network.

    Attributes:
        units: the number of units; ``None`` if the trace was refused.
        unsound: how scales change the outputs.
        unlike: how the number of units of a network with the same function differs.
        refused: the sentence of the refusal.
    """

    units: int | None = None
    unsound: list[str] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)
    refused: str = ""


@torch.no_grad()
def _moved(plan: Plan, model: nn.Module, graph: Any, exact: bool) -> Iterator[str]:
    """How outputs differ after random scales, beyond rounding."""
    phi = torch.randn(graph.num_units, dtype=torch.float64) * 0.7
    scaled = ps.rescale_(deepcopy(model), graph, phi, exact=exact)
    for magnitude in (1.0, 0.01, 100.0):
        x = inputs(plan, magnitude)
        found = distance(model(x), scaled(x))
        if found <= TOLERANCE:
            continue
        # (where the last digits of weights decide the outputs, no digit is left to compare)
        lost = 1e5 * rounding(model, x)
        if lost < 1 and found > lost:
            yield f"{'exact ' if exact else ''}scales at {magnitude:g}: {found:.1e}"


def examined(plan: Plan) -> Findings:
    """Everything that can be wrong with the units of a plan's network."""
    model, found = built(plan), Findings()
    # (a trace for all sizes captures a model several times, which takes ten times as long)
    sizes = "any" if plan.seed % 20 == 7 else "given"
    torch.manual_seed(plan.seed + 2)
    x = inputs(plan)
    try:
        graph = ps.trace(model, x, sizes=sizes)
    except (ps.InputError, ps.UnsupportedError) as error:
        found.refused = str(error)
        return found
    found.units = graph.num_units
    bare = without_eps(model)
    found.unsound += [*_moved(plan, bare, graph, False), *_moved(plan, model, graph, True)]
    # (it takes another trace)
    if plan.seed % 4 == 0:
        phi = torch.randn(graph.num_units, dtype=torch.float64) * 0.7
        others: dict[str, nn.Module] = {
            "rescaled": ps.rescale_(deepcopy(model), graph, phi, exact=False)
        }
        for name, function in disguises(plan).items():
            others[name] = deepcopy(model)
            others[name].disguise = function
        others["wrapped"] = deepcopy(model)
        for motif in others["wrapped"].motifs:
            for place, step in enumerate(motif.first):
                motif.first[place] = nn.Sequential(step)
        names = sorted(others)
        # (one of them for each network, so that many networks are seen)
        name = names[plan.seed // 4 % len(names)]
        number = ps.trace(others[name], x, sizes=sizes).num_units
        if number != found.units:
            found.unlike.append(f"{found.units} units, {number} if {name}")
    return found
