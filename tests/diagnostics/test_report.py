"""The report as a document: well-formed, self-contained, every number where it belongs,
sentences true to numbers.
"""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import loaded_nets
import numpy as np
import pytest
import torch
from cases import network
from command_line import call
from torch import nn
from zoo.entry import load

import pathspace as ps
from pathspace.diagnostics import Report, report
from pathspace.diagnostics.report import measure, sentences
from pathspace.diagnostics.report.graph_layout import describe_layers
from pathspace.diagnostics.report.measure import path_value_facts

VOID = {"meta", "input", "br", "hr", "link", "img"}


def block() -> nn.Module:
    return network(
        lambda net, x: x + net.leave(nn.functional.gelu(net.enter(net.norm(x)))),
        norm=nn.LayerNorm(6), enter=nn.Linear(6, 8), leave=nn.Linear(8, 6),
    )  # fmt: skip


def mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.randn(8, 2)


def stacked_rnn() -> tuple[nn.Module, torch.Tensor]:
    """Two recurrent layers between two linear maps."""
    tagger = network(
        lambda net, x: net.out(net.rnn(net.embed(x))[0]),
        embed=nn.Linear(3, 5), out=nn.Linear(4, 2),
        rnn=nn.RNN(5, 4, 2, nonlinearity="relu", batch_first=True),
    )  # fmt: skip
    return tagger, torch.randn(4, 6, 3)


def residual() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(4, 6), block(), block(), nn.Linear(6, 3)), torch.randn(8, 4)


def convolutional() -> tuple[nn.Module, torch.Tensor]:
    body = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(4, 2)).eval(), torch.randn(4, 3, 8, 8)


MODELS = {build.__name__: build for build in (mlp, stacked_rnn, residual, convolutional)}


@pytest.fixture(scope="module", params=MODELS)
def found(request: pytest.FixtureRequest) -> Report:
    torch.manual_seed(0)
    model, x = MODELS[request.param]()
    return report(model, x)


