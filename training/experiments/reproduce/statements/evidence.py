"""The statements as data, and the verdicts that records and measured figures give."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from ...names import TASKS, expect_known
from ..holm import Claim, gain, judge, positive
from ..recipes.cells import FIELDS
from ..record import Record, on_these_items

DOCUMENTS = ("path-space", "markov-chain", "evolution")
Kind = Literal["theory", "formula", "experiment", "background"]
Verdict = Literal["true", "changed", "false", "not shown", "undecided", "not tried"]


@dataclass(frozen=True)
class Statement:
    """One statement of a document in our words; the first letter of ``id`` is that of the document.

    Either ``verdict`` stands in the file, or it is computed: from the judged claims of a ``record``
    whose text contains ``claims`` and not ``without``, or by the rule of :data:`RULES` that
    ``measured`` names. ``right`` is what is right instead and ``range`` for which networks that
    holds, for ``changed`` and ``false``; ``why`` says why it was not tried. ``tests`` hold the
    verdict, and ``pages`` explain it. ``reversed``: the statement says the opposite of these
    claims. ``unsaid`` is what the document leaves open and the claims vary: where only some of them
    hold, the statement is true with a change.
    """

    document: str
    id: str
    kind: Kind
    source: str
    says: str
    verdict: Verdict | None = None
    right: str = ""
    range: str = ""
    why: str = ""
    tests: Sequence[str] = ()
    files: Sequence[str] = ()
    pages: Sequence[str] = ()
    record: str = ""
    claims: str = ""
    without: str = ""
    reversed: bool = False
    unsaid: str = ""
    measured: str = ""

    @property
    def command(self) -> str:
        """The command that shows the evidence; empty where nothing was tried."""
        if self.record:
            return f"pathspace reproduce {self.record}"
        if self.measured or "docs/data/markov.json" in self.files:
            return "PYTHONPATH=tests python -m benchmarks.markov --json docs/data/markov.json"
        if self.tests:
            return f"python -m pytest {' '.join(self.tests)}"
        pages = {Path(page.split("#")[0]).stem for page in self.pages}
        return (
            f"python -m pytest tests/project/test_docs.py -k '{' or '.join(sorted(pages))}'"
            if pages
            else ""
        )


@cache
def load_statements() -> tuple[Statement, ...]:
    """Return all statements, in the order of the documents."""
    folder = resources.files("pathspace.training.experiments.reproduce.statements")
    texts = [folder.joinpath(f"{name}.toml").read_text(encoding="utf-8") for name in DOCUMENTS]
    return tuple(
        Statement(document=content["title"], **entry)
        for content in map(tomllib.loads, texts)
        for entry in content["statement"]
    )


# what the judge of experiments says -> what it says of a statement; a difference
# that does not matter is none
OF_CLAIMS: dict[str, Verdict] = {
    "better": "true",
    "worse": "false",
    "no difference that matters": "false",
    "undecided": "undecided",
}
TURNED: dict[str, Verdict] = OF_CLAIMS | {"better": "false", "worse": "true"}
STAND_IN: dict[str, Verdict] = OF_CLAIMS | dict.fromkeys(
    ("worse", "no difference that matters"), "not shown"
)
# experiments whose task and size are the document's own
OWN = ("toy", "ideal-direction")
OWN_SETTING = "The document's own task and size; what it leaves open is ours."
TAU = 3e-4
PATTERN = "+.3f"
Figures = dict[str, Any]
Runs = tuple[list[Figures], list[Figures]]


@dataclass(frozen=True)
class Judged:
    """A statement with its verdict, what that rests on, and the command that shows it."""

    statement: Statement
    verdict: Verdict
    detail: str
    command: str


def judge_all(
    statements: Sequence[Statement], records: Path, figures: Path | None = None
) -> list[Judged]:
    """Give every statement its verdict."""
    figures = figures or records.parent / "data" / "markov.json"
    known = json.loads(figures.read_text(encoding="utf-8")) if figures.is_file() else None
    paths = {one.record: records / f"{one.record}.json" for one in statements if one.record}
    found = {name: Record.read(path) for name, path in paths.items() if path.is_file()}
    return [_judged(statement, found.get(statement.record), known) for statement in statements]


def _judged(statement: Statement, record: Record | None, figures: Figures | None) -> Judged:
    if statement.verdict is not None:
        detail = statement.right or statement.why
        return Judged(statement, statement.verdict, detail, statement.command)
    if statement.measured:
        expect_known("rule", statement.measured, RULES)
        if figures is not None:
            return Judged(statement, *_by_figures(statement, figures), statement.command)
        why = f"There are no figures here; {statement.command} measures them."
        return Judged(statement, "not tried", why, statement.command)
    claims = [
        claim
        for claim in (record.claims if record else ())
        if statement.claims in claim["statement"]
        and not (statement.without and statement.without in claim["statement"])
    ]
    if record is None or not claims:
        why = f"There is no record of it here; {statement.command} makes one."
        return Judged(statement, "not tried", why, statement.command)
    return Judged(statement, *_by_record(statement, record, claims), record.command)


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict on a statement that holds where all its parts do."""
    strongest: tuple[Verdict, ...] = ("false", "not shown", "undecided")
    return next((verdict for verdict in strongest if verdict in verdicts), "true")


