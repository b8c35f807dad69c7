"""The table of operations, ``operations.md``, from the registry; ``python docs/operations_page.py``
writes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from pathspace.diagnostics.chain import dataflow
from pathspace.inference import handwritten_norms
from pathspace.inference.registry import FACTS, KINDS, RULES, Facts
from pathspace.training import path_norm

PAGE = Path(__file__).with_name("operations.md")


def linear_in(facts: Facts) -> str:
    """How an operation is linear, in words."""
    coefficients = {
        "one": ", coefficients 0 and 1",
        "positive": ", positive coefficients",
        "real": "",
    }
    return f"{facts.linear}{coefficients[facts.coefficients]}" if facts.linear else ""


def of_path_norm(facts: Facts) -> str:
    """How the path norm passes an operation."""
    if facts.kind in ("copy", "dropout"):
        return "as it is"
    if facts.kind in ("bag", "complex"):
        return "refused"
    if facts.linear == "each":
        return "as it is, on powers"
    if facts.elementwise and facts.linear == "jointly":
        return "measured coefficients"
    if facts.moves or (facts.linear == "jointly" and facts.coefficients == "positive"):
        return (
            "as it is"
            if facts.moves or not facts.separable
            else "as it is (p = 1), one dimension after the other"
        )
    if facts.separable:
        return "one dimension after the other"
    if facts.linear:
        return "unit vectors"
    if facts.elementwise and facts.degree == (1,):
        return "all paths of the operands"
    return (
        "by slope for `bound=True`; reads the rule" if facts.slope is not None else "reads the rule"
    )


def of_eps(facts: Facts) -> str:
    """What an operation does to the eps of a divisor."""
    if facts.kind in handwritten_norms.MOVEMENTS | handwritten_norms.DIVISORS or facts.kind == "power":
        return "keeps a divisor"
    divides = facts.kind == "quotient" or (facts.linear == "each" and facts.bias is None)
    return "divides, or is divided" if divides else ""


def of_dataflow(facts: Facts) -> str:
    """What an operation is to a stream."""
    if facts.kind in dataflow.MOVES:
        return "carries a stream"
    return "affine" if facts.kind in dataflow.AFFINE else ""


def of_path_sgd(facts: Facts) -> str:
    """When Path-SGD refuses an operation."""
    if facts.kind in path_norm.CROOKED:
        return "refused"
    several = facts.linear == "each" or facts.kind == "quotient"
    return (
        "refused of two activations"
        if several
        else "refused of activations"
        if facts.kind == "power"
        else ""
    )


def of_cost(facts: Facts) -> str:
    """What an operation counts as."""
    if facts.kind in ("activation", "function"):
        return "an activation"
    return (
        "a multiplication"
        if facts.kind in ("product", "quotient") or facts.kind.endswith("convolution")
        else ""
    )


def of_spaces(facts: Facts) -> str:
    """Which rotations a length or a normalisation over features allows."""
    if facts.kind not in ("norm", "normalisation") or facts.elementwise:
        return ""
    return "all" if facts.rotations else "those that keep the mean"


READERS: dict[str, Callable[[Facts], str]] = {
    "path norm": of_path_norm, "eps detection": of_eps, "dataflow": of_dataflow,
    "Path-SGD": of_path_sgd, "cost": of_cost, "rotations of features": of_spaces,
}  # fmt: skip


def page() -> str:
    """Operations of which the same is stated in one row, by kind."""
    own: dict[Facts, set[str]] = defaultdict(set)
    for name, facts in FACTS.items():
        own_rule = name not in RULES or "pathspace.inference.rules." in RULES[name].__module__
        if name and own_rule:
            own[facts].add(name.removeprefix("aten.").rstrip("_").removesuffix("_copy"))
    lines = [INTRODUCTION, "## Kinds\n"]
    lines += [
        "| kind | what it does |\n| --- | --- |",
        *(f"| {k} | {says} |" for k, says in KINDS.items() if k),
        "",
    ]
    lines += ["## Operations\n"]
    columns = ["kind", "operations", "degree", "linear", "elementwise", "largest slope", *READERS]
    lines += ["| " + " | ".join(columns) + " |", "| " + " | ".join(["---"] * len(columns)) + " |"]
    places = list(KINDS)
    for facts in sorted(own, key=lambda f: (places.index(f.kind), min(own[f]))):
        cells = [
            facts.kind,
            ", ".join(f"`{name}`" for name in sorted(own[facts])),
            ", ".join(f"{degree:g}" for degree in facts.degree),
            linear_in(facts),
            "yes" if facts.elementwise else "",
            "" if facts.slope is None else f"{facts.slope:.4g}",
            *(reader(facts) for reader in READERS.values()),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


INTRODUCTION = """# Table of operations

What the registry states of operations beyond their rules (in-place and other variants under one name, without
`aten.`), and what its readers make of it. Operations that are not listed are followed by the smaller steps that torch
knows, or else pinned. An empty cell makes no statement. Constants that are added (a margin, a number) do not count for
"linear". One degree stands for all activations together, several for one operand each.

The page is generated, and a test compares every statement with torch. Scales, unrolled paths and the proofs of symmetry
read the rules themselves. The path norm refuses complex numbers in every operation.
"""  # noqa: E501


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