class Page(HTMLParser):
    """Elements with their attributes and text; every one must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self.open[-1:] != ["style"]:
            self.text += data

    def data(self) -> dict[str, Any]:
        """What the page holds beside its pictures, as JSON."""
        (text,) = [text for text in self.scripts if text.lstrip().startswith("{")]
        found: dict[str, Any] = json.loads(text)
        return found


@pytest.mark.slow
def test_the_page_is_well_formed_and_needs_no_network(found: Report) -> None:
    page = Page(found.html)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for name, attributes in page.elements:
        assert "src" not in attributes and name not in ("link", "iframe", "img", "object")
        if "href" in attributes:
            assert str(attributes["href"]).removeprefix("#") in ids
        assert not any(key.startswith("on") for key in attributes)
    # the one address is the name of the SVG namespace, which nobody fetches
    assert set(re.findall(r"(?:https?:)?//[\w.]+\.[a-z]{2,}[\w./]*", found.html)) <= {
        "http://www.w3.org/2000/svg"
    }
    assert "url(" not in found.html and "@import" not in found.html
    policy = next(
        a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert str(policy).startswith("default-src 'none'")
    for rule in ("prefers-color-scheme: dark", "@media print"):
        assert rule in found.html


@pytest.mark.slow
def test_every_parameter_and_every_unit_is_accounted_for(found: Report) -> None:
    data = Page(found.html).data()
    parameters = data["account"]["parameters"]
    total = sum(int(np.prod(entry["shape"])) for entry in parameters)
    told = sum(e["path_space"] + e["pinned"] + e["unused"] for e in parameters)
    assert told == total == data["model"]["total"]
    tensors = [tensor for layer in data["graph"]["layers"] for tensor in layer["tensors"]]
    assert {t["name"] for t in tensors} == {e["name"] for e in parameters if e["path_space"]}
    assert sum(t["edges"] for t in tensors) == data["certificate"]["weights"]
    assert sum(group["units"] for group in data["graph"]["groups"]) == data["certificate"]["units"]


def test_sentences_stand_on_the_page_and_follow_from_its_numbers(found: Report) -> None:
    page = Page(found.html)
    data, text = page.data(), " ".join(page.text.split())
    for name, sentence in found.sentences.items():
        if name != "loss" or "nodes" in data["chain"] or "rows" in data["gradients"]:
            assert " ".join(sentence.split()) in text, name
    told = data["sentences"]
    assert told == found.sentences
    values, rows = data["values"], data["signal"]["rows"]
    assert told["values"] == sentences.values(values, "modulo")
    gains = [row["vjp_gain"] for row in rows if row["vjp_gain"]]
    assert all(sentences.number_text(end, 2) in told["gains"] for end in (min(gains), max(gains)))
    if "nodes" in data["chain"]:
        down = sum(node["cosine_mean"] > 0 for node in data["chain"]["nodes"])
        assert told["chain"].startswith(f"{down} of {len(data['chain']['nodes'])} nodes")
    cause = data["degeneracy"]
    assert cause["rank"] + cause["deficit"] == cause["parameters"]
    assert f"{cause['deficit']:,} of {cause['parameters']:,}" in told["degeneracy"]


def test_figures_agree_with_the_library(found: Report) -> None:
    certificate, graph = found.facts["certificate"], found.facts["graph"]
    assert certificate["holds"] and found.facts["proof"]["accepted"]
    assert found.facts["proof"]["dimension"] == certificate["dimension"]
    values = found.facts["values"]
    assert values["values"]["count"] + values["values"]["zeros"] == certificate["basis_paths"]
    assert sum(values["values"]["counts"]) == values["values"]["count"]
    # a unit has one edge in either tree
    tensors = [tensor for layer in graph["layers"] for tensor in layer["tensors"]]
    for side in ("incoming", "outgoing"):
        assert sum(tensor[side] for tensor in tensors) == certificate["units"]


def test_notebooks_show_the_page_in_a_frame(found: Report) -> None:
    shown = found._repr_html_()
    (frame,) = [attributes for name, attributes in Page(shown).elements if name == "iframe"]
    assert frame["srcdoc"] == found.html


def test_histograms_are_those_of_the_path_values() -> None:
    model, x = residual()
    skeleton = ps.trace(model, x).skeleton(rule="magnitude")
    found = path_value_facts(skeleton)
    exact = skeleton.basis().values().abs().log10().numpy()
    finite = exact[np.isfinite(exact)]
    assert found["values"]["count"] == len(finite)
    counts, _ = np.histogram(finite, found["values"]["edges"])
    # a value may lie on an edge
    assert np.abs(counts - np.array(found["values"]["counts"])).max() <= 1
    assert found["values"]["mean"] == pytest.approx(finite.mean())
    assert found["values"]["median"] == pytest.approx(
        np.quantile(finite, 0.5, method="inverted_cdf"), abs=0.02
    )
    statistics = ps.path_statistics(skeleton)
    assert found["values"]["largest"] == pytest.approx(statistics.largest / math.log(10))


def test_lanes_never_overlap() -> None:
    for name in ("resnet18", "vit_small"):
        model, args, _ = load()[name].make()
        graph = ps.trace(model, *args)
        facts = describe_layers(graph.skeleton())
        taken: set[tuple[int, int]] = set()
        for group in facts["groups"]:
            rows = {(group["lane"], row) for row in range(group["first"], group["last"] + 1)}
            assert not rows & taken and group["lane"] > 0
            taken |= rows
        assert sum(len(layer["tensors"]) for layer in facts["layers"]) == len(graph.blocks)


def test_masks_on_the_page_are_the_skeletons() -> None:
    skeleton = ps.trace(*mlp()).skeleton()
    for layer in describe_layers(skeleton)["layers"]:
        for tensor in layer["tensors"]:
            cells = {
                (row, column): kind
                for row, column, kind in (tensor["mask"] or {"cells": []})["cells"]
            }
            incoming, outgoing = (
                np.atleast_2d(s[tensor["name"]]) for s in (skeleton.incoming, skeleton.outgoing)
            )
            for place, inside in np.ndenumerate(incoming):
                assert cells.get(place, 0) == int(inside) + 2 * int(outgoing[place])


def test_names_cannot_break_the_page() -> None:
    evil = "</script><script>alert(1)</script>"
    model = nn.Sequential()
    model.add_module(evil, nn.Linear(2, 3))
    model.add_module("<b>&amp;", nn.ReLU())
    model.add_module("last", nn.Linear(3, 1))
    page = Page(report(model, torch.randn(4, 2)).html)
    assert page.data()["graph"]["layers"][0]["name"] == evil
    assert evil in page.text and len([name for name, _ in page.elements if name == "script"]) == 2


def fails(outputs: Any, targets: Any) -> torch.Tensor:
    raise ZeroDivisionError("of my own")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "size", "options", "part", "words"),
    [
        (
            block(), (8, 6), {"loss_fn": fails}, "chain",
            r"^The Markov chain was not measured: The loss raised ZeroDivisionError on outputs and"
            r" targets \(8x6:float32, None\): of my own; check",
        ),
        (
            nn.Sequential(nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 2)), (2, 500), {},
            "degeneracy", "models of up to 200,000 trainable scalars, and this one has 251,502",
        ),
        (nn.Linear(2, 2).requires_grad_(False), (3, 2), {}, "gradients", "trainable"),
        (nn.Flatten(), (3, 2), {}, "values", r"^There is no basis path\.$"),
        (nn.Flatten(), (3, 2), {}, "graph", r"^No layer has weights on paths\.$"),
    ],
)  # fmt: skip
def test_what_does_not_apply_says_so_in_a_sentence(
    model: nn.Module, size: tuple[int, ...], options: Any, part: str, words: str
) -> None:
    assert re.search(words, report(model, torch.randn(size), **options).sentences[part])


def test_a_proof_of_too_many_units_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MOST_PROOF", 1)
    assert "up to 1 units, and there are 3" in Page(report(*mlp()).html).text


def test_what_is_not_finite_is_said_and_not_left_out() -> None:
    model, x = residual()
    model[1].enter.weight.data[0, 0] = math.nan  # type: ignore[union-attr, operator]
    found = report(model, x)
    told, rows = found.sentences, found.facts["signal"]["rows"]
    lost = sum(row["variance"] is None for row in rows)
    assert "path values are not finite; " in told["values"]
    for part, start in (
        ("variance", f"Activations of {lost} of {len(rows)} layers (the first is 1.enter) are "),
        ("gains", "Values or derivatives of "),
        ("gradients", "Gradients of 16 of 16 tensors (the first is 0.weight) are not finite."),
        ("chain", "Values or gradients at 2 of 2 nodes are not finite"),
        ("degeneracy", "Degeneracy was not measured: Derivatives of Sequential are not finite"),
    ):
        assert told[part].startswith(start)
    assert "NaN" in told["certificate"] and "certificate" in found.facts
    Page(found.html).data()  # JSON knows no NaN


def test_progress_rises_and_names_what_is_done() -> None:
    seen: list[tuple[str, float]] = []
    report(*mlp(), progress=lambda doing, share: seen.append((doing, share)))
    shares = [share for _, share in seen]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] < 1
    assert len({doing for doing, _ in seen}) == 10


NET = """
from torch import compiler, nn