def _by_record(
    statement: Statement, record: Record, claims: Sequence[Mapping[str, Any]]
) -> tuple[Verdict, str]:
    meaning = TURNED if statement.reversed else OF_CLAIMS
    # where no arm beats simple means, a claim says nothing of the statement,
    # unless it is all there is
    telling = [claim for claim in claims if not claim["nothing"]] or claims
    verdicts = [meaning[claim["verdict"]] for claim in telling]
    scale = _stand_in(record, claims)
    if scale:
        # a stand-in tells whether the effect is there, and refutes nothing of the document's
        verdicts = ["not shown" if verdict == "false" else verdict for verdict in verdicts]
    elif record.scale != "full":
        scale = OWN_SETTING
    verdict = together(verdicts)
    if statement.unsaid and len({*verdicts} - {"undecided"}) > 1:
        verdict, scale = "changed", f"The document does not say {statement.unsaid}. {scale}"
    parts = (
        f"{claim['statement']}: {claim['nothing'] or claim['verdict']}{_repetitions(claim)}"
        f"{', on these test items' * on_these_items(claim)}"
        for claim in claims
    )
    return verdict, f"{'; '.join(parts)}. {scale}".rstrip()


def _stand_in(record: Record, claims: Sequence[Mapping[str, Any]]) -> str:
    """Say what stands in for the document's data, models or computer, if something does."""
    if record.name in OWN:
        return ""
    tasks = {claim["statement"].partition(":")[0] for claim in claims}
    lines = [line for line in record.differs if " in place of " in line]
    data = [line.partition(" (")[0] for line in lines if line.startswith("Data: ")]
    own = tuple(f"Data: {TASKS[task]} in place of" for task in tasks & TASKS.keys())
    # (files of other data under the name of a task have lines of another text)
    data = [line for line in data if line.startswith(own)] or data
    if data:
        return " ".join(f"On {line.removeprefix('Data: ')}" for line in dict.fromkeys(data))
    if record.scale == "full":
        return ""
    # fields of a recipe are budgets and settings; what is said besides is of models and computer
    besides = [line for line in lines if line.partition(":")[0] not in FIELDS.values()]
    return " ".join(besides) or "On a stand-in for the document's data and models."


def _repetitions(claim: Mapping[str, Any]) -> str:
    wanted = claim["verdict"] == "undecided" and not claim["nothing"] and claim.get("needed")
    return f" (about {claim['needed']:,} seeds)" if wanted else ""


