"""Certificates with spaces: what random elements change, what is not measured, and failures."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
import torch
from rotations.test_spaces import Llama, two
from torch import nn
from typer.testing import CliRunner
from zoo.entry import load

import pathspace as ps
from pathspace.cli.main import app
from pathspace.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(0))


def valid(certificate: ps.Certificate) -> None:
    path = resources.files("pathspace") / "schemas" / "certificate.json"
    jsonschema.validate(json.loads(certificate.to_json()), json.loads(path.read_text()))


def test_each_space_of_a_language_model_has_a_line() -> None:
    model = Llama()
    found = ps.spaces(model, WORDS)
    certificate = ps.verify(model, WORDS, spaces=found)
    lines = certificate.spaces
    assert certificate.holds and lines["holds"]
    assert [line["name"] for line in lines["free"]] == [space.name for space in found.free]
    assert all(line["change"] < 1e-12 for line in lines["free"])
    assert (lines["dimension"], lines["tolerance"]) == (66, 1e-8)
    assert all(line["reason"] for line in lines["rigid"])
    valid(certificate)
    shown = str(certificate)
    assert "Changes of basis keep the function: holds" in shown and "table.weight" in shown
    assert ps.verify(model, WORDS).spaces == {}


def test_a_type_that_the_code_asks_for_sets_the_tolerance() -> None:
    model, args, kwargs = load()["hf_llama_eager_tied"].make("eval", small=True)
    lines = ps.verify(
        model, *args, kwargs=kwargs, spaces=ps.spaces(model, *args, kwargs=kwargs)
    ).spaces
    assert (lines["holds"], lines["tolerance"], lines["ties"]) == (True, 1e-3, ["lm_head.weight"])
    assert lines["evidence"].endswith("tolerance 1e-03 in float32")


@pytest.mark.parametrize("group", ["GL", "O1"])
def test_a_wrong_group_is_a_failure(group: str) -> None:
    """A group that is too large; one that is too small holds."""
    model = Llama()
    found = ps.spaces(model, WORDS)
    wrong = [replace(each, group=group) if each.size == 8 else each for each in found]
    certificate = ps.verify(model, WORDS, spaces=replace(found, spaces=tuple(wrong)))
    assert certificate.holds is certificate.spaces["holds"] is (group == "O1")
    assert ("fails" in str(certificate)) is (group == "GL")
    assert "(table.weight)" in certificate.spaces["evidence"]


def test_what_is_not_measured_is_said() -> None:
    model = Llama()
    found = ps.spaces(model, WORDS)
    with torch.no_grad():
        model.norm.weight[2] = 0
    # (other weights have no gain of 0)
    assert ps.verify(model, WORDS, spaces=found).spaces["holds"]
    meta = Llama().to("meta")
    shapes = ps.verify(meta, WORDS.to("meta"), spaces=ps.spaces(meta, WORDS.to("meta")))
    assert shapes.spaces["holds"] is None and shapes.spaces["dimension"] == 66
    valid(shapes)
    network, x = nn.Sequential(nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Conv1d(2, 1, 2)), torch.ones(1, 5)
    none = ps.verify(network, x, spaces=ps.spaces(network, x))
    assert none.holds and none.spaces["holds"] is None and none.spaces["free"] == []


def test_spaces_of_another_model_are_refused() -> None:
    model, x = two(lambda x: x), torch.randn(4, 3)
    found = ps.spaces(two(lambda x: x, 5), x)
    skeleton = ps.trace(model, x).skeleton()
    with pytest.raises(
        InputError, match=r"verify found spaces with 15 scalars of the parameter 'a\.weight'"
    ):
        ps.verify(model, x, spaces=found)
    with pytest.raises(
        InputError, match=r"proof found spaces with 15 scalars of the parameter 'a\.weight'"
    ):
        ps.proof(skeleton, "net", found)
    with pytest.raises(TypeError, match=r"as ps\.spaces finds them"):
        ps.proof(skeleton, "net", found.free)


def test_the_command_writes_what_the_checker_judges(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\nfrom rotations.test_spaces import Llama\n"
        "def model():\n    return Llama(), (torch.randint(11, (2, 5)),)\n"
    )
    target, proof = f"{tmp_path}/net.py:model", f"{tmp_path}/proof.json"
    runner = CliRunner()
    done = runner.invoke(app, ["verify", target, "--spaces", "--proof", proof])
    assert done.exit_code == 0 and "Changes of basis keep the function: holds" in done.stdout
    alone, judged = (runner.invoke(app, ["check", proof, *more]) for more in ([], [target]))
    assert "Not seen: what the groups of 4 spaces do to outputs." in alone.stdout
    assert judged.exit_code == 0 and "changes of basis of dimension 66" in judged.stdout