class Stop(nn.Linear):
    def forward(self, x):
        if not compiler.is_compiling():
            raise KeyboardInterrupt
        return super().forward(x)

def stop():
    return Stop(2, 2)
"""


def run(*words: str) -> tuple[int, str]:
    result = call("report", *words)
    return result.exit_code, result.output


def test_the_command_writes_page_and_json(tmp_path: Path) -> None:
    target, page = f"{loaded_nets.__file__}:plain", tmp_path / "report.html"
    code, text = run(target, "-o", str(page), "--json", str(tmp_path / "report.json"))
    assert code == 0, text
    assert f"Wrote {page}" in text and "4 of 4 statements hold" in text
    data = Page(page.read_text()).data()
    numbers = json.loads((tmp_path / "report.json").read_text())
    assert numbers["certificate"]["dimension"] == data["certificate"]["dimension"]
    code, text = run(target, "-o", str(page), "--json", "-")
    assert code == 0 and json.loads(text)["model"]["units"] == 10


def test_an_interrupt_leaves_no_half_page(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    page = tmp_path / "report.html"
    page.write_text("precious")
    code, text = run(f"{tmp_path}/net.py:stop", "--input", "4x2", "-o", str(page))
    assert code == 130 and "Interrupted before the end." in text
    assert page.read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} <= {"net.py", "report.html", "__pycache__"}


def test_inputs_by_position_and_by_keyword() -> None:
    two = network(lambda net, x, y: x + net.a(x + y), a=nn.Linear(3, 3))
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    for args, kwargs in (((x, y), {}), ((x,), {"y": y}), ((), {"x": x, "y": y})):
        found = report(two, *args, kwargs=kwargs)
        assert found.facts["chain"]["samples"] == 5 and len(found.facts["gradients"]["rows"]) == 2