def _by_figures(statement: Statement, figures: Figures) -> tuple[Verdict, str]:
    networks = _by_network(figures)
    poor = _poor(networks, figures) if statement.measured in PENALISED else {}
    rule = RULES[statement.measured]
    judged = judge(
        [replace(rule(name, *runs), nothing=poor.get(name, "")) for name, runs in networks.items()]
    )
    # small networks on other data tell whether an effect is there, and refute no experiment
    meaning = OF_CLAIMS if statement.kind != "experiment" else STAND_IN
    telling = [meaning[claim.verdict] for claim in judged if not claim.nothing]
    parts = (
        f"{claim.statement}: {claim.nothing or _shown(claim)}{_repetitions(asdict(claim))}"
        for claim in judged
    )
    detail = (
        f"By network: {', '.join(parts)}. {PENALISED.get(statement.measured, '')}Small networks on"
        f" {figures.get('data', 'digits')}."
    )
    return together(telling or ["undecided"]), detail


def _shown(claim: Claim) -> str:
    """The verdict on a network, with the mean, its interval and the number of seeds."""
    half = f"{(claim.high - claim.low) / 2:{claim.pattern}}"[1:]
    small = claim.verdict in ("better", "worse") and abs(claim.mean) < claim.margin
    size = "smaller than the margin, " * small
    mean = f"{claim.mean:{claim.pattern}}"
    return f"{claim.verdict} ({size}{mean} ± {half}, {claim.count} seeds)"


def _poor(networks: Mapping[str, Runs], figures: Figures) -> dict[str, str]:
    """Say which networks no better than logistic regression, with and without the penal connection,
    decide nothing. One that only the penal connection makes so poor does.
    """
    bar, poor = figures.get("logistic", 0.0), {}
    for name, runs in networks.items():
        plain, penal = (fmean(row["accuracy"] for row in some) for some in runs)
        if max(plain, penal) <= bar:
            poor[name] = (
                f"nothing, with the penal connection it is right on {penal:.1%}, without it on"
                f" {plain:.1%}, logistic regression on {bar:.1%}"
            )
    return poor


def _by_network(figures: Figures) -> dict[str, Runs]:
    """The runs of each network, seed by seed: without the penal connection, and with it."""
    rows = [*figures["rows"], *figures.get("further", ())]
    found: dict[str, Runs] = {row["network"]: ([], []) for row in rows}
    for row in sorted(rows, key=lambda row: int(row["seed"])):
        if row["tau"] in (0.0, TAU):
            found[row["network"]][row["tau"] > 0].append(row)
    return found


def _positive(
    value: Callable[[Figures, Figures], float],
) -> Callable[[str, list[Figures], list[Figures]], Claim]:
    return lambda name, plain, penal: positive(
        name, [value(a, b) for a, b in zip(plain, penal, strict=True)], pattern=PATTERN
    )


def _errs_less(name: str, plain: list[Figures], penal: list[Figures]) -> Claim:
    return gain(
        name, [1 - row["accuracy"] for row in penal], [1 - row["accuracy"] for row in plain]
    )


# Each rule: a network's name, and its runs without and with the penal connection -> the claim
# that the statement is true of it.
RULES: dict[str, Callable[[str, list[Figures], list[Figures]], Claim]] = {
    "gradients_are_long": lambda name, plain, _: positive(
        name,
        [row["trained"]["gradient_above_one"] - 0.5 for row in plain if "trained" in row],
        pattern=PATTERN,
    ),
    "raises_efficiency": _positive(lambda plain, penal: penal["efficiency"] - plain["efficiency"]),
    "generalises": _errs_less,
    "efficient_without_help": _positive(lambda plain, _: float(plain["efficiency"])),
    # random chains are those at the start
    "unfolds": _positive(lambda plain, penal: plain["fold_at_start"] - penal["fold"]),
}
# rules that compare networks with and without the penal connection -> what is to be said of them
PENALISED = {
    "raises_efficiency": "Differences of eps'. ",
    "generalises": "Differences as a share of the test error. ",
    "unfolds": (
        "Random chains are those at the start; training alone makes turns rarer, too. Turns are"
        " those of one image per seed. "
    ),
}
