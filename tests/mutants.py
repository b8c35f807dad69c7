"""Does a test fail where the code is wrong? ``make mutants`` changes one place at
a time and runs its tests.

The changes are cosmic-ray's: another operator, comparison, number or truth value, a loop that never
runs, a decorator less. A fixed sample of places is drawn per group of modules. Each changed module
is imported in a process of its own; no file is written but the record ``docs/data/mutants.jsonl``,
one line per mutant, so that a stopped run goes on. A record counts as long as the code of the
function around its place stays as it is; comments, the docstring and line breaks may change.
``tests/mutants.toml`` says why no test can see some of them.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import re
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch  # noqa: F401  (once, before the processes are forked)
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "docs" / "data" / "mutants.jsonl"
EQUIVALENT = ROOT / "tests" / "mutants.toml"
LIMIT = 900  # seconds; a mutant that never ends is found, too
FIRST = 6  # tests that are tried before all others
# group -> how many mutants, modules, tests (the quickest first)
GROUPS: dict[str, tuple[int, Sequence[str], Sequence[str]]] = {
    "rules": (80, ["pathspace/inference/rules/*.py"],
              ["units", "rules_written_twice", "every_rule", "constants", "gathered", "registry",
               "path_norm_operations", "affine", "masked_weights", "packing",
               "odd_models", "zoo", "channels", "matching"]),
    "units and relations": (
        70, [f"pathspace/inference/{name}.py" for name in
             ("units", "records", "relations", "elimination", "union_find",
              "build", "assemble", "values", "lowering", "handwritten_norms", "gathered")],
        ["values", "relations", "multiplicities", "units", "rules_written_twice", "masked_weights",
         "gathered", "handwritten_norms", "normalization", "constants", "reasons", "sizes",
         "dimension", "odd_models", "zoo", "upper_bound"]),
    "trees and basis": (
        50, [*(f"pathspace/graph/{name}.py" for name in ("growing", "edge_rows", "spanning_tree")),
             *(f"pathspace/paths/{name}.py" for name in
               ("two_trees", "skeleton", "basis", "counting_vectors", "local_paths"))],
        ["two_trees", "dead_and_frozen", "dimension", "basis", "symbolic", "gsgd_oracle",
         "path_norm_operations", "path_norm_answers", "norms"]),
    "checker": (30, ["pathspace/checker/*.py"], ["checker_parts", "checker"]),
    "optimizers": (
        50, [f"training/optim/{name}.py" for name in
             ("shell", "path_space", "coordinates", "layout", "trees", "tensors", "descents",
              "gauge_fixed", "gauge_moves", "canonical_gauge", "multipliers")],
        ["steps_by_hand", "gsgd_oracle", "optim_path_values", "gauge_fixed",
         "gauge_fixed_state", "optim_conventions", "optim_robust", "optim_arguments", "suggest"]),
    "diagnostics": (
        30, [f"diagnostics/*/{name}.py" for name in
             ("chain", "efficiency", "observer", "signal", "theory", "meanfield", "dataflow",
              "degeneracy", "jacobian_rows", "gauge_directions", "symmetries",
              "residual", "cost", "losses", "gradients")],
        ["theory", "signal", "symmetries", "diagnostics_efficiency",
         "diagnostics_chain",
         "diagnostics_lemmas", "subject", "signatures", "cost", "degeneracy",
         "diagnostics_models"]),
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change at one place.

    Attributes:
        group: the group of modules.
        path: the module's file, from the root.
        line: the changed line.
        operator: cosmic-ray's name of the change.
        occurrence: its number in the module.
        key: digest of the code of the function around it, of the change, and of its
            number in that function.
    """

    group: str
    path: str
    line: int
    operator: str
    occurrence: int
    key: str

    def source(self) -> str:
        """The changed module."""
        changed = mutate_code(
            (ROOT / self.path).read_text(encoding="utf-8"),
            get_operator(self.operator)(),
            self.occurrence,
        )
        assert changed is not None
        return changed

    def shown(self) -> str:
        """The line before and after."""
        before = (ROOT / self.path).read_text(encoding="utf-8").splitlines()
        after = self.source().splitlines()
        place = next(
            (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
            self.line - 1,
        )
        return f"{before[place].strip()} -> {after[place].strip() if place < len(after) else ''}"


def annotations(tree: ast.AST) -> Iterator[ast.AST]:
    """What is read by type checkers alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef) and node.returns:
            yield node.returns
        elif (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
        ):
            yield node


def functions(tree: ast.Module) -> list[tuple[int, int, str]]:
    """First line, last line and code of each function that stands in a module or a class;
    what is outside has none.
    """
    owners = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    found = [
        node
        for owner in owners
        for node in owner.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    starts = [min([node.lineno, *(mark.lineno for mark in node.decorator_list)]) for node in found]
    ends = [node.end_lineno or node.lineno for node in found]
    for node in found:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return [(a, b, ast.unparse(node)) for a, b, node in zip(starts, ends, found, strict=True)]


def places(group: str, path: Path) -> list[list[Mutant]]:
    """For each place of a module that runs: the changes there."""
    text = path.read_text(encoding="utf-8")
    tree, name = ast.parse(text), str(path.relative_to(ROOT))
    skipped = [
        ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        for node in annotations(tree)
    ]
    around = functions(tree)
    counts: Counter[tuple[int, str]] = Counter()
    found: dict[tuple[int, int], list[Mutant]] = defaultdict(list)
    nodes = list(ast_nodes(get_ast(text)))
    for operator in operator_names():
        kind = get_operator(operator)
        if kind.arguments():
            continue
        positions = (place for node in nodes for place in kind().mutation_positions(node))
        for occurrence, (start, _) in enumerate(positions):
            inside = next((one for one in around if one[0] <= start[0] <= one[1]), None)
            if inside is None or any(begin <= start < end for begin, end in skipped):
                continue
            nth = counts[inside[0], operator] = counts[inside[0], operator] + 1
            key = hashlib.sha256(f"{name} {inside[2]} {operator} {nth}".encode()).hexdigest()[:16]
            found[start].append(Mutant(group, name, start[0], operator, occurrence, key))
    return list(found.values())


def sample(seed: int) -> list[Mutant]:
    """The same mutants each time, as long as the functions around them stay: those
    whose digests come first.
    """

    def rank(mutant: Mutant) -> str:
        return hashlib.sha256(f"{seed} {mutant.key}".encode()).hexdigest()

    chosen: list[Mutant] = []
    for group, (count, patterns, _) in GROUPS.items():
        paths = sorted(
            {
                path
                for pattern in patterns
                for path in ROOT.glob(pattern)
                if path.name != "__init__.py"
            }
        )
        each = [min(mutants, key=rank) for path in paths for mutants in places(group, path)]
        # (the least of several digests is small, so that places are ranked anew)
        chosen += sorted(
            each, key=lambda mutant: hashlib.sha256(rank(mutant).encode()).hexdigest()
        )[:count]
    # (a run that stops early has seen all groups)
    return sorted(chosen, key=rank)


class Changed(importlib.abc.MetaPathFinder):
    """Imports one module from another text."""

    def __init__(self, name: str, source: str) -> None:
        self.name, self.source = name, source

    def find_spec(self, name, path=None, target=None):
        """As import asks."""
        if name != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        source = self.source

        class Loader(importlib.machinery.SourceFileLoader):
            def get_code(self, fullname):
                return compile(source, self.path, "exec", dont_inherit=True)

        assert spec is not None and spec.origin is not None
        spec.loader = Loader(name, spec.origin)
        return spec


def module_name(path: str) -> str:
    """``training/optim/shell.py`` -> ``pathspace.training.optim.shell``."""
    name = path.removesuffix(".py").replace("/", ".")
    return name if name.startswith("pathspace.") else f"pathspace.{name}"


def noticed(mutant: Mutant, records: dict[str, dict]) -> list[str]:
    """The tests that noticed other changes of the module, the most successful first:
    they are tried before all.
    """
    found = Counter(
        entry["test"]
        for entry in records.values()
        if entry["path"] == mutant.path and entry["test"]
    )
    return [test for test, _ in found.most_common(FIRST)]


def run(
    mutant: Mutant | None, tests: Sequence[str], first: Sequence[str] = ()
) -> tuple[str, str, float]:
    """Run tests in a process of their own.

    Args:
        mutant: the change, if there is one.
        tests: the files, without ``test_`` and ``.py``.
        first: single tests that run before them.

    Returns:
        ``"killed"``, ``"survived"`` or ``"endless"``; the first test that failed; seconds.
    """
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.setpgrp()
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            code = 70
            try:
                if mutant is not None:
                    sys.meta_path.insert(0, Changed(module_name(mutant.path), mutant.source()))
                files = [
                    str(file) for name in tests for file in ROOT.glob(f"tests/**/test_{name}.py")
                ]
                flags = ["-x", "-q", "-rfE", "--no-header", "--tb=no"]
                code = int(pytest.main([*first, *flags])) if first else 0
                # (4: a test that there is no more)
                code = int(pytest.main([*files, *flags])) if code in (0, 4) else code
            finally:
                os._exit(code)
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            if time.monotonic() - started > LIMIT:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "endless", "", time.monotonic() - started
            time.sleep(0.1)
        output.seek(0)
        text = output.read()
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    survived = os.waitstatus_to_exitcode(status) == 0
    return (
        "survived" if survived else "killed",
        first[1] if first else "",
        time.monotonic() - started,
    )


def recorded() -> dict[str, dict]:
    """Key -> record."""
    lines = RECORD.read_text(encoding="utf-8").splitlines() if RECORD.exists() else []
    return {entry["key"]: entry for entry in map(json.loads, lines)}


def summary(mutants: Sequence[Mutant]) -> tuple[Table, float]:
    """How many died in each group, and the share over all that ran."""
    records, reasons = recorded(), equivalent()
    counts: Counter[tuple[str, str]] = Counter()
    for mutant in mutants:
        key = mutant.key
        state = (
            "equivalent"
            if key in reasons
            else records[key]["outcome"]
            if key in records
            else "not run"
        )
        counts[mutant.group, "killed" if state == "endless" else state] += 1
    columns = ("killed", "survived", "equivalent", "not run")
    table = Table("group", *columns)
    for group in GROUPS:
        table.add_row(group, *(str(counts[group, column]) for column in columns))
    total = {column: sum(counts[group, column] for group in GROUPS) for column in columns}
    table.add_row("all", *map(str, total.values()))
    return table, total["killed"] / max(1, total["killed"] + total["survived"])


def equivalent() -> dict[str, str]:
    """Key -> why no test can see the mutant."""
    return tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")) if EQUIVALENT.exists() else {}


def main() -> None:
    """Run what is not yet recorded, then print the table; exit 1 where fewer than 90 % died."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--group", choices=list(GROUPS), help="only these modules")
    parser.add_argument("--at-most", type=int, help="stop after so many new mutants")
    parser.add_argument(
        "--trust", action="store_true", help="do not run the tests without a change first"
    )
    parser.add_argument(
        "--survivors", action="store_true", help="run nothing, list what no test saw"
    )
    options = parser.parse_args()
    os.chdir(ROOT)
    console = Console()
    mutants = sample(options.seed)
    records = recorded()
    wanted = [mutant for mutant in mutants if options.group in (None, mutant.group)]
    if options.survivors:
        for mutant in wanted:
            if (
                records.get(mutant.key, {}).get("outcome") == "survived"
                and mutant.key not in equivalent()
            ):
                console.print(
                    f"{mutant.key} {mutant.path}:{mutant.line} {mutant.shown()}", markup=False
                )
        return
    new = [mutant for mutant in wanted if mutant.key not in records][: options.at_most]
    for group in [] if options.trust else dict.fromkeys(mutant.group for mutant in new):
        outcome, test, _ = run(None, GROUPS[group][2])
        if outcome != "survived":
            sys.exit(
                f"{test or group} fails without any change, expected tests that pass; mend it"
                " first."
            )
    for number, mutant in enumerate(new, 1):
        outcome, test, seconds = run(mutant, GROUPS[mutant.group][2], noticed(mutant, records))
        entry = {**mutant.__dict__, "outcome": outcome, "test": test, "seconds": round(seconds, 1)}
        records[mutant.key] = entry
        with RECORD.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        console.print(
            f"{number}/{len(new)} {outcome} {mutant.path}:{mutant.line} {test}", markup=False
        )
    table, share = summary(mutants)
    console.print(table)
    if share < 0.9:
        sys.exit(f"{share:.0%} of the mutants that ran were noticed, expected at least 90 %.")


if __name__ == "__main__":
    main()
